"""Stored elements as numbers: torch says what every code of every dtype means."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ckpt.format.shards import DTYPES
from recovery.numbers import differences, differing, values


def codes(dtype: str) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Every code of a small dtype, random ones of a large one."""
    size = DTYPES[dtype].size
    if size == 1:
        return np.arange(2 if dtype == "bool" else 256, dtype=np.uint8)
    if size == 2:
        return np.arange(65536, dtype=np.uint16).view(np.uint8)
    return np.frombuffer(np.random.default_rng(0).bytes(4096 * size), np.uint8)


@pytest.mark.parametrize("dtype", sorted(DTYPES.keys() - {"float4_e2m1fn_x2", "complex32"}))
def test_every_dtype_means_what_torch_says(dtype: str) -> None:
    raw = codes(dtype)
    live = torch.from_numpy(raw.copy()).view(getattr(torch, dtype))
    expected = torch.view_as_real(live).double().reshape(-1) if live.is_complex() else live.double()
    assert np.array_equal(values(dtype, raw), expected.numpy(), equal_nan=True)


def test_four_bit_floats_come_in_pairs_the_lower_half_first() -> None:
    assert values("float4_e2m1fn_x2", np.array([0x7A], np.uint8)).tolist() == [-1.0, 6.0]


def test_complex_halves_are_pairs_of_halves() -> None:
    raw = np.array([1.5, -2.0], np.float16).view(np.uint8)
    assert values("complex32", raw).tolist() == [1.5, -2.0]


@pytest.mark.parametrize("dtype", ["int64", "uint64", "int8"])
def test_integers_differ_by_what_they_differ_by(dtype: str) -> None:
    """Also where float64 could not tell them apart, and from one end of the range to the other."""
    info = np.iinfo(dtype)
    old = np.array([info.max, info.min, 5], dtype)
    new = np.array([info.max - 1, info.max, 3], dtype)
    found = differences(dtype, old.view(np.uint8), new.view(np.uint8))
    assert found.tolist() == [1.0, float(int(info.max) - int(info.min)), 2.0]


def test_bits_decide_what_differs() -> None:
    """I3: NaN payloads and the sign of zero."""
    old = np.array([0.0, np.nan, 1.0], np.float32)
    new = old.copy()
    new[0] = -0.0
    new.view(np.uint32)[1] ^= 1
    assert differing("float32", old.view(np.uint8), new.view(np.uint8)).tolist() == [True, True, False]
    wide = np.array([1 + 0j, 0j])
    other = wide.copy()
    other.view(np.float64)[3] = -0.0
    assert differing("complex128", wide.view(np.uint8), other.view(np.uint8)).tolist() == [False, True]
