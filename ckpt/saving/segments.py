"""Records on their way to the store: put together as segments, each put once, in order (no torch).

A segment names the step before its first record and the step of its last. A put that failed may have landed: the next
one begins where the last one that was seen to succeed ended, and holds the same records and more.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ckpt.format.journal import write_segment
from ckpt.format.names import RunId, SegmentName
from ckpt.saving.threads import background
from storage_backends.base import StorageError, Store

log = logging.getLogger("ckpt")

LARGEST = 32 << 20
"""Bytes of records in one segment, about: what waits for more is put when it is so large."""

PAUSES = (0.5, 1.0, 2.0, 5.0, 10.0)
"""Seconds between tries of a put that fails. The store has its own retries beneath."""


@dataclass(slots=True)
class _Waiting:
    run: RunId
    previous: int
    step: int
    data: bytes
    last: bool = False
    """Nothing follows it in its segment."""


class Segments:
    """One rank's segments, put by a thread of its own.

    Attributes:
        durable: (run, step) of the newest record that is on the store.
        failure: why the last put failed; None after one that did not. `broken`: why nothing is put any more.
        nbytes: bytes put; `held`: bytes that wait.
    """

    def __init__(self, store: Store, rank: int, age: float, told: Callable[[], None]) -> None:
        self._store, self._rank, self._age, self._told = store, rank, age, told
        self._changed = threading.Condition()
        self._waiting: deque[_Waiting] = deque()
        self._since = 0.0
        self._stopping = self._now = False
        self._thread: threading.Thread | None = None
        self.durable: tuple[RunId, int] | None = None
        self.failure: StorageError | None = None
        self.broken: str | None = None
        self.nbytes = self.held = self.count = 0

    def add(self, run: RunId, previous: int, step: int, data: bytes) -> None:
        with self._changed:
            if not self._waiting:
                self._since = time.monotonic()
            self._waiting.append(_Waiting(run, previous, step, data))
            self.held += len(data)
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="ckpt-segments", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def cut(self) -> None:
        """A snapshot was captured here: no segment leads past it, so that each is replayed from one snapshot alone."""
        with self._changed:
            if self._waiting:
                self._waiting[-1].last = True

    def forget(self) -> None:
        """What waits leads to nothing any more."""
        with self._changed:
            self._waiting.clear()
            self.held = 0

    def stop(self, timeout: float | None) -> bool:
        """Put what waits, and end. False if that takes longer than `timeout` seconds."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread is None:
            return True
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _due(self) -> bool:
        if not self._waiting:
            return False
        return self._stopping or self.held >= LARGEST or time.monotonic() - self._since >= self._age

    def _serve(self) -> None:
        try:
            self._put_all()
        except BaseException as error:  # whoever waits for what would have been put must learn of it
            self.broken = f"{type(error).__name__}: {error}"
            self._told()
            raise

    def _put_all(self) -> None:
        background()
        failed = 0
        while True:
            with self._changed:
                while not self._due() and not self._stopping:
                    left = self._since + self._age - time.monotonic() if self._waiting else None
                    self._changed.wait(left)
                batch = self._batch()
            if not batch:
                return
            name = SegmentName(batch[0].run, self._rank, batch[0].previous, batch[-1].step)
            data = write_segment([waiting.data for waiting in batch])
            try:
                self._store.put(name.key, data)
            except StorageError as error:
                self.failure = error
                log.warning("journal: steps %d to %d: %s", name.previous + 1, name.step, error)
                with self._changed:
                    if self._stopping and failed >= 2:
                        return
                    self._changed.wait(PAUSES[min(failed, len(PAUSES) - 1)])
                failed += 1
                continue
            failed = 0
            with self._changed:
                self.failure = None
                self.durable = batch[-1].run, batch[-1].step
                self.nbytes += len(data)
                self.count += 1
                for waiting in batch:
                    if self._waiting and self._waiting[0] is waiting:
                        self._waiting.popleft()
                        self.held -= len(waiting.data)
                self._since = time.monotonic()
            self._told()

    def _batch(self) -> list[_Waiting]:
        """The records of the next segment: of one run, in an unbroken row."""
        batch: list[_Waiting] = []
        size = 0
        for waiting in self._waiting:
            if batch and (
                batch[-1].last or waiting.run != batch[-1].run or waiting.previous != batch[-1].step or size >= LARGEST
            ):  # fmt: skip
                break
            batch.append(waiting)
            size += len(waiting.data)
        return batch
