"""PROTOCOL.md §3 through the front door: who may write, who takes over, and what becomes of whom was taken for dead."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import count

import pytest

import ckpt
from ckpt import checkpointer
from ckpt.errors import CheckpointError
from ckpt.format.names import SnapshotId
from ckpt.history.catalog import read_history
from ckpt.history.clock import SystemClock
from ckpt.history.retention import execute, plan_prune
from ckpt.history.runs import newest_run, put_alive
from ckpt.saving.writer import WriterSettings
from storage_backends.base import StorageError, Store
from storage_backends.memory import MemoryStore
from tests.ckpt.history.making import FakeClock
from tests.faults.living import Book, Process, check_goes_on, check_store
from tests.support.faulty import VERBS, GateStore

pytestmark = pytest.mark.filterwarnings("ignore:step .* was not saved:RuntimeWarning")


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
