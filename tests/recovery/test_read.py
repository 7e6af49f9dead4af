"""Documents of a snapshot: revisions, digests, and what "not found" means."""

from __future__ import annotations

import msgspec
import pytest

from ckpt.errors import DamagedError, Unavailable
from ckpt.format.manifest import PartRef, seal
from ckpt.format.names import PartName, SnapshotName
from recovery.read import Missing, Pruned, check_part, open_snapshot, read_parts, verdict
from storage_backends.memory import MemoryStore
from tests.support.faulty import FaultyStore, LaggingStore
from tests.support.stores import drifting, flipped, make_store


def test_the_highest_readable_revision_counts() -> None:
    """PROTOCOL.md §5.5."""
    store = MemoryStore()
    [id_] = make_store(store, drifting(1))
    plain = open_snapshot(store, id_).snapshot
    for revision in (1, 2):
        store.put(SnapshotName(id_, revision).key, seal(msgspec.structs.replace(plain, revision=revision)))
    assert open_snapshot(store, id_).snapshot.revision == 2
    flipped(store, SnapshotName(id_, 2).key, 100)
    assert open_snapshot(store, id_).key == SnapshotName(id_, 1).key


def test_a_commit_that_the_listing_does_not_show_yet_is_opened() -> None:
    """C5, B4."""
    inner = MemoryStore()
    store = LaggingStore(inner, lag=1.0, now=lambda: 0.0)
    [id_] = make_store(store, drifting(1))
    assert open_snapshot(store, id_).id == id_
    assert store.hidden > 0


def test_a_snapshot_that_is_gone_was_pruned_and_one_that_is_cut_is_damaged() -> None:
    store = MemoryStore()
    [id_] = make_store(store, drifting(1))
    key = SnapshotName(id_).key
    data = store.get(key)
    store.put(key, data[:-20])
    with pytest.raises(DamagedError) as caught:
        open_snapshot(store, id_)
    assert (caught.value.key, caught.value.step) == (key, 10)
    store.delete([key])
    with pytest.raises(Pruned):
        open_snapshot(store, id_)


def test_a_snapshot_that_lies_under_anothers_name_is_damaged() -> None:
    store = MemoryStore()
    first, second = make_store(store, drifting(2))
    store.put(SnapshotName(second).key, store.get(SnapshotName(first).key))
    with pytest.raises(DamagedError, match="expected"):
        open_snapshot(store, second)


def test_parts_are_checked_against_the_snapshot() -> None:
    store = MemoryStore()
    [id_] = make_store(store, drifting(1), ranks=3)
    snapshot = open_snapshot(store, id_).snapshot
    assert list(read_parts(store, snapshot)) == [0, 1, 2]
    assert list(read_parts(store, snapshot, [2])) == [2]
    flipped(store, PartName(id_, 1).key, 77)
    with pytest.raises(DamagedError, match="digest") as caught:
        read_parts(store, snapshot)
    assert (caught.value.key, caught.value.step, caught.value.rank) == (PartName(id_, 1).key, 10, 1)
    assert list(read_parts(store, snapshot, [0, 2])) == [0, 2]


def test_a_part_of_another_step_is_refused_though_its_digest_holds() -> None:
    store = MemoryStore()
    first, second = make_store(store, drifting(2))
    snapshot = open_snapshot(store, second).snapshot
    data = store.get(PartName(first, 0).key)
    ref = PartRef(snapshot.parts[0].key, len(data), open_snapshot(store, first).snapshot.parts[0].digest)
    with pytest.raises(DamagedError, match="expected \\(snapshot, rank, world size\\)"):
        check_part(data, msgspec.structs.replace(snapshot, parts=(ref,)), 0)


def test_what_is_missing_is_damage_while_the_snapshot_stands_and_pruned_after() -> None:
    """D4, PROTOCOL.md §5.4."""
    store = MemoryStore()
    [id_] = make_store(store, drifting(1))
    opened = open_snapshot(store, id_)
    store.delete([PartName(id_, 0).key])
    with pytest.raises(Missing) as caught:
        read_parts(store, opened.snapshot)
    error = verdict(store, opened, caught.value)
    assert type(error) is DamagedError
    assert error.key == PartName(id_, 0).key
    store.delete([opened.key])
    assert isinstance(verdict(store, opened, caught.value), Pruned)


def test_whether_it_was_pruned_is_not_guessed_when_the_store_does_not_answer() -> None:
    store = MemoryStore()
    [id_] = make_store(store, drifting(1))
    opened = open_snapshot(store, id_)
    faulty = FaultyStore(store, fail_at=1, verbs=frozenset({"get"}))
    with pytest.raises(Unavailable):
        verdict(faulty, opened, Missing("gone", key="parts/x"))
    assert faulty.fired
