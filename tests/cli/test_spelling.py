"""Any value that can be restored can be said, in text and in JSON."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from ckpt.cli.screen import print_json
from ckpt.cli.spelling import jsonable
from ckpt.format.values import TorchName


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, None),
        (True, True),
        (2**53, 2**53),
        (2**53 + 1, str(2**53 + 1)),
        (-(2**80), str(-(2**80))),
        (0.1, 0.1),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
        ("ü层", "ü层"),
        ("\ud800", r"'\ud800'"),
        ((1, [2.5, math.inf]), [1, [2.5, "inf"]]),
        ({"a": 1, "b": {"c": b"x"}}, {"a": 1, "b": {"c": "b'x'"}}),
        ({1: "one"}, "{1: 'one'}"),
        (np.float32(0.5), "np.float32(0.5)"),
        (TorchName("dtype", "torch.float16"), "torch.float16"),
        ({3}, "{3}"),
    ],
)
def test_any_value_can_be_said_in_json(value: object, said: object, capsys: pytest.CaptureFixture[str]) -> None:
    """J6"""
    print_json(jsonable(value))
    assert json.loads(capsys.readouterr().out) == said


def test_integers_too_large_for_decimal_are_still_said() -> None:
    assert jsonable(1 << 20_000) == hex(1 << 20_000)
    assert jsonable({1 << 20_000}) == "a set with an integer too large to write"
