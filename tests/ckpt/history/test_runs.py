from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ckpt.errors import DamagedError, FormatTooNew, StoreInUse
from ckpt.format.manifest import FORMAT, Alive, PruneDoc, RunDoc, StoreDoc, digest128, seal, unseal
from ckpt.format.names import STORE_KEY, RunId, SnapshotId, SnapshotName, alive_key, prune_key, run_key
from ckpt.history.runs import (
    Heartbeat,
    Identity,
    claimed_by_prune,
    ensure_store,
    history_exists,
    identity,
    newest_run,
    open_run,
    put_alive,
)
from storage_backends.base import NotFound, Store, Unavailable
from storage_backends.memory import MemoryStore
from tests.ckpt.history.making import NEXT, RUN, FakeClock, put_keyframes, put_pack, put_run, put_step, somebody
from tests.support.faulty import FaultyStore, GateStore

OTHER = somebody(2, host="elsewhere", job="training 7")


def opened(store: Store, clock: FakeClock, who: Identity = somebody(), **more: SnapshotId) -> RunId:  # noqa: B008
    return open_run(store, clock, world_size=3, resumed_from=more.get("resumed_from"), who=who)


def beating(store: Store, run: RunId, every: float = 10.0) -> Callable[[float], None]:
    """On a clock that only sleeping moves: the other job's heartbeat."""
    first = 1_000_000.0
    return lambda now: put_alive(store, run, int((now - first) // every), ended=False)


# --- opening -----------------------------------------------------------------------------------------------------


def test_the_first_run_is_of_generation_one_and_its_document_says_who_started_it() -> None:
    store, clock = MemoryStore(), FakeClock()
    resumed = SnapshotId(RunId(1, "99999999"), 7)
    run = opened(store, clock, OTHER, resumed_from=resumed)
    doc = unseal(store.get(run_key(run)), RunDoc, key="")
    assert run.generation == 1
    assert (doc.host, doc.pid, doc.pid_started, doc.job) == ("elsewhere", 2, "started 2", "training 7")
    assert (doc.world_size, doc.resumed_from, doc.started) == (3, str(resumed), clock.now)
    assert "python" in doc.versions
    assert clock.slept == []


def test_a_generation_is_larger_than_any_that_a_name_tells_of() -> None:
    """The document of a run may be lost, or its put may have failed while its packs landed later."""
    for put in (
        put_run,
        lambda s, run: put_keyframes(s, run, [5]),
        lambda s, run: put_step(s, SnapshotId(run, 5), commit=False),
        lambda s, run: put_pack(s, SnapshotId(run, 5), 0),
    ):
        store = MemoryStore()
        put(store, RunId(41, "aaaaaaaa"))
        clock = FakeClock()
        assert opened(store, clock).generation == 42


def test_foreign_names_give_no_generation() -> None:
    store = MemoryStore()
    store.put("packs/notes/000099-aaaaaaaa.txt", b"")
    store.put("runs/000099.json", b"")
    assert opened(store, FakeClock()).generation == 1


def test_a_run_document_that_failed_to_land_is_an_error_and_one_that_landed_takes_a_generation() -> None:
    for lands in (False, True):
        store = FaultyStore(MemoryStore(), fail_at=1, verbs=frozenset({"put"}), lands=lands)
        with pytest.raises(Unavailable):
            opened(store, FakeClock())
        assert store.fired
        assert opened(store, FakeClock()).generation == 1 + lands


# --- taking over -------------------------------------------------------------------------------------------------


def test_a_run_whose_heartbeat_advances_is_refused_by_name() -> None:
    """E5"""
    store, clock = MemoryStore(), FakeClock()
    put_run(store, RUN, who=OTHER, started=86400.0)
    clock.on_sleep = beating(store, RUN)
    with pytest.raises(
        StoreInUse, match=r"000001-aaaaaaaa of host elsewhere, pid 2, job training 7, started 1970-01-02 00:00:00 UTC"
    ) as caught:
        opened(store, clock)
    error = caught.value
    assert (error.run, error.host, error.pid, error.job, error.started) == (
        str(RUN), "elsewhere", 2, "training 7", 86400.0,
    )  # fmt: skip
    assert sum(clock.slept) <= 10.0, "one beat is enough to know"


def test_a_silent_run_is_taken_over_after_three_intervals() -> None:
    """E5: a dead writer's claim does not block for ever."""
    store, clock = MemoryStore(), FakeClock()
    put_run(store, RUN, who=OTHER)
    put_alive(store, RUN, 17, ended=False)
    assert opened(store, clock).generation == 2
    assert sum(clock.slept) == pytest.approx(30.0)


def test_a_run_that_never_beat_is_given_the_same_time_to_begin() -> None:
    store, clock = MemoryStore(), FakeClock()
    put_run(store, RUN, who=OTHER)
    assert opened(store, clock).generation == 2
    assert sum(clock.slept) == pytest.approx(30.0)

    clock.on_sleep = lambda now: put_alive(store, newest_run(store) or RUN, 0, ended=False)
    with pytest.raises(StoreInUse):
        opened(store, clock, OTHER)


def test_the_other_run_is_given_three_of_its_own_intervals() -> None:
    store, clock = MemoryStore(), FakeClock()
    put_run(store, RUN, who=OTHER)
    put_alive(store, RUN, 0, ended=False, interval=50.0)
    clock.on_sleep = beating(store, RUN, every=50.0)
    with pytest.raises(StoreInUse):
        opened(store, clock)


def test_an_absurd_interval_in_a_heartbeat_blocks_nobody_for_long() -> None:
    store, clock = MemoryStore(), FakeClock()
    put_run(store, RUN, who=OTHER)
    put_alive(store, RUN, 0, ended=False, interval=1e12)
    assert opened(store, clock).generation == 2
    assert sum(clock.slept) == pytest.approx(180.0)


def test_an_ended_run_is_taken_over_at_once() -> None:
    store, clock = MemoryStore(), FakeClock()
    put_run(store, RUN, who=OTHER)
    put_alive(store, RUN, 3, ended=True)
    assert opened(store, clock).generation == 2
    assert clock.slept == []


def test_a_run_that_ends_while_it_is_watched_is_taken_over_then() -> None:
    store, clock = MemoryStore(), FakeClock()
    put_run(store, RUN, who=OTHER)
    clock.on_sleep = lambda now: put_alive(store, RUN, 4, ended=True)
    assert opened(store, clock).generation == 2
    assert len(clock.slept) == 1


def test_a_run_of_this_very_torchrun_job_is_taken_over_at_once() -> None:
    store, clock = MemoryStore(), FakeClock()
    put_run(store, RUN, who=OTHER)
    clock.on_sleep = beating(store, RUN)
    assert opened(store, clock, somebody(3, job="training 7")).generation == 2
    assert clock.slept == []


def test_the_default_job_id_of_torchrun_names_no_job() -> None:
    store, clock = MemoryStore(), FakeClock()
    put_run(store, RUN, who=replace(OTHER, job="none"))
    clock.on_sleep = beating(store, RUN)
    with pytest.raises(StoreInUse):
        opened(store, clock, replace(somebody(3), job="none"))
    assert identity("none").job is None


def test_this_process_may_open_a_second_run_while_it_beats_for_the_first() -> None:
    """Falling back to an older snapshot does."""
    store, clock, who = MemoryStore(), FakeClock(), identity(None)
    first = opened(store, clock, who)
    put_alive(store, first, 0, ended=False)
    assert opened(store, clock, who).generation == 2
    assert clock.slept == []


@pytest.mark.skipif(not identity(None).boot, reason="needs /proc")
def test_a_dead_process_of_this_host_is_taken_over_at_once_and_a_living_one_is_not() -> None:
    with subprocess.Popen(
        [sys.executable, "-S", "-c", "print(flush=True); input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        stat = Path(f"/proc/{child.pid}/stat").read_text()
        other = replace(identity(None), pid=child.pid, pid_started=stat.rpartition(")")[2].split()[19])
        store, clock = MemoryStore(), FakeClock()
        put_run(store, RUN, who=other)
        clock.on_sleep = beating(store, RUN)
        with pytest.raises(StoreInUse):
            opened(store, clock, identity(None))
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, and nobody has reaped it yet
        clock = FakeClock()
        assert opened(store, clock, identity(None)).generation == 2
        assert clock.slept == []


@pytest.mark.parametrize("field", ["host", "boot", "pid_space"])
def test_a_process_that_cannot_be_seen_from_here_is_not_taken_for_dead(field: str) -> None:
    mine = identity(None)
    gone = replace(mine, pid=2**22 + 1, pid_started="1")
    store, clock = MemoryStore(), FakeClock()
    put_run(store, RUN, who=replace(gone, **{field: "another"}))
    opened(store, clock, mine)
    assert sum(clock.slept) == pytest.approx(30.0)


def test_a_pid_that_was_given_to_a_later_process_is_a_dead_one() -> None:
    mine = identity(None)
    if not mine.boot:
        pytest.skip("needs /proc")
    store, clock = MemoryStore(), FakeClock()
    put_run(store, RUN, who=replace(mine, pid_started="an hour before"))
    opened(store, clock, mine)
    assert clock.slept == []


def test_a_job_that_opened_while_another_was_watched_is_watched_in_turn() -> None:
    store, clock = MemoryStore(), FakeClock()
    put_run(store, RUN, who=OTHER)

    def meanwhile(now: float) -> None:
        put_run(store, NEXT, who=OTHER)
        beating(store, NEXT)(now)

    clock.on_sleep = meanwhile
    with pytest.raises(StoreInUse, match=str(NEXT)):
        opened(store, clock)


def test_a_run_whose_document_is_damaged_is_judged_by_its_heartbeat() -> None:
    store, clock = MemoryStore(), FakeClock()
    store.put(run_key(RUN), b"")
    clock.on_sleep = beating(store, RUN)
    with pytest.raises(StoreInUse, match="cannot be read"):
        opened(store, clock)
    store, clock = MemoryStore(), FakeClock()
    store.put(run_key(RUN), b"")
    assert opened(store, clock).generation == 2


def test_a_heartbeat_that_cannot_be_read_is_an_error_and_never_silence() -> None:
    """M3"""
    inner = MemoryStore()
    put_run(inner, RUN, who=OTHER)
    store = FaultyStore(inner, fail_at=1, verbs=frozenset({"get"}), where=lambda key: key.startswith("alive/"))
    with pytest.raises(Unavailable):
        opened(store, FakeClock())
    assert store.fired
    assert newest_run(inner) == RUN


# --- the store itself --------------------------------------------------------------------------------------------


def test_a_store_is_marked_once_and_for_all() -> None:
    store = FaultyStore(MemoryStore())
    ensure_store(store)
    ensure_store(store)
    assert store.count("put") == 1
    assert unseal(store.get(STORE_KEY), StoreDoc, key=STORE_KEY).format == FORMAT


def test_a_store_of_something_else_or_of_a_newer_format_is_refused() -> None:
    store = MemoryStore()
    store.put(STORE_KEY, seal(StoreDoc(FORMAT, "a heap of holiday pictures")))
    with pytest.raises(DamagedError, match="holiday"):
        ensure_store(store)
    body = b'{"format":99}\n'
    store.put(STORE_KEY, body + digest128(body).encode() + b"\n")
    with pytest.raises(FormatTooNew):
        ensure_store(store)


def test_a_store_has_a_history_once_it_has_a_snapshot_readable_or_not() -> None:
    """C3: runs that never committed leave nothing that a restart must not overlook."""
    store = MemoryStore()
    opened(store, FakeClock())
    put_step(store, SnapshotId(RUN, 10), commit=False)
    store.put("snapshots/notes.txt", b"")
    assert not history_exists(store)
    store.put(SnapshotName(SnapshotId(RUN, 10)).key, b"cut")
    assert history_exists(store)


def test_could_not_list_is_never_an_empty_store() -> None:
    """M3"""
    store = FaultyStore(MemoryStore(), fail_at=1, verbs=frozenset({"list"}), for_ever=True)
    for question in (history_exists, newest_run, lambda s: claimed_by_prune(s, SnapshotId(RUN, 1))):
        with pytest.raises(Unavailable):
            question(store)
    assert store.fired


# --- claims ------------------------------------------------------------------------------------------------------


def test_a_claim_gives_way_to_a_prune_that_names_its_snapshot() -> None:
    store = MemoryStore()
    a, b = SnapshotId(RUN, 10), SnapshotId(RUN, 20)
    store.put(prune_key("01"), seal(PruneDoc(FORMAT, (str(a),), ())))
    store.put(prune_key("02"), seal(PruneDoc(FORMAT, (), (SnapshotName(b).key,))))
    assert claimed_by_prune(store, a)
    assert not claimed_by_prune(store, b), "what a prune claims is in its list of snapshots"


def test_a_rotten_announcement_does_not_forbid_every_restore(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    store.put(prune_key("01"), b"cut")
    with caplog.at_level(logging.WARNING):
        assert not claimed_by_prune(store, SnapshotId(RUN, 10))
    assert prune_key("01") in caplog.text


def test_a_prune_that_ends_between_listing_and_reading_claims_nothing() -> None:
    class Ending(MemoryStore):
        def get(self, key: str) -> bytes:
            raise NotFound("gone", store=self.url, key=key)

    store = Ending()
    store.put(prune_key("01"), b"")
    assert not claimed_by_prune(store, SnapshotId(RUN, 10))


# --- heartbeats --------------------------------------------------------------------------------------------------


class Beats(MemoryStore):
    """Tells of each heartbeat; can fail the first ones."""

    def __init__(self, failing: int = 0) -> None:
        super().__init__()
        self.failing = failing
        self.seen: list[Alive] = []
        self.third = threading.Event()

    def put(self, key: str, data: bytes | bytearray | memoryview) -> None:
        self.seen.append(unseal(bytes(data), Alive, key=key))
        if len(self.seen) >= 3:
            self.third.set()
        if len(self.seen) <= self.failing:
            raise Unavailable("no", store=self.url, key=key)
        super().put(key, data)


def test_a_heartbeat_counts_up_and_a_clean_close_marks_the_end() -> None:
    store = Beats()
    heart = Heartbeat(store, RUN, interval=0.001)
    heart.start()
    assert store.third.wait(30)
    heart.stop(ended=True)
    beats = [alive.beat for alive in store.seen]
    assert beats == list(range(len(beats)))
    assert [alive.ended for alive in store.seen] == [False] * (len(beats) - 1) + [True]
    assert unseal(store.get(alive_key(RUN)), Alive, key="").ended
    heart.stop(ended=True)
    assert len(store.seen) == len(beats)


def test_a_run_that_stops_without_ending_is_not_marked() -> None:
    store = Beats()
    heart = Heartbeat(store, RUN, interval=0.001)
    heart.start()
    assert store.third.wait(30)
    heart.stop(ended=False)
    assert not unseal(store.get(alive_key(RUN)), Alive, key="").ended


def test_a_heartbeat_survives_a_store_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    store = Beats(failing=2)
    heart = Heartbeat(store, RUN, interval=0.001)
    with caplog.at_level(logging.WARNING):
        heart.start()
        assert store.third.wait(30)
        heart.stop(ended=True)
    assert unseal(store.get(alive_key(RUN)), Alive, key="").ended
    assert "heartbeat of run 000001-aaaaaaaa" in caplog.text


def test_stopping_does_not_wait_for_a_store_that_never_answers() -> None:
    """F3"""
    store = GateStore(MemoryStore())
    heart = Heartbeat(store, RUN, interval=0.001)
    heart.start()
    assert store.arrived.wait(30)
    heart.stop(ended=True, timeout=0.01)
    store.gate.set()
    heart.stop(ended=True)
    assert unseal(store.get(alive_key(RUN)), Alive, key="").ended


def test_a_heart_that_never_started_can_be_stopped() -> None:
    store = Beats()
    Heartbeat(store, RUN).stop(ended=True)
    assert store.seen == []
