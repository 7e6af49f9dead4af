"""Which steps a journal covers, and which rank replays what: pure, from the names of what is there.

A journaled step exists where the records of **all** saved ranks lead to it from a snapshot. Records lie on the store,
where any rank can read them, and in mirrors' folders, where the ranks of that node can; so a saved rank is replayed by
one that can read all of its records, if possible by the one that takes its place.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from ckpt.format.names import JOURNAL, RunId, SegmentName, SnapshotId, journal_prefix
from ckpt.history.catalog import History
from ckpt.mirror.ring import RecordName
from storage_backends.base import Store

Span: TypeAlias = tuple[int, int]
"""The step before the first record, and the step of the last."""


@dataclass(frozen=True, slots=True)
class Records:
    """Where the records of one run lie that this rank can read. `segments`: saved rank → span → key on the store;
    `ring`: saved rank → span → file on this node."""

    segments: Mapping[int, Mapping[Span, str]] = field(default_factory=dict)
    ring: Mapping[int, Mapping[Span, Path]] = field(default_factory=dict)

    def reach(self, rank: int, start: int) -> int:
        """The newest step to which records of `rank` lead from the state after step `start`."""
        spans = {**self.segments.get(rank, {}), **self.ring.get(rank, {})}
        at = start
        while True:
            further = max((last for before, last in spans if before <= at < last), default=at)
            if further == at:
                return at
            at = further

    def places(self, rank: int, at: int) -> list[str | Path]:
        """Where to look for the record that follows step `at`, best first."""
        found: list[str | Path] = [path for span, path in self.ring.get(rank, {}).items() if span[0] <= at < span[1]]
        segments = sorted(self.segments.get(rank, {}).items(), key=lambda item: (-item[0][1], -item[0][0]))
        return found + [key for span, key in segments if span[0] <= at < span[1]]

    def newest(self, start: int) -> int:
        """The newest step that any rank is known to have completed."""
        every = [span for spans in (*self.segments.values(), *self.ring.values()) for span in spans]
        return max((last for _, last in every), default=start)


@dataclass(frozen=True, slots=True)
class Replay:
    """What one rank of a new job does: roll saved rank `saved` from the snapshot to a later step."""

    saved: int
    first: int
    last: int

    @property
    def steps(self) -> int:
        return self.last - self.first


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """Who replays what. `target`: the step that all records cover; the snapshot's own where there is nothing beyond.
    `by`: saved rank → the rank that replays it. `newest`: the newest step that any rank is known to have completed."""

    base: SnapshotId
    target: int
    by: Mapping[int, int]
    newest: int

    def of(self, rank: int) -> tuple[Replay, ...]:
        return tuple(Replay(saved, self.base.step, self.target) for saved, by in sorted(self.by.items()) if by == rank)

    @property
    def lost(self) -> int:
        """Completed steps that do not come back."""
        return max(0, self.newest - self.target)

    def __str__(self) -> str:
        if self.target == self.base.step:
            return f"no journal leads beyond {self.base.short}"
        ranks = ", ".join(f"{saved} on rank {by}" for saved, by in sorted(self.by.items()))
        return f"replay steps {self.base.step + 1} to {self.target} of saved ranks {ranks}; {self.lost} steps are lost"


def plan_replay(
    base: SnapshotId, reaches: Sequence[Sequence[int]], newest: int, limit: int | None = None
) -> ReplayPlan:
    """Agree on the newest step that all records cover, and on who replays whom.

    Args:
        reaches: by rank of the new job, by saved rank: how far the records lead that this rank can read.
        newest: the newest step that any rank is known to have completed.
        limit: no further than this step.
    """
    saved = range(len(reaches[0]))
    target = min(max(mine[q] for mine in reaches) for q in saved)
    if limit is not None:
        target = min(target, limit)
    by: dict[int, int] = {}
    load = [0] * len(reaches)
    for q in saved:
        able = [rank for rank, mine in enumerate(reaches) if mine[q] >= target]
        chosen = q if q in able else min(able, key=lambda rank: (load[rank], rank))
        by[q] = chosen
        load[chosen] += 1
    return ReplayPlan(base, target, by, max(newest, target))


def stored_segments(store: Store, run: RunId) -> list[SegmentName]:
    """The segments of a run. Raises StorageError."""
    names = (SegmentName.parse(entry.key) for entry in store.list(journal_prefix(run)))
    return sorted(name for name in names if name is not None)


def records_of(segments: Iterable[SegmentName], ring: Iterable[tuple[RecordName, Path]], run: RunId) -> Records:
    """What can be read of one run."""
    on_store: dict[int, dict[Span, str]] = {}
    for name in segments:
        on_store.setdefault(name.rank, {})[name.previous, name.step] = name.key
    here: dict[int, dict[Span, Path]] = {}
    for record, path in ring:
        if record.run == run:
            here.setdefault(record.rank, {})[record.previous, record.step] = path
    return Records(on_store, here)


def covered(store: Store, history: History) -> dict[SnapshotId, int]:
    """Snapshot → the newest step to which the segments of all its ranks lead from it, where that is later. What lies
    in mirrors' folders is not looked at. Raises StorageError."""
    of_run: dict[RunId, list[SegmentName]] = {}
    for entry in store.list(JOURNAL):
        if (name := SegmentName.parse(entry.key)) is not None:
            of_run.setdefault(name.run, []).append(name)
    found: dict[SnapshotId, int] = {}
    for id_, snapshot in history.snapshots.items():
        if id_.run in of_run:
            records = records_of(of_run[id_.run], (), id_.run)
            step = min(records.reach(rank, id_.step) for rank in range(snapshot.world_size))
            if step > id_.step:
                found[id_] = step
    return found


@dataclass(frozen=True, slots=True)
class After:
    """What can be replayed after a snapshot: up to step `last`, from `nbytes` of segments of all its ranks."""

    last: int
    nbytes: int


def journal_after(store: Store, id_: SnapshotId, world_size: int) -> After | None:
    """What the segments of a run lead to from one of its snapshots; None if nowhere. Raises StorageError."""
    sizes = {entry.key: entry.size for entry in store.list(journal_prefix(id_.run))}
    names = [name for key in sizes if (name := SegmentName.parse(key)) is not None]
    records = records_of(names, (), id_.run)
    last = min(records.reach(rank, id_.step) for rank in range(world_size))
    if last == id_.step:
        return None
    return After(last, sum(sizes[name.key] for name in names if name.previous < last and name.step > id_.step))


def find_base(store: Store, history: History, name: int | str) -> tuple[SnapshotId, int] | None:
    """The snapshot from which the journal leads to the step that a person means, and that step: a step of the live
    line, ``GENERATION/STEP`` or a full id; None if none does."""
    text = str(name)
    full = SnapshotId.parse(text)
    short = re.fullmatch(r"([0-9]+)/([0-9]+)", text)
    if full is not None:
        step = full.step
    elif short is not None:
        step = int(short[2])
    elif text.isascii() and text.isdigit():
        step = int(text)
    else:
        return None
    bases = [id_ for id_, last in covered(store, history).items() if id_.step < step <= last]
    if full is not None:
        bases = [id_ for id_ in bases if id_.run == full.run]
    elif short is not None:
        bases = [id_ for id_ in bases if id_.run.generation == int(short[1])]
    else:
        # A run that another one went on from counts up to where that one began.
        firsts: dict[RunId, int] = {}
        for id_ in history.live:
            firsts[id_.run] = min(id_.step, firsts.get(id_.run, id_.step))
        bases = [
            id_
            for id_ in bases
            if id_ in history.live and all(step <= at for run, at in firsts.items() if run > id_.run)
        ]
    return (max(bases), step) if bases else None
