"""A changed layout: unchanged state references the old chunks, clipped, and can be read back from them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.format.layout import Layout, lay_out
from ckpt.format.manifest import Part, PartHead, read_part, write_part
from ckpt.format.names import RunId, SnapshotId
from ckpt.format.relayout import cut_along, old_boxes, stored_already
from ckpt.format.shards import Box, Leaf, Shard, uncovered, whole
from recovery.assemble import Wanted
from recovery.read import open_snapshot, read_parts
from recovery.shards import read_shards
from storage_backends.memory import MemoryStore
from tests.support.stores import DirectWriter

CHUNK = 4096


def partition(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """Boxes that cover a tensor exactly once: cut at random places, each part cut again."""
    boxes = [whole(shape)]
    for _ in range(draw(st.integers(0, 4))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, box.lengths[axis]))
        for start, stop in ((0, at), (at, box.lengths[axis])):
            offsets, lengths = list(box.offsets), list(box.lengths)
            offsets[axis] += start
            lengths[axis] = stop - start
            boxes.append(Box(tuple(offsets), tuple(lengths)))
    return boxes


def fill(layout: Layout, array: np.ndarray) -> np.ndarray:
    data = np.zeros(layout.nbytes, np.uint8)
    for region in layout.regions:
        box = region.shard.box
        part = array[tuple(slice(a, a + n) for a, n in zip(box.offsets, box.lengths, strict=True))]
        data[region.start : region.start + region.nbytes] = np.frombuffer(part.tobytes(), np.uint8)
    return data


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box], list[Box]]:
    shape = draw(st.sampled_from([(40, 50), (2100,), (3, 900), (7, 30, 11), (2, 2, 600)]))
    return shape, partition(draw, shape), partition(draw, shape)


@settings(max_examples=60, deadline=None)
@given(layouts(), st.integers(0, 2**32 - 1))
def test_any_layout_to_any_other_stores_nothing_and_reads_back_exactly(
    made: tuple[tuple[int, ...], list[Box], list[Box]], seed: int
) -> None:
    shape, old, new = made
    array = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    store = MemoryStore()
    writer = DirectWriter(store, ranks=len(old), chunk=CHUNK, split=lambda _, ranks: [[box] for box in old])
    writer.begin()
    first = writer.step(1, {"w": array})
    parts = read_parts(store, open_snapshot(store, first).snapshot)

    (leaf,) = old_boxes(parts.values())
    taken: list[Part] = []
    boxes: list[Box] = []
    for rank, box in enumerate(new):
        shards = cut_along([Shard(leaf, box)], old_boxes(parts.values()))
        boxes += [shard.box for shard in shards]
        layout = lay_out(shards, CHUNK)
        data = fill(layout, array)
        stored = stored_already(parts, None, layout, data)
        assert stored.layout.pieces == layout.pieces, "a piece would be stored again"
        for piece, chunk in zip(stored.layout.pieces, stored.table, strict=True):
            assert chunk.of is None or (chunk.of != piece.box and chunk.of.intersect(piece.box) == piece.box)
        taken.append(_part(rank, len(new), layout, stored.table, stored.packs))
    assert uncovered(shape, boxes) is None
    wanted = Wanted(Shard(leaf, whole(shape)), None)
    ((_, found),) = read_shards(store, dict(enumerate(taken)), [wanted])
    assert found.tobytes() == array.tobytes()

    # Cut along its own edges again, a layout stays what it is: the next restart stores nothing either.
    for rank, box in enumerate(new):
        again = cut_along([Shard(leaf, box)], old_boxes(taken))
        layout = lay_out(again, CHUNK)
        stored = stored_already(dict(enumerate(taken)), rank, layout, fill(layout, array))
        assert stored.layout.pieces == layout.pieces
        assert list(stored.table) == [c for row in taken[rank].shards for c in taken[rank].chunks(row)]


def _part(rank: int, ranks: int, layout: Layout, table: Sequence, packs: object) -> Part:
    head = PartHead(
        run=RunId(2, "00000000"), step=2, world_size=ranks, rank=rank, ownership="0" * 32,
        reference=SnapshotId(RunId(1, "0badcafe"), 1), time=None, metrics=None, stored={}, aliases={}, replicas={},
        values={},
    )  # fmt: skip
    return read_part(write_part(head, layout, table, packs, lambda: None), key=f"part {rank}")


def test_what_no_old_box_covers_is_not_cut() -> None:
    leaf, other = Leaf("w", "tensor", "float32", (100, 20)), Leaf("v", "tensor", "float32", (100, 20))
    old = {leaf: (Box((0, 0), (30, 20)), Box((60, 0), (40, 20)))}
    shards = [Shard(leaf, whole((100, 20))), Shard(other, whole((100, 20))), Shard(leaf, Box((0, 0), (0, 20)))]
    assert cut_along(shards, old) == shards
    shard = Shard(leaf, Box((0, 0), (30, 20)))
    assert cut_along([shard], old) == [shard]


def test_another_chunk_size_is_another_grid() -> None:
    store = MemoryStore()
    writer = DirectWriter(store, chunk=CHUNK)
    writer.begin()
    array = np.arange(4000, dtype=np.float32)
    id_ = writer.step(1, {"w": array})
    parts = read_parts(store, open_snapshot(store, id_).snapshot)
    (leaf,) = old_boxes(parts.values())
    layout = lay_out([Shard(leaf, whole((4000,)))], 2 * CHUNK)
    assert stored_already(parts, 0, layout, fill(layout, array)).table == ()
