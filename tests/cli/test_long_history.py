"""A thousand snapshots of eight ranks: what `list`, `show` and `diff` ask the store for, counted."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
from msgspec.structs import replace

from ckpt.cli import main
from ckpt.format.manifest import PartRef, Snapshot, digest128, seal, unseal
from ckpt.format.names import PACKS, PARTS, PINS, RUNS, SNAPSHOTS, PartName, SnapshotId, SnapshotName
from recovery.looking import History
from storage_backends.memory import MemoryStore
from tests.support.faulty import FaultyStore
from tests.support.stores import RUN, DirectWriter

STEPS, RANKS = 1000, 8
LISTINGS = {RUNS, PARTS, SNAPSHOTS, PINS}


class Counted(FaultyStore):
    """Counts the bytes that are read, too."""

    read = 0

    def _call(self, verb: str, key: str, do: Callable[[], object]) -> object:  # type: ignore[override]
        answer = super()._call(verb, key, do)
        if isinstance(answer, bytes):
            self.read += len(answer)
        return answer

    def gets(self, prefix: str) -> int:
        return sum(verb.startswith("get") and key.startswith(prefix) for verb, key in self.calls)


@cache
def made() -> MemoryStore:
    """The first and the last two steps are real: between the last two, only a value of one leaf has changed. Those in
    the midst have documents that say so of them; their parts are there, and nobody may read them."""
    store = MemoryStore()
    writer = DirectWriter(store, ranks=RANKS, chunk=4096)
    writer.begin()
    state = {"model.still": np.arange(40_000, dtype=np.float32), "model.moving": np.zeros(4000, np.float32)}
    real = writer.step(1, state)
    snapshot = unseal(store.get(SnapshotName(real).key), Snapshot, key="")
    for step in range(2, STEPS - 1):
        id_ = SnapshotId(RUN, step)
        refs = tuple(PartRef(PartName(id_, rank).key, 1, digest128(b"x")) for rank in range(RANKS))
        for ref in refs:
            store.put(ref.key, b"x")
        store.put(SnapshotName(id_).key, seal(replace(snapshot, step=step, parts=refs, metrics={"loss": 1 / step})))
    writer.step(STEPS - 1, state)
    writer.step(STEPS, {**state, "model.moving": np.ones(4000, np.float32)})
    return store


def documents(store: MemoryStore) -> int:
    return sum(e.size for prefix in (RUNS, SNAPSHOTS, PINS) for e in store.list(prefix))


def parts(store: MemoryStore, *steps: int) -> int:
    return sum(e.size for step in steps for e in store.list(f"{PARTS}{RUN}/{step:012d}/"))


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    store = Counted(made())
    for verb in ("list_", "show", "diff"):
        monkeypatch.setattr(f"ckpt.cli.{verb}.open_url", lambda *_: store)
    return store


def test_list_reads_each_document_once_and_no_part_and_no_pack(
    counted: Counted, capsys: pytest.CaptureFixture[str]
) -> None:
    """M11."""
    assert main(["list", "memory:", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["snapshots"]) == STEPS
    assert {key for verb, key in counted.calls if verb == "list"} == LISTINGS | {"journal/"}
    assert len(counted.calls) == len(LISTINGS) + 1 + STEPS + 1
    assert counted.gets(PARTS) == counted.gets(PACKS) == 0
    assert counted.read == documents(made())
    assert counted.read < 2500 * STEPS, "a snapshot of eight ranks is small"


def test_show_reads_the_parts_of_one_snapshot_besides(counted: Counted, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "memory:", str(STEPS)]) == 0
    assert "model.still" in capsys.readouterr().out
    assert counted.gets(PARTS) == RANKS
    assert counted.gets(PACKS) == 0
    assert len(counted.calls) == len(LISTINGS) + STEPS + 1 + RANKS + 2  # one snapshot anew, and where it is
    assert counted.read <= documents(made()) + parts(made(), STEPS) + 2500


def test_diff_reads_two_steps_and_of_the_packs_only_what_has_changed(
    counted: Counted, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diff", "memory:", "1", str(STEPS - 1)]) == 0
    assert "2 unchanged" in capsys.readouterr().out
    assert counted.gets(PARTS) == 2 * RANKS
    assert counted.gets(PACKS) == 0
    before = len(counted.calls), counted.read
    assert before[0] == len(LISTINGS) + STEPS + 1 + 2 * (RANKS + 2)
    assert before[1] <= documents(made()) + parts(made(), 1, STEPS - 1) + 2 * 2500
    assert main(["diff", "memory:", str(STEPS - 1), str(STEPS), "--only", "model.still"]) == 0
    assert counted.gets(PACKS) == 0
    assert main(["diff", "memory:", str(STEPS - 1), str(STEPS)]) == 0
    assert 0 < counted.gets(PACKS) <= 4 * RANKS
    assert "1 changed" in capsys.readouterr().out


def test_a_history_that_stays_open_reads_no_document_twice(counted: Counted) -> None:
    history = History(counted)
    assert len(history.list()) == STEPS
    counted.calls.clear()
    assert len(history.list()) == STEPS
    newest = history.newest()
    assert newest is not None
    assert newest.step == STEPS
    assert counted.count("get", "get_range") == 0
    assert counted.count("list") == 2 * len(LISTINGS)
