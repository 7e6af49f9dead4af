"""Automatic retention: a thread of rank 0 that prunes after a newer commit, so that no save ever waits for it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection

from ckpt.errors import CheckpointError
from ckpt.format.names import SnapshotId
from ckpt.history.clock import Clock
from ckpt.history.retention import Keep, execute, plan_prune
from storage_backends.base import StorageError, Store

log = logging.getLogger("ckpt")


class Sweeper:
    """Prunes by one `Keep` whenever it is nudged; nudges that come while it works become one. `breath`: makes what its
    thread calls to give way to training."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        keep: Keep,
        *,
        grace: float,
        listing_lag: float,
        breath: Callable[[], Callable[[], None]],
    ) -> None:
        self._store = store
        self._clock = clock
        self._keep = keep
        self._grace = grace
        self._listing_lag = listing_lag
        self._breath = breath
        self._wake = threading.Event()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def nudge(self) -> None:
        """A newer snapshot was committed. Returns at once."""
        self._wake.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="ckpt-sweeper", daemon=True)
            self._thread.start()

    def stop(self, timeout: float | None) -> bool:
        """Finish what was nudged, then end. False if that took longer than `timeout` seconds: a prune cut short is
        finished by the next one."""
        self._stopped.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout)
            return not self._thread.is_alive()
        return True

    def _work(self) -> None:
        breathe = self._breath()  # one per thread
        bare: Collection[SnapshotId] = ()
        while True:
            self._wake.wait()
            self._wake.clear()
            # Seen before the prune, not after: a nudge followed by stop() is still swept.
            last = self._stopped.is_set()
            try:
                plan = plan_prune(self._store, self._keep, grace=self._grace, bare=bare, breathe=breathe)
                bare = plan.bare
                execute(plan, self._store, listing_lag=self._listing_lag, clock=self._clock, breathe=breathe)
            except (StorageError, CheckpointError) as error:
                log.warning("retention did not finish, the next one goes on: %s", error)
            except Exception:
                log.exception("retention failed")
            if last and not self._wake.is_set():
                return
