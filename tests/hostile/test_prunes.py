"""Announcements, pins and snapshots that mean to make a prune remove what is not theirs."""

from __future__ import annotations

from typing import Any

import pytest

from ckpt.errors import NoSnapshot
from ckpt.format.names import PINS, PRUNES, PackName, PartName, RunId, SnapshotId, SnapshotName, run_key
from ckpt.history.catalog import read_history
from ckpt.history.clock import SystemClock
from ckpt.history.pins import pin, unpin
from ckpt.history.retention import Keep, Pruned, execute, plan_prune
from storage_backends.base import Store
from storage_backends.local import LocalStore
from storage_backends.memory import MemoryStore
from tests.ckpt.history.making import part_bytes, put_keyframes, put_pack, put_run, put_step, shares
from tests.hostile.forging import forge_snapshot, sealed, victim
from tests.support.stores import RUN

NEXT = RunId(2, "0ddba11e")


def prune(store: Store, keep: Keep | None = None, **settings: Any) -> Pruned:
    plan = plan_prune(store, keep or Keep(), grace=0, **settings)
    return execute(plan, store, clock=SystemClock())


def keys(store: Store) -> set[str]:
    return {entry.key for entry in store.list("")}


def announce(store: Store, *named: str, snapshots: tuple[str, ...] = ()) -> None:
    store.put(f"{PRUNES}0bad.json", sealed({"format": 1, "snapshots": snapshots, "keys": named}))


OUTSIDE = [
    "../outside", "/etc/passwd", "packs/../../outside", "store.json", f"runs/{RUN}.json", "pins/good.json",
    "alive/x.json", "prunes/0bad.json", "notes.txt", "packs/", "", "a\0b", "x" * 10_000, "packs/*", "snapshots/",
]  # fmt: skip


@pytest.mark.parametrize("key", OUTSIDE, ids=lambda key: repr(key[:20]))
def test_an_announcement_removes_nothing_that_is_no_snapshot_part_or_pack(key: str) -> None:
    """CASES.md, hostile stores: a prune finishes what an earlier one announced, and nothing else."""
    store = MemoryStore()
    ids = victim(store)
    store.put(f"{PINS}good.json", sealed({"format": 1, "name": "good", "snapshot": str(ids[0])}))
    store.put("notes.txt", b"mine")
    before = keys(store)
    announce(store, key)
    assert prune(store).keys == ()
    assert keys(store) >= before
    assert set(read_history(store).snapshots) == set(ids)


def test_what_lies_beside_a_local_store_is_out_of_reach(tmp_path: Any) -> None:
    store = LocalStore(tmp_path / "store")
    victim(store)
    outside = tmp_path / "outside"
    outside.write_text("mine")
    announce(store, "../outside", "packs/../../outside", str(outside))
    prune(store, Keep(last=1))
    assert outside.read_text() == "mine"


def test_an_announcement_cannot_take_the_newest_snapshot_nor_a_pinned_one_nor_what_they_need() -> None:
    store = MemoryStore()
    ids = victim(store)
    store.put(f"{PINS}good.json", sealed({"format": 1, "name": "good", "snapshot": str(ids[0])}))
    before = keys(store)
    named = [key for key in before if key.startswith(("snapshots/", "parts/", "packs/"))]
    announce(store, *named, snapshots=tuple(map(str, ids)))
    assert prune(store).keys == ()
    assert keys(store) >= before


def test_a_snapshot_that_goes_takes_no_snapshot_pin_or_run_with_it() -> None:
    """Its document names, as its parts and packs, what a prune must not touch: it is not read as a snapshot at all,
    and while it is there nothing is removed; removed by name, it goes alone."""
    store = MemoryStore()
    ids = victim(store)
    pin_ = f"{PINS}good.json"
    store.put(pin_, sealed({"format": 1, "name": "good", "snapshot": str(ids[1])}))
    precious = [SnapshotName(ids[1]).key, pin_, run_key(RUN), "store.json", "../outside"]
    forge_snapshot(store, ids[0], lambda tree: tree.update(packs=[[key, 1] for key in precious]))
    before = keys(store)
    assert prune(store, Keep(last=1)).keys == ()
    assert keys(store) == before
    done = prune(store, remove=[ids[0]])
    assert SnapshotName(ids[0]).key in done.keys
    assert not set(precious) & set(done.keys)
    assert set(precious[:-1]) <= keys(store)


def test_a_snapshot_that_goes_takes_nothing_of_a_step_that_is_being_saved() -> None:
    """It names the pack of a step in the making, which no snapshot protects yet. So does an announcement."""
    store = MemoryStore()
    put_run(store, RUN)
    ids = [put_step(store, SnapshotId(RUN, step)) for step in (10, 20, 30)]
    making = SnapshotId(RUN, 40)
    pack, length = put_pack(store, making, 0)
    part = PartName(making, 0).key
    store.put(part, part_bytes(making, 0, shares(1)[0], [(pack, length)]))
    forge_snapshot(store, SnapshotId(RUN, 10), lambda tree: tree["packs"].append([pack, length]))
    announce(store, pack, part)
    done = prune(store, Keep(last=1))
    assert SnapshotName(SnapshotId(RUN, 10)).key in done.keys, ids
    assert {pack, part} <= keys(store)


def test_an_announcement_that_cannot_be_read_removes_nothing_and_is_told() -> None:
    store = MemoryStore()
    victim(store)
    for number, data in enumerate([b"", b"[" * 100_000, sealed(b"[" * 100_000), sealed({"format": 1, "keys": 7})]):
        store.put(f"{PRUNES}{number}.json", data)
    before = keys(store)
    plan = plan_prune(store, Keep(), grace=0)
    assert sum("what it announced is not finished" in note for note in plan.notes) == 4
    assert execute(plan, store, clock=SystemClock()).keys == ()
    assert keys(store) == before


@pytest.mark.parametrize("name", ["../x", "a/b", "/etc/passwd", "", ".", "..", "a\0b", "x" * 101, "a b", "$(id)"])
def test_a_pin_has_no_name_that_leads_elsewhere(name: str) -> None:
    store = MemoryStore()
    ids = victim(store)
    before = keys(store)
    with pytest.raises(ValueError, match="expected 1-100 letters"):
        pin(store, read_history(store), name, ids[0])
    with pytest.raises((ValueError, NoSnapshot)):
        unpin(store, name)
    assert keys(store) == before


def test_a_pin_of_nothing_protects_nothing_and_stops_nothing() -> None:
    store = MemoryStore()
    put_run(store, RUN)
    ids = put_keyframes(store, RUN, [10, 20])
    for name, snapshot in (("gone", f"{NEXT}-{7:012d}"), ("odd", "../../../etc")):
        store.put(f"{PINS}{name}.json", sealed({"format": 1, "name": name, "snapshot": snapshot}))
    assert [p.key for p in read_history(store).problems] == ["pins/odd.json"]
    unpin(store, "odd")
    done = prune(store, Keep(last=1))
    assert SnapshotName(ids[0]).key in done.keys
    assert PackName.parse(done.keys[-1]) is not None
    assert PartName.parse(done.keys[1]) is not None
