"""Chunks from mirrors on the node and from peers: what comes from where, and what happens when it is not what it
should be. Ranks are threads, nodes are folders."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from ckpt.format.names import PACKS, SnapshotId
from ckpt.format.shards import Leaf, Shard
from recovery.agree import Alone
from recovery.assemble import ChunkJob, Wanted, plan_chunks
from recovery.boxes import Bytes
from recovery.exchange import Received, from_peers
from recovery.near import NODE, OWN, from_node
from recovery.read import open_snapshot, read_parts
from recovery.reading import Delivered, Fill, Reading
from recovery.shards import from_store
from recovery.spans import Describer
from storage_backends.memory import MemoryStore
from tests.support.faulty import FaultyStore
from tests.support.mirrors import leave_mirror, look, spoil
from tests.support.peers import ThreadRanks, on_ranks
from tests.support.stores import State, cut, drifting, make_store

RANKS, CHUNK = 3, 4096


@dataclass
class Job:
    """A stored job of three ranks; `folders`: the mirror folder of each rank's node."""

    folders: Sequence[Path]
    replicated: bool = True
    states: list[State] = field(default_factory=lambda: [dict(state) for state in drifting(3)])

    def __post_init__(self) -> None:
        self.store = MemoryStore()
        self.ids = make_store(self.store, self.states, ranks=RANKS, chunk=CHUNK)
        self.parts = read_parts(self.store, open_snapshot(self.store, self.ids[-1]).snapshot)
        self.counted = FaultyStore(self.store)

    def leave(self, rank: int, *, step: SnapshotId | None = None) -> Path:
        also = range(RANKS) if self.replicated else ()
        return leave_mirror(self.folders[rank], self.store, step or self.ids[-1], rank, also=also)

    def wanted(self, rank: int) -> list[Wanted]:
        """Everything, where state is replicated; else what the rank stored."""
        rows = [
            row for owner, part in self.parts.items() for row in part.shards if self.replicated or owner == rank
        ]  # fmt: skip
        return [Wanted(Shard(Leaf(row.leaf, row.cls, row.dtype, row.shape), row.as_box)) for row in rows]

    def sample(self, leaf: str) -> bytes:
        """The first bytes of a leaf: they lie in one chunk."""
        box = next(want.shard.box for want in self.wanted(0) if want.shard.leaf.path == leaf)
        return cut(self.states[-1][leaf], box)[:64]

    @property
    def packs_read(self) -> int:
        return sum(key.startswith(PACKS) for _, key in self.counted.calls)


@dataclass
class Back:
    """What one rank came back with."""

    bytes: dict[str, int]
    received: Received
    problems: str
    largest: int


class Counting(ThreadRanks):
    """Remembers the most bytes that it sent or received at once."""

    largest = 0

    def exchange(self, out: Mapping[int, Bytes], sizes: Mapping[int, int]) -> dict[int, Bytes]:
        self.largest = max(self.largest, sum(sizes.values()), sum(data.nbytes for data in out.values()))
        return super().exchange(out, sizes)


def come_back(
    job: Job, *, limit: int = 1 << 20, reading: Callable[[int], type[Reading]] = lambda _: Reading
) -> list[Back]:
    """All ranks of a job, and every byte compared."""

    def one(ranks: ThreadRanks) -> Back:
        ranks.__class__ = Counting
        assert isinstance(ranks, Counting)
        wanted, told = job.wanted(ranks.rank), dict.fromkeys((OWN, NODE, "peers"), 0)

        def count(source: str, nbytes: int) -> None:
            told[source] += nbytes

        under_way = reading(ranks.rank)(plan_chunks(job.parts, wanted))
        boxes = list(under_way.nothing())
        describer = Describer(job.parts)
        with look(job.folders[ranks.rank], job.store, ranks.rank) as holdings:
            boxes += from_node(under_way, describer, holdings, job.ids[-1], threads=2, count=count)
            received = from_peers(ranks, under_way, describer, holdings, job.ids[-1], threads=2, limit=limit)
            problems = "\n".join(map(str, holdings.problems))
        told["peers"] = received.nbytes
        if received.error is None:
            boxes += received.boxes
            boxes += from_store(job.counted, under_way, threads=1)
            assert {want: data.tobytes() for want, data in boxes} == {
                want: cut(job.states[-1][want.shard.leaf.path], want.shard.box) for want in wanted
            }
        return Back(told, received, problems, ranks.largest)

    found = on_ranks(RANKS, one)
    for each in found:
        if isinstance(each, Exception):
            raise each
    return [each for each in found if isinstance(each, Back)]


def apart(tmp_path: Path) -> list[Path]:
    return [tmp_path / f"node{rank}" for rank in range(RANKS)]


def test_a_lost_node_receives_replicas_from_peers_who_share_the_load(tmp_path: Path) -> None:
    job = Job(apart(tmp_path))
    job.leave(0)
    job.leave(2)
    zero, one, two = come_back(job)
    total = sum(want.shard.nbytes for want in job.wanted(1))
    assert one.bytes == {OWN: 0, NODE: 0, "peers": total}
    assert zero.bytes == two.bytes == {OWN: total, NODE: 0, "peers": 0}
    assert job.packs_read == 0
    assert 0 < max(zero.largest, two.largest) - min(zero.largest, two.largest) <= CHUNK + RANKS


def test_of_a_lost_shard_that_nobody_mirrors_the_store_gives_all(tmp_path: Path) -> None:
    job = Job(apart(tmp_path), replicated=False)
    job.leave(0)
    job.leave(2)
    zero, one, two = come_back(job)
    assert not any(one.bytes.values()) and zero.bytes[OWN] and two.bytes[OWN]
    own = {key for key, _ in job.parts[1].packs}
    assert {key for _, key in job.counted.calls if key.startswith(PACKS)} <= own and job.packs_read


def test_ranks_of_one_node_come_back_from_its_mirrors_without_a_word(tmp_path: Path) -> None:
    job = Job([tmp_path / "node"] * RANKS, replicated=False)
    for rank in range(RANKS):
        job.leave(rank)
    job.replicated = True  # each wants everything: two thirds of it lie in the mirrors of the others
    for back in come_back(job):
        assert back.bytes[OWN] and back.bytes[NODE] > back.bytes[OWN] and not back.bytes["peers"]
    assert job.packs_read == 0


def test_a_flipped_bit_is_noticed_by_its_node_and_the_chunk_comes_from_a_peer(tmp_path: Path) -> None:
    """K1: a mirror with a flipped bit."""
    job = Job(apart(tmp_path))
    path = job.leave(0)
    job.leave(1)
    job.leave(2)
    spoil(path, job.sample("model.still"))
    zero, one, two = come_back(job)
    assert 0 < zero.bytes["peers"] <= CHUNK and zero.bytes[OWN] and not one.bytes["peers"] and not two.bytes["peers"]
    assert "are not what the store says they are" in zero.problems
    assert job.packs_read == 0


@pytest.mark.parametrize("good", [True, False], ids=["another has it", "nobody has it"])
def test_a_sender_with_wrong_bytes_is_replaced(tmp_path: Path, good: bool) -> None:
    job = Job(apart(tmp_path))
    sample = job.sample("model.moving")
    spoil(job.leave(0), sample)
    third = job.leave(2)
    if not good:
        spoil(third, sample)
    zero, one, two = come_back(job)
    total = sum(want.shard.nbytes for want in job.wanted(1))
    if good:
        assert one.bytes["peers"] == total and job.packs_read == 0
        assert zero.bytes["peers"] > 0 == two.bytes["peers"]
    else:
        assert total - CHUNK <= one.bytes["peers"] < total and job.packs_read
        assert not zero.bytes["peers"] and not two.bytes["peers"]


def test_a_peer_that_mirrors_another_step_is_asked_for_nothing(tmp_path: Path) -> None:
    """K1: a mirror of an older step serves its own node with what did not change since, and nobody else."""
    job = Job(apart(tmp_path))
    job.leave(0, step=job.ids[0])
    zero, one, two = come_back(job)
    assert zero.bytes[OWN] and not any(back.bytes["peers"] for back in (zero, one, two))
    assert "holds step 1/10, not 1/30" in zero.problems


def test_no_rank_sends_or_receives_more_than_the_limit_at_once(tmp_path: Path) -> None:
    job = Job(apart(tmp_path))
    job.leave(0)
    zero, one, two = come_back(job, limit=3 * CHUNK)
    assert one.bytes["peers"] == two.bytes["peers"] > 6 * CHUNK
    assert max(zero.largest, one.largest, two.largest) <= 3 * CHUNK + 8


def test_a_rank_that_fails_keeps_nobody_waiting(tmp_path: Path) -> None:
    """F5: the error is kept until all ranks hear it; the others get what they came for."""

    class Failing(Reading):
        def deliver(self, job: ChunkJob, fill: Fill) -> Delivered | None:
            if len(self.lacking) < 6:
                raise MemoryError("no room")
            return super().deliver(job, fill)

    job = Job(apart(tmp_path))
    job.leave(0)
    zero, one, two = come_back(job, limit=2 * CHUNK, reading=lambda rank: Failing if rank == 1 else Reading)
    assert isinstance(one.received.error, MemoryError)
    assert zero.received.error is None and two.received.error is None
    assert two.bytes["peers"] == sum(want.shard.nbytes for want in job.wanted(2))


def test_a_single_process_asks_nobody(tmp_path: Path) -> None:
    job = Job(apart(tmp_path))
    reading = Reading(plan_chunks(job.parts, job.wanted(0)))
    received = from_peers(Alone(), reading, Describer(job.parts), None, job.ids[-1])
    assert (received.boxes, received.nbytes, received.error) == ([], 0, None)


def test_a_chunk_is_lacking_until_a_source_has_filled_it() -> None:
    store = MemoryStore()
    (id_,) = make_store(store, [{"w": np.arange(3000, dtype=np.float32)}], chunk=CHUNK)
    parts = read_parts(store, open_snapshot(store, id_).snapshot)
    (row,) = parts[0].shards
    reading = Reading(plan_chunks(parts, [Wanted(Shard(Leaf(row.leaf, row.cls, row.dtype, row.shape), row.as_box))]))
    first, *_ = reading.lacking
    assert reading.deliver(first, lambda _: False) is None and first in reading.lacking
    assert reading.deliver(first, lambda out: bool(len(out))) == [] and first not in reading.lacking
