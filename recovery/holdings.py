"""What is wanted and what is held, as data: chunks of stored parts, named by number. Reads nothing, does nothing.

The chunks of a part are numbered as the part lists them: those of its bundles first, then those of its shards.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Mask: TypeAlias = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Chunks:
    """Some chunks of the part that old rank `part` stored: half-open runs of numbers, sorted and apart.

    ``runs=None`` is all of them, and is never expanded where it need not be: that is how a plan for a thousand ranks
    stays small.
    """

    part: int
    runs: tuple[tuple[int, int], ...] | None = None

    @classmethod
    def of(cls, part: int, mask: Mask) -> Chunks:
        """The chunks where `mask`, one element per chunk of the part, is true."""
        if mask.all():
            return cls(part)
        edges = np.flatnonzero(np.diff(mask, prepend=False, append=False))
        pairs = edges.reshape(-1, 2).tolist()
        return cls(part, tuple((start, stop) for start, stop in pairs))

    def mask(self, count: int) -> Mask:
        """Which of the part's `count` chunks these are. Raises ValueError for a number beyond."""
        if self.runs is None:
            return np.ones(count, np.bool_)
        mask = np.zeros(count, np.bool_)
        for start, stop in self.runs:
            if not 0 <= start < stop <= count:
                raise ValueError(f"chunks {start}:{stop} of part {self.part}, which has {count}")
            mask[start:stop] = True
        return mask

    def __str__(self) -> str:
        if self.runs is None:
            return f"part {self.part}"
        shown = ", ".join(f"{start}:{stop}" for start, stop in self.runs[:4])
        return f"part {self.part} chunks {shown}" + (", …" if len(self.runs) > 4 else "")


@dataclass(frozen=True, slots=True)
class Holding:
    """What one mirror still holds. Rank `rank` of the new job reads it as its own, and sends from it."""

    rank: int
    chunks: tuple[Chunks, ...]


def one_of_each(chunks: Iterable[Chunks], counts: dict[int, int]) -> dict[int, Mask | None]:
    """Part → which of its chunks, all entries of one part together; None for all of them. Parts of which no chunk is
    named are left out.

    Args:
        counts: part → number of its chunks; only asked for parts of which some chunks are named.
    """
    found: dict[int, Mask | None] = {}
    for some in chunks:
        if some.runs == ():
            continue
        if some.runs is None:
            found[some.part] = None
        elif some.part not in found:
            found[some.part] = some.mask(counts[some.part])
        elif (known := found[some.part]) is not None:
            known |= some.mask(counts[some.part])
    return found
