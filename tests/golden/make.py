"""Write the golden store: ``python -m tests.golden.make`` writes tests/golden/v1 and v1-expected.json anew.

Once a version is released its store is never written again: what it wrote must be read for ever. A later format gets a
folder of its own.

Three runs: A by the real `Writer`s of three ranks side by side; B, resumed from A's second step, in which every chunk
has the codec kind that it is made for; C, resumed from B on two ranks, whose chunks are cut out of B's.
"""

from __future__ import annotations

import json
import queue
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ckpt.format import values
from ckpt.format.codec import PLANES, RAW, SPARSE, SUB, XOR, ZSTD, Codec
from ckpt.format.layout import Layout, Piece, lay_out
from ckpt.format.manifest import (
    FORMAT,
    Alive,
    Blob,
    Chunk,
    PartHead,
    PartRef,
    PinDoc,
    PruneDoc,
    RunDoc,
    chunk_digest,
    digest64,
    digest128,
    read_part,
    seal,
    write_part,
)
from ckpt.format.names import (
    PackName,
    PartName,
    RunId,
    SnapshotId,
    SnapshotName,
    alive_key,
    pin_key,
    prune_key,
    run_key,
)
from ckpt.format.pack import PackBuilder
from ckpt.format.shards import DTYPES, Leaf, Shard, whole
from ckpt.history.assemble import build_snapshot
from ckpt.history.clock import SystemClock
from ckpt.history.runs import ensure_store
from ckpt.saving.job import Failed, Outcome, SaveJob
from ckpt.saving.writer import Writer, WriterSettings
from storage_backends.base import Store
from storage_backends.local import LocalStore

from . import source
from .source import CHUNK, State

HERE = Path(__file__).parent
STORE, EXPECTED = HERE / "v1", HERE / "v1-expected.json"

A, B, C = RunId(1, "00c0ffee"), RunId(2, "0badcafe"), RunId(3, "deadbeef")
A_CHUNK = 2048
TIME = 1.75e9
METRICS = {"loss": 1.5, "big": str(2**60), "nan": "nan"}
OWNERSHIP = digest128(b"golden")


def make(folder: Path) -> dict[str, Any]:
    """Write the store; returns what is expected of it, computed without a look at it."""
    store = LocalStore(folder)
    ensure_store(store)
    expected: dict[str, Any] = {}

    begin(store, A, 3, None)
    steps = source.training()
    for id_, state in zip(by_writers(store, steps), steps, strict=True):
        expected[str(id_)] = source.expectation(state)
    # As a compaction would do it: a step once more, all of it keyframes.
    Author(store, chunk=A_CHUNK, revision=1).save(SnapshotId(A, 20), steps[1])

    begin(store, B, 3, SnapshotId(A, 20))
    author = Author(store)
    for step, state in zip((30, 40), source.everything(), strict=True):
        author.save(SnapshotId(B, step), state)
        expected[str(SnapshotId(B, step))] = source.expectation(state)
    begin(store, C, 2, SnapshotId(B, 40))
    state = source.fewer_ranks(state)
    author.save(SnapshotId(C, 50), state)
    expected[str(SnapshotId(C, 50))] = source.expectation(state)

    store.put(pin_key("best"), seal(PinDoc(FORMAT, "best", str(SnapshotId(A, 20)))))
    store.put(prune_key("0123456789abcdef"), seal(PruneDoc(FORMAT, (str(SnapshotId(A, 5)),), ("packs/gone",))))
    for foreign in ("README.txt", "snapshots/notes.txt", "packs/other.safetensors", "parts/.tmp-0123456789abcdef"):
        (folder / foreign).write_bytes(b"not one of ours\n")
    return expected


def begin(store: Store, run: RunId, world_size: int, resumed_from: SnapshotId | None) -> None:
    """A run's documents. By hand, because the real ones hold this machine's name and the time of day."""
    resumed = None if resumed_from is None else str(resumed_from)
    document = RunDoc(
        FORMAT, str(run), world_size, "host", 17, "12345", "boot", "4026531836", None, TIME, resumed, {"torch": "2.13"}
    )  # fmt: skip
    store.put(run_key(run), seal(document))
    store.put(alive_key(run), seal(Alive(FORMAT, str(run), 7, True, 10.0)))


def shards_of(state: State, rank: int) -> dict[Shard, bytes]:
    """What a rank stores of a state: shard → its bytes."""
    shards = {}
    for path, leaf in state.leaves.items():
        for box in state.of_rank(path, rank):
            shards[Shard(Leaf(path, leaf.cls, leaf.dtype, leaf.shape), box)] = leaf.cut(box)
    for path, leaf in state.per_rank[rank].items():
        shards[Shard(Leaf(path, leaf.cls, leaf.dtype, leaf.shape), whole(leaf.shape), True)] = leaf.data
    return shards


def filled(layout: Layout, shards: dict[Shard, bytes]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    data = np.zeros(layout.nbytes, np.uint8)
    for region in layout.regions:
        data[region.start : region.start + region.nbytes] = np.frombuffer(shards[region.shard], np.uint8)
    return data


def texts(state: State, rank: int) -> dict[str, bytes]:
    return {name: values.encode(value, name) for name, value in state.values[rank].items()}


def by_writers(store: Store, states: Sequence[State]) -> Iterator[SnapshotId]:
    """Steps 10, 20, … of run A, by one real `Writer` per rank."""
    settings = WriterSettings(amplification=3.0, commit_wait=60.0, workers=1)
    writers = [Writer(store, SystemClock(), settings) for _ in range(states[0].ranks)]
    for number, state in enumerate(states, 1):
        id_ = SnapshotId(A, 10 * number)
        outcomes: queue.Queue[Outcome] = queue.Queue()
        for rank, writer in enumerate(writers):
            shards = shards_of(state, rank)
            layout = lay_out(shards, A_CHUNK)
            data = filled(layout, shards)
            job = SaveJob(
                id_, rank, state.ranks, layout, data, texts(state, rank), state.aliases, {}, OWNERSHIP,
                METRICS if rank == 0 else None, TIME if rank == 0 else None,
            )  # fmt: skip
            writer.submit(job, outcomes.put)
        for _ in writers:
            outcome = outcomes.get(timeout=60)
            if isinstance(outcome, Failed):
                raise outcome.error
        if not all(writer.wait(60) for writer in writers):
            raise TimeoutError(f"step {id_.step} was committed, and its writers do not end")
        yield id_
    if not all(writer.stop(60) for writer in writers):
        raise TimeoutError("the writers do not stop")


# -- chunks of chosen kinds --------------------------------------------------------------------------------------------


def kinds_of(piece: Piece) -> tuple[int, int | None]:
    """The codec kind of a piece's keyframe, and of its deltas (None: it gets keyframes only)."""
    match piece.name.split(".")[0]:
        case "forms" | "columns":
            return ZSTD, SPARSE
        case "deep":
            return PLANES, SPARSE
        case "far":
            return PLANES, SUB
        case "bits":
            return ZSTD, XOR
        case "noise":
            return RAW, None
        case _:
            turn = [*DTYPES].index(piece.dtype) % 3
            return (RAW, PLANES, ZSTD)[turn], (SUB, XOR, SPARSE)[turn]


@dataclass(frozen=True)
class Held:
    """A chunk of the snapshot before."""

    rank: int
    piece: Piece
    chunk: Chunk
    data: bytes

    @property
    def bundled(self) -> bool:
        return self.piece.name.startswith("small ")


@dataclass
class Author:
    """Saves states one after the other, of all ranks at once; each leans on the one before."""

    store: Store
    chunk: int = CHUNK
    revision: int = 0
    last: SnapshotId | None = None
    held: list[Held] = field(default_factory=list)
    packs: dict[str, int] = field(default_factory=dict)

    def save(self, id_: SnapshotId, state: State) -> None:
        held: list[Held] = []
        parts = []
        for rank in range(state.ranks):
            shards = shards_of(state, rank)
            layout = lay_out(shards, self.chunk)
            data = filled(layout, shards).tobytes()
            table, stored = self.chunks(id_, rank, layout, data)
            held += [
                Held(rank, piece, chunk, data[piece.start : piece.stop])
                for piece, chunk in zip(layout.pieces, table, strict=True)
            ]
            head = PartHead(
                id_.run, id_.step, state.ranks, rank, OWNERSHIP, self.last, TIME if rank == 0 else None,
                METRICS if rank == 0 else None, stored, state.aliases, {}, texts(state, rank), self.revision,
            )  # fmt: skip
            part = write_part(head, layout, table, self.packs, lambda: None)
            key = PartName(id_, rank, self.revision).key
            self.store.put(key, part)
            parts.append((PartRef(key, len(part), digest128(part)), read_part(part, key=key)))
        self.store.put(SnapshotName(id_, self.revision).key, seal(build_snapshot(parts)))
        self.last, self.held = id_, held

    def chunks(self, id_: SnapshotId, rank: int, layout: Layout, data: bytes) -> tuple[list[Chunk], dict[int, int]]:
        """Encode what changed into one pack. Returns the table, and the stored bytes by kind."""
        pack, codec = PackBuilder(), Codec()
        stored: dict[int, int] = {}
        table: list[Chunk | None] = []
        waiting: list[tuple[int, int, str, str, tuple[Blob, ...]]] = []
        for number, piece in enumerate(layout.pieces):
            new = data[piece.start : piece.stop]
            digest = chunk_digest(piece.dtype, new)
            known = self.known(rank, piece, new, digest)
            table.append(known)
            if known is not None:
                continue
            base = self.base(rank, piece)
            keyframe, delta = kinds_of(piece)
            if base is None or delta is None:
                kind, below, old, base_digest = keyframe, (), None, None
            else:
                kind, below, base_digest = delta, base.chunk.blobs, base.chunk.digest
                old = np.frombuffer(base.data, np.uint8)
            blob = codec.encode(kind, np.frombuffer(new, np.uint8), old, DTYPES[piece.dtype])
            name = digest64(blob)
            pack.add(blob, kind=kind, digest=name, chunk_digest=digest, dtype=piece.dtype, base_digest=base_digest)
            stored[kind] = stored.get(kind, 0) + len(blob)
            waiting.append((number, kind, name, digest, below))
        if waiting:
            finished = pack.finish()
            key = PackName(id_, rank, self.revision, finished.digest).key
            self.store.put(key, finished.data)
            self.packs[key] = len(finished.data)
            for (number, kind, name, digest, below), (start, stop) in zip(waiting, finished.ranges, strict=True):
                table[number] = Chunk(digest, (*below, Blob(key, start, stop, kind, name)))
        return [chunk for chunk in table if chunk is not None], stored

    def known(self, rank: int, piece: Piece, new: bytes, digest: str) -> Chunk | None:
        """The chunk that has these bytes already, or a larger one of the same leaf that they can be cut out of."""
        for held in self.held:
            if (held.chunk.digest, held.piece.dtype, held.chunk.of) == (digest, piece.dtype, None):
                return held.chunk
        for held in self.held:
            if held.piece.name == piece.name and not held.bundled and held.piece.box.intersect(piece.box) == piece.box:
                size = DTYPES[piece.dtype].size
                elements = np.frombuffer(held.data, f"V{size}").reshape(held.piece.box.lengths)
                inner = piece.box.relative_to(held.piece.box)
                where = tuple(slice(a, a + n) for a, n in zip(inner.offsets, inner.lengths, strict=True))
                if elements[where].tobytes() == new:
                    return Chunk(digest, held.chunk.blobs, held.piece.box)
        return None

    def base(self, rank: int, piece: Piece) -> Held | None:
        """What a delta of this piece may lean on."""
        place = (rank, piece.name, piece.cls, piece.dtype, piece.box)
        for held in self.held:
            old = held.piece
            if (held.rank, old.name, old.cls, old.dtype, old.box) == place and held.chunk.of is None:
                return held
        return None


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else STORE
    shutil.rmtree(target, ignore_errors=True)
    expectation = make(target)
    if target == STORE:
        lines = json.dumps(expectation).replace('], "', '],\n"').replace('}, "', '},\n"')  # for a diff to read
        EXPECTED.write_text(lines + "\n")
    print(f"{target}: {sum(f.stat().st_size for f in target.rglob('*') if f.is_file())} bytes")
