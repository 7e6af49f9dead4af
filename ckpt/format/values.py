"""Plain values as tagged JSON: what a part says of everything in the state that is not a tensor.

A value is a JSON null, boolean, string, array (a list), a number (an int of at most 2**53 either way, or a finite
float), or an object of exactly one field, whose name is the *tag* and says how to read the rest:

    int     "-0x…"          an int beyond 2**53              set, frozenset  [item, …], sorted by their JSON
    float   16 hex digits   NaN (with payload) or infinity   deque           [maxlen, [item, …]]
    complex [float, float]                                   slice, range    [start, stop, step]
    str     hex of UTF-8 with surrogates                     ellipsis        null
    bytes, bytearray  hex                                    path            [kind, text]
    tuple   [item, …]                                        numpy           [dtype, hex of its bytes]
    dict, ordered, counter  [[key, value], …], in order      date, datetime, timedelta  [numbers…]
    default [factory, [[key, value], …]]                     torch           [kind, text]; see `TorchName`
    ref     path of a tensor leaf; see `Ref`

`encode` takes exact types only: a subclass may carry code, or state that nobody would see missing. `decode` builds
nothing but these types, whatever the bytes say: no name in them is ever imported, looked up or called.
"""

from __future__ import annotations

import math
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from datetime import date, datetime, timedelta, timezone
from enum import Enum
from pathlib import PosixPath, PurePosixPath, PureWindowsPath, WindowsPath
from typing import Any

import msgspec
import numpy as np

from ckpt.format.values_kinds import (
    EXACT,
    FACTORIES,
    MAX_DEPTH,
    NUMPY_TYPES,
    Ref,
    TorchName,
    UnsupportedValue,
    child,
    flat,
    names_in,
)
from ckpt.format.values_reading import decode

__all__ = ["MAX_DEPTH", "Ref", "TorchName", "UnsupportedValue", "child", "decode", "encode", "flat", "names_in"]


def encode(value: object, path: str) -> bytes:
    """The tagged JSON of a value that stands at `path` in the state.

    Values that are equal, type for type, give equal bytes (sets are sorted); the order of a dict is kept.

    Raises UnsupportedValue naming the path inside the value.
    """
    return _json(_Writer().tree(value, path))


_json = msgspec.json.Encoder().encode


class _Writer:
    """Turns a value into what JSON can say. `open` holds the ids of the containers around the current place."""

    def __init__(self) -> None:
        self.open: set[int] = set()

    def tree(self, value: object, path: str) -> Any:
        kind = type(value)
        simple = _SCALARS.get(kind)
        if simple is not None:
            return simple(value)
        container = _CONTAINERS.get(kind)
        if container is not None:
            if id(value) in self.open:
                raise UnsupportedValue(f"{path}: a {kind.__name__} that contains itself cannot be saved", path=path)
            if len(self.open) >= MAX_DEPTH:
                raise UnsupportedValue(f"{path}: nested more than {MAX_DEPTH} deep; flatten it", path=path)
            self.open.add(id(value))
            try:
                return container(self, value, path)
            finally:
                self.open.discard(id(value))
        if isinstance(value, np.generic) and kind in NUMPY_TYPES:
            return {"numpy": [value.dtype.newbyteorder("<").str, _little(value).hex()]}
        raise UnsupportedValue(f"{path}: {_refusal(value)}", path=path)

    def items(self, values: Iterable[object], path: str) -> list[Any]:
        return [self.tree(v, f"{path}[{i}]") for i, v in enumerate(values)]

    def pairs(self, mapping: dict[Any, Any], path: str) -> list[list[Any]]:
        return [[self.tree(k, child(f"key of {path}", k)), self.tree(v, child(path, k))] for k, v in mapping.items()]

    def write_list(self, value: list[Any], path: str) -> Any:
        return self.items(value, path)

    def write_tuple(self, value: tuple[Any, ...], path: str) -> Any:
        return {"tuple": self.items(value, path)}

    def write_dict(self, value: dict[Any, Any], path: str) -> Any:
        return {"dict": self.pairs(value, path)}

    def write_ordered(self, value: OrderedDict[Any, Any], path: str) -> Any:
        return {"ordered": self.pairs(value, path)}

    def write_counter(self, value: Counter[Any], path: str) -> Any:
        return {"counter": self.pairs(value, path)}

    def write_default(self, value: defaultdict[Any, Any], path: str) -> Any:
        for name, factory in FACTORIES.items():
            if value.default_factory is factory:
                return {"default": [name, self.pairs(value, path)]}
        known = ", ".join(FACTORIES)
        raise UnsupportedValue(
            f"{path}: a defaultdict whose factory is {value.default_factory!r}; one of {known} can be saved, "
            "or make it a dict",
            path=path,
        )

    def write_set(self, value: set[Any], path: str) -> Any:
        return {"set": self.write_sorted(value, path)}

    def write_frozenset(self, value: frozenset[Any], path: str) -> Any:
        return {"frozenset": self.write_sorted(value, path)}

    def write_sorted(self, value: Iterable[Any], path: str) -> list[Any]:
        return sorted((self.tree(v, f"item of {path}") for v in value), key=_json)

    def write_deque(self, value: deque[Any], path: str) -> Any:
        return {"deque": [_int(value.maxlen) if value.maxlen is not None else None, self.items(value, path)]}

    def write_slice(self, value: slice, path: str) -> Any:
        return {"slice": self.items((value.start, value.stop, value.step), path)}

    def write_datetime(self, value: datetime, path: str) -> Any:
        zone = value.tzinfo
        micros = None
        if zone is not None:
            offset = value.utcoffset()
            # Only a plain offset is data; a ZoneInfo is a database somewhere else, and a named timezone loses its name.
            if offset is None or type(zone) is not timezone or zone.tzname(None) != timezone(offset).tzname(None):
                raise UnsupportedValue(
                    f"{path}: a datetime with time zone {zone!r}; use .astimezone(datetime.timezone.utc)", path=path
                )
            micros = offset // timedelta(microseconds=1)
        v = value
        return {"datetime": [v.year, v.month, v.day, v.hour, v.minute, v.second, v.microsecond, v.fold, micros]}


def _int(value: int) -> Any:
    # Hexadecimal, because decimal conversion is quadratic and CPython refuses it beyond 4300 digits.
    return value if -EXACT <= value <= EXACT else {"int": hex(value)}


def _float(value: float) -> Any:
    return value if math.isfinite(value) else {"float": struct.pack(">d", value).hex()}


def _str(value: str) -> Any:
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            return {"str": value.encode("utf-8", "surrogatepass").hex()}
    return value


def _little(value: np.generic) -> bytes:
    return np.asarray(value).astype(value.dtype.newbyteorder("<"), copy=False).tobytes()


def _refusal(value: object) -> str:
    """Why a value is refused, and what to do instead."""
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(value, Enum):
        return f"the enum member {value!r} cannot be saved without naming code; keep its .value or .name"
    if hasattr(kind, "__dataclass_fields__"):
        return f"the dataclass {name} cannot be saved without naming code; keep dataclasses.asdict(…)"
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return f"the namedtuple {name} cannot be saved without naming code; keep a tuple, or ._asdict()"
    if isinstance(value, type) or callable(value):
        return f"{value!r} is code, and code is not state; keep the values it works on"
    if isinstance(value, np.random.Generator | np.random.RandomState):
        return f"a {name}; keep its state: generator.bit_generator.state, or random_state.get_state()"
    for base in (*_SCALARS, *_CONTAINERS):
        if isinstance(value, base):
            return f"{name} is a subclass of {base.__name__}, of which only the plain type can be saved; convert it"
    return (
        f"{name} is nothing that can be saved; give it state_dict() and load_state_dict() and track it under a name of "
        "its own, or keep plain values (numbers, strings, bytes, lists, dicts, sets, paths, tensors, arrays)"
    )


_SCALARS: dict[type, Callable[[Any], Any]] = {
    type(None): lambda _: None,
    bool: lambda v: v,
    int: _int,
    float: _float,
    str: _str,
    complex: lambda v: {"complex": [_float(v.real), _float(v.imag)]},
    bytes: lambda v: {"bytes": v.hex()},
    bytearray: lambda v: {"bytearray": v.hex()},
    range: lambda v: {"range": [_int(v.start), _int(v.stop), _int(v.step)]},
    type(Ellipsis): lambda _: {"ellipsis": None},
    PosixPath: lambda v: {"path": ["path", _str(str(v))]},
    WindowsPath: lambda v: {"path": ["path", _str(str(v))]},
    PurePosixPath: lambda v: {"path": ["posix", _str(str(v))]},
    PureWindowsPath: lambda v: {"path": ["windows", _str(str(v))]},
    date: lambda v: {"date": [v.year, v.month, v.day]},
    timedelta: lambda v: {"timedelta": [v.days, v.seconds, v.microseconds]},
    TorchName: lambda v: {"torch": [v.kind, v.text]},
    Ref: lambda v: {"ref": _str(v.path)},
}

_CONTAINERS: dict[type, Callable[[_Writer, Any, str], Any]] = {
    list: _Writer.write_list,
    tuple: _Writer.write_tuple,
    dict: _Writer.write_dict,
    OrderedDict: _Writer.write_ordered,
    Counter: _Writer.write_counter,
    defaultdict: _Writer.write_default,
    set: _Writer.write_set,
    frozenset: _Writer.write_frozenset,
    deque: _Writer.write_deque,
    slice: _Writer.write_slice,
    datetime: _Writer.write_datetime,
}
