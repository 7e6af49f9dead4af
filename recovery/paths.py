"""Paths of leaves as people read them: in natural order, and in groups of what belongs together. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

GROUPS = 32
DIGITS = 18
"""Of a number that is taken for one; a longer one is a word."""

Words = tuple[str, ...]


def natural(path: str) -> list[tuple[int, str]]:
    """Sorts layer 2 before layer 10."""
    words = re.split(r"([0-9]+)", path)
    return [(int(word) if word.isascii() and word.isdecimal() and len(word) <= DIGITS else 0, word) for word in words]


@dataclass(frozen=True, slots=True)
class _Bunch:
    """Leaves whose paths begin with the same `depth` words; or, if `ranged`, with neighbouring ones."""

    name: str
    depth: int
    paths: tuple[Words, ...]
    ranged: bool = False

    @property
    def kin(self) -> str:
        """Bunches with equal ones are cut alike: the layers of a stack, and a parameter and its moments."""
        return re.sub("[0-9]+", "*", self.name.rpartition(".")[2])

    @property
    def can_be_cut(self) -> bool:
        return not self.ranged and all(len(words) > self.depth for words in self.paths)

    def children(self) -> list[_Bunch]:
        found: dict[str, list[Words]] = {}
        for words in self.paths:
            found.setdefault(".".join(words[: self.depth + 1]), []).append(words)
        return [_Bunch(name, self.depth + 1, tuple(paths)) for name, paths in found.items()]


def grouped(sizes: Mapping[str, int], limit: int = GROUPS) -> dict[str, tuple[str, ...]]:
    """Leaves in at most `limit` groups, by what their paths begin with: the largest are cut finest, and layers of one
    stack alike. Where a stack has too many layers for that, neighbours go together.

    Args:
        sizes: path → bytes.

    Returns:
        Name of the group → its paths, both in natural order.
    """
    paths = tuple(tuple(path.split(".")) for path in sorted(sizes, key=natural))
    bunches = [_Bunch("", 0, paths)] if paths else []
    total = sum(sizes.values())
    while True:
        families: dict[str, list[_Bunch]] = {}
        for bunch in bunches:
            if bunch.can_be_cut:
                families.setdefault(bunch.kin, []).append(bunch)
        weights = {kin: sum(sizes[".".join(w)] for b in family for w in b.paths) for kin, family in families.items()}
        for kin in sorted(families, key=lambda kin: -weights[kin]):
            if weights[kin] * limit < total:
                continue  # all of it together is worth less than a row
            family = families[kin]
            cut = _cut(family, limit - len(bunches) + len(family))
            if cut is not None:
                bunches = [bunch for bunch in bunches if bunch not in family] + cut
                break
        else:
            ordered = sorted(bunches, key=lambda bunch: natural(bunch.name))
            return {bunch.name: tuple(map(".".join, bunch.paths)) for bunch in ordered}


def _cut(family: Sequence[_Bunch], room: int) -> list[_Bunch] | None:
    """One word deeper; at most `room`, neighbours put together if need be. None if even that is not worth it."""
    cut = [bunch.children() for bunch in family]
    if family[0].depth > 1 and all(len(bunch.paths) == 1 for children in cut for bunch in children):
        return None  # a tensor and its moments say more together
    if sum(map(len, cut)) > room:
        each = room // len(family)
        stacks = all(bunch.name.rpartition(".")[2].isdecimal() for children in cut for bunch in children)
        if each < 2 or not (stacks or family[0].depth == 0):
            return None
        cut = [_ranges(children, each) for children in cut]
    return [bunch for children in cut for bunch in children]


def _ranges(children: list[_Bunch], count: int) -> list[_Bunch]:
    if len(children) <= count:
        return children
    edges = [n * len(children) // count for n in range(count + 1)]
    found = []
    for a, b in pairwise(edges):
        some = children[a:b]
        name = some[0].name if len(some) == 1 else f"{some[0].name} … {some[-1].name.rpartition('.')[2]}"
        found.append(_Bunch(name, some[0].depth, tuple(w for bunch in some for w in bunch.paths), len(some) > 1))
    return found
