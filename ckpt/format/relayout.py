"""After a restore: what the store already holds of the state, in the words of the layout that is saved next.

A changed layout cuts leaves at other places. The new owner's boxes are first cut along the old shards' edges
(`cut_along`), so that each new piece lies inside exactly one old chunk; it then references that chunk, clipped
(`Chunk.of`), and stores nothing until it changes (PROTOCOL.md §6). An unchanged layout comes out of the same rule
unclipped: its pieces are the old chunks. Small leaves, which lie in bundles, are in loans.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeAlias

from ckpt.format.layout import Layout, Piece
from ckpt.format.loans import Lenders, cut_small, lying, members_of
from ckpt.format.manifest import Chunk, Loan, Part, ShardRow, chunk_digest
from ckpt.format.shards import DTYPES, Box, Leaf, Shard, cuts, grid

Cell: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """The part of a layout that a snapshot holds already: `layout` has only its pieces, `table` runs parallel to
    them; `packs`: key → length; `shared`: those that other ranks may lean on too, since the layout has changed.
    `loans`: number of a bundle → where its members lie; its pieces' chunks then have a digest, and no blobs."""

    layout: Layout
    table: tuple[Chunk, ...]
    packs: Mapping[str, int]
    shared: frozenset[str]
    loans: Mapping[int, Loan] = field(default_factory=dict)


def old_boxes(parts: Iterable[Part]) -> dict[Leaf, tuple[Box, ...]]:
    """Leaf → the boxes in which these parts hold it. Per-rank leaves are never cut."""
    parts = tuple(parts)
    found: dict[Leaf, set[Box]] = {}
    for part in parts:
        for row in part.shards:
            if row.bundle is None and not row.per_rank:
                found.setdefault(_leaf(row), set()).add(row.as_box)
    for (leaf, _), boxes in lying(parts).items():
        found[leaf] = {one.box for one in boxes}
    return {leaf: tuple(sorted(boxes)) for leaf, boxes in found.items()}


def cut_along(shards: Sequence[Shard], old: Mapping[Leaf, Sequence[Box]]) -> list[Shard]:
    """The shards, cut where old boxes end. What no old box covers stays as it is: the shard then is not cut at all."""
    out: list[Shard] = []
    for shard in shards:
        boxes = () if shard.per_rank or shard.box.empty else old.get(shard.leaf, ())
        if shard.box in boxes:
            out.append(shard)
            continue
        if shard.leaf.small:
            out.extend(cut_small(shard, boxes))
            continue
        pieces = [common for box in boxes if (common := box.intersect(shard.box)) is not None]
        if len(pieces) > 1 and sum(box.numel for box in pieces) == shard.box.numel:
            out.extend(Shard(shard.leaf, box, shard.per_rank) for box in sorted(pieces))
        else:
            out.append(shard)
    return out


def stored_already(parts: Mapping[int, Part], rank: int | None, layout: Layout, data: Any) -> Stored:
    """Find every piece of `layout` in the parts.

    Args:
        parts: of one snapshot, as far as they were read.
        rank: whose per-rank leaves are this rank's; None where the snapshot has another world size.
        data: the restored state as captured, laid out by `layout`: a clipped piece needs a digest of its own,
            and bundles are known by theirs.
    """
    index = _Index(parts, rank, layout.chunk)
    pieces: list[Piece] = []
    table: list[Chunk] = []
    packs: dict[str, int] = {}

    def found(piece: Piece, chunk: Chunk, sizes: Mapping[str, int]) -> None:
        pieces.append(piece)
        table.append(chunk)
        packs.update((blob.pack, sizes[blob.pack]) for blob in chunk.blobs)

    loans: dict[int, Loan] = {}
    members = members_of(layout)
    for number, region in enumerate(layout.bundles):
        own = layout.pieces[region.piece : region.piece_stop]
        digests = [chunk_digest(piece.dtype, data[piece.start : piece.stop]) for piece in own]
        same = [index.equal(digest) for digest in digests]
        loan = index.lenders.lend(members[number], data) if None in same else None
        if loan is not None:
            loans[number] = loan
            pieces.extend(own)
            table.extend(Chunk(digest, ()) for digest in digests)
            packs.update((pack, index.length(pack)) for pack in loan.packs)
            continue
        for piece, hit in zip(own, same, strict=True):
            if hit is not None:
                found(piece, *hit)
    for place in layout.regions:
        if place.bundle is not None:
            continue
        for piece in layout.pieces[place.piece : place.piece_stop]:
            inside = index.chunk(place.shard, piece)
            if inside is None:
                continue
            box, chunk, sizes = inside
            if box != piece.box:
                digest = chunk_digest(piece.dtype, data[piece.start : piece.stop])
                chunk = Chunk(digest, chunk.blobs, chunk.of or box)
            found(piece, chunk, sizes)
    shared = frozenset(packs)
    if index.unchanged(layout):
        shared = frozenset().union(*(loan.packs for loan in loans.values()))
    return Stored(replace(layout, pieces=tuple(pieces)), tuple(table), packs, shared, loans)


class _Index:
    """The parts' rows, by leaf; chunks are made from a row when it is first asked for."""

    def __init__(self, parts: Mapping[int, Part], rank: int | None, chunk: int) -> None:
        self._rows: dict[tuple[Leaf, bool], list[tuple[int, ShardRow]]] = {}
        self._chunk = chunk
        self._made: dict[int, dict[Cell, tuple[Box, Chunk]]] = {}
        # Another chunk size is another grid, on which nothing fits.
        self._parts = {number: part for number, part in parts.items() if part.chunk == chunk}
        self._sizes = {number: dict(part.packs) for number, part in self._parts.items()}
        self._own = None if rank is None else self._parts.get(rank)
        self._bundled: dict[str, tuple[Chunk, Mapping[str, int]]] | None = None
        for number, part in self._parts.items():
            for row in part.shards:
                if row.bundle is None and (not row.per_rank or number == rank):
                    self._rows.setdefault((_leaf(row), row.per_rank), []).append((number, row))

    def unchanged(self, layout: Layout) -> bool:
        """Whether this rank's part holds the boxes of the layout, and no others."""
        if self._own is None:
            return False
        regions = {(region.shard.leaf.path, region.shard.box) for region in layout.regions}
        return regions == {(row.leaf, row.as_box) for row in self._own.shards}

    @cached_property
    def lenders(self) -> Lenders:
        return Lenders(self._parts, self._own, self._chunk)

    def length(self, pack: str) -> int:
        """Of a pack that some part names."""
        return next(sizes[pack] for sizes in self._sizes.values() if pack in sizes)

    def equal(self, digest: str) -> tuple[Chunk, Mapping[str, int]] | None:
        """A chunk of any old bundle with these very bytes, whatever leaves it holds: bundles follow no grid."""
        if self._bundled is None:
            self._bundled = {
                chunk.digest: (chunk, self._sizes[number])
                for number, part in self._parts.items()
                for row in part.bundles
                for chunk in part.chunks(row)
            }
        return self._bundled.get(digest)

    def chunk(self, shard: Shard, piece: Piece) -> tuple[Box, Chunk, Mapping[str, int]] | None:
        """The old chunk that the piece lies inside, with its own box."""
        for number, row in self._rows.get((shard.leaf, shard.per_rank), ()):
            if row.as_box != shard.box and row.as_box.intersect(piece.box) != piece.box:
                continue
            hit = self._chunks(number, row).get(_cell(shard.leaf, piece.box, self._parts[number].chunk))
            if hit is not None:
                return *hit, self._sizes[number]
        return None

    def _chunks(self, number: int, row: ShardRow) -> dict[Cell, tuple[Box, Chunk]]:
        made = self._made.get(id(row))
        if made is None:
            part = self._parts[number]
            boxes = [c.box for c in cuts(row.shape, row.as_box, DTYPES[row.dtype].size, part.chunk)]
            cells = (_cell(_leaf(row), box, part.chunk) for box in boxes)
            made = dict(zip(cells, zip(boxes, part.chunks(row), strict=True), strict=True))
            self._made[id(row)] = made
        return made


def _cell(leaf: Leaf, box: Box, chunk: int) -> Cell:
    """The number of the grid cell that a chunk's box is cut from."""
    if not leaf.shape:
        return ()
    cells = grid(leaf.shape, DTYPES[leaf.dtype].size, chunk)
    return *box.offsets[: cells.cut], box.offsets[cells.cut] // cells.block


def _leaf(row: ShardRow) -> Leaf:
    return Leaf(row.leaf, row.cls, row.dtype, row.shape)
