"""Positions as gaps, values in few bits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.format.sparse import ESCAPE, form_of, form_sizes, gap_bounds, gaps_of, positions_of, value_streams, values_of


@settings(max_examples=200, deadline=None)
@given(st.sets(st.integers(0, 2000) | st.sampled_from([254, 255, 256, 509, 510, 511, 765])), st.integers(0, 600))
def test_positions_come_back_from_their_gaps(positions: set[int], room: int) -> None:
    given_positions = np.array(sorted(positions), dtype=np.intp)
    n = max(positions, default=-1) + 1 + room
    gaps = gaps_of(given_positions)
    least, most = gap_bounds(len(positions), n)
    assert least <= len(gaps) <= most
    assert positions_of(gaps, len(positions), n).tolist() == given_positions.tolist()
    if positions and not room:
        with pytest.raises(ValueError, match="position"):
            positions_of(gaps, len(positions), n - 1)
    with pytest.raises(ValueError, match="positions"):
        positions_of(gaps, len(positions) + 1, n)


def test_a_gap_of_a_multiple_of_the_escape_is_escapes_and_a_zero() -> None:
    for k in range(4):
        assert gaps_of(np.array([k * ESCAPE])).tolist() == [ESCAPE] * k + [0]
        assert gaps_of(np.array([k * ESCAPE + 254])).tolist() == [ESCAPE] * k + [254]


def test_gaps_that_lead_nowhere_are_refused() -> None:
    for gaps, count in (([3, 255], 1), ([255], 0), ([255, 255], 1)):
        with pytest.raises(ValueError, match="sparse"):
            positions_of(np.array(gaps, dtype=np.uint8), count, 1 << 20)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([1, 2, 4, 8]), st.integers(0, 64), st.integers(0, 70), st.integers(0, 2**32 - 1))
def test_values_come_back_from_the_narrowest_form_that_holds_them(word: int, bits: int, count: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    top = 1 << min(bits, 8 * word)
    values = rng.integers(0, top, count, dtype=f"<u{word}", endpoint=False)
    form = form_of(values)
    largest = max(values.tolist(), default=0)
    assert form in ((1, 2, 4) if largest < 16 else range(8, 8 * word + 1, 8))
    assert largest < 1 << form
    streams = value_streams(values, form)
    assert [len(s) for s in streams] == form_sizes(form, count, word)
    assert values_of(streams, form, count, word).tolist() == values.tolist()


def test_values_lie_lowest_bits_first() -> None:
    assert value_streams(np.array([1, 0, 0, 1, 0, 0, 0, 0, 1], dtype="<u2"), 1)[0].tolist() == [0b1001, 1]
    assert value_streams(np.array([3, 0, 2, 1, 3], dtype="<u2"), 2)[0].tolist() == [0b01_10_00_11, 0b11]
    assert value_streams(np.array([15, 2, 7], dtype="<u2"), 4)[0].tolist() == [0x2F, 0x07]
    assert [s.tolist() for s in value_streams(np.array([0x0201], dtype="<u4"), 16)] == [[1], [2]]


def test_forms_are_few() -> None:
    for word in (1, 2, 4, 8):
        good = [f for f in range(256) if f in (1, 2, 4) or (f % 8 == 0 and 8 <= f <= 8 * word)]
        for form in range(256):
            if form in good:
                assert form_sizes(form, 9, word)
            else:
                with pytest.raises(ValueError, match="no form"):
                    form_sizes(form, 9, word)
