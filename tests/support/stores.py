"""A plain, direct writer of stores: no policy, no threads, no torch. Tests say exactly which blobs a chunk has.

    ids = make_store(store, [{"w": np.arange(6.0)}, {"w": np.arange(6.0) + 1}], ranks=3)

Each state becomes a step (10, 20, …). The first is all keyframes; later ones re-use unchanged chunks and store the
changed ones as deltas (`deltas=False`: as keyframes). Codec kinds take turns, so that a store of some size has all of
them.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ckpt.format.codec import KINDS, NEEDS_BASE, Codec
from ckpt.format.layout import Layout, Piece, lay_out
from ckpt.format.manifest import (
    FORMAT,
    Blob,
    Chunk,
    PartHead,
    PartRef,
    RunDoc,
    Snapshot,
    Totals,
    chunk_digest,
    digest64,
    digest128,
    read_part,
    seal,
    unseal,
    write_part,
)
from ckpt.format.names import PackName, PartName, RunId, SnapshotId, SnapshotName, run_key
from ckpt.format.pack import PackBuilder
from ckpt.format.parts import encode_part
from ckpt.format.shards import DEFAULT_CHUNK, DTYPES, Box, Leaf, Shard, whole
from ckpt.history.clock import SystemClock
from ckpt.history.runs import ensure_store
from ckpt.saving.job import Failed, Outcome, SaveJob
from ckpt.saving.writer import Writer, WriterSettings
from storage_backends.base import Store

RUN = RunId(1, "0badcafe")
Array = NDArray[Any]
Split = Callable[[Leaf, int], Sequence[Sequence[Box]]]


@dataclass(frozen=True)
class Raw:
    """A leaf of a dtype that numpy does not know: its bytes, and what they are."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True)
class Each:
    """A per-rank leaf: one array for each rank."""

    arrays: tuple[Array, ...]


State = Mapping[str, "Array | Raw | Each"]


def by_rows(leaf: Leaf, ranks: int) -> list[list[Box]]:
    """Rows dealt out as evenly as FSDP does (the last ranks may have none); scalars to rank 0."""
    if not leaf.shape:
        return [[whole(())]] + [[] for _ in range(ranks - 1)]
    rows = leaf.shape[0]
    each = -(-rows // ranks)
    boxes = []
    for rank in range(ranks):
        start, stop = min(rank * each, rows), min((rank + 1) * each, rows)
        boxes.append([Box((start,) + (0,) * (len(leaf.shape) - 1), (stop - start, *leaf.shape[1:]))])
    return boxes


@dataclass
class _Rank:
    """What one rank wrote last: the next step's deltas lean on it."""

    layout: Layout
    data: NDArray[np.uint8]
    table: tuple[Chunk, ...]
    sizes: dict[str, int]


@dataclass
class DirectWriter:
    """Writes steps of one run, one after the other. `replicated`: every rank held all of the state, and needs all
    parts to come back; else each held what its own part says."""

    store: Store
    run: RunId = RUN
    ranks: int = 1
    chunk: int = DEFAULT_CHUNK
    split: Split = by_rows
    deltas: bool = True
    blobs_per_pack: int = 64
    classes: Mapping[str, str] = field(default_factory=dict)
    replicated: bool = True
    last: SnapshotId | None = None
    _held: dict[int, _Rank] = field(default_factory=dict)
    _codec: Codec = field(default_factory=Codec)
    _turn: int = 0

    def begin(self, resumed_from: SnapshotId | None = None) -> None:
        """store.json, and the run's own document."""
        ensure_store(self.store)
        document = RunDoc(
            FORMAT, str(self.run), self.ranks, "here", 1, "0", "boot", "0", None, 0.0,
            None if resumed_from is None else str(resumed_from), {"incremental-ckpt": "0"},
        )  # fmt: skip
        self.store.put(run_key(self.run), seal(document))

    def step(
        self,
        step: int,
        state: State,
        *,
        values: Sequence[Mapping[str, bytes]] | None = None,
        aliases: Mapping[str, str] | None = None,
        commit: bool = True,
    ) -> SnapshotId:
        """Write one step. `values`: for each rank, name → tagged JSON. Without `commit` it leaves a crash's debris."""
        id_ = SnapshotId(self.run, step)
        leaves = {path: self._leaf(path, value) for path, value in state.items()}
        refs, held, stored, size, packs = [], {}, {}, 0, {}
        for rank in range(self.ranks):
            shards = self._shards(leaves, state, rank)
            layout = lay_out(shards, self.chunk)
            data = self._fill(layout, state, rank)
            table, sizes, by_kind = self._encode(id_, rank, layout, data)
            others = tuple(r for r in range(self.ranks) if r != rank) if self.replicated else ()
            head = PartHead(
                self.run, step, self.ranks, rank, digest128(b"ownership"), self.last, 1e9 if rank == 0 else None,
                {"loss": 1.5} if rank == 0 else None, by_kind, aliases or {}, {}, (values or [{}] * self.ranks)[rank],
                others=others,
            )  # fmt: skip
            part = write_part(head, layout, table, sizes, lambda: None)
            key = PartName(id_, rank).key
            self.store.put(key, part)
            refs.append(PartRef(key, len(part), digest128(part)))
            held[rank] = _Rank(layout, data, table, sizes)
            size += sum(r.nbytes for r in layout.regions)
            for kind, n in by_kind.items():
                stored[str(kind)] = stored.get(str(kind), 0) + n
            packs.update({key: sizes[key] for key in {b.pack for c in table for b in c.blobs}})
        if commit:
            snapshot = Snapshot(
                FORMAT, str(self.run), step, self.ranks, 0, tuple(refs), None if self.last is None else str(self.last),
                tuple(sorted(packs.items())), Totals(sum(stored.values()), size, stored), {"loss": 1.5}, 1e9,
            )  # fmt: skip
            self.store.put(SnapshotName(id_).key, seal(snapshot))
            self.last, self._held = id_, held
        return id_

    def _leaf(self, path: str, value: Array | Raw | Each) -> Leaf:
        cls = self.classes.get(path, "array" if not isinstance(value, Raw) else "tensor")
        match value:
            case Raw(dtype, shape, _):
                return Leaf(path, cls, dtype, shape)
            case Each(arrays):
                return Leaf(path, cls, arrays[0].dtype.name, arrays[0].shape)
            case _:
                return Leaf(path, cls, value.dtype.name, value.shape)

    def _shards(self, leaves: Mapping[str, Leaf], state: State, rank: int) -> list[Shard]:
        shards = []
        for path, leaf in leaves.items():
            if isinstance(state[path], Each):
                shards.append(Shard(leaf, whole(leaf.shape), per_rank=True))
            else:
                shards.extend(Shard(leaf, box) for box in self.split(leaf, self.ranks)[rank])
        return shards

    def _fill(self, layout: Layout, state: State, rank: int) -> NDArray[np.uint8]:
        data = np.zeros(layout.nbytes, np.uint8)
        for region in layout.regions:
            box, value = region.shard.box, state[region.shard.leaf.path]
            data[region.start : region.start + region.nbytes] = np.frombuffer(cut(value, box, rank), np.uint8)
        return data

    def _encode(
        self, id_: SnapshotId, rank: int, layout: Layout, data: NDArray[np.uint8]
    ) -> tuple[tuple[Chunk, ...], dict[str, int], dict[int, int]]:
        old = self._held.get(rank)
        known = {} if old is None else {_place(p): (p, c) for p, c in zip(old.layout.pieces, old.table, strict=True)}
        table: list[Chunk | None] = [None] * len(layout.pieces)
        sizes = {} if old is None else dict(old.sizes)
        by_kind: dict[int, int] = {}
        builder, waiting, numbers = PackBuilder(), [], 0

        def close() -> None:
            nonlocal builder, waiting, numbers
            if not waiting:
                return
            pack = builder.finish()
            key = PackName(id_, rank, numbers, pack.digest).key
            self.store.put(key, pack.data)
            sizes[key] = len(pack.data)
            for (n, chain, kind, digest, blob_digest), (start, stop) in zip(waiting, pack.ranges, strict=True):
                table[n] = Chunk(digest, (*chain, Blob(key, start, stop, kind, blob_digest)))
            builder, waiting, numbers = PackBuilder(), [], numbers + 1

        for n, piece in enumerate(layout.pieces):
            new = data[piece.start : piece.stop]
            digest = chunk_digest(piece.dtype, new)
            was = known.get(_place(piece))
            if was is not None and was[1].digest == digest:
                table[n] = was[1]
                continue
            chain: tuple[Blob, ...] = ()
            base = base_digest = None
            if was is not None and self.deltas and old is not None:
                chain, base_digest = was[1].blobs, was[1].digest
                base = old.data[was[0].start : was[0].stop]
            kinds = [k for k in KINDS if (k in NEEDS_BASE) == (base is not None)]
            kind = kinds[self._turn % len(kinds)]
            self._turn += 1
            blob = self._codec.encode(kind, new, base, DTYPES[piece.dtype])
            builder.add(
                blob, kind=kind, digest=digest64(blob), chunk_digest=digest, dtype=piece.dtype, base_digest=base_digest
            )  # fmt: skip
            waiting.append((n, chain, kind, digest, digest64(blob)))
            by_kind[kind] = by_kind.get(kind, 0) + len(blob)
            if len(waiting) == self.blobs_per_pack:
                close()
        close()
        assert all(c is not None for c in table)
        return tuple(c for c in table if c is not None), sizes, by_kind


def _place(piece: Piece) -> tuple[object, ...]:
    return piece.name, piece.cls, piece.dtype, piece.box, piece.stop - piece.start


def by_name(leaf: Leaf, ranks: int) -> list[list[Box]]:
    """Every leaf whole on one rank: as small replicated leaves are dealt out."""
    owner = sum(leaf.path.encode()) % ranks
    return [[whole(leaf.shape)] if rank == owner else [] for rank in range(ranks)]


def cut(value: Array | Raw | Each, box: Box, rank: int = 0) -> bytes:
    """The row-major bytes of a box of a leaf."""
    if isinstance(value, Each):
        value = value.arrays[rank]
    if isinstance(value, Raw):
        size = DTYPES[value.dtype].size
        array = np.frombuffer(value.data, np.dtype(f"V{size}")).reshape(value.shape)
    else:
        array = value
    where = tuple(slice(a, a + n) for a, n in zip(box.offsets, box.lengths, strict=True))
    return np.ascontiguousarray(array[where]).tobytes()


def make_store(
    store: Store, states: Sequence[State], *, values: Sequence[Mapping[str, bytes]] | None = None, **settings: Any
) -> list[SnapshotId]:
    """A store with one run and one committed step (10, 20, …) per state; `settings` are those of `DirectWriter`."""
    writer = DirectWriter(store, **settings)
    writer.begin()
    return [writer.step(10 * (n + 1), state, values=values) for n, state in enumerate(states)]


def repeated(store: Store, id_: SnapshotId, steps: Iterable[int]) -> None:
    """The same state again at these steps, as saves that stored nothing: a long history in a short time."""
    key = SnapshotName(id_).key
    snapshot = unseal(store.get(key), Snapshot, key=key)
    parts = [read_part(store.get(ref.key), key=ref.key) for ref in snapshot.parts]
    for step in steps:
        refs = []
        for part in parts:
            data = encode_part(msgspec.structs.replace(part, step=step, stored={}))
            name = PartName(SnapshotId(id_.run, step), part.rank).key
            store.put(name, data)
            refs.append(PartRef(name, len(data), digest128(data)))
        again = msgspec.structs.replace(
            snapshot, step=step, parts=tuple(refs), totals=Totals(0, snapshot.totals.size, {})
        )
        store.put(SnapshotName(again.id).key, seal(again))


def written_store(
    store: Store,
    states: Sequence[State],
    *,
    ranks: int = 1,
    chunk: int = DEFAULT_CHUNK,
    split: Split = by_rows,
    amplification: float = 3.0,
) -> list[SnapshotId]:
    """Like `make_store`, but by the real `Writer`s, one per rank side by side, with all their policy."""
    plain = DirectWriter(store, ranks=ranks, chunk=chunk, split=split)
    plain.begin()
    settings = WriterSettings(amplification=amplification, commit_wait=60.0, workers=1)
    writers = [Writer(store, SystemClock(), settings) for _ in range(ranks)]
    layouts: list[Layout] = []
    ids = []
    for n, state in enumerate(states):
        id_ = SnapshotId(plain.run, 10 * (n + 1))
        leaves = {path: plain._leaf(path, value) for path, value in state.items()}
        if not layouts:
            layouts = [lay_out(plain._shards(leaves, state, rank), chunk) for rank in range(ranks)]
        outcomes: queue.Queue[Outcome] = queue.Queue()
        for rank, writer in enumerate(writers):
            data = plain._fill(layouts[rank], state, rank)
            job = SaveJob(
                id_, rank, ranks, layouts[rank], data, {}, {}, {}, "0" * 32, None, 1e9 if rank == 0 else None
            )  # fmt: skip
            writer.submit(job, outcomes.put)
        for _ in writers:
            outcome = outcomes.get(timeout=60)
            if isinstance(outcome, Failed):
                raise outcome.error
        for writer in writers:
            assert writer.wait(60)
        ids.append(id_)
    for writer in writers:
        assert writer.stop(60)
    return ids


def drifting(steps: int, *, seed: int = 0, rows: int = 96) -> list[dict[str, Array]]:
    """States that change as training does: a matrix in which everything moves, one that hardly does, one that stays,
    and small leaves. With `chunk=4096` it is many chunks, with three ranks and a few steps a store of all kinds."""
    rng = np.random.default_rng(seed)
    state: dict[str, Array] = {
        "model.moving": rng.standard_normal((rows, 64), np.float32),
        "model.sparse": rng.integers(0, 1000, (rows, 32), np.int32),
        "model.still": rng.standard_normal((rows, 48)).astype(np.float16),
        "model.bias": rng.standard_normal(17, np.float32),
        "model.scale": np.array(1.0, np.float64),
        "step": np.array(0, np.int64),
    }
    states = [state]
    for n in range(1, steps):
        state = {path: array.copy() for path, array in state.items()}
        state["model.moving"] += rng.standard_normal((rows, 64), np.float32) * np.float32(1e-4)
        state["model.sparse"][rng.integers(0, rows, 5), rng.integers(0, 32, 5)] += 1
        state["model.bias"][n % 17] += 1
        state["step"] = np.array(n, np.int64)
        states.append(state)
    return states


def flipped(store: Store, key: str, bit: int) -> None:
    """Damage that is damage: exactly one bit of one object changes."""
    data = bytearray(store.get(key))
    data[bit // 8] ^= 1 << (bit % 8)
    store.put(key, bytes(data))
