"""The front door: one object that a training loop talks to (torch).

It makes the rooms that a save and a restore go through, and ends them in order.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Literal, NoReturn, Self

from ckpt import exits
from ckpt.ballot import Call
from ckpt.cadence import Adaptive, Pace
from ckpt.data import Position
from ckpt.errors import CheckpointError, SaveFailed
from ckpt.history.clock import SystemClock, countdown
from ckpt.history.copier import Copier, chores
from ckpt.history.failures import observed
from ckpt.history.keyed import store_at
from ckpt.history.retention import Keep
from ckpt.history.runs import identity
from ckpt.history.sweeper import Sweeper
from ckpt.leaves import Flat, Flattener
from ckpt.mirror.mirror import open_mirror
from ckpt.mirror.ring import ring_records
from ckpt.options import Journal, Options, one_of, seconds, size
from ckpt.outcomes import Outcomes, Stats
from ckpt.progress import waiting
from ckpt.random_states import set_random_states
from ckpt.ranks import open_ranks, torchrun_job
from ckpt.resuming import reference_after
from ckpt.saves import Saves
from ckpt.saving.breath import Breath
from ckpt.saving.journal import Journaling
from ckpt.saving.opening import Place, open_journal
from ckpt.saving.overlap import Overlap
from ckpt.saving.taking import Taking
from ckpt.saving.writer import Writer, WriterSettings
from ckpt.stopping import Stopping
from ckpt.tenure import Tenure
from ckpt.ticket import Ticket
from ckpt.voting import Voting
from recovery.agree import together
from recovery.report import Restored
from recovery.restore import restore as restore_state
from recovery.survey import survey
from storage_backends.base import Store
from storage_backends.throttle import limited
from storage_backends.tiered import near

log = logging.getLogger("ckpt")

PATIENCE = 60.0  # seconds that a process which ends without `close()` waits for the parts of other ranks


class Checkpointer:
    """Saves a training state incrementally in the background, and restores it.

    Args:
        url: where: a path, any fsspec URL, or a `Store` from `ckpt.open_store`.
        state: name → module, optimizer, scheduler, anything with ``state_dict``, tensor, numpy array, plain value.
        every: `step()` saves when ``step % every == 0``; an `Adaptive`: as often as loses least time; None: only
            `save()` saves.
        keep: which snapshots stay after a newer commit; None keeps all.
        capture: "copy": `save()` returns when the state has been copied out. "overlap": what tracked optimizers own is
            copied while forward and backward go on, and their next step waits for it; parameters and moments must not
            be changed otherwise meanwhile (see the README).
        when_busy: with an earlier save still in flight, "wait" for it or "skip" this one, on all ranks.
        mirror: where the host buffers live, so that they outlive the process and a restart on this node reads them
            instead of the store: "auto" (the folder ``CKPT_MIRROR_DIR``, else shared memory), "disk:PATH" (a local
            disk), a folder, or "off" (this process's own memory).
        journal: record what every step's optimizers consume, so that after a failure training goes on from the last
            completed step and not from the last snapshot; see `Journal`. `restore` then ends with a snapshot.
        fresh: start a new line on a store that already holds checkpoints, without restoring.
        options: see `Options`.

    In a job with `torch.distributed`, make it on every rank after ``init_process_group``, and call `restore`, `save`,
    `step` on every rank. Calls belong to one thread.
    """

    def __init__(
        self,
        url: str | os.PathLike[str] | Store,
        state: Mapping[str, object],
        *,
        every: int | Adaptive | None = None,
        keep: Keep | None = None,
        capture: Literal["copy", "overlap"] = "copy",
        when_busy: Literal["wait", "skip"] = "wait",
        mirror: str | os.PathLike[str] = "auto",
        journal: bool | Journal = False,
        fresh: bool = False,
        options: Options | None = None,
    ) -> None:
        one_of("capture", capture, ("copy", "overlap"))
        one_of("when_busy", when_busy, ("wait", "skip"))
        counted = isinstance(every, int) and not isinstance(every, bool) and every >= 1
        if not counted and every is not None and not isinstance(every, Adaptive):
            raise ValueError(f"every={every!r}: expected a number of steps, at least 1, ckpt.Adaptive(…), or None")
        if not isinstance(state, Mapping):
            raise TypeError(
                f"state is a {type(state).__name__}; expected names and what they stand for, such as {{'model': model}}"
            )
        if keep is not None and not isinstance(keep, Keep):
            raise TypeError(f"keep={keep!r}: expected ckpt.Keep(last=3, every=1000), or None to keep all")
        for name in state:
            if not isinstance(name, str) or not name or name.startswith("$"):
                raise ValueError(f"state name {name!r}: expected a non-empty str that does not start with '$'")
        self._options = opt = options or Options()
        self._store = store_at(url, opt.key)
        self._state: MutableMapping[str, object] = dict(state)
        self._every = every if isinstance(every, int) else None
        self._pace = Pace(every, partial(observed, self._store)) if isinstance(every, Adaptive) else None
        self._clock = SystemClock()
        self._ranks = open_ranks(None if opt.group_timeout is None else seconds(opt.group_timeout))
        ranks = self._ranks
        self._tenure = Tenure(self._store, self._clock, ranks, identity(torchrun_job()), seconds(opt.heartbeat))
        self._flattener = Flattener(self._state)
        self._mirror = open_mirror(mirror, self._store.url, rank=ranks.rank, world_size=ranks.world_size)
        overlaps = capture == "overlap"
        self._taking = Taking(
            ranks, self._mirror, chunk=size(opt.chunk), replica_check=opt.replica_check, overlap=overlaps
        )
        self._position = Position()
        behind = limited(self._store, opt.limits)
        self._writer = Writer(
            near(behind),
            self._clock,
            WriterSettings(
                amplification=opt.restore_amplification,
                commit_wait=seconds(opt.commit_wait),
                memory=size(opt.memory),
            ),
        )
        self._sweeper: Sweeper | None = None
        if keep is not None and self._ranks.rank == 0:
            self._sweeper = Sweeper(
                behind,
                self._clock,
                keep,
                grace=seconds(opt.grace),
                listing_lag=seconds(opt.listing_lag),
                breath=Breath,
            )
        todo = chores(behind, self._clock, ranks.rank, ranks.world_size)
        self._copier = Copier(behind, todo, lambda: self._tenure.run)
        self._journal: Journaling | None = None
        if journal:  # before signals and hooks are taken over, since it may refuse
            place = Place(self._store, self._mirror.base, self._mirror.store, ranks.rank, ranks.world_size)
            settings = Journal() if journal is True else journal
            self._journal = open_journal(settings, self._state, self._look, lambda: self._flattener.names, place)
        self._stopper = Stopping()
        self._voting = Voting(self._ranks, self._stopper, self._pace)
        self._outcomes = Outcomes(self._ranks.rank, opt.bearable, self._after_commit)
        self._overlap = Overlap(self._held_back) if overlaps else None
        self._saves = Saves(
            ranks=ranks,
            clock=self._clock,
            tenure=self._tenure,
            flattener=self._flattener,
            taking=self._taking,
            position=self._position,
            writer=self._writer,
            voting=self._voting,
            stopper=self._stopper,
            outcomes=self._outcomes,
            overlap=self._overlap,
            pace=self._pace,
            when_busy=when_busy,
            fresh=fresh,
        )
        self._saves.journal = self._journal
        self._start = 0
        self._pid = os.getpid()
        self._closed = False
        self._ending = True
        self.restored: Restored | None = None
        self._exit = exits.register(self._flush_at_exit)

    # --- reading ---

    def restore(self, step: int | str | None = None) -> int:
        """Bring the state back, in place, and return the number of steps completed; 0 on an empty store.

        Random states and the data position come back too. All ranks agree on one snapshot; if the newest is damaged
        they fall back together to an older one and say why (`restored.skipped`).

        Args:
            step: None or "latest": the newest; a step, ``"GENERATION/STEP"`` or a pin: exactly that one.

        Raises:
            NoSnapshot: the named snapshot does not exist.
            DamagedError: it, or every snapshot, cannot be read whole. The live state is untouched.
            LayoutMismatch: it does not fit the live state. The live state is untouched.
            StoreInUse: another live job writes here.
        """
        self._check_open()
        self._voting.read()
        self._saves.finish(Call.RESTORE, 0)
        with self._tenure.trying(), waiting(f"restoring from {self._store.url}"):
            mirrors = [] if self._mirror.base is None else [self._mirror.base]
            ring = None
            if self._journal is not None:
                ring = [record for base in mirrors for record in ring_records(base, self._mirror.store)]
            with survey(mirrors, self._mirror.store, prefer=self._ranks.rank) as holdings:
                restored = restore_state(
                    self._store,
                    self._ranks,
                    self._state,
                    step=step,
                    claim=self._tenure.claim,
                    settled=self._tenure.settled,
                    on_resize=self._options.on_resize,
                    holdings=holdings,
                    ring=ring,
                    memory=size(self._options.memory),
                )
                own = None if restored is None else holdings.of(restored.id, self._ranks.rank)
        self._outcomes.forget()
        if restored is None:
            self._start = 0
            self._position.resume(None)
            self._saves.anchor(0)
            return 0
        # What fails on one rank must not leave the others waiting for it in the gather that follows.
        together(self._ranks, lambda: self._resume(restored))
        self._writer.adopt(None)  # what was committed before leads elsewhere
        self._writer.adopt(reference_after(restored, own, self._flattener.flatten(), self._taking))
        log.info("%s", restored)
        self._saves.anchor(restored.step)
        self._copier.nudge()  # what an earlier start of this job did not come to copy
        return restored.step

    def batches(self, loader: Any, total: int) -> Iterator[tuple[int, Any]]:
        """``(step, batch)`` from where the restored state ends up to `total`, over as many epochs as it takes.

        The data position and random states are part of every save, so that a restored run draws the same batches and
        the same dropout as one that was never hurt. Ends early when `stopping`.
        """
        self._check_open()
        return self._position.batches(loader, start=self._start, total=total, stopping=lambda: self.stopping)

    @property
    def state(self) -> MutableMapping[str, object]:
        """The tracked mapping; assign to it to change plain values."""
        return self._state

    @property
    def stopping(self) -> bool:
        """Whether all ranks agreed to stop (SIGTERM reached one of them): finish the step and leave."""
        return self._voting.stop

    @property
    def stats(self) -> Stats:
        """Totals of this rank since the checkpointer was made."""
        if self._journal is None:
            return self._outcomes.stats
        return replace(self._outcomes.stats, journal=self._journal.stats)

    # --- saving ---

    def step(self, step: int, metrics: Mapping[str, Any] | None = None) -> Ticket | None:
        """Say that `step` steps are complete; saves when due, or when the job was asked to stop. Collective.

        Returns:
            The save's ticket, or None if nothing was due.
        """
        self._check_open()
        began = time.perf_counter()
        before = self._voting.stop
        self._voting.read()
        due = self._voting.take_due() if self._every is None else step % self._every == 0
        ticket = None
        saves = due or self._voting.stop != before
        if self._journal is not None:
            self._journal.completed(step, saves=saves)
        if saves:
            ticket = self._saves.save(step, metrics)
        self._voting.begin(step)
        self._outcomes.count(seconds=time.perf_counter() - began)
        return ticket

    def save(self, step: int, metrics: Mapping[str, Any] | None = None) -> Ticket:
        """Save the state as `step`. Returns when it has been copied out; the rest happens in the background.

        Args:
            step: steps completed. Within a run steps increase; saving a lower one, or one that failed, opens a new
                run; saving the last one again returns its ticket.
            metrics: numbers to show in ``ckpt list``; rank 0's are kept.

        Raises:
            UnsupportedState: a leaf cannot be saved exactly; on all ranks (as `SaveFailed` where it is another's).
            LayoutMismatch: the ranks' states do not describe one whole.
            HistoryExists: first save on a store with a history, without `restore()` or ``fresh=True``.
            StoreInUse: another live job writes here.
            SaveFailed: what became of an earlier save, where `Options.on_error` says so.
        """
        self._check_open()
        began = time.perf_counter()
        self._voting.read()
        if self._journal is not None:
            self._journal.completed(step, saves=True)
        try:
            return self._saves.save(step, metrics)
        finally:
            self._outcomes.count(seconds=time.perf_counter() - began)

    def _held_back(self, seconds: float) -> None:
        self._outcomes.count(seconds=seconds)
        if self._pace is not None:
            self._pace.held_back(seconds)

    def _look(self) -> tuple[Flat, dict[str, Any]]:
        return self._saves.look()

    def _after_commit(self) -> None:
        self._copier.nudge()
        if self._sweeper is not None:
            self._sweeper.nudge()

    def _resume(self, restored: Restored) -> None:
        """Data position and random states."""
        self.restored, self._start = restored, restored.step
        random = restored.values.get("$random")
        self._position.resume(restored.values.get("$data"), random=random)
        if random is not None:
            set_random_states(random)
        self._flattener.flatten()  # what it refuses is refused here

    # --- waiting and closing ---

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the save in flight. Raises what failed, or `TimeoutError`."""
        self._check_process()
        ticket = self._outcomes.last
        if ticket is not None:
            with waiting(f"saving step {ticket.step} to {self._store.url}"):
                ticket.wait(timeout)

    def close(self, timeout: float | None = None) -> None:
        """Wait for the save in flight, end the run, and raise what failed and was not told yet.

        Raises:
            SaveFailed: an earlier save failed, or the last one was not seen committed within `timeout` seconds; it is
                given up then, so that the process can end. Stage "copy": all are committed, but a store of several
                places (`tiered`, `fanout`) could not be brought up to date.
        """
        if self._closed or self._pid != os.getpid():
            return  # a forked child leaves at once: the save in flight, the run and the mirror are its parent's
        self._closed = True
        exits.unregister(self._exit)
        ticket = self._outcomes.last
        left = countdown(timeout)
        if self._overlap is not None:
            self._overlap.close()
        with waiting(f"finishing step {ticket.step} on {self._store.url}" if ticket else "closing"):
            if self._ending:
                self._saves.finish_last(timeout)
            done = self._writer.stop(left())
        if self._sweeper is not None:
            self._sweeper.stop(left())
        behind = self._copier.stop(left())
        # A job that comes to its end needs no mirror; one that fails or is told to stop will be back. A last save that
        # failed tells of the former where nothing else does: not every process lets its end hear of what it raised.
        well = ticket is None or ticket.error is None
        remove = done and well and self._ending and not self.stopping
        if self._journal is not None:
            self._journal.close(left(), remove=remove)
        # A run whose last save still hangs is not marked as ended: its put may land yet.
        self._tenure.close(ended=done, timeout=left())
        self._mirror.close(remove=remove)
        self._stopper.restore()
        self._position.close()
        self._ranks.close()
        if not done and ticket is not None:
            raise SaveFailed(
                f"step {ticket.step}: not seen committed within {timeout} s; it may or may not be on {self._store.url}",
                step=ticket.step,
                stage="commit",
            )
        self._outcomes.raise_untold()
        if behind is not None:
            raise SaveFailed(
                f"{self._store.url}: every save is committed, but its copies are behind: {behind}; the next start goes "
                "on copying, and so does 'ckpt verify --repair'",
                step=0 if ticket is None else ticket.step,
                stage="copy",
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        # What the body raised matters more than what the last save did; that is logged, and warned of by close().
        with contextlib.suppress(CheckpointError):
            self._leave()

    def _leave(self, timeout: float | None = None) -> None:
        """`close()` for a training that raised, perhaps because another rank died: nobody waits for its part."""
        self._ending = False
        self._writer.leave()
        self.close(timeout)

    def _flush_at_exit(self) -> None:
        """A script that falls off its end: its last save is made durable before the interpreter goes."""
        try:
            if hasattr(sys, "last_value"):  # the interpreter has printed what the script raised
                self._leave()
            elif not self._writer.wait(PATIENCE):  # other ranks may be gone; if they are not, the last one commits
                self._writer.leave()
            self.close()
        except Exception as error:
            log.error("at exit: %s", error)

    def _check_open(self) -> None:
        self._check_process()
        if self._closed:
            raise CheckpointError("this Checkpointer is closed; make a new one")

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise CheckpointError(
                f"this Checkpointer belongs to process {self._pid}, and this is process {os.getpid()}, forked from it: "
                "its writer did not come along; call it there, or make another one here, on a store of its own"
            )

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Checkpointer cannot be sent to another process: its writer and its run stay where it was made; send "
            "the URL, and read with ckpt.load(url) or ckpt.load_into(url, state) there"
        )
