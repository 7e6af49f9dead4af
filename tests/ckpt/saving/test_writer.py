"""One save at a time, whatever goes wrong: what is told, what is left on the store, and that the next save works."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from itertools import count

import numpy as np
import pytest

from ckpt.errors import SaveFailed, StoreInUse
from ckpt.format.codec import Codec
from ckpt.format.manifest import RunDoc, Snapshot, seal
from ckpt.format.names import RunId, run_key
from ckpt.history import commit
from ckpt.history.clock import SystemClock
from ckpt.saving.job import Failed, Outcome, Saved, SaveJob
from ckpt.saving.writer import UPLOADS, Writer, WriterSettings
from storage_backends.base import Buffer, Refused, Store, Unavailable
from storage_backends.memory import MemoryStore
from tests.ckpt.saving.jobs import RUN, Saver, State, bf16, chunks_of, fp32, holds, job_of, part_of, snapshots
from tests.support.faulty import Crash, FaultyStore, GateStore


def states(count: int) -> list[State]:
    """A sparse leaf, a dense one, a still one and small ones, step by step."""
    rng = np.random.default_rng(3)
    bits = (rng.standard_normal(8192).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    still = fp32(rng.standard_normal(2048))
    found: list[State] = []
    for step in range(count):
        bits = bits.copy()
        bits[rng.integers(0, 8192, 40)] += 1
        found.append(
            {
                "sparse": bf16(bits),
                "dense": fp32(rng.standard_normal(2048), "slot:exp_avg"),
                "still": still,
                "step": fp32(np.float32(step), "slot:step"),
                "norm": fp32(rng.standard_normal(16)),
            }
        )
    return found


class Counting(MemoryStore):
    """How many puts were under way at most."""

    def __init__(self) -> None:
        super().__init__()
        self._now = self.most = 0
        self._both = threading.Barrier(UPLOADS)

    def put(self, key: str, data: Buffer) -> None:
        self._now += 1
        self.most = max(self.most, self._now)
        if key.startswith("packs/"):
            self._both.wait(60)  # so that each waits for as many as are allowed
        super().put(key, data)
        self._now -= 1


def test_transfers_are_parallel_and_bounded() -> None:
    store = Counting()
    state: State = {"t": fp32(np.random.default_rng(0).standard_normal(64 * 1024))}
    saved = Saver(store, WriterSettings(workers=1, pack_limit=1 << 15)).saved(state, 1)
    assert saved.report.packs > 5 and saved.report.packs % UPLOADS == 0
    assert store.most == UPLOADS


# --- the hand-over ---------------------------------------------------------------------------------------------------


def test_submit_returns_at_once_and_takes_one_save_at_a_time() -> None:
    gate = GateStore(MemoryStore())
    saver = Saver(gate)
    one, two = states(2)
    first = saver.start(job_of(one, 1))
    assert gate.arrived.wait(30)
    assert saver.writer.busy
    with pytest.raises(RuntimeError, match="step 2: the save before is still in flight"):
        saver.writer.submit(job_of(two, 2), lambda outcome: None)
    with pytest.raises(RuntimeError, match="while a save is in flight"):
        saver.writer.adopt(None)
    assert not saver.writer.wait(0)
    gate.gate.set()
    assert isinstance(first(), Saved)
    assert not saver.writer.busy
    assert holds(gate, saver.saved(two, 2).snapshot, two)


def test_whoever_learns_the_outcome_may_submit_the_next_save_at_once() -> None:
    saver = Saver(MemoryStore())
    outcomes: list[Outcome] = []
    over = threading.Event()
    jobs = iter([job_of(state, step) for step, state in enumerate(states(5), start=1)])

    def go_on(outcome: Outcome) -> None:
        outcomes.append(outcome)
        if (job := next(jobs, None)) is not None:
            saver.writer.submit(job, go_on)
        else:
            over.set()

    saver.writer.submit(next(jobs), go_on)
    assert over.wait(30)
    assert [type(o) for o in outcomes] == [Saved] * 5


def test_wait_ends_after_the_outcome_was_told() -> None:
    saver = Saver(MemoryStore())
    told = threading.Event()
    slow = threading.Event()

    def done(outcome: Outcome) -> None:
        assert slow.wait(30)
        told.set()

    saver.writer.submit(job_of(states(1)[0], 1), done)
    assert not saver.writer.wait(0)
    slow.set()
    assert saver.writer.wait(30)
    assert told.is_set()


def test_a_listener_that_raises_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    saver = Saver(MemoryStore())

    def done(outcome: Outcome) -> None:
        raise KeyError("listener")

    one, two = states(2)
    saver.writer.submit(job_of(one, 1), done)
    assert saver.writer.wait(30)
    assert "step 1: whoever waited for its outcome failed" in caplog.text
    assert holds(saver.store, saver.saved(two, 2).snapshot, two)


def test_the_report_adds_up() -> None:
    saver = Saver(MemoryStore())
    one, two = states(2)
    saver.saved(one, 1)
    outcome = saver.saved(two, 2)
    report = outcome.report
    assert report.captured == job_of(two, 2).layout.nbytes
    assert 0 < report.stored < report.changed < report.captured
    assert sum(report.kinds.values()) == report.stored == outcome.snapshot.totals.stored
    assert report.document == outcome.snapshot.parts[0].length
    assert report.packs == 2
    assert {"encode", "upload", "store", "part", "commit", "total"} == set(report.seconds)


def test_values_metrics_and_aliases_are_in_the_part() -> None:
    saver = Saver(MemoryStore())
    job = replace(job_of(states(1)[0], 1), metrics={"loss": 0.5}, aliases={"tied": "norm"}, time=12.5)
    outcome = saver.start(job)()
    assert isinstance(outcome, Saved)
    part = part_of(saver.store, outcome.snapshot)
    assert (part.metrics, part.aliases, part.time, bytes(part.values["epoch"])) == (
        {"loss": 0.5}, {"tied": "norm"}, 12.5, b"3"
    )  # fmt: skip


def test_a_save_tells_how_long_it_blocked_and_how_long_the_one_before_took() -> None:
    """How long it takes itself until it is durable it cannot tell: its documents are written before that."""
    saver = Saver(MemoryStore())

    def told(step: int, run: RunId = RUN, **measured: float) -> Snapshot:
        outcome = saver.start(replace(job_of(states(1)[0], step, run=run), **measured))()
        assert isinstance(outcome, Saved)
        part = part_of(saver.store, outcome.snapshot)
        assert (part.blocked, part.durable) == (outcome.snapshot.blocked, outcome.snapshot.durable)
        return outcome.snapshot

    first = told(1, asked=time.perf_counter() - 100.0, blocked=0.25)
    second = told(2)
    third = told(3, asked=time.perf_counter(), blocked=0.75)
    other = told(4, RunId(9, "0ddba11e"), asked=1.0, blocked=1.0)
    assert [snapshot.blocked for snapshot in (first, second, third)] == [0.25, None, 0.75]
    assert first.durable is None and second.durable is not None
    assert second.durable[0] == 1 and 100 < second.durable[1] < 160
    assert third.durable is None, "nobody measured the second"
    assert other.durable is None, "the third is not of its run"


# --- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lands", [False, True])
@pytest.mark.parametrize("error", [Unavailable, Refused])
def test_after_a_failure_at_any_write_the_next_save_is_exact(
    lands: bool, error: type[Unavailable] | type[Refused]
) -> None:
    """A1: each write call in turn fails in the second save; the third holds all that changed since the first."""
    one, two, three = states(3)
    for n in count(1):
        store = FaultyStore(MemoryStore(), fail_at=n, error=error, lands=lands, verbs=frozenset({"put"}))
        saver = Saver(store)
        quiet = Saver(store.survived())
        quiet.saved(one, 1)
        saver.writer.adopt(quiet.writer.reference)
        second = saver.save(two, 2)
        if not store.fired:
            break
        if isinstance(second, Failed):
            assert isinstance(second.error, SaveFailed)
            assert second.error.step == 2
        third = saver.saved(three, 3)
        assert holds(store, third.snapshot, three)
        listed = snapshots(store)
        assert {s.step for s in listed.values()} >= {1, 3}
        for snapshot in listed.values():
            assert holds(store, snapshot, [one, two, three][snapshot.step - 1])
    assert n > 4, "packs, a part and a snapshot are at least four writes"


def test_a_crash_at_any_call_leaves_only_whole_snapshots() -> None:
    """C1 at this floor: Crash is a BaseException, and the dead make no more calls."""
    all_states = states(3)
    for n in count(1):
        store = FaultyStore(MemoryStore(), crash_at=n)
        saver = Saver(store)
        steps = []
        for step, state in enumerate(all_states, start=1):
            outcome = saver.save(state, step)
            if isinstance(outcome, Saved):
                steps.append(step)
            else:
                assert isinstance(outcome.error.__cause__, Crash)
        survived = store.survived()
        listed = snapshots(survived)
        assert {s.step for s in listed.values()} >= set(steps)
        for snapshot in listed.values():
            assert holds(survived, snapshot, all_states[snapshot.step - 1])
        again = Saver(survived, run=RunId(2, "0badcafe"))
        assert holds(survived, again.saved(all_states[2], 3).snapshot, all_states[2])
        if not store.fired:
            break
    assert n > 15


def test_a_write_that_raises_once_is_told_with_step_stage_and_cause() -> None:
    """F1."""
    one, two = states(2)
    store = FaultyStore(MemoryStore(), fail_at=1, where=lambda key: key.startswith("packs/"))
    saver = Saver(store)
    failed = saver.failed(one, 1)
    assert isinstance(failed.error, SaveFailed)
    assert (failed.error.step, failed.error.stage) == (1, "upload")
    assert isinstance(failed.error.__cause__, Unavailable)
    assert "step 1, rank 0: upload failed" in str(failed.error)
    assert failed.report.captured > 0
    assert saver.writer.reference is None
    assert holds(store, saver.saved(two, 2).snapshot, two)


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt, SystemExit, ValueError])
@pytest.mark.parametrize("at", [0, 3])
def test_whatever_is_raised_while_encoding_fails_that_save_only(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException], at: int
) -> None:
    """F4, M1: the encoder raises, at once or after some chunks: nothing names what that save put."""
    one, two = states(2)
    encode, calls = Codec.encode, count()

    def broken(self, kind, new, base, dtype):  # type: ignore[no-untyped-def]
        if next(calls) == at:
            raise error("encoder")
        return encode(self, kind, new, base, dtype)

    monkeypatch.setattr(Codec, "encode", broken)
    saver = Saver(MemoryStore(), WriterSettings(workers=1, pack_limit=8192))
    failed = saver.failed(one, 1)
    assert isinstance(failed.error, SaveFailed)
    assert failed.error.stage == "encode"
    assert isinstance(failed.error.__cause__, error)
    assert snapshots(saver.store) == {}
    assert list(saver.store.list("parts/")) == []
    outcome = saver.saved(two, 2)
    assert holds(saver.store, outcome.snapshot, two)
    assert not any("/000000000001/" in key for key, _ in outcome.snapshot.packs)


def test_whatever_is_raised_on_the_writers_own_thread_fails_that_save_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """F4."""
    publish, errors = commit.publish, [MemoryError("no memory"), KeyboardInterrupt(), RecursionError("deep")]

    def broken(*args, **named):  # type: ignore[no-untyped-def]
        if errors:
            raise errors.pop()
        return publish(*args, **named)

    monkeypatch.setattr(commit, "publish", broken)
    saver = Saver(MemoryStore())
    *three, last = states(4)
    for step, state in enumerate(three, start=1):
        assert saver.failed(state, step).report.stored > 0
        assert saver.writer.wait(0), "wait() ends in bounded time"
    outcome = saver.saved(last, 4)
    assert outcome.snapshot.reference is None
    assert holds(saver.store, outcome.snapshot, last)


def test_a_failed_save_lets_go_of_the_state_while_its_error_is_kept() -> None:
    store = FaultyStore(MemoryStore(), fail_at=1, where=lambda key: key.startswith("parts/"))
    saver = Saver(store)
    job = job_of(states(1)[0], 1)
    data = weakref.ref(job.data)
    failed = saver.start(job)()
    del job
    gc.collect()
    assert isinstance(failed, Failed)
    assert data() is None


# --- the commit ------------------------------------------------------------------------------------------------------


class StillClock:
    """Time stands still; whoever sleeps is awake again when the test says so."""

    def __init__(self) -> None:
        self.asleep = threading.Event()
        self.wake = threading.Event()

    def monotonic(self) -> float:
        return 0.0

    def wall(self) -> float:
        return 0.0

    def sleep(self, seconds: float) -> None:
        self.asleep.set()
        assert self.wake.wait(60)


def other_ranks_job(job: SaveJob, rank: int) -> SaveJob:
    """What another rank of two holds: a leaf of its own."""
    mine = job_of({f"only{rank}": fp32(np.full(5, rank))}, job.id.step)
    return replace(mine, rank=rank, world_size=2, id=job.id)


def test_a_save_whose_commit_cannot_come_is_given_up_and_the_older_reference_stays(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """PROTOCOL §4.3: the commit lands after all; the next save says so, and still leans on the older one."""
    caplog.set_level(logging.INFO)
    store = MemoryStore()
    clock = StillClock()
    writer = Writer(store, clock, WriterSettings(workers=1))
    one, two, three = states(3)
    layout = job_of(one, 1).layout

    def start(state: State, step: int) -> tuple[SaveJob, list[Outcome]]:
        job = replace(job_of(state, step, layout=layout), world_size=2)
        outcomes: list[Outcome] = []
        writer.submit(job, outcomes.append)
        return job, outcomes

    def other(job: SaveJob) -> None:
        """The other rank comes, and commits where this rank's part is there."""
        outcomes: list[Outcome] = []
        second = Writer(store, SystemClock(), WriterSettings(workers=1, commit_wait=30))
        second.submit(other_ranks_job(job, 1), outcomes.append)
        assert second.wait(60)
        assert isinstance(outcomes[0], Saved)
        assert second.stop(30)

    job, first = start(one, 1)
    assert clock.asleep.wait(30)
    other(job)
    clock.wake.set()
    assert writer.wait(30)
    assert isinstance(first[0], Saved)

    clock.asleep.clear()
    clock.wake.clear()
    job, second = start(two, 2)
    assert clock.asleep.wait(30)
    writer.abandon(1)
    writer.abandon(2)
    clock.wake.set()
    assert writer.wait(30)
    assert isinstance(second[0], Failed)
    assert isinstance(second[0].error, SaveFailed)
    assert second[0].error.stage == "commit"
    assert writer.reference is not None
    assert writer.reference.id.step == 1

    other(job)  # rank 1 was only late: step 2 exists now
    clock.asleep.clear()
    clock.wake.clear()
    job, third = start(three, 3)
    assert clock.asleep.wait(30)
    assert "step 2 was reported as failed, but its commit has landed" in caplog.text
    other(job)
    clock.wake.set()
    assert writer.wait(30)
    assert isinstance(third[0], Saved)
    assert part_of(store, third[0].snapshot).reference == f"{RUN}-000000000001"
    assert third[0].snapshot.reference == f"{RUN}-000000000001"
    assert not any("/000000000002/" in b.pack for c in chunks_of(store, third[0].snapshot) for b in c.blobs)
    assert writer.stop(30)


def test_a_newer_run_stops_the_commit_and_is_named() -> None:
    store = MemoryStore()
    saver = Saver(store)
    one, two = states(2)
    saver.saved(one, 1)
    newer = RunId(2, "0000beef")
    store.put(run_key(newer), seal(RunDoc(1, str(newer), 1, "host7", 42, "", "", "", None, 0.0, None, {})))
    failed = saver.failed(two, 2)
    assert isinstance(failed.error, StoreInUse)
    assert "host7" in str(failed.error)
    assert {i.step for i in snapshots(store)} == {1}


# --- stopping --------------------------------------------------------------------------------------------------------


def writer_threads() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name.startswith("ckpt-")}


@pytest.fixture
def fresh_threads() -> Iterator[set[threading.Thread]]:
    """The writer's threads that the test starts."""
    before = writer_threads()
    found: set[threading.Thread] = set()
    yield found
    for thread in writer_threads() - before | found:
        thread.join(30)
        assert not thread.is_alive()


def test_stop_lets_the_save_in_flight_end_and_then_the_threads(fresh_threads: set[threading.Thread]) -> None:
    gate = GateStore(MemoryStore())
    saver = Saver(gate)
    state = states(1)[0]
    outcome = saver.start(job_of(state, 1))
    assert gate.arrived.wait(30)
    assert not saver.writer.stop(0)
    gate.gate.set()
    assert saver.writer.stop(30)
    assert isinstance(outcome(), Saved)
    with pytest.raises(RuntimeError, match="step 2: this writer was stopped"):
        saver.writer.submit(job_of(state, 2), lambda outcome: None)


def test_stop_before_anything_was_submitted_is_nothing(fresh_threads: set[threading.Thread]) -> None:
    assert Saver(MemoryStore()).writer.stop(0)


def test_stop_does_not_wait_longer_than_it_is_told_for_a_store_that_never_returns() -> None:
    """F3: the threads are left behind, and being daemons do not keep the process."""
    gate = GateStore(MemoryStore())
    saver = Saver(gate)
    saver.start(job_of(states(1)[0], 1))
    assert gate.arrived.wait(30)
    assert not saver.writer.stop(0.01)
    assert all(t.daemon for t in writer_threads())
    assert snapshots(gate) == {}
    gate.gate.set()
    assert saver.writer.wait(30)


def test_a_save_that_only_waits_for_its_commit_is_given_up_when_stopping_takes_too_long() -> None:
    clock = StillClock()
    writer = Writer(MemoryStore(), clock, WriterSettings(workers=1))
    outcomes: list[Outcome] = []
    writer.submit(replace(job_of(states(1)[0], 1), world_size=2), outcomes.append)
    assert clock.asleep.wait(30)
    assert not writer.stop(0.01)
    clock.wake.set()
    assert writer.wait(30)
    assert isinstance(outcomes[0], Failed)
    assert "gave up waiting" in str(outcomes[0].error)


SCRIPT = """
import atexit, sys
sys.path.insert(0, {root!r})
from storage_backends.local import LocalStore
from tests.ckpt.saving.jobs import Saver, job_of
from tests.ckpt.saving.test_writer import states
from tests.support.faulty import GateStore

gate = GateStore(LocalStore({path!r}))
saver = Saver(gate)

def flush():
    gate.gate.set()
    assert saver.writer.wait(60)

atexit.register(flush)
outcome = saver.start(job_of(states(1)[0], 1))
assert gate.arrived.wait(60)
"""


def test_a_script_that_falls_off_its_end_still_makes_its_last_save_durable(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """F3 at this floor: the threads go on while the interpreter shuts down, as long as somebody waits for them."""
    from pathlib import Path

    from storage_backends.local import LocalStore

    root = str(Path(__file__).parents[3])
    script = SCRIPT.format(root=root, path=str(tmp_path))
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
    store: Store = LocalStore(tmp_path)
    (snapshot,) = snapshots(store).values()
    assert holds(store, snapshot, states(1)[0])


# --- memory ----------------------------------------------------------------------------------------------------------


class OverlapStore:
    """Counts encoded bytes that are not here yet; its first put waits until more than one pack's worth waits."""

    def __init__(self, inner: Store, enough: int) -> None:
        self.inner = inner
        self.enough = enough
        self.lock = threading.Lock()
        self.waiting = 0
        self.most = 0
        self.plenty = threading.Event()

    def __getattr__(self, name):  # type: ignore[no-untyped-def]
        return getattr(self.inner, name)

    def encoded(self, size: int) -> None:
        with self.lock:
            self.waiting += size
            self.most = max(self.most, self.waiting)
            if self.waiting >= self.enough:
                self.plenty.set()

    def put(self, key, data):  # type: ignore[no-untyped-def]
        if key.startswith("packs/"):
            assert self.plenty.wait(60), "encoding stood still while a pack was under way"
            with self.lock:
                self.waiting -= len(data)
        self.inner.put(key, data)


def test_encoding_goes_on_during_uploads_within_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, pack_limit = 4 << 20, 256 << 10
    store = OverlapStore(MemoryStore(), enough=2 * pack_limit)
    encode = Codec.encode

    def counted(self, kind, new, base, dtype):  # type: ignore[no-untyped-def]
        blob = encode(self, kind, new, base, dtype)
        store.encoded(len(blob))
        return blob

    monkeypatch.setattr(Codec, "encode", counted)
    settings = WriterSettings(workers=2, memory=memory, pack_limit=pack_limit)
    saver = Saver(store, settings, chunk=32768)  # type: ignore[arg-type]
    state = {f"w{i}": fp32(np.random.default_rng(i).standard_normal(1 << 18)) for i in range(16)}
    outcome = saver.saved(state, 1)
    assert outcome.report.stored > 12 << 20
    assert 2 * pack_limit <= store.most <= memory + pack_limit
