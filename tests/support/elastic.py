"""A job without torch that changes its layout: real writers, one per rank, that lean on what was stored by others."""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ckpt.format.layout import Layout, lay_out
from ckpt.format.manifest import Part
from ckpt.format.names import RunId, SnapshotId
from ckpt.format.relayout import cut_along, old_boxes, stored_already
from ckpt.format.shards import Box, Leaf, Shard
from ckpt.history.clock import SystemClock
from ckpt.saving.job import Bytes, Failed, Outcome, Reference, Report, SaveJob
from ckpt.saving.writer import Writer, WriterSettings
from recovery.read import open_snapshot, read_parts
from storage_backends.base import Store
from tests.support.stores import Array, DirectWriter, cut

Deal = Callable[[Leaf, int], Sequence[Sequence[Box]]]
"""(leaf, ranks) → boxes by rank."""


@dataclass
class Elastic:
    """Every `start` is a new run with a layout of its own, leaning on the snapshot before.

    Attributes:
        classes: class of each leaf, by its path.
        last: the newest snapshot.
    """

    store: Store
    chunk: int
    classes: Mapping[str, str]
    last: SnapshotId | None = None
    generation: int = 0
    world_size: int = 0
    _writers: list[Writer] = field(default_factory=list)
    _layouts: list[Layout] = field(default_factory=list)

    def start(self, state: Mapping[str, Array], ranks: int, deal: Deal) -> None:
        """Come back with so many ranks, all that is stored being `state`."""
        self.stop()
        self.generation += 1
        run = RunId(self.generation, "0badcafe")
        DirectWriter(self.store, run=run, ranks=ranks).begin(resumed_from=self.last)
        parts = {} if self.last is None else read_parts(self.store, open_snapshot(self.store, self.last).snapshot)
        leaves = [Leaf(path, self.classes[path], a.dtype.name, a.shape) for path, a in state.items()]
        own = [[Shard(leaf, box) for leaf in leaves for box in deal(leaf, ranks)[rank]] for rank in range(ranks)]
        self._layouts = [lay_out(cut_along(shards, old_boxes(parts.values())), self.chunk) for shards in own]
        settings = WriterSettings(amplification=3.0, commit_wait=60.0, workers=1)
        self._writers = [Writer(self.store, SystemClock(), settings) for _ in range(ranks)]
        if self.last is not None:
            for rank, writer in enumerate(self._writers):
                data = self._data(rank, state)
                mine = rank if ranks == self.world_size else None
                s = stored_already(parts, mine, self._layouts[rank], data)
                writer.adopt(Reference(self.last, s.layout, data, s.table, s.packs, s.shared, s.loans))
        self.world_size = ranks

    def save(self, state: Mapping[str, Array]) -> list[Report]:
        """One step; what each rank says of it."""
        run = RunId(self.generation, "0badcafe")
        id_ = SnapshotId(run, 1 + (0 if self.last is None else self.last.step))
        outcomes = [queue.Queue[Outcome]() for _ in self._writers]
        for rank, writer in enumerate(self._writers):
            layout, data = self._layouts[rank], self._data(rank, state)
            time = 1e9 if rank == 0 else None
            job = SaveJob(id_, rank, self.world_size, layout, data, {}, {}, {}, "0" * 32, None, time)
            writer.submit(job, outcomes[rank].put)
        reports = []
        for told in outcomes:
            outcome = told.get(timeout=60)
            if isinstance(outcome, Failed):
                raise outcome.error
            reports.append(outcome.report)
        for writer in self._writers:
            assert writer.wait(60)
        self.last = id_
        return reports

    def stored(self, state: Mapping[str, Array]) -> int:
        """Save, and the bytes of blobs that this took."""
        return sum(report.stored for report in self.save(state))

    def parts(self) -> dict[int, Part]:
        """Of the newest snapshot."""
        assert self.last is not None
        return read_parts(self.store, open_snapshot(self.store, self.last).snapshot)

    def stop(self) -> None:
        for writer in self._writers:
            assert writer.stop(60)
        self._writers = []

    def _data(self, rank: int, state: Mapping[str, Array]) -> Bytes:
        layout = self._layouts[rank]
        data = np.zeros(layout.nbytes, np.uint8)
        for region in layout.regions:
            raw = cut(state[region.shard.leaf.path], region.shard.box)
            data[region.start : region.start + region.nbytes] = np.frombuffer(raw, np.uint8)
        return data
