"""One snapshot from tensors that nobody trains: what `ckpt import` writes (no torch).

Packs first, then the part, then the snapshot, as every save. A crash before the last leaves a store without that step;
`ckpt prune` sweeps what was written. There is no reference and no second buffer: chunks are read, encoded and packed
one after the other, so that memory is bounded by a pack, the small leaves and a chunk. Interrupted, it takes its packs
back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ckpt.errors import HistoryExists
from ckpt.format.codec import Codec
from ckpt.format.layout import Layout, Region, lay_out
from ckpt.format.manifest import Blob, Chunk, PartHead, chunk_digest, digest64, digest128, write_part
from ckpt.format.names import PackName, SnapshotId, pack_place, packs_prefix
from ckpt.format.pack import PACK_LIMIT, TEXT_BOUND, PackBuilder
from ckpt.format.probe import Learned
from ckpt.format.shards import DTYPES, Shard
from ckpt.history.clock import Clock
from ckpt.history.commit import publish, put_part
from ckpt.history.keyed import key_of
from ckpt.history.runs import Heartbeat, Identity, ensure_store, history_exists, open_run
from ckpt.progress import UNWATCHED, Watch
from storage_backends.base import StorageError, Store

Bytes = NDArray[np.uint8]

WINDOW = 16 * 1024 * 1024
"""Bytes read from a source at a time."""


class Source(Protocol):
    """A box of a tensor, wherever its bytes are."""

    @property
    def shard(self) -> Shard:
        """What it is."""

    def read(self, start: int, stop: int) -> Bytes:
        """These bytes of its row-major bytes."""


def store_snapshot(
    store: Store,
    clock: Clock,
    who: Identity,
    step: int,
    sources: Sequence[Source],
    *,
    values: Mapping[str, bytes],
    aliases: Mapping[str, str],
    watch: Watch = UNWATCHED,
) -> SnapshotId:
    """Store one step of a run of one rank, and end the run.

    Args:
        sources: boxes that cover their leaves exactly once.
        values: tracked name → tagged JSON.
        aliases: other names of tied tensors → path.
        watch: told of raw bytes.

    Raises:
        HistoryExists: the store has snapshots.
        StoreInUse: another job writes there.
        SaveFailed: not seen committed; the sources do not cover their leaves, say.
        StorageError: the store failed.
    """
    check_empty(store)
    ensure_store(store)
    run = open_run(store, clock, world_size=1, resumed_from=None, who=who)
    heart = Heartbeat(store, run)
    heart.start()
    try:
        id_ = SnapshotId(run, step)
        filling = _Filling(store, id_, watch)
        layout = lay_out(source.shard for source in sources)
        watch.expect(layout.nbytes)
        try:
            table = filling.fill(layout, {source.shard: source for source in sources})
            head = PartHead(
                run, step, 1, 0, digest128(b"imported"), None, clock.wall(), None, filling.stored, aliases, {}, values
            )
            own = put_part(store, id_, 0, write_part(head, layout, table, filling.sizes, _on))
        except BaseException:  # Ctrl-C, a source that is cut short: no snapshot can come to name these packs
            with contextlib.suppress(StorageError):
                store.delete(list(filling.sizes))
            raise
        publish(
            store, clock, id=id_, rank=0, world_size=1, own=own, wait=0.0, stopped=lambda: False, breathe=_on
        )  # fmt: skip
    finally:
        heart.stop(ended=True)
    return id_


def check_empty(store: Store) -> None:
    """Raises HistoryExists if there are snapshots."""
    if history_exists(store):
        raise HistoryExists(
            f"{store.url} already holds checkpoints, and what is imported would be a line of its own beside them; "
            "import into an empty store"
        )


def _on() -> None:
    """Nobody trains, so nobody must be given way."""


class _Filling:
    """The packs of one import. Equal chunks are stored once."""

    def __init__(self, store: Store, id_: SnapshotId, watch: Watch) -> None:
        self._store = store
        self._watch = watch
        self._id = id_
        self._codec = Codec()
        self._learned = Learned()
        self._key = key_of(store)
        self.sizes: dict[str, int] = {}
        self._builder = self._next()
        self._packing: list[tuple[str, int, str]] = []
        self._chunks: dict[str, Chunk] = {}
        self._known: set[str] = set()
        self.stored: dict[int, int] = {}

    def fill(self, layout: Layout, sources: Mapping[Shard, Source]) -> tuple[Chunk, ...]:
        """Store every chunk of the layout; the table of a part."""
        digests: list[str | None] = [None] * len(layout.pieces)
        for number, bundle in enumerate(layout.bundles):
            data = np.empty(bundle.nbytes, np.uint8)
            for region in layout.regions:
                if region.bundle == number:
                    at = region.start - bundle.start
                    data[at : at + region.nbytes] = sources[region.shard].read(0, region.nbytes)
            for n in range(bundle.piece, bundle.piece_stop):
                piece = layout.pieces[n]
                raw = data[piece.start - bundle.start : piece.stop - bundle.start]
                digests[n] = self._add(raw, piece.dtype, piece.cls)
        for region in layout.regions:
            if region.bundle is None:
                for n, raw in _pieces(layout, region, sources[region.shard]):
                    digests[n] = self._add(raw, region.shard.leaf.dtype, region.shard.leaf.cls)
        self._send()
        return tuple(self._chunks[digest] for digest in digests if digest is not None)

    def _add(self, raw: Bytes, dtype: str, cls: str) -> str:
        self._watch.done(len(raw))
        digest = chunk_digest(dtype, raw)
        if digest in self._known:
            return digest
        kind = self._learned.choose(raw, None, DTYPES[dtype], cls).keyframe_kind
        blob = self._codec.encode(kind, raw, None, DTYPES[dtype])
        self._learned.learn(cls, DTYPES[dtype], kind, len(raw), len(blob))
        if self._key is not None:
            blob = self._key.seal_blob(blob, kind, f"{packs_prefix(self._id)}00000/{len(self._known)}")
        if self._packing and self._builder.size + len(blob) + TEXT_BOUND > PACK_LIMIT:
            self._send()
        own = digest64(blob)
        self._builder.add(blob, kind=kind, digest=own, chunk_digest=digest, dtype=dtype, base_digest=None)
        self._packing.append((digest, kind, own))
        self._known.add(digest)
        self.stored[kind] = self.stored.get(kind, 0) + len(blob)
        return digest

    def _send(self) -> None:
        if not self._packing:
            return
        pack = self._builder.finish()
        key = PackName(self._id, 0, len(self.sizes), pack.digest).key
        self._store.put(key, pack.data)
        self.sizes[key] = len(pack.data)
        for (digest, kind, own), (start, stop) in zip(self._packing, pack.ranges, strict=True):
            self._chunks[digest] = Chunk(digest, (Blob(key, start, stop, kind, own),))
        self._builder, self._packing = self._next(), []

    def _next(self) -> PackBuilder:
        return PackBuilder(self._key, pack_place(self._id, 0, len(self.sizes)))


def _pieces(layout: Layout, region: Region, source: Source) -> Iterator[tuple[int, Bytes]]:
    """The chunks of a large leaf's box, read several at a time."""
    n = region.piece
    while n < region.piece_stop:
        first = layout.pieces[n]
        end = n + 1
        while end < region.piece_stop and layout.pieces[end].stop - first.start <= WINDOW:
            end += 1
        data = source.read(first.start - region.start, layout.pieces[end - 1].stop - region.start)
        for i in range(n, end):
            piece = layout.pieces[i]
            yield i, data[piece.start - first.start : piece.stop - first.start]
        n = end
