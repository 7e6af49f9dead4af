"""Restored values as people and JSON readers see them. By themselves: they need numpy, and `ckpt list` does not."""

from __future__ import annotations

import math
from typing import Any

from ckpt.cli.screen import printable
from ckpt.format.values import TorchName
from ckpt.format.values_kinds import EXACT


def jsonable(value: Any) -> Any:
    """A restored value as JSON says it. What JSON has no word for (bytes, sets, NaN, integers that readers would round)
    becomes its Python text."""
    match value:
        case None | bool():
            return value
        case int():
            return value if abs(value) <= EXACT else value_text(value)
        case float():
            return value if math.isfinite(value) else str(value)
        case str():
            return value if _encodes(value) else ascii(value)
        case list() | tuple():
            return [jsonable(item) for item in value]
        case dict() if all(isinstance(key, str) and _encodes(key) for key in value):
            return {key: jsonable(item) for key, item in value.items()}
        case _:
            return printable(value_text(value))


def value_text(value: Any) -> str:
    """A restored value as Python would write it."""
    if isinstance(value, TorchName):
        return value.text
    try:
        return repr(value)
    except ValueError:  # an integer of more than 4300 digits, which Python does not write in decimal
        return hex(value) if isinstance(value, int) else f"a {type(value).__name__} with an integer too large to write"


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
