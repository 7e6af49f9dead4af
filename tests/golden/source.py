"""What the golden store holds, as plain arrays and values: made here, from fixed seeds, and told apart from any store.

`expectation` is what v1-expected.json says: digests by sha256 and values spelled out, from the source arrays alone.
"""

from __future__ import annotations

import hashlib
import pathlib
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta, timezone
from itertools import pairwise
from typing import Any

import numpy as np

from ckpt.format.shards import DTYPES, Box, whole
from ckpt.format.values import Ref, TorchName

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Tensor:
    """A whole leaf: its bytes are row-major and little-endian."""

    cls: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def cut(self, box: Box) -> bytes:
        """The row-major bytes of a box of it."""
        elements = np.frombuffer(self.data, f"V{DTYPES[self.dtype].size}").reshape(self.shape)
        return elements[tuple(slice(a, a + n) for a, n in zip(box.offsets, box.lengths, strict=True))].tobytes()


@dataclass(frozen=True)
class State:
    """What all ranks save together. `per_rank` and `values` have one entry per rank. `boxes`: leaf → the boxes of each
    rank, where they are not even rows."""

    leaves: Mapping[str, Tensor]
    per_rank: tuple[Mapping[str, Tensor], ...]
    values: tuple[Mapping[str, Any], ...]
    aliases: Mapping[str, str] = field(default_factory=dict)
    boxes: Mapping[str, tuple[tuple[Box, ...], ...]] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return len(self.values)

    def of_rank(self, path: str, rank: int) -> tuple[Box, ...]:
        return self.boxes[path][rank] if path in self.boxes else rows(self.leaves[path].shape, self.ranks)[rank]


def rows(shape: tuple[int, ...], ranks: int) -> list[tuple[Box, ...]]:
    """Even rows, as FSDP deals them out: the last ranks may have an empty box. Scalars go to rank 0."""
    if not shape:
        return [(whole(shape),)] + [()] * (ranks - 1)
    each = -(-shape[0] // ranks)
    edges = [min(rank * each, shape[0]) for rank in range(ranks + 1)]
    return [(Box((a, *[0] * (len(shape) - 1)), (b - a, *shape[1:])),) for a, b in pairwise(edges)]


def tensor(array: Array, cls: str = "parameter", dtype: str | None = None) -> Tensor:
    return Tensor(cls, dtype or array.dtype.name, array.shape, array.tobytes())


# -- what is expected --------------------------------------------------------------------------------------------------


def expectation(state: State) -> dict[str, Any]:
    return {
        "leaves": {path: describe(leaf) for path, leaf in sorted(state.leaves.items())},
        "per_rank": [{path: describe(leaf) for path, leaf in sorted(own.items())} for own in state.per_rank],
        "values": [{name: spell(value) for name, value in sorted(own.items())} for own in state.values],
        "aliases": dict(sorted(state.aliases.items())),
    }


def describe(leaf: Any) -> list[Any]:
    """`leaf` may be either reader's, too: anything with these four."""
    return [leaf.cls, leaf.dtype, list(leaf.shape), hashlib.sha256(leaf.data).hexdigest()[:32]]


def spell(value: Any) -> str:
    """A text that two values share if they are the same to the last bit and type. Knows either reader's stand-ins."""
    name = type(value).__name__
    match value:
        case float():
            return f"float {struct.pack('>d', value).hex()}"
        case complex():
            return f"complex({spell(value.real)}, {spell(value.imag)})"
        case None | bool() | int() | str() | slice() | range() | date() | timedelta():
            return f"{name} {value!a}"
        case bytes() | bytearray():
            return f"{name} {value.hex()}"
        case np.generic():
            return f"numpy {value.dtype.newbyteorder('<').str} {value.tobytes().hex()}"
        case pathlib.PurePath():
            return f"{name} {str(value)!a}"
        case defaultdict():
            return f"{name}[{getattr(value.default_factory, '__name__', None)}]{spell_pairs(value)}"
        case dict():
            return f"{name}{spell_pairs(value)}"
        case set() | frozenset():
            return f"{name}{sorted(map(spell, value))}"
        case deque():
            return f"{name}[{value.maxlen}]{[spell(item) for item in value]}"
        case list() | tuple():
            return f"{name}{[spell(item) for item in value]}"
        case _ if value is ...:
            return "ellipsis"
        case _ if hasattr(value, "kind") and hasattr(value, "text"):
            return f"torch {value.kind} {value.text}"
        case _ if hasattr(value, "path"):
            return f"leaf {value.path}"
        case _:
            raise TypeError(f"{value!r} has no spelling")


def spell_pairs(value: Mapping[Any, Any]) -> list[str]:
    return [f"{spell(key)}: {spell(item)}" for key, item in value.items()]


# -- run A: a small training, written as the writer likes --------------------------------------------------------------


def training() -> list[State]:
    """Three steps of three ranks: a matrix in which all moves, one in which little does, one that stays."""
    rng = np.random.default_rng(1)
    moving = rng.standard_normal((16, 64), np.float32)
    seldom = rng.integers(0, 9, (16, 64)).astype(np.int32)
    still = tensor(np.sqrt(np.arange(2048, dtype=np.float16)).reshape(32, 64), "buffer")
    bias = rng.standard_normal(17, np.float32)
    states = []
    for step in (10, 20, 30):
        leaves = {
            "model.moving": tensor(moving),
            "model.seldom": tensor(seldom, "slot:momentum"),
            "model.still": still,
            "model.bias": tensor(bias),
            "model.scale": tensor(np.array(step, np.float64), "buffer"),
        }
        noise = [rng.integers(0, 256, 24, np.uint8) for _ in range(3)]
        states.append(
            State(
                leaves,
                tuple({"noise": tensor(own, "tensor")} for own in noise),
                tuple({"steps": {"done": step, "rank": rank}} for rank in range(3)),
                {"model.head": "model.moving"},
            )
        )
        moving = moving + rng.standard_normal(moving.shape, np.float32) * np.float32(1e-5)
        seldom = seldom.copy()
        seldom.reshape(-1)[rng.integers(0, seldom.size, 8)] += 1
        bias = bias + 1
    return states


# -- run B: one of everything ------------------------------------------------------------------------------------------

FORMS = {8: (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64), 4: (1, 2, 4, 8, 16, 24, 32), 2: (1, 2, 4, 8, 16), 1: (1, 2, 4, 8)}
"""Word → the forms that sparse values of such words can have."""

CHUNK = 4096


def everything() -> list[State]:
    """Two steps of three ranks; in the second, every leaf is changed in the way that its codec kind is for."""
    rng = np.random.default_rng(2)
    arrays: dict[str, Tensor] = {
        "forms.int64": tensor(np.full(11 * 512, -(10**9)), "slot:count"),
        "forms.float32": tensor(np.full(7 * 1024, 1.5, np.float32)),
        "forms.bfloat16": tensor(np.full(5 * 2048, 0x3F80, np.uint16), "slot:exp_avg", "bfloat16"),
        "forms.uint8": tensor(np.full(4 * 4096, 250, np.uint8), "buffer"),
        "far": tensor(np.arange(-1050.0, 1050.0).reshape(3, 700), "array"),
        "bits": tensor(np.arange(40 * 3 * 17, dtype=np.int32).reshape(40, 3, 17), "array"),
        "noise": tensor(rng.standard_normal(1100, np.float32)),
        "deep": tensor(np.arange(2400, dtype=np.float32).reshape(2, 6, 200)),
        "columns": tensor(np.arange(64 * 40, dtype=np.float16).reshape(64, 40)),
        "narrow": tensor(np.zeros((2, 600), np.float32)),
        "nothing": tensor(np.zeros((0, 7), np.float32)),
        "hollow": tensor(np.zeros((4, 0), np.int16), "tensor"),
    }
    for dtype, kind in DTYPES.items():  # each on one rank; the others have no bundle of it
        arrays[f"odd.{dtype}"] = Tensor("tensor", dtype, (5, 3), odd(rng, dtype, 15 * kind.size))
    for dtype in ("float64", "bfloat16", "int64", "bool", "complex64", "float8_e4m3fn"):
        arrays[f"scalar.{dtype}"] = Tensor("buffer", dtype, (), odd(rng, dtype, DTYPES[dtype].size))
    states = []
    for step in range(2):
        big = [np.arange(1030, dtype=np.float32) * (rank + 1) + step for rank in range(3)]
        per_rank = [{"mine.big": tensor(own, "tensor"), "mine.count": tensor(own[:3], "buffer")} for own in big]
        for rank in (0, 2):  # not declared by rank 1, and of another shape on each
            per_rank[rank]["mine.ragged"] = tensor(np.full((rank + 1, 2), step, np.int16), "tensor")
        values = [{"$random": {"rank": rank, "step": step}} | (VALUES if rank == step else {}) for rank in range(3)]
        states.append(State(dict(arrays), tuple(per_rank), tuple(values), {"tied": "noise"}, BOXES))
        arrays = {path: changed(rng, path, leaf) for path, leaf in arrays.items()}
    return states


BOXES = {
    **{
        f"odd.{dtype}": tuple((whole((5, 3)),) * (n % 3 == rank) for rank in range(3)) for n, dtype in enumerate(DTYPES)
    },
    "columns": (
        (Box((0, 0), (20, 40)),),
        (Box((20, 0), (44, 13)),),
        (Box((20, 13), (30, 27)), Box((50, 13), (14, 27))),
    ),
}


def odd(rng: np.random.Generator, dtype: str, length: int) -> bytes:
    """Any bytes, NaNs and denormals among them; but no bool that is neither."""
    return rng.integers(0, 2 if dtype == "bool" else 256, length, np.uint8).tobytes()


def changed(rng: np.random.Generator, path: str, leaf: Tensor) -> Tensor:
    """The leaf a step later."""
    word = DTYPES[leaf.dtype].word
    words = np.frombuffer(leaf.data, f"<u{word}").copy()
    match path.split("."):
        case ["forms", dtype]:
            for cell, form in zip(words.reshape(-1, CHUNK // word), FORMS[word], strict=True):
                spread(cell, form, floats=dtype.startswith(("float", "bfloat")))
        case ["far"]:
            words += np.arange(len(words), dtype="<u8") // 50 * 2**30 + 1
        case ["bits"]:
            words ^= 1 << np.arange(len(words), dtype="<u4") // 9 % 31
        case ["noise"]:
            words[::-1100] ^= 0xDEADBEEF
        case ["odd", "bool"]:
            words ^= 1
        case ["odd" | "scalar", dtype] if dtype != "bool":
            words = np.frombuffer(odd(rng, dtype, len(leaf.data)), f"<u{word}")
        case ["columns"]:
            words[::7] += 3
        case ["deep"]:
            words[100:300] += 2
    return Tensor(leaf.cls, leaf.dtype, leaf.shape, words.tobytes())


def spread(cell: Array, form: int, *, floats: bool) -> None:
    """Change words so that their steps need `form` bits: most go one up, the first as far as the form reaches."""
    at = np.array(
        [3, 4, len(cell) // 4 + 3, len(cell) // 2 + 4, len(cell) - 1]
    )  # gaps of 0, and of 255 where it is long
    cell[at] += 1
    if floats and form == 8 * cell.dtype.itemsize:
        cell[0] ^= 1 << form - 1  # from one sign to the other is the longest way
    else:
        cell[:1] += cell.dtype.type(1 << form - 1)


VALUES: dict[str, Any] = {
    "plain": [None, True, False, 0, -1, 2**53, -(2**53), 1.0, -0.0, 1e300, 5e-324, 0.1, "", "text", "é✓😀", [], {}],
    "beyond": [2**53 + 1, -(2**53) - 1, 1 << 200, -(1 << 200)],
    "floats": [float("inf"), float("-inf"), struct.unpack(">d", bytes.fromhex("7ff8000000000001"))[0]],
    "complex": [1 + 2j, complex(float("inf"), -0.0)],
    "texts": ["lone \ud800 surrogate", {"\udfff": 1}, '"\\\n\x00'],
    "bytes": [b"", b"\x00\xff", bytearray(b"ab")],
    "containers": [
        (), (1, ("two",)), set(), {1, "one", (1,)}, frozenset({b"x", 2.5}),
        {"b": 1, "a": 2, 3: 4, None: 5, (6,): 7}, OrderedDict([("z", 1), ("y", [2])]), Counter({"a": 3, "b": -1}),
        deque([1, 2]), deque([3], 5), deque(maxlen=0),
    ],
    "defaults": [defaultdict(kind, {"k": 1}) for kind in (None, bool, int, float, str, list, dict, set, tuple)],
    "ranges": [slice(None, 3, -1), slice("a", 2.5, None), range(1, 10, 3), range(1 << 60, 1 << 61), ...],
    "paths": [pathlib.Path("a/b"), pathlib.PurePosixPath("/c"), pathlib.PureWindowsPath("C:/"), pathlib.Path("\udc80")],
    "numpy": [
        np.float32(1.5), np.float16(-0.0), np.float64("nan"), np.int8(-1), np.uint64(2**64 - 1), np.bool_(True),
        np.complex64(1 - 1j), np.complex128(2j), np.datetime64("2024-02-29", "D"), np.timedelta64(5, "ns"),
        np.datetime64("NaT"),
    ],
    "times": [
        date(1, 1, 1), datetime(2024, 2, 29, 23, 59, 59, 999999), datetime(2024, 10, 27, 2, 30, fold=1),
        datetime(1, 1, 1, tzinfo=UTC), datetime(2025, 1, 1, tzinfo=timezone(-timedelta(minutes=330, microseconds=1))),
        timedelta(-1, 2, 3),
    ],
    "torch": [
        TorchName("dtype", "bfloat16"), TorchName("device", "cuda:0"), TorchName("size", "2,3"),
        TorchName("layout", "strided"), TorchName("memory_format", "channels_last"),
    ],
    "tree": {"here": Ref("far"), "tied": Ref("tied"), "list": [1, Ref("bits")]},
}  # fmt: skip


def fewer_ranks(state: State) -> State:
    """The same leaves on two ranks, which share out what the middle one of three had: its chunks are cut in two."""
    boxes = {}
    for path in state.leaves:
        first, middle, last = (state.of_rank(path, rank) for rank in range(3))
        halves = [halved(box) for box in middle]
        boxes[path] = (first + tuple(a for a, _ in halves), tuple(b for _, b in halves) + last)
    return State(state.leaves, state.per_rank[:2], ({"epoch": 3}, {}), state.aliases, boxes)


def halved(box: Box) -> tuple[Box, Box]:
    """Cut across the last dimension, where the parts are not runs of the whole's bytes."""
    *offsets, offset = box.offsets
    *lengths, length = box.lengths
    half = length // 2
    return Box((*offsets, offset), (*lengths, half)), Box((*offsets, offset + half), (*lengths, length - half))
