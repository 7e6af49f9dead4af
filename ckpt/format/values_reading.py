"""Tagged JSON back into values (values.py has the tags). No name in the bytes is imported, looked up or called."""

from __future__ import annotations

import math
import re
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from datetime import date, datetime, timedelta, timezone
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath
from typing import Any, get_args

import msgspec
import numpy as np

from ckpt.format.values_kinds import EXACT, FACTORIES, MAX_DEPTH, Ref, TorchKind, TorchName

_NUMPY_DTYPE = re.compile(r"[<|](b1|[iu][1248]|f[248]|c(8|16)|[mM]8(\[\d{0,9}(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?)")


def decode(data: bytes | bytearray | memoryview | msgspec.Raw) -> Any:
    """The value that `encode` wrote, `Ref` and `TorchName` left in it for the leaves to replace.

    Raises ValueError for anything else: the bytes come from a store and are not trusted.
    """
    try:
        return _value(_parse(data), 0)
    except (TypeError, OverflowError, RecursionError, AttributeError, IndexError, KeyError, ArithmeticError) as e:
        raise ValueError(f"not a tagged value: {type(e).__name__}: {e}") from e


_parse = msgspec.json.Decoder().decode


def _value(tree: Any, depth: int) -> Any:
    match tree:
        case None | bool() | str() | float():
            return tree
        case int():
            if not -EXACT <= tree <= EXACT:
                raise ValueError(f"the bare number {tree} is beyond 2**53; it should have been tagged")
            return tree
        case list():
            return _values(tree, depth)
        case dict() if len(tree) == 1:
            ((tag, content),) = tree.items()
            read = _READERS.get(tag)
            if read is None:
                raise ValueError(f"unknown tag {tag!r}; a newer version may have written it")
            return read(content, depth)
        case _:
            raise ValueError(f"an object with {len(tree)} fields is no tagged value")


def _values(content: Any, depth: int) -> list[Any]:
    if not isinstance(content, list):
        raise ValueError(f"expected an array, found {type(content).__name__}")
    if depth >= MAX_DEPTH:
        raise ValueError(f"nested more than {MAX_DEPTH} deep")
    return [_value(item, depth + 1) for item in content]


def _few(content: Any, depth: int) -> list[Any]:
    """The items of a tag that is no container to `encode`, so it counts no level of nesting by itself."""
    if not isinstance(content, list) or len(content) > 3:
        raise ValueError(f"expected a few items, found {content!r:.80}")
    return [_value(item, depth + 1) for item in content]


def _mapping(content: Any, depth: int) -> list[tuple[Any, Any]]:
    if depth >= MAX_DEPTH:
        raise ValueError(f"nested more than {MAX_DEPTH} deep")
    pairs = [(_value(k, depth + 1), _value(v, depth + 1)) for k, v in content]
    if len(dict(pairs)) != len(pairs):
        raise ValueError("a key occurs twice")
    return pairs


def _exactly(content: Any, *kinds: type) -> list[Any]:
    """The items of an array, each of exactly the expected JSON kind."""
    if not isinstance(content, list) or len(content) != len(kinds):
        raise ValueError(f"expected {len(kinds)} items, found {content!r}")
    for item, kind in zip(content, kinds, strict=True):
        if type(item) is not kind:
            raise ValueError(f"expected {kind.__name__}, found {item!r}")
    return content


def _distinct(content: Any, depth: int) -> list[Any]:
    items = _values(content, depth)
    if len(set(items)) != len(items):
        raise ValueError("an item occurs twice")
    return items


def _read_int(content: Any, _: int) -> int:
    if not isinstance(content, str) or not re.fullmatch(r"-?0x[0-9a-f]+", content):
        raise ValueError(f"not a hexadecimal int: {content!r:.80}")
    return int(content, 16)


def _read_float(content: Any, _: int) -> float:
    number: float = struct.unpack(">d", bytes.fromhex(content))[0] if len(content) == 16 else 0.0
    if math.isfinite(number):
        raise ValueError(f"not the bits of a NaN or an infinity: {content!r:.80}")
    return number


def _read_complex(content: Any, depth: int) -> complex:
    real, imag = _few(content, depth)
    if type(real) is not float or type(imag) is not float:
        raise ValueError(f"not two floats: {content!r:.80}")
    return complex(real, imag)


def _read_deque(content: Any, depth: int) -> deque[Any]:
    maxlen, items = content
    limit = _value(maxlen, depth)
    values = _values(items, depth)
    if limit is not None and (type(limit) is not int or limit < len(values)):
        raise ValueError(f"a deque of {len(values)} items with maxlen {limit!r}")
    return deque(values, limit)


def _read_range(content: Any, depth: int) -> range:
    start, stop, step = _few(content, depth)
    return range(start, stop, step)


def _read_slice(content: Any, depth: int) -> slice:
    start, stop, step = _few(content, depth)
    return slice(start, stop, step)


def _read_default(content: Any, depth: int) -> defaultdict[Any, Any]:
    name, pairs = content
    return defaultdict(FACTORIES[name], _mapping(pairs, depth))


def _read_counter(content: Any, depth: int) -> Counter[Any]:
    counter: Counter[Any] = Counter()
    dict.update(counter, _mapping(content, depth))  # Counter.update adds, and would run through `+` of what is stored
    return counter


_PATHS: dict[str, type[PurePath]] = {
    "path": type(Path()),  # of the machine that reads
    "posix": PurePosixPath,
    "windows": PureWindowsPath,
}


def _read_path(content: Any, depth: int) -> PurePath:
    kind, text = content
    name = _value(text, depth)
    if not isinstance(name, str):
        raise ValueError(f"not a path: {content!r:.80}")
    return _PATHS[kind](name)


def _read_numpy(content: Any, _: int) -> np.generic:
    name, text = _exactly(content, str, str)
    if not _NUMPY_DTYPE.fullmatch(name):
        raise ValueError(f"not a dtype of a numpy scalar: {name!r:.80}")
    dtype, raw = np.dtype(name), bytes.fromhex(text)
    if len(raw) != dtype.itemsize:
        raise ValueError(f"{len(raw)} bytes for a numpy {name}")
    scalar: np.generic = np.frombuffer(raw, dtype)[0]
    return scalar


def _read_datetime(content: Any, _: int) -> datetime:
    *numbers, fold, micros = content
    zone = None if micros is None else timezone(timedelta(microseconds=micros))
    year, month, day, hour, minute, second, microsecond = _exactly(numbers, *(int,) * 7)
    return datetime(year, month, day, hour, minute, second, microsecond, tzinfo=zone, fold=fold)


def _read_torch(content: Any, _: int) -> TorchName:
    kind, text = _exactly(content, str, str)
    if kind not in get_args(TorchKind):
        raise ValueError(f"unknown kind of torch constant {kind!r:.80}")
    return TorchName(kind, text)


def _read_ref(content: Any, depth: int) -> Ref:
    path = _value(content, depth)
    if not isinstance(path, str):
        raise ValueError(f"not the path of a leaf: {content!r:.80}")
    return Ref(path)


_READERS: dict[str, Callable[[Any, int], Any]] = {
    "int": _read_int,
    "float": _read_float,
    "complex": _read_complex,
    "str": lambda c, _: bytes.fromhex(c).decode("utf-8", "surrogatepass"),
    "bytes": lambda c, _: bytes.fromhex(c),
    "bytearray": lambda c, _: bytearray.fromhex(c),
    "tuple": lambda c, depth: tuple(_values(c, depth)),
    "dict": lambda c, depth: dict(_mapping(c, depth)),
    "ordered": lambda c, depth: OrderedDict(_mapping(c, depth)),
    "counter": _read_counter,
    "default": _read_default,
    "set": lambda c, depth: set(_distinct(c, depth)),
    "frozenset": lambda c, depth: frozenset(_distinct(c, depth)),
    "deque": _read_deque,
    "slice": _read_slice,
    "range": _read_range,
    "ellipsis": lambda _c, _d: Ellipsis,
    "path": _read_path,
    "numpy": _read_numpy,
    "date": lambda c, _: date(*_exactly(c, int, int, int)),
    "datetime": _read_datetime,
    "timedelta": lambda c, _: timedelta(*_exactly(c, int, int, int)),
    "torch": _read_torch,
    "ref": _read_ref,
}
