"""What a prune may remove: pure decisions over one look at a store (PROTOCOL.md §5.1). Nothing here touches a store.

The same function decides twice, for the plan and again after the announcement; what both agree on goes. So whatever
appeared in between (a claim, a pin, a commit) is spared by the very rules that would have spared it in the plan.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from ckpt.format.manifest import PruneDoc, parse_snapshot
from ckpt.format.names import (
    PACKS,
    PARTS,
    PINS,
    SNAPSHOTS,
    PackName,
    PartName,
    RunId,
    SegmentName,
    SnapshotId,
    SnapshotName,
    parse_run_key,
    run_key,
)
from ckpt.history.catalog import History, Problem
from ckpt.history.keep import Keep, reasons
from storage_backends.base import Entry
from storage_backends.tiered import DURABLE, FAST


@dataclass(frozen=True, slots=True)
class Order:
    """What was asked for. `grace`: seconds by the store's own clock for which leftovers stay; 0 also says that no
    other job writes here now."""

    keep: Keep
    grace: float
    remove: frozenset[SnapshotId] = frozenset()


@dataclass(frozen=True, slots=True)
class Decision:
    """What goes, and why the rest stays.

    `snapshots`: ids whose snapshots go; `leftovers`: steps never committed (or whose parts are gone) of which
    something goes. The keys are in order of removal: documents, parts, packs, segments of the journal. `kept`:
    snapshot → why.
    """

    snapshots: tuple[SnapshotId, ...] = ()
    leftovers: tuple[SnapshotId, ...] = ()
    documents: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    packs: tuple[str, ...] = ()
    segments: tuple[str, ...] = ()
    kept: Mapping[SnapshotId, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def keys(self) -> tuple[str, ...]:
        """Everything that goes, in order of removal."""
        return self.documents + self.parts + self.packs + self.segments


@dataclass(frozen=True, slots=True)
class _Objects:
    """Listed objects by the step they belong to."""

    documents: dict[SnapshotId, list[Entry]] = field(default_factory=dict)
    parts: dict[SnapshotId, list[Entry]] = field(default_factory=dict)
    packs: dict[SnapshotId, list[Entry]] = field(default_factory=dict)

    def of(self, id_: SnapshotId) -> list[Entry]:
        return [e for group in (self.documents, self.parts, self.packs) for e in group.get(id_, ())]


def decide(
    history: History,
    order: Order,
    unfinished: Iterable[PruneDoc],
    now: float | None,
    only: Collection[SnapshotId] | None = None,
) -> Decision:
    """What of `history` (read with ``packs=True``) goes.

    Args:
        history: one look at the store.
        order: what was asked for.
        unfinished: announcements of earlier prunes, which are finished unless something protects what they name.
        now: POSIX seconds by the store's own clock, or an estimate of it; None: the store has no clock.
        only: the snapshots that may go at most (those announced), None: any. What stays for this reason needs its
            packs, even if it would go in a plan made now.
    """
    if blocked := blocking(history, order.remove):
        why = f"{blocked[0].key} cannot be read"
        notes = [f"nothing is removed: {p.text}; {way_out(p)}" for p in blocked]
        return Decision(kept=dict.fromkeys(sorted(history.snapshots), why), notes=tuple(notes))

    objects = _by_step(history)
    clock = _Clock(now, order.grace)
    unfinished = tuple(unfinished)
    kept, notes = _kept(history, order, objects, clock, unfinished)
    if only is not None:
        kept |= {id_: "not announced" for id_ in history.snapshots if id_ not in only and id_ not in kept}
    gone = frozenset(history.snapshots) - kept.keys()
    gone |= {id_ for id_ in order.remove if id_ in objects.documents and id_ not in kept}

    old = _superseded(history, kept, objects, clock, unfinished)
    staying = [s for key, s in history.documents.items() if _id(key) in kept and key not in old]
    named = {key for s in staying for key, _ in s.packs} | {p.key for s in staying for p in s.parts}
    going = [s for key, s in history.documents.items() if _id(key) in gone or key in old]
    released = (
        {key for s in going for key, _ in s.packs}
        | {p.key for s in going for p in s.parts}
        | {e.key for id_ in gone for e in objects.parts.get(id_, ())}
    )
    released = released.union(*(_released_by(doc, history) for doc in unfinished)) - named
    released -= {e.key for id_ in _in_the_making(history, objects) - gone for e in objects.of(id_)}
    taken = old | {e.key for id_ in gone for e in objects.documents.get(id_, ())} | (released & history.entries.keys())

    leftovers: list[SnapshotId] = []
    undated = 0
    newest_run = max({*history.runs, *history.unknown}, default=None)
    top: dict[RunId, int] = {}
    for id_ in history.snapshots:
        top[id_.run] = max(id_.step, top.get(id_.run, 0))
    for id_ in sorted({*objects.documents, *objects.parts, *objects.packs}):
        if id_ not in kept:
            rest = objects.of(id_)
        elif id_ in history.snapshots:
            # Also of a compaction that never committed; what an older revision names, while that stays, is `named`.
            rest = [*objects.parts.get(id_, ()), *objects.packs.get(id_, ())]
        else:
            continue  # claimed by name, and not (or no longer) there: whoever claimed it will say so
        rest = [e for e in rest if e.key not in taken and e.key not in named]
        over = id_.step < top.get(id_.run, 0) or (newest_run is not None and id_.run < newest_run)
        if not rest or not over:
            continue
        if clock.undated(rest):
            undated += len(rest)
        elif clock.old(rest):
            leftovers.append(id_)
            taken.update(e.key for e in rest)
    if undated:
        notes.append(
            f"{undated} leftovers of crashed saves stay: the store gives no modification times, so their age is "
            "unknown; while no job writes here, prune with grace 0"
        )
    ordered = sorted(taken, key=lambda key: (_id(key) in history.live, key))  # abandoned ones first
    return Decision(
        snapshots=tuple(sorted(gone)),
        leftovers=tuple(leftovers),
        documents=tuple(key for key in ordered if key.startswith(SNAPSHOTS)),
        parts=tuple(key for key in ordered if key.startswith(PARTS)),
        packs=tuple(key for key in ordered if key.startswith(PACKS)),
        segments=tuple(_segments(history, gone, clock, newest_run)),
        kept=kept,
        notes=tuple(notes),
    )


def _segments(history: History, gone: Collection[SnapshotId], clock: _Clock, newest_run: RunId | None) -> Iterator[str]:
    """Segments of the journal that go: with the snapshot they are replayed from, the newest of their run at or before
    their first record; or as leftovers, where there is none and their run is over."""
    steps: dict[RunId, list[int]] = {}
    for id_ in sorted(history.snapshots):
        steps.setdefault(id_.run, []).append(id_.step)
    for key, entry in sorted(history.entries.items()):
        name = SegmentName.parse(key)
        if name is None:
            continue
        mine = steps.get(name.run, [])
        at = bisect_right(mine, name.previous)
        if any(SnapshotId(name.run, step) not in gone for step in mine[at:] if step < name.step):
            continue  # it leads on from one that stays, too
        if at:
            if SnapshotId(name.run, mine[at - 1]) in gone:
                yield key
        elif newest_run is not None and name.run < newest_run and clock.old([entry]):
            yield key


def _in_the_making(history: History, objects: _Objects) -> set[SnapshotId]:
    """Steps that the newest run may still commit. No snapshot, and no prune before, has a say in what they need, so
    whatever names one of their parts or packs does not release it."""
    newest_run = max({*history.runs, *history.unknown}, default=None)
    top: dict[RunId, int] = {}
    for id_ in history.snapshots:
        top[id_.run] = max(id_.step, top.get(id_.run, -1))
    return {
        id_
        for id_ in {*objects.parts, *objects.packs} - history.snapshots.keys()
        if newest_run is not None and id_.run >= newest_run and id_.step > top.get(id_.run, -1)
    }


def blocking(history: History, but: Collection[SnapshotId] = ()) -> list[Problem]:
    """What cannot be read, so that what it protects, or which packs it names, is unknown: then nothing may go. `but`:
    snapshots that are to be removed themselves. Runs are no such thing: what one protects is bounded by when it began.
    """
    return [
        p
        for p in history.problems
        if p.kind == "unreadable"
        and parse_run_key(p.key) is None
        and not ((name := SnapshotName.parse(p.key)) and name.id in but)
    ]


def way_out(problem: Problem) -> str:
    """What a person can do about a document that blocks."""
    if problem.key.startswith(PINS):
        name = problem.key.removeprefix(PINS).removesuffix(".json")
        return f"put it back, or say that it protects nothing: ckpt unpin URL {name}"
    name_ = SnapshotName.parse(problem.key)
    what = "the snapshot" if name_ is None else name_.id.short
    return f"put it back, or give it up: ckpt prune URL --remove {what}"


def without_announced(history: History, unfinished: Iterable[PruneDoc]) -> History:
    """The history without what any prune has announced. Only on the rest can one rely: an announced leftover may have
    been committed after that prune's second look, and then loses its parts though it is listed now."""
    going = {text for doc in unfinished for text in doc.snapshots}
    return replace(history, snapshots={id_: s for id_, s in history.snapshots.items() if str(id_) not in going})


@dataclass(frozen=True, slots=True)
class _Clock:
    """Ages by the store's own clock. Grace 0 needs none."""

    now: float | None
    grace: float

    def old(self, entries: Collection[Entry]) -> bool:
        """Whether all of them are older than grace, for certain."""
        if self.grace <= 0:
            return True
        return self.now is not None and all(e.mtime is not None and e.mtime < self.now - self.grace for e in entries)

    def undated(self, entries: Collection[Entry]) -> bool:
        return self.grace > 0 and (self.now is None or any(e.mtime is None for e in entries))


def _kept(
    history: History, order: Order, objects: _Objects, clock: _Clock, unfinished: Collection[PruneDoc]
) -> tuple[dict[SnapshotId, str], list[str]]:
    """Every snapshot that stays, and ids without one that are claimed by name: id → why. And notes for people."""
    announced = announced_by(unfinished)
    solid = without_announced(history, unfinished)
    hard = _protected(history, objects, clock, announced)
    if solid.newest is not None:
        hard.setdefault(solid.newest, "the newest snapshot")
    notes = [f"{id_.short} was asked for, and stays: {hard[id_]}" for id_ in sorted(order.remove) if id_ in hard]
    notes += [
        f"{run_key(run)} cannot be read: older snapshots count as its line, and stay while it may lean on them: until "
        "it or a newer run has saved; if that job is dead and saved nothing, the object may be removed by hand"
        for run in sorted(history.unknown)
    ]
    if leaving := sorted(announced & history.snapshots.keys() - hard.keys()):
        notes.append(f"finishing an earlier prune: {', '.join(id_.short for id_ in leaving)}")
    if order.keep.everything:
        soft = dict.fromkeys(history.snapshots, "no policy asks for its removal")
    else:
        soft = reasons(order.keep, {id_: solid.snapshots[id_] for id_ in solid.live})
        soft |= dict.fromkeys(_young(solid, order.grace), "abandoned, and not yet older than grace")
    late = history.snapshots.keys() - solid.snapshots.keys() - announced
    soft |= dict.fromkeys(
        late, "committed after a prune took it for a leftover: whether it is whole, that prune decides"
    )
    soft = {id_: why for id_, why in soft.items() if id_ not in order.remove and id_ not in announced}
    return dict(sorted((soft | hard).items())), notes


def _young(solid: History, grace: float) -> list[SnapshotId]:
    """Abandoned snapshots that were saved less than `grace` before the newest one: a step back that was a mistake can
    still be taken back. Told by the times they recorded, since a store may give none."""
    newest = None if solid.newest is None else solid.snapshots[solid.newest].time
    if grace <= 0 or newest is None:
        return []
    times = {id_: solid.snapshots[id_].time for id_ in solid.abandoned}
    return [id_ for id_, time in times.items() if time is not None and time >= newest - grace]


def _protected(
    history: History, objects: _Objects, clock: _Clock, announced: Collection[SnapshotId]
) -> dict[SnapshotId, str]:
    """What nothing can remove (PROTOCOL.md §5.1)."""
    return (
        _leaned_on(history, objects, clock, announced)
        | _on_one_tier(history)
        | {pinned: f"pin {name}" for name, pinned in history.pins.items()}
    )


def _on_one_tier(history: History) -> dict[SnapshotId, str]:
    """Of a store of two tiers: what the durable one lacks yet, and the newest that it has. The fast tier may vanish at
    any moment, and then that one is all there is."""
    places = {id_: history.entries[key].places for id_, key in history.keys.items() if key in history.entries}
    found = {id_: "not yet on the durable tier" for id_, on in places.items() if on == (FAST,)}
    if found and (copied := [id_ for id_, on in places.items() if DURABLE in on]):
        found[max(copied)] = "the newest on the durable tier"
    return found


def _leaned_on(
    history: History, objects: _Objects, clock: _Clock, announced: Collection[SnapshotId]
) -> dict[SnapshotId, str]:
    """What a job may lean on, the weakest reason first. `announced`: snapshots that a prune has
    removed or will; what is left of one is no step in the making."""
    found: dict[SnapshotId, str] = {}
    snapshots = sorted(history.snapshots)
    of_run: dict[RunId, list[SnapshotId]] = {}
    for id_ in snapshots:
        of_run.setdefault(id_.run, []).append(id_)

    def lean_on(run: RunId, below: int | None, why: str) -> None:
        """Protect what a step of `run` after its newest snapshot (below step `below`) may lean on. Its ranks'
        references lie between the oldest `reference` in that snapshot's parts and itself: a rank that did not see a
        commit stays behind."""
        mine = [id_ for id_ in of_run.get(run, ()) if below is None or id_.step < below]
        if mine:
            oldest = parse_snapshot(history.snapshots[mine[-1]].reference) or mine[-1]
            first = min(oldest, mine[-1])
            found.update((id_, why) for id_ in snapshots if id_ >= first)
        elif run in history.unknown:
            found.update((id_, f"{why}; {run_key(run)} cannot be read") for id_ in snapshots if id_.run < run)
        elif (doc := history.runs.get(run)) is not None and (source := parse_snapshot(doc.resumed_from)) is not None:
            found[source] = why

    newest_run = max({*history.runs, *history.unknown}, default=None)
    for run in {*history.runs, *history.unknown, *of_run}:
        if newest_run is None or run >= newest_run:
            lean_on(run, None, f"run {run} may lean on it")
    # A run that is not the newest cannot begin a commit (the fence). But it may have passed the fence already, and then
    # all its parts lay ready before the newer run's document, hence in our list; or its put of the snapshot timed out,
    # and lands late. Both are over once the parts are older than grace: then they are swept, and nothing can name them.
    for id_, group in objects.parts.items():
        doc = history.runs.get(id_.run)
        ranks = {n.rank for e in group if (n := PartName.parse(e.key)) and n.revision == 0}
        complete = doc is None or len(ranks) >= doc.world_size
        if id_ not in history.snapshots and id_ not in announced and complete and not clock.old(group):
            lean_on(id_.run, id_.step, f"step {id_.short}, not committed, may lean on it")
    newest_commit = max(of_run, default=None)
    for run, doc in history.runs.items():
        source = parse_snapshot(doc.resumed_from)
        if source is not None and (newest_commit is None or run > newest_commit):
            found[source] = f"run {run} resumed from it"
    for run in history.unknown:
        if newest_commit is None or run > newest_commit:
            why = f"run {run} may have resumed from it; {run_key(run)} cannot be read"
            found.update((id_, why) for id_ in snapshots if id_.run < run)
    return found


def announced_by(unfinished: Iterable[PruneDoc]) -> set[SnapshotId]:
    """The snapshots that earlier prunes have removed, or will; not those of which only an older revision goes."""
    return set[SnapshotId]().union(*map(_leaving, unfinished))


def _leaving(doc: PruneDoc) -> set[SnapshotId]:
    named = set(doc.snapshots)
    return {id_ for key in doc.keys if (id_ := _id(key)) is not None and str(id_) in named}


def leaned_on(
    history: History, unfinished: Iterable[PruneDoc], grace: float, now: float | None
) -> dict[SnapshotId, str]:
    """What a job may still read or lean on, and why: its snapshots stay with all their revisions, and are not
    compacted. Pins are not among these: they protect a snapshot, whichever revision of it."""
    return _leaned_on(history, _by_step(history), _Clock(now, grace), announced_by(unfinished))


def _superseded(
    history: History,
    kept: Collection[SnapshotId],
    objects: _Objects,
    clock: _Clock,
    unfinished: Collection[PruneDoc],
) -> set[str]:
    """Documents of snapshots that stay which a higher revision replaces (PROTOCOL.md §5.5).

    They stay with it while a job may lean on the snapshot: it may have read, and may name, what only they need. And
    while anything that the higher one needs is missing from our lists, which are older than it, or announced to go, or
    lies on the fast tier alone, which may vanish."""
    leaned = _leaned_on(history, objects, clock, announced_by(unfinished))
    doomed = {key for doc in unfinished for key in doc.keys}
    found: set[str] = set()
    for key in history.documents:
        name = SnapshotName.parse(key)
        if name is None or name.id not in kept or name.id in leaned or name.id not in history.keys:
            continue
        best = history.snapshots[name.id]
        needed = {pack for pack, _ in best.packs} | {part.key for part in best.parts} | {history.keys[name.id]}
        if name.revision >= best.revision or not needed <= history.entries.keys() or needed & doomed:
            continue
        if all(history.entries[one].places != (FAST,) for one in needed):
            found.add(key)
    return found


def _released_by(doc: PruneDoc, history: History) -> set[str]:
    """Parts and packs that an unfinished prune meant to remove with snapshots (not as leftovers, whose age it had
    still to check), and whose snapshots it has removed."""
    leaving = _leaving(doc)
    leftovers = {id_ for text in doc.snapshots if (id_ := SnapshotId.parse(text)) and id_ not in leaving}

    def stays(name: PartName | PackName) -> bool:
        if name.id in leftovers or isinstance(name, PackName) or name.id not in history.snapshots:
            return name.id in leftovers
        return name.revision >= history.snapshots[name.id].revision

    return {
        key for key in doc.keys if (name := PartName.parse(key) or PackName.parse(key)) is not None and not stays(name)
    }


def _by_step(history: History) -> _Objects:
    objects = _Objects()
    for key, entry in history.entries.items():
        if (name := PackName.parse(key)) is not None:
            objects.packs.setdefault(name.id, []).append(entry)
        elif (part := PartName.parse(key)) is not None:
            objects.parts.setdefault(part.id, []).append(entry)
        elif (snapshot := SnapshotName.parse(key)) is not None:
            objects.documents.setdefault(snapshot.id, []).append(entry)
    return objects


def _id(key: str) -> SnapshotId | None:
    name = SnapshotName.parse(key)
    return None if name is None else name.id
