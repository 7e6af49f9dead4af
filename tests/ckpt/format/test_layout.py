"""Where shards lie in a rank's buffer."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.format.layout import ALIGN, Layout, bundle_name, lay_out
from ckpt.format.shards import DTYPES, Box, Leaf, Shard, cuts, whole

CHUNK = 4096


@st.composite
def shard_sets(draw: st.DrawFn) -> list[Shard]:
    shards = []
    for i in range(draw(st.integers(0, 12))):
        dtype = draw(st.sampled_from(["float32", "bfloat16", "bool", "complex64", "int64"]))
        shape = draw(st.sampled_from([(), (3,), (0,), (40, 50), (7, 1500), (5000,), (2, 3, 700)]))
        rows = draw(st.integers(0, shape[0])) if shape else 0
        box = Box((shape[0] - rows, *(0,) * (len(shape) - 1)), (rows, *shape[1:])) if shape else whole(())
        leaf = Leaf(f"leaf{i:02d}", draw(st.sampled_from(["parameter", "slot:exp_avg"])), dtype, shape)
        shards.append(Shard(leaf, box))
    return shards


@settings(max_examples=150, deadline=None)
@given(shard_sets())
def test_places_do_not_overlap_and_are_aligned_to_their_elements(shards: list[Shard]) -> None:
    layout = lay_out(shards, CHUNK)
    assert [r.shard for r in layout.regions] == sorted(shards)
    end = 0
    for region in sorted(layout.regions, key=lambda r: (r.start, r.nbytes)):
        assert region.start % DTYPES[region.shard.leaf.dtype].size == 0
        if region.nbytes:
            assert region.start >= end
            assert region.start - end < ALIGN, "gaps are for alignment only"
            end = region.start + region.nbytes
    assert 0 <= layout.nbytes - end < ALIGN


@settings(max_examples=150, deadline=None)
@given(shard_sets())
def test_pieces_tile_bundles_and_large_shards_exactly(shards: list[Shard]) -> None:
    layout = lay_out(shards, CHUNK)
    owner = 0
    for bundle in layout.bundles:
        pieces = layout.pieces[bundle.piece : bundle.piece_stop]
        assert bundle.piece == owner
        assert [p.index for p in pieces] == list(range(len(pieces)))
        at = bundle.start
        for p in pieces:
            assert (p.start, p.cls, p.dtype) == (at, bundle.cls, bundle.dtype)
            assert p.name == bundle_name(bundle.cls, bundle.dtype)
            at = p.stop
        assert at == bundle.start + bundle.nbytes
        owner = bundle.piece_stop
    for region in sorted((r for r in layout.regions if r.bundle is None), key=lambda r: (r.piece, r.piece_stop)):
        leaf = region.shard.leaf
        pieces = layout.pieces[region.piece : region.piece_stop]
        assert region.piece == owner
        expected = list(cuts(leaf.shape, region.shard.box, DTYPES[leaf.dtype].size, CHUNK))
        assert [(p.box, p.start - region.start, p.stop - region.start) for p in pieces] == [
            (c.box, c.start, c.stop) for c in expected
        ]
        assert all(p.name == leaf.path for p in pieces)
        owner = region.piece_stop
    assert owner == len(layout.pieces)


@settings(max_examples=100, deadline=None)
@given(shard_sets())
def test_small_leaves_lie_side_by_side_in_the_bundle_of_their_class_and_dtype(shards: list[Shard]) -> None:
    layout = lay_out(shards, CHUNK)
    ends = [0] * len(layout.bundles)
    for region in layout.regions:
        leaf = region.shard.leaf
        assert (region.bundle is not None) == leaf.small
        if region.bundle is None:
            continue
        bundle = layout.bundles[region.bundle]
        assert (bundle.cls, bundle.dtype) == (leaf.cls, leaf.dtype)
        assert region.first == ends[region.bundle]
        assert region.start == bundle.start + region.first * DTYPES[leaf.dtype].size
        ends[region.bundle] += region.shard.box.numel
    assert ends == [b.length for b in layout.bundles]


@settings(max_examples=50, deadline=None)
@given(st.data(), shard_sets())
def test_equal_sets_give_equal_layouts_in_whatever_order_they_come(data: st.DataObject, shards: list[Shard]) -> None:
    assert lay_out(data.draw(st.permutations(shards)), CHUNK) == lay_out(shards, CHUNK)


def test_a_thousand_scalars_are_one_chunk() -> None:
    layout = lay_out(Shard(Leaf(f"s{i}", "slot:step", "float32", ()), whole(())) for i in range(1000))
    assert len(layout.bundles) == len(layout.pieces) == 1
    assert layout.nbytes == 4000


def test_nothing_is_a_layout_too() -> None:
    assert lay_out([]) == Layout((), (), (), 0)


def test_large_leaves_of_one_dtype_lie_without_gaps() -> None:
    shards = [Shard(Leaf(f"w{i}", "parameter", "bfloat16", (1501 + i, 3)), whole((1501 + i, 3))) for i in range(5)]
    layout = lay_out(shards)
    at = 0
    for region in layout.regions:
        assert region.start == at
        at += region.nbytes
