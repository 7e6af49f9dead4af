"""Compaction: snapshots written anew, so that packs which are mostly dead can go (PROTOCOL.md §5.5; no torch).

For each snapshot: its packs, then its parts, then a document of the next revision, which readers then take. Nothing is
removed here; what the new revision made superfluous goes with the next prune. A crash
  before the document  leaves packs and parts nobody names, and the old revision, which is read; prune sweeps them;
  after it             leaves the new revision, which is read, and the old one, which prune removes.
A claim (a pin) holds off prunes while a snapshot is rewritten; one that a killed compaction left goes with the next.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import numpy as np
from msgspec.structs import replace

from ckpt.format.codec import Codec
from ckpt.format.manifest import (
    Blob,
    BlobRow,
    BundleRow,
    Chunk,
    ChunkRow,
    Part,
    PartRef,
    PinDoc,
    ShardRow,
    digest64,
    digest128,
    parse_snapshot,
    seal,
    unseal,
)
from ckpt.format.names import (
    PINS,
    SNAPSHOTS,
    PackName,
    PartName,
    SnapshotId,
    SnapshotName,
    packs_prefix,
    parts_prefix,
    pin_key,
)
from ckpt.format.pack import MAX_HEADER, PACK_LIMIT, TEXT_BOUND, PackBuilder, PackedBlob, read_header
from ckpt.format.parts import encode_part
from ckpt.format.probe import Learned
from ckpt.format.shards import DTYPES, whole
from ckpt.history.assemble import build_snapshot
from ckpt.history.copies import read
from ckpt.history.pins import claim, still_there
from ckpt.history.runs import claimed_by_prune
from recovery.assemble import ChunkJob, Place
from recovery.compaction import CLAIM, CompactPlan, chunks_of, parts_of
from recovery.fetch import REQUEST, fetch
from recovery.rebuild import Rebuilder, chain_problem
from recovery.shards import damaged, faulty, rebuild_checked
from storage_backends.base import NotFound, StorageError, Store

__all__ = ["Compacted", "compact"]


@dataclass(frozen=True, slots=True)
class Compacted:
    """What a compaction wrote: the snapshots with a new revision, bytes of packs and of documents, and in words which
    snapshots it passed over and why."""

    snapshots: tuple[SnapshotId, ...] = ()
    packs: int = 0
    written: int = 0
    skipped: tuple[str, ...] = ()


def compact(
    plan: CompactPlan,
    store: Store,
    *,
    grace: float = 3600.0,
    pack_limit: int = PACK_LIMIT,
    nonce: Callable[[], str] = lambda: secrets.token_hex(4),
    each: Callable[[SnapshotId], object] = str,
) -> Compacted:
    """Rewrite what `plan` names. Safe beside jobs that save and restore, prunes, and other compactions.

    What is held: the parts of one snapshot, one pack being built, and a few megabytes of blobs.

    Args:
        plan: from `plan_compact`, of the same store.
        store: where.
        grace: seconds by the store's own clock after which another compaction's claim counts as left by a dead one; 0
            takes all for dead.
        pack_limit: bytes of a new pack at most.
        nonce: names the claims.
        each: told of every snapshot whose new revision is committed.

    Raises:
        DamagedError: something does not decode to what was written; snapshots before it have been rewritten.
        StorageError: the store failed; the same holds.
    """
    dead = sorted(id_ for name, id_ in plan.history.pins.items() if name.startswith(CLAIM))
    if not plan.rewrite and not dead:
        return Compacted()
    stem = f"{CLAIM}{nonce()}"
    # With nothing to rewrite, one claim all the same: its time is the store's, by which the claims of the dead are old.
    own = {id_: f"{stem}-{n}" for n, id_ in enumerate(plan.rewrite or dead[:1])}
    keys = [pin_key(name) for name in own.values()]
    try:
        ids, skipped = _claim(store, plan, own, grace)
        work = _Work(store, plan, pack_limit)
        for id_ in ids:
            if (why := work.rewrite(id_)) is not None:
                skipped.append(f"{id_.short}: {why}")
                break  # what comes later may name packs of this one
            each(id_)
    except BaseException:
        with contextlib.suppress(StorageError):
            store.delete(keys)
        raise
    store.delete(keys)
    return Compacted(tuple(work.done), len(work.sizes), work.written, tuple(skipped))


def _claim(
    store: Store, plan: CompactPlan, own: dict[SnapshotId, str], grace: float
) -> tuple[list[SnapshotId], list[str]]:
    """Claim every snapshot of the plan, then look for who claims otherwise: those that may be rewritten, and in words
    why others may not. All claims stay until the end: a later snapshot may come to name packs of an earlier one, which
    nothing else protects until its document is there."""
    for id_, name in own.items():
        claim(store, name, id_)
    rivals = _rivals(store, {pin_key(name) for name in own.values()}, grace)
    newer = {
        found.id
        for entry in store.list(SNAPSHOTS)
        if (found := SnapshotName.parse(entry.key)) and entry.key not in plan.history.entries
    }
    ids: list[SnapshotId] = []
    skipped: list[str] = []
    for id_ in plan.rewrite:
        if id_ in rivals:
            skipped.append(f"{id_.short}: another compaction is at it")
        elif id_ in newer:
            skipped.append(f"{id_.short}: it has been compacted meanwhile")
        elif claimed_by_prune(store, id_) or not still_there(store, plan.history, id_):
            skipped.append(f"{id_.short}: a prune removes it")
        else:
            ids.append(id_)
    return ids, skipped


def _rivals(store: Store, own: Collection[str], grace: float) -> set[SnapshotId]:
    """What other compactions have claimed; claims that dead ones left are taken away."""
    pins = {e.key: e.mtime for e in store.list(PINS) if e.key.startswith(PINS + CLAIM)}
    now = max((mtime for key in own if (mtime := pins.get(key)) is not None), default=None)
    found: set[SnapshotId] = set()
    for key, mtime in pins.items():
        if key in own:
            continue
        if grace <= 0 or (now is not None and mtime is not None and mtime < now - grace):
            store.delete([key])
            continue
        with contextlib.suppress(NotFound):
            pin = read(store, key, lambda data: unseal(data, PinDoc, key=key))  # noqa: B023 - called at once
            pinned = parse_snapshot(pin.snapshot)
            assert pinned is not None  # the field's pattern has been checked
            found.add(pinned)
    return found


@dataclass(slots=True)
class _Packs:
    """The new packs of one rank: blobs come in, and each is told where it came to lie once its pack is on the store."""

    store: Store
    id: SnapshotId
    rank: int
    n: int
    limit: int
    sizes: dict[str, int]
    _builder: PackBuilder = field(default_factory=PackBuilder)
    _waiting: list[tuple[int, str, Callable[[Blob], None]]] = field(default_factory=list)

    def add(
        self, data: bytes, kind: int, chunk_digest: str, dtype: str, base: str | None, tell: Callable[[Blob], None]
    ) -> None:
        if self._builder.count and self._builder.size + len(data) + TEXT_BOUND > self.limit:
            self.flush()
        digest = digest64(data)
        self._builder.add(data, kind=kind, digest=digest, chunk_digest=chunk_digest, dtype=dtype, base_digest=base)
        self._waiting.append((kind, digest, tell))

    def flush(self) -> None:
        if not self._waiting:
            return
        pack = self._builder.finish()
        waiting, self._builder, self._waiting = self._waiting, PackBuilder(), []
        key = PackName(self.id, self.rank, self.n, pack.digest).key
        self.store.put(key, pack.data)
        self.n += 1
        self.sizes[key] = len(pack.data)
        for (kind, digest, tell), (start, stop) in zip(waiting, pack.ranges, strict=True):
            tell(Blob(key, start, stop, kind, digest))


class _Work:
    """One compaction: what has moved where, so that snapshots which share a blob share it afterwards too."""

    def __init__(self, store: Store, plan: CompactPlan, pack_limit: int) -> None:
        self._store = store
        self._plan = plan
        self._pack_limit = pack_limit
        self._moved: dict[Blob, Blob] = {}
        self._keyframes: dict[str, Blob] = {}
        self._codec = Codec()
        self._learned = Learned()
        self._rebuilder = Rebuilder()
        self.sizes: dict[str, int] = {}
        self.written = 0
        self.done: list[SnapshotId] = []

    def rewrite(self, id_: SnapshotId) -> str | None:
        """Give a snapshot its next revision; or say why it keeps the one it has."""
        history = self._plan.history
        parts = [n for e in self._store.list(parts_prefix(id_)) if (n := PartName.parse(e.key))]
        packs = [p for e in self._store.list(packs_prefix(id_)) if (p := PackName.parse(e.key))]
        # Above whatever a killed compaction left: its objects may still be swept, and must not be named again.
        revision = 1 + max(history.snapshots[id_].revision, *(n.revision for n in parts), 0)
        before = set(self.sizes)
        made: list[tuple[PartRef, Part]] = []
        for part in parts_of(self._store, history, [id_], threads=1):
            first = 1 + max((p.n for p in packs if p.rank == part.rank), default=-1)
            new = self._part(part, revision, _Packs(self._store, id_, part.rank, first, self._pack_limit, self.sizes))
            data = encode_part(new)
            ref = PartRef(PartName(id_, part.rank, revision).key, len(data), digest128(data))
            self._store.put(ref.key, data)
            made.append((ref, new))
        snapshot = seal(build_snapshot(made))
        key = SnapshotName(id_, revision).key
        self._store.put(key, snapshot)
        # This process may have been stopped for hours, and a prune may have swept what no document named yet.
        there = {e.key for prefix in (parts_prefix(id_), packs_prefix(id_)) for e in self._store.list(prefix)}
        new_packs = self.sizes.keys() - before
        if not new_packs | {ref.key for ref, _ in made} <= there:
            self._store.delete([key])
            return "what it had written was swept by a prune meanwhile; compact again"
        self.written += sum(self.sizes[pack] for pack in new_packs) + sum(ref.length for ref, _ in made) + len(snapshot)
        self.done.append(id_)
        return None

    def _part(self, part: Part, revision: int, packs: _Packs) -> Part:
        """The part with its chunks where they lie from now on, all of them on the store."""
        long: dict[str, ChunkJob] = {}
        moving: set[Blob] = set()
        for place, dtype, nbytes, chunk in chunks_of(part):
            if not self._plan.is_long(chunk):
                moving.update(b for b in chunk.blobs if b.pack in self._plan.dying and b not in self._moved)
            elif chunk.digest not in self._keyframes:
                box = whole((nbytes // DTYPES[dtype].size,))
                long[chunk.digest] = ChunkJob(place, chunk.blobs, dtype, box, box, chunk.digest)
        for jobs in _batches(long.values(), lambda job: job.cost):
            self._collapse(jobs, packs)
        for blobs in _batches(sorted(moving, key=lambda b: (b.pack, b.start)), lambda blob: blob.size):
            self._move(part, blobs, packs)
        packs.flush()
        return self._described(part, revision)

    def _collapse(self, jobs: Sequence[ChunkJob], packs: _Packs) -> None:
        """Each of these chains as one keyframe, decoded once more before it is stored."""
        for job in jobs:
            if (problem := chain_problem(job.blobs, job.nbytes)) is not None:
                raise damaged(self._store, job.place, job.blobs[0].pack, "a chain of blobs", problem)
        fetched = fetch(self._store, (b for job in jobs for b in job.blobs))
        for job in jobs:
            for blob in job.blobs:
                if (fault := fetched.faults.get(blob)) is not None:
                    raise faulty(self._store, job.place, blob, fault)
            raw, again, dtype = np.empty(job.nbytes, np.uint8), np.empty(job.nbytes, np.uint8), DTYPES[job.dtype]
            rebuild_checked(self._store, self._rebuilder, job, fetched.data, raw)
            kind = self._learned.choose(raw, None, dtype, "").keyframe_kind
            data = self._codec.encode(kind, raw, None, dtype)
            self._codec.decode(kind, data, None, again, dtype)
            if not np.array_equal(raw, again):
                raise damaged(self._store, job.place, job.blobs[0].pack, "a keyframe of the same bytes", "other bytes")
            packs.add(data, kind, job.digest, job.dtype, None, partial(self._keyframes.__setitem__, job.digest))

    def _move(self, part: Part, blobs: Sequence[Blob], packs: _Packs) -> None:
        """These blobs, as they are, with what their packs' headers say of them."""
        fetched = fetch(self._store, blobs)
        headers: dict[str, dict[int, PackedBlob]] = {}
        for blob in blobs:
            place = Place(PartName(part.id, part.rank, part.revision).key, part.step, part.rank, "its blobs", 0)
            if (fault := fetched.faults.get(blob)) is not None:
                raise faulty(self._store, place, blob, fault)
            if blob.pack not in headers:
                headers = {blob.pack: self._header(place, blob.pack, dict(part.packs)[blob.pack])}
            said = headers[blob.pack].get(blob.start)
            if said is None or (said.stop, said.kind, said.digest) != (blob.stop, blob.kind, blob.digest):
                raise damaged(self._store, place, blob.pack, f"blob {blob.start}:{blob.stop} in its header", f"{said}")
            packs.add(
                bytes(fetched.data[blob]), blob.kind, said.chunk_digest, said.dtype, said.base_digest,
                partial(self._moved.__setitem__, blob),
            )  # fmt: skip

    def _header(self, place: Place, key: str, size: int) -> dict[int, PackedBlob]:
        """What a pack says of its blobs, by where they start."""
        length = int.from_bytes(self._store.get_range(key, 0, 8), "little")
        try:
            if length > min(size - 8, MAX_HEADER):
                raise ValueError(f"a header of {length} bytes in {size}")
            return {blob.start: blob for blob in read_header(self._store.get_range(key, 0, 8 + length), size)}
        except ValueError as error:
            raise damaged(self._store, place, key, "the header of a pack", str(error)) from error

    def _described(self, part: Part, revision: int) -> Part:
        known = dict(part.packs) | self.sizes

        def changed(chunk: Chunk) -> Chunk:
            if self._plan.is_long(chunk):
                return Chunk(chunk.digest, (self._keyframes[chunk.digest],))
            return Chunk(chunk.digest, tuple(self._moved.get(b, b) for b in chunk.blobs), chunk.of)

        described: tuple[BundleRow | ShardRow, ...] = (*part.bundles, *part.shards)
        tables = [[changed(chunk) for chunk in part.chunks(row)] for row in described]
        names = sorted({blob.pack for table in tables for chunk in table for blob in chunk.blobs})
        number = {key: i for i, key in enumerate(names)}

        def rows(table: Sequence[Chunk]) -> tuple[ChunkRow, ...]:
            return tuple(
                ChunkRow(
                    chunk.digest,
                    tuple(BlobRow(number[b.pack], b.start, b.stop, b.kind, b.digest) for b in chunk.blobs),
                    None if chunk.of is None else (chunk.of.offsets, chunk.of.lengths),
                )
                for chunk in table
            )

        count = len(part.bundles)
        return replace(
            part,
            revision=revision,
            packs=tuple((key, known[key]) for key in names),
            bundles=tuple(replace(r, chunks=rows(t)) for r, t in zip(part.bundles, tables[:count], strict=True)),
            shards=tuple(replace(r, chunks=rows(t)) for r, t in zip(part.shards, tables[count:], strict=True)),
        )


T = TypeVar("T")


def _batches(items: Iterable[T], size: Callable[[T], int]) -> Iterator[list[T]]:
    """Consecutive items of at most `REQUEST` bytes together; one may exceed it."""
    batch: list[T] = []
    total = 0
    for item in items:
        if batch and total + size(item) > REQUEST:
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += size(item)
    if batch:
        yield batch
