"""Places of a fan-out are brought level."""

from __future__ import annotations

import contextlib

import pytest

from ckpt.format.manifest import FORMAT, PruneDoc, seal
from ckpt.format.names import alive_key, prune_key
from ckpt.history.levelling import Levelling, uneven
from storage_backends.base import Store, Unavailable
from storage_backends.fanout import FanoutStore
from storage_backends.memory import MemoryStore
from tests.support.faulty import Crash, FaultyStore, GateStore, SwitchStore
from tests.support.stores import RUN, drifting, flipped, make_store


def contents(store: Store) -> dict[str, bytes]:
    return {entry.key: store.get(entry.key) for entry in store.list("")}


def missed(at_least: int | None = None) -> tuple[list[SwitchStore], FanoutStore]:
    """Two places, the second of which missed every object of two steps, and answers again."""
    places = [SwitchStore(MemoryStore(name)) for name in "ab"]
    store = FanoutStore(*places, at_least=at_least)
    store.list("")
    places[1].fail(Unavailable, verb="put")
    make_store(store, drifting(2, rows=16))
    places[1].heal()
    places[1].calls.clear()
    return places, store


def test_what_was_missed_is_made_up_for_in_the_order_in_which_it_was_written() -> None:
    places, store = missed()
    assert contents(places[1]) == {}
    places[1].calls.clear()
    assert Levelling(store, first=False).catch_up(RUN) is None
    puts = [key for verb, key in places[1].calls if verb == "put"]
    assert puts == [key for verb, key in places[0].calls if verb == "put"]
    assert contents(places[1]) == contents(places[0])
    assert (store.missed(), store.away()) == ({}, ())


def test_a_place_that_is_still_away_is_named_and_left_alone() -> None:
    places, store = missed()
    places[1].fail(Unavailable, verb="list")
    late = Levelling(store, first=True).catch_up(RUN)
    assert late is not None and late.startswith("memory-store:b does not answer")
    assert [verb for verb, _ in places[1].calls] == ["list"]
    assert store.missed()


def test_a_damaged_copy_is_not_what_a_place_is_given() -> None:
    places, store = missed()
    key = next(entry.key for entry in places[0].list("packs/"))
    flipped(places[0], key, 77)
    Levelling(store, first=False).catch_up(RUN)
    assert key not in contents(places[1])


def test_what_was_removed_meanwhile_is_not_brought_back() -> None:
    """By another thread, between the read of the one copy and the write of the other."""
    places, _ = missed()
    gate = GateStore(places[1], where=lambda key: key.startswith("packs/"))
    gate.gate.set()
    store = FanoutStore(places[0], gate)
    store.list("")
    places[1].fail(Unavailable, verb="put")
    store.put("packs/x", b"1")
    places[1].heal()
    store.answers("2")

    class Removing(SwitchStore):
        def put(self, key: str, data: object) -> None:
            store.delete([key])
            super().put(key, data)  # type: ignore[arg-type]

    store._places["2"] = Removing(places[1])
    Levelling(store, first=False).catch_up(RUN)
    assert "packs/x" not in contents(places[0]).keys() | contents(places[1]).keys()


@pytest.mark.parametrize("lands", [False, True])
def test_a_crash_at_any_call_never_leaves_a_place_that_lists_a_snapshot_before_its_objects(lands: bool) -> None:
    for n in range(1, 200):
        whole, behind = MemoryStore("whole"), MemoryStore("behind")
        make_store(whole, drifting(2, rows=16))
        faulty = FaultyStore(behind, crash_at=n, lands=lands)
        with contextlib.suppress(Crash):
            Levelling(FanoutStore(whole, faulty), first=True).catch_up(RUN)
        held = contents(behind)
        if any(key.startswith("snapshots/") for key in held):
            assert {key for key in contents(whole) if not key.startswith("snapshots/")} <= held.keys()
        assert Levelling(FanoutStore(whole, behind), first=True).catch_up(RUN) is None
        assert contents(behind) == contents(whole)
        if not faulty.fired:
            break
    assert n > 8, "the fault never fired: this test proves nothing"


def test_only_rank_0_compares_and_only_once() -> None:
    one, other = SwitchStore(MemoryStore("a")), SwitchStore(MemoryStore("b"))
    store = FanoutStore(one, other)
    make_store(one, drifting(1, rows=16))
    Levelling(store, first=False).catch_up(RUN)
    assert contents(other) == {}
    chore = Levelling(store, first=True)
    chore.catch_up(RUN)
    assert contents(other) == contents(one)
    one.calls.clear()
    chore.catch_up(RUN)
    assert one.calls == []


def test_heartbeats_and_what_a_prune_has_announced_are_left_as_they_are() -> None:
    one, other = MemoryStore("a"), MemoryStore("b")
    one.put(alive_key(RUN), b"beat")
    one.put("packs/going", b"1")
    one.put("packs/staying", b"1")
    store = FanoutStore(one, other)
    one.put(prune_key("0f"), seal(PruneDoc(FORMAT, (), ("packs/going",))))
    assert uneven(store) == ["packs/staying"]


def test_a_place_that_cannot_be_listed_says_nothing_about_what_it_lacks() -> None:
    one, other = MemoryStore("a"), SwitchStore(MemoryStore("b"))
    one.put("packs/x", b"1")
    other.put("packs/x", b"1")
    store = FanoutStore(one, other)
    store.list("")
    other.fail(Unavailable, verb="list")
    with pytest.raises(Unavailable):
        uneven(store)
