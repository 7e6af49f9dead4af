"""Journaled steps as snapshots, for who compares or exports: laid over the store in a temporary folder (torch).

A step is replayed once and written down raw, with parts and a snapshot document of its own, where a reader of the
overlay finds it like any other. The store itself is only read.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from ckpt.format.key import Key
from ckpt.format.kinds import RAW
from ckpt.format.layout import Layout, lay_out
from ckpt.format.manifest import (
    Blob,
    Chunk,
    PartHead,
    PartRef,
    chunk_digest,
    digest64,
    digest128,
    read_part,
    seal,
    write_part,
)
from ckpt.format.names import PackName, PartName, SnapshotId, SnapshotName, pack_place, packs_prefix
from ckpt.format.ownership import share_out
from ckpt.format.pack import PACK_LIMIT, TEXT_BOUND, PackBuilder
from ckpt.format.shards import Leaf, Shard
from ckpt.history.assemble import build_snapshot
from ckpt.history.keyed import key_of, with_key
from recovery.assemble import Wanted
from recovery.boxes import Bytes
from recovery.forward import Forward, replayed
from storage_backends import open_store
from storage_backends.base import Buffer, Entry, NotFound, Refused, Store


class Overlay:
    """A store that is read, with objects of another one over it. Nothing is written through it."""

    def __init__(self, below: Store, above: Store) -> None:
        self._below, self._above = below, above

    @property
    def url(self) -> str:
        return self._below.url

    @property
    def key(self) -> Key | None:
        return key_of(self._below)

    def get(self, key: str) -> bytes:
        with contextlib.suppress(NotFound):
            return self._above.get(key)
        return self._below.get(key)

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        with contextlib.suppress(NotFound):
            return self._above.get_range(key, start, stop)
        return self._below.get_range(key, start, stop)

    def list(self, prefix: str) -> Sequence[Entry]:
        found = {entry.key: entry for some in (self._below, self._above) for entry in some.list(prefix)}
        return [found[key] for key in sorted(found)]

    def put(self, key: str, data: Buffer) -> None:  # noqa: ARG002
        raise Refused(f"{self.url}: a journaled step is only looked at; {key} is not written", store=self.url, key=key)

    def delete(self, keys: Sequence[str]) -> None:
        raise Refused(f"{self.url}: a journaled step is only looked at", store=self.url, key=next(iter(keys), ""))


@contextlib.contextmanager
def overlaid(store: Store, steps: Iterable[tuple[SnapshotId, int]]) -> Iterator[Store]:
    """The store with journaled steps laid over it as snapshots, as long as this lasts.

    Args:
        steps: the snapshot from which the journal leads to each, and the step.

    Raises:
        NoSnapshot: the journal does not lead there, or not provably.
        DamagedError: a snapshot is damaged.
    """
    with tempfile.TemporaryDirectory(prefix="ckpt-step-") as folder:
        above = with_key(open_store(folder), key_of(store))  # what is secret there is not left lying about here
        for base, step in dict.fromkeys(steps):
            _write(above, replayed(store, base, step), SnapshotId(base.run, step))
        yield Overlay(store, above)


def _write(store: Store, forward: Forward, id_: SnapshotId) -> None:
    """Packs, parts and the snapshot of a replayed state."""
    parts = forward.parts
    tables = [
        [Shard(Leaf(r.leaf, r.cls, r.dtype, r.shape), r.as_box, r.per_rank) for r in part.shards]
        for _, part in sorted(parts.items())
    ]
    chunk = parts[0].chunk
    ownership = share_out(tables, chunk)
    written = []
    for rank, part in sorted(parts.items()):
        layout = lay_out(ownership.owned[rank], chunk)
        wanted = [Wanted(r.shard, rank if r.shard.per_rank else None) for r in layout.regions if r.nbytes]
        data = {want.shard: raw for want, raw in forward.boxes(wanted)}
        table, sizes = _packed(store, PackName(id_, rank, 0, "0" * 16), layout, data)
        head = PartHead(
            id_.run, id_.step, len(parts), rank, ownership.digest, None, None, None, {RAW: layout.nbytes}, part.aliases,
            {}, {name: bytes(value) for name, value in part.values.items()}, others=ownership.others[rank],
        )  # fmt: skip
        name = PartName(id_, rank)
        raw = write_part(head, layout, table, sizes, _on)
        store.put(name.key, raw)
        written.append((PartRef(name.key, len(raw), digest128(raw)), read_part(raw, key=name.key)))
    store.put(SnapshotName(id_).key, seal(build_snapshot(written)))


def _packed(
    store: Store, name: PackName, layout: Layout, data: Mapping[Shard, Bytes]
) -> tuple[tuple[Chunk, ...], dict[str, int]]:
    """Every piece of a layout as a raw blob. Returns the table of a part, and the sizes of the packs."""
    buffer = np.zeros(layout.nbytes, np.uint8)
    for region in layout.regions:
        if region.nbytes:
            buffer[region.start : region.start + region.nbytes] = data[region.shard]
    table: list[Chunk] = []
    sizes: dict[str, int] = {}
    key_ = key_of(store)
    waiting: list[tuple[str, str]] = []

    def begun() -> PackBuilder:
        return PackBuilder(key_, pack_place(name.id, name.rank, len(sizes)))

    builder = begun()

    def send() -> None:
        nonlocal builder
        pack = builder.finish()
        key = PackName(name.id, name.rank, len(sizes), pack.digest).key
        store.put(key, pack.data)
        sizes[key] = len(pack.data)
        for (digest, own), (start, stop) in zip(waiting, pack.ranges, strict=True):
            table.append(Chunk(digest, (Blob(key, start, stop, RAW, own),)))
        builder = begun()
        waiting.clear()

    for piece in layout.pieces:
        raw = buffer[piece.start : piece.stop].tobytes()
        if waiting and builder.size + len(raw) + TEXT_BOUND > PACK_LIMIT:
            send()
        digest = chunk_digest(piece.dtype, raw)
        if key_ is not None:
            raw = key_.seal_blob(raw, RAW, f"{packs_prefix(name.id)}{name.rank:05d}/{len(table) + len(waiting)}")
        own = digest64(raw)
        builder.add(raw, kind=RAW, digest=own, chunk_digest=digest, dtype=piece.dtype, base_digest=None)
        waiting.append((digest, own))
    if waiting:
        send()
    return tuple(table), sizes


def _on() -> None:
    """Nobody trains, so nobody must be given way."""
