"""What a snapshot holds, as the leaves of one rank see it: plain data, made by whoever reads the store."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from ckpt.format.shards import Box, Leaf


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """What a snapshot holds, as one rank sees it.

    Attributes:
        leaves: path → leaf, of all ranks.
        boxes: path → the boxes it is stored in, this rank's own first.
        per_rank: paths stored once on each rank.
        values: tracked name → decoded tree of this rank (names that start with "$" are not the leaves' business).
        aliases: other names of tied tensors → path.
    """

    leaves: dict[str, Leaf]
    boxes: dict[str, tuple[Box, ...]]
    per_rank: frozenset[str]
    values: dict[str, Any]
    aliases: dict[str, str]

    def leaf(self, path: str) -> Leaf | None:
        """By any of its names."""
        return self.leaves.get(self.aliases.get(path, path))

    def only(self, names: Collection[str]) -> Stored:
        """What belongs to some tracked names, to restore these and leave the others out."""
        aliases = {a: p for a, p in self.aliases.items() if _belongs(a, names)}
        kept = {p for p in self.leaves if _belongs(p, names)} | set(aliases.values())
        values = {name: tree for name, tree in self.values.items() if name in names}
        return Stored({p: self.leaves[p] for p in kept}, self.boxes, self.per_rank, values, aliases)

    def without(self, paths: Collection[str]) -> Stored:
        """All but these leaves."""
        return replace(self, leaves={p: leaf for p, leaf in self.leaves.items() if p not in paths})


def _belongs(path: str, names: Collection[str]) -> bool:
    if path in names:
        return True
    return any(path.startswith(name) and path[len(name)] in ".[" for name in names)
