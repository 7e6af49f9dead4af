"""Copies between boxes, against numpy's own indexing of the whole tensor."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.format.shards import Box, whole
from recovery.boxes import Cells, Run, carry_out, copied, copies


@st.composite
def _two_boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], Box, Box]:
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=4)))

    def box() -> Box:
        ends = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
        return Box(tuple(a for a, _ in ends), tuple(b - a for a, b in ends))

    return shape, box(), box()


@given(_two_boxes(), st.sampled_from([1, 2, 4, 8, 16]))
def test_what_two_boxes_share_is_copied_and_nothing_else(case: tuple[tuple[int, ...], Box, Box], size: int) -> None:
    shape, source, target = case
    full = np.arange(whole(shape).numel * size, dtype=np.uint64).astype(np.uint8).reshape(*shape, size)

    def bytes_of(box: Box) -> np.ndarray:
        cut = full[tuple(slice(a, a + n) for a, n in zip(box.offsets, box.lengths, strict=True))]
        return np.ascontiguousarray(cut).reshape(-1)

    copy = copies(source, target, size)
    common = source.intersect(target)
    assert (copy is None) == (common is None)
    if copy is None or common is None:
        return
    assert copied(copy) == common.numel * size
    untouched = np.full(target.numel * size, 255, np.uint8)
    found = untouched.copy()
    carry_out(copy, bytes_of(source), found)
    expected = untouched.reshape(*target.lengths, size)
    local = common.relative_to(target)
    where = tuple(slice(a, a + n) for a, n in zip(local.offsets, local.lengths, strict=True))
    expected[where] = bytes_of(common).reshape(*common.lengths, size)
    assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("source", "target", "kind"),
    [
        (Box((2, 0), (3, 8)), Box((0, 0), (10, 8)), Run),  # rows in rows
        (Box((2, 0), (3, 8)), Box((3, 0), (10, 8)), Run),
        (Box((0, 2), (4, 3)), Box((0, 0), (4, 8)), Cells),  # columns
        (Box((4, 2), (1, 3)), Box((0, 0), (9, 8)), Run),  # one row's part
        (Box((0,), (9,)), Box((3,), (2,)), Run),
        (Box((), ()), Box((), ()), Run),
    ],
)
def test_runs_of_bytes_are_seen_as_such(source: Box, target: Box, kind: type) -> None:
    assert isinstance(copies(source, target, 4), kind)
