"""Who sends what, where several peers could: the senders' bytes are levelled. Pure.

Every demand is poured over its holders like water: whoever sends least so far gets most. Demands with few holders go
first, and then all are poured again as long as that makes the loads more even, since a later one may have come to rest
on a holder that an earlier one should have left free. What comes to rest is level: no holder of a demand sends more
than another by more than a chunk, unless others of its demands leave it no choice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from recovery.holdings import Mask
from recovery.tables import Ints

ROUNDS = 16
"""Most times that everything is poured again; two or three are usual."""


@dataclass(frozen=True, slots=True, eq=False)
class Demand:
    """Chunks `numbers` (of these raw `sizes`) of `part`, which `rank` lacks and all `holders` (ascending) have."""

    rank: int
    part: int
    numbers: Ints
    sizes: Ints
    holders: tuple[int, ...]


def alike(wanted: Mask, held: Sequence[Mask | None]) -> Iterator[tuple[Ints, tuple[int, ...]]]:
    """Groups of wanted chunks that the same peers hold: their numbers, and which of `held` have them."""
    whole = tuple(i for i, mask in enumerate(held) if mask is None)
    some = [(i, mask) for i, mask in enumerate(held) if mask is not None]
    numbers = np.flatnonzero(wanted)
    if not some:
        yield numbers, whole
        return
    bits = np.packbits(np.stack([mask[numbers] for _, mask in some]), axis=0)
    kinds, kind = np.unique(bits, axis=1, return_inverse=True)
    kind = kind.reshape(-1)
    for k in range(kinds.shape[1]):
        having = np.unpackbits(kinds[:, k])[: len(some)]
        yield numbers[kind == k], tuple(sorted((*whole, *(some[i][0] for i in np.flatnonzero(having)))))


def level(demands: Sequence[Demand], ranks: int) -> Iterator[tuple[Demand, int, NDArray[np.intp]]]:
    """Choose a sender for every chunk: yields (demand, sender, which of its chunks) in the order of the demands.

    Neighbouring chunks get the same sender where they can, so that requests are runs.
    """
    load = np.zeros(ranks, np.int64)
    shares: list[Ints | None] = [None] * len(demands)
    order = sorted(range(len(demands)), key=lambda i: (len(demands[i].holders), i))
    for turn in range(ROUNDS):
        moved = False
        for i in order:
            demand, old = demands[i], shares[i]
            holders = np.array(demand.holders, np.intp)
            others = load[holders] - (0 if old is None else _sums(old, demand.sizes, len(holders)))
            new = _pour(demand.sizes, others)
            after = others + _sums(new, demand.sizes, len(holders))
            if old is None or _unevenness(after) < _unevenness(load[holders]):
                moved = moved or old is not None
                shares[i] = new
                load[holders] = after
        if turn and not moved:
            break
    for demand, share in zip(demands, shares, strict=True):
        assert share is not None
        for n, holder in enumerate(demand.holders):
            which = np.flatnonzero(share == n)
            if len(which):
                yield demand, holder, which


def _pour(sizes: Ints, others: Ints) -> Ints:
    """For every chunk the number of its sender, so that what these send besides, `others`, is filled up evenly."""
    ends = np.cumsum(sizes)
    total = int(ends[-1])
    ascending = np.sort(others)
    # What the lowest 1, 2, … holders take before they stand as high as the next one.
    room = np.arange(1, len(others)) * ascending[1:] - np.cumsum(ascending[:-1])
    k = int(np.searchsorted(room, total)) + 1  # so many are filled up
    surface = (total + int(ascending[:k].sum())) / k
    edges = np.cumsum(np.maximum(surface - others, 0))
    middle = ends - sizes / 2
    return np.minimum(np.searchsorted(edges, middle), len(others) - 1).astype(np.int64)


def _sums(share: Ints, sizes: Ints, holders: int) -> Ints:
    return np.bincount(share, weights=sizes, minlength=holders).astype(np.int64)


def _unevenness(load: Ints) -> int:
    """Sum of squares, exact: it falls with every chunk that moves to where less is sent, so pouring comes to rest."""
    return sum(n * n for n in load.tolist())
