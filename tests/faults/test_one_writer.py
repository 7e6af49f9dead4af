"""PROTOCOL.md §3 through the front door: who may write, who takes over, and what becomes of whom was taken for dead."""

from __future__ import annotations

import logging
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path

import pytest
import torch

import ckpt
from ckpt import checkpointer
from ckpt.errors import CheckpointError, StoreInUse
from ckpt.format.names import SnapshotId
from ckpt.history.catalog import read_history
from ckpt.history.clock import SystemClock
from ckpt.history.retention import execute, plan_prune
from ckpt.history.runs import newest_run, put_alive
from ckpt.saving.writer import WriterSettings
from storage_backends.base import StorageError, Store
from storage_backends.local import LocalStore
from storage_backends.memory import MemoryStore
from tests.ckpt.history.making import FakeClock
from tests.faults.living import Book, Process, check_goes_on, check_store
from tests.support.faulty import VERBS, GateStore
from tests.support.procs import Job, run_ranks, succeed

pytestmark = pytest.mark.filterwarnings("ignore:.*step .* was not saved:RuntimeWarning")


@pytest.fixture(autouse=True)
def no_noise(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


def elsewhere(process: Process, store: Store) -> None:
    """Let it be a job of another host; whoever it watches meanwhile beats."""
    tenure = process.saver._tenure
    tenure._who = replace(tenure._who, host="elsewhere")
    clock = tenure._clock
    assert isinstance(clock, FakeClock)

    def beats(now: float) -> None:
        run = newest_run(store)
        assert run is not None
        put_alive(store, run, int(now), ended=False)

    clock.on_sleep = beats


def prune(store: Store, last: int) -> None:
    execute(plan_prune(store, ckpt.Keep(last=last), grace=0, threads=1), store, clock=SystemClock(), threads=1)


# --- the second one, and the one after ---------------------------------------------------------------------------


def test_a_job_that_was_overtaken_is_refused_by_name_whenever_it_saves_even_when_the_newer_one_has_ended() -> None:
    """E5: saving a step that has failed opens a run, and that must not be newer than the one that took over."""
    store, book = MemoryStore(), Book()
    with Process(store, book) as old:
        old.restore()
        assert old.save()
        with Process(store, book) as new:
            elsewhere(new, store)
            new.saver._tenure._clock = FakeClock()  # the old one falls silent
            assert new.restore() == 1
            for _ in range(2):
                assert new.save()
        newest = read_history(store).newest
        old.book = Book(book.pages, book.told)
        for back in (0, 1, 0, 0):
            old.step -= back
            assert not old.save()
            assert read_history(store).newest == newest
        with pytest.raises(
            StoreInUse, match=r"overtaken and must restore .* host elsewhere, pid \d+, no job id, started"
        ):
            old.saver.save(1)
        assert old.restore() == 3
        assert old.save()
        book.told = old.book.told
    check_store(store, book)
    check_goes_on(store, book)


def saves_fifty(url: str, name: str) -> None:
    """Steps from where the store is, fifty of them; the first job stands still in the middle until it is told."""
    tensor = torch.zeros(3000)
    with ckpt.Checkpointer(url, {"t": tensor}, mirror="off", options=ckpt.Options(heartbeat=HEARTBEAT[name])) as saver:
        try:
            start = saver.restore()
        except StoreInUse as error:
            print("refused", error.host, error.pid, error.job, error.started, error)
            return
        print("restored", start, float(tensor[0]))
        for step in range(start + 1, start + 51):
            tensor.fill_(step)
            saver.save(step).wait(60)
            if (name, step) == ("first", 25):
                print("half", flush=True)
                sys.stdin.readline()
        print("fifty", flush=True)
        sys.stdin.readline()


HEARTBEAT = {"first": 0.05, "second": 0.05, "third": "1h"}


@pytest.mark.e2e
def test_two_processes_that_save_the_same_fifty_steps_on_one_store_and_the_one_after_a_kill(tmp_path: Path) -> None:
    """E5: the second is refused by host, pid, job and start, while the first lives; dead, it is taken over at once
    (else the third would wait for three of its heartbeats of an hour)."""
    job_id = {"TORCHELASTIC_RUN_ID": "job 7"}
    with Job(saves_fifty, 1, [str(tmp_path), "first"], env=job_id) as first:
        first.until(0, "half")
        [second] = run_ranks(saves_fifty, 1, [str(tmp_path), "second"])
        word, host, pid, *rest = second.out.split()
        assert (word, host, int(pid)) == ("refused", socket.gethostname(), first.pid(0)), second.out
        assert f"pid {pid}, job job 7, started " in second.out
        assert rest[0:2] == ["job", "7"]
        assert abs(float(rest[2]) - time.time()) < 600
        first.tell(0)
        first.until(0, "fifty")
        first.kill(0)
        first.wait()
    with Job(saves_fifty, 1, [str(tmp_path), "third"]) as third:
        third.until(0, "restored 50 50.0")
        third.tell(0)
        third.until(0, "fifty")
        third.tell(0)
        succeed(third.wait())
    store = LocalStore(tmp_path)
    assert [id_.step for id_ in sorted(read_history(store).snapshots)] == list(range(1, 101))
    for step in (1, 50, 51, 100):
        assert set(ckpt.load(store, step)["t"].tolist()) == {step}


OPENING, RESTORING = 7, 30
"""Calls of a start between its look at runs/ and its document there, and those of all of its restore."""


# --- zombies -----------------------------------------------------------------------------------------------------


class Zombie:
    """An old job on a thread of its own, which stops before its n-th call to the store, heartbeats apart, until it is
    thawed: it restores, saves, saves its last step once more, prunes, saves again."""

    def __init__(self, store: Store, book: Book, n: int) -> None:
        numbers = count(1)
        self.store = store
        self.gate = GateStore(store, verbs=VERBS, where=lambda key: not key.startswith("alive/") and next(numbers) == n)
        self.book = Book(book.pages, book.told)
        self.failed: BaseException | None = None
        self._thread = threading.Thread(target=self._live, name="zombie")
        self._thread.start()

    def frozen(self) -> bool:
        """Wait until it has stopped; False: it has come to its end before its n-th call."""
        while not self.gate.arrived.wait(0.01):
            if not self._thread.is_alive():
                return self.gate.arrived.is_set()
        return True

    def thaw(self) -> None:
        self.gate.gate.set()
        self._thread.join(60)
        assert not self._thread.is_alive(), "it hangs"
        if self.failed is not None:
            raise self.failed

    def _live(self) -> None:
        try:
            with Process(self.gate, self.book) as process:
                elsewhere(process, self.store)
                process.restore()
                for back in (0, 0, 1):
                    process.step -= back
                    process.save()
                prune(self.gate, 2)
                process.save()
        except (StorageError, CheckpointError):
            return  # told, and so it ends
        except BaseException as error:
            self.failed = error


@pytest.fixture(scope="module", autouse=True)
def in_order() -> Iterator[None]:
    """Calls come in the same order each time, and who is silent is taken over without a wait."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpointer, "WriterSettings", partial(WriterSettings, workers=1))
        patch.setattr(checkpointer, "SystemClock", FakeClock)
        yield


@pytest.mark.parametrize("lives", [False, True], ids=["ended", "lives"])
def test_a_zombie_frozen_before_any_of_its_calls_never_becomes_newest_nor_harms_a_newer_job(lives: bool) -> None:
    """E5, B6, D4: meanwhile a new job has restored, saved, pruned with no grace, and ended, or goes on."""
    before, begun = MemoryStore(), Book()
    with Process(before, begun) as process:
        process.restore()
        for _ in range(2):
            assert process.save()
    fates = []
    for n in count(1):
        store, book = MemoryStore(), Book(dict(begun.pages), begun.told)
        for entry in before.list(""):
            store.put(entry.key, before.get(entry.key))
        zombie = Zombie(store, book, n)
        if not zombie.frozen():
            zombie.thaw()
            break
        with Process(store, book) as process:
            process.restore()
            for _ in range(2):
                assert process.save()
            prune(store, 1)
            overtaker = read_history(store).newest
            assert overtaker is not None
            if lives:
                zombie.thaw()
                # Frozen between its look at runs/ and its own document there, it is no older job but one that starts
                # at the same time: one of the two is refused.
                assert process.save() or newest_run(store) != overtaker.run, n
        if not lives:
            zombie.thaw()
        check_store(store, book)
        history = read_history(store)
        assert history.newest is not None
        fates.append(history.newest.run > overtaker.run)
        for run, doc in history.runs.items():
            # A job that only began to restore when it was frozen may go on, from what the other has saved.
            if run > overtaker.run and any(id_.run == run for id_ in history.snapshots):
                went_on = SnapshotId.parse(doc.resumed_from or "")
                assert went_on is not None and went_on >= overtaker, (n, run, went_on, overtaker)
                book.told = zombie.book.told
        check_goes_on(store, book)
    assert len(fates) > 60
    assert fates.count(True) <= (OPENING if lives else RESTORING), fates
