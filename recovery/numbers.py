"""Stored elements as numbers, for people who ask how much a leaf has moved. numpy only; nothing here is ever stored.

numpy has no bfloat16 and no eight-bit floats: the first is the upper half of a float32, the others have 256 values, so
a table says what each byte means.
"""

from __future__ import annotations

from functools import cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ckpt.format.shards import DTYPES
from recovery.boxes import Bytes

Floats: TypeAlias = NDArray[np.float64]

_WORDS: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

_EIGHT_BITS = {
    # name: (exponent bits, mantissa bits, bias, what the topmost codes are)
    "float8_e4m3fn": (4, 3, 7, "fn"),
    "float8_e4m3fnuz": (4, 3, 8, "uz"),
    "float8_e5m2": (5, 2, 15, "ieee"),
    "float8_e5m2fnuz": (5, 2, 16, "uz"),
}


def differing(dtype: str, old: Bytes, new: Bytes) -> NDArray[np.bool_]:
    """Which elements have other bits: NaN payloads and the sign of zero count, as everywhere here."""
    size = DTYPES[dtype].size
    if size == 16:
        pairs = old.view(np.uint64) != new.view(np.uint64)
        either: NDArray[np.bool_] = pairs.reshape(-1, 2).any(axis=1)
        return either
    word = _WORDS[size]
    found: NDArray[np.bool_] = old.view(word) != new.view(word)
    return found


def values(dtype: str, data: Bytes) -> Floats:
    """Every element as float64; a complex one as two, a byte that packs two four-bit floats too."""
    kind = DTYPES[dtype]
    match dtype:
        case "bfloat16":
            return _wide((data.view(np.uint16).astype(np.uint32) << 16).view(np.float32))
        case "float8_e8m0fnu":
            return _exponents()[data]
        case "float4_e2m1fn_x2":
            return _four_bits()[np.stack([data & 15, data >> 4], axis=1).ravel()]
        case _ if dtype in _EIGHT_BITS:
            return _eight_bits(dtype)[data]
        case _ if kind.kind == "complex":
            return _wide(data.view(f"<f{kind.word}"))
        case "bool":
            return _wide(data)
        case _:
            return _wide(data.view(np.dtype(dtype)))


def differences(dtype: str, old: Bytes, new: Bytes) -> Floats:
    """Magnitudes of new - old, as `values`. Integers are subtracted as integers: float64 would lose the difference of
    two large ones."""
    if DTYPES[dtype].kind in ("int", "uint") and dtype != "float8_e8m0fnu":
        a, b = old.view(np.dtype(dtype)), new.view(np.dtype(dtype))
        word = _WORDS[DTYPES[dtype].size]
        x, y = old.view(word), new.view(word)
        return _wide(np.where(b >= a, y - x, x - y))  # wraps to the true distance, whatever the sign
    # inf - inf and overflow are answers here, not faults.
    with np.errstate(invalid="ignore", over="ignore"):
        return np.abs(values(dtype, new) - values(dtype, old))


def _wide(array: NDArray[Any]) -> Floats:
    with np.errstate(invalid="ignore"):  # a signalling NaN is a NaN
        return array.astype(np.float64)


@cache
def _eight_bits(dtype: str) -> Floats:
    exponent_bits, mantissa_bits, bias, top = _EIGHT_BITS[dtype]
    code = np.arange(256)
    sign = np.where(code & 128, -1.0, 1.0)
    exponent, mantissa = (code & 127) >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
    fraction = mantissa / (1 << mantissa_bits)
    table = sign * np.where(exponent > 0, np.ldexp(1 + fraction, exponent - bias), np.ldexp(fraction, 1 - bias))
    match top:
        case "fn":  # no infinities; all ones is NaN
            table[(code & 127) == 127] = np.nan
        case "uz":  # no infinities, no -0: that code is the only NaN
            table[128] = np.nan
        case _:
            special = exponent == (1 << exponent_bits) - 1
            table[special & (mantissa == 0)] *= np.inf
            table[special & (mantissa != 0)] = np.nan
    return table


@cache
def _exponents() -> Floats:
    table = np.ldexp(1.0, np.arange(256) - 127)
    table[255] = np.nan
    return table


@cache
def _four_bits() -> Floats:
    half = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    return np.concatenate([half, -half])
