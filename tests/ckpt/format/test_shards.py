"""The grid: cells of the global tensor, whoever holds them."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.format.shards import DTYPES, Box, Leaf, Shard, cut_count, cuts, grid, uncovered, whole

shapes = st.lists(st.integers(1, 7), min_size=1, max_size=4).map(tuple)
itemsizes = st.sampled_from([1, 2, 4, 8])


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    offsets, lengths = [], []
    for d in shape:
        start = draw(st.integers(0, d))
        offsets.append(start)
        lengths.append(draw(st.integers(0, d - start)))
    return Box(tuple(offsets), tuple(lengths))


def cells(shape: tuple[int, ...], itemsize: int, chunk: int) -> list[Box]:
    """All cells of the grid in row-major order, straight from PROTOCOL.md §6."""
    tails = [itemsize * math.prod(shape[j + 1 :]) for j in range(len(shape))]
    cut = next(j for j, tail in enumerate(tails) if tail <= chunk)
    block = 2 ** math.floor(math.log2(chunk / tails[cut]))
    blocks = [1] * cut + [block] + list(shape[cut + 1 :])
    starts = itertools.product(*(range(0, d, b) for d, b in zip(shape, blocks, strict=True)))
    return [Box(s, tuple(min(b, d - a) for a, b, d in zip(s, blocks, shape, strict=True))) for s in map(tuple, starts)]


@settings(max_examples=200, deadline=None)
@given(st.data(), shapes, itemsizes, st.integers(8, 300))
def test_the_cuts_of_any_box_are_the_grids_cells_cut_to_it_and_tile_its_bytes(
    data: st.DataObject, shape: tuple[int, ...], itemsize: int, chunk: int
) -> None:
    box = data.draw(boxes_in(shape))
    found = list(cuts(shape, box, itemsize, chunk))
    expected = [meeting for cell in cells(shape, itemsize, chunk) if (meeting := cell.intersect(box)) is not None]
    assert [c.box for c in found] == expected
    assert cut_count(shape, box, itemsize, chunk) == len(found)
    at = 0
    numbers = np.arange(box.numel).reshape(box.lengths)
    for c in found:
        assert c.start == at
        inner = c.box.relative_to(box)
        window = tuple(slice(a, a + n) for a, n in zip(inner.offsets, inner.lengths, strict=True))
        assert numbers[window].ravel().tolist() == list(range(c.start // itemsize, c.stop // itemsize))
        assert 0 < c.stop - c.start <= chunk
        at = c.stop
    assert at == box.numel * itemsize


@settings(max_examples=100, deadline=None)
@given(st.data(), shapes, itemsizes, st.integers(8, 300))
def test_two_shardings_of_a_tensor_cut_along_the_same_lines(
    data: st.DataObject, shape: tuple[int, ...], itemsize: int, chunk: int
) -> None:
    at = data.draw(st.integers(0, shape[0]))
    upper = Box((0,) * len(shape), (at, *shape[1:]))
    lower = Box((at, *(0,) * (len(shape) - 1)), (shape[0] - at, *shape[1:]))
    cells_whole = [c.box for c in cuts(shape, whole(shape), itemsize, chunk)]
    for half in (upper, lower):
        for c in cuts(shape, half, itemsize, chunk):
            assert any(cell.intersect(c.box) == c.box for cell in cells_whole)


def test_a_scalar_is_one_chunk_and_an_empty_box_has_none() -> None:
    assert [(c.box, c.start, c.stop) for c in cuts((), whole(()), 8)] == [(Box((), ()), 0, 8)]
    assert cut_count((), whole(()), 8) == 1
    for shape in ((0,), (3, 0), (0, 5), (2, 0, 3)):
        assert list(cuts(shape, whole(shape), 4)) == []
        assert cut_count(shape, whole(shape), 4) == 0


def test_rows_longer_than_a_chunk_are_cut_inside_the_row() -> None:
    g = grid((10, 1 << 20), 4)
    assert (g.cut, g.block) == (1, 1 << 17)
    g = grid((1 << 20, 100), 4)
    assert (g.cut, g.block) == (0, 1024)


def test_counting_chunks_does_not_walk_them() -> None:
    shape = (1 << 40, 1 << 40)
    assert cut_count(shape, whole(shape), 8) == (1 << 40) * (1 << 24)


def coverage(shape: tuple[int, ...], boxes: list[Box]) -> bool:
    """Whether every element is in exactly one box, by counting."""
    count = np.zeros(shape, dtype=int)
    for b in boxes:
        if b.empty:
            continue
        if any(a + n > d for a, n, d in zip(b.offsets, b.lengths, shape, strict=True)):
            return False
        count[tuple(slice(a, a + n) for a, n in zip(b.offsets, b.lengths, strict=True))] += 1
    return bool((count == 1).all())


@settings(max_examples=300, deadline=None)
@given(st.data(), st.lists(st.integers(0, 4), max_size=3).map(tuple))
def test_uncovered_agrees_with_counting_every_element(data: st.DataObject, shape: tuple[int, ...]) -> None:
    whole_shape = [whole(shape)]
    # Split some boxes, so that exact covers occur often; then lose, double or shift one, or not.
    for _ in range(data.draw(st.integers(0, 4))):
        i = data.draw(st.integers(0, len(whole_shape) - 1))
        b = whole_shape[i]
        if not shape:
            break
        d = data.draw(st.integers(0, len(shape) - 1))
        at = data.draw(st.integers(0, b.lengths[d]))
        left = Box(b.offsets, (*b.lengths[:d], at, *b.lengths[d + 1 :]))
        right = Box(
            (*b.offsets[:d], b.offsets[d] + at, *b.offsets[d + 1 :]),
            (*b.lengths[:d], b.lengths[d] - at, *b.lengths[d + 1 :]),
        )
        whole_shape[i : i + 1] = [left, right]
    boxes = data.draw(st.permutations(whole_shape))
    match data.draw(st.sampled_from(["as is", "lose", "double", "other"])):
        case "lose":
            boxes.pop()
        case "double":
            boxes.append(boxes[0])
        case "other":
            boxes[-1] = data.draw(boxes_in(tuple(d + 1 for d in shape)))
    said = uncovered(shape, boxes)
    assert (said is None) == coverage(shape, boxes), said


def test_uncovered_says_what_is_wrong() -> None:
    assert uncovered((4,), [Box((0,), (2,))]) == "boxes hold 2 of 4 elements of shape (4,)"
    assert "overlap" in (uncovered((4,), [Box((0,), (3,)), Box((1,), (3,))]) or "")
    assert "outside" in (uncovered((4,), [Box((2,), (3,))]) or "")
    assert uncovered((), [Box((), ())]) is None
    assert "overlap" in (uncovered((), [Box((), ()), Box((), ())]) or "")


@pytest.mark.parametrize("name", DTYPES)
def test_a_word_divides_its_element(name: str) -> None:
    dtype = DTYPES[name]
    assert dtype.name == name
    assert dtype.size % dtype.word == 0
    assert dtype.size // dtype.word == (2 if dtype.kind == "complex" else 1)


def test_boxes_know_what_they_share_and_where_they_lie() -> None:
    a, b = Box((0, 2), (4, 4)), Box((2, 0), (4, 3))
    assert a.intersect(b) == b.intersect(a) == Box((2, 2), (2, 1))
    assert a.intersect(Box((4, 2), (1, 1))) is None
    assert a.intersect(Box((0, 2), (0, 4))) is None
    assert Box((5, 7), (1, 2)).relative_to(Box((4, 4), (3, 9))) == Box((1, 3), (1, 2))
    assert str(a) == "[0:4, 2:6]"
    assert str(whole(())) == "[]"
    assert a.within((4, 6)) and not a.within((4, 5)) and not a.within((4, 6, 1))


def test_small_leaves_are_told_by_their_global_size() -> None:
    leaf = Leaf("m.w", "parameter", "float32", (1023,))
    assert leaf.small
    assert not Leaf("m.w", "parameter", "float32", (1024,)).small
    assert Shard(leaf, Box((0,), (10,))).nbytes == 40
