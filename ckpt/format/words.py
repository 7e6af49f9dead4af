"""Arithmetic on the words of a chunk: order, zigzag, byte planes, samples. Bit-exact on any bytes, NaN included.

A *word* is the unsigned little-endian integer of `DType.word` bytes that holds one number (one part of a complex
number). Every function writes into arrays it is given: fresh temporaries of chunk size cost half the speed
(FACTS.md §2), and each call runs over a whole chunk, so that numpy releases the GIL while it works.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Words: TypeAlias = NDArray[np.unsignedinteger[Any]]
Bytes: TypeAlias = NDArray[np.uint8]

UNSIGNED = {n: np.dtype(f"<u{n}") for n in (1, 2, 4, 8)}
SIGNED = {n: np.dtype(f"<i{n}") for n in (1, 2, 4, 8)}

SAMPLE_BLOCKS = 16
SAMPLE_WORDS = 64
"""A sample is 16 runs of 64 words, evenly spread: runs, because repeats and gaps show only in neighbours; many,
because changes often keep to some rows."""

NOISE = 7.6
"""A byte plane whose sampled entropy, in bits, is above this is stored raw untried: zstd would only burn time."""


def words_of(data: Bytes, word: int) -> Words:
    """The whole words of `data`; up to ``word - 1`` bytes at the end belong to none."""
    return data[: len(data) // word * word].view(UNSIGNED[word])


def ordered(x: Words, out: Words) -> None:
    """Sign and magnitude → two's complement, so that floats in numerical order become integers in order: neighbours
    differ by one, across zero too. Its own inverse.

    ``x ^ ((x >> bits - 1, arithmetic) >> 1, logical)``: the sign stays, the rest of a negative number is flipped.
    """
    width = x.dtype.itemsize
    np.right_shift(x.view(SIGNED[width]), 8 * width - 1, out=out.view(SIGNED[width]))
    np.right_shift(out, 1, out=out)
    np.bitwise_xor(x, out, out=out)


def difference(new: Words, base: Words, *, floats: bool, out: Words, spare: Words) -> None:
    """Fill `out` with zigzag(order(new) - order(base)), wrapping; `floats` says whether `ordered` is applied. `out` and
    `spare` are arrays of their own."""
    width = new.dtype.itemsize
    if floats:
        ordered(new, out)
        ordered(base, spare)
        np.subtract(out, spare, out=out)
    else:
        np.subtract(new, base, out=out)
    # zigzag: 0, -1, 1, -2, … → 0, 1, 2, 3, …, so that small differences of either sign have zero upper planes.
    np.right_shift(out.view(SIGNED[width]), 8 * width - 1, out=spare.view(SIGNED[width]))
    np.left_shift(out, 1, out=out)
    np.bitwise_xor(out, spare, out=out)


def restored(zigzag: Words, base: Words, *, floats: bool, out: Words, spare: Words) -> None:
    """The inverse of `difference`: fills `out`, which may be `base`; `zigzag` and `spare` are overwritten."""
    np.bitwise_and(zigzag, 1, out=spare)
    np.negative(spare, out=spare)
    np.right_shift(zigzag, 1, out=zigzag)
    np.bitwise_xor(zigzag, spare, out=zigzag)
    if not floats:
        np.add(zigzag, base, out=out)
        return
    ordered(base, spare)
    np.add(zigzag, spare, out=zigzag)
    ordered(zigzag, spare)
    np.copyto(out, spare)


def split(words: Words, k: int, out: Bytes, spare: Words) -> None:
    """Byte `k` (0 the least significant) of every word. Shift and narrowing cast, both vectorised: the strided copy
    ``u8[:, k]`` takes twice as long."""
    if k:
        np.right_shift(words, 8 * k, out=spare)
        np.copyto(out, spare, casting="unsafe")
    else:
        np.copyto(out, words, casting="unsafe")


def merge(planes: list[Bytes], out: Words) -> None:
    """Words from their byte planes, least significant first; planes that are not given are zero."""
    np.copyto(out, planes[-1])
    for plane in reversed(planes[:-1]):
        np.left_shift(out, 8, out=out)
        np.bitwise_or(out, plane, out=out)


def sample(words: Words) -> Words:
    """At most 1024 words of a chunk: all of a small one, else evenly spread runs. Equal lengths are sampled at equal
    places, so samples of two chunks match word by word."""
    if len(words) <= SAMPLE_BLOCKS * SAMPLE_WORDS:
        return words
    stride = len(words) // SAMPLE_BLOCKS
    return words[: SAMPLE_BLOCKS * stride].reshape(SAMPLE_BLOCKS, stride)[:, :SAMPLE_WORDS].ravel()


_OFFSETS = {n: np.arange(n, dtype=np.intp) * 256 for n in (1, 2, 4, 8)}


def histograms(words: Words) -> NDArray[np.int64]:
    """How often each byte value occurs in each plane: shape (word size, 256)."""
    width = words.dtype.itemsize
    keys = words.view(np.uint8).reshape(-1, width) + _OFFSETS[width]
    return np.bincount(keys.ravel(), minlength=256 * width).reshape(width, 256)


_LIMIT = SAMPLE_BLOCKS * SAMPLE_WORDS
_NLOGN = np.arange(_LIMIT + 1) * np.log2(np.maximum(np.arange(_LIMIT + 1), 1))


def entropies(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Bits per byte of each row of the `histograms` of a `sample`, with Miller and Madow's correction for small ones.

    n·log n comes from a table, which counts of a sample cannot exceed: logarithms would be half the time of a probe.
    """
    total = np.maximum(counts.sum(axis=1), 1)
    bias = ((counts > 0).sum(axis=1) - 1) / (2 * math.log(2) * total)
    found: NDArray[np.float64] = np.log2(total) - _NLOGN[counts].sum(axis=1) / total + bias
    return np.minimum(np.maximum(found, 0.0), 8.0)
