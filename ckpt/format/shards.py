"""Leaves, boxes and the chunk grid: which bytes belong together, whoever holds them (PROTOCOL.md §6).

The grid is laid on the *global* tensor, so it does not depend on the sharding: a shard's chunks are the grid's cells
cut to the shard's box. Each chunk is one contiguous run of the shard's own row-major bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

DEFAULT_CHUNK = 512 * 1024
"""Bytes per chunk; measured best for speed and size together (FACTS.md §2)."""

MAX_CHUNK = 16 << 20
"""The largest chunk size there is: whoever rebuilds one chunk allocates no more."""

MAX_DIMS = 64
"""Dimensions of a tensor, as many as numpy has."""

SMALL_LEAF = 4096
"""Leaves whose global size in bytes is below this share chunks (a bundle) with others of their class and dtype."""

Kind = Literal["float", "int", "uint", "bool", "complex", "bytes"]


@dataclass(frozen=True, slots=True)
class DType:
    """An element type by its torch name. `word` is the size in bytes of what the codec works on (for complex numbers
    one of the two parts), `size` that of an element."""

    name: str
    size: int
    word: int
    kind: Kind


DTYPES: dict[str, DType] = {
    d.name: d
    for d in (
        DType("float64", 8, 8, "float"),
        DType("float32", 4, 4, "float"),
        DType("float16", 2, 2, "float"),
        DType("bfloat16", 2, 2, "float"),
        DType("float8_e4m3fn", 1, 1, "float"),
        DType("float8_e4m3fnuz", 1, 1, "float"),
        DType("float8_e5m2", 1, 1, "float"),
        DType("float8_e5m2fnuz", 1, 1, "float"),
        DType("float8_e8m0fnu", 1, 1, "uint"),
        DType("float4_e2m1fn_x2", 1, 1, "bytes"),
        DType("int64", 8, 8, "int"),
        DType("int32", 4, 4, "int"),
        DType("int16", 2, 2, "int"),
        DType("int8", 1, 1, "int"),
        DType("uint64", 8, 8, "uint"),
        DType("uint32", 4, 4, "uint"),
        DType("uint16", 2, 2, "uint"),
        DType("uint8", 1, 1, "uint"),
        DType("bool", 1, 1, "bool"),
        DType("complex128", 16, 8, "complex"),
        DType("complex64", 8, 4, "complex"),
        DType("complex32", 4, 2, "complex"),
    )
}


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """A rectangular part of a tensor: `offsets` and `lengths` per dimension, in elements. A scalar's is ((), ())."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.lengths)

    @property
    def empty(self) -> bool:
        return 0 in self.lengths

    def intersect(self, other: Box) -> Box | None:
        """The common part, or None if there is none (an empty box meets nothing)."""
        offsets, lengths = [], []
        for a, n, b, m in zip(self.offsets, self.lengths, other.offsets, other.lengths, strict=True):
            start, stop = max(a, b), min(a + n, b + m)
            if stop <= start:
                return None
            offsets.append(start)
            lengths.append(stop - start)
        return Box(tuple(offsets), tuple(lengths))

    def within(self, shape: Sequence[int]) -> bool:
        """Whether this box lies inside a tensor of this shape."""
        return len(shape) == len(self.offsets) == len(self.lengths) and all(
            a >= 0 and n >= 0 and a + n <= d for a, n, d in zip(self.offsets, self.lengths, shape, strict=True)
        )

    def relative_to(self, outer: Box) -> Box:
        """The same box in coordinates that start at `outer`'s corner."""
        return Box(tuple(a - b for a, b in zip(self.offsets, outer.offsets, strict=True)), self.lengths)

    def __str__(self) -> str:
        if not self.offsets:
            return "[]"
        return "[" + ", ".join(f"{a}:{a + n}" for a, n in zip(self.offsets, self.lengths, strict=True)) + "]"


def whole(shape: Sequence[int]) -> Box:
    """The box of a full tensor of this shape."""
    return Box((0,) * len(shape), tuple(shape))


@dataclass(frozen=True, slots=True, order=True)
class Leaf:
    """One tensor of the state, as all ranks together see it.

    Attributes:
        path: its name in the state, e.g. ``model.h.0.weight`` or ``optimizer.state.h.0.weight.exp_avg``.
        cls: its class, what similar leaves share: "parameter", "buffer", "slot:<key>" (optimizer state), "tensor",
            or "array" (a numpy array).
        dtype: a key of `DTYPES`.
        shape: global shape.
    """

    path: str
    cls: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].size

    @property
    def small(self) -> bool:
        return self.nbytes < SMALL_LEAF


@dataclass(frozen=True, slots=True, order=True)
class Shard:
    """A box of one leaf, held by one rank. A `per_rank` leaf is whole on each rank that declares it, each with its
    own value."""

    leaf: Leaf
    box: Box
    per_rank: bool = False

    @property
    def nbytes(self) -> int:
        return self.box.numel * DTYPES[self.leaf.dtype].size


def place_of(shard: Shard) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """Sorts the shards of one rank as `Shard` itself does, ten times faster: there, a path is one leaf."""
    return shard.leaf.path, shard.box.offsets, shard.box.lengths


@dataclass(frozen=True, slots=True)
class Grid:
    """Cells of a tensor: dimensions before `cut` have block 1, `cut` has block `block`, later ones are whole."""

    shape: tuple[int, ...]
    cut: int
    block: int


def grid(shape: Sequence[int], itemsize: int, chunk: int = DEFAULT_CHUNK) -> Grid:
    """The chunk grid of a tensor of this global shape.

    `cut` is the first dimension whose tail bytes ``itemsize * prod(shape[cut + 1:])`` are at most `chunk`; its block
    is the largest power of two of such tails that `chunk` holds (PROTOCOL.md §6). A scalar is one cell.
    """
    tail = itemsize
    cut = len(shape)
    for j in range(len(shape) - 1, -1, -1):
        if tail > chunk:
            break
        cut = j
        block = 1 << (max(chunk // max(tail, 1), 1).bit_length() - 1)
        tail *= shape[j]
    if cut == len(shape):  # a scalar (an element never exceeds a chunk)
        return Grid(tuple(shape), 0, 1)
    return Grid(tuple(shape), cut, block)


@dataclass(frozen=True, slots=True)
class Cut:
    """One chunk of a shard: its global box, and where its bytes lie in the shard's row-major bytes."""

    box: Box
    start: int
    stop: int


def cuts(shape: Sequence[int], box: Box, itemsize: int, chunk: int = DEFAULT_CHUNK) -> Iterator[Cut]:
    """The chunks of a shard, in row-major order of the cells: every byte of the shard exactly once, in order.

    An empty box has no chunks.
    """
    if box.empty:
        return
    if not shape:
        yield Cut(box, 0, itemsize)
        return
    g = grid(shape, itemsize, chunk)
    tail = itemsize * math.prod(box.lengths[g.cut + 1 :])
    first, end = box.offsets[g.cut], box.offsets[g.cut] + box.lengths[g.cut]
    at = 0
    for lead in _indices(box.offsets[: g.cut], box.lengths[: g.cut]):
        row = first
        while row < end:
            nxt = min((row // g.block + 1) * g.block, end)
            size = (nxt - row) * tail
            yield Cut(
                Box(
                    (*lead, row, *box.offsets[g.cut + 1 :]),
                    ((1,) * g.cut) + (nxt - row, *box.lengths[g.cut + 1 :]),
                ),
                at,
                at + size,
            )
            at += size
            row = nxt


def cut_count(shape: Sequence[int], box: Box, itemsize: int, chunk: int = DEFAULT_CHUNK) -> int:
    """How many chunks `cuts` gives, without walking them: shapes read from a store may claim anything."""
    if box.empty:
        return 0
    if not shape:
        return 1
    g = grid(shape, itemsize, chunk)
    first, end = box.offsets[g.cut], box.offsets[g.cut] + box.lengths[g.cut]
    return math.prod(box.lengths[: g.cut]) * (-(-end // g.block) - first // g.block)


def _indices(offsets: Sequence[int], lengths: Sequence[int]) -> Iterator[tuple[int, ...]]:
    if not offsets:
        yield ()
        return
    for first in range(offsets[0], offsets[0] + lengths[0]):
        for rest in _indices(offsets[1:], lengths[1:]):
            yield (first, *rest)


def uncovered(shape: Sequence[int], boxes: Iterable[Box]) -> str | None:
    """Whether the boxes cover a tensor of this shape exactly once; None if they do, else what is wrong, in words.

    Empty boxes count for nothing. Sorting by the first offset bounds the pairs that are compared.
    """
    full = [b for b in boxes if not b.empty]
    for b in full:
        if not b.within(shape):
            return f"box {b} lies outside shape {tuple(shape)}"
    want, have = math.prod(shape), sum(b.numel for b in full)
    if have != want and not (have > want):
        return f"boxes hold {have} of {want} elements of shape {tuple(shape)}"
    full.sort()
    active: list[Box] = []
    for b in full:
        if b.offsets:
            active = [a for a in active if a.offsets[0] + a.lengths[0] > b.offsets[0]]
        for a in active:
            if a.intersect(b) is not None:
                return f"boxes {a} and {b} overlap"
        active.append(b)
    return None if have == want else f"boxes hold {have} of {want} elements of shape {tuple(shape)}"
