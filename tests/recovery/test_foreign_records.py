"""The stack machine with the calls left out: data come back, calls are noted down, nonsense is refused."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import pytest
import torch

from recovery.foreign import Refused
from recovery.foreign_records import Made, read_record


@dataclass
class Point:
    x: int
    y: tuple[str, ...]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize(
    "value",
    [
        {"a": [1, 2, 300, 70_000, -1, 2**40, -(2**70)], "b": (1.5, None, True, False, ()), "c": {1: {2: "é" * 300}}},
        [(1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), [], {}],
    ],
)
def test_plain_data_come_back(protocol: int, value: Any) -> None:
    assert read_record(pickle.dumps(value, protocol)) == value


def test_bytes_and_sets_come_back() -> None:
    value = {"b": b"x" * 300, "s": {1, 2}, "shared": [[1]] * 2}
    assert read_record(pickle.dumps(value, 4)) == value


@pytest.mark.parametrize("protocol", [2, 4])
def test_objects_are_noted_down(protocol: int) -> None:
    made = read_record(pickle.dumps({"p": Point(3, ("a",)), "s": torch.Size([2, 3])}, protocol))
    assert isinstance(made["p"], Made)
    assert made["p"].name.endswith(".Point")
    assert (made["p"]["x"], made["p"].get("y"), made["p"].get("z")) == (3, ("a",), None)
    assert (made["s"].name, made["s"].args) == ("torch.Size", ((2, 3),))
    dtype = read_record(pickle.dumps(torch.bfloat16, protocol))
    assert (dtype.name, dtype.args) == ("torch.bfloat16", None)


def test_calls_are_not_made() -> None:
    class Loud:
        def __reduce__(self) -> tuple[object, ...]:
            return print, ("heard",)

    made = read_record(pickle.dumps([Loud(), PurePosixPath("a/b")], 4))
    assert (made[0].name, made[0].args) == ("builtins.print", ("heard",))
    assert made[1].name == "pathlib.PurePosixPath"


def test_nonsense_is_refused() -> None:
    whole = pickle.dumps({"a": [Point(1, ("x",)), 2]}, 4)
    for stop in range(len(whole)):
        with pytest.raises(Refused):
            read_record(whole[:stop])
    for data in (
        b"",
        b".",
        b"K\x01K\x02.",
        b"\x85.",
        b"u.",
        b"h\x00.",
        b"}]K\x01s.",
        b"K\x01K\x02R.",
        b"\xff",
        b"Pxx\n.",
    ):
        with pytest.raises(Refused):
            read_record(data)
    with pytest.raises(Refused):  # items of a class that has such a method are not plain data
        read_record(pickle.dumps(OrderedDict(a=1), 4))
