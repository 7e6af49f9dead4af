"""Which plain values of two snapshots differ. Equal means equal as stored: type for type, NaN payloads included."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from ckpt.format.documents import damaged
from ckpt.format.manifest import Part
from ckpt.format.names import PartName
from ckpt.format.values import decode, encode, flat


@dataclass(frozen=True, slots=True)
class ValueChange:
    """A plain value that is not what it was. `rank`: whose, where each rank has its own."""

    path: str
    rank: int | None
    verdict: Literal["changed", "added", "removed"]
    before: Any
    after: Any

    @property
    def name(self) -> str:
        return self.path if self.rank is None else f"{self.path}@rank{self.rank}"


_Said: TypeAlias = tuple[bytes, Any]
"""A value's stored form, for comparing, and the value."""
_OfRanks: TypeAlias = dict[int | None, _Said]
"""Rank → what it said; None alone where all ranks say the same."""


def value_changes(
    old: Mapping[int, Part], new: Mapping[int, Part], matches: Callable[[str], bool]
) -> Iterator[ValueChange]:
    """The values that differ, by path and rank. Random states and the data position are left out: they are other
    after every step.

    Raises:
        DamagedError: a value cannot be decoded.
    """
    before, after = _values(old, matches), _values(new, matches)
    for path in sorted(before.keys() | after.keys()):
        x, y = before.get(path, {}), after.get(path, {})
        if x and y and (None in x) != (None in y):  # one for all ranks here, one per rank there
            x, y = _spread(x, old), _spread(y, new)
        for rank in sorted(x.keys() | y.keys(), key=lambda r: -1 if r is None else r):
            if (change := _change(path, rank, x.get(rank), y.get(rank))) is not None:
                yield change


def _change(path: str, rank: int | None, x: _Said | None, y: _Said | None) -> ValueChange | None:
    match x, y:
        case None, (_, value):
            return ValueChange(path, rank, "added", None, value)
        case (_, value), None:
            return ValueChange(path, rank, "removed", value, None)
        case (was, before), (is_, after) if was != is_:
            return ValueChange(path, rank, "changed", before, after)
        case _:
            return None


def _values(parts: Mapping[int, Part], matches: Callable[[str], bool]) -> dict[str, _OfRanks]:
    found: dict[str, _OfRanks] = {}
    for rank, part in sorted(parts.items()):
        for name in part.values:
            if name.startswith("$"):
                continue
            for path, value in _flat(part, name).items():
                # An optimizer has empty dicts for what are tensors, and those have rows of their own.
                if matches(path) and (value != {} or path == name):
                    found.setdefault(path, {})[rank] = (encode(value, path), value)
    for path, said in found.items():
        if len(said) == len(parts) and len({text for text, _ in said.values()}) == 1:
            found[path] = {None: next(iter(said.values()))}
    return found


def _flat(part: Part, name: str) -> dict[str, Any]:
    try:
        return flat(decode(part.values[name]), name)
    except ValueError as error:
        key = PartName(part.id, part.rank, part.revision).key
        raise damaged(key, f"a tagged value as {name!r}", str(error), step=part.step, rank=part.rank) from error


def _spread(said: _OfRanks, parts: Mapping[int, Part]) -> _OfRanks:
    return dict.fromkeys(parts, said[None]) if None in said else said
