"""Plans by example: what is taken from where, what is printed, what is refused. The laws are in tests/properties."""

from __future__ import annotations

import numpy as np
import pytest

from ckpt.format.shards import Box, Leaf, Shard, cuts, whole
from recovery.assemble import Wanted, plan_chunks
from recovery.assumed import new_layout, parts_to_read, same_layout
from recovery.estimate import Bandwidths, estimate
from recovery.holdings import Chunks, Holding
from recovery.planner import Copy, Fetch, Keep, Receive, Stored, plan
from recovery.read import open_snapshot, read_parts
from recovery.requests import REQUEST, merged_reads
from recovery.tables import Table, meeting, placed, table
from storage_backends.memory import MemoryStore
from tests.support.stores import by_name, drifting, make_store

KB = 1024


def made(*stops: int, pack: str = "p", raw: int = KB) -> Table:
    """One blob per chunk, end to end in one pack."""
    stop = np.array(stops, np.int64)
    start = np.concatenate(([0], stop[:-1]))
    n = len(stops)
    return Table(np.full(n, raw), np.arange(n + 1), np.zeros(n, np.int64), start, stop, (pack,))


TABLES = {rank: made(100, 200, 300, 400, pack=f"p{rank}") for rank in range(4)}
STORED = Stored([4 * KB] * 4, TABLES)


def test_each_source_is_used_where_nothing_nearer_holds_the_chunk() -> None:
    found = plan(
        [0, 0, 1, 1],
        {0: [Chunks(0)]},
        STORED,
        [
            Holding(0, (Chunks(0, ((0, 1),)),)),
            Holding(1, (Chunks(0, ((0, 2),)),)),
            Holding(2, (Chunks(0, ((0, 3),)),)),
        ],
    )
    (rank,) = found.ranks
    keep, copy, receive, fetch = rank.actions
    assert keep == Keep((Chunks(0, ((0, 1),)),), KB)
    assert copy == Copy(1, (Chunks(0, ((1, 2),)),), KB)
    assert receive == Receive(2, (Chunks(0, ((2, 3),)),), KB)
    assert isinstance(fetch, Fetch)
    assert (fetch.chunks, fetch.nbytes, fetch.useful, fetch.raw) == ((Chunks(0, ((3, 4),)),), 100, 100, KB)
    assert [(r.pack, r.ranges) for r in fetch.packs] == [("p0", ((300, 400),))]


def test_a_rank_that_holds_its_part_keeps_it_as_one_entry_without_its_chunks() -> None:
    found = plan(
        [0, 1], {0: [Chunks(0)], 1: [Chunks(1)]}, Stored([7, 9], {}), [Holding(r, (Chunks(r),)) for r in (0, 1)]
    )
    assert [rank.actions for rank in found.ranks] == [(Keep((Chunks(0),), 7),), (Keep((Chunks(1),), 9),)]


def test_what_must_be_taken_apart_needs_its_table() -> None:
    with pytest.raises(ValueError, match="part 1 has to be taken apart"):
        plan([0, 1], {1: [Chunks(1)]}, Stored([7, 9], {}), [])


def test_a_chunk_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match=r"chunks 3:5 of part 0, which has 4"):
        plan([0], {0: [Chunks(0)]}, STORED, [Holding(0, (Chunks(0, ((3, 5),)),))])


def test_blobs_that_chunks_share_are_fetched_once() -> None:
    shared = Table(
        np.full(3, KB), np.array([0, 1, 3, 4]), np.zeros(4, np.int64),
        np.array([0, 0, 50, 0]), np.array([50, 50, 70, 50]), ("p",),
    )  # fmt: skip
    (rank,) = plan([0], {0: [Chunks(0)]}, Stored([3 * KB], {0: shared}), []).ranks
    (fetch,) = rank.actions
    assert isinstance(fetch, Fetch)
    assert (fetch.useful, fetch.raw) == (70, 3 * KB) and shared.blob_bytes == 70


def test_the_smallest_gaps_are_read_through_up_to_a_share_of_the_blobs() -> None:
    start = np.array([0, 1010, 2200, 3205], np.int64)
    stop = start + 1000
    pack = np.zeros(4, np.int64)
    (reads,) = merged_reads(("p",), pack, start, stop, waste=0.02)
    assert reads.ranges == ((0, 2010), (2200, 4205))
    (reads,) = merged_reads(("p",), pack, start, stop, waste=0.001)
    assert reads.ranges == ((0, 1000), (1010, 2010), (2200, 3200), (3205, 4205))
    (reads,) = merged_reads(("p",), pack, start, stop, waste=1.0, gap=9)
    assert reads.ranges == ((0, 1000), (1010, 2010), (2200, 4205))


def test_ranges_of_different_packs_are_never_joined_and_long_ones_take_several_requests() -> None:
    start, stop = np.array([0, REQUEST], np.int64), np.array([REQUEST, 2 * REQUEST + 1], np.int64)
    one, two = merged_reads(("a", "b"), np.array([0, 1]), start, stop)
    assert (one.pack, one.requests, two.pack, two.requests) == ("a", 1, "b", 2)


def test_senders_share_the_load_though_some_hold_less() -> None:
    holdings = [Holding(1, (Chunks(0),)), Holding(2, (Chunks(0),)), Holding(3, (Chunks(0, ((0, 2),)),))]
    found = plan([0, 1, 2, 3], {0: [Chunks(0)]}, STORED, holdings)
    assert sorted(found.sent.values()) == [KB, KB, 2 * KB]
    assert not found.total(Fetch)


def test_the_estimate_is_its_formula() -> None:
    given = Bandwidths(memory=4 * KB, node=2 * KB, network=KB, store=50, latency=0.5, in_flight=1)
    holdings = [
        Holding(0, (Chunks(0, ((0, 1),)),)),
        Holding(1, (Chunks(0, ((1, 2),)),)),
        Holding(2, (Chunks(0, ((2, 3),)),)),
    ]
    found = estimate(plan([0, 0, 1], {0: [Chunks(0)]}, STORED, holdings), given)
    assert found.by_source == {"memory": 0.25, "node": 0.5, "network": 1.0, "store": 2.0}
    assert (found.slowest, found.seconds) == (0, 3.75)


def test_a_store_that_serves_all_ranks_through_one_door_decides() -> None:
    found = plan([0, 1], {0: [Chunks(0)], 1: [Chunks(1)]}, STORED, [])
    assert estimate(found, Bandwidths(store=400, store_total=80)).seconds == 10.0


def test_a_printed_plan_names_sources_and_busy_ranks_only() -> None:
    text = str(plan([0, 1], {0: [Chunks(0)], 1: [Chunks(1)]}, STORED, [Holding(1, (Chunks(1),))]))
    assert "1 of 2 ranks keep all they want" in text
    assert "fetch        400 B  from the store in 1 requests, of which blobs 400 B" in text
    assert [line.split()[0] for line in text.splitlines()[-2:]] == ["rank", "0"]


def test_the_columns_of_a_part_agree_with_its_chunks() -> None:
    store = MemoryStore()
    ids = make_store(store, drifting(3), ranks=3, chunk=4096)
    parts = read_parts(store, open_snapshot(store, ids[-1]).snapshot)
    for part in parts.values():
        columns = table(part)
        chunks = [c for b in part.bundles for c in part.chunks(b)] + [
            c for row in part.shards for c in part.chunks(row)
        ]
        assert columns.count == len(chunks) and columns.nbytes == part.size
        for n, chunk in enumerate(chunks):
            a, b = columns.first[n : n + 2]
            told = [(columns.packs[columns.pack[i]], columns.start[i], columns.stop[i]) for i in range(a, b)]
            assert told == [(blob.pack, blob.start, blob.stop) for blob in chunk.blobs]


@pytest.mark.parametrize("shape", [(), (7,), (40, 64), (3, 5, 700), (2, 3, 4, 2000)])
def test_the_chunks_that_a_box_meets_are_those_that_hold_some_of_it(shape: tuple[int, ...]) -> None:
    array = np.zeros(shape, np.float32)
    store = MemoryStore()
    ids = make_store(store, [{"w": array, "v": np.zeros(9, np.float32)}], ranks=2, chunk=4096)
    parts = read_parts(store, open_snapshot(store, ids[-1]).snapshot)
    boxes = [whole(shape)]
    if shape:
        boxes.append(Box((shape[0] // 2, *(0,) * (len(shape) - 1)), (1, *shape[1:])))
        boxes.append(Box(tuple(d // 3 for d in shape), tuple(max(d // 3, 1) for d in shape)))
    for part in parts.values():
        for place in placed(part):
            if place.row.leaf != "w" or place.row.bundle is not None:
                continue
            for box in boxes:
                pieces = list(cuts(shape, place.box, 4, part.chunk))
                expected = [place.first + n for n, cut in enumerate(pieces) if cut.box.intersect(box) is not None]
                assert meeting(place, box, part.chunk).tolist() == expected


def test_losing_one_rank_of_a_sharded_job_fetches_its_blobs_and_no_more() -> None:
    store = MemoryStore()
    ids = make_store(store, drifting(3), ranks=4, chunk=4096, replicated=False)
    snapshot = open_snapshot(store, ids[-1]).snapshot
    parts = read_parts(store, snapshot, [2])
    assert not parts_to_read(parts)
    found = same_layout(snapshot, parts, [2]).plan()
    assert [type(rank.actions[0]) for rank in found.ranks] == [Keep, Keep, Fetch, Keep]
    lost = found.ranks[2].actions[0]
    assert isinstance(lost, Fetch)
    wanted = [Wanted(Shard(Leaf(r.leaf, r.cls, r.dtype, r.shape), r.as_box)) for r in parts[2].shards]
    assert lost.useful == plan_chunks(parts, wanted).nbytes == table(parts[2]).blob_bytes
    assert lost.nbytes <= 1.02 * lost.useful


def test_replicas_of_a_lost_rank_are_received_from_those_that_shared_them() -> None:
    store = MemoryStore()
    ids = make_store(store, drifting(2), ranks=3, chunk=4096, split=by_name)
    snapshot = open_snapshot(store, ids[-1]).snapshot
    parts = read_parts(store, snapshot, [1])
    parts |= read_parts(store, snapshot, parts_to_read(parts))
    found = same_layout(snapshot, parts, [1]).plan()
    assert found.total(Fetch) == 0
    assert found.ranks[1].nbytes(Receive) == snapshot.totals.size
    near = same_layout(snapshot, parts, [1], per_node=3).plan()
    assert near.ranks[1].nbytes(Copy) == snapshot.totals.size and not near.total(Receive)


@pytest.mark.parametrize("back", [1, 2, 3, 5, 8])
def test_another_world_size_wants_every_chunk_and_fetches_only_lost_ones(back: int) -> None:
    store = MemoryStore()
    ids = make_store(store, drifting(3), ranks=4, chunk=4096, replicated=False)
    snapshot = open_snapshot(store, ids[-1]).snapshot
    parts = read_parts(store, snapshot)
    scene = new_layout(snapshot, parts, [3], back, per_node=4)
    found = scene.plan()
    assert len(found.ranks) == back
    packs = {reads.pack for rank in found.ranks for a in rank.actions if isinstance(a, Fetch) for reads in a.packs}
    assert packs <= {key for key, _ in parts[3].packs} and packs
    everything = [some for wants in scene.wants.values() for some in wants]
    for part in parts:
        held = np.zeros(scene.stored.tables[part].count, np.bool_)
        for some in everything:
            held |= some.mask(len(held)) if some.part == part else False
        assert held.all(), f"part {part} is not wanted whole"


def test_a_lost_rank_that_never_was_is_refused() -> None:
    store = MemoryStore()
    ids = make_store(store, drifting(1), ranks=2)
    snapshot = open_snapshot(store, ids[-1]).snapshot
    with pytest.raises(ValueError, match="lost rank 2: the snapshot has ranks 0 to 1"):
        same_layout(snapshot, {}, [2])
