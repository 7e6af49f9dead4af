"""Metrics as documents hold them: plain JSON numbers and text, whatever the training loop hands in."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_LIMIT = 2**53


def plain_metrics(metrics: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Numbers (0-dim tensors and numpy scalars too), bools, text and None → JSON values. Non-finite floats and
    integers beyond 2**53 become text, since JSON readers would change them.

    Raises:
        TypeError: a metric is none of these; the message names it.
    """
    if metrics is None:
        return None
    return {str(name): _plain(name, value) for name, value in metrics.items()}


def _plain(name: str, value: Any) -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    if not isinstance(value, int | float) and callable(item := getattr(value, "item", None)):
        try:
            value = item()
        except (ValueError, RuntimeError) as error:
            raise TypeError(f"metric {name!r}: {error}; expected a number or a 0-dim tensor") from error
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value) if abs(value) <= _LIMIT else str(int(value))
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    raise TypeError(f"metric {name!r} is of type {type(value).__name__}; expected a number, a bool or text")
