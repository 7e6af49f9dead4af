"""The fast tier gives up what the durable one has, and nothing else."""

from __future__ import annotations

import contextlib

import pytest

from ckpt.format.names import SnapshotName
from ckpt.history.catalog import read_history
from ckpt.history.keep import Keep
from ckpt.history.thinning import execute_thinning, plan_thinning
from ckpt.history.tiers import Tiers
from recovery.verify import verify
from storage_backends.base import Store
from storage_backends.memory import MemoryStore
from storage_backends.tiered import TieredStore
from tests.ckpt.history.making import FakeClock
from tests.support.faulty import Crash, FaultyStore, SwitchStore
from tests.support.stores import RUN, DirectWriter, drifting, flipped

STATES = drifting(5, rows=32)


def pair(*, copied: int = 5, ranks: int = 2) -> tuple[MemoryStore, MemoryStore, TieredStore]:
    """Five steps on the fast tier, the first `copied` of them on the durable one too."""
    fast, durable = MemoryStore("fast"), MemoryStore("durable")
    store = TieredStore(fast, durable, keep_fast=None)
    writer = DirectWriter(store, ranks=ranks, chunk=4096, deltas=False, blobs_per_pack=2)
    writer.begin()
    for n, state in enumerate(STATES):
        if n == copied:
            Tiers(store, FakeClock(), 0, 1).catch_up(RUN)
        writer.step(10 * (n + 1), state)
    if copied == len(STATES):
        Tiers(store, FakeClock(), 0, 1).catch_up(RUN)
    return fast, durable, store


def steps(store: Store) -> list[int]:
    return sorted(id_.step for id_ in read_history(store).snapshots)


def errors(store: Store) -> list[str]:
    return [finding.text for finding in verify(store, deep=True, threads=1) if finding.level == "error"]


@pytest.mark.parametrize("last", [1, 2, 5])
def test_the_newest_stay_with_all_they_need_and_the_rest_goes(last: int) -> None:
    fast, durable, store = pair()
    held = len(durable.list(""))
    plan = plan_thinning(store, Keep(last=last))
    assert [id_.step for id_ in plan.snapshots] == [10, 20, 30, 40, 50][: 5 - last]
    before = sum(entry.size for entry in fast.list(""))
    execute_thinning(plan, store)
    assert before - sum(entry.size for entry in fast.list("")) == plan.freed
    assert steps(fast) == [10, 20, 30, 40, 50][5 - last :]
    assert errors(fast) == errors(store) == []
    assert steps(store) == [10, 20, 30, 40, 50]
    assert len(durable.list("")) == held
    assert plan_thinning(store, Keep(last=last), orphans=True).keys == ()


def test_what_is_not_copied_stays_with_all_it_needs_whatever_is_asked() -> None:
    fast, durable, store = pair(copied=2)
    plan = plan_thinning(store, Keep(last=1))
    assert [id_.step for id_ in plan.snapshots] == [10, 20]
    assert {id_.step: why for id_, why in plan.kept.items()} == {
        30: "not yet on the durable tier",
        40: "not yet on the durable tier",
        50: "not yet on the durable tier",
    }
    execute_thinning(plan, store)
    assert errors(fast) == errors(store) == []
    assert steps(fast) == [30, 40, 50]
    assert steps(durable) == [10, 20]


def test_an_object_that_the_durable_tier_lacks_or_has_cut_short_stays() -> None:
    """Its snapshot is listed there, so it should be there; but the fast tier's may be the last copy of it."""
    fast, durable, store = pair()
    needed = {key for key, _ in read_history(fast).snapshots[max(read_history(fast).snapshots)].packs}
    packs = [entry.key for entry in durable.list("packs/") if entry.key not in needed]
    durable.delete(packs[:1])
    durable.put(packs[1], durable.get(packs[1])[:-1])
    execute_thinning(plan_thinning(store, Keep(last=1)), store)
    assert {entry.key for entry in fast.list("packs/")} - needed == set(packs[:2])


def test_a_document_that_cannot_be_read_stops_it() -> None:
    fast, _, store = pair()
    flipped(fast, SnapshotName(min(read_history(fast).snapshots)).key, 100)
    assert plan_thinning(store, Keep(last=1)).keys == ()


def test_killed_half_way_leaves_whole_snapshots_and_orphans_that_the_next_start_sweeps() -> None:
    for n in range(1, 100):
        fast, durable, store = pair(ranks=1)
        faulty = FaultyStore(fast, crash_at=n, verbs=frozenset({"delete"}))
        crashing = TieredStore(faulty, durable)
        plan = plan_thinning(crashing, Keep(last=1))
        with contextlib.suppress(Crash):
            execute_thinning(plan, crashing)
        assert errors(fast) == errors(store) == []
        plan = plan_thinning(store, Keep(last=1), orphans=True)
        execute_thinning(plan, store)
        assert steps(fast) == [50]
        needed = {key for key, _ in next(iter(read_history(fast).snapshots.values())).packs}
        assert {entry.key for entry in fast.list("packs/")} == needed
        if not faulty.fired:
            break
    assert n > 10, "the fault never fired: this test proves nothing"


def test_what_is_being_saved_is_no_orphan() -> None:
    fast, _, store = pair()
    writer = DirectWriter(fast, last=None)
    writer.step(60, STATES[0], commit=False)
    before = [entry.key for entry in fast.list("") if f"{60:012d}" in entry.key]
    execute_thinning(plan_thinning(store, Keep(last=1), orphans=True), store)
    assert [entry.key for entry in fast.list("") if f"{60:012d}" in entry.key] == before != []


def test_the_durable_tier_is_asked_only_for_the_steps_that_lose_something() -> None:
    fast, durable, _ = pair()
    watched = SwitchStore(durable)
    plan_thinning(TieredStore(fast, watched), Keep(last=4))
    assert len(watched.calls) <= 1 + 2  # its snapshots; packs and parts of the first step
    assert {verb for verb, _ in watched.calls} == {"list"}
