"""What plain values are made of: the stand-ins for tensors and torch constants, paths, and the tables both directions
share."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

MAX_DEPTH = 64
"""Containers within containers. Deeper values are refused by both directions, far from the interpreter's own limit."""

EXACT = 1 << 53

TorchKind: TypeAlias = Literal["dtype", "device", "size", "layout", "memory_format"]


@dataclass(frozen=True, slots=True)
class Ref:
    """Stands in a value for the tensor leaf (or array) at `path`, whose bytes are stored as chunks."""

    path: str


@dataclass(frozen=True, slots=True)
class TorchName:
    """A constant of torch by name, e.g. ``TorchName("dtype", "bfloat16")``; a size's text is ``"2,3"``. This room
    does not know torch: the leaves turn such names into the real thing and back."""

    kind: TorchKind
    text: str


class UnsupportedValue(ValueError):  # noqa: N818 - it names the thing refused, as UnsupportedState does
    """A value that cannot be written exactly. Attribute: path (where it stands in the state)."""

    def __init__(self, message: str, *, path: str) -> None:
        super().__init__(message)
        self.path = path


def child(path: str, key: object) -> str:
    """The path of what a container at `path` holds under `key`: ``path.key``, or ``path[3]`` for other keys."""
    if isinstance(key, str):
        return f"{path}.{key}"
    try:
        return f"{path}[{key!r}]"
    except ValueError:  # an int of more than 4300 digits has no repr
        return f"{path}[{type(key).__name__} {hash(key):x}]"


FACTORIES: dict[str, Any] = {
    "none": None,
    "bool": bool,
    "int": int,
    "float": float,
    "str": str,
    "list": list,
    "dict": dict,
    "set": set,
    "tuple": tuple,
}

# longdouble is left out: its size and padding differ between machines.
NUMPY_TYPES = frozenset(np.dtype(c).type for c in "?bhilqBHILQefdFD") | {np.datetime64, np.timedelta64}


def names_in(tree: object) -> Iterator[Ref | TorchName]:
    """Everything in a stored tree that stands for something of torch."""
    match tree:
        case Ref() | TorchName():
            yield tree
        case dict():
            for v in tree.values():
                yield from names_in(v)
        case list() | tuple() | deque():
            for v in tree:
                yield from names_in(v)


def flat(value: Any, path: str) -> dict[str, Any]:
    """Path → plain value of everything in a decoded value, for people to read and compare.

    Dicts are walked, and sequences that hold dicts or tensors somewhere; any other (betas, a list of losses, a table)
    stays one value. `Ref` is left out: a tensor has a row of its own.
    """
    match value:
        case Ref():
            return {}
        case dict() if value:
            return {p: v for k, item in value.items() for p, v in flat(item, child(path, k)).items()}
        case list() | tuple() | deque() if _branches(value):
            return {p: v for i, item in enumerate(value) for p, v in flat(item, f"{path}[{i}]").items()}
        case _:
            return {path: value}


def _branches(value: Any) -> bool:
    """Whether a sequence holds a dict or a tensor, at any depth."""
    return any(isinstance(v, (dict, Ref)) or (isinstance(v, (list, tuple, deque)) and _branches(v)) for v in value)
