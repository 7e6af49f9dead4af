"""A crash at every call that a journaled job makes to its store: no completed step is lost, and no state that was never
trained comes back. Prunes and compaction beside it."""

from __future__ import annotations

import contextlib
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch

import ckpt
from ckpt.errors import CheckpointError
from ckpt.format.names import RunId
from ckpt.history.catalog import read_history
from ckpt.history.clock import SystemClock
from ckpt.history.retention import execute, plan_prune
from ckpt.saving import segments
from recovery.compact import compact
from recovery.compaction import plan_compact
from storage_backends.base import Refused, StorageError, Store
from storage_backends.memory import MemoryStore
from tests.support.faulty import WRITES, Crash, FaultyStore
from tests.support.journals import EVERY_STEP, QUIET, job, recording, unhurt
from tests.support.stores import DirectWriter
from tests.support.training import Training

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*step .* was not saved:RuntimeWarning"),
    pytest.mark.usefixtures("no_noise"),
]

TOTAL = 9


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "PAUSES", (0.0,))


@pytest.fixture(scope="module")
def trained() -> dict[int, dict[str, bytes]]:
    """The state after every step of a training that nothing happens to."""
    training, found = Training(), {}
    for step in range(TOTAL):
        found[step] = training.bytes()
        training.train(step)
    return found | {TOTAL: training.bytes()}


def life(store: FaultyStore) -> int:
    """Train to the end, or to the crash; the last step that was complete before it."""
    training = Training()
    completed = 0
    saver = None
    with contextlib.suppress(Crash, StorageError, CheckpointError):
        saver = ckpt.Checkpointer(store, training.state, every=4, journal=EVERY_STEP, mirror="off", options=QUIET)
        for step in range(saver.restore(), TOTAL):
            training.train(step)
            saver.step(step + 1)
            completed = completed if store.fired else step + 1
    if saver is not None:
        with contextlib.suppress(Crash, StorageError, CheckpointError):
            saver.close()
    return completed


def copied(store: Store) -> MemoryStore:
    other = MemoryStore()
    for entry in store.list(""):
        other.put(entry.key, store.get(entry.key))
    return other


@pytest.mark.parametrize("lands", [False, True])
def test_a_crash_at_any_call_loses_no_completed_step(lands: bool, trained: dict[int, dict[str, bytes]]) -> None:
    struck: set[tuple[str, str]] = set()
    fault: dict[str, Any] = {"lands": True, "verbs": WRITES} if lands else {}
    for n in count(1):
        store = FaultyStore(MemoryStore(), crash_at=n, where=lambda key: not key.startswith("alive/"), **fault)
        completed = life(store)
        if not store.fired:
            assert completed == TOTAL
            break
        assert store.struck is not None
        struck.add((store.struck[0], store.struck[1].partition("/")[0]))
        again = Training(seed=8)
        with ckpt.Checkpointer(store.survived(), again.state, journal=EVERY_STEP, mirror="off", options=QUIET) as saver:
            start = saver.restore()
        assert completed <= start <= completed + 1, (n, store.struck)
        if start or completed:
            assert again.bytes() == trained[start], (n, store.struck)
    assert n > (20 if lands else 25) and struck >= {("put", "journal"), ("put", "packs"), ("put", "snapshots")}


def test_a_put_that_fails_is_made_again_and_no_step_is_lost(trained: dict[int, dict[str, bytes]]) -> None:
    for n in range(1, 12):
        store = FaultyStore(
            MemoryStore(),
            fail_at=n,
            lands=n % 2 == 0,
            verbs=frozenset({"put"}),
            where=lambda key: key.startswith("journal/"),
        )
        assert life(store) in range(TOTAL + 1)
        assert store.fired == (n <= TOTAL)
        again = Training(seed=8)
        assert ckpt.load_into(store.survived(), {"model": again.model}, step=TOTAL).step == TOTAL
        assert all(again.bytes()[name] == trained[TOTAL][name] for name in again.model.state_dict())


def test_a_store_that_takes_no_records_pauses_the_journal_and_snapshots_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from ckpt.saving import journal

    monkeypatch.setattr(journal, "PATIENCE", 0.2)
    store = FaultyStore(
        MemoryStore(), fail_at=6, for_ever=True, error=Refused, verbs=frozenset({"put"}),
        where=lambda key: key.startswith("journal/"),
    )  # fmt: skip
    training = Training()
    saver = ckpt.Checkpointer(store, training.state, every=4, journal=EVERY_STEP, mirror="off", options=QUIET)
    for step in range(saver.restore(), TOTAL):
        training.train(step)
        saver.step(step + 1)
    stats = saver.stats.journal
    assert stats is not None and stats.off is not None and "is not durable after" in stats.off
    saver.close()
    assert [id_.step for id_ in sorted(read_history(store.survived()).snapshots)] == [0, 4, 8]


def test_a_prune_takes_segments_with_the_snapshot_they_extend_and_no_others(
    trained: dict[int, dict[str, bytes]],
) -> None:
    store = MemoryStore()
    job(store, Training(), TOTAL, every=3)
    plan = plan_prune(store, ckpt.Keep(last=1), grace=0)
    assert plan.segments and set(plan.segments) <= set(plan.keys)
    execute(plan, store, clock=SystemClock())
    left = sorted(int(entry.key.rsplit("/", 1)[1].split("-")[0]) for entry in store.list("journal/"))
    kept = {id_.step for id_ in read_history(store).snapshots}
    assert left == [n for n in range(TOTAL) if max((s for s in range(0, TOTAL + 1, 3) if s <= n), default=0) in kept]
    for step in left:
        found = ckpt.load(store, step=step + 1, names="model.*")
        assert found["model.out.weight"].numpy().tobytes() == trained[step + 1]["out.weight"]
    again = Training(seed=8)
    saver = job(store, again, TOTAL)
    assert saver.restored is not None and saver.restored.step == TOTAL
    assert recording(again) == recording(unhurt(TOTAL))


def test_a_crash_at_any_removal_of_a_prune_leaves_every_step_whole_or_gone(
    trained: dict[int, dict[str, bytes]],
) -> None:
    whole = MemoryStore()
    job(whole, Training(), TOTAL, every=3)
    for n in count(1):
        store = FaultyStore(copied(whole), crash_at=n, verbs=frozenset({"put", "delete"}))
        with contextlib.suppress(Crash):
            execute(plan_prune(store, ckpt.Keep(last=1), grace=0), store, clock=SystemClock(), threads=1)
        again = Training(seed=8)
        saver = job(store.survived(), again, TOTAL)
        assert saver.restored is not None and saver.restored.step == TOTAL
        assert again.bytes() == trained[TOTAL]
        if not store.fired:
            break
    assert n > 8


class Tabled(Training):
    """With a table of which each step changes a few rows, so that its snapshots lean on a pack whose rest is dead."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.randn(20_000, generator=torch.Generator().manual_seed(0))
        self.noise = torch.zeros(20_000)

    @property
    def state(self) -> dict[str, object]:
        return {**super().state, "table": self.table, "noise": self.noise}

    def train(self, step: int) -> float:
        self.table[step::1000] += 1
        self.noise.normal_(generator=torch.Generator().manual_seed(step))
        return super().train(step)


def test_a_compaction_beside_the_journal_changes_no_step() -> None:
    store = MemoryStore()
    seen: dict[int, bytes] = {}
    training = Tabled()
    job(store, training, TOTAL, every=3, each=lambda step: seen.update({step: training.table.numpy().tobytes()}))
    last = DirectWriter(store, run=RunId(3, "deadbeef"))  # nobody leans on the first run any more
    last.begin()
    last.step(10_000, {"w": np.zeros(3)})
    gone = [id_ for id_ in read_history(store).snapshots if id_.run.generation == 1 and id_.step in (0, 3)]
    execute(plan_prune(store, ckpt.Keep(), grace=0, remove=gone), store, clock=SystemClock())
    assert compact(plan_compact(store, threshold=1.0), store, grace=0).snapshots
    for step in range(6, TOTAL + 1):
        assert ckpt.load(store, step=f"1/{step}", names="table")["table"].numpy().tobytes() == seen[step]
