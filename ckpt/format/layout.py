"""Where a rank's own shards lie in its host buffer, and how they are cut into chunks.

Small leaves lie side by side, one *bundle* per class and dtype, and are cut as one long vector: a thousand scalars
cost one chunk. Big leaves lie one after the other, grouped by dtype without gaps, so that capture can gather runs of
them with one `torch.cat`.

A layout is data: capture copies tensors into its places, the differ walks its pieces, a part lists its regions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ckpt.format.shards import DEFAULT_CHUNK, DTYPES, Box, Shard, cuts, place_of, whole

ALIGN = 64


@dataclass(frozen=True, slots=True)
class Piece:
    """One chunk in the buffer: bytes ``[start, stop)``; `index` counts the chunks of its region or bundle; `name`
    is the leaf's path, or the bundle's name."""

    start: int
    stop: int
    dtype: str
    cls: str
    name: str
    index: int
    box: Box


@dataclass(frozen=True, slots=True)
class Region:
    """One shard in the buffer: `nbytes` bytes from byte `start`, row-major. A bundled shard has the number of its
    `bundle`, begins at element `first` of it and owns no pieces; else its pieces are ``pieces[piece:piece_stop]``."""

    shard: Shard
    start: int
    bundle: int | None
    first: int
    piece: int
    piece_stop: int

    @property
    def nbytes(self) -> int:
        return self.shard.nbytes


@dataclass(frozen=True, slots=True)
class BundleRegion:
    """One bundle in the buffer: `length` elements from byte `start`; its pieces are ``pieces[piece:piece_stop]``."""

    cls: str
    dtype: str
    length: int
    start: int
    piece: int
    piece_stop: int

    @property
    def nbytes(self) -> int:
        return self.length * DTYPES[self.dtype].size


@dataclass(frozen=True, slots=True)
class Layout:
    """All of one rank: `regions` sorted by shard, `bundles` by (class, dtype), `pieces` in buffer order of bundles
    first, then regions; `nbytes` is the length of the buffer."""

    regions: tuple[Region, ...]
    bundles: tuple[BundleRegion, ...]
    pieces: tuple[Piece, ...]
    nbytes: int
    chunk: int = field(default=DEFAULT_CHUNK)


def bundle_name(cls: str, dtype: str) -> str:
    """What a message calls a bundle."""
    return f"small {cls} leaves ({dtype})"


def lay_out(shards: Iterable[Shard], chunk: int = DEFAULT_CHUNK) -> Layout:
    """The layout of one rank's own shards. Equal sets of shards give equal layouts, in whatever order they come."""
    ordered = sorted(shards, key=place_of)
    small: dict[tuple[str, str], list[int]] = {}
    large: list[int] = []
    for i, shard in enumerate(ordered):
        if shard.leaf.small:
            small.setdefault((shard.leaf.cls, shard.leaf.dtype), []).append(i)
        else:
            large.append(i)
    at = 0
    pieces: list[Piece] = []
    bundles: list[BundleRegion] = []
    places: dict[int, Region] = {}
    for number, ((cls, dtype), members) in enumerate(sorted(small.items())):
        size = DTYPES[dtype].size
        at = _align(at)
        first = 0
        for i in members:
            places[i] = Region(ordered[i], at + first * size, number, first, 0, 0)
            first += ordered[i].box.numel
        piece = len(pieces)
        pieces.extend(
            Piece(at + c.start, at + c.stop, dtype, cls, bundle_name(cls, dtype), i, c.box)
            for i, c in enumerate(cuts((first,), whole((first,)), size, chunk))
        )
        bundles.append(BundleRegion(cls, dtype, first, at, piece, len(pieces)))
        at += first * size
    last = ""
    for i in sorted(large, key=lambda i: (ordered[i].leaf.dtype, i)):
        shard = ordered[i]
        leaf = shard.leaf
        if leaf.dtype != last:
            at, last = _align(at), leaf.dtype
        piece = len(pieces)
        pieces.extend(
            Piece(at + c.start, at + c.stop, leaf.dtype, leaf.cls, leaf.path, n, c.box)
            for n, c in enumerate(cuts(leaf.shape, shard.box, DTYPES[leaf.dtype].size, chunk))
        )
        places[i] = Region(shard, at, None, 0, piece, len(pieces))
        at += shard.nbytes
    return Layout(tuple(places[i] for i in range(len(ordered))), tuple(bundles), tuple(pieces), at, chunk)


def _align(at: int) -> int:
    return -(-at // ALIGN) * ALIGN
