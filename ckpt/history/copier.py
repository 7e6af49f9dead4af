"""Copies are brought up to date by a thread of each rank, behind the saves: a fast tier's onto the durable one, and
what a place of a fan-out missed onto that place. Training and the writer never wait for it; `close()` does.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from ckpt.errors import CheckpointError
from ckpt.format.names import RunId
from ckpt.history.clock import Clock, countdown
from ckpt.history.copies import mend
from ckpt.history.levelling import Levelling
from ckpt.history.runs import newest_run
from ckpt.history.tiers import Tiers
from storage_backends.base import StorageError, Store
from storage_backends.copies import Copied
from storage_backends.fanout import FanoutStore
from storage_backends.tiered import TieredStore

log = logging.getLogger("ckpt")

RETRY = 30.0
"""Seconds until a pass that failed is tried again, unless a save comes first."""


class Chore(Protocol):
    """Something that is behind, and can catch up."""

    def catch_up(self, run: RunId) -> str | None:
        """Do all that can be done now; in words, what is still behind. Raises StorageError, CheckpointError."""
        ...


def chores(store: Store, clock: Clock, rank: int, world_size: int) -> list[Chore]:
    """What a rank has to do for this store; nothing for a plain one."""
    found: list[Chore] = []
    if isinstance(store, TieredStore):
        found.append(Tiers(store, clock, rank, world_size))
    if isinstance(store, FanoutStore):
        found.append(Levelling(store, first=rank == 0))
    if isinstance(store, Copied):
        found += [chore for place in store.places.values() for chore in chores(place, clock, rank, world_size)]
    return found


def bring_over(store: Store, clock: Clock) -> str | None:
    """Bring all copies up to date, here and now, as the only rank: for a verb that has written, or that repairs.

    Returns: in words, what is still behind.

    Raises:
        StorageError, CheckpointError: a place failed, or may not be written to.
    """
    todo = chores(store, clock, 0, 1)
    run = newest_run(store) if todo else None
    if run is None:
        return None
    return "; ".join(found for chore in todo if (found := chore.catch_up(run)) is not None) or None


class Copier:
    """The thread. It begins with the first `nudge`: a process that only reads copies nothing.

    Args:
        run: the run that is open, None between runs; asked at each pass.
    """

    def __init__(self, store: Store, todo: Sequence[Chore], run: Callable[[], RunId | None]) -> None:
        self._store = store
        self._chores = todo
        self._run = run
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._late: str | None = None

    def nudge(self) -> None:
        """There may be something to copy. Returns at once."""
        if not self._chores:
            return
        self._wake.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="ckpt-copier", daemon=True)
            self._thread.start()

    def stop(self, timeout: float | None) -> str | None:
        """Copy what is left, then end. In words what is not copied: a tier that fails, or is slower than `timeout`
        seconds; the next start of the job goes on with it. None if everything is."""
        if self._thread is None:
            return None
        left = countdown(timeout)
        self._stopping.set()
        self._wake.set()
        self._thread.join(left())
        return "still copying" if self._thread.is_alive() else self._late

    def _work(self) -> None:
        while True:
            again = not self._wake.wait(RETRY if self._late is not None else None)
            self._wake.clear()
            # Seen before the pass, not after: what was saved before stop() is still copied.
            last = self._stopping.is_set()
            late = self._pass()
            if late is not None and late != self._late and not again:
                log.warning("copies are behind: %s", late)
            self._late = late
            if last:
                return

    def _pass(self) -> str | None:
        run = self._run()
        if run is None:
            return self._late
        mend(self._store)
        late: list[str] = []
        for chore in self._chores:
            try:
                if (found := chore.catch_up(run)) is not None:
                    late.append(found)
            except (StorageError, CheckpointError) as error:
                late.append(str(error))
            except Exception as error:
                log.exception("copying failed")
                late.append(repr(error))
        return "; ".join(late) or None
