"""Plain values are written exactly and read back as what they were, type for type, or refused with their path."""

from __future__ import annotations

import contextlib
import enum
import json
import math
import struct
import subprocess
import sys
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta, timezone
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.format import values, values_reading
from ckpt.format.values import MAX_DEPTH, Ref, TorchName, UnsupportedValue, decode, encode, flat


def same(a: Any, b: Any) -> bool:
    """Equality type for type and bit for bit, which `==` is not (NaN, -0.0, 1 == True)."""
    if type(a) is not type(b):
        return False
    match a:
        case float():
            return struct.pack("d", a) == struct.pack("d", b)
        case complex():
            return same(a.real, b.real) and same(a.imag, b.imag)
        case np.generic():
            return a.dtype == b.dtype and a.tobytes() == b.tobytes()
        case dict():
            factory = getattr(a, "default_factory", None) is getattr(b, "default_factory", None)
            return factory and same(list(a.items()), list(b.items()))
        case set() | frozenset():
            return sorted(map(encode_item, a)) == sorted(map(encode_item, b))
        case deque():
            return a.maxlen == b.maxlen and same(list(a), list(b))
        case slice():
            return same((a.start, a.stop, a.step), (b.start, b.stop, b.step))
        case list() | tuple():
            return len(a) == len(b) and all(map(same, a, b))
        case _:
            return bool(a == b)


def encode_item(value: Any) -> bytes:
    return encode(value, "item")


TAGS = sorted(values_reading._READERS)

any_float = st.floats(allow_nan=True) | st.integers(0, 2**64 - 1).map(lambda n: struct.unpack("d", n.to_bytes(8))[0])
text = st.text(st.characters(exclude_categories=()), max_size=6)  # lone surrogates included
numpy_scalars = st.sampled_from(["?", "b", "h", "i", "l", "B", "H", "I", "L", "e", "f", "d", "F", "D"]).flatmap(
    lambda c: st.binary(min_size=np.dtype(c).itemsize, max_size=np.dtype(c).itemsize).map(
        lambda raw: np.frombuffer(raw, c)[0] if c != "?" else np.bool_(raw[0] & 1)
    )
)
hashable_scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**70), 2**70)
    | any_float
    | text
    | st.binary(max_size=5)
    | st.builds(complex, any_float, any_float)
    | st.builds(PurePosixPath, st.sampled_from(["a/b", "/", ".", "ä"]))
    | st.dates()
    | st.timedeltas()
    | st.datetimes(timezones=st.none() | st.just(UTC) | st.just(timezone(timedelta(minutes=-90))))
    | st.builds(range, st.integers(), st.integers(), st.integers(1))
    | st.just(...)
    | st.builds(Ref, text)
    | st.builds(TorchName, st.sampled_from(["dtype", "device"]), st.just("float32"))
)
scalars = hashable_scalars | numpy_scalars | st.builds(bytearray, st.binary(max_size=5))
keys = hashable_scalars | st.tuples(hashable_scalars, hashable_scalars) | st.frozensets(hashable_scalars, max_size=2)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    mapping = st.dictionaries(keys, inner, max_size=3)
    return (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | mapping
        | mapping.map(OrderedDict)
        | mapping.map(lambda m: defaultdict(list, m))
        | st.dictionaries(keys, st.integers(), max_size=3).map(Counter)
        | st.sets(keys, max_size=3)
        | st.frozensets(keys, max_size=3)
        | st.lists(inner, max_size=3).map(deque)
        | st.lists(inner, max_size=3).map(lambda items: deque(items, 4))
        | st.tuples(inner, inner, inner).map(lambda t: slice(*t))
    )


@settings(max_examples=150, deadline=None)
@given(st.recursive(scalars, containers, max_leaves=12))
def test_decode_is_the_inverse_of_encode_and_encoding_again_gives_the_same_bytes(value: Any) -> None:
    data = encode(value, "v")
    json.loads(data)
    back = decode(data)
    assert encode(back, "v") == data
    assert same(back, value)


@pytest.mark.parametrize(
    "value",
    [
        np.float32(0.1),
        np.float64("nan"),
        np.datetime64("2020-01-01T00:00:00.5", "ms"),
        np.timedelta64(3, "D"),
        Path("runs/ü"),
        PureWindowsPath(r"C:\x"),
        slice(1, 2**80, None),
        2**80,
        -(2**53) - 1,
        b"\0\xff",
        bytearray(b"ab"),
        {3, 1, 2},
        float("nan"),
        float("inf"),
        -0.0,
        5e-324,
        np.random.RandomState(0).get_state(legacy=False)["state"]["pos"],
        datetime(2020, 1, 2, 3, 4, 5, 6, fold=1),
        Counter({"a": -1, "b": 0}),
        "\ud800 lone",
        {1: "int", "1": "str", (1, 2): "tuple", None: "none"},
    ],
    ids=lambda v: repr(v)[:40],
)
def test_what_is_accepted_comes_back_as_it_was(value: Any) -> None:
    """J6"""
    assert same(decode(encode(value, "v")), value)


def test_an_int_that_python_would_not_print_is_kept_as_a_value_and_as_a_key() -> None:
    """J6"""
    big = 7**6000
    assert decode(encode({big: [big]}, "v")) == {big: [big]}


@pytest.mark.parametrize("bits", [0x7FF8000000000000, 0xFFF8000000000001, 0x7FF0000000000001, 0x7FF80000DEADBEEF])
def test_the_payload_of_a_nan_is_kept(bits: int) -> None:
    """I3, J6"""
    nan = struct.unpack(">d", bits.to_bytes(8))[0]
    assert struct.pack(">d", decode(encode(nan, "v"))) == bits.to_bytes(8)


def test_a_set_is_written_in_the_same_order_whatever_order_it_was_built_in() -> None:
    colliding = [0, 2**61 - 1, 2 * (2**61 - 1)]  # equal hashes: a set of them iterates in the order of building
    first, second = {*colliding}, {*colliding[::-1]}
    assert list(first) != list(second)
    assert encode(first, "v") == encode(second, "v")


def test_numbers_beyond_what_a_double_holds_are_tagged_so_that_any_json_reader_is_exact() -> None:
    assert json.loads(encode([2**53, 2**53 + 1], "v")) == [2**53, {"int": hex(2**53 + 1)}]
    assert json.loads(encode(-math.inf, "v")) == {"float": "fff0000000000000"}


class Colour(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    HIGH = 3


@dataclass
class Config:
    lr: float = 0.1


Point = namedtuple("Point", "x y")


class MyDict(dict[str, int]):
    pass


def looped() -> list[Any]:
    loop: list[Any] = []
    loop.append({"again": loop})
    return loop


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (Colour.RED, ".value"),
        (Level.HIGH, "enum"),
        (Config(), "asdict"),
        (Point(1, 2), "namedtuple"),
        (MyDict(), "subclass of dict"),
        (np.str_("x"), "subclass of str"),
        (lambda x: x, "code"),
        (Config, "code"),
        (len, "code"),
        (math, "nothing that can be saved"),
        (np.longdouble(1), "nothing that can be saved"),
        (np.random.default_rng(0), "bit_generator.state"),
        (defaultdict(lambda: 0), "factory"),
        (datetime(2020, 1, 1, tzinfo=ZoneInfo("UTC")), "time zone"),
        (datetime(2020, 1, 1, tzinfo=timezone(timedelta(0), "home")), "time zone"),
        (object(), "nothing that can be saved"),
        (looped(), "contains itself"),
        (nested(MAX_DEPTH + 1), "deep"),
    ],
    ids=lambda v: v if isinstance(v, str) else type(v).__name__,  # an address would differ from process to process
)
def test_what_cannot_be_written_exactly_is_refused_with_its_path_and_a_remedy(value: Any, says: str) -> None:
    """J6"""
    with pytest.raises(UnsupportedValue, match=says) as refused:
        encode({"a": [0, value]}, "settings")
    assert refused.value.path.startswith("settings.a[1]")
    assert refused.value.path in str(refused.value)


def test_the_same_object_twice_is_not_a_loop() -> None:
    shared = [1]
    assert decode(encode([shared, {"x": shared}], "v")) == [[1], {"x": [1]}]


def test_nesting_is_accepted_to_the_same_depth_by_both_directions() -> None:
    deepest = nested(MAX_DEPTH - 1)
    for leaf in (complex(1, 2), range(3), (1, 2), {1: (1,)} if MAX_DEPTH < 3 else {1}):
        value = [leaf]
        for _ in range(MAX_DEPTH - 2):
            value = [value]
        assert decode(encode(value, "v")) == value
    assert decode(encode([deepest], "v")) == [deepest]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[1, 2",
        b"1e999",
        b"{}",
        b'{"tuple": [], "list": []}',
        b'{"import": "os"}',
        b'{"tuple": 3}',
        b'{"dict": [[1]]}',
        b'{"dict": [[[], 1]]}',
        b'{"dict": [["a", 1], ["a", 2]]}',
        b'{"dict": [[1, 1], [true, 2]]}',
        b'{"set": [1, 1]}',
        b'{"int": "12"}',
        b'{"int": "0xzz"}',
        b'{"float": "3ff0000000000000"}',
        b'{"float": 3}',
        b'{"bytes": "zz"}',
        b'{"str": "ff"}',
        b'{"deque": [1, [1, 2]]}',
        b'{"range": [1, 2, 0]}',
        b'{"range": [1]}',
        b'{"default": ["os.system", []]}',
        b'{"path": ["path", 3]}',
        b'{"path": ["UNC", "x"]}',
        b'{"numpy": ["<f4", "00"]}',
        b'{"numpy": ["O", "0000000000000000"]}',
        b'{"numpy": ["V8", "0000000000000000"]}',
        b'{"numpy": [["a"], "00"]}',
        b'{"datetime": [2020, 13, 1, 0, 0, 0, 0, 0, null]}',
        b'{"datetime": [2020, 1, 1, 0, 0, 0, 0, 0, 99999999999999]}',
        b'{"date": [2020, 1, "1"]}',
        b'{"timedelta": [99999999999, 0, 0]}',
        b'{"torch": ["class", "Tensor"]}',
        b'{"ref": 3}',
        b"9007199254740993",
        b'"\\ud800"',
        b"[" * 20_000,
        b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1),
    ],
    ids=lambda d: d[:40].decode(),
)
def test_nonsense_is_a_value_error_and_nothing_else(data: bytes) -> None:
    with pytest.raises(ValueError):
        decode(data)


@settings(max_examples=200, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(TAGS) | st.text(max_size=2), inner, max_size=2)
        ),
        max_leaves=6,
    )
)
def test_any_json_at_all_decodes_or_is_a_value_error(tree: Any) -> None:
    with contextlib.suppress(ValueError):
        decode(json.dumps(tree).encode())


def test_every_tag_that_can_be_read_is_explained_in_the_page_of_tags() -> None:
    assert values.__doc__ is not None
    for tag in TAGS:
        assert tag in values.__doc__


def test_what_one_process_accepted_another_one_reads() -> None:
    """J6"""
    state = {"np": np.float32(2.5), "path": Path("a/b"), "cut": slice(1, None, 2), "big": 2**80, "raw": b"\1", "s": {1}}
    code = "import sys; from ckpt.format.values import decode; print(decode(sys.stdin.buffer.read()))"
    ran = subprocess.run([sys.executable, "-c", code], input=encode(state, "v"), capture_output=True, check=True)
    assert ran.stdout.decode().strip() == repr(state)


def test_flat_shows_one_line_per_value_and_leaves_tensors_out() -> None:
    tree = {
        "groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": ("a", "b")}],
        "w": Ref("x.w"),
        3: {},
        "n": [[1], Ref("y")],
    }
    assert flat(tree, "opt") == {
        "opt.groups[0].lr": 0.1,
        "opt.groups[0].betas": (0.9, 0.99),
        "opt.groups[0].params": ("a", "b"),
        "opt[3]": {},
        "opt.n[0]": [1],
    }
    assert flat(3, "step") == {"step": 3}


def test_a_date_is_not_a_datetime() -> None:
    assert type(decode(encode(date(2020, 1, 1), "v"))) is date
