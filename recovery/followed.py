"""A snapshot whose chunks are read piece by piece, for so long that a newer revision may take its place meanwhile."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from ckpt.errors import DamagedError
from ckpt.format.manifest import Part, ShardRow
from ckpt.format.names import SnapshotId
from recovery.assemble import Wanted
from recovery.boxes import Bytes
from recovery.parallel import THREADS
from recovery.read import OpenSnapshot, Pruned, following, read_parts, successor
from recovery.shards import MEMORY, read_shards
from storage_backends.base import Store


class Followed:
    """Its parts, and its bytes from wherever they lie by now: another revision has the same leaves in the same boxes
    (unless it is weights only), and other blobs. For one thread.

    Raises:
        DamagedError, Pruned, StorageError: it cannot be read; `read` raises them, too.
    """

    def __init__(self, store: Store, wanted: SnapshotId, *, threads: int = THREADS) -> None:
        self.store = store
        self._threads = threads
        self._take(*following(store, wanted, self._read_parts))

    def read(self, wanted: Sequence[Wanted], *, memory: int = MEMORY) -> list[tuple[Wanted, Bytes]]:
        """What `read_shards` yields, all of it: the caller asks for a window at a time."""
        while True:
            parts = self._narrowed(want.shard.leaf.path for want in wanted)
            try:
                return list(read_shards(self.store, parts, wanted, memory=memory, threads=self._threads))
            except DamagedError as error:
                newer = successor(self.store, self._opened, error)
            self._take(*following(self.store, newer.id, self._read_parts))
            if not {want.shard.leaf.path for want in wanted} <= self._rows.keys():
                raise Pruned(f"{newer.id.short} on {self.store.url} became weights only while it was being read")

    def _read_parts(self, opened: OpenSnapshot) -> tuple[OpenSnapshot, dict[int, Part]]:
        return opened, read_parts(self.store, opened.snapshot, threads=self._threads)

    def _take(self, opened: OpenSnapshot, parts: dict[int, Part]) -> None:
        self._opened, self.parts = opened, parts
        self._rows: dict[str, list[tuple[int, ShardRow]]] = {}
        for rank, part in sorted(parts.items()):
            for row in part.shards:
                self._rows.setdefault(row.leaf, []).append((rank, row))

    def _narrowed(self, paths: Iterable[str]) -> dict[int, Part]:
        """The parts with the rows of these leaves alone, so that a window costs what is in it."""
        rows: dict[int, list[ShardRow]] = {}
        for path in sorted(set(paths)):
            for rank, row in self._rows.get(path, ()):
                rows.setdefault(rank, []).append(row)
        return {rank: replace(self.parts[rank], shards=tuple(some)) for rank, some in rows.items()}
