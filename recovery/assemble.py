"""Which stored chunks meet which wanted boxes, and how their bytes move: any layout, one rank or many. Reads nothing.

A wanted box is put together from every stored box that meets it, so a state stored by N ranks is read by M with the
same code as by N. Bytes of small leaves come out of their bundle.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

import numpy as np

from ckpt.errors import DamagedError, LayoutMismatch
from ckpt.format.manifest import Blob, ChunkRow, Part, ShardRow
from ckpt.format.names import PartName
from ckpt.format.shards import DTYPES, Box, Cut, Shard, cuts, uncovered, whole
from recovery.boxes import Bytes, Copy, Run, copies


@dataclass(frozen=True, slots=True)
class Wanted:
    """A box of a leaf to be read. `rank` None: of the leaf all ranks share; else the per-rank value of that rank."""

    shard: Shard
    rank: int | None = None


@dataclass(eq=False, slots=True)
class Target:
    """Bytes being put together. `missing` counts those not yet there; then `onward` copies are made (of a small leaf
    whose bytes may straddle two chunks of its bundle), or the wanted box is handed over."""

    nbytes: int
    missing: int
    wanted: Wanted | None = None
    onward: list[tuple[Target, Copy]] = field(default_factory=list)
    _data: Bytes | None = None

    @property
    def data(self) -> Bytes:
        """Allocated at first use, so that what is not begun costs nothing; call under the lock."""
        if self._data is None:
            self._data = np.empty(self.nbytes, np.uint8)
        return self._data


@dataclass(frozen=True, slots=True)
class Place:
    """Whom a chunk belongs to, for messages; `key` is the part that describes it."""

    key: str
    step: int
    rank: int
    leaf: str
    chunk: int

    def __str__(self) -> str:
        return f"step {self.step}, rank {self.rank}, {self.leaf} chunk {self.chunk}"


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """What of a chunk of an old bundle is its part's own: bytes ``[start, stop)``, in order and apart, which begin at
    byte `at` when they are put side by side; `digest` is of them all, so."""

    ranges: tuple[tuple[int, int, int], ...]
    digest: str

    @property
    def nbytes(self) -> int:
        return sum(stop - start for start, stop, _ in self.ranges)

    def at(self, byte: int) -> int:
        """Where a byte of the chunk that is kept lies among those that are."""
        start, _, at = self.ranges[bisect_right(self.ranges, byte, key=itemgetter(0)) - 1]
        return at + byte - start


@dataclass(eq=False, slots=True)
class ChunkJob:
    """One chunk to rebuild: `blobs` decode to the bytes of `of`; `box`, cut out of it, has `digest`; then `copies`.
    With `kept`, these are of what is kept of it alone, and nothing else is handed on. `bundle`: its number in the part,
    if it is of one."""

    place: Place
    blobs: tuple[Blob, ...]
    dtype: str
    of: Box
    box: Box
    digest: str
    copies: list[tuple[Target, Copy]] = field(default_factory=list)
    bundle: int | None = None
    kept: Kept | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that the blobs decode to."""
        return self.of.numel * DTYPES[self.dtype].size

    @property
    def cost(self) -> int:
        return sum(b.size for b in self.blobs)


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """Every chunk that must be read, in the order of their bases on the store, and the boxes that need nothing."""

    jobs: tuple[ChunkJob, ...]
    empty: tuple[Wanted, ...]

    @property
    def nbytes(self) -> int:
        """Encoded bytes, blobs shared by chunks once."""
        return sum(b.size for b in {b for job in self.jobs for b in job.blobs})


def covered(parts: Mapping[int, Part], wanted: Sequence[Wanted]) -> bool:
    """Whether these parts alone hold every wanted box whole."""
    index = _index(parts)
    return all(
        w.shard.box.empty or _uncovered(w.shard.box, (held for _, _, held in _meeting(index, w))) is None
        for w in wanted
    )


def plan_chunks(parts: Mapping[int, Part], wanted: Sequence[Wanted]) -> ReadPlan:
    """Work out what to read.

    Args:
        parts: rank → part of one snapshot; only the ranks that hold something wanted must be there.

    Raises:
        DamagedError: the parts do not hold a wanted box exactly once.
        LayoutMismatch: a leaf has another dtype or shape than is wanted.
    """
    index = _index(parts)
    planner = _Planner(parts)
    empty = []
    for want in wanted:
        box = want.shard.box
        if box.empty:
            empty.append(want)
            continue
        rows = list(_meeting(index, want))
        if (problem := _uncovered(box, (held for _, _, held in rows))) is not None:
            raise _not_held(parts, want, problem)
        target = Target(want.shard.nbytes, want.shard.nbytes, want)
        for rank, row, held in rows:
            planner.add(rank, row, held, box, target)
    jobs = planner.jobs.values()
    return ReadPlan(tuple(sorted(jobs, key=lambda j: (j.blobs[0].pack, j.blobs[0].start))), tuple(empty))


def _not_held(parts: Mapping[int, Part], want: Wanted, problem: str) -> DamagedError:
    leaf, first = want.shard.leaf.path, next(iter(parts.values()), None)
    step = None if first is None else first.step
    return DamagedError(
        f"step {step}, {leaf} {want.shard.box}: expected exactly once in the parts of ranks {sorted(parts)}, found: "
        f"{problem}; run 'ckpt verify'",
        key="" if first is None else PartName(first.id, first.rank, first.revision).key,
        step=step,
        rank=want.rank,
        leaf=leaf,
        expected=f"box {want.shard.box}",
        found=problem,
    )


def _clipped_wrong(place: Place, box: Box, of: Box) -> DamagedError:
    return DamagedError(
        f"{place}: expected blobs of a box that holds {box}, found {of}; run 'ckpt verify --step {place.step}'",
        key=place.key,
        step=place.step,
        rank=place.rank,
        leaf=place.leaf,
        expected=f"a box that holds {box}",
        found=str(of),
    )


_Index = dict[tuple[str, int | None], list[tuple[int, ShardRow, Box]]]


def _index(parts: Mapping[int, Part]) -> _Index:
    """(leaf, rank where per-rank) → rows with their rank and box."""
    index: _Index = {}
    for rank, part in parts.items():
        for row in part.shards:
            index.setdefault((row.leaf, rank if row.per_rank else None), []).append((rank, row, row.as_box))
    return index


def _meeting(index: _Index, wanted: Wanted) -> Iterator[tuple[int, ShardRow, Box]]:
    """The rows that hold something of a wanted box."""
    leaf, box = wanted.shard.leaf, wanted.shard.box
    for rank, row, held in index.get((leaf.path, wanted.rank), ()):
        if row.dtype != leaf.dtype or row.shape != leaf.shape:
            stored, live = f"{row.dtype} {list(row.shape)}", f"{leaf.dtype} {list(leaf.shape)}"
            raise LayoutMismatch(
                f"{leaf.path}: stored as {stored}, wanted as {live}; change the model or the mapping",
                changed={leaf.path: f"stored {stored}, live {live}"},
            )
        if held.intersect(box) is not None:
            yield rank, row, held


def _uncovered(box: Box, boxes: Iterable[Box]) -> str | None:
    """What of `box` these boxes do not hold exactly once, in words; None if they hold all of it."""
    common = [meet for b in boxes if (meet := b.intersect(box)) is not None]
    if common == [box]:
        return None
    return uncovered(box.lengths, [b.relative_to(box) for b in common])


class _Planner:
    """Collects the chunks of many boxes; a chunk that serves several of them, or equals another, is read once."""

    def __init__(self, parts: Mapping[int, Part]) -> None:
        self._parts = parts
        self._bundles: dict[tuple[int, int], tuple[list[Cut], list[int]]] = {}
        self._rows: dict[tuple[int, str, Box], Target] = {}
        self._kept: dict[tuple[int, int], tuple[Kept, ...]] = {}
        self._runs: dict[int, dict[int, list[tuple[int, int]]]] = {}
        self.jobs: dict[object, ChunkJob] = {}

    def add(self, rank: int, row: ShardRow, held: Box, box: Box, target: Target) -> None:
        """Plan what the stored box `held` gives to the wanted box `box`."""
        if row.bundle is not None:
            self._add_bundled(rank, row, held, box, target)
            return
        part, size = self._parts[rank], DTYPES[row.dtype].size
        for n, (cut, chunk) in enumerate(zip(cuts(row.shape, held, size, part.chunk), row.chunks, strict=True)):
            copy = copies(cut.box, box, size)
            if copy is not None:
                self._job(part, rank, row, chunk, n, cut.box).copies.append((target, copy))

    def _add_bundled(self, rank: int, row: ShardRow, held: Box, box: Box, target: Target) -> None:
        assert row.bundle is not None
        part, size = self._parts[rank], DTYPES[row.dtype].size
        if held != box:
            # Its bytes may straddle two chunks of the bundle, so the stored box is put together first.
            row_key = (rank, row.leaf, held)
            known = row_key in self._rows
            whole_row = self._rows.setdefault(row_key, Target(held.numel * size, held.numel * size))
            onward = copies(held, box, size)
            assert onward is not None, "only boxes that meet are added"
            whole_row.onward.append((target, onward))
            if known:
                return
            target = whole_row
        number, first = row.bundle
        pieces, starts = self._bundle(rank, number)
        kept = self._kept_of(rank, number, pieces)
        start, stop = first * size, (first + held.numel) * size
        for n in range(bisect_right(starts, start) - 1, len(pieces)):
            cut = pieces[n]
            if cut.start >= stop:
                break
            a, b = max(cut.start, start), min(cut.stop, stop)
            mine = kept[n] if kept else None
            job = self._job(part, rank, row, part.bundles[number].chunks[n], n, cut.box, mine)
            at = a - cut.start if mine is None else mine.at(a - cut.start)
            job.copies.append((target, Run(at, at + b - a, a - start)))

    def _bundle(self, rank: int, number: int) -> tuple[list[Cut], list[int]]:
        found = self._bundles.get((rank, number))
        if found is None:
            part = self._parts[rank]
            bundle = part.bundles[number]
            shape = (bundle.length,)
            pieces = list(cuts(shape, whole(shape), DTYPES[bundle.dtype].size, part.chunk))
            found = self._bundles[rank, number] = (pieces, [cut.start for cut in pieces])
        return found

    def _kept_of(self, rank: int, number: int, pieces: Sequence[Cut]) -> tuple[Kept, ...]:
        """What of each chunk of a bundle is the part's own; nothing where that is all of it."""
        digests = self._parts[rank].bundles[number].kept
        if not digests:
            return ()
        found = self._kept.get((rank, number))
        if found is None:
            runs = self._own_runs(rank)[number]
            found = tuple(Kept(_cut_up(runs, cut), digest) for cut, digest in zip(pieces, digests, strict=True))
            self._kept[rank, number] = found
        return found

    def _own_runs(self, rank: int) -> dict[int, list[tuple[int, int]]]:
        """By bundle, the runs of its bytes that are shards of the part, sorted and apart."""
        found = self._runs.get(rank)
        if found is None:
            found = self._runs[rank] = {}
            for row in self._parts[rank].shards:
                if row.bundle is not None and row.nbytes:
                    start = row.bundle[1] * DTYPES[row.dtype].size
                    found.setdefault(row.bundle[0], []).append((start, start + row.nbytes))
            for number, runs in found.items():
                found[number] = _merged(runs)
        return found

    def _job(
        self, part: Part, rank: int, row: ShardRow, chunk: ChunkRow, n: int, box: Box, kept: Kept | None = None
    ) -> ChunkJob:
        blobs = tuple(part.blob(b) for b in chunk.blobs)
        of = box if chunk.of is None else Box(*chunk.of)
        # Equal chunks share blobs wherever they lie; only for clipped ones the place matters.
        number = None if row.bundle is None else row.bundle[0]
        # Of old bundles, each part keeps something else.
        whose = None if kept is None else (rank, number)
        key: object = (blobs, row.dtype, chunk.digest, box.numel if of == box else (of, box), whose)
        job = self.jobs.get(key)
        if job is None:
            key_ = PartName(part.id, rank, part.revision).key
            place = Place(key_, part.id.step, rank, row.leaf, n)
            shape = row.shape if row.bundle is None else (part.bundles[row.bundle[0]].length,)
            if not of.within(shape) or of.intersect(box) != box:
                raise _clipped_wrong(place, box, of)
            job = self.jobs[key] = ChunkJob(place, blobs, row.dtype, of, box, chunk.digest, bundle=number, kept=kept)
        return job


def _merged(runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(runs):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((start, stop))
    return merged


def _cut_up(runs: Sequence[tuple[int, int]], cut: Cut) -> tuple[tuple[int, int, int], ...]:
    """Of sorted runs of a bundle's bytes, what lies in one of its chunks; see `Kept.ranges`."""
    ranges: list[tuple[int, int, int]] = []
    at = 0
    for start, stop in runs[max(bisect_right(runs, cut.start, key=itemgetter(0)) - 1, 0) :]:
        if start >= cut.stop:
            break
        a, b = max(start, cut.start) - cut.start, min(stop, cut.stop) - cut.start
        if a < b:
            ranges.append((a, b, at))
            at += b - a
    return tuple(ranges)
