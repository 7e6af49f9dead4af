"""Arithmetic on words (its laws, with the codec's, are in tests/properties/test_codec_laws.py)."""

from __future__ import annotations

import numpy as np
import pytest

from ckpt.format.words import (
    SAMPLE_BLOCKS,
    SAMPLE_WORDS,
    difference,
    entropies,
    histograms,
    merge,
    ordered,
    restored,
    sample,
    split,
    words_of,
)


def test_neighbouring_floats_are_neighbouring_integers_across_zero_too() -> None:
    x = np.array([-2.0, -1.0, -1e-45, -0.0, 0.0, 1e-45, 1.0, 2.0], dtype=np.float32)
    y = np.empty(len(x), dtype="<u4")
    ordered(x.view("<u4"), y)
    assert y.view("<i4").tolist()[2:6] == [-2, -1, 0, 1]
    assert (np.diff(y.view("<i4").astype(np.int64)) > 0).all()


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_zigzag_puts_small_differences_of_either_sign_first(width: int) -> None:
    base = np.full(5, 100, dtype=f"<u{width}")
    new = (base.astype(np.int64) + np.array([0, -1, 1, -2, 2])).astype(base.dtype)
    z, spare, back = np.empty_like(new), np.empty_like(new), np.empty_like(new)
    difference(new, base, floats=False, out=z, spare=spare)
    assert z.tolist() == [0, 1, 2, 3, 4]
    restored(z, base, floats=False, out=back, spare=spare)
    assert back.tolist() == new.tolist()


def test_differences_wrap_around() -> None:
    new, base = np.array([0, 0xFF, 0x80], dtype=np.uint8), np.array([0xFF, 0, 0x7F], dtype=np.uint8)
    z, spare, back = np.empty_like(new), np.empty_like(new), np.empty_like(new)
    difference(new, base, floats=False, out=z, spare=spare)
    assert z.tolist() == [2, 1, 2]
    restored(z, base, floats=False, out=back, spare=spare)
    assert back.tolist() == new.tolist()


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_planes_come_apart_and_together(width: int) -> None:
    words = np.random.default_rng(3).integers(0, 1 << 8 * width, 999, dtype=f"<u{width}", endpoint=False)
    planes = [np.empty(999, dtype=np.uint8) for _ in range(width)]
    for k, plane in enumerate(planes):
        split(words, k, plane, np.empty_like(words))
        assert plane.tolist() == words.view(np.uint8)[k::width].tolist()
    back = np.empty_like(words)
    merge(planes, back)
    assert back.tolist() == words.tolist()


def test_words_leave_out_what_is_no_whole_one() -> None:
    data = np.arange(11, dtype=np.uint8)
    assert words_of(data, 4).view(np.uint8).tolist() == list(range(8))
    assert len(words_of(data[:3], 4)) == 0


def test_a_sample_takes_all_of_a_small_chunk_and_even_runs_of_a_large_one() -> None:
    small = np.arange(1000, dtype="<u4")
    assert sample(small).tolist() == small.tolist()
    large = sample(np.arange(160_000, dtype="<u4")).reshape(SAMPLE_BLOCKS, SAMPLE_WORDS)
    assert large[:, 0].tolist() == list(range(0, 160_000, 10_000))
    assert (np.diff(large.astype(np.int64), axis=1) == 1).all()


def test_entropy_of_a_sample_comes_near_that_of_its_source() -> None:
    rng = np.random.default_rng(4)
    noise = rng.integers(0, 256, 1024).astype("<u2")
    few = rng.integers(0, 4, 1024).astype("<u2") << 8
    low, high = entropies(histograms(noise + few))
    assert low > 7.9
    assert abs(high - 2.0) < 0.03
    assert entropies(histograms(np.zeros(9, dtype="<u4"))).tolist() == [0.0] * 4
    assert entropies(histograms(np.zeros(0, dtype="<u4"))).tolist() == [0.0] * 4
