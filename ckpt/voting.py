"""The votes of one checkpointer: which are under way, and whether all ranks agreed to stop (torch)."""

from __future__ import annotations

import logging
from dataclasses import replace

from ckpt.ballot import Ballot, Call, Tally
from ckpt.cadence import Pace
from ckpt.errors import CheckpointError
from ckpt.ranks import Pending, Ranks
from ckpt.stopping import Stopping

log = logging.getLogger("ckpt")


class Voting:
    """Belongs to the training thread. Every method is collective: all ranks call the same ones in the same order.

    Attributes:
        stop: all ranks know that one of them was asked to stop; True on all of them from the same call on.
        pace: where the cadence is adaptive: rank 0's says when a save is due, and all hear it at the next `step()`.
    """

    def __init__(self, ranks: Ranks, stopping: Stopping, pace: Pace | None = None) -> None:
        self._ranks = ranks
        self._stopping = stopping
        self._later: tuple[int, Pending] | None = None
        self._pace = pace
        self._due = False
        self.stop = False

    def open(self, ballot: Ballot) -> Tally:
        """The vote that opens a call. Read what `begin` began first."""
        tally = Tally.count(self._ranks.vote(ballot.cast(self._ranks.rank)))
        self.stop |= tally.stop
        return tally

    def cast(self, ballot: Ballot) -> Pending | None:
        """Begin the last vote, which nobody need read; None where the other ranks cannot be reached any more."""
        try:
            self.read()
            return self._ranks.vote_async(ballot.cast(self._ranks.rank))
        except CheckpointError as error:
            log.debug("closing without the other ranks: %s", error)
            return None

    def begin(self, step: int) -> None:
        """Begin the vote of a `step()`, which the next call reads: nobody waits for it at every step."""
        if self._ranks.world_size > 1 and not self.stop:
            ballot = replace(self._paced(), call=Call.STEP, step=step, stop=self._stopping.asked)
            self._later = step, self._ranks.vote_async(ballot.cast(self._ranks.rank))

    def read(self) -> None:
        """Read what `begin` began, if it did. Raises CheckpointError if the ranks had called different things."""
        later, self._later = self._later, None
        if later is not None:
            step, pending = later
            tally = Tally.count(pending.result())
            tally.check(step)
            self.stop |= tally.stop
            self._due |= tally.due
            if self._pace is not None:
                self._pace.hear(tally.blocked / 1e6, tally.durable / 1e3)
        elif self._ranks.world_size == 1:
            self.stop |= self._stopping.asked

    def take_due(self) -> bool:
        """Whether all ranks know that a save is due now, which they know once."""
        if self._ranks.world_size == 1:
            return self._pace is not None and self._pace.due()
        due, self._due = self._due, False
        return due

    def _paced(self) -> Ballot:
        """What this rank says of the cadence."""
        if self._pace is None:
            return Ballot(Call.STEP)
        blocked, durable = self._pace.costs
        due = self._ranks.rank == 0 and self._pace.due()
        return Ballot(Call.STEP, due=due, blocked=int(1e6 * blocked), durable=int(1e3 * durable))
