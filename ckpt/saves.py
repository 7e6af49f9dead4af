"""The path of a save on the caller's thread: prepare, vote, capture, hand over to the writer (torch).

All collectives of a save happen here: one vote opens every save, and what it decides (a gather, a new run, a skip) all
ranks do together.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from ckpt.ballot import Ballot, Call, Tally
from ckpt.cadence import Pace
from ckpt.data import Position
from ckpt.errors import CheckpointError, SaveFailed, UnsupportedState
from ckpt.format import values
from ckpt.format.names import SnapshotId
from ckpt.history.clock import Clock, countdown
from ckpt.leaves import Flat, Flattener
from ckpt.metrics import plain_metrics
from ckpt.outcomes import Outcomes
from ckpt.random_states import random_states
from ckpt.ranks import Ranks
from ckpt.saving.job import Failed, Outcome, Report, Saved
from ckpt.saving.journal import Journaling
from ckpt.saving.overlap import Overlap
from ckpt.saving.taking import Taking
from ckpt.saving.writer import Writer
from ckpt.stopping import Stopping
from ckpt.tenure import Tenure
from ckpt.ticket import Ticket
from ckpt.voting import Voting

log = logging.getLogger("ckpt")

LOOK = 0.05  # seconds between two looks at what the other ranks say, in a wait for the last commit


@dataclass(slots=True)
class Saves:
    """What the saves of one rank go through. `overlap`: None where all is copied before `save` returns. `fresh`: the
    first may start a new line on a store with a history. `journal`: what records the steps between them. `pace`: None
    where the cadence is a number of steps."""

    ranks: Ranks
    clock: Clock
    tenure: Tenure
    flattener: Flattener
    taking: Taking
    position: Position
    writer: Writer
    voting: Voting
    stopper: Stopping
    outcomes: Outcomes
    overlap: Overlap | None
    when_busy: Literal["wait", "skip"]
    fresh: bool
    journal: Journaling | None = None
    pace: Pace | None = None

    def save(self, step: int, metrics: Mapping[str, Any] | None) -> Ticket:
        asked = time.perf_counter()
        prepared: tuple[Flat, dict[str, bytes], dict[str, Any] | None] | None = None
        refusal: Exception | None = None
        try:
            prepared = self._prepare(step, metrics)
        except Exception as error:
            refusal = error
        tally = self._vote(step, prepared[0] if prepared else None)
        if refusal is not None:
            raise refusal
        tally.check(step)
        assert prepared is not None
        last = self.outcomes.last
        if tally.again and not tally.renew and last is not None:
            return last
        self._tell(tally.failed)
        # The last save of a job that was asked to stop is not left out.
        if tally.busy and self.when_busy == "skip" and not self.voting.stop:
            return self.outcomes.skip(step)
        if tally.busy or self.ranks.world_size == 1:
            self._tell(self.finish(Call.SAVE, step).failed)
        else:
            self.writer.wait(None)  # over on all ranks, but what became of it may still be on its way to this thread
        if tally.renew:
            self.tenure.open(self._resumed_from(), fresh=self.fresh)
        flat, encoded, numbers = prepared
        return self._submit(step, flat, encoded, numbers, tally, asked)

    def finish(self, call: Call, step: int) -> Tally:
        """Wait for the save in flight, as part of `call`. Collective: what failed on one rank, or a rank that is gone,
        ends the wait of all, which else would last until `commit_wait`.

        Raises:
            CheckpointError: a rank is gone, or called something else.
        """
        if self.ranks.world_size == 1:
            self.writer.wait(None)  # nobody else's part is missing, and what fails is known then
        else:
            self.writer.wait_handed_in(None)
        tally = self._open(self._handing_in(call, step))
        tally.check(step)
        if tally.failed is not None:
            self.writer.abandon(tally.failed[0])
        self.writer.wait(None)
        return tally

    def finish_last(self, timeout: float | None) -> None:
        """As `finish`, for close(): where the other ranks are gone, or do not close, the save in flight is given up, or
        waited for, without them. The writer may still be busy after `timeout` seconds."""
        left = countdown(timeout)
        if self.ranks.world_size == 1 or not self.writer.wait_handed_in(timeout):
            return
        last = self.outcomes.last
        vote = self.voting.cast(self._handing_in(Call.CLOSE, 0 if last is None else last.step))
        if vote is None:
            return
        while not vote.decided():
            seconds = left()
            if self.writer.wait(LOOK if seconds is None else min(LOOK, seconds)) or seconds == 0:
                return
        if self.writer.wait(0):
            return
        try:
            tally = Tally.count(vote.result())
        except CheckpointError as error:
            log.warning("the last save is not waited for: %s", error)
            self.writer.leave()
        else:
            if tally.failed is not None:
                self.writer.abandon(tally.failed[0])

    def _open(self, ballot: Ballot) -> Tally:
        try:
            return self.voting.open(ballot)
        except CheckpointError:
            self.writer.leave()  # the ranks cannot reach each other any more; nobody waits for the others' parts
            raise

    def _handing_in(self, call: Call, step: int) -> Ballot:
        failed = self.outcomes.failed
        return Ballot(call, step, failed=None if failed is None else failed[0], stop=self.stopper.asked)

    def _prepare(
        self, step: int, metrics: Mapping[str, Any] | None
    ) -> tuple[Flat, dict[str, bytes], dict[str, Any] | None]:
        if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 10**12:
            raise ValueError(f"step={step!r}: expected the number of steps completed, from 0 to 10**12 - 1")
        flat, plain = self.look()
        try:
            encoded = {name: values.encode(value, name) for name, value in plain.items()}
        except values.UnsupportedValue as error:
            raise UnsupportedState(str(error), leaf=error.path) from None
        return flat, encoded, plain_metrics(metrics) if self.ranks.rank == 0 else None

    def look(self) -> tuple[Flat, dict[str, Any]]:
        """The state as it is now: its leaves, and a copy of every plain value, random states and data position."""
        flat = self.flattener.flatten()
        plain = {**flat.values, "$random": random_states()}
        if (position := self.position.record()) is not None:
            plain["$data"] = position
        return flat, plain

    def anchor(self, step: int) -> None:
        """Give the journal a snapshot to extend, in this very run, before the first step it records: then no step leans
        on another run's records, whatever happens to this one. Collective."""
        if self.journal is None:
            return
        self.save(step, None)
        failed = self.finish(Call.RESTORE, 0).failed
        if failed is not None:
            log.warning("the journal begins with the next snapshot: that of step %d failed on rank %d", *failed)

    def _vote(self, step: int, flat: Flat | None) -> Tally:
        if flat is None:
            return self._open(Ballot(Call.SAVE, refused=True, stop=self.stopper.asked))
        last, failed = self.outcomes.last, self.outcomes.failed
        ballot = Ballot(
            Call.SAVE,
            step,
            layout_changed=self.taking.sharing.changed(flat),
            buffers=self.taking.sharing.buffers(flat),
            failed=None if failed is None else failed[0],
            stop=self.stopper.asked,
            busy=self.writer.busy,
            renew=self._renewal(step),
            again=last is not None and last.step == step and last.error is None,
        )
        return self._open(ballot)

    def _renewal(self, step: int) -> bool:
        """Whether `step` cannot be a step of the open run: there is none, or it is not above the last one."""
        if self.tenure.run is None:
            return True
        last = self.outcomes.last
        if last is None or step > last.step:
            return False
        return step < last.step or last.error is not None

    def _resumed_from(self) -> SnapshotId | None:
        """What a run opened between two saves goes on from: the newest snapshot this rank saw committed."""
        reference = self.writer.reference
        return None if reference is None else reference.id

    def _submit(
        self,
        step: int,
        flat: Flat,
        encoded: dict[str, bytes],
        metrics: dict[str, Any] | None,
        tally: Tally,
        asked: float,
    ) -> Ticket:
        run = self.tenure.run
        assert run is not None
        if tally.layout_changed or tally.buffers_differ:
            self.taking.agree(flat)
        ticket = self.outcomes.open(step)
        id_, time_ = SnapshotId(run, step), self.clock.wall() if self.ranks.rank == 0 else None
        try:
            if self.overlap is not None:
                self.overlap.wait_copied()  # those of a save that was interrupted may still write to this very buffer
            taken = self.taking.take(flat, self.writer.reference, id_=id_)
            if self.journal is not None:
                self.journal.captured(id_, taken.layout)
            cadence = None if self.pace is None or self.ranks.rank else self.pace.interval
            job = taken.job(id_, self.ranks, encoded, metrics, time_, asked, cadence)
            ready = None
            if taken.copying is not None and self.overlap is not None:
                self.overlap.begin(taken.copying)
                ready = taken.copying.wait
            self.writer.submit(job, lambda outcome: self._settle(ticket, id_, outcome, asked), ready)
            if self.pace is not None:
                self.pace.began(asked, time.perf_counter() - asked)
        except SaveFailed as error:
            # The others are past the vote and go on: this rank's failure is told at the next one.
            self.outcomes.settle(ticket, Failed(error, Report()))
        except BaseException as error:  # KeyboardInterrupt, or what a signal handler raises, at any point of the above
            if not (self.writer.busy or ticket.done()):  # else it was handed over, and the writer settles it
                text = f"step {step}: interrupted by {type(error).__name__} while it was captured"
                self.outcomes.settle(ticket, Failed(SaveFailed(text, step=step, stage="capture"), Report()))
            raise
        return ticket

    def _settle(self, ticket: Ticket, id_: SnapshotId, outcome: Outcome, asked: float) -> None:
        """On the writer's thread."""
        if self.pace is not None and isinstance(outcome, Saved):
            self.pace.committed(time.perf_counter() - asked)
        if self.journal is not None:
            reference = self.writer.reference
            if isinstance(outcome, Saved) and reference is not None and reference.id == id_:
                self.journal.committed(id_, [chunk.digest for chunk in reference.table])
            outcome = replace(outcome, report=replace(outcome.report, journal=self.journal.stats))
        self.outcomes.settle(ticket, outcome)

    def _tell(self, failed: tuple[int, int] | None) -> None:
        """Tell the caller of an earlier failure, on all ranks alike; stop waiting for a commit that cannot come."""
        if failed is not None:
            self.writer.abandon(failed[0])
            self.outcomes.tell(failed)
