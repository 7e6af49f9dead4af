"""Copying from the fast tier to the durable one: what lies there at every moment, and who may write it."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from ckpt.errors import StoreInUse
from ckpt.format.manifest import FORMAT, PruneDoc, seal
from ckpt.format.names import RunId, SnapshotId, SnapshotName, prune_key, run_key
from ckpt.history import tiers
from ckpt.history.catalog import read_history
from ckpt.history.tiers import Tiers
from recovery.verify import verify
from storage_backends.base import Store, Unavailable
from storage_backends.memory import MemoryStore
from storage_backends.tiered import TieredStore
from tests.ckpt.history.making import FakeClock
from tests.support.faulty import Crash, FaultyStore, GateStore, SwitchStore
from tests.support.stores import RUN, DirectWriter, drifting, flipped, make_store

STEPS = 3
STATES = drifting(STEPS, rows=32)


def saved(*, ranks: int = 1, keep_fast: int | None = None) -> tuple[MemoryStore, MemoryStore, TieredStore]:
    """A pair on whose fast tier a job has committed three steps."""
    fast, durable = MemoryStore("fast"), MemoryStore("durable")
    store = TieredStore(fast, durable, keep_fast=keep_fast)
    make_store(store, STATES, ranks=ranks, chunk=4096, blobs_per_pack=8)
    return fast, durable, store


def chore(store: TieredStore, rank: int = 0, world_size: int = 1) -> Tiers:
    return Tiers(store, FakeClock(), rank, world_size)


def objects(store: Store) -> dict[str, bytes]:
    return {entry.key: store.get(entry.key) for entry in store.list("")}


def snapshots(store: Store) -> list[int]:
    return sorted(id_.step for id_ in read_history(store).snapshots)


def errors(store: Store) -> list[str]:
    return [finding.text for finding in verify(store, deep=True, threads=1) if finding.level == "error"]


def test_a_pass_copies_everything_and_a_second_one_nothing() -> None:
    fast, durable, store = saved()
    watched = SwitchStore(durable)
    again = TieredStore(fast, watched, keep_fast=None)
    one = chore(again)
    assert one.catch_up(RUN) is None
    assert objects(durable) == objects(fast)
    watched.calls.clear()
    assert one.catch_up(RUN) is None
    assert watched.calls == [("list", "snapshots/")]
    assert {e.places for e in store.list("snapshots/")} == {("fast", "durable")}


def test_packs_go_before_parts_and_parts_before_the_snapshot_that_names_them_oldest_step_first() -> None:
    fast, durable, _ = saved(ranks=2)
    watched = SwitchStore(durable)
    chore(TieredStore(fast, watched, keep_fast=None)).catch_up(RUN)
    puts = [key.split("/")[0] for verb, key in watched.calls if verb == "put"]
    kinds = [kind for n, kind in enumerate(puts) if puts[n - 1 : n] != [kind]]
    assert kinds == ["packs", "parts", "snapshots"] * STEPS


@pytest.mark.parametrize("tier", ["fast", "durable"])
@pytest.mark.parametrize("lands", [False, True])
def test_a_crash_at_any_call_leaves_a_durable_tier_that_lists_only_what_is_whole(tier: str, lands: bool) -> None:
    """Crash at every call of the copier, on either tier; what the next start finds is whole, and it goes on."""
    fired = 0
    for n in range(1, 1000):
        fast, durable, _ = saved(keep_fast=1)
        faulty = FaultyStore(fast if tier == "fast" else durable, crash_at=n, lands=lands)
        crashing = (
            TieredStore(faulty, durable, keep_fast=1) if tier == "fast" else TieredStore(fast, faulty, keep_fast=1)
        )
        try:
            chore(crashing).catch_up(RUN)
        except Crash:
            fired += 1
        assert errors(durable) == [], faulty.struck
        assert errors(fast) == [], faulty.struck
        again = TieredStore(fast, durable, keep_fast=1)
        assert snapshots(again) == [10, 20, 30], faulty.struck
        assert errors(again) == [], faulty.struck
        assert chore(again).catch_up(RUN) is None
        assert snapshots(durable) == [10, 20, 30]
        assert snapshots(fast) == [30]
        assert errors(durable) == errors(fast) == []
        if not faulty.fired:
            break
    assert fired == n - 1 >= 20, "the fault never fired: this test proves nothing"


def test_a_durable_tier_that_fails_is_made_up_for_by_the_next_pass() -> None:
    fast, durable, _ = saved()
    switched = SwitchStore(durable)
    one = chore(TieredStore(fast, switched, keep_fast=1))
    for verb in ("list", "put"):
        switched.fail(Unavailable, verb=verb)
        with pytest.raises(Unavailable):
            one.catch_up(RUN)
        assert snapshots(fast) == [10, 20, 30]  # not thinned: nothing of it is anywhere else
        switched.heal()
    one.catch_up(RUN)
    assert snapshots(durable) == [10, 20, 30]


def test_a_run_that_is_not_the_newest_writes_no_snapshot_there() -> None:
    """The fence, on the tier where jobs with different fast tiers meet: a zombie's steps stay its own."""
    _, durable, store = saved()
    newer = RunId(2, "0badcafe")
    DirectWriter(durable, run=newer).begin()
    with pytest.raises(StoreInUse, match=r"snapshot 1/10 is not copied there, another job has taken over: run 000002"):
        chore(store).catch_up(RUN)
    assert snapshots(durable) == []
    assert chore(store).catch_up(newer) is None  # the newer job itself brings over what the older left
    assert snapshots(durable) == [10, 20, 30]
    assert run_key(newer) in objects(durable)


class Meanwhile:
    """Does something once, before the first call of one verb on keys with one prefix."""

    def __init__(self, inner: Store, verb: str, prefix: str, do: object) -> None:
        self._gate = GateStore(inner, verbs=frozenset({verb}), where=lambda key: key.startswith(prefix))
        self.store: Store = self._gate
        self._do = do

    def play(self, work: object) -> None:
        thread = threading.Thread(target=work)  # type: ignore[arg-type]
        thread.start()
        assert self._gate.arrived.wait(30)
        self._do()  # type: ignore[operator]
        self._gate.gate.set()
        thread.join(30)
        assert not thread.is_alive()


def test_what_a_prune_removes_while_it_is_copied_is_withdrawn() -> None:
    """The prune has come and gone between the last object and the snapshot: only what it left untouched is listed."""
    fast, durable, store = saved()
    key = SnapshotName(SnapshotId(RUN, 10)).key
    steps = [k for k in objects(fast) if f"{10:012d}" in k]

    def prune() -> None:
        store.delete([key])
        store.delete([k for k in steps if k.startswith("parts/")])

    meanwhile = Meanwhile(durable, "put", key, prune)
    meanwhile.play(lambda: chore(TieredStore(fast, meanwhile.store, keep_fast=None)).catch_up(RUN))
    assert key not in objects(durable)
    assert errors(durable) == []
    assert snapshots(durable) == [20, 30]


def test_what_a_prune_has_announced_is_not_published() -> None:
    _, durable, store = saved()
    id_ = SnapshotId(RUN, 20)
    store.put(prune_key("0f"), seal(PruneDoc(FORMAT, (str(id_),), (SnapshotName(id_).key,))))
    chore(store).catch_up(RUN)
    assert snapshots(durable) == [10, 30]
    store.delete([prune_key("0f")])
    chore(store).catch_up(RUN)
    assert snapshots(durable) == [10, 20, 30]


def test_what_vanished_from_both_tiers_is_let_go() -> None:
    fast, durable, store = saved()
    gone = [key for key in objects(fast) if f"{10:012d}" in key and key.startswith(("packs/", "parts/"))]
    fast.delete(gone)
    assert chore(store).catch_up(RUN) is None
    assert 10 not in snapshots(durable)
    assert not set(gone) & objects(durable).keys()


def test_damage_on_the_fast_tier_is_not_spread() -> None:
    fast, durable, store = saved()
    needed = {id_: {key for key, _ in s.packs} for id_, s in read_history(fast).snapshots.items()}
    newest = max(needed)
    own = sorted(needed[newest] - set().union(*(packs for id_, packs in needed.items() if id_ != newest)))
    flipped(fast, own[0], 999)
    one = chore(store)
    late = one.catch_up(RUN)
    assert late is not None and "snapshot 1/30 is not on the durable tier" in late and own[0] in late
    assert snapshots(durable) == [10, 20]
    assert own[0] not in objects(durable)
    flipped(fast, own[0], 999)
    assert chore(store).catch_up(RUN) is None
    assert snapshots(durable) == [10, 20, 30]


def share(store: TieredStore, ranks: Sequence[int], world_size: int) -> None:
    for rank in ranks:
        chore(store, rank, world_size).catch_up(RUN)


def test_each_rank_copies_its_own_and_rank_0_the_snapshots() -> None:
    fast, durable, _ = saved(ranks=3)
    watched = [SwitchStore(durable) for _ in range(3)]
    stores = [TieredStore(fast, one, keep_fast=None) for one in watched]
    for rank in (1, 2, 0):
        chore(stores[rank], rank, 3).catch_up(RUN)
    for rank, one in enumerate(watched):
        puts = [key for verb, key in one.calls if verb == "put"]
        assert puts
        assert {tiers.rank_of(key) for key in puts if not key.startswith("snapshots/")} == {rank}
        assert any(key.startswith("snapshots/") for key in puts) == (rank == 0)
    assert objects(durable) == objects(fast)


def test_rank_0_waits_for_the_others_and_copies_what_they_never_bring() -> None:
    fast, durable, store = saved(ranks=3)
    clock = FakeClock()
    Tiers(store, clock, 0, 3).catch_up(RUN)
    assert snapshots(durable) == [10, 20, 30]
    assert objects(durable) == objects(fast)
    assert tiers.PATIENCE <= clock.monotonic() - FakeClock().monotonic() < 2 * STEPS * tiers.PATIENCE


def test_what_a_larger_job_left_is_dealt_out_among_fewer_ranks() -> None:
    fast, durable, store = saved(ranks=5)
    share(store, (1, 0), 2)
    assert objects(durable) == objects(fast)
