"""Hand-made saves for the tests of the writer, in numpy, and a reader of a few lines that shares nothing with it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckpt.format.codec import Codec
from ckpt.format.layout import Layout, lay_out
from ckpt.format.manifest import Chunk, Part, Snapshot, chunk_digest, digest64, read_part, unseal
from ckpt.format.names import SNAPSHOTS, RunId, SnapshotId, SnapshotName
from ckpt.format.shards import DTYPES, Box, Leaf, Shard, cuts, whole
from ckpt.history.clock import SystemClock
from ckpt.saving.job import Bytes, Failed, Outcome, Saved, SaveJob
from ckpt.saving.writer import Writer, WriterSettings
from storage_backends.base import Store

RUN = RunId(1, "0badcafe")


@dataclass(frozen=True)
class Tensor:
    """A leaf as bytes: numpy has no bfloat16, so the dtype is a name and the array holds the bits."""

    array: NDArray[Any]
    dtype: str
    cls: str = "parameter"

    def leaf(self, path: str) -> Leaf:
        return Leaf(path, self.cls, self.dtype, self.array.shape)


State = Mapping[str, Tensor]


def fp32(array: NDArray[Any], cls: str = "parameter") -> Tensor:
    return Tensor(np.asarray(array, dtype=np.float32), "float32", cls)


def bf16(bits: NDArray[Any], cls: str = "parameter") -> Tensor:
    return Tensor(np.asarray(bits, dtype=np.uint16), "bfloat16", cls)


def layout_of(state: State, chunk: int) -> Layout:
    leaves = [tensor.leaf(path) for path, tensor in state.items()]
    return lay_out([Shard(leaf, whole(leaf.shape)) for leaf in leaves], chunk)


def bytes_of(state: State, layout: Layout) -> Bytes:
    data = np.zeros(layout.nbytes, dtype=np.uint8)
    for region in layout.regions:
        raw = np.frombuffer(state[region.shard.leaf.path].array.tobytes(), dtype=np.uint8)
        data[region.start : region.start + region.nbytes] = raw
    return data


def job_of(state: State, step: int, *, run: RunId = RUN, chunk: int = 4096, layout: Layout | None = None) -> SaveJob:
    layout = layout or layout_of(state, chunk)
    return SaveJob(
        SnapshotId(run, step), 0, 1, layout, bytes_of(state, layout), {"epoch": b"3"}, {}, {}, "0" * 32, None, 0.0
    )  # fmt: skip


@dataclass
class Saver:
    """A writer of one rank, one save at a time, on a store."""

    store: Store
    settings: WriterSettings = field(default_factory=lambda: WriterSettings(workers=1, commit_wait=5.0))
    chunk: int = 4096
    run: RunId = RUN

    def __post_init__(self) -> None:
        self.writer = Writer(self.store, SystemClock(), self.settings)

    def start(self, job: SaveJob) -> Callable[[], Outcome]:
        """Submit, and return what waits for the outcome."""
        outcomes: list[Outcome] = []
        told = threading.Event()

        def done(outcome: Outcome) -> None:
            outcomes.append(outcome)
            told.set()

        self.writer.submit(job, done)

        def outcome() -> Outcome:
            assert told.wait(60), "no outcome within a minute"
            assert self.writer.wait(60)
            assert len(outcomes) == 1
            return outcomes[0]

        return outcome

    def save(self, state: State, step: int) -> Outcome:
        """Store a state, keeping the layout object while the leaves are the same, as the front door does."""
        reference = self.writer.reference
        layout = layout_of(state, self.chunk)
        if reference is not None and reference.layout == layout:
            layout = reference.layout
        return self.start(job_of(state, step, run=self.run, layout=layout))()

    def saved(self, state: State, step: int) -> Saved:
        outcome = self.save(state, step)
        if isinstance(outcome, Failed):
            raise outcome.error
        return outcome

    def failed(self, state: State, step: int) -> Failed:
        outcome = self.save(state, step)
        assert isinstance(outcome, Failed), f"step {step} was saved"
        return outcome


def snapshots(store: Store) -> dict[SnapshotId, Snapshot]:
    """All that are listed."""
    found = {}
    for entry in store.list(SNAPSHOTS):
        name = SnapshotName.parse(entry.key)
        assert name is not None, entry.key
        found[name.id] = unseal(store.get(entry.key), Snapshot, key=entry.key)
    return found


def part_of(store: Store, snapshot: Snapshot, rank: int = 0) -> Part:
    name = snapshot.parts[rank]
    return read_part(store.get(name.key), key=name.key, name=name)


def rebuild_chunk(store: Store, chunk: Chunk, size: int, dtype: str) -> Bytes:
    """Base first, every digest checked."""
    base: Bytes | None = None
    for blob in chunk.blobs:
        data = store.get_range(blob.pack, blob.start, blob.stop)
        assert digest64(data) == blob.digest
        out = np.empty(size, dtype=np.uint8)
        Codec().decode(blob.kind, data, base, out, DTYPES[dtype])
        base = out
    assert base is not None
    assert chunk_digest(dtype, base) == chunk.digest
    return base


def rebuild(store: Store, snapshot: Snapshot) -> dict[str, bytes]:
    """Leaf path → bytes, from the store alone."""
    part = part_of(store, snapshot)
    bundles = []
    for bundle in part.bundles:
        shape, size = (bundle.length,), DTYPES[bundle.dtype].size
        pieces = cuts(shape, whole(shape), size, part.chunk)
        chunks = part.chunks(bundle)
        bundles.append(
            b"".join(
                rebuild_chunk(store, c, p.stop - p.start, bundle.dtype).tobytes()
                for c, p in zip(chunks, pieces, strict=True)
            )
        )
    leaves = {}
    for row in part.shards:
        size = DTYPES[row.dtype].size
        if row.bundle is not None:
            number, first = row.bundle
            leaves[row.leaf] = bundles[number][first * size : (first + Box(*row.box).numel) * size]
            continue
        pieces = cuts(row.shape, row.as_box, size, part.chunk)
        chunks = part.chunks(row)
        leaves[row.leaf] = b"".join(
            rebuild_chunk(store, c, p.stop - p.start, row.dtype).tobytes() for c, p in zip(chunks, pieces, strict=True)
        )
    return leaves


def holds(store: Store, snapshot: Snapshot, state: State) -> bool:
    """Whether a snapshot rebuilds bit-exactly to a state."""
    return rebuild(store, snapshot) == {path: tensor.array.tobytes() for path, tensor in state.items()}


def chunks_of(store: Store, snapshot: Snapshot) -> list[Chunk]:
    """All chunks of a snapshot, bundles first."""
    part = part_of(store, snapshot)
    return [c for row in (*part.bundles, *part.shards) for c in part.chunks(row)]


def read_cost(store: Store, snapshot: Snapshot) -> tuple[int, int]:
    """Blob bytes that restoring reads, and those of its keyframes alone."""
    distinct = {c.digest: c for c in chunks_of(store, snapshot)}.values()
    return sum(b.size for c in distinct for b in c.blobs), sum(c.blobs[0].size for c in distinct)
