"""What a node's mirrors hold of a snapshot: found by where it should lie, offered only if it is what the store says."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from ckpt.format.layout import lay_out
from ckpt.format.manifest import Part, chunk_digest
from ckpt.format.names import RunId, SnapshotId
from ckpt.format.shards import Box, Leaf, Shard
from ckpt.mirror.folders import store_identity
from ckpt.mirror.mirror import Mirror
from ckpt.mirror.records import describe
from recovery.assemble import ChunkJob, Wanted, plan_chunks
from recovery.mirrored import HeldChunk
from recovery.read import open_snapshot, read_parts
from recovery.spans import Describer, StoredChunk
from recovery.survey import Holdings, survey
from storage_backends.memory import MemoryStore
from tests.support.stores import DirectWriter, Each, Split, State, by_name, by_rows, cut

RANKS = 3
CHUNK = 4096
STORE = store_identity("s3://bucket/run7")


def state_at(step: int) -> State:
    """Rows that change, rows that do not, small leaves (24 kB of them), a scalar, and a value of each rank's own."""
    dice = np.random.default_rng(5)
    small = {f"small.{n:03d}": np.full(7, n + 1000.0 * step) for n in range(600)}
    return {
        "frozen.weight": dice.normal(size=(70, 100)).astype(np.float32),
        "weight": dice.normal(size=(64, 100)).astype(np.float32) + np.float32(step),
        "wide": dice.normal(size=(6, 4, 300)).astype(np.float32) * step,
        "running_mean": Each(tuple(np.full(1500, 10.0 * step + rank, np.float32) for rank in range(RANKS))),
        "count": np.int64(step).reshape(()),
        **small,
    }


@dataclass
class Node:
    """A store, and the mirrors of the ranks that saved to it. `held`: how mirrors split the state, if not as stored."""

    base: Path
    split: Split = by_rows
    held: Split | None = None
    run: RunId = field(default_factory=lambda: RunId(1, "0badcafe"))

    def __post_init__(self) -> None:
        self.store = MemoryStore()
        self.writer = DirectWriter(self.store, run=self.run, ranks=RANKS, chunk=CHUNK, split=self.split)
        self.writer.begin()
        self.mirrors = [Mirror(self.base, STORE, rank=rank, world_size=RANKS) for rank in range(RANKS)]
        self.references: list[np.ndarray | None] = [None] * RANKS

    def save(self, step: int, *, commit: bool = True, ranks: Iterable[int] = range(RANKS)) -> SnapshotId:
        """Capture into the mirrors of these ranks, store, and commit: then the mirrors' references move forward."""
        state, id_ = state_at(step), self.writer.step(step, state_at(step), commit=commit)
        for rank in ranks:
            shards = []
            for path, value in state.items():
                leaf = self.writer._leaf(path, value)
                if isinstance(value, Each):
                    shards.append(Shard(leaf, Box((0,), leaf.shape), per_rank=True))
                else:
                    shards += [Shard(leaf, box) for box in (self.held or self.split)(leaf, RANKS)[rank]]
            layout = lay_out(shards, CHUNK)
            data = self.mirrors[rank].free(self.references[rank], layout.nbytes)
            for region in layout.regions:
                raw = cut(state[region.shard.leaf.path], region.shard.box, rank)
                data[region.start : region.start + region.nbytes] = np.frombuffer(raw, np.uint8)
            self.mirrors[rank].finish(data, id_, describe(((r.shard, r.start) for r in layout.regions), layout.nbytes))
            if commit:
                self.references[rank] = data
        return id_

    def parts(self, id_: SnapshotId) -> dict[int, Part]:
        return read_parts(self.store, open_snapshot(self.store, id_).snapshot)

    def jobs(self, id_: SnapshotId) -> list[tuple[ChunkJob, StoredChunk]]:
        """Everything of a snapshot."""
        parts = self.parts(id_)
        wanted = [
            Wanted(
                Shard(Leaf(row.leaf, row.cls, row.dtype, row.shape), row.as_box, row.per_rank),
                rank if row.per_rank else None,
            )
            for rank, part in parts.items()
            for row in part.shards
        ]
        tell = Describer(parts)
        return [(job, tell.chunk(job)) for job in plan_chunks(parts, wanted).jobs]

    def survey(self, prefer: int | None = None) -> Holdings:
        return survey([self.base], STORE, prefer=prefer)

    def path(self, rank: int) -> Path:
        path = self.mirrors[rank].path
        assert path is not None
        return path


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path / "m")


def bytes_of(held: HeldChunk) -> np.ndarray:
    out = np.empty(held.chunk.nbytes, np.uint8)
    assert held.read(out)
    assert chunk_digest(held.chunk.dtype, out) == held.chunk.digest
    return out


def found(
    holdings: Holdings, jobs: Sequence[tuple[ChunkJob, StoredChunk]], id_: SnapshotId
) -> list[tuple[ChunkJob, HeldChunk]]:
    every = [(job, holdings.find(chunk, id_)) for job, chunk in jobs]
    there = [(job, held) for job, held in every if held is not None]
    for _, held in there:
        bytes_of(held)
    return there


def changed(path: Path, at: int, mask: int = 1) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ mask]))


def texts(holdings: Holdings) -> str:
    return "\n".join(map(str, holdings.problems))


def test_every_chunk_is_found_in_one_run_in_the_mirror_of_the_rank_that_stored_it(node: Node) -> None:
    node.save(5)
    id_ = node.save(6)
    jobs = node.jobs(id_)
    with node.survey() as holdings:
        there = found(holdings, jobs, id_)
        assert len(there) == len(jobs) > 40
        assert all(held.slot.rank == job.place.rank and held.slot.id == id_ for job, held in there)
        assert all(held.start is not None for _, held in there)
        assert holdings.problems == ()


def test_bundles_are_among_them_and_straddle_leaves(node: Node) -> None:
    id_ = node.save(5)
    spans = [len(chunk.spans) for _, chunk in node.jobs(id_)]
    assert max(spans) > 50
    assert any(span.start > 0 for _, chunk in node.jobs(id_) for span in chunk.spans)
    for _, chunk in node.jobs(id_):
        assert sum(s.stop - s.start for s in chunk.spans) == chunk.nbytes


def test_a_flipped_bit_costs_one_chunk_and_is_told(node: Node) -> None:
    """K1"""
    id_ = node.save(5)
    jobs = node.jobs(id_)
    with node.survey() as holdings:
        victim = next(
            held for job, held in found(holdings, jobs, id_) if job.place.rank == 1 and job.place.leaf == "weight"
        )
        at = victim.slot.start + (victim.start or 0) + 17
    changed(node.path(1), at)
    with node.survey() as holdings:
        missing = [(job, chunk) for job, chunk in jobs if holdings.find(chunk, id_) is None]
        assert len(missing) == 1 and missing[0][1] == victim.chunk
        (problem,) = holdings.problems
        assert problem.path == node.path(1)
        assert "rank 1, step 1/5" in problem.text and "1 chunks are not" in problem.text and "weight" in problem.text


def test_a_bit_that_flips_after_it_was_looked_at_is_noticed_when_it_is_read(node: Node) -> None:
    id_ = node.save(5)
    with node.survey() as holdings:
        _, held = found(holdings, node.jobs(id_), id_)[0]
        changed(held.slot.path, held.slot.start + (held.start or 0))
        assert not held.read(np.empty(held.chunk.nbytes, np.uint8))


def test_of_an_older_step_only_what_did_not_change_serves(node: Node) -> None:
    """K1"""
    node.save(5)
    id_ = node.save(6, ranks=[0, 2])
    jobs = node.jobs(id_)
    with node.survey() as holdings:
        there = {job.place for job, _ in found(holdings, jobs, id_)}
        lost = {job.place for job, _ in jobs} - there
        assert lost and all(place.rank == 1 and place.leaf != "frozen.weight" for place in lost)
        assert any(place.rank == 1 and place.leaf == "frozen.weight" for place in there)
        assert f"{node.path(1)}: holds step 1/5, not 1/6" in texts(holdings)
        assert texts(holdings).count("holds step") == 1 and "not what the store says" not in texts(holdings)


def test_a_survivor_one_step_ahead_of_the_last_commit_serves_from_its_other_slot(node: Node) -> None:
    id_ = node.save(5)
    node.save(6, commit=False)
    with node.survey() as holdings:
        assert {h.step for h in holdings.summary} == {5, 6}
        jobs = node.jobs(id_)
        there = found(holdings, jobs, id_)
        assert len(there) == len(jobs) and {held.slot.id.step for _, held in there} == {5}
        assert holdings.problems == ()


def test_another_runs_bytes_of_the_same_step_are_not_offered(node: Node, tmp_path: Path) -> None:
    """K1"""
    id_ = node.save(5)
    other = SnapshotId(RunId(1, "feedbeef"), 5)
    for rank in range(RANKS):
        node.mirrors[rank].finish(node.references[rank], other, describe((), 0))
    with node.survey() as holdings:
        assert found(holdings, node.jobs(id_), id_) == []
        assert {h.run for h in holdings.summary} == {"000001-feedbeef"}


def test_a_slot_that_was_being_filled_is_not_offered(node: Node) -> None:
    id_ = node.save(5)
    for rank in range(RANKS):
        node.mirrors[rank].free(None)  # as after a save that failed; slot 0 is filled again
    with node.survey() as holdings:
        assert found(holdings, node.jobs(id_), id_) == [] and holdings.summary == ()
        assert texts(holdings).count("slot 0 was being filled") == RANKS


def test_a_mirror_whose_rank_finished_no_save_is_told(node: Node) -> None:
    node.mirrors[0].free(None, 5000)
    with node.survey() as holdings:
        assert holdings.summary == () and texts(holdings) == f"{node.path(0)}: holds nothing: its rank finished no save"


@pytest.mark.parametrize("keep", [0, 100, 4096, 12_288, 20_000, 60_000, 100_000])
def test_a_cut_file_offers_what_is_left_or_nothing(node: Node, keep: int) -> None:
    """K1"""
    node.save(5)
    id_ = node.save(6)
    jobs = node.jobs(id_)
    os.truncate(node.path(1), keep)
    with node.survey() as holdings:
        there = found(holdings, jobs, id_)
        assert {job.place.rank for job, _ in there} >= {0, 2}
        assert len([1 for job, _ in there if job.place.rank != 1]) == len([1 for job, _ in jobs if job.place.rank != 1])
        assert len(there) < len(jobs) and str(node.path(1)) in texts(holdings)


def test_a_file_that_is_cut_while_it_is_read_is_no_signal(node: Node) -> None:
    id_ = node.save(5)
    with node.survey() as holdings:
        held = [held for job, held in found(holdings, node.jobs(id_), id_) if job.place.rank == 1]
        os.truncate(node.path(1), 0)
        assert not any(one.read(np.empty(one.chunk.nbytes, np.uint8)) for one in held)
        assert holdings.find(held[0].chunk, id_) is None and "not what the store says" in texts(holdings)


def test_another_stores_mirror_is_told(node: Node, tmp_path: Path) -> None:
    """K1"""
    id_ = node.save(5)
    other = store_identity("s3://bucket/run8")
    with survey([node.base], other) as holdings:
        assert holdings.slots == () and holdings.problems == ()
    (node.base / other).mkdir(0o700)
    moved = node.path(1).rename(node.base / other / node.path(1).name)
    with survey([node.base], other) as holdings:
        assert found(holdings, node.jobs(id_), id_) == []
        assert f"{moved}: is of another store: {STORE}" in texts(holdings)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's files")
def test_another_users_mirror_is_told_and_not_read(node: Node) -> None:
    id_ = node.save(5)
    os.chown(node.path(0), 12345, 12345)
    with node.survey() as holdings:
        assert {h.rank for h in holdings.summary} == {1, 2}
        assert "belongs to user 12345" in texts(holdings)
        assert all(held.slot.rank != 0 for _, held in found(holdings, node.jobs(id_), id_))
    os.chown(node.base, 12345, 12345)
    with node.survey() as holdings:
        assert holdings.slots == () and f"{node.base}: " in texts(holdings)


def test_a_link_is_told_and_not_followed(node: Node, tmp_path: Path) -> None:
    node.save(5)
    target = node.path(0).rename(tmp_path / "elsewhere")
    node.path(0).symlink_to(target)
    with node.survey() as holdings:
        assert {h.rank for h in holdings.summary} == {1, 2} and "symbolic link" in texts(holdings)


def test_no_folder_holds_nothing(tmp_path: Path) -> None:
    with survey([tmp_path / "nowhere", tmp_path / "nowhere"], STORE) as holdings:
        assert holdings.slots == holdings.problems == holdings.summary == ()


# --- other layouts -------------------------------------------------------------------------------------------------


def by_columns(leaf: Leaf, ranks: int) -> list[list[Box]]:
    """The last dimension dealt out; one-dimensional leaves and scalars as `by_name`."""
    if len(leaf.shape) < 2:
        return by_name(leaf, ranks)
    each = -(-leaf.shape[-1] // ranks)
    last = len(leaf.shape) - 1
    return [
        [
            Box(
                (*(0,) * last, rank * each),
                (*leaf.shape[:-1], min(each, leaf.shape[-1] - rank * each)),
            )
        ]
        for rank in range(ranks)
    ]


def uneven(leaf: Leaf, ranks: int) -> list[list[Box]]:
    """Rows 0:28, 28:29, 29:, which are no rows of the chunk grid; scalars to rank 2."""
    if not leaf.shape:
        return [[], [], [Box((), ())]]
    rows, rest = leaf.shape[0], leaf.shape[1:]
    edges = [0, min(28, rows), min(29, rows), rows]
    return [
        [Box((a, *(0,) * len(rest)), (b - a, *rest))] for a, b in pairwise(edges)
    ]  # fmt: skip


@pytest.mark.parametrize("held", [by_columns, uneven, by_name])
@pytest.mark.parametrize("stored", [by_rows, by_columns])
def test_whatever_the_layout_the_node_gives_all_it_holds(tmp_path: Path, stored: Split, held: Split) -> None:
    """E2: mirrors of replicated state are split over a node's ranks otherwise than the store's parts."""
    node = Node(tmp_path / "m", stored, held)
    id_ = node.save(5)
    jobs = node.jobs(id_)
    with node.survey() as holdings:
        there = found(holdings, jobs, id_)
        assert len(there) == len(jobs), {job.place for job, _ in jobs} - {job.place for job, _ in there}
        assert holdings.problems == ()
        if held is not stored:
            assert any(held.start is None for _, held in there), "all lay in one run: this test proves nothing"


def test_a_per_rank_value_is_taken_from_that_rank_alone(node: Node) -> None:
    id_ = node.save(5, ranks=[0, 2])
    with node.survey() as holdings:
        ranks = {
            (job.place.rank, held.slot.rank)
            for job, held in found(holdings, node.jobs(id_), id_)
            if job.place.leaf == "running_mean"
        }
        assert ranks == {(0, 0), (2, 2)}


def test_the_preferred_ranks_mirror_comes_first(tmp_path: Path) -> None:
    def everywhere(leaf: Leaf, ranks: int) -> list[list[Box]]:
        return [[Box((0,) * len(leaf.shape), leaf.shape)] for _ in range(ranks)]

    node = Node(tmp_path / "m", by_rows, everywhere)
    id_ = node.save(5)
    shared = [(job, chunk) for job, chunk in node.jobs(id_) if job.place.leaf != "running_mean"]
    for prefer in range(RANKS):
        with node.survey(prefer) as holdings:
            assert {held.slot.rank for _, held in found(holdings, shared, id_)} == {prefer}
    victim = next(chunk for job, chunk in shared if job.place.leaf == "weight")
    with node.survey(1) as holdings:
        good = holdings.find(victim, id_)
        assert good is not None
        changed(good.slot.path, good.slot.start + (good.start or 0))
        other = holdings.find(victim, id_)
        assert other is not None and other.slot.rank == 0, "one that turns out bad is replaced by the next"
        assert len(holdings.problems) == 1


def test_in_parallel_as_one_by_one(node: Node) -> None:
    id_ = node.save(5, ranks=[0, 1])
    chunks = [chunk for _, chunk in node.jobs(id_)]
    with node.survey() as holdings:
        one_by_one = {chunk: holdings.find(chunk, id_) for chunk in chunks}
        parallel = dict(holdings.find_all(chunks, id_, threads=4))
    assert parallel == one_by_one and None in parallel.values() and len(set(parallel.values())) > 10


def test_the_summary_says_who_holds_which_step(node: Node) -> None:
    node.save(5)
    node.save(6, ranks=[0])
    with node.survey() as holdings:
        summary = holdings.summary
        assert [(h.rank, h.step) for h in summary] == [(0, 5), (0, 6), (1, 5), (2, 5)]
        assert all(h.run == str(node.run) and h.world_size == RANKS and h.complete for h in summary)
        assert summary[0].layout == summary[1].layout != summary[2].layout
        slot = holdings.of(SnapshotId(node.run, 6), 0)
        assert slot is not None and slot.path == node.path(0) and slot.record.nbytes == summary[1].nbytes
        assert holdings.of(SnapshotId(node.run, 6), 1) is None


def test_a_slot_whose_layout_is_damaged_is_not_complete(node: Node) -> None:
    id_ = node.save(5)
    with node.survey() as holdings:
        slot = holdings.of(id_, 1)
        assert slot is not None
    changed(node.path(1), slot.record.layout[0] + 9)
    with node.survey() as holdings:
        assert [(h.rank, h.complete) for h in holdings.summary] == [(0, True), (1, False), (2, True)]
        assert holdings.of(id_, 1) is None and "a layout that is not what" in texts(holdings)
        assert all(job.place.rank != 1 for job, _ in found(holdings, node.jobs(id_), id_))


def test_whatever_byte_is_damaged_nothing_wrong_is_offered(node: Node) -> None:
    """K1"""
    node.save(5)
    id_ = node.save(6)
    jobs = [(job, chunk) for job, chunk in node.jobs(id_) if job.place.rank == 1]
    size = node.path(1).stat().st_size
    whole = node.path(1).read_bytes()
    dice = random.Random(7)
    short = 0
    for _ in range(60):
        at = dice.choice([dice.randrange(4 * 4096), dice.randrange(size)])
        changed(node.path(1), at, 1 << dice.randrange(8))
        with node.survey() as holdings:
            there = found(holdings, jobs, id_)  # checks the bytes of each
            assert len(there) == len(jobs) or holdings.problems
            short += len(there) < len(jobs)
        node.path(1).write_bytes(whole)
    assert short > 5, "no damage did harm: this test proves nothing"


def test_no_descriptor_is_left_open(node: Node) -> None:
    node.save(5)
    os.truncate(node.path(1), 100)
    before = len(os.listdir("/proc/self/fd"))
    holdings = node.survey()
    assert len(os.listdir("/proc/self/fd")) == before + RANKS
    holdings.close()
    holdings.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_thousands_of_small_leaves_are_read_in_few_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """M11 for mirrors: reads do not depend on the number of tensors."""
    monkeypatch.setitem(
        globals(), "state_at", lambda step: {f"leaf.{n:05d}": np.full(4, n, np.float32) for n in range(4000)}
    )
    node = Node(tmp_path / "m", by_name)
    id_ = node.save(5)
    jobs = node.jobs(id_)
    real, calls = os.preadv, []
    monkeypatch.setattr(os, "preadv", lambda *a: calls.append(a) or real(*a))
    with node.survey() as holdings:
        assert sum(len(chunk.spans) for _, chunk in jobs) >= 4000
        assert all(holdings.find(chunk, id_) is not None for _, chunk in jobs)
    assert len(calls) == len(jobs) < 100
