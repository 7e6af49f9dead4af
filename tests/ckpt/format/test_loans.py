"""Small leaves after a change of layout: nothing is stored until they change, and everything reads back exactly."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.format.chunks import Blob
from ckpt.format.layout import lay_out
from ckpt.format.loans import MOST_BUNDLES, MOST_PIECES, cut_small, runs
from ckpt.format.manifest import Part
from ckpt.format.names import packs_prefix
from ckpt.format.relayout import cut_along, old_boxes, stored_already
from ckpt.format.shards import Box, Leaf, Shard, uncovered, whole
from ckpt.history.catalog import read_history
from ckpt.history.clock import SystemClock
from ckpt.history.keep import Keep
from ckpt.history.pins import pin
from ckpt.history.retention import execute, plan_prune
from recovery.compact import compact
from recovery.compaction import plan_compact
from recovery.compare import compare
from recovery.load import load
from recovery.verify import verify
from storage_backends.base import Store
from storage_backends.local import LocalStore
from storage_backends.memory import MemoryStore
from tests.ckpt.format.test_relayout import partition
from tests.golden.second_reader import SecondReader
from tests.support.elastic import Deal, Elastic
from tests.support.stores import Array, by_rows

CHUNK = 4096
SHAPES = {
    "a": (6, 5),
    "b": (3, 4, 5),
    "c": (200,),
    "d": (),
    "e": (900,),
    "f": (800,),
    "g": (7,),
    "none": (0, 3),
    "big": (40, 50),
}
CLASSES = {path: "slot:exp_avg" if path in "bfg" else "parameter" for path in SHAPES}
"""The bundle of parameters is longer than a chunk."""


def drawn(seed: int, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> dict[str, Array]:
    dice = np.random.default_rng(seed)
    return {path: np.asarray(dice.standard_normal(shape), np.float32) for path, shape in shapes.items()}


@st.composite
def dealings(draw: st.DrawFn) -> tuple[int, Mapping[str, list[Box]]]:
    """A number of ranks, and each leaf's boxes, cut anywhere, dealt out one after the other."""
    return draw(st.integers(1, 4)), {
        path: partition(draw, shape) if shape else [whole(())] for path, shape in SHAPES.items()
    }


def dealt(boxes: Mapping[str, list[Box]]) -> Deal:
    def deal(leaf: Leaf, ranks: int) -> Sequence[Sequence[Box]]:
        return [boxes[leaf.path][rank::ranks] for rank in range(ranks)]

    return deal


Named = list[tuple[str, Blob]]


def named(part: Part) -> Named:
    """All its blobs, each with the class of its bundle or the path of its leaf."""
    rows = [(bundle.cls, bundle) for bundle in part.bundles] + [(row.leaf, row) for row in part.shards]
    return [(name, blob) for name, row in rows for chunk in part.chunks(row) for blob in chunk.blobs]


def anew(part: Part, before: Iterable[Part]) -> set[str]:
    """Classes of bundles, and paths of other leaves, that the part's own save stored something of. Blobs that moved
    out of packs nearly dead are no news."""
    old = {blob.digest for each in before for _, blob in named(each)}
    prefix = packs_prefix(part.id)
    return {name for name, blob in named(part) if blob.pack.startswith(prefix) and blob.digest not in old}


def check(job: Elastic, state: Mapping[str, Array]) -> None:
    found = load(job.store, str(job.last))
    assert found.keys() == state.keys()
    for path, array in state.items():
        assert np.asarray(found[path]).tobytes() == array.tobytes(), path


def sound(store: Store) -> None:
    assert [f.text for f in verify(store, deep=True, threads=1) if f.level == "error"] == []


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(dealings(), st.sets(st.sampled_from(sorted(SHAPES)))), min_size=2, max_size=4),
    st.integers(0, 2**32 - 1),
)
def test_any_layouts_one_after_the_other_store_what_changed_and_nothing_else(
    lives: list[tuple[tuple[int, Mapping[str, list[Box]]], set[str]]], seed: int
) -> None:
    """Between two changes of layout some leaves change, or none: only bundles of their class are stored."""
    job, state = Elastic(MemoryStore(), CHUNK, CLASSES), drawn(seed)
    for life, ((ranks, boxes), changed) in enumerate(lives):
        job.start(state, ranks, dealt(boxes))
        assert (job.stored(state) == 0) == (life > 0)
        check(job, state)
        new = drawn(seed + 1 + life)
        state = {path: new[path] if path in changed else array for path, array in state.items()}
        before = job.parts()
        job.save(state)
        allowed = {path if path == "big" else CLASSES[path] for path in changed}
        for part in job.parts().values():
            assert anew(part, before.values()) <= allowed
            for bundle in part.bundles:
                assert not (bundle.kept and life == 0)
        check(job, state)
        assert job.stored(state) == 0
        check(job, state)
    job.stop()
    sound(job.store)


def rows_job(store: Store, state: Mapping[str, Array], ranks: Sequence[int]) -> Elastic:
    """A job that was sharded by rows over so many ranks, one number after the other, and saved unchanged each time."""
    job = Elastic(store, CHUNK, CLASSES)
    for life, n in enumerate(ranks):
        job.start(state, n, by_rows)
        assert (job.stored(state) == 0) == (life > 0), f"{n} ranks"
    return job


def test_four_ranks_three_five_two_and_an_independent_reader_understands_each(tmp_path: Path) -> None:
    state = drawn(1)
    job = rows_job(LocalStore(tmp_path), state, [4, 3, 5, 2, 1, 8, 4])
    reader = SecondReader(tmp_path)
    assert len(reader.snapshots()) == 7
    for id_ in reader.snapshots():
        leaves = reader.load(id_).leaves
        assert {path: leaf.data for path, leaf in leaves.items()} == {p: a.tobytes() for p, a in state.items()}
    # The boxes of four ranks come together again: nothing is left of all the cuts between.
    for part in job.parts().values():
        small = [row.leaf for row in part.shards if row.bundle is not None]
        assert len(small) == len(set(small))
    state["c"][17] += 1
    assert job.stored(state) > 0
    assert SecondReader(tmp_path).load(str(job.last)).leaves["c"].data == state["c"].tobytes()
    assert {b.cls for part in job.parts().values() for b in part.bundles if b.kept} <= {"slot:exp_avg"}
    job.stop()
    sound(job.store)


def test_a_bundle_goes_home_whole_when_one_member_changes_and_the_old_ones_drop_out_of_the_part() -> None:
    """Then it is a bundle like any other: the next change is a delta."""
    state = drawn(2)
    job = rows_job(MemoryStore(), state, [4, 3])
    before = job.parts()
    lent = [sum(bool(bundle.kept) for bundle in part.bundles) for part in before.values()]
    assert min(lent) > 0, "nobody hangs on old bundles"
    state["e"][3] += 1  # of rank 0
    job.save(state)
    for rank, part in job.parts().items():
        kept = {bundle.cls for bundle in part.bundles if bundle.kept}
        assert ("parameter" in kept) == (rank > 0)
        assert "slot:exp_avg" in kept
    home = next(b for b in job.parts()[0].bundles if not b.kept)
    assert home.cls == "parameter" and home.length == sum(
        row.as_box.numel for row in job.parts()[0].shards if row.bundle is not None and row.cls == "parameter"
    )
    assert job.stored(state) == 0
    state["e"][4] += 1
    kinds = [set(report.kinds) for report in job.save(state)]
    assert kinds[0] and kinds[0] <= {"sub", "xor", "sparse"} and not any(kinds[1:])
    check(job, state)
    job.stop()
    sound(job.store)


def test_prune_and_compaction_leave_what_is_lent_and_diff_sees_no_change(tmp_path: Path) -> None:
    state = drawn(3)
    job = rows_job(MemoryStore(), state, [4])
    assert job.last is not None
    first = job.last
    for n in range(6):  # deltas, so that there are chains and packs that die
        state = state | {"c": state["c"] + np.float32(n), "big": state["big"] + np.float32(n)}
        job.save(state)
    newest = job.last
    job.start(state, 3, by_rows)
    assert job.stored(state) == 0
    lent = job.last
    job.start(state, 2, by_rows)
    assert job.stored(state) == 0
    difference = compare(job.store, newest, lent, threads=1)
    assert difference.equal and len(difference.leaves) == len(SHAPES)
    assert not compare(job.store, first, lent, threads=1).equal
    history = read_history(job.store, packs=True)
    pin(job.store, history, "lent", lent)
    job.start(state, 2, by_rows)
    for n in (1, 2):  # and then nobody leans on it
        other = {path: array + np.float32(n) for path, array in state.items()}
        job.save(other)
    execute(plan_prune(job.store, Keep(last=1), grace=0, threads=1), job.store, clock=SystemClock(), threads=1)
    done = compact(plan_compact(job.store, threshold=1.0), job.store)
    assert lent in done.snapshots, done
    execute(plan_prune(job.store, Keep(last=1), grace=0, threads=1), job.store, clock=SystemClock(), threads=1)
    for id_, expected in ((lent, state), (job.last, other)):
        found = load(job.store, str(id_))
        assert all(np.asarray(found[path]).tobytes() == array.tobytes() for path, array in expected.items())
    job.stop()
    sound(job.store)


@settings(max_examples=100, deadline=None)
@given(st.data(), st.sampled_from([(7,), (6, 5), (3, 4, 5), (2, 1, 3, 2)]))
def test_runs_are_runs_and_cover_the_box(data: st.DataObject, shape: tuple[int, ...]) -> None:
    def inside(outer: Box) -> Box:
        spans = [
            (a + (s := data.draw(st.integers(0, n - 1))), data.draw(st.integers(1, n - s)))
            for a, n in zip(outer.offsets, outer.lengths, strict=True)
        ]
        return Box(tuple(a for a, _ in spans), tuple(n for _, n in spans))

    outer = inside(whole(shape))
    box = inside(outer)
    numbers = np.full(shape, -1)
    where = tuple(slice(a, a + n) for a, n in zip(outer.offsets, outer.lengths, strict=True))
    numbers[where] = np.arange(outer.numel).reshape(outer.lengths)
    pieces = runs(box, outer)
    assert uncovered(box.lengths, [piece.relative_to(box) for piece in pieces]) is None
    for piece in pieces:
        flat = numbers[tuple(slice(a, a + n) for a, n in zip(piece.offsets, piece.lengths, strict=True))].ravel()
        assert (np.diff(flat) == 1).all()


def test_a_leaf_that_would_fall_into_too_many_pieces_is_not_cut_and_stored_once_more() -> None:
    shape = (MOST_PIECES + 1, 2)
    leaf = Leaf("w", "parameter", "float32", shape)
    column = Box((0, 0), (shape[0], 1))
    assert cut_small(Shard(leaf, column), [whole(shape)]) == [Shard(leaf, column)]
    assert len(cut_small(Shard(leaf, Box((0, 0), (MOST_PIECES, 1))), [whole(shape)])) == MOST_PIECES

    def columns(leaf: Leaf, ranks: int) -> list[list[Box]]:
        return [[Box((0, rank), (shape[0], 1))] for rank in range(ranks)] if ranks == 2 else [[whole(shape)]]

    state = {"w": drawn(4, {"w": shape})["w"]}
    job = Elastic(MemoryStore(), CHUNK, {"w": "parameter"})
    for n in (1, 2):
        job.start(state, n, columns)
        assert job.stored(state) > 0
    check(job, state)
    job.stop()


@pytest.mark.parametrize("ranks", [MOST_BUNDLES, MOST_BUNDLES + 1])
def test_a_part_hangs_on_so_many_old_bundles_and_of_more_it_stores_anew(ranks: int) -> None:
    state = {"w": drawn(5, {"w": (ranks,)})["w"]}
    job = Elastic(MemoryStore(), CHUNK, {"w": "parameter"})
    job.start(state, ranks, by_rows)
    job.save(state)
    job.start(state, 1, by_rows)
    assert (job.stored(state) == 0) == (ranks <= MOST_BUNDLES)
    assert len(job.parts()[0].bundles) == (ranks if ranks <= MOST_BUNDLES else 1)
    check(job, state)
    job.stop()


def test_a_leaf_that_came_or_went_ends_the_loan_of_its_bundle() -> None:
    """The members of a loan are those of the layout; what lies beside them in the old bundles is nobody's business."""
    state = drawn(6)
    parts = rows_job(MemoryStore(), state, [4]).parts()
    leaves = [Leaf(path, CLASSES[path], "float32", shape) for path, shape in SHAPES.items()]
    old = old_boxes(parts.values())
    for extra, fewer, lent in ((0, 0, 2), (0, 1, 2), (1, 0, 1)):
        mine = leaves[fewer:] + [Leaf("new", "parameter", "float32", (3,))] * extra
        layout = lay_out(cut_along([Shard(leaf, whole(leaf.shape)) for leaf in mine], old), CHUNK)
        data = np.zeros(layout.nbytes, np.uint8)
        assert len(stored_already(parts, None, layout, data).loans) == lent


def test_old_boxes_that_follow_each_other_in_a_bundle_are_one() -> None:
    state = {"w": drawn(7, {"w": (12, 3)})["w"]}
    job = Elastic(MemoryStore(), CHUNK, {"w": "parameter"})
    for n in (1, 4, 2):
        job.start(state, n, by_rows)
        job.save(state)
    assert [len(part.shards) for part in job.parts().values()] == [1, 1]
    ((_, boxes),) = old_boxes(job.parts().values()).items()
    assert boxes == (whole((12, 3)),)
    job.stop()
