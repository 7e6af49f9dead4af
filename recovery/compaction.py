"""What a compaction would rewrite: decided from documents alone, so that `--dry-run` is the same look (no torch).

Two things cost space or reads on a store that keeps few of many snapshots. A pack of which little is still named: its
live blobs *move*, byte for byte, to a new pack. A long chain that nothing else leans on: it becomes a *keyframe*, which
replaces all of it. A chain that shares its beginning with other chunks stays a chain, because two keyframes would take
more than one keyframe and two deltas.

Snapshots that a job may lean on are left alone (PROTOCOL.md §5.5), and so is every pack that they name: to copy out of
a pack that stays frees nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

from ckpt.errors import DamagedError
from ckpt.format.manifest import Blob, BundleRow, Chunk, Part, ShardRow
from ckpt.format.names import PartName, SnapshotId
from ckpt.format.pack import TEXT
from ckpt.format.shards import DTYPES, Box, cuts, whole
from ckpt.history.catalog import History, read_history
from ckpt.history.plan import blocking, leaned_on, way_out
from recovery.assemble import Place
from recovery.parallel import THREADS, in_threads
from recovery.read import Missing, OpenSnapshot, check_part, read_part_bytes
from storage_backends.base import Store

THRESHOLD = 0.25
"""A pack of which less than this share is live is rewritten."""

LONG = 8
"""A chain of more blobs is long: each is a row in the part, and mostly a request of its own."""

HEAVY = 1.25
"""A chain of this many times its keyframe's bytes is long, too: a keyframe takes less."""

PATIENCE = 3
"""Looks at a store that is being pruned meanwhile, before what is missing counts as lost."""


@dataclass(frozen=True)
class CompactPlan:
    """What a compaction will do. Data only.

    Attributes:
        rewrite: the snapshots that get a new revision, oldest first.
        dying: packs whose live blobs move.
        users: blob → the digest of the one chunk that needs it, or None if more do.
        collapse: whether long chains become keyframes.
        moved, keyframes: bytes that will be written, about: of blobs as they are, and of new keyframes; with headers.
        freed: bytes of packs that nothing needs afterwards; the next prune removes them.
        left: snapshots that were not looked at, and why.
        history: the look at the store that this plan was made from.
    """

    threshold: float
    rewrite: tuple[SnapshotId, ...]
    dying: frozenset[str]
    users: Mapping[Blob, str | None] = field(repr=False)
    collapse: bool
    moved: int
    keyframes: int
    freed: int
    left: Mapping[SnapshotId, str]
    history: History = field(repr=False)

    def is_long(self, chunk: Chunk) -> bool:
        """Whether this chunk becomes a keyframe."""
        return self.collapse and long_alone(chunk, self.users)


def plan_compact(
    store: Store,
    *,
    threshold: float = THRESHOLD,
    only: Collection[SnapshotId] | None = None,
    threads: int = THREADS,
) -> CompactPlan:
    """Look at the store and say what would be rewritten; touches nothing.

    What is held: one entry for each blob that some snapshot needs, and one part at a time and thread.

    Args:
        threshold: see `THRESHOLD`; in [0, 1].
        only: the snapshots that may be rewritten; None: all.

    Raises:
        ValueError: a threshold outside [0, 1].
        DamagedError: something that a snapshot needs cannot be read, so what it needs is unknown.
        StorageError: the store could not be listed or read.
    """
    if not 0 <= threshold <= 1:
        raise ValueError(f"threshold {threshold}: expected a share, from 0 to 1")
    for _ in range(PATIENCE):
        with contextlib.suppress(Missing):  # pruned while we looked, most likely: then it is not there at the next look
            return _plan(store, threshold, only, threads)
    return _plan(store, threshold, only, threads)


def _plan(store: Store, threshold: float, only: Collection[SnapshotId] | None, threads: int) -> CompactPlan:
    history = read_history(store, packs=True, threads=threads)
    for problem in blocking(history):
        raise DamagedError(f"nothing is compacted: {problem.text}; {way_out(problem)}", key=problem.key)
    left = dict(leaned_on(history, (), 0.0, None))
    if only is not None:
        left |= {id_: "not asked for" for id_ in history.snapshots if id_ not in only and id_ not in left}
    left = {id_: why for id_, why in sorted(left.items()) if id_ in history.snapshots}
    users, fixed = _survey(store, history, left, threads)
    tries = [
        _weigh(store, history, left, users, fixed, threshold, collapse=collapse, threads=threads)
        for collapse in (True, False)
    ]
    best = max(tries, key=lambda made: made.freed - made.moved - made.keyframes)
    if best.freed <= best.moved + best.keyframes:
        return replace(best, rewrite=(), dying=frozenset(), moved=0, keyframes=0, freed=0)
    return best


def long_alone(chunk: Chunk, users: Mapping[Blob, str | None]) -> bool:
    """Whether a chain is long, and so much of it needed by nothing else that a keyframe in its place pays."""
    if len(chunk.blobs) < 2 or chunk.of is not None:  # clipped: its keyframe would not be what others clip theirs from
        return False
    keyframe = chunk.blobs[0].size
    alone = sum(b.size for b in chunk.blobs if users.get(b) == chunk.digest)
    return alone >= HEAVY * keyframe or (len(chunk.blobs) > LONG and alone >= keyframe)


def chunks_of(part: Part) -> Iterator[tuple[Place, str, int, Chunk]]:
    """Every chunk of a part: whose it is, its dtype, its own length in bytes, and what it is made of."""
    key = PartName(part.id, part.rank, part.revision).key
    rows: list[tuple[BundleRow | ShardRow, str, tuple[int, ...], Box]] = [
        (row, f"bundle {n}", (row.length,), whole((row.length,))) for n, row in enumerate(part.bundles)
    ]
    rows += [(row, row.leaf, row.shape, row.as_box) for row in part.shards if row.bundle is None]
    for row, leaf, shape, box in rows:
        size = DTYPES[row.dtype].size
        for n, (cut, chunk) in enumerate(zip(cuts(shape, box, size, part.chunk), part.chunks(row), strict=True)):
            yield Place(key, part.id.step, part.rank, leaf, n), row.dtype, cut.box.numel * size, chunk


def parts_of(store: Store, history: History, ids: Collection[SnapshotId], threads: int = THREADS) -> Iterator[Part]:
    """The parts of these snapshots, in any order, `threads` at a time."""
    todo = [(id_, rank) for id_ in ids for rank in range(history.snapshots[id_].world_size)]

    def one(what: tuple[SnapshotId, int]) -> Part:
        id_, rank = what
        opened = OpenSnapshot(history.keys[id_], history.snapshots[id_])
        return check_part(read_part_bytes(store, opened.snapshot, rank), opened.snapshot, rank)

    if todo:
        yield from in_threads(todo, one, threads=min(threads, len(todo)))


def _survey(
    store: Store, history: History, left: Collection[SnapshotId], threads: int
) -> tuple[dict[Blob, str | None], set[Blob]]:
    """Who needs each blob; and the blobs that snapshots need which are left alone."""
    users: dict[Blob, str | None] = {}
    fixed: set[Blob] = set()
    for part in parts_of(store, history, history.snapshots, threads):
        alone = part.id not in left
        for _, _, _, chunk in chunks_of(part):
            for blob in chunk.blobs:
                if users.setdefault(blob, chunk.digest) != chunk.digest or not alone:
                    users[blob] = None
            if not alone:
                fixed.update(chunk.blobs)
    return users, fixed


def _weigh(
    store: Store,
    history: History,
    left: Mapping[SnapshotId, str],
    users: Mapping[Blob, str | None],
    fixed: Collection[Blob],
    threshold: float,
    *,
    collapse: bool,
    threads: int,
) -> CompactPlan:
    """What would be written, and what would come free."""
    sizes = {key: length for s in history.snapshots.values() for key, length in s.packs}
    stays = {key for id_ in left for key, _ in history.snapshots[id_].packs}
    needed = set(fixed)
    keyframes: dict[str, int] = {}
    rewrite: set[SnapshotId] = set()
    for part in parts_of(store, history, history.snapshots.keys() - left.keys(), threads):
        for _, _, _, chunk in chunks_of(part):
            if collapse and long_alone(chunk, users):
                keyframes[chunk.digest] = chunk.blobs[0].size + TEXT
                rewrite.add(part.id)
            else:
                needed.update(chunk.blobs)
    live: dict[str, int] = {}
    for blob in needed:
        live[blob.pack] = live.get(blob.pack, 0) + blob.size + TEXT
    dying = {key for key, size in live.items() if key not in stays and size < threshold * sizes[key]}
    rewrite |= {id_ for id_, s in history.snapshots.items() if id_ not in left and not dying.isdisjoint(dict(s.packs))}
    return CompactPlan(
        threshold=threshold,
        rewrite=tuple(sorted(rewrite)),
        dying=frozenset(dying),
        users=users,
        collapse=collapse,
        moved=sum(live[key] for key in dying),
        keyframes=sum(keyframes.values()),
        freed=sum(sizes[key] for key in sizes.keys() - stays if key in dying or key not in live),
        left=left,
        history=history,
    )
