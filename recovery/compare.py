"""Two snapshots, leaf by leaf and value by value: what changed, and by how much. Reads no more than it needs.

Chunks of the same box whose digests are equal are equal, and are not read; of the others both sides are, a bounded
window at a time. So the norms are taken over the chunks that differ: the norm of all of a leaf of which one row
changed would cost reading all of it.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from ckpt.format.manifest import Part, ShardRow
from ckpt.format.names import SnapshotId
from ckpt.format.shards import DTYPES, Box, Leaf, Shard, cuts, whole
from ckpt.progress import UNWATCHED, Watch
from recovery.assemble import Wanted
from recovery.boxes import Bytes
from recovery.compare_values import ValueChange, value_changes
from recovery.followed import Followed
from recovery.numbers import differences, differing, values
from recovery.parallel import THREADS
from recovery.shards import MEMORY
from storage_backends.base import Store

WINDOW = 16 * 1024 * 1024
"""Raw bytes of each side that are compared at a time."""
STRIDE = 256 * 1024
"""Elements turned into numbers at a time."""

Verdict: TypeAlias = Literal["same", "changed", "added", "removed", "reshaped"]
Place: TypeAlias = tuple[str, int | None]
"""A leaf's or value's path, and the rank where each rank has its own."""


@dataclass(frozen=True, slots=True)
class Form:
    """What kind of tensor a leaf is."""

    cls: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.elements * DTYPES[self.dtype].size


@dataclass(frozen=True, slots=True)
class LeafChange:
    """What became of one leaf between two snapshots.

    Attributes:
        rank: whose value, where each rank has its own.
        before, after: None where it is not there. They differ in dtype or shape where `verdict` is "reshaped".
        changed: elements whose bits differ.
        difference: norm of what was added, over elements that are finite on both sides.
        norm: norm of the older side, over the elements of the chunks that were read (those that differ).
        largest: largest single difference.
        not_finite: changed elements that are infinite or NaN on a side.
    """

    path: str
    rank: int | None
    verdict: Verdict
    before: Form | None
    after: Form | None
    changed: int = 0
    difference: float = 0.0
    norm: float = 0.0
    largest: float = 0.0
    not_finite: int = 0

    @property
    def name(self) -> str:
        return self.path if self.rank is None else f"{self.path}@rank{self.rank}"

    @property
    def nbytes(self) -> int:
        form = self.after or self.before
        return 0 if form is None else form.nbytes

    @property
    def share(self) -> float:
        """Changed elements over all of them; 1 for what came, went or took another form."""
        if self.verdict == "changed" and self.after is not None:
            return self.changed / max(self.after.elements, 1)
        return 0.0 if self.verdict == "same" else 1.0

    @property
    def relative(self) -> float | None:
        """`difference` over `norm`; None where there is nothing to divide by."""
        return self.difference / self.norm if self.verdict == "changed" and self.norm > 0 else None


@dataclass(frozen=True, slots=True)
class Difference:
    """All leaves of both snapshots (by path), and the values that changed."""

    a: SnapshotId
    b: SnapshotId
    leaves: tuple[LeafChange, ...]
    values: tuple[ValueChange, ...]

    @property
    def equal(self) -> bool:
        return not self.values and all(leaf.verdict == "same" for leaf in self.leaves)


def compare(
    store: Store,
    a: SnapshotId,
    b: SnapshotId,
    names: Sequence[str] | None = None,
    *,
    memory: int = MEMORY,
    threads: int = THREADS,
    watch: Watch = UNWATCHED,
) -> Difference:
    """How `b` differs from `a`, which need not be older, nor stored by as many ranks.

    Args:
        names: glob patterns of paths; only what one of them matches is compared.
        memory: most encoded bytes in flight, as for `read_shards`.
        watch: told of raw bytes that differ, of both sides.

    Raises:
        Pruned, DamagedError: one of them is not there, or not whole.
        StorageError: the store does not answer.
    """
    old, new = (_Side(Followed(store, id_, threads=threads), names) for id_ in (a, b))
    tallies: dict[Place, _Tally] = {}
    wanted: list[tuple[Place, Box]] = []
    for place in old.rows.keys() & new.rows.keys():
        if _comparable(old.forms[place], new.forms[place]):
            tallies[place] = _Tally(new.forms[place].dtype)
            wanted.extend((place, box) for box in _unequal(old, new, place))
    sizes = {place: DTYPES[new.forms[place].dtype].size for place, _ in wanted}
    watch.expect(sum(2 * box.numel * sizes[place] for place, box in wanted))
    for window in _windows(sorted(wanted, key=lambda w: _order(w[0])), new.forms):
        read = [side.read(window, memory) for side in (old, new)]
        for at in window:
            tallies[at[0]].add(read[0].pop(at), read[1].pop(at))
            watch.done(2 * at[1].numel * sizes[at[0]])
    leaves = []
    for place in sorted(old.forms.keys() | new.forms.keys(), key=_order):
        before, after = old.forms.get(place), new.forms.get(place)
        leaves.append(_change(place, before, after, tallies.get(place)))
    return Difference(a, b, tuple(leaves), tuple(value_changes(old.parts, new.parts, new.matches)))


def _order(place: Place) -> tuple[str, int]:
    return place[0], -1 if place[1] is None else place[1]


def _comparable(before: Form, after: Form) -> bool:
    return (before.dtype, before.shape) == (after.dtype, after.shape)


def _change(place: Place, before: Form | None, after: Form | None, tally: _Tally | None) -> LeafChange:
    path, rank = place
    if tally is None:
        kind: Verdict = "added" if before is None else "removed" if after is None else "reshaped"
        return LeafChange(path, rank, kind, before, after)
    kind = "changed" if tally.changed else "same"
    return LeafChange(
        path, rank, kind, before, after,
        tally.changed, math.sqrt(tally.difference), math.sqrt(tally.norm), tally.largest, tally.not_finite,
    )  # fmt: skip


class _Side:
    """The parts of one snapshot, and of them what is asked for."""

    def __init__(self, source: Followed, names: Sequence[str] | None) -> None:
        self.source = source
        self.parts: Mapping[int, Part] = source.parts
        self.names = names
        self.rows: dict[Place, list[tuple[int, ShardRow]]] = {}
        self.forms: dict[Place, Form] = {}
        for rank, part in sorted(self.parts.items()):
            for row in part.shards:
                if self.matches(row.leaf):
                    place = (row.leaf, rank if row.per_rank else None)
                    self.rows.setdefault(place, []).append((rank, row))
                    self.forms.setdefault(place, Form(row.cls, row.dtype, row.shape))

    def matches(self, path: str) -> bool:
        return self.names is None or any(fnmatch.fnmatchcase(path, pattern) for pattern in self.names)

    def want(self, place: Place, box: Box) -> Wanted:
        path, rank = place
        form = self.forms[place]
        return Wanted(Shard(Leaf(path, form.cls, form.dtype, form.shape), box, rank is not None), rank)

    def read(self, window: Sequence[tuple[Place, Box]], memory: int) -> dict[tuple[Place, Box], Bytes]:
        """The bytes of these boxes."""
        found = self.source.read([self.want(*at) for at in window], memory=memory)
        return {((w.shard.leaf.path, w.rank), w.shard.box): data for w, data in found}

    def contents(self, place: Place) -> Iterator[tuple[Box, object]]:
        """The boxes of a leaf, and for each what is equal only if the bytes are: a digest, or for a small leaf the
        digests of its bundle's chunks and where in them it lies."""
        for rank, row in self.rows[place]:
            part, box, size = self.parts[rank], row.as_box, DTYPES[row.dtype].size
            if box.empty:
                continue
            if row.bundle is None:
                for cut, chunk in zip(cuts(row.shape, box, size, part.chunk), row.chunks, strict=True):
                    yield cut.box, chunk.digest
                continue
            bundle = part.bundles[row.bundle[0]]
            start = row.bundle[1] * size
            stop = start + row.nbytes
            shape = (bundle.length,)
            yield (
                box,
                tuple(
                    (chunk.digest, cut.stop - cut.start, start - cut.start)
                    for cut, chunk in zip(cuts(shape, whole(shape), size, part.chunk), bundle.chunks, strict=True)
                    if cut.start < stop and start < cut.stop
                ),
            )


def _unequal(old: _Side, new: _Side, place: Place) -> Iterator[Box]:
    """The boxes of the newer side of which the older does not hold the same bytes; neighbours put together."""
    held = dict(old.contents(place))
    limit = max(WINDOW // DTYPES[new.forms[place].dtype].size, 1)
    last: Box | None = None
    for box, content in new.contents(place):
        if held.get(box) == content:
            continue
        joined = None if last is None or last.numel + box.numel > limit else _joined(last, box)
        if last is not None and joined is None:
            yield last
        last = joined or box
    if last is not None:
        yield last


def _joined(one: Box, next_: Box) -> Box | None:
    """The box that two make which follow each other in one dimension and are equal in the others."""
    apart = [
        d for d in range(len(one.offsets)) if (one.offsets[d], one.lengths[d]) != (next_.offsets[d], next_.lengths[d])
    ]
    if len(apart) != 1 or one.offsets[apart[0]] + one.lengths[apart[0]] != next_.offsets[apart[0]]:
        return None
    lengths = list(one.lengths)
    lengths[apart[0]] += next_.lengths[apart[0]]
    return Box(one.offsets, tuple(lengths))


def _windows(wanted: Iterable[tuple[Place, Box]], forms: Mapping[Place, Form]) -> Iterator[list[tuple[Place, Box]]]:
    window: list[tuple[Place, Box]] = []
    size = 0
    for place, box in wanted:
        nbytes = box.numel * DTYPES[forms[place].dtype].size
        if window and size + nbytes > WINDOW:
            yield window
            window, size = [], 0
        window.append((place, box))
        size += nbytes
    if window:
        yield window


@dataclass(slots=True)
class _Tally:
    """Sums over the chunks of one leaf that were read."""

    dtype: str
    changed: int = 0
    difference: float = 0.0
    norm: float = 0.0
    largest: float = 0.0
    not_finite: int = 0

    def add(self, old: Bytes, new: Bytes) -> None:
        size = DTYPES[self.dtype].size
        for start in range(0, len(new), STRIDE * size):
            x, y = old[start : start + STRIDE * size], new[start : start + STRIDE * size]
            differs = differing(self.dtype, x, y)
            self.changed += int(differs.sum())
            before, moved = values(self.dtype, x), differences(self.dtype, x, y)
            differs = np.repeat(differs, len(moved) // len(differs))
            moved[~differs] = 0.0  # inf - inf of an element that stayed is no NaN
            finite = np.isfinite(moved)
            self.not_finite += int((~finite).sum())
            moved, before = moved[finite], before[np.isfinite(before)]
            with np.errstate(over="ignore"):
                self.difference += float(np.dot(moved, moved))
                self.norm += float(np.dot(before, before))
            self.largest = max(self.largest, float(moved.max(initial=0.0)))
