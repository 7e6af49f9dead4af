"""Parts as columns: what a plan must know of each chunk, without an object per chunk. Reads nothing.

A rank that lost everything has tens of thousands of chunks; a plan looks at where their blobs lie and how large they
are, all of them at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from ckpt.format.manifest import ChunkRow, Part, ShardRow
from ckpt.format.shards import DTYPES, Box, cuts, grid, whole
from recovery.holdings import Mask

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """The chunks of one part.

    Attributes:
        sizes: raw bytes of each chunk.
        first: chunk n's blobs are ``first[n]:first[n + 1]`` of the three columns that follow.
        pack, start, stop: number of the pack in `packs`, and the bytes in it.
        packs: keys.
    """

    sizes: Ints
    first: Ints
    pack: Ints
    start: Ints
    stop: Ints
    packs: tuple[str, ...]

    @property
    def count(self) -> int:
        return len(self.sizes)

    @property
    def nbytes(self) -> int:
        return int(self.sizes.sum())

    def blobs(self, mask: Mask) -> Mask:
        """Which blobs the chunks in `mask` need."""
        return np.repeat(mask, np.diff(self.first))

    @property
    def blob_bytes(self) -> int:
        """Encoded bytes of everything, blobs that chunks share counted once."""
        return int((self.stop - self.start)[unique(self.pack, self.start, self.stop)].sum())


def unique(pack: Ints, start: Ints, stop: Ints) -> Ints:
    """Numbers of the blobs, each once, in the order in which they lie on the store."""
    order = np.lexsort((stop, start, pack))
    if not len(order):
        return order
    same = np.ones(len(order), np.bool_)
    for column in (pack, start, stop):
        same[1:] &= np.diff(column[order]) == 0
    same[0] = False
    return order[~same]


def table(part: Part) -> Table:
    """The columns of a part that has been checked (`format.parts.read_part`)."""
    sizes: list[int] = []
    for bundle in part.bundles:
        shape = (bundle.length,)
        sizes.extend(c.stop - c.start for c in cuts(shape, whole(shape), DTYPES[bundle.dtype].size, part.chunk))
    columns = [np.array(sizes, np.int64)]
    columns.extend(
        _cut_sizes(row.shape, row.as_box, DTYPES[row.dtype].size, part.chunk)
        for row in part.shards
        if row.bundle is None
    )
    rows = list(_rows(part))
    counts = np.fromiter((len(c.blobs) for c in rows), np.int64, len(rows))
    blobs = [b for c in rows for b in c.blobs]
    packed = np.fromiter(chain.from_iterable((b.pack, b.start, b.stop) for b in blobs), np.int64, 3 * len(blobs))
    pack, start, stop = np.ascontiguousarray(packed.reshape(-1, 3).T)
    first = np.concatenate(([0], np.cumsum(counts)))
    return Table(np.concatenate(columns), first, pack, start, stop, tuple(key for key, _ in part.packs))


def _rows(part: Part) -> Iterator[ChunkRow]:
    for bundle in part.bundles:
        yield from bundle.chunks
    for row in part.shards:
        yield from row.chunks


def _cut_sizes(shape: tuple[int, ...], box: Box, itemsize: int, chunk: int) -> Ints:
    """Bytes of each chunk of a box, in the order of `format.shards.cuts`, without walking them."""
    if box.empty:
        return np.empty(0, np.int64)
    if not shape:
        return np.array([itemsize], np.int64)
    g = grid(shape, itemsize, chunk)
    tail = itemsize * int(np.prod(box.lengths[g.cut + 1 :], dtype=np.int64))
    start, stop = box.offsets[g.cut], box.offsets[g.cut] + box.lengths[g.cut]
    edges = np.arange(start // g.block, -(-stop // g.block) + 1, dtype=np.int64) * g.block
    rows = np.diff(np.clip(edges, start, stop))
    return np.tile(rows * tail, int(np.prod(box.lengths[: g.cut], dtype=np.int64)))


@dataclass(frozen=True, slots=True)
class Placed:
    """A stored box and the numbers of its chunks: from `first` on for a shard of its own; for a small leaf, bytes
    ``[start, stop)`` of a bundle whose chunks begin at `first`."""

    row: ShardRow
    box: Box
    first: int
    start: int = 0
    stop: int = 0


def placed(part: Part) -> Iterator[Placed]:
    """Where in the numbering each stored box of a part begins."""
    at = 0
    bundles = []
    for bundle in part.bundles:
        bundles.append(at)
        at += len(bundle.chunks)
    for row in part.shards:
        box = row.as_box
        if row.bundle is not None:
            size = DTYPES[row.dtype].size
            number, begin = row.bundle
            yield Placed(row, box, bundles[number], begin * size, (begin + box.numel) * size)
        else:
            yield Placed(row, box, at)
            at += len(row.chunks)


def meeting(place: Placed, wanted: Box, chunk: int) -> Ints:
    """Numbers of the chunks of a stored box that hold something of a wanted box; `chunk` is the part's."""
    common = place.box.intersect(wanted)
    if common is None:
        return np.empty(0, np.int64)
    size = DTYPES[place.row.dtype].size
    if place.row.bundle is not None:
        block = grid((1,), size, chunk).block * size
        return place.first + np.arange(place.start // block, -(-place.stop // block), dtype=np.int64)
    if not place.row.shape:
        return np.array([place.first], np.int64)
    g = grid(place.row.shape, size, chunk)
    low = place.box.offsets[g.cut] // g.block
    per_line = -(-(place.box.offsets[g.cut] + place.box.lengths[g.cut]) // g.block) - low
    start, stop = common.offsets[g.cut], common.offsets[g.cut] + common.lengths[g.cut]
    lines = np.zeros(1, np.int64)
    for a, n, b, m in zip(
        common.offsets[: g.cut], common.lengths[: g.cut], place.box.offsets[: g.cut], place.box.lengths[: g.cut],
        strict=True,
    ):  # fmt: skip
        lines = (lines[:, None] * m + np.arange(a - b, a - b + n)).ravel()
    blocks = np.arange(start // g.block - low, -(-stop // g.block) - low, dtype=np.int64)
    return place.first + (lines[:, None] * per_line + blocks).ravel()
