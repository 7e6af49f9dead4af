from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from ckpt.errors import SaveFailed, StoreInUse
from ckpt.format.manifest import FORMAT, PartRef, PruneDoc, Snapshot, seal, unseal
from ckpt.format.names import PartName, SnapshotId, SnapshotName, prune_key
from ckpt.history.assemble import build_snapshot
from ckpt.history.catalog import read_history
from ckpt.history.commit import LAST_PAUSE, STAGGER, look, publish, put_part
from ckpt.history.runs import open_run
from storage_backends.base import Refused, Store, Unavailable
from storage_backends.memory import MemoryStore
from tests.ckpt.history.making import (
    NEXT,
    RUN,
    FakeClock,
    breathe,
    decoded,
    part_bytes,
    put_keyframes,
    put_pack,
    put_run,
    shares,
    somebody,
    whole,
)
from tests.support.faulty import Crash, FaultyStore, LaggingStore, SizedStore

ID = SnapshotId(RUN, 40)
KEY = SnapshotName(ID).key


def never() -> bool:
    return False


def parts_of(store: Store, ranks: int, **more: object) -> list[bytes]:
    """The parts of all ranks, not yet put; their packs are."""
    return [
        part_bytes(ID, rank, layout, [put_pack(store, ID, rank)], ranks=ranks, **more)  # type: ignore[arg-type]
        for rank, layout in enumerate(shares(ranks))
    ]


def published(
    store: Store,
    own: PartRef,
    clock: FakeClock,
    *,
    rank: int = 0,
    ranks: int = 1,
    wait: float = 60.0,
    stopped: Callable[[], bool] = never,
    usual: float = 0.0,
) -> Snapshot:
    return publish(
        store,
        clock,
        id=ID,
        rank=rank,
        world_size=ranks,
        own=own,
        wait=wait,
        stopped=stopped,
        breathe=breathe,
        usual=usual,
        threads=1,
    )


def alone(store: Store) -> PartRef:
    """The only rank's part, put."""
    return put_part(store, ID, 0, parts_of(store, 1)[0])


def together(store: Store, ranks: int, **more: object) -> list[PartRef]:
    return [put_part(store, ID, rank, data) for rank, data in enumerate(parts_of(store, ranks, **more))]


def test_a_lone_rank_commits_with_six_requests_and_without_waiting() -> None:
    """M11: they depend on nothing but the number of ranks."""
    store, clock = FaultyStore(MemoryStore()), FakeClock()
    put_run(store, RUN)
    own = alone(store)
    store.calls.clear()
    snapshot = published(store, own, clock)
    assert store.calls == [
        ("get", own.key),
        ("list", "runs/"),  # the fence
        ("put", KEY),
        ("list", "prunes/"),  # has one taken it for a leftover
        ("list", f"parts/{RUN}/000000000040/"),  # are they still there
        ("get", KEY),  # seen
    ]
    assert clock.slept == []
    assert whole(store, snapshot)
    assert read_history(store).snapshots == {ID: snapshot}


def test_a_step_that_a_prune_has_taken_for_a_leftover_is_not_committed() -> None:
    """Its writer was stopped for longer than grace before the put, and the prune removes its parts from now on."""
    store = MemoryStore()
    put_run(store, RUN)
    own = alone(store)
    store.put(prune_key("ab"), seal(PruneDoc(FORMAT, (str(ID),), (own.key,))))
    with pytest.raises(SaveFailed, match="a prune has announced that it goes"):
        published(store, own, FakeClock())
    assert not store.list("snapshots/")


def test_the_rank_whose_turn_it_is_commits_and_the_others_only_look() -> None:
    ranks = 4
    inner = MemoryStore()
    owns = together(inner, ranks)
    first = ID.step % ranks
    store = FaultyStore(inner)
    snapshot = published(store, owns[first], FakeClock(), rank=first, ranks=ranks)
    assert store.count("get") == ranks + 1
    for rank in {0, 1, 2, 3} - {first}:
        store.calls.clear()
        assert published(store, owns[rank], FakeClock(), rank=rank, ranks=ranks) == snapshot
        assert store.calls == [("get", KEY)]


def test_the_others_list_parts_later_the_further_they_are() -> None:
    ranks = 4
    for rank in range(ranks):
        store, clock = MemoryStore(), FakeClock()
        owns = together(store, ranks)
        published(store, owns[rank], clock, rank=rank, ranks=ranks)
        distance = (rank - ID.step) % ranks
        assert sum(clock.slept) == pytest.approx(distance * STAGGER), "the first rank never came, so this one did it"


@pytest.mark.parametrize("takes", [0.5, 0.79, 1.0, 1.29])
def test_where_a_commit_takes_about_as_long_as_usual_two_looks_are_enough(takes: float) -> None:
    """And two more requests are a rank's packs and its part: packs + 3 in all."""
    ranks = 4
    inner, clock = MemoryStore(), FakeClock()
    owns = together(inner, ranks)
    first = ID.step % ranks
    began = clock.monotonic()

    def commits(now: float) -> None:
        if clock.monotonic() >= began + takes:
            published(inner, owns[first], FakeClock(), rank=first, ranks=ranks)

    clock.on_sleep = commits
    for rank in {0, 1, 2, 3} - {first}:
        store = FaultyStore(inner)
        published(store, owns[rank], clock, rank=rank, ranks=ranks, usual=1.0)
        assert len(store.calls) <= 2, store.calls
        inner.delete([KEY])
        began = clock.monotonic()


@pytest.mark.parametrize("late", [0.0, 0.05, 0.3, 0.59])
def test_the_rank_whose_turn_it_is_makes_no_more_requests_than_ranks_and_seven(late: float) -> None:
    """Its own packs and part apart: world size + packs + 8 in all."""
    ranks = 4
    inner, clock = MemoryStore(), FakeClock()
    put_run(inner, RUN)
    datas = parts_of(inner, ranks)
    first = ID.step % ranks
    owns = {rank: put_part(inner, ID, rank, datas[rank]) for rank in range(ranks) if not late or rank != 3}
    began = clock.monotonic()

    def slow(now: float) -> None:
        if clock.monotonic() >= began + late:
            put_part(inner, ID, 3, datas[3])

    clock.on_sleep = slow
    store = FaultyStore(inner)
    published(store, owns[first], clock, rank=first, ranks=ranks, usual=1.0)
    assert len(store.calls) <= ranks + 7, store.calls
    assert sum(clock.slept) <= (0.11 if late < 0.1 else 0.61), "or a commit would take longer with each save"
    assert len(store.calls) > ranks + 4


def test_a_rank_told_to_stop_does_not_first_wait_as_long_as_usual() -> None:
    store, clock = MemoryStore(), FakeClock()
    own = put_part(store, ID, 1, parts_of(store, 2)[1])
    with pytest.raises(SaveFailed, match="gave up"):
        published(store, own, clock, rank=1, ranks=2, usual=1.0, stopped=lambda: True)
    assert clock.slept == []


def test_the_last_rank_in_turns_the_key() -> None:
    """The rank whose turn it is comes first, and waits with back-off for the slow one."""
    store, clock = MemoryStore(), FakeClock()
    datas = parts_of(store, 2)
    own = put_part(store, ID, 0, datas[0])

    def slow(now: float) -> None:
        if now > 1_000_030.0:
            put_part(store, ID, 1, datas[1])

    clock.on_sleep = slow
    faulty = FaultyStore(store)
    snapshot = published(faulty, own, clock, rank=0, ranks=2)
    assert whole(store, snapshot)
    assert 30.0 < sum(clock.slept) < 30.0 + 2 * LAST_PAUSE
    assert faulty.count("list", "get") < 40, "waiting half a minute costs few requests"


def test_listings_that_lag_and_four_ranks_that_finish_together_make_one_correct_commit() -> None:
    """C5"""

    class Shared(FakeClock):
        """One time for all ranks; whoever sleeps moves it."""

        lock = threading.Lock()

        def sleep(self, seconds: float) -> None:
            with self.lock:
                super().sleep(seconds)

    clock = Shared()
    inner = FaultyStore(MemoryStore())
    store = LaggingStore(inner, lag=1.0, now=lambda: clock.now)
    put_run(store, RUN)
    owns = together(store, 4)
    with ThreadPoolExecutor(4) as pool:
        ranks = [pool.submit(published, store, owns[r], clock, rank=r, ranks=4, wait=1e6) for r in range(4)]
        snapshots = [rank.result(60) for rank in ranks]
    assert store.hidden
    assert all(s == snapshots[0] for s in snapshots)
    assert whole(inner, snapshots[0])
    clock.now += 2.0
    assert read_history(store).snapshots == {ID: snapshots[0]}


def test_every_rank_that_commits_writes_the_same_bytes() -> None:
    store = MemoryStore()
    owns = together(store, 3)
    written = set()
    for rank in range(3):
        store.delete([KEY])
        published(store, owns[rank], FakeClock(), rank=rank, ranks=3)
        written.add(store.get(KEY))
    assert len(written) == 1


def test_a_rank_that_never_stores_its_part_leaves_the_step_unpublished_and_is_named() -> None:
    """C2"""
    store = MemoryStore()
    put_run(store, RUN)
    put_keyframes(store, RUN, [30])
    datas = parts_of(store, 4)
    owns = [put_part(store, ID, rank, datas[rank]) for rank in (0, 1, 3)]
    for rank, own in zip((0, 1, 3), owns, strict=True):
        with pytest.raises(SaveFailed, match="not seen committed: waited 60 s; no part of rank 2") as caught:
            published(store, own, FakeClock(), rank=rank, ranks=4)
        assert (caught.value.stage, caught.value.step) == ("commit", 40)
    assert read_history(store).newest == SnapshotId(RUN, 30)


def test_no_space_for_the_commit_document_fails_the_save_at_once_and_loses_nothing() -> None:
    """C3: restart twice, reach the same step again."""
    store = SizedStore(MemoryStore(), capacity=1 << 20)
    for generation in (1, 2, 3):
        run = open_run(store, FakeClock(), world_size=1, resumed_from=None, who=somebody())
        assert run.generation == generation
        id_ = SnapshotId(run, 40)
        data = part_bytes(id_, 0, shares(1)[0], [put_pack(store, id_, 0)])
        own = put_part(store, id_, 0, data)
        store.capacity = store.used if generation < 3 else 1 << 20
        clock = FakeClock()
        args = {"id": id_, "rank": 0, "world_size": 1, "own": own, "wait": 60.0, "stopped": never, "breathe": breathe}
        if generation < 3:
            with pytest.raises(SaveFailed, match="no space") as caught:
                publish(store, clock, **args)  # type: ignore[arg-type]
            assert isinstance(caught.value.__cause__, Refused)
            assert clock.slept == []
            assert read_history(store).newest is None
        else:
            publish(store, clock, **args)  # type: ignore[arg-type]
            assert read_history(store).newest == id_
        store.capacity = 1 << 20
    assert store.refused == 2


@pytest.mark.parametrize("lands", [False, True])
@pytest.mark.parametrize("error", [Unavailable, Refused])
def test_a_put_of_the_snapshot_that_failed_counts_only_by_what_is_there_to_read(
    lands: bool, error: type[Unavailable] | type[Refused]
) -> None:
    inner = MemoryStore()
    own = alone(inner)
    store = FaultyStore(inner, fail_at=1, verbs=frozenset({"put"}), error=error, lands=lands)
    if lands:
        assert published(store, own, FakeClock()).id == ID
    else:
        with pytest.raises(SaveFailed, match="on purpose"):
            published(store, own, FakeClock())
        assert look(inner, ID, own) is None
    assert store.fired


def test_a_crash_at_any_call_leaves_the_whole_step_or_none_of_it() -> None:
    """C1, at this floor."""
    for lands in (False, True):
        at = 0
        fired = True
        while fired:
            at += 1
            store = FaultyStore(MemoryStore(), crash_at=at, lands=lands)
            try:
                put_run(store, RUN)
                published(store, alone(store), FakeClock())
            except Crash:
                pass
            fired = store.fired
            history = read_history(store.survived())
            assert all(whole(store.survived(), s) for s in history.snapshots.values())
            assert history.problems == ()
        assert at > 7
        assert history.newest == ID


def test_a_newer_run_stops_the_commit_and_is_named() -> None:
    """E5: the fence."""
    store = MemoryStore()
    own = alone(store)
    put_run(store, NEXT, who=somebody(77, host="elsewhere", job="other"))
    with pytest.raises(StoreInUse, match="host elsewhere, pid 77, job other") as caught:
        published(store, own, FakeClock())
    assert caught.value.run == str(NEXT)
    assert read_history(store).snapshots == {}


def test_an_older_run_and_ones_own_stop_nothing() -> None:
    store = MemoryStore()
    own = alone(store)
    put_run(store, RUN)
    put_run(store, type(RUN)(RUN.generation, "00000000"))
    assert published(store, own, FakeClock()).id == ID


def test_a_snapshot_whose_parts_were_swept_meanwhile_is_withdrawn() -> None:
    """The process was stopped for hours between the fence and its put."""

    class Stopped(MemoryStore):
        def put(self, key: str, data: bytes | bytearray | memoryview) -> None:
            if key == KEY:
                super().delete([PartName(ID, 0).key])
            super().put(key, data)

    store = Stopped()
    with pytest.raises(SaveFailed, match="withdrawn"):
        published(store, alone(store), FakeClock())
    assert store.list("snapshots/") == []


def test_a_part_that_only_the_listing_has_not_caught_up_with_withdraws_nothing() -> None:
    clock = FakeClock()
    store = LaggingStore(MemoryStore(), lag=1.0, now=lambda: clock.now)
    assert published(store, alone(store), clock).id == ID
    assert store.hidden
    assert clock.slept == [], "a lone rank knows the key of its part"


def test_replicas_that_differ_are_found_by_every_rank_without_waiting_for_another() -> None:
    store = MemoryStore()
    datas = [
        part_bytes(ID, r, layout, [put_pack(store, ID, r)], ranks=3, replicas={"b [0:8]": "bad" if r == 1 else "good"})
        for r, layout in enumerate(shares(3))
    ]
    owns = [put_part(store, ID, r, data) for r, data in enumerate(datas)]
    for rank in range(3):
        clock = FakeClock()
        with pytest.raises(SaveFailed, match=r"leaf b \[0:8\].*rank 1 holds bad") as caught:
            published(store, owns[rank], clock, rank=rank, ranks=3, wait=600.0)
        assert caught.value.stage == "replicas"
        assert sum(clock.slept) <= 2 * STAGGER + 0.01
    assert look(store, ID, owns[0]) is None


def test_parts_that_do_not_fit_are_not_committed() -> None:
    store = MemoryStore()
    datas = parts_of(store, 2)
    datas[1] = part_bytes(ID, 1, shares(2)[0], [put_pack(store, ID, 1)], ranks=2)
    own = put_part(store, ID, 0, datas[0])
    put_part(store, ID, 1, datas[1])
    with pytest.raises(SaveFailed, match=r"overlap|elements"):
        published(store, own, FakeClock(), ranks=2)
    assert look(store, ID, own) is None


def test_a_store_that_kept_other_bytes_of_the_part_is_noticed_before_the_commit() -> None:
    """M2"""
    store = MemoryStore()
    own = alone(store)
    store.put(own.key, store.get(own.key) + b"more")
    with pytest.raises(SaveFailed, match=own.key):
        published(store, own, FakeClock())


def test_a_part_of_another_rank_that_cannot_be_decoded_is_named() -> None:
    store = MemoryStore()
    owns = together(store, 2)
    store.put(owns[1].key, b"")
    with pytest.raises(SaveFailed, match=r"00001\.json\.zst"):
        published(store, owns[0], FakeClock(), ranks=2)


def test_waiting_ends_when_it_is_called_off() -> None:
    store, clock = MemoryStore(), FakeClock()
    own = put_part(store, ID, 0, parts_of(store, 2)[0])
    with pytest.raises(SaveFailed, match="gave up waiting"):
        published(store, own, clock, ranks=2, wait=600.0, stopped=lambda: len(clock.slept) == 3)
    assert len(clock.slept) == 3


def test_whoever_is_called_off_before_its_turn_still_commits_if_all_parts_are_there() -> None:
    """A rank that leaves must not leave a complete step without its commit: it may be the last one in."""
    store, clock = MemoryStore(), FakeClock()
    owns = together(store, 3)
    late = max(range(3), key=lambda rank: (rank - ID.step) % 3)
    assert published(store, owns[late], clock, rank=late, ranks=3, stopped=lambda: True).id == ID
    assert not clock.slept


def test_one_failed_look_does_not_end_the_wait_for_others_but_a_lone_rank_gives_up() -> None:
    inner = MemoryStore()
    owns = together(inner, 2)
    store = FaultyStore(inner, fail_at=1, verbs=frozenset({"list", "get"}))
    assert published(store, owns[0], FakeClock(), ranks=2).id == ID
    assert store.fired

    inner = MemoryStore()
    own = alone(inner)
    store = FaultyStore(inner, fail_at=1, verbs=frozenset({"list", "get"}))
    with pytest.raises(SaveFailed) as caught:
        published(store, own, FakeClock())
    assert isinstance(caught.value.__cause__, Unavailable)


def test_a_refused_look_ends_the_wait() -> None:
    inner = MemoryStore()
    owns = together(inner, 2)
    store = FaultyStore(inner, fail_at=1, verbs=frozenset({"get"}), error=Refused)
    clock = FakeClock()
    with pytest.raises(SaveFailed):
        published(store, owns[1], clock, rank=1, ranks=2)
    assert clock.slept == []


def test_a_commit_is_seen_only_if_it_names_this_ranks_own_part_by_digest() -> None:
    store = MemoryStore()
    datas = parts_of(store, 2)
    owns = [put_part(store, ID, r, data) for r, data in enumerate(datas)]
    assert look(store, ID, owns[0]) is None
    snapshot = published(store, owns[0], FakeClock(), ranks=2)
    assert look(store, ID, owns[1]) == snapshot == build_snapshot(decoded(ID, datas))
    other = PartRef(owns[1].key, owns[1].length, "0" * 32)
    assert look(store, ID, other) is None
    data = bytearray(store.get(KEY))
    data[7] ^= 1
    store.put(KEY, bytes(data))
    assert look(store, ID, owns[0]) is None, "its digest must hold"


def test_a_damaged_commit_is_written_again() -> None:
    store = MemoryStore()
    own = alone(store)
    store.put(KEY, b"cut")
    snapshot = published(store, own, FakeClock())
    assert unseal(store.get(KEY), Snapshot, key=KEY) == snapshot


def test_could_not_look_is_never_not_there() -> None:
    store = FaultyStore(MemoryStore(), fail_at=1, verbs=frozenset({"get"}))
    with pytest.raises(Unavailable):
        look(store, ID, PartRef("parts/x", 1, "0" * 32))


def test_revisions_are_none_of_the_committers_business() -> None:
    store = MemoryStore()
    datas: Sequence[bytes] = parts_of(store, 2)
    own = put_part(store, ID, 0, datas[0])
    store.put(PartName(ID, 1, revision=1).key, datas[1])
    with pytest.raises(SaveFailed, match="no part of rank 1"):
        published(store, own, FakeClock(), ranks=2, wait=1.0)


def test_a_part_of_a_lone_rank_that_is_not_there_to_read_is_not_waited_for() -> None:
    """M2: the store said yes and kept nothing."""
    store = MemoryStore()
    own = alone(store)
    store.delete([own.key])
    clock = FakeClock()
    with pytest.raises(SaveFailed, match="is gone"):
        published(store, own, clock)
    assert clock.slept == []
