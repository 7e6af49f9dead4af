"""The one vector that opens every call of a checkpointer: what each rank knows, and what all know after one
all-reduce(MAX).

A rank never enters a collective by its own decision: whatever makes a gather, a new run or a skip necessary on one
rank is a field here, so that all do it together or none (PYTORCH.md §3). Every call casts a vector of one length that
says which call it is: where ranks make different calls (a `save()` inside ``if rank == 0``), all of them learn so. Two
vectors of different lengths would end the process instead: gloo aborts it, without a word about checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from ckpt.errors import CheckpointError, SaveFailed


class Call(IntEnum):
    """What a rank is doing."""

    RESTORE = 1
    SAVE = 2
    STEP = 3
    CLOSE = 4

    def __str__(self) -> str:
        return f"{self.name.lower()}()"


@dataclass(frozen=True, slots=True)
class Ballot:
    """What one rank says.

    Attributes:
        call: which call this is.
        step: the step it is for.
        layout_changed: its table of shards is not the one last agreed on.
        buffers: 63-bit hash of the module buffers that are held to be equal on all ranks; 0 if it has none.
        failed: an earlier step of this run that it did not see committed, not yet told; None if there is none.
        refused: its state cannot be saved.
        stop: it was asked to stop.
        busy: an earlier save is still in flight.
        renew: this step needs a run of its own (it is not above the last one, or no run is open).
        again: this very step is committed or in flight.
        due: by rank 0's clock it is time for a save; the next `step()` makes it.
        blocked, durable: microseconds and milliseconds that this rank's saves take, where the cadence asks.
    """

    call: Call
    step: int = 0
    layout_changed: bool = False
    buffers: int = 0
    failed: int | None = None
    refused: bool = False
    stop: bool = False
    busy: bool = False
    renew: bool = False
    again: bool = False
    due: bool = False
    blocked: int = 0
    durable: int = 0

    def cast(self, rank: int) -> list[int]:
        """As int64 values whose maximum over the ranks is the `Tally`."""
        return [
            self.call,
            -self.call,
            self.step,
            -self.step,
            int(self.layout_changed),
            self.buffers,
            -self.buffers,
            0 if self.failed is None else self.failed + 1,
            0 if self.failed is None else rank + 1,
            rank + 1 if self.refused else 0,
            int(self.stop),
            int(self.busy),
            int(self.renew),
            -int(self.again),
            int(self.due),
            self.blocked,
            self.durable,
        ]


@dataclass(frozen=True, slots=True)
class Tally:
    """What all ranks together say. `calls`, `steps`: the lowest and the highest; `failed`: (step, one rank that did
    not see it committed); `refused`: a rank."""

    calls: tuple[Call, Call]
    steps: tuple[int, int]
    layout_changed: bool
    buffers_differ: bool
    failed: tuple[int, int] | None
    refused: int | None
    stop: bool
    busy: bool
    renew: bool
    again: bool
    due: bool
    blocked: int
    durable: int

    @classmethod
    def count(cls, votes: Sequence[int]) -> Tally:
        """From the all-reduced vector."""
        call, call_low, high, low, layout, buffers, buffers_low, failed, failed_rank, refused, *flags = votes
        stop, busy, renew, again, due, blocked, durable = flags
        return cls(
            calls=(Call(-call_low), Call(call)),
            steps=(-low, high),
            layout_changed=bool(layout),
            buffers_differ=buffers != -buffers_low,
            failed=(failed - 1, failed_rank - 1) if failed else None,
            refused=refused - 1 if refused else None,
            stop=bool(stop),
            busy=bool(busy),
            renew=bool(renew),
            again=again == -1,
            due=bool(due),
            blocked=blocked,
            durable=durable,
        )

    def check(self, step: int) -> None:
        """Whether all ranks can go on with what they called, here for `step`.

        Raises:
            CheckpointError: they called different things, or for different steps. On every rank.
            SaveFailed: one of them cannot. On every other rank.
        """
        low, high = self.calls
        if low is not high:
            raise CheckpointError(
                f"step {step}: some ranks called {low} and others {high}; make the same calls in the same order on "
                "every rank, none of them inside 'if rank == 0:'"
            )
        if self.refused is not None:
            raise SaveFailed(
                f"step {step}: rank {self.refused} could not capture its state; its own error says why",
                step=step,
                stage="capture",
            )
        if self.steps[0] != self.steps[1]:
            raise CheckpointError(
                f"{high} was called for different steps, from {self.steps[0]} to {self.steps[1]}; call it with the "
                "same step on every rank"
            )
