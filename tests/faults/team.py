"""The ranks of one job as real `Writer`s side by side over one store, with a store of its own for each of them.

Time is shared and passes only while everybody sleeps, so that "waited ten minutes for a dead rank" is over at once,
and nobody is given up who is only slow.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ckpt.format.layout import lay_out
from ckpt.format.manifest import Part
from ckpt.format.names import RunId, SnapshotId
from ckpt.format.ownership import share_out
from ckpt.format.relayout import stored_already
from ckpt.format.shards import Box, Leaf, Shard, whole
from ckpt.history.clock import SystemClock
from ckpt.history.runs import ensure_store, identity, open_run
from ckpt.saving.job import Bytes, Failed, Outcome, Reference, Saved, SaveJob
from ckpt.saving.writer import Writer, WriterSettings
from recovery.assemble import Wanted
from recovery.read import open_snapshot, read_parts
from recovery.shards import read_shards
from storage_backends.base import Store
from tests.support.stores import Each, State, cut

CHUNK = 4096
WAIT = 600.0


class TeamClock:
    """The time of all ranks: it passes when everybody at work sleeps, and stands still else."""

    def __init__(self) -> None:
        self._news = threading.Condition()
        self._now = 1e6
        self._at_work = 0
        self._asleep: list[float] = []

    def begin(self, n: int) -> None:
        with self._news:
            self._at_work += n

    def leave(self) -> None:
        """One is done, or dead: nobody waits for it any more."""
        with self._news:
            self._at_work -= 1
            self._pass()

    def monotonic(self) -> float:
        return self._now

    def wall(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        with self._news:
            wake = self._now + seconds
            self._asleep.append(wake)
            self._pass()
            assert self._news.wait_for(lambda: self._now >= wake, 60), "a rank neither sleeps nor ends"
            self._asleep.remove(wake)

    def _pass(self) -> None:
        waiting = [wake for wake in self._asleep if wake > self._now]
        if waiting and len(waiting) == self._at_work:
            self._now = min(waiting)
            self._news.notify_all()


def drawn(ranks: int, attempt: int) -> State:
    """The state of one attempt: replicated, sharded by rows, of each rank its own; changing all over and hardly."""
    rng = np.random.default_rng(attempt)
    sparse = np.arange(2400, dtype=np.int64).reshape(48, 50)
    sparse[attempt % 48, :5] += attempt
    return {
        "moving": rng.standard_normal((60, 40), np.float32),
        "sparse": sparse,
        "still": np.arange(3000, dtype=np.float32),
        "rows": rng.standard_normal((50, 30), np.float32),
        "scale": np.array(attempt, np.float64),
        "own": Each(tuple(rng.standard_normal(1100 + 0 * rank).astype(np.float32) + rank for rank in range(ranks))),
    }


def _tables(state: State, ranks: int) -> list[list[Shard]]:
    """What each rank holds: "rows" is sharded, "own" per rank, all else replicated."""
    tables: list[list[Shard]] = [[] for _ in range(ranks)]
    for path, value in state.items():
        array = value.arrays[0] if isinstance(value, Each) else value
        assert isinstance(array, np.ndarray)
        leaf = Leaf(path, "parameter" if path in ("moving", "rows") else "tensor", array.dtype.name, array.shape)
        for rank in range(ranks):
            box = whole(leaf.shape)
            if path == "rows":
                start, stop = 50 * rank // ranks, 50 * (rank + 1) // ranks
                box = Box((start, 0), (stop - start, 30))
            tables[rank].append(Shard(leaf, box, isinstance(value, Each)))
    return tables


@dataclass
class Team:
    """One start of the job."""

    stores: Sequence[Store]
    run: RunId
    clock: TeamClock = field(default_factory=TeamClock)

    def __post_init__(self) -> None:
        self.ranks = len(self.stores)
        settings = WriterSettings(commit_wait=WAIT, workers=1, pack_limit=4096)
        self.writers = [Writer(store, self.clock, settings) for store in self.stores]
        owned = share_out(_tables(drawn(self.ranks, 0), self.ranks), CHUNK)
        self.layouts = [lay_out(shards, CHUNK) for shards in owned.owned]
        self.ownership = owned

    def save(self, step: int, attempt: int) -> list[Outcome]:
        """All ranks at once; the outcome of each."""
        state = drawn(self.ranks, attempt)
        outcomes: dict[int, Outcome] = {}

        def done(rank: int) -> Callable[[Outcome], None]:
            def tell(outcome: Outcome) -> None:
                outcomes[rank] = outcome
                self.clock.leave()

            return tell

        self.clock.begin(self.ranks)
        for rank, writer in enumerate(self.writers):
            job = SaveJob(
                SnapshotId(self.run, step), rank, self.ranks, self.layouts[rank], self._data(rank, state),
                {"attempt": b"%d" % attempt, "rank": b"%d" % rank}, {}, {}, self.ownership.digest, None,
                1e9 if rank == 0 else None, self.ownership.others[rank],
            )  # fmt: skip
            writer.submit(job, done(rank))
        for rank, writer in enumerate(self.writers):
            assert writer.wait(60), f"rank {rank} neither saved nor failed"
        return [outcomes[rank] for rank in range(self.ranks)]

    def _data(self, rank: int, state: State) -> Bytes:
        layout = self.layouts[rank]
        data = np.zeros(layout.nbytes, np.uint8)
        for region in layout.regions:
            raw = cut(state[region.shard.leaf.path], region.shard.box, rank)
            data[region.start : region.start + region.nbytes] = np.frombuffer(raw, np.uint8)
        return data

    def resume(self, store: Store, id_: SnapshotId) -> int:
        """Every rank leans on a snapshot, which is read and compared first. Its attempt."""
        parts = read_parts(store, open_snapshot(store, id_).snapshot)
        attempt = content(parts, store)
        for rank, writer in enumerate(self.writers):
            data = self._data(rank, drawn(self.ranks, attempt))
            stored = stored_already(parts, rank, self.layouts[rank], data)
            writer.adopt(Reference(id_, stored.layout, data, stored.table, stored.packs, stored.shared, stored.loans))
        return attempt

    def stop(self) -> None:
        for writer in self.writers:
            assert writer.stop(60)


def opened(store: Store, ranks: int, resumed_from: SnapshotId | None) -> RunId:
    """A new start of the job."""
    ensure_store(store)
    return open_run(store, SystemClock(), world_size=ranks, resumed_from=resumed_from, who=identity(None))


def content(parts: Mapping[int, Part], store: Store) -> int:
    """The attempt that these parts are of: all of them, and every byte and value of it, or AssertionError."""
    ranks = len(parts)
    values = {rank: {name: bytes(raw) for name, raw in part.values.items()} for rank, part in parts.items()}
    attempt = int(values[0]["attempt"])
    assert values == {rank: {"attempt": b"%d" % attempt, "rank": b"%d" % rank} for rank in range(ranks)}
    state = drawn(ranks, attempt)
    wanted = []
    for path, value in state.items():
        array = value.arrays[0] if isinstance(value, Each) else value
        assert isinstance(array, np.ndarray)
        cls = "parameter" if path in ("moving", "rows") else "tensor"
        shard = Shard(Leaf(path, cls, array.dtype.name, array.shape), whole(array.shape), isinstance(value, Each))
        wanted += [Wanted(shard, rank) for rank in range(ranks)] if shard.per_rank else [Wanted(shard)]
    read = dict(read_shards(store, parts, wanted, threads=1))
    for want in wanted:
        expected = cut(state[want.shard.leaf.path], want.shard.box, want.rank or 0)
        assert read[want].tobytes() == expected, f"attempt {attempt}: {want}"
    return attempt


def saved(outcomes: Sequence[Outcome]) -> list[bool]:
    assert all(isinstance(outcome, Saved | Failed) for outcome in outcomes)
    return [isinstance(outcome, Saved) for outcome in outcomes]
