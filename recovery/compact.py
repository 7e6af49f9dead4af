"""Compaction: snapshots written anew, so that packs which are mostly dead can go (PROTOCOL.md §5.5; no torch). The
order of writes, and what a crash leaves, is in `ckpt.history.revising`.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from ckpt.format.codec import Codec
from ckpt.format.manifest import Blob, Chunk, Part, PartRef, digest64
from ckpt.format.names import PackName, PartName, SnapshotId, pack_place, packs_prefix
from ckpt.format.pack import MAX_HEADER, PACK_LIMIT, TEXT_BOUND, PackBuilder, PackedBlob, read_header
from ckpt.format.probe import Learned
from ckpt.format.revised import described
from ckpt.format.shards import DTYPES, whole
from ckpt.history.keyed import key_of
from ckpt.history.revising import SWEPT, claiming, next_revision, own_packs, publish_revised, put_revised
from recovery.assemble import ChunkJob, Place
from recovery.compaction import CompactPlan, chunks_of, parts_of
from recovery.fetch import REQUEST, fetch
from recovery.parallel import batched
from recovery.rebuild import Rebuilder, chain_problem
from recovery.shards import damaged, faulty, rebuild_checked
from storage_backends.base import Store

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
    with claiming(store, plan.history, plan.rewrite, grace=grace, nonce=nonce) as claimed:
        work, skipped = _Work(store, plan, pack_limit), list(claimed.skipped)
        for id_ in claimed.ids:
            if not work.rewrite(id_):
                skipped.append(f"{id_.short}: {SWEPT}")
                break  # what comes later may name packs of this one
            each(id_)
    return Compacted(tuple(work.done), len(work.sizes), work.written, tuple(skipped))


@dataclass(slots=True)
class _Packs:
    """The new packs of one rank: blobs come in, and each is told where it came to lie once its pack is on the store."""

    store: Store
    id: SnapshotId
    rank: int
    n: int
    limit: int
    sizes: dict[str, int]
    _builder: PackBuilder = field(init=False)
    _waiting: list[tuple[int, str, Callable[[Blob], None]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._builder = self._next()

    def _next(self) -> PackBuilder:
        return PackBuilder(key_of(self.store), pack_place(self.id, self.rank, self.n))

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
        waiting, self._waiting = self._waiting, []
        key = PackName(self.id, self.rank, self.n, pack.digest).key
        self.store.put(key, pack.data)
        self.n += 1
        self._builder = self._next()
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
        self._key = key_of(store)
        self.sizes: dict[str, int] = {}
        self.written = 0
        self.done: list[SnapshotId] = []

    def rewrite(self, id_: SnapshotId) -> bool:
        """Give a snapshot its next revision. False: it keeps the one it has, see `SWEPT`."""
        history = self._plan.history
        revision, packs = next_revision(self._store, history, id_), own_packs(self._store, id_)
        before = set(self.sizes)
        made: list[tuple[PartRef, Part]] = []
        for part in parts_of(self._store, history, [id_], threads=1):
            first = 1 + max((p.n for p in packs if p.rank == part.rank), default=-1)
            new = self._part(part, revision, _Packs(self._store, id_, part.rank, first, self._pack_limit, self.sizes))
            made.append((put_revised(self._store, new, _hold), new))
        new_packs = self.sizes.keys() - before
        written = publish_revised(self._store, made, new_packs, _hold)
        if written is None:
            return False
        self.written += sum(self.sizes[pack] for pack in new_packs) + sum(ref.length for ref, _ in made) + written
        self.done.append(id_)
        return True

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
        for jobs in batched(long.values(), lambda job: job.cost, REQUEST):
            self._collapse(jobs, packs)
        for blobs in batched(sorted(moving, key=lambda b: (b.pack, b.start)), lambda blob: blob.size, REQUEST):
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
            if self._key is not None:
                # By its digest: chunks that are equal become one keyframe.
                data = self._key.seal_blob(data, kind, f"{packs_prefix(packs.id)}{packs.rank:05d}/{job.digest}")
            packs.add(data, kind, job.digest, job.dtype, None, partial(self._keyframes.__setitem__, job.digest))

    def _move(self, part: Part, blobs: Sequence[Blob], packs: _Packs) -> None:
        """These blobs, as they are (sealed ones too), with what their packs' headers say of them."""
        fetched = fetch(self._store, blobs, opened=False)
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
            return {
                blob.start: blob for blob in read_header(self._store.get_range(key, 0, 8 + length), size, self._key)
            }
        except ValueError as error:
            raise damaged(self._store, place, key, "the header of a pack", str(error)) from error

    def _described(self, part: Part, revision: int) -> Part:
        known = dict(part.packs) | self.sizes

        def changed(chunk: Chunk) -> Chunk:
            if self._plan.is_long(chunk):
                return Chunk(chunk.digest, (self._keyframes[chunk.digest],))
            return Chunk(chunk.digest, tuple(self._moved.get(b, b) for b in chunk.blobs), chunk.of)

        return described(
            part,
            revision,
            [(row, [changed(chunk) for chunk in part.chunks(row)]) for row in part.bundles],
            [(row, [changed(chunk) for chunk in part.chunks(row)]) for row in part.shards],
            known,
            _hold,
        )


def _hold() -> None:
    """A process of its own, with nothing to give way to."""
