"""`scripts/fault_storm.py` in small, and that it would notice: a checker that finds nothing may be broken."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import ckpt
from ckpt.format.names import RunId, SnapshotId, SnapshotName
from ckpt.history.catalog import read_history
from ckpt.history.runs import newest_run
from scripts import fault_storm
from scripts.storm.faults import KINDS, StormyStore, Weather
from scripts.storm.law import Subject, lawful, wrong_loaded
from scripts.storm.watch import Watch
from storage_backends import LocalStore, MemoryStore, Refused, StorageError, Store, Unavailable

CAMPAIGN = pytest.param(200, marks=[pytest.mark.campaign, pytest.mark.timeout(7200)])


@pytest.mark.e2e
@pytest.mark.parametrize("rounds", [3, CAMPAIGN])
def test_a_storm_on_a_folder_loses_nothing(rounds: int, capsys: pytest.CaptureFixture[str]) -> None:
    code = fault_storm.main(["local", "--rounds", str(rounds), "--minutes", "110", "--seed", "4", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert code == 0, found
    assert (found["losses"], found["wrong bits"], found["hangs"], found["broken"]) == ([], [], [], [])
    assert found["rounds"] == rounds
    assert found["commits"] >= rounds, "hardly anything was saved: this proves nothing"
    assert found["kills"] >= rounds // 2


@pytest.mark.e2e
@pytest.mark.servers
@pytest.mark.parametrize("kind", ["swift", "weed", "sftp"])
def test_a_storm_on_a_server_that_is_killed_and_cut_off_loses_nothing(kind: str) -> None:
    found = fault_storm.storm(kind, seed=5, ranks=2, rounds=3, minutes=2, acts=("server", "network", "kill all"))
    assert (found["losses"], found["wrong bits"], found["hangs"], found["broken"]) == ([], [], [], [])
    assert found["commits"]


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[Store]:
    """Three steps of the storm's job, as one rank saves them."""
    store = LocalStore(tmp_path)
    subject = Subject(0, 1, None)
    with ckpt.Checkpointer(store, subject.state, mirror="off") as saver:
        saver.restore()
        subject.begin(saver.state, 0, 1)
        for step in (1, 2, 3):
            subject.train(step, saver.state)
            saver.save(step).wait(60)
    yield store


def watching(store: Store) -> Watch:
    watch = Watch(str)
    watch.told = read_history(store).newest
    return watch


def test_a_store_that_is_as_it_should_be_is_found_well(stored: Store) -> None:
    watch = watching(stored)
    watch.check(stored, random.Random(0), deep=True)
    watch.sweep(stored)
    assert watch.well, watch
    assert watch.counts["loads"] == 3


def test_the_storm_notices_that_the_newest_snapshot_is_gone(stored: Store) -> None:
    watch = watching(stored)
    assert watch.told is not None
    stored.delete([SnapshotName(watch.told).key])
    watch.check(stored, random.Random(0), deep=False)
    assert len(watch.losses) == 1
    watch.hear([f"restored {read_history(stored).newest} 2 1"], watch.told)
    assert len(watch.losses) == 2
    watch.hear(["restored None 0"], watch.told)
    assert len(watch.losses) == 3


def test_the_storm_notices_a_pack_with_one_wrong_bit(stored: Store) -> None:
    watch = watching(stored)
    key = next(entry.key for entry in stored.list("packs/"))
    data = bytearray(stored.get(key))
    data[-1] ^= 1
    stored.put(key, bytes(data))
    watch.check(stored, random.Random(0), deep=True)
    assert any("is listed, and damaged" in text for text in watch.losses)
    assert any(text.startswith("verify: ") and key in text for text in watch.losses)


def test_the_storm_notices_state_that_is_not_the_laws(tmp_path: Path) -> None:
    """One bit of one leaf, and a value; saved without a fault."""
    store = LocalStore(tmp_path)
    subject = Subject(0, 1, None)
    with ckpt.Checkpointer(store, subject.state, mirror="off") as saver:
        saver.restore()
        subject.begin(saver.state, 0, 1)
        subject.train(1, saver.state)
        assert subject.wrong(saver.state, 1) == []
        subject.tensors["sparse"][7] ^= 1
        saver.state["name"] = "another"
        saver.save(1)
        assert subject.wrong(saver.state, 1) == ["name", "sparse"]
    watch = watching(store)
    watch.check(store, random.Random(0), deep=True)
    assert watch.losses == []
    [text] = watch.wrong
    assert text.endswith(": name sparse")


def test_the_storm_notices_what_is_left_over(stored: Store) -> None:
    watch = watching(stored)
    newest = newest_run(stored)
    assert newest is not None
    orphan = f"packs/{replace(newest, nonce='0badcafe')}/000000000009/00000-000-{'0' * 16}.safetensors"
    kept, real = f"packs/{newest}/000000000009/00000-000-{'0' * 16}.safetensors", stored.delete
    stored.put(orphan, b"")
    stored.put(kept, b"")
    stored.delete = lambda keys: real([key for key in keys if key != orphan])  # type: ignore[method-assign]
    watch.sweep(stored)
    [text] = watch.broken
    assert orphan in text
    assert kept not in text, "of the newest run: nobody can know that it will not be committed"


def test_a_state_that_mixes_two_starts_of_the_job_is_none_that_the_law_knows() -> None:
    """Both have trained step 3 of the same line."""
    mine, theirs = (lawful(((0, 1), (2, mark)), 3, 1) for mark in (2, 3))
    for name in ("dense", "sparse", "rows", "own@rank0"):
        assert not np.array_equal(mine[name].view(np.uint32), theirs[name].view(np.uint32)), name
    loaded = {
        **{name: value for name, value in mine.items() if name != "tiny"},
        **{f"tiny.{name}": value for name, value in mine["tiny"].items()},
        "own": mine["own@rank0"],
    }
    loaded = {k: torch.from_numpy(np.array(v)) if isinstance(v, np.ndarray) else v for k, v in loaded.items()}
    assert wrong_loaded(loaded, 3) == []
    assert wrong_loaded({**loaded, "path": [[0, 1], [2, 3]]}, 3) != []
    with pytest.raises(ValueError, match="no job has gone"):
        wrong_loaded({**loaded, "path": [[0, 2], [2, 1]]}, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_fault_happens_and_does_what_it_says(kind: str) -> None:
    inner, seen = MemoryStore(), list[str]()
    store = StormyStore(inner, Weather({kind: 1.0}, outage_s=60.0), random.Random(0), seen.append)
    failed: StorageError | None = None
    try:
        store.put("packs/x", b"1234")
    except StorageError as error:
        failed = error
    assert seen == [kind]
    assert isinstance(failed, Refused if kind == "refused" else Unavailable) != (kind == "slow")
    there = {entry.key: inner.get(entry.key) for entry in inner.list("")}
    expected = {"lands": b"1234", "torn": b"12", "slow": b"1234"}.get(kind)
    if kind != "late":  # which may have landed by now
        assert there == ({} if expected is None else {"packs/x": expected})


def test_what_a_rank_says_is_counted() -> None:
    watch = Watch(str)
    id_ = SnapshotId(RunId(2, "0badcafe"), 7)
    watch.hear([f"told {id_}", "fault torn", "fault torn", "wrong restored 3: dense", "broken x", "a warning"], None)
    assert watch.told == id_
    assert watch.counts["fault: torn"] == 2
    assert (watch.wrong, watch.broken, watch.well) == (["restored 3: dense"], ["x"], False)
