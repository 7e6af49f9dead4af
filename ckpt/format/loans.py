"""Small leaves after a change of layout: they stay in the bundles that the snapshot has, until one of them changes.

A bundle of the new layout is put together from pieces of several old ones, so none of its chunks is stored anywhere.
But each of its members, cut along the old shards' edges, is one run of elements of an old bundle. So the new part lists
those bundles whole, with their chunks as they are, its shards point into them, and nothing is stored: a loan. The first
change of any member ends it: the layout's own bundle is stored then, once, and the old ones drop out of the part.

Refused: to move members one by one as they change. What has moved would be a bundle that grows, of another length and
so without a base each time, and be stored again each time; a bundle as a whole is stored once, and is a few chunks.

Refused: to look at the old bundles' bytes. They are not at hand; the state that was restored from them is, every byte
checked, and a digest of this rank's own bytes in each old chunk (`OldBundle.kept`) goes into the part, so that mirrors
can be compared with it although nobody holds all of the old bundle any more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, TypeAlias

import numpy as np

from ckpt.format.chunks import Chunk, Loan, OldBundle
from ckpt.format.documents import chunk_digest
from ckpt.format.layout import Layout, Region
from ckpt.format.parts import Part
from ckpt.format.shards import DTYPES, Box, Leaf, Shard, cuts, whole

MOST_BUNDLES = 32
"""Old bundles that one bundle of the layout may hang on. Each is a row in every part, and a read of its own for whoever
restores it: of more, the small leaves are stored anew."""

MOST_PIECES = 64
"""Pieces into which one small shard may be cut, for the same reason."""

Content: TypeAlias = tuple[str, str, int, tuple[str, ...]]
"""Class, dtype, length and digests of a bundle: several parts may list the same one."""


@dataclass(frozen=True, slots=True)
class Lying:
    """A box of a small leaf, and where its elements lie: row-major, from element `first` of a bundle."""

    box: Box
    bundle: Content
    first: int


def lying(parts: Iterable[Part], own: Part | None = None) -> dict[tuple[Leaf, bool], list[Lying]]:
    """(Small leaf, whether per rank) → its boxes, those that follow each other in one bundle put together again.
    Empty boxes are left out, and so are per-rank leaves of other parts than `own`."""
    found: dict[tuple[Leaf, bool], list[Lying]] = {}
    for part in parts:
        contents: list[Content] = [(b.cls, b.dtype, b.length, tuple(c.digest for c in b.chunks)) for b in part.bundles]
        for row in part.shards:
            if row.bundle is not None and (not row.per_rank or part is own) and not row.as_box.empty:
                leaf = Leaf(row.leaf, row.cls, row.dtype, row.shape)
                one = Lying(row.as_box, contents[row.bundle[0]], row.bundle[1])
                found.setdefault((leaf, row.per_rank), []).append(one)
    return {leaf: _joined(boxes) for leaf, boxes in found.items()}


def _joined(boxes: list[Lying]) -> list[Lying]:
    if len(boxes) == 1:
        return boxes
    boxes.sort(key=lambda one: (one.bundle, one.first))
    joined = boxes[:1]
    for one in boxes[1:]:
        last = joined[-1]
        box = _after(last.box, one.box)
        if box is not None and one.bundle == last.bundle and one.first == last.first + last.box.numel:
            joined[-1] = Lying(box, last.bundle, last.first)
        else:
            joined.append(one)
    return joined


def _after(one: Box, other: Box) -> Box | None:
    """The box whose row-major elements are those of `one`, then those of `other`; None if there is none."""
    for axis, length in enumerate(one.lengths):
        ahead = other.offsets[axis] - one.offsets[axis]
        if ahead == length and (one.offsets[axis + 1 :], one.lengths[axis + 1 :]) == (
            other.offsets[axis + 1 :],
            other.lengths[axis + 1 :],
        ):
            return Box(one.offsets, (*one.lengths[:axis], length + other.lengths[axis], *one.lengths[axis + 1 :]))
        if ahead or length != 1 or other.lengths[axis] != 1:
            return None  # from here on, the rows of the two would alternate
    return None


def runs(box: Box, outer: Box) -> list[Box]:
    """A box cut so that each piece is one run of the row-major elements of `outer`, which holds it."""
    axis = len(box.lengths)
    while axis and box.lengths[axis - 1] == outer.lengths[axis - 1]:
        axis -= 1  # whole rows from here on
    axis = max(axis - 1, 0)
    lines = (range(a, a + n) for a, n in zip(box.offsets[:axis], box.lengths[:axis], strict=True))
    rest = box.offsets[axis:], box.lengths[axis:]
    return [Box((*line, *rest[0]), ((1,) * axis) + rest[1]) for line in product(*lines)]


def cut_small(shard: Shard, old: Sequence[Box]) -> list[Shard]:
    """A small shard, cut so that each piece is one run of the elements of an old box; uncut where these do not hold all
    of it, or it would become too many."""
    pieces: list[Box] = []
    for outer in old:
        common = outer.intersect(shard.box)
        if common is not None:
            pieces.extend(runs(common, outer))
    if not 1 < len(pieces) <= MOST_PIECES or sum(box.numel for box in pieces) != shard.box.numel:
        return [shard]
    return [Shard(shard.leaf, box, shard.per_rank) for box in sorted(pieces)]


@dataclass(eq=False)
class Lenders:
    """The bundles of a snapshot's parts, all on one chunk grid, and what lies in them; `own`: this rank's part."""

    parts: Mapping[int, Part]
    own: Part | None
    chunk: int
    _boxes: dict[tuple[Leaf, bool], list[Lying]] = field(init=False)
    _bundles: dict[Content, tuple[Chunk, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._boxes = lying(self.parts.values(), self.own)
        for part in self.parts.values():
            for row in part.bundles:
                content = row.cls, row.dtype, row.length, tuple(c.digest for c in row.chunks)
                if content not in self._bundles:
                    self._bundles[content] = part.chunks(row)

    def lend(self, members: Sequence[Region], data: Any) -> Loan | None:
        """A loan for one bundle's members; None where they are not all there, or hang on too many bundles.

        Args:
            data: the restored state, in which the members lie.
        """
        first: dict[Content, None] = {}
        found: list[Lying | None] = []
        for member in members:
            one = None if member.shard.box.empty else self._find(member.shard)
            if one is None and not member.shard.box.empty:
                return None
            found.append(one)
            if one is not None:
                first.setdefault(one.bundle)
        if not 0 < len(first) <= MOST_BUNDLES:
            return None
        numbers = {content: n for n, content in enumerate(first)}
        here: list[list[tuple[int, Region]]] = [[] for _ in numbers]
        places: list[tuple[int, int]] = []
        for member, one in zip(members, found, strict=True):
            places.append((0, 0) if one is None else (numbers[one.bundle], one.first))
            if one is not None:
                here[numbers[one.bundle]].append((one.first, member))
        bundles = tuple(
            OldBundle(content[2], self._bundles[content], tuple(self._kept(content, here[n], data)))
            for content, n in numbers.items()
        )
        return Loan(tuple(member.shard for member in members), tuple(places), bundles)

    def _find(self, shard: Shard) -> Lying | None:
        """Where a shard lies in one run."""
        for one in self._boxes.get((shard.leaf, shard.per_rank), ()):
            if one.box.intersect(shard.box) == shard.box and runs(shard.box, one.box) == [shard.box]:
                ahead = 0
                for offset, begin, length in zip(shard.box.offsets, one.box.offsets, one.box.lengths, strict=True):
                    ahead = ahead * length + offset - begin
                return Lying(shard.box, one.bundle, one.first + ahead)
        return None

    def _kept(self, content: Content, members: list[tuple[int, Region]], data: Any) -> Iterator[str]:
        """For each chunk of an old bundle the digest of the members' bytes in it."""
        _, dtype, length, _ = content
        size = DTYPES[dtype].size
        members.sort(key=lambda member: member[0])
        for cut in cuts((length,), whole((length,)), size, self.chunk):
            mine = [np.empty(0, np.uint8)]
            for first, member in members:
                start, stop = max(cut.start, first * size), min(cut.stop, first * size + member.nbytes)
                if start < stop:
                    mine.append(data[member.start + start - first * size : member.start + stop - first * size])
            yield chunk_digest(dtype, np.concatenate(mine))


def same_members(layout: Layout, loans: Iterable[Loan]) -> dict[int, Loan]:
    """Of these loans, those whose members are a bundle of the layout: by its number there."""
    known = {(loan.members[0].leaf.cls, loan.members[0].leaf.dtype): loan for loan in loans}
    found: dict[int, Loan] = {}
    if known:
        members = members_of(layout)
        for number, bundle in enumerate(layout.bundles):
            loan = known.get((bundle.cls, bundle.dtype))
            if loan is not None and loan.members == tuple(member.shard for member in members[number]):
                found[number] = loan
    return found


def members_of(layout: Layout) -> list[list[Region]]:
    """The members of each bundle of a layout, in order."""
    members: list[list[Region]] = [[] for _ in layout.bundles]
    for region in layout.regions:
        if region.bundle is not None:
            members[region.bundle].append(region)
    return members
