"""Which layers change, and how much, over a history: read from parts alone, never from a pack (no torch).

A part tells of every chunk in which packs its blobs lie. Where the last of them lies in a pack of this very save, the
save stored the chunk anew; else it had not changed. So one part tells what changed at its step, without the one before.
A compacted snapshot does not: its blobs lie in new packs whether they changed or not.

However long the history and however many its ranks: so many parts are read at most, and so many bytes.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ckpt.errors import DamagedError
from ckpt.format.manifest import BundleRow, Part, ShardRow, Snapshot
from ckpt.format.names import PackName, SnapshotId
from recovery.parallel import THREADS, in_threads
from recovery.paths import grouped
from recovery.read import check_part, read_part_bytes
from recovery.tables import meeting, placed, table
from storage_backends.base import Store

COLUMNS, PARTS, BYTES = 48, 512, 256 * 1000 * 1000
"""Snapshots looked into, parts read, and bytes of them: at most."""
CLASSES = 8
"""Classes of leaves whose chains are told of: the largest."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What is read: snapshots, and of each these ranks' parts (all of them, unless there are more than `PARTS`)."""

    reads: tuple[tuple[Snapshot, tuple[int, ...]], ...]

    @property
    def parts(self) -> int:
        return sum(len(ranks) for _, ranks in self.reads)

    @property
    def nbytes(self) -> int:
        return sum(snapshot.parts[rank].length for snapshot, ranks in self.reads for rank in ranks)


@dataclass(frozen=True, slots=True)
class Group:
    """Leaves that belong together, as far as their names tell.

    Attributes:
        name: what their paths begin with.
        leaves: how many; `nbytes`: of the last snapshot in which they are.
        shares: for each snapshot looked into, the share of their bytes that its save stored anew; None where they are
            not in it, or it does not tell.
    """

    name: str
    leaves: int
    nbytes: int
    shares: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class Depth:
    """Chains of one class of leaves: for each snapshot looked into, blobs to decode for a chunk, on average over its
    bytes, and at most."""

    cls: str
    mean: tuple[float | None, ...]
    most: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Layers:
    """`sample`: what was read for it. `lost`: snapshots of which a part could not be read, pruned meanwhile perhaps;
    `compacted`: which tell no shares."""

    sample: Sample
    groups: tuple[Group, ...] = ()
    depths: tuple[Depth, ...] = ()
    lost: frozenset[SnapshotId] = frozenset()
    compacted: frozenset[SnapshotId] = frozenset()


def choose(snapshots: Sequence[Snapshot], *, columns: int = COLUMNS, parts: int = PARTS, nbytes: int = BYTES) -> Sample:
    """Which parts to read: of snapshots spread evenly over `snapshots`, the first and the last among them."""
    while True:
        chosen = [snapshots[n] for n in evenly(len(snapshots), columns)]
        each = max(parts // max(len(chosen), 1), 1)
        if any(s.world_size > each for s in chosen) and columns > 8:  # fewer snapshots, rather than some of their ranks
            columns = max(columns * 3 // 4, 8)
            continue
        sample = Sample(tuple((s, tuple(evenly(s.world_size, each))) for s in chosen))
        if sample.nbytes <= nbytes or columns <= 2:
            return sample
        columns = max(columns * 3 // 4, 2)


def evenly(count: int, limit: int) -> list[int]:
    """At most `limit` of the numbers below `count`, evenly spread, the first and the last among them."""
    if count <= limit:
        return list(range(count))
    return sorted({round(n * (count - 1) / max(limit - 1, 1)) for n in range(limit)})


def layers(store: Store, sample: Sample, *, threads: int = THREADS, each: Callable[[int], object] = int) -> Layers:
    """Read what `sample` says.

    Args:
        each: told of the bytes of every part that was read.

    Raises:
        StorageError: the store does not answer.
        FormatTooNew: a newer version wrote a part.
    """
    columns = [_Column(snapshot) for snapshot, _ in sample.reads]
    names: dict[str, int] = {}

    def one(place: tuple[int, int]) -> tuple[int, int, _Told | None]:
        n, rank = place
        snapshot = columns[n].snapshot
        try:
            told = _told(check_part(read_part_bytes(store, snapshot, rank), snapshot, rank))
        except DamagedError:
            told = None  # `ckpt verify` says what is wrong; a picture goes on without it
        return n, snapshot.parts[rank].length, told

    todo = [(n, rank) for n, (_, ranks) in enumerate(sample.reads) for rank in ranks]
    for n, length, told in in_threads(todo, one, threads=min(threads, max(len(todo), 1))):
        columns[n].add(told, names)
        each(length)
    whole = [column if not column.lost else _Column(column.snapshot, lost=True) for column in columns]
    return Layers(
        sample,
        tuple(_groups(whole, list(names))),
        tuple(_depths(whole)),
        frozenset(column.snapshot.id for column in columns if column.lost),
        frozenset(column.snapshot.id for column in columns if column.snapshot.revision > 0),
    )


# --- one part, one column --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Told:
    """What one part tells. `leaves`: path → (bytes, bytes stored anew); `chains`: class → (bytes, bytes times blobs,
    most blobs)."""

    leaves: dict[str, tuple[int, int]]
    chains: dict[str, tuple[int, int, int]]


def _told(part: Part) -> _Told:
    columns = table(part)
    # The last blob of each chunk: what the save that changed it last has written.
    last = columns.pack[columns.first[1:] - 1]
    own = np.array(
        [(name := PackName.parse(key)) is not None and name.id == part.id for key in columns.packs], np.bool_
    )
    fresh = own[last] if len(last) else np.zeros(0, np.bool_)
    total = np.concatenate(([0], np.cumsum(columns.sizes)))
    anew = np.concatenate(([0], np.cumsum(columns.sizes * fresh)))
    leaves: dict[str, tuple[int, int]] = {}
    for place in placed(part):
        if place.row.bundle is None:
            stop = place.first + len(place.row.chunks)
            nbytes, new = int(total[stop] - total[place.first]), int(anew[stop] - anew[place.first])
        else:
            nbytes = place.stop - place.start
            held = fresh[meeting(place, place.box, part.chunk)] if nbytes else fresh[:0]
            new = round(nbytes * float(held.mean())) if len(held) else 0
        before = leaves.get(place.row.leaf, (0, 0))
        leaves[place.row.leaf] = (before[0] + nbytes, before[1] + new)
    blobs = np.diff(columns.first)
    chains: dict[str, tuple[int, int, int]] = {}
    at = 0
    rows: list[BundleRow | ShardRow] = [*part.bundles, *(row for row in part.shards if row.bundle is None)]
    for row in rows:
        stop = at + len(row.chunks)
        if stop > at:
            size, mine = columns.sizes[at:stop], blobs[at:stop]
            n, deep, most = chains.get(row.cls, (0, 0, 0))
            chains[row.cls] = (n + int(size.sum()), deep + int((size * mine).sum()), max(most, int(mine.max())))
        at = stop
    return _Told(leaves, chains)


@dataclass(slots=True)
class _Column:
    """What the parts of one snapshot tell together; bytes by the number of a leaf's name."""

    snapshot: Snapshot
    lost: bool = False
    nbytes: array[int] = field(default_factory=lambda: array("q"))
    fresh: array[int] = field(default_factory=lambda: array("q"))
    chains: dict[str, tuple[int, int, int]] = field(default_factory=dict)

    def add(self, told: _Told | None, names: dict[str, int]) -> None:
        if told is None:
            self.lost = True
            return
        for path, (nbytes, fresh) in told.leaves.items():
            n = names.setdefault(path, len(names))
            if n >= len(self.nbytes):
                more = bytes(8 * (n + 1 - len(self.nbytes)))
                self.nbytes.frombytes(more)
                self.fresh.frombytes(more)
            self.nbytes[n] += nbytes
            self.fresh[n] += fresh
        for cls, (nbytes, deep, most) in told.chains.items():
            a, b, c = self.chains.get(cls, (0, 0, 0))
            self.chains[cls] = (a + nbytes, b + deep, max(c, most))

    def share(self, leaves: Sequence[int]) -> float | None:
        nbytes = self.size(leaves)
        if not nbytes or self.snapshot.revision > 0:
            return None
        return sum(self.fresh[n] for n in leaves if n < len(self.fresh)) / nbytes

    def size(self, leaves: Iterable[int]) -> int:
        return sum(self.nbytes[n] for n in leaves if n < len(self.nbytes))


def _groups(columns: Sequence[_Column], names: Sequence[str]) -> Iterable[Group]:
    sizes = {name: max(column.size([n]) for column in columns) for n, name in enumerate(names)}
    number = {name: n for n, name in enumerate(names)}
    for name, paths in grouped(sizes).items():
        mine = [number[path] for path in paths]
        nbytes = next((size for column in reversed(columns) if (size := column.size(mine))), 0)
        yield Group(name, len(mine), nbytes, tuple(column.share(mine) for column in columns))


def _depths(columns: Sequence[_Column]) -> Iterable[Depth]:
    sizes: dict[str, int] = {}
    for column in columns:
        for cls, (nbytes, _, _) in column.chains.items():
            sizes[cls] = max(sizes.get(cls, 0), nbytes)
    for cls in sorted(sizes, key=lambda cls: (-sizes[cls], cls))[:CLASSES]:
        told = [column.chains.get(cls) for column in columns]
        yield Depth(
            cls,
            tuple(None if t is None or not t[0] else t[1] / t[0] for t in told),
            tuple(None if t is None else t[2] for t in told),
        )
