"""Boxes read back from stored boxes: same layout, another, small leaves, many blobs deep."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.errors import DamagedError, LayoutMismatch, Refused, Unavailable
from ckpt.format.manifest import Blob, ChunkRow, chunk_digest
from ckpt.format.names import PACKS
from ckpt.format.shards import DTYPES, Box, Leaf, Shard, whole
from recovery.assemble import Wanted, covered, plan_chunks
from recovery.fetch import Tally
from recovery.read import Missing, open_snapshot, read_parts
from recovery.rebuild import chain_problem
from recovery.shards import cut_batches, read_shards
from storage_backends.memory import MemoryStore
from tests.support.faulty import FaultyStore
from tests.support.stores import Each, Raw, State, cut, drifting, flipped, make_store


def _leaf(path: str, value: np.ndarray) -> Leaf:
    return Leaf(path, "array", value.dtype.name, value.shape)


def _wants(state: State) -> list[Wanted]:
    return [Wanted(Shard(_leaf(path, v), whole(v.shape))) for path, v in state.items()]


def test_every_step_of_a_store_of_three_ranks_comes_back_bit_exactly() -> None:
    """A2, A4: keyframes and chains of deltas of every kind."""
    store = MemoryStore()
    states = drifting(6)
    for state, id_ in zip(states, make_store(store, states, ranks=3, chunk=4096), strict=True):
        parts = read_parts(store, open_snapshot(store, id_).snapshot)
        found = {w.shard.leaf.path: data for w, data in read_shards(store, parts, _wants(state))}
        assert {path: data.tobytes() for path, data in found.items()} == {
            p: cut(v, whole(v.shape)) for p, v in state.items()
        }


def test_every_dtype_comes_back_bit_exactly() -> None:
    """I1, with NaN payloads and negative zeros among the bytes."""
    rng = np.random.default_rng(1)
    shape = (5, 7)
    states: list[State] = [
        {name: Raw(name, shape, rng.bytes(35 * d.size)) for name, d in DTYPES.items()} for _ in range(4)
    ]
    store = MemoryStore()
    ids = make_store(store, states, ranks=2)
    for state, id_ in zip(states, ids, strict=True):
        parts = read_parts(store, open_snapshot(store, id_).snapshot)
        wants = [Wanted(Shard(Leaf(n, "tensor", n, shape), whole(shape))) for n in DTYPES]
        for want, data in read_shards(store, parts, wants):
            assert data.tobytes() == cut(state[want.shard.leaf.path], whole(shape))


@st.composite
def _partitions(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """A random partition of a tensor into boxes, by cutting boxes in two."""
    boxes = [whole(shape)]
    for _ in range(draw(st.integers(0, 5))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        cuttable = [d for d, n in enumerate(box.lengths) if n > 1]
        if not cuttable:
            boxes.append(box)
            continue
        d = draw(st.sampled_from(cuttable))
        n = draw(st.integers(1, box.lengths[d] - 1))
        low = Box(box.offsets, (*box.lengths[:d], n, *box.lengths[d + 1 :]))
        high = Box(
            (*box.offsets[:d], box.offsets[d] + n, *box.offsets[d + 1 :]),
            (*box.lengths[:d], box.lengths[d] - n, *box.lengths[d + 1 :]),
        )
        boxes += [low, high]
    return boxes


@st.composite
def _relayouts(draw: st.DrawFn) -> tuple[np.ndarray, list[list[Box]], list[Box], int]:
    shape = tuple(draw(st.lists(st.integers(1, 9), max_size=4)))
    dtype = draw(st.sampled_from([np.uint8, np.int16, np.float32, np.float64, np.complex128]))
    # Large leaves have chunks of their own, small ones a bundle: both must come up.
    if draw(st.booleans()) and shape:
        shape = (-(-4096 // (math.prod(shape) * np.dtype(dtype).itemsize)) * shape[0], *shape[1:])
    size = math.prod(shape) * np.dtype(dtype).itemsize
    value = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 255, size, np.uint8).view(dtype).reshape(shape)
    ranks = draw(st.integers(1, 4))
    owned: list[list[Box]] = [[] for _ in range(ranks)]
    for box in draw(_partitions(shape)):
        owned[draw(st.integers(0, ranks - 1))].append(box)
    wanted = draw(_partitions(shape)) + draw(st.lists(st.sampled_from(draw(_partitions(shape))), max_size=2))
    return value, owned, list(dict.fromkeys(wanted)), draw(st.sampled_from([16, 64, 1000, 4096]))


@settings(max_examples=150, deadline=None)
@given(_relayouts())
def test_what_was_stored_by_one_partition_is_read_by_any_other(
    case: tuple[np.ndarray, list[list[Box]], list[Box], int],
) -> None:
    """E2, H2, K4: any boxes of any tensor, whatever boxes were stored."""
    value, owned, wanted, chunk = case
    store = MemoryStore()

    def split(leaf: Leaf, ranks: int) -> Sequence[Sequence[Box]]:
        return owned if leaf.path == "t" else [[whole(leaf.shape)]] + [[]] * (ranks - 1)

    around = {"a": np.arange(3, dtype=value.dtype), "t": value, "z": np.arange(5, dtype=value.dtype)}
    later = {**around, "t": value.copy()}
    later["t"].reshape(-1).view(np.uint8)[-1:] ^= 1
    ids = make_store(store, [around, later], ranks=len(owned), chunk=chunk, split=split)
    parts = read_parts(store, open_snapshot(store, ids[-1]).snapshot)
    wants = [Wanted(Shard(_leaf("t", value), box)) for box in wanted]
    found = {w.shard.box: data.tobytes() for w, data in read_shards(store, parts, wants, threads=2)}
    assert found == {box: cut(later["t"], box) for box in wanted}


def test_a_rank_reads_its_own_part_and_packs_only() -> None:
    """K2: on a resume in the same layout, no pack of another rank is opened."""
    store = MemoryStore()
    [state] = drifting(1)
    [id_] = make_store(store, [state], ranks=3, chunk=4096)
    counted = FaultyStore(store)
    parts = read_parts(counted, open_snapshot(store, id_).snapshot, [1])
    wants = [Wanted(Shard(_leaf(p, state[p]), row.as_box)) for p in state for row in parts[1].shards if row.leaf == p]
    assert covered(parts, wants)
    tally = Tally()
    for want, data in read_shards(counted, parts, wants, tally=tally):
        assert data.tobytes() == cut(state[want.shard.leaf.path], want.shard.box)
    packs = {key for verb, key in counted.calls if key.startswith(PACKS)}
    assert packs == {key for key, _ in parts[1].packs}
    assert not covered(parts, _wants(state))
    own = sum(b.stop - b.start for row in (*parts[1].shards, *parts[1].bundles) for c in row.chunks for b in c.blobs)
    assert tally.bytes <= own * 1.34


def test_neighbouring_blobs_are_read_in_one_request() -> None:
    store = MemoryStore()
    [state] = drifting(1, rows=400)
    [id_] = make_store(store, [state], chunk=4096, blobs_per_pack=10_000)
    parts = read_parts(store, open_snapshot(store, id_).snapshot)
    tally = Tally()
    assert len(list(read_shards(store, parts, _wants(state), tally=tally))) == len(state)
    assert tally.blobs > 40
    assert tally.requests == 1


def test_requests_do_not_depend_on_the_number_of_small_leaves() -> None:
    """M11."""
    counts = []
    for leaves in (10, 2000):
        store = MemoryStore()
        state = {f"leaf{n}": np.full(3, n, np.float32) for n in range(leaves)}
        [id_] = make_store(store, [state])
        parts = read_parts(store, open_snapshot(store, id_).snapshot)
        tally = Tally()
        found = {
            w.shard.leaf.path: d.view(np.float32)[0] for w, d in read_shards(store, parts, _wants(state), tally=tally)
        }
        assert found == {f"leaf{n}": n for n in range(leaves)}
        counts.append(tally.requests)
    assert counts == [1, 1]


def test_encoded_bytes_in_flight_stay_within_the_bound() -> None:
    """G2: what all threads hold together, counted at the store, request by request."""
    rng = np.random.default_rng(0)
    state = {"w": rng.standard_normal((4096, 256), np.float32)}  # 4 MiB that do not compress
    store = MemoryStore()
    [id_] = make_store(store, [state], chunk=16 * 1024)
    parts = read_parts(store, open_snapshot(store, id_).snapshot)
    memory, threads = 512 * 1024, 4
    sizes: list[int] = []

    class Watched(FaultyStore):
        def get_range(self, key: str, start: int, stop: int) -> bytes:
            sizes.append(stop - start)
            return super().get_range(key, start, stop)

    [(_, data)] = read_shards(Watched(store), parts, _wants(state), memory=memory, threads=threads)
    assert data.tobytes() == state["w"].tobytes()
    assert max(sizes) <= memory // threads // 4
    jobs = plan_chunks(parts, _wants(state)).jobs
    batches = list(cut_batches(jobs, limit=memory // threads // 4, threads=threads))
    assert max(sum(job.cost for job in batch) for batch in batches) <= memory // threads // 4
    assert sum(map(len, batches)) == len(jobs)


def test_a_flipped_bit_names_key_step_rank_and_leaf() -> None:
    store = MemoryStore()
    states = drifting(3)
    ids = make_store(store, states, ranks=3, chunk=4096)
    parts = read_parts(store, open_snapshot(store, ids[-1]).snapshot)
    row = next(r for r in parts[2].shards if r.leaf == "model.moving")
    blob = parts[2].blob(row.chunks[1].blobs[0])
    flipped(store, blob.pack, 8 * blob.start + 5)
    with pytest.raises(DamagedError, match=r"step 30, rank 2, model\.moving chunk 1: .*expected digest") as caught:
        list(read_shards(store, parts, _wants(states[-1])))
    error = caught.value
    assert (error.key, error.step, error.rank, error.leaf) == (blob.pack, 30, 2, "model.moving")
    assert error.expected.startswith(f"digest {blob.digest}")
    assert error.found.startswith("digest ")


def test_a_missing_pack_and_a_cut_one_are_told_apart() -> None:
    """A2, M2."""
    store = MemoryStore()
    states = drifting(2)
    ids = make_store(store, states, chunk=4096)
    parts = read_parts(store, open_snapshot(store, ids[-1]).snapshot)
    key = parts[0].packs[0][0]
    data = store.get(key)
    store.put(key, data[: len(data) // 2])
    with pytest.raises(DamagedError, match=f"a pack of {len(data) // 2} bytes") as cut_short:
        list(read_shards(store, parts, _wants(states[-1])))
    assert not isinstance(cut_short.value, Missing)
    store.delete([key])
    with pytest.raises(Missing, match="expected a pack, found none") as gone:
        list(read_shards(store, parts, _wants(states[-1])))
    assert gone.value.key == key


def test_a_chunk_that_rebuilds_to_something_else_is_damage() -> None:
    """Every blob is good, and the chain still does not give what the part says."""
    store = MemoryStore()
    states = drifting(2)
    ids = make_store(store, states, chunk=4096)
    parts = read_parts(store, open_snapshot(store, ids[-1]).snapshot)
    row = next(r for r in parts[0].shards if r.leaf == "model.moving")
    wrong = msgspec.structs.replace(row.chunks[0], digest="0" * 32)
    shards = tuple(
        msgspec.structs.replace(r, chunks=(wrong, *r.chunks[1:])) if r is row else r for r in parts[0].shards
    )
    parts[0] = msgspec.structs.replace(parts[0], shards=shards)
    with pytest.raises(DamagedError, match=r"model\.moving chunk 0: .*expected digest 0{32}, found rebuilt to"):
        list(read_shards(store, parts, _wants(states[-1])))


def test_a_store_that_does_not_answer_is_not_damage() -> None:
    store = MemoryStore()
    states = drifting(1)
    ids = make_store(store, states, chunk=4096)
    parts = read_parts(store, open_snapshot(store, ids[-1]).snapshot)
    faulty = FaultyStore(store, fail_at=1, verbs=frozenset({"get_range"}))
    with pytest.raises(Unavailable):
        list(read_shards(faulty, parts, _wants(states[-1])))
    assert faulty.fired


def test_reading_forbidden_is_not_damage() -> None:
    store = MemoryStore()
    states = drifting(1)
    ids = make_store(store, states, chunk=4096)
    parts = read_parts(store, open_snapshot(store, ids[-1]).snapshot)
    faulty = FaultyStore(store, fail_at=1, verbs=frozenset({"get_range"}), error=Refused)
    with pytest.raises(Refused):
        list(read_shards(faulty, parts, _wants(states[-1])))
    assert faulty.fired


def test_another_dtype_or_shape_is_a_layout_mismatch() -> None:
    store = MemoryStore()
    [id_] = make_store(store, [{"w": np.zeros((4, 4), np.float32)}])
    parts = read_parts(store, open_snapshot(store, id_).snapshot)
    with pytest.raises(LayoutMismatch, match="stored as float32") as caught:
        list(read_shards(store, parts, [Wanted(Shard(Leaf("w", "array", "float64", (4, 4)), whole((4, 4))))]))
    assert list(caught.value.changed) == ["w"]


def test_a_box_that_nobody_stored_is_an_error() -> None:
    store = MemoryStore()
    [id_] = make_store(store, [{"w": np.zeros((6, 4), np.float32)}], ranks=2)
    parts = read_parts(store, open_snapshot(store, id_).snapshot, [1])
    with pytest.raises(DamagedError, match="expected exactly once"):
        list(read_shards(store, parts, [Wanted(Shard(Leaf("w", "array", "float32", (6, 4)), whole((6, 4))))]))


def test_per_rank_leaves_come_from_the_rank_asked_for() -> None:
    store = MemoryStore()
    each = Each(tuple(np.full(4, rank, np.float32) for rank in range(3)))
    [id_] = make_store(store, [{"own": each, "shared": np.arange(9)}], ranks=3)
    parts = read_parts(store, open_snapshot(store, id_).snapshot)
    shard = Shard(Leaf("own", "array", "float32", (4,)), whole((4,)), per_rank=True)
    found = {w.rank: d.view(np.float32)[0] for w, d in read_shards(store, parts, [Wanted(shard, r) for r in range(3)])}
    assert found == {0: 0, 1: 1, 2: 2}


def test_equal_chunks_are_read_and_decoded_once() -> None:
    store = MemoryStore()
    [id_] = make_store(store, [{"a": np.zeros(4096, np.float32), "b": np.zeros(4096, np.float32)}], chunk=4096)
    part = read_parts(store, open_snapshot(store, id_).snapshot)[0]
    first = part.shards[0].chunks[0]
    shards = tuple(msgspec.structs.replace(row, chunks=(first,) * len(row.chunks)) for row in part.shards)
    parts = {0: msgspec.structs.replace(part, shards=shards)}
    leaves = [Leaf(path, "array", "float32", (4096,)) for path in "ab"]
    wants = [Wanted(Shard(leaf, whole(leaf.shape))) for leaf in leaves]
    assert len(plan_chunks(parts, wants).jobs) == 1
    assert all(not data.any() for _, data in read_shards(store, parts, wants))


def test_chunks_clipped_out_of_larger_ones_give_their_own_bytes() -> None:
    """After a change of layout a chunk may reference blobs of a larger box (`of`)."""
    value = np.arange(64 * 16, dtype=np.float32).reshape(64, 16)
    store = MemoryStore()
    [id_] = make_store(store, [{"w": value}], chunk=4096)
    part = read_parts(store, open_snapshot(store, id_).snapshot)[0]
    whole_chunk = part.shards[0].chunks[0]
    box = Box((3, 0), (7, 16))
    clipped = ChunkRow(chunk_digest("float32", cut(value, box)), whole_chunk.blobs, ((0, 0), (64, 16)))
    row = msgspec.structs.replace(part.shards[0], box=(box.offsets, box.lengths), chunks=(clipped,))
    parts = {0: msgspec.structs.replace(part, shards=(row,))}
    [(_, data)] = read_shards(store, parts, [Wanted(Shard(_leaf("w", value), Box((4, 2), (3, 5))))])
    assert data.tobytes() == cut(value, Box((4, 2), (3, 5)))
    for of in (((4, 0), (60, 16)), ((0, 0), (99, 16))):
        bad = msgspec.structs.replace(row, chunks=(msgspec.structs.replace(clipped, of=of),))
        with pytest.raises(DamagedError, match="a box that holds"):
            list(
                read_shards(
                    store, {0: msgspec.structs.replace(part, shards=(bad,))}, [Wanted(Shard(_leaf("w", value), box))]
                )
            )


def test_a_chain_that_no_writer_would_write_is_refused_before_it_is_read() -> None:
    blob = Blob("packs/x", 0, 10, 0, "0" * 16)
    assert chain_problem([blob], 100) is None
    assert "0 blobs" in (chain_problem([], 100) or "")
    assert "begins with a delta" in (chain_problem([msgspec.structs.replace(blob, kind=3)], 100) or "")
    assert "kind 77" in (chain_problem([blob, msgspec.structs.replace(blob, kind=77)], 100) or "")
    assert "9999999" in (chain_problem([msgspec.structs.replace(blob, stop=9999999)], 100) or "")
    assert "5000 blobs" in (chain_problem([blob] * 5000, 100) or "")
