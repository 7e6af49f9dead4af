"""What a store tells of its history: saves, starts, recoveries."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ckpt.format.manifest import FORMAT, RunDoc, seal, unseal
from ckpt.format.names import RunId, SegmentName, SnapshotId, run_key
from ckpt.history.catalog import read_history
from recovery.chronicle import chronicle
from recovery.journaled import covered
from storage_backends.memory import MemoryStore
from tests.cli.living import NEXT, pin, restate, two_lines
from tests.support.stores import RUN, DirectWriter

STATE = {"w": np.arange(64.0)}


def test_saves_come_in_the_order_of_history_with_pins_and_what_they_cost(tmp_path: Path) -> None:
    store, ids = two_lines(tmp_path)
    pin(store, "good", ids[1])
    restate(store, ids[0], blocked=0.25)
    restate(store, ids[1], blocked=0.5, durable=(500, 2.0))
    restate(store, ids[4], durable=(500, 9.0))  # of the second run, which has no step 500
    told = chronicle(read_history(store))
    assert [(save.id, save.listed.abandoned, save.listed.pins) for save in told.saves] == [
        (ids[0], False, ()), (ids[1], True, ("good",)), (ids[2], True, ()), (ids[3], False, ()), (ids[4], False, ()),
    ]  # fmt: skip
    assert [(save.blocked, save.durable) for save in told.saves[:3]] == [(0.25, 2.0), (0.5, None), (None, None)]
    assert all(save.durable is None for save in told.saves[1:])
    assert told.newest == ids[4] and told.stored == sum(save.listed.stored for save in told.saves)
    assert told.held > 0 and told.full == 5 * 64 * 8


def test_a_recovery_says_from_where_and_what_was_given_up(tmp_path: Path) -> None:
    """Three snapshots; the job went back from 700 to 500, two saved steps were for nothing, and half a third one."""
    store, ids = two_lines(tmp_path)
    [recovery] = chronicle(read_history(store)).recoveries
    assert (recovery.run, recovery.source, recovery.step) == (NEXT, RUN, 500)
    assert (recovery.reached, recovery.lost, recovery.usual) == (700, 200, 100)
    assert (recovery.ranks_before, recovery.ranks) == (1, 1)
    DirectWriter(store, last=ids[2]).step(750, STATE, commit=False)
    [recovery] = chronicle(read_history(store)).recoveries
    assert (recovery.reached, recovery.lost) == (750, 250), "the parts of a save that a crash cut off tell, too"


def test_lines_know_how_far_they_came_though_their_snapshots_were_pruned(tmp_path: Path) -> None:
    store, ids = two_lines(tmp_path)
    for id_ in ids[:3]:
        store.delete([f"snapshots/{id_}.json"])
        store.delete([entry.key for entry in store.list(f"parts/{id_.run}/{id_.step:012}/")])
    told = chronicle(read_history(store))
    first, second = told.lines
    assert (first.run, first.steps, first.reached, first.live) == (RUN, (), 500, True)
    assert (second.begins, second.steps, second.reached, second.live) == (500, (510, 600), 600, True)
    [recovery] = told.recoveries
    assert (recovery.lost, recovery.usual) == (0, None)


def test_another_number_of_ranks_is_told() -> None:
    store = MemoryStore()
    four, two = DirectWriter(store, ranks=4), DirectWriter(store, run=NEXT, ranks=2)
    four.begin()
    source = four.step(10, STATE)
    two.begin(resumed_from=source)
    two.step(20, STATE)
    [recovery] = chronicle(read_history(store)).recoveries
    assert (recovery.ranks_before, recovery.ranks) == (4, 2)


def test_documents_that_cannot_be_read_or_lie_make_no_circle() -> None:
    store = MemoryStore()
    later = RunId(2, "0ddba11e")
    for run in (RUN, later):
        DirectWriter(store, run=run).begin()
        key = run_key(run)
        document = unseal(store.get(key), RunDoc, key=key)
        other = SnapshotId(later if run == RUN else RUN, 10)
        store.put(key, seal(RunDoc(*(getattr(document, f) for f in RunDoc.__struct_fields__[:10]), str(other), {})))
    DirectWriter(store, run=later).step(10, STATE)
    assert len(chronicle(read_history(store)).lines) == 2
    store.put(run_key(later), b"not a document")
    told = chronicle(read_history(store))
    assert told.problems == 1
    line = next(line for line in told.lines if line.run == later)
    assert (line.started, line.host, line.world_size, line.steps) == (None, None, 1, (10,))


def test_an_empty_store_has_no_story() -> None:
    told = chronicle(read_history(MemoryStore()))
    assert (told.saves, told.lines, told.recoveries, told.newest, told.held) == ((), (), (), None, 0)
    assert FORMAT == 1


def test_what_a_journal_brings_back_was_not_lost(tmp_path: Path) -> None:
    store, _ = two_lines(tmp_path)
    for first, last in ((500, 650), (650, 703)):
        store.put(SegmentName(RUN, 0, first, last).key, b"of segments only names are looked at")
    history = read_history(store)
    told = chronicle(history, covered(store, history))
    [recovery] = told.recoveries
    assert (recovery.step, recovery.journaled, recovery.reached, recovery.lost) == (500, 703, 703, 0)
    assert told.lines[0].reached == 703
