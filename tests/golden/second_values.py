"""Values, written from §6 of FORMAT.md alone. Nothing that a value names is imported, looked up or run."""

from __future__ import annotations

import collections
import datetime
import pathlib
import re
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from .second_codec import Damaged

FACTORIES: dict[Any, Any] = {"none": None}
FACTORIES |= {kind.__name__: kind for kind in (bool, int, float, str, list, dict, set, tuple)}
PATHS = {"path": pathlib.Path, "posix": pathlib.PurePosixPath, "windows": pathlib.PureWindowsPath}


@dataclass(frozen=True)
class Ref:
    """The tensor leaf at `path` stands here."""

    path: str


@dataclass(frozen=True)
class Torch:
    """A dtype, device, size, layout or memory format, by name only."""

    kind: str
    text: str


def decode(value: Any) -> Any:
    """A value's JSON → the value; raises Damaged for what the page does not list."""
    match value:
        case None | bool() | str() | float():
            return value
        case int():
            if abs(value) > 2**53:
                raise Damaged(f"the number {value} is beyond 2^53")
            return value
        case list():
            return [decode(item) for item in value]
        case dict() if len(value) == 1:
            [(tag, content)] = value.items()
            try:
                return tagged(tag, content)
            except Damaged:
                raise
            except (ValueError, TypeError, KeyError, OverflowError, struct.error) as error:
                raise Damaged(f"a value of tag {tag!r} cannot be read: {error}") from error
        case _:
            raise Damaged(f"a value that is an object of {len(value)} fields")


def tagged(tag: str, content: Any) -> Any:
    match tag:
        case "int":
            return int(content, 16)
        case "float":
            return struct.unpack(">d", bytes.fromhex(content))[0]
        case "complex":
            real, imaginary = map(decode, content)
            return complex(real, imaginary)
        case "str":
            return bytes.fromhex(content).decode("utf-8", "surrogatepass")
        case "bytes":
            return bytes.fromhex(content)
        case "bytearray":
            return bytearray.fromhex(content)
        case "tuple":
            return tuple(map(decode, content))
        case "set":
            return set(map(decode, content))
        case "frozenset":
            return frozenset(map(decode, content))
        case "dict":
            return dict(pairs(content))
        case "ordered":
            return collections.OrderedDict(pairs(content))
        case "counter":
            return collections.Counter(dict(pairs(content)))
        case "default":
            factory, rows = content
            return collections.defaultdict(FACTORIES[factory], pairs(rows))
        case "deque":
            longest, items = content
            return collections.deque(map(decode, items), decode(longest))
        case "slice":
            return slice(*three(content))
        case "range":
            return range(*three(content))
        case "ellipsis":
            return ...
        case "path":
            kind, text = content
            return PATHS[kind](decode(text))
        case "numpy":
            return numpy_scalar(*content)
        case "date":
            return datetime.date(*content)
        case "datetime":
            *fields, fold, offset = content
            zone = None if offset is None else datetime.timezone(datetime.timedelta(microseconds=offset))
            return datetime.datetime(*fields, tzinfo=zone, fold=fold)
        case "timedelta":
            return datetime.timedelta(*content)
        case "torch":
            return Torch(*map(str, content))
        case "ref":
            return Ref(decode(content))
        case _:
            raise Damaged(f"a value of unknown tag {tag!r}")


def pairs(rows: Any) -> list[tuple[Any, Any]]:
    return [(decode(key), decode(value)) for key, value in rows]


def three(content: Any) -> list[Any]:
    result = [decode(item) for item in content]
    if len(result) != 3:
        raise Damaged(f"{len(result)} of start, stop, step")
    return result


def numpy_scalar(dtype: str, content: str) -> Any:
    if not re.fullmatch(r"[|<]([biufc]\d+|[mM]8(\[\d*[A-Za-z]+\])?)", dtype):
        raise Damaged(f"a numpy scalar of dtype {dtype!r}")
    return np.frombuffer(bytes.fromhex(content), dtype)[0]
