"""The background writer of one rank: one save at a time, from captured bytes to a commit that was seen.

The order of writes, and what a crash leaves behind:
  packs               nobody names them; prune removes them after `grace`;
  then the part       nobody names it; the step never existed;
  then the snapshot   (whoever is last writes it) a complete step.

The reference moves forward only when the commit was *seen*. A save that failed, for whatever reason, changes nothing
for the next one: that one leans on the last commit seen, whose packs every part says are still needed.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from ckpt.errors import CheckpointError, SaveFailed, StorageError, StoreInUse
from ckpt.format.manifest import PartHead, PartRef, digest128, write_part
from ckpt.format.names import PartName, SnapshotId
from ckpt.format.probe import Learned
from ckpt.history import commit
from ckpt.history.clock import Clock
from ckpt.history.keyed import key_of
from ckpt.saving.breath import Breath
from ckpt.saving.diff import Held
from ckpt.saving.job import Failed, Outcome, Reference, Report, Saved, SaveJob
from ckpt.saving.packing import Outbox, pack_limit
from ckpt.saving.policy import Rule
from ckpt.saving.storing import Bench, Storing, Tally
from ckpt.saving.threads import Crew, background, spare_cores
from storage_backends.base import Store

log = logging.getLogger(__name__)

UPLOADS = 2
"""Packs under way at once: one put's latency hides behind the other's bytes, and a pool would only take memory."""


@dataclass(frozen=True, slots=True)
class WriterSettings:
    """How one rank writes.

    Attributes:
        amplification: stored bytes one may have to read for a chunk, over those of a keyframe.
        commit_wait: seconds to wait for the other ranks' parts.
        memory: bytes beyond the two host buffers: half of it for encoded chunks until they are on the store, an eighth
            for what the encoders are given ahead; packs while they are joined, scratch and documents take of the rest.
        workers: encode threads; None: the spare cores.
        pack_limit: bytes of one pack at most; None: by the size of the state.
    """

    amplification: float = 1.5
    commit_wait: float = 600.0
    memory: int = 256 << 20
    workers: int | None = None
    pack_limit: int | None = None


@dataclass(frozen=True, slots=True)
class _Unseen:
    """A part that is on the store, perhaps, of a save whose commit was not seen."""

    id: SnapshotId
    own: PartRef


_Work: TypeAlias = tuple[SaveJob, Callable[[Outcome], None], Callable[[], None] | None]


class Writer:
    """Saves handed over one at a time are stored by threads of its own, all daemons at nice 19, which outlive whatever
    a save raises. Nothing here starts before the first `submit`."""

    def __init__(self, store: Store, clock: Clock, settings: WriterSettings) -> None:
        self._store = store
        self._clock = clock
        self._settings = settings
        self._learned = Learned()
        self._encoders = Crew("ckpt-encode", settings.workers or spare_cores(), Bench)
        self._uploaders = Crew("ckpt-upload", UPLOADS, lambda: None)
        self._thread: threading.Thread | None = None
        # Guards the fields up to the blank line. Re-entrant by default, as it must be: a signal handler may close the
        # checkpointer while the thread it interrupted is in here.
        self._changed = threading.Condition()
        self._next: _Work | None = None
        self._busy = False
        self._delivering = False
        self._handed_in = False
        self._usual = 0.0
        self._stopped = False
        self._give_up = False
        self._abandoned: int | None = None

        # Touched by whoever is the only one at work: the writer's thread while busy, else the caller.
        self._held: Held | None = None
        self._unseen: _Unseen | None = None
        self._durable: tuple[SnapshotId, float] | None = None

    # --- the caller's side ----------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether a save is in flight. False before `done` is called, so that `done` may wake who submits the next."""
        return self._busy

    @property
    def reference(self) -> Reference | None:
        """The last commit seen, which the next diff leans on; its `data` must not be written to."""
        held = self._held
        return None if held is None else held.reference

    def adopt(self, reference: Reference | None) -> None:
        """Lean on this committed state from now on (None: on nothing, the next save is full). A restore ends in it:
        what was the reference before may belong to a line that is abandoned now, and pruned soon.

        Its bytes need not be trusted: each chunk is compared with its digest before it is used.

        Raises:
            RuntimeError: a save is in flight.
            ValueError: the table or the bytes do not fit the layout.
        """
        with self._changed:
            if self._busy:
                raise RuntimeError("adopt() while a save is in flight; wait() first")
            if reference is None:
                self._held = None
            else:
                pieces, nbytes = len(reference.layout.pieces), reference.layout.nbytes
                if len(reference.table) != pieces or len(reference.data) != nbytes:
                    raise ValueError(
                        f"reference {reference.id}: {len(reference.table)} chunks and {len(reference.data)} bytes "
                        f"where its layout has {pieces} and {nbytes}"
                    )
                named = {blob.pack for chunk in reference.table for blob in chunk.blobs}
                unknown = named.union(*(loan.packs for loan in reference.loans.values())) - reference.packs.keys()
                if unknown:
                    raise ValueError(f"reference {reference.id}: no length is given for pack {min(unknown)}")
                self._held = Held(reference, bytearray(b"\1") * pieces)
            self._unseen = None

    def submit(
        self, job: SaveJob, done: Callable[[Outcome], None], ready: Callable[[], None] | None = None
    ) -> None:  # fmt: skip
        """Hand a save over and return at once. `done` is called on the writer's thread, exactly once. `ready` returns
        when all of ``job.data`` is there, or raises; None: it is.

        Raises:
            RuntimeError: a save is in flight, or the writer was stopped.
        """
        with self._changed:
            if self._stopped:
                raise RuntimeError(f"step {job.id.step}: this writer was stopped")
            if self._busy:
                raise RuntimeError(f"step {job.id.step}: the save before is still in flight; wait() first")
            self._start()
            work = (job, done, ready)
            # Stores only, no call between them: nothing that a signal handler raises can come in here, and leave a
            # writer that is busy with nothing.
            self._busy, self._handed_in, self._abandoned, self._next = True, False, None, work
            self._changed.notify_all()

    def abandon(self, step: int) -> None:
        """Another rank failed to save `step`: do not wait for its commit any longer, if it is in flight."""
        self._abandoned = step

    def leave(self) -> None:
        """From now on store packs and part, and do not wait for those of other ranks: one of them may be gone. If none
        is, whoever is last in finds all parts and commits."""
        self._give_up = True

    def wait(self, timeout: float | None = None) -> bool:
        """Until no save is in flight and its `done` has returned; False if that takes longer than `timeout` s."""
        with self._changed:
            self._changed.notify_all()  # a `submit` that was interrupted may not have
            return self._changed.wait_for(lambda: not (self._busy or self._delivering), timeout)

    def wait_handed_in(self, timeout: float | None = None) -> bool:
        """Until this rank has done its share of the save in flight: its part is on the store, or the save has failed.
        False if that takes longer than `timeout` s."""
        with self._changed:
            self._changed.notify_all()
            return self._changed.wait_for(lambda: self._handed_in or not (self._busy or self._delivering), timeout)

    def stop(self, timeout: float | None = None) -> bool:
        """Let the save in flight end, and then the threads. False if it has not within `timeout` seconds: it is told
        to give its commit up, and left behind; being daemons, its threads do not keep the process."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        idle = self.wait(timeout)
        if not idle:
            self._give_up = True
        return idle

    # --- the writer's thread --------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._encoders.start()
        self._uploaders.start()
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._serve, name="ckpt-writer", daemon=True)
            self._thread.start()

    def _serve(self) -> None:
        background()
        while (work := self._take()) is not None:
            job, done, ready = work
            outcome = self._outcome(job, ready)
            if isinstance(outcome, Failed):
                _forget_frames(outcome.error)  # only now, because `_outcome` is one of them
            with self._changed:
                self._busy, self._delivering = False, True
                self._changed.notify_all()
            try:
                done(outcome)
            except BaseException:  # the saves to come are worth more than this message
                log.exception("step %d: whoever waited for its outcome failed", job.id.step)
            with self._changed:
                self._delivering = False
                self._changed.notify_all()
            del work, job, done, ready, outcome  # they hold the captured state, and this thread now sleeps
        self._encoders.stop()
        self._uploaders.stop()

    def _take(self) -> _Work | None:
        """The next save, or None once the writer was stopped."""
        with self._changed:
            self._changed.wait_for(lambda: self._next is not None or self._stopped)
            work, self._next = self._next, None
            return work

    def _outcome(self, job: SaveJob, ready: Callable[[], None] | None) -> Outcome:
        tally = Tally()
        # Made before anything can go wrong: a process out of memory may not be able to make it afterwards.
        text = f"step {job.id.step}, rank {job.rank}: saving failed, and there was no memory left to say how"
        last_resort = Failed(SaveFailed(text, step=job.id.step, stage="writer"), Report())
        try:
            if ready is not None:
                tally.stage = "capture"
                mark = time.perf_counter()
                ready()
                tally.spend("capture", time.perf_counter() - mark)
            return self._save(job, tally)
        except BaseException as error:  # whatever it is, the next save must work (MemoryError, a crash in a test)
            try:
                return Failed(_failure(job, tally.stage, error), tally.report())
            except BaseException:
                return last_resort

    def _save(self, job: SaveJob, tally: Tally) -> Saved:
        breathe = Breath()
        started = time.perf_counter()
        self._look_again()
        ahead = self._settings.memory // 8
        outbox = Outbox(
            self._store,
            self._uploaders,
            job.id,
            job.rank,
            pack_limit=self._settings.pack_limit or pack_limit(job.layout.nbytes),
            memory=self._settings.memory // 2,
            breathe=breathe,
        )
        held = Storing(
            job,
            self._held,
            rule=Rule(self._settings.amplification),
            learned=self._learned,
            encoders=self._encoders,
            ahead=ahead,
            store=self._store,
            outbox=outbox,
            tally=tally,
            breathe=breathe,
            key=key_of(self._store),
        ).run()
        mark = time.perf_counter()
        reference = held.reference
        head = self._head(job, tally)
        data = write_part(head, job.layout, reference.table, reference.packs, breathe, reference.loans)
        own = PartRef(PartName(job.id, job.rank).key, len(data), digest128(data))
        tally.document = len(data)
        tally.spend("part", time.perf_counter() - mark)
        tally.stage = "upload"
        # From here on the step may come to exist, whatever happens to us.
        self._unseen = _Unseen(job.id, own)
        mark = time.perf_counter()
        own = commit.put_part(self._store, job.id, job.rank, data)
        with self._changed:
            self._handed_in = True
            self._changed.notify_all()
        tally.spend("upload", time.perf_counter() - mark)
        tally.stage = "commit"
        mark, handed_in = time.perf_counter(), self._clock.monotonic()
        snapshot = commit.publish(
            self._store,
            self._clock,
            id=job.id,
            rank=job.rank,
            world_size=job.world_size,
            own=own,
            wait=self._settings.commit_wait,
            stopped=lambda: self._give_up or self._abandoned == job.id.step,
            breathe=breathe,
            usual=self._usual,
        )
        if job.id.step % job.world_size != job.rank:  # whose turn it was did not wait for a commit, but for parts
            self._usual = self._clock.monotonic() - handed_in
        tally.spend("commit", time.perf_counter() - mark)
        self._durable = None if job.asked is None else (job.id, time.perf_counter() - job.asked)
        self._unseen = None
        self._advance(held, breathe)
        tally.spend("total", time.perf_counter() - started)
        return Saved(snapshot, tally.report())

    def _advance(self, held: Held, breathe: Breath) -> None:
        """The commit was seen."""
        freed = [] if self._held is None else list(self._held.reference.table)
        self._held = held
        while freed:  # chunk by chunk: a large table freed at once would hold the GIL
            freed.pop()
            breathe()

    def _head(self, job: SaveJob, tally: Tally) -> PartHead:
        reference, before, first = self.reference, self._durable, job.rank == 0
        return PartHead(
            run=job.id.run,
            step=job.id.step,
            world_size=job.world_size,
            rank=job.rank,
            ownership=job.ownership,
            reference=None if reference is None else reference.id,
            time=job.time,
            metrics=job.metrics,
            stored=dict(sorted(tally.stored.items())),
            aliases=job.aliases,
            replicas=job.replicas,
            values=job.values,
            others=job.others,
            blocked=job.blocked if first else None,
            cadence=job.cadence if first else None,
            durable=(before[0].step, before[1]) if first and before and before[0].run == job.id.run else None,
        )

    def _look_again(self) -> None:
        """Whether a commit that was not seen has come about meanwhile. Only to say so: the reference stays the older
        one, because the bytes of that state are gone, and every snapshot from the oldest reference upward is kept."""
        unseen, self._unseen = self._unseen, None
        if unseen is None:
            return
        try:
            landed = commit.look(self._store, unseen.id, unseen.own)
        except (StorageError, CheckpointError) as error:
            log.warning("step %d: whether it was committed after all is unknown: %s", unseen.id.step, error)
            return
        if landed is not None:
            log.warning("step %d was reported as failed, but its commit has landed: it exists", unseen.id.step)


def _failure(job: SaveJob, stage: str, error: BaseException) -> Exception:
    """What the ticket shows."""
    if isinstance(error, SaveFailed | StoreInUse):
        return error
    what = str(error) or "no more is known"
    text = (
        f"step {job.id.step}, rank {job.rank}: {stage} failed: {type(error).__name__}: {what}; "
        "the step was not seen committed, training may go on, and the next save stands by itself"
    )
    failure = SaveFailed(text, step=job.id.step, stage=stage)
    failure.__cause__ = error
    return failure


def _forget_frames(error: BaseException) -> None:
    """Let go of what the stack frames hold: views of the captured state and encoded chunks. A ticket keeps its error
    for long."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__cause__ or cause.__context__
