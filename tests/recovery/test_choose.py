"""Which snapshots are tried, and in which order."""

from __future__ import annotations

import pytest

from ckpt.errors import DamagedError, NoSnapshot, Unavailable
from ckpt.format.names import RunId, SnapshotId, SnapshotName, run_key
from recovery.choose import choose
from storage_backends.memory import MemoryStore
from tests.support.faulty import FaultyStore
from tests.support.stores import RUN, DirectWriter, drifting, flipped, make_store


def _branched() -> tuple[MemoryStore, list[SnapshotId], SnapshotId]:
    """10, 20, 30; then back to 10, and 15: 20 and 30 are abandoned."""
    store = MemoryStore()
    states = drifting(3)
    ids = make_store(store, states)
    again = DirectWriter(store, run=RunId(2, "00000002"))
    again.begin(resumed_from=ids[0])
    return store, ids, again.step(15, states[0])


def test_the_live_line_is_tried_newest_first_and_abandoned_steps_never_are() -> None:
    """D2, E4."""
    store, ids, newest = _branched()
    assert choose(store, None).candidates == (newest, ids[0])
    assert choose(store, "latest").candidates == (newest, ids[0])


def test_an_abandoned_step_can_be_named() -> None:
    store, ids, _ = _branched()
    choice = choose(store, 30)
    assert (choice.candidates, choice.named) == ((ids[2],), True)


def test_an_empty_store_has_no_candidates_and_an_unknown_step_is_an_error() -> None:
    assert choose(MemoryStore(), None).candidates == ()
    with pytest.raises(NoSnapshot):
        choose(MemoryStore(), 10)


def test_a_newer_snapshot_whose_document_is_damaged_is_reported_as_passed_over() -> None:
    store = MemoryStore()
    ids = make_store(store, drifting(3))
    flipped(store, SnapshotName(ids[2]).key, 50)
    choice = choose(store, None)
    assert choice.candidates == (ids[1], ids[0])
    [(id_, reason)] = choice.unreadable
    assert id_ == ids[2]
    assert "digest" in reason
    with pytest.raises(DamagedError, match="digest"):
        choose(store, 30)


def test_a_store_of_which_nothing_can_be_read_is_damaged_never_empty() -> None:
    store = MemoryStore()
    ids = make_store(store, drifting(2))
    for id_ in ids:
        flipped(store, SnapshotName(id_).key, 50)
    with pytest.raises(DamagedError, match="fresh=True") as caught:
        choose(store, None)
    assert caught.value.step == 20


def test_with_an_unreadable_run_document_every_older_snapshot_may_follow() -> None:
    store, ids, newest = _branched()
    flipped(store, run_key(newest.run), 50)
    assert choose(store, None).candidates == (newest, ids[2], ids[1], ids[0])
    assert newest.run > RUN


def test_could_not_list_is_never_empty() -> None:
    """M3."""
    store = MemoryStore()
    make_store(store, drifting(1))
    faulty = FaultyStore(store, fail_at=1, verbs=frozenset({"list"}))
    with pytest.raises(Unavailable):
        choose(faulty, None)
    assert faulty.fired
