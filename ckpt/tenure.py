"""The run this job holds on the store: opening one on all ranks, saying that it is alive, ending it.

Rank 0 opens and beats; the others learn the run's name. A run is opened before the first pack is read or written
(PROTOCOL.md §3).
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from ckpt.agreement import Group, on_first
from ckpt.errors import HistoryExists
from ckpt.format.names import RUNS, SNAPSHOTS, RunId, SnapshotId, SnapshotName, parse_run_key, run_key
from ckpt.history.clock import Clock
from ckpt.history.runs import Heartbeat, Identity, claimed_by_prune, ensure_store, history_exists, in_use, open_run
from storage_backends.base import Refused, StorageError, Store
from storage_backends.tiered import near

PATIENCE = 5.0
"""Seconds that the last beat may take: without it the next job only waits a little longer."""


class Team(Group, Protocol):
    """The ranks of a job, as far as opening a run needs them."""

    def gather(self, data: bytes) -> list[bytes]: ...


class Tenure:
    """At most one open run. Every method that says so is collective, on the main thread."""

    def __init__(self, store: Store, clock: Clock, group: Team, who: Identity, interval: float) -> None:
        self._store = store
        self._clock = clock
        self._group = group
        self._who = who
        self._interval = interval
        self._heart: Heartbeat | None = None
        self._entered = False  # this job's state is of a line of this store: restored from it, or begun on it
        self._mine: set[str] = set()  # nonces of runs that this job has opened, or tried to; on rank 0
        self._last: RunId | None = None  # the newest of those it has opened
        self.run: RunId | None = None

    def open(self, resumed_from: SnapshotId | None, *, fresh: bool) -> RunId:
        """End the run that is open, if one is, and open the next, without restoring. Collective.

        Args:
            resumed_from: the snapshot that this job's state goes on from, or None for a start from nothing.
            fresh: False refuses a store that has a history in which this job has no part.

        Raises:
            HistoryExists: `fresh` is False and the store is not empty.
            StoreInUse: another live job writes there; or one has opened a run since this job opened its last. It may
                have ended since: all that it has saved would be abandoned by a run opened now.
        """
        run = self._open(resumed_from, fresh or self._entered, overtakes=False)
        self._entered = True
        return run

    @contextmanager
    def trying(self) -> Iterator[None]:
        """Around a restore: a run that was opened for it is ended if it fails, since that one says it goes on from a
        snapshot which did not become the state. Then nothing is saved beside a history by surprise."""
        before = self.run
        try:
            yield
        except BaseException:
            if self.run != before:
                self.close()
            raise
        self._entered = True

    def claim(self, snapshot: SnapshotId) -> bool:
        """Open a run that resumes from `snapshot`, and look whether a prune has announced its end. Collective."""
        self._open(snapshot, fresh=True)
        return on_first(self._group, lambda: str(int(not claimed_by_prune(self._store, snapshot))).encode()) == b"1"

    def settled(self, newest: SnapshotId | None) -> bool:
        """Whether nothing newer than what a restore went by has been committed until this job's run was there. It is
        opened here where there was nothing to claim. Collective.

        A process may stand still for hours between looking for the newest snapshot and claiming it, and another start
        may have come, saved and gone; its run, being older, would be abandoned with all that it saved."""
        if newest is None:
            self._open(None, fresh=True)
        return on_first(self._group, lambda: str(int(not self._newer(newest))).encode()) == b"1"

    def _newer(self, than: SnapshotId | None) -> bool:
        names = (SnapshotName.parse(entry.key) for entry in self._store.list(SNAPSHOTS))
        return any(name is not None and (than is None or name.id > than) for name in names)

    def close(self, *, ended: bool = True, timeout: float | None = None) -> None:
        """Stop the heartbeat; `ended` tells the next job that it need not wait. Takes a few seconds at most, and at
        most `timeout`. Not collective."""
        heart, self._heart, self.run = self._heart, None, None
        if heart is not None:
            heart.stop(ended=ended, timeout=PATIENCE if timeout is None else min(PATIENCE, timeout))

    def _open(self, resumed_from: SnapshotId | None, fresh: bool, *, overtakes: bool = True) -> RunId:
        self.close()
        opened = on_first(self._group, lambda: self._open_on_first(resumed_from, fresh, overtakes))
        self.run = self._last = run = self._opened(opened)
        self._share_the_fast_tier(run)
        return run

    def _share_the_fast_tier(self, run: RunId) -> None:
        """Every rank must find on its fast tier what rank 0 has just written there: a save is committed by whoever
        finds the parts of all ranks on it. Disks of several nodes under one path would look like one tier.

        Raises:
            Refused: they are not one place; on all ranks.
        """
        fast = near(self._store)
        if fast is self._store or self._group.world_size == 1:
            return
        try:
            fast.get_range(run_key(run), 0, 1)
            found = b""
        except StorageError as error:
            found = f"{socket.gethostname()}: {error}".encode()
        blind = {rank: text.decode() for rank, text in enumerate(self._group.gather(found)) if text}
        if blind:
            self.close()
            rank, text = next(iter(blind.items()))
            raise Refused(
                f"{fast.url} is not one place for all ranks: {len(blind)} of them do not find what rank 0 wrote there, "
                f"first rank {rank} ({text}); give a fast tier that all nodes share, or the durable tier alone",
                store=fast.url,
                key=run_key(run),
            )

    def _open_on_first(self, resumed_from: SnapshotId | None, fresh: bool, overtakes: bool) -> bytes:
        if not fresh and history_exists(self._store):
            raise HistoryExists(
                f"{self._store.url} already holds checkpoints, and this job neither restored from them nor said "
                "fresh=True; call restore() first, pass fresh=True to start a new line, or choose another URL"
            )
        if not overtakes:
            self._check_not_overtaken()
        ensure_store(self._store)
        if (fast := near(self._store)) is not self._store:
            ensure_store(fast)
        run = open_run(
            self._store,
            self._clock,
            world_size=self._group.world_size,
            resumed_from=resumed_from,
            who=self._who,
            interval=self._interval,
            nonce=self._nonce,
        )
        if not overtakes:
            self._check_not_overtaken()  # this process may have stood still since it asked first
        self._heart = Heartbeat(self._store, run, self._interval)
        self._heart.start()
        return str(run).encode()

    def _check_not_overtaken(self) -> None:
        """Raises StoreInUse if anybody else has opened a run since this job opened its last."""
        if self._last is None:
            return
        runs = (parse_run_key(entry.key) for entry in self._store.list(RUNS))
        others = [run for run in runs if run is not None and run > self._last and run.nonce not in self._mine]
        if others:
            text = "this job was overtaken and must restore before it saves again, a newer one was started"
            raise in_use(self._store, max(others), text)

    def _nonce(self) -> str:
        nonce = secrets.token_hex(4)
        self._mine.add(nonce)
        return nonce

    @staticmethod
    def _opened(name: bytes) -> RunId:
        run = RunId.parse(name.decode())
        assert run is not None, name  # comes from rank 0's own code, not from a store
        return run
