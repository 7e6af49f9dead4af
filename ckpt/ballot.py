"""The one vector that opens every save: what each rank knows, and what all know after one all-reduce(MAX).

A rank never enters a collective by its own decision: whatever makes a gather, a new run or a skip necessary on one
rank is a field here, so that all do it together or none (PYTORCH.md §3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ballot:
    """What one rank says.

    Attributes:
        step: the step it saves.
        layout_changed: its table of shards is not the one last agreed on.
        buffers: 63-bit hash of the module buffers that are held to be equal on all ranks; 0 if it has none.
        failed: an earlier step of this run that it did not see committed, not yet told; None if there is none.
        refused: its state cannot be saved.
        stop: it was asked to stop.
        busy: an earlier save is still in flight.
        renew: this step needs a run of its own (it is not above the last one, or no run is open).
        again: this very step is committed or in flight.
    """

    step: int
    layout_changed: bool = False
    buffers: int = 0
    failed: int | None = None
    refused: bool = False
    stop: bool = False
    busy: bool = False
    renew: bool = False
    again: bool = False

    def cast(self, rank: int) -> list[int]:
        """As int64 values whose maximum over the ranks is the `Tally`."""
        return [
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
        ]


@dataclass(frozen=True, slots=True)
class Tally:
    """What all ranks together say. `failed`: (step, one rank that did not see it committed); `refused`: a rank."""

    steps: tuple[int, int]
    layout_changed: bool
    buffers_differ: bool
    failed: tuple[int, int] | None
    refused: int | None
    stop: bool
    busy: bool
    renew: bool
    again: bool

    @classmethod
    def count(cls, votes: Sequence[int]) -> Tally:
        """From the all-reduced vector."""
        high, low, layout, buffers, buffers_low, failed, failed_rank, refused, stop, busy, renew, again = votes
        return cls(
            steps=(-low, high),
            layout_changed=bool(layout),
            buffers_differ=buffers != -buffers_low,
            failed=(failed - 1, failed_rank - 1) if failed else None,
            refused=refused - 1 if refused else None,
            stop=bool(stop),
            busy=bool(busy),
            renew=bool(renew),
            again=again == -1,
        )
