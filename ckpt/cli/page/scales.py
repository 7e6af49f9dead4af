"""From values to places on a picture: ticks, bins, and numbers as people write them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from ckpt.cli.screen import bytes_text

WIDE, HALF, NARROW = 1040.0, 506.0, 352.0
"""Every picture is drawn twice: for a desk (there, perhaps two side by side), and for a phone held upright, where
letters must not shrink with it."""


@dataclass(frozen=True, slots=True)
class Scale:
    """A linear map of values ``low … high`` to places ``start … stop``."""

    low: float
    high: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        span = self.high - self.low
        share = 0.5 if span <= 0 else (value - self.low) / span
        return self.start + (self.stop - self.start) * min(max(share, 0.0), 1.0)


def ticks(low: float, high: float, count: int, *, whole: bool = False) -> list[float]:
    """About `count` round numbers from `low` to `high`; `whole`: no fractions."""
    if not (math.isfinite(low) and math.isfinite(high)) or high <= low:
        return [low]
    raw = (high - low) / max(count, 1)
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * m for m in (1, 2, 5, 10) if unit * m >= raw * 0.8)
    if whole:
        step = max(step, 1.0)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [n * step for n in range(first, last + 1)] or [low]


def bins(count: int, limit: int) -> list[tuple[int, int]]:
    """``[start, stop)`` of at most `limit` runs of neighbours that cover ``range(count)``, as even as can be."""
    n = min(count, limit)
    return [(i * count // n, (i + 1) * count // n) for i in range(n)]


def typical_top(values: Sequence[float]) -> float:
    """Where an axis from zero should end: at the largest value; or, where a few tower above the rest (a first save
    among deltas), somewhat above the rest. 0 if there is nothing."""
    ordered = sorted(values)
    if not ordered:
        return 0.0
    usual = ordered[int(0.9 * (len(ordered) - 1))]
    return ordered[-1] if ordered[-1] <= 3 * usual or usual <= 0 else usual * 1.5


def bytes_tick(value: float) -> str:
    return "0" if value <= 0 else bytes_text(value).replace(".0 ", " ")


def number_text(value: float) -> str:
    """Four digits; a metric may be anything."""
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 and value == round(value) else f"{value:.4g}"


def percent_text(share: float | None) -> str:
    """Never "0 %" for something, nor "100 %" for less than all."""
    if share is None:
        return "-"
    percent = 100 * share
    if 0 < percent < 0.5:
        return "<1 %"
    if 99.5 <= percent < 100:
        return ">99 %"
    return f"{percent:.0f} %"


def when_text(seconds: float | None) -> str:
    """POSIX seconds as a date and a time of day, in UTC."""
    try:
        return "unknown" if seconds is None else f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M} UTC"
    except (OverflowError, OSError, ValueError):  # a store may say anything
        return "unknown"


Write = Callable[[float], str]
