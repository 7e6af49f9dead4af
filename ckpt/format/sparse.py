"""Few changed words: their positions as gaps, their values in as few bits as the alphabet allows.

Positions: before each changed word stands the number of unchanged words since the last one, as one byte; 255 means
"255 unchanged words, and no changed one yet", so a long gap is a run of 255s (which zstd shrinks to nothing) and no
second stream of escapes is needed.

Values: numbers below 2, 4 or 16 are packed 8, 4 or 2 to a byte, the first in the lowest bits; larger ones become byte
planes, as many as the largest needs. All functions check what they are given: it may come from a store.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ckpt.format.words import UNSIGNED, Bytes, Words, merge, split

ESCAPE = 255

PACKED_FORMS = (1, 2, 4)
"""Bits per value of the packed forms; every other form is 8 times a number of planes."""


def gaps_of(positions: NDArray[np.intp]) -> Bytes:
    """The gap bytes of strictly increasing positions."""
    gaps = np.diff(positions, prepend=-1)
    gaps -= 1
    if not len(gaps) or gaps.max() < ESCAPE:
        return gaps.astype(np.uint8)
    escapes, last = np.divmod(gaps, ESCAPE)
    ends = np.cumsum(escapes + 1)
    out = np.full(ends[-1], ESCAPE, dtype=np.uint8)
    out[ends - 1] = last
    return out


def positions_of(gaps: Bytes, count: int, n: int) -> NDArray[np.intp]:
    """The inverse of `gaps_of`: `count` positions below `n`, strictly increasing.

    Raises:
        ValueError: the gaps hold another number of positions, end in an escape, or lead outside.
    """
    marks = np.flatnonzero(gaps != ESCAPE)
    if len(marks) != count:
        raise ValueError(f"sparse: {len(marks)} positions where {count} are declared")
    if not count:
        if len(gaps):
            raise ValueError(f"sparse: {len(gaps)} gap bytes and no position")
        return marks
    if marks[-1] != len(gaps) - 1:
        raise ValueError("sparse: the gaps end in an escape")
    positions = np.cumsum(gaps, dtype=np.intp)[marks]
    positions += np.arange(count, dtype=np.intp)
    if positions[-1] >= n:
        raise ValueError(f"sparse: position {positions[-1]} in a chunk of {n} words")
    return positions


def gap_bounds(count: int, n: int) -> tuple[int, int]:
    """Fewest and most gap bytes that `count` positions below `n` can take."""
    return count, count + (n - count) // ESCAPE if count else 0


def form_of(values: Words) -> int:
    """The narrowest form that holds every value."""
    largest = int(values.max()) if len(values) else 0
    for bits in PACKED_FORMS:
        if largest < 1 << bits:
            return bits
    return 8 * -(-largest.bit_length() // 8)


def form_sizes(form: int, count: int, word: int) -> list[int]:
    """Bytes of each value stream of this form.

    Raises:
        ValueError: there is no such form for words of this size.
    """
    if form in PACKED_FORMS:
        return [-(-count * form // 8)]
    if form % 8 or not 8 <= form <= 8 * word:
        raise ValueError(f"sparse: no form {form} for words of {word} bytes")
    return [count] * (form // 8)


def value_streams(values: Words, form: int) -> list[Bytes]:
    """The values in this form, one array per stream."""
    if form in PACKED_FORMS:
        per = 8 // form
        padded = np.zeros((-(-len(values) // per), per), dtype=np.uint8)
        padded.reshape(-1)[: len(values)] = values
        out = padded[:, 0].copy()
        for i in range(1, per):
            out |= padded[:, i] << np.uint8(i * form)
        return [out]
    spare = np.empty_like(values)
    planes = [np.empty(len(values), dtype=np.uint8) for _ in range(form // 8)]
    for k, plane in enumerate(planes):
        split(values, k, plane, spare)
    return planes


def values_of(streams: list[Bytes], form: int, count: int, word: int) -> Words:
    """The inverse of `value_streams`; the sizes are those of `form_sizes`."""
    out = np.empty(count, dtype=UNSIGNED[word])
    if form in PACKED_FORMS:
        shifts = np.arange(0, 8, form, dtype=np.uint8)
        spread = (streams[0][:, None] >> shifts) & np.uint8((1 << form) - 1)
        out[:] = spread.reshape(-1)[:count]
    else:
        merge(streams, out)
    return out
