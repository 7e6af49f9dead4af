"""CASES.md, Storage, through the front door: what the disk says, call by call, and what the save makes of it."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any, cast

import pytest

import ckpt
from ckpt.errors import Refused, SaveFailed, Unavailable
from storage_backends.local import LocalStore
from storage_backends.memory import MemoryStore
from storage_backends.retry import RetryingStore
from storage_backends.system import System
from tests.faults.living import Book, Process, check_goes_on, check_store
from tests.support.faulty import FaultyStore, SizedStore

pytestmark = pytest.mark.filterwarnings("ignore:(.* have failed; )?step .* was not saved:RuntimeWarning")


class Breaking:
    """The system's calls, counted; from the n-th of those named on they fail (`for_ever`), or that one does."""

    def __init__(self) -> None:
        self._system = System()
        self._number = 0
        self.heal()

    def fail(self, number: int, at: int, *names: str, for_ever: bool) -> None:
        self._number, self._at, self._names, self._for_ever = number, at, names, for_ever
        self.calls, self.fired = 0, 0

    def heal(self) -> None:
        self.fail(0, 0, for_ever=False)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        real: Callable[..., Any] = getattr(self._system, name)

        def call(*args: Any, **named: Any) -> Any:
            if self._at and (name in self._names or not self._names) and name != "close":
                self.calls += 1
                if self.calls == self._at or (self._for_ever and self.calls > self._at):
                    self.fired += 1
                    raise OSError(self._number, os.strerror(self._number))
            return real(*args, **named)

        return call


class Naps:
    """Pauses between attempts, not slept."""

    def __init__(self) -> None:
        self.count = 0

    def sleep(self, seconds: float) -> None:
        self.count += 1


def on_disk(root: Path) -> tuple[Breaking, Naps, RetryingStore]:
    system, naps = Breaking(), Naps()
    return system, naps, RetryingStore(LocalStore(root, system=cast(System, system)), sleep=naps.sleep)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT], ids=errno.errorcode.get)
def test_a_save_outlives_whatever_fails_once_at_any_call_of_the_system(tmp_path: Path, number: int) -> None:
    """M5."""
    system, naps, store = on_disk(tmp_path)
    book = Book()
    with Process(store, book) as process:
        process.restore()
        assert process.save()
        for n in count(1, 7):
            system.fail(number, n, for_ever=False)
            assert process.save()
            if not system.fired:
                break
        system.heal()
        # Some are of no account, such as those of removing what is no longer needed.
        assert naps.count > 0.7 * n / 7
    assert n > 40, "the fault never fired: this test proves nothing"
    check_store(store, book)


@pytest.mark.parametrize(
    ("number", "name", "stride"),
    [
        (errno.ENOSPC, "write", 1),
        (errno.EDQUOT, "fsync", 1),  # quotas of network file systems show when written data are flushed
        (errno.EROFS, "open", 5),  # folders are opened too
        (errno.EACCES, "rename", 1),
    ],
    ids=["full", "quota", "read-only", "permission"],
)
def test_what_a_disk_refuses_from_any_write_on_fails_the_save_at_once_and_the_next_is_right(
    tmp_path: Path, number: int, name: str, stride: int
) -> None:
    """M5, C3: full, over quota, read-only, not allowed; among the writes the last one, of the commit."""
    system, naps, store = on_disk(tmp_path)
    book = Book()
    folders = set()
    with Process(store, book) as process:
        process.restore()
        assert process.save()
        for n in count(1, stride):
            system.fail(number, n, name, for_ever=True)
            ticket = process.begin_save()
            process.saver._writer.wait(60)
            fired = system.fired
            system.heal()
            if not fired:
                break
            error = ticket.error
            if error is None:  # only what comes after the commit was refused
                book.told = max(book.pages)
            else:
                assert isinstance(error, SaveFailed)
                folders.update(re.findall(r"(packs|parts|snapshots)/", str(error)))
                for part in (str(tmp_path), f"step {process.step}", "attempt", " s)", os.strerror(number)):
                    assert part in str(error), (part, str(error))
            assert process.save(), n
    assert naps.count == 0, "something that will not change was tried again"
    assert "packs" in folders and folders & {"parts", "snapshots"}, folders
    check_store(store, book)
    check_goes_on(store, book)


def test_training_goes_on_while_a_disk_stays_full_and_the_save_after_is_right() -> None:
    """M5."""
    sized, book = SizedStore(MemoryStore(), capacity=1 << 30), Book()
    with Process(RetryingStore(sized), book) as process:
        process.restore()
        assert process.save()
        sized.capacity = sized.used
        for _ in range(3):
            ticket = process.begin_save()
            process.saver._writer.wait(60)
            assert isinstance(ticket.error, SaveFailed)
            assert "no space left" in str(ticket.error)
        assert sized.refused >= 3
        sized.capacity = 1 << 30
        assert process.save()
    check_store(sized, book)
    check_goes_on(sized, book)


@pytest.mark.parametrize("error", [Unavailable, Refused])
@pytest.mark.parametrize("folder", ["packs/", "parts/", "snapshots/"])
def test_a_failed_save_says_store_key_attempts_and_time(folder: str, error: type[Unavailable] | type[Refused]) -> None:
    """M5; C3, where it is the last write that the store refuses."""
    faulty = FaultyStore(
        MemoryStore(),
        fail_at=1,
        error=error,
        for_ever=True,
        verbs=frozenset({"put"}),
        where=lambda k: k.startswith(folder),
    )
    store = RetryingStore(faulty, deadline=1.0)
    book = Book()
    with Process(store, book) as process:
        process.restore()
        ticket = process.begin_save()
        process.saver._writer.wait(60)
    assert faulty.fired
    failure = ticket.error
    assert isinstance(failure, SaveFailed)
    text = str(failure)
    assert re.search(rf"memory-store:memory: .*{folder}", text), text
    found = re.search(r"after (\d+) attempts? in (\d+\.\d) s", text)
    assert found, text
    assert (int(found[1]) == 1) == (error is Refused)
    assert float(found[2]) <= 1.5
    cause = failure.__cause__
    assert isinstance(cause, error)
    assert (cause.store, cause.attempts) == ("memory-store:memory", int(found[1]))
    assert cause.key.startswith(folder)
    assert not ckpt.History(faulty.survived()).list()
