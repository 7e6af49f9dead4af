"""Which pieces of replayed states make up a wanted box, wherever they were replayed. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ckpt.errors import DamagedError
from ckpt.format.manifest import Part, ShardRow
from ckpt.format.shards import DTYPES, Box
from recovery.assemble import Wanted


class Need(msgspec.Struct, frozen=True, array_like=True):
    """A piece that a rank lacks: a box of what saved rank `saved` held of a leaf."""

    saved: int
    leaf: str
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]


def sought(
    wanted: Sequence[Wanted], parts: Mapping[int, Part], near: frozenset[int]
) -> dict[Wanted, list[Need]]:  # fmt: skip
    """For each wanted box, pieces that make it up, those replayed here first. Raises DamagedError if they do not."""
    rows: dict[str, list[tuple[int, ShardRow]]] = {}
    for q in sorted(parts, key=lambda q: (q not in near, q)):
        for row in parts[q].shards:
            rows.setdefault(row.leaf, []).append((q, row))
    found: dict[Wanted, list[Need]] = {}
    for want in wanted:
        pieces: dict[Box, Need] = {}
        for q, row in rows.get(want.shard.leaf.path, ()):
            if want.rank is not None and q != want.rank:
                continue
            common = row.as_box.intersect(want.shard.box)
            if common is not None and not any(common == box or common.intersect(box) for box in pieces):
                pieces[common] = Need(q, row.leaf, common.offsets, common.lengths)
        if sum(box.numel for box in pieces) != want.shard.box.numel:
            path = want.shard.leaf.path
            raise DamagedError(
                f"{path} {want.shard.box}: the replayed ranks hold only {list(map(str, pieces))} of it",
                key="",
                leaf=path,
                expected=str(want.shard.box),
                found=str(list(map(str, pieces))),
            )
        found[want] = list(pieces.values())
    return found


def nbytes_of(need: Need, parts: Mapping[int, Part]) -> int:
    row = next(row for row in parts[need.saved].shards if row.leaf == need.leaf)
    return Box(need.offsets, need.lengths).numel * DTYPES[row.dtype].size


def place_of(need: Need) -> tuple[Any, ...]:
    return need.saved, need.leaf, need.offsets, need.lengths
