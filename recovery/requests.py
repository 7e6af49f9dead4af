"""Which bytes of which packs are asked for: blobs that lie close together are read as one range. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from recovery.fetch import GAP, REQUEST, WASTE
from recovery.tables import Ints


@dataclass(frozen=True, slots=True)
class PackReads:
    """Half-open byte ranges of one pack, ascending and apart."""

    pack: str
    ranges: tuple[tuple[int, int], ...]

    @property
    def nbytes(self) -> int:
        return sum(stop - start for start, stop in self.ranges)

    @property
    def requests(self) -> int:
        """A long range is read in several."""
        return sum(-(-(stop - start) // REQUEST) for start, stop in self.ranges)


def merged_reads(
    packs: Sequence[str], pack: Ints, start: Ints, stop: Ints, *, gap: int = GAP, waste: float = WASTE
) -> tuple[PackReads, ...]:
    """The ranges that read all these blobs.

    Args:
        packs: keys of packs.
        pack, start, stop: one element per blob, sorted in this order, none twice. Blobs may overlap.
        gap, waste: as `recovery.fetch.merge`; here it holds for all blobs together, there for each batch.
    """
    if not len(pack):
        return ()
    reach = stop.copy()  # the furthest end so far, in each pack
    heads = np.flatnonzero(np.diff(pack, prepend=-1))
    for begin, end in zip(heads, np.append(heads[1:], len(pack)), strict=True):
        np.maximum.accumulate(stop[begin:end], out=reach[begin:end])
    gaps = np.maximum(start[1:] - reach[:-1], 0)
    gaps[np.diff(pack) != 0] = gap + 1
    order = np.argsort(gaps, kind="stable")
    spent = np.cumsum(gaps[order])
    joined = np.zeros(len(gaps), np.bool_)
    joined[order] = (gaps[order] <= gap) & (spent <= max(waste * int((stop - start).sum()), 0))
    first = np.concatenate(([0], np.flatnonzero(~joined) + 1))
    last = np.append(first[1:], len(pack)) - 1
    ranges: dict[int, list[tuple[int, int]]] = {}
    for number, a, b in zip(pack[first].tolist(), start[first].tolist(), reach[last].tolist(), strict=True):
        ranges.setdefault(number, []).append((a, b))
    return tuple(PackReads(packs[number], tuple(found)) for number, found in ranges.items())
