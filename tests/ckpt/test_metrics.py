from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from ckpt.metrics import plain_metrics


def test_numbers_of_every_kind_become_plain_json() -> None:
    found = plain_metrics(
        {
            "a": 1,
            "b": 0.5,
            "c": torch.tensor(2.5),
            "d": np.float32(1.5),
            "e": np.int64(7),
            "f": True,
            "g": "text",
            "h": None,
        }
    )
    assert found == {"a": 1, "b": 0.5, "c": 2.5, "d": 1.5, "e": 7, "f": True, "g": "text", "h": None}
    assert json.loads(json.dumps(found)) == found


def test_what_json_would_change_becomes_text() -> None:
    assert plain_metrics({"a": float("nan"), "b": float("-inf"), "c": 2**80}) == {
        "a": "nan",
        "b": "-inf",
        "c": str(2**80),
    }


@pytest.mark.parametrize("value", [object(), [1], torch.zeros(2), 1j])
def test_anything_else_is_refused_by_name(value: object) -> None:
    with pytest.raises(TypeError, match="loss"):
        plain_metrics({"loss": value})
