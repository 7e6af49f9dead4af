"""The votes of one checkpointer: which are under way, and whether all ranks agreed to stop (torch)."""

from __future__ import annotations

import logging

from ckpt.ballot import Ballot, Call, Tally
from ckpt.errors import CheckpointError
from ckpt.ranks import Pending, Ranks
from ckpt.stopping import Stopping

log = logging.getLogger("ckpt")


class Voting:
    """Belongs to the training thread. Every method is collective: all ranks call the same ones in the same order.

    Attributes:
        stop: all ranks know that one of them was asked to stop; True on all of them from the same call on.
    """

    def __init__(self, ranks: Ranks, stopping: Stopping) -> None:
        self._ranks = ranks
        self._stopping = stopping
        self._later: tuple[int, Pending] | None = None
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
            ballot = Ballot(Call.STEP, step, stop=self._stopping.asked)
            self._later = step, self._ranks.vote_async(ballot.cast(self._ranks.rank))

    def read(self) -> None:
        """Read what `begin` began, if it did. Raises CheckpointError if the ranks had called different things."""
        later, self._later = self._later, None
        if later is not None:
            step, pending = later
            tally = Tally.count(pending.result())
            tally.check(step)
            self.stop |= tally.stop
        elif self._ranks.world_size == 1:
            self.stop |= self._stopping.asked
