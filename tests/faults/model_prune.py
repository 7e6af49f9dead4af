"""The values of the model, and what its prune decides: PROTOCOL.md §5 as sets. See `model.py`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ckpt.format.names import PackName, PartName, RunId, SnapshotId, SnapshotName, parse_run_key
from tests.faults.simulated import GRACE

RULES = frozenset(
    {
        "packs before the part",
        "the fence",
        "parts listed once more",
        "claims give way to announcements",
        "commits give way to announcements",
        "the second look",
        "the newest run keeps what it may lean on",
        "a step that may yet be committed keeps what it leans on",
        "leftovers younger than grace stay",
        "leftovers of the newest run stay",
        "runs are listed before parts",
    }
)


@dataclass(frozen=True)
class Run:
    ranks: int
    resumed_from: SnapshotId | None
    job: str


@dataclass(frozen=True)
class Part:
    reference: SnapshotId | None
    packs: tuple[str, ...]
    ranks: int


@dataclass(frozen=True)
class Snapshot:
    id: SnapshotId
    parts: tuple[Part, ...]

    @property
    def packs(self) -> tuple[str, ...]:
        return tuple(sorted({pack for part in self.parts for pack in part.packs}))

    @property
    def reference(self) -> SnapshotId | None:
        return min((p.reference for p in self.parts if p.reference is not None), default=None)

    @property
    def part_keys(self) -> tuple[str, ...]:
        return tuple(PartName(self.id, rank).key for rank in range(len(self.parts)))


@dataclass(frozen=True)
class Prune:
    ids: frozenset[SnapshotId]
    keys: tuple[str, ...]

    @property
    def committed(self) -> frozenset[SnapshotId]:
        """Those whose snapshots go; the others are leftovers."""
        return frozenset(name.id for key in self.keys if (name := SnapshotName.parse(key)) is not None)


@dataclass(frozen=True)
class Look:
    """One look at the store, as a prune sees it: key → when it landed, and the documents."""

    listed: dict[str, float]
    runs: dict[RunId, Run]
    snapshots: dict[SnapshotId, Snapshot]
    pins: frozenset[SnapshotId]
    announced: dict[str, Prune]

    @property
    def newest_run(self) -> RunId | None:
        return max(self.runs, default=None)


def decide(
    look: Look, keep: int, now: float, without: frozenset[str], only: frozenset[SnapshotId] | None = None
) -> tuple[frozenset[SnapshotId], frozenset[SnapshotId], tuple[str, ...]]:
    """Snapshots that go (of `only` at most), steps of which leftovers go, and all keys in order."""
    solid = look.snapshots.keys() - going(look.announced)
    told_off = frozenset[SnapshotId]().union(*(p.committed for p in look.announced.values()))
    hard = protected(look, now, told_off, without) | ({max(solid)} if solid else set())
    live = sorted(line(look, max(solid, default=None), solid), reverse=True)
    soft = {*live[:keep], *(look.snapshots.keys() - solid - told_off)}
    kept = hard | (soft - told_off)
    if only is not None:
        kept |= look.snapshots.keys() - only
    gone = frozenset(look.snapshots.keys() - kept)
    named = {k for i in kept if i in look.snapshots for k in look.snapshots[i].packs}
    released = {k for i in gone for k in look.snapshots[i].packs}
    for prune in look.announced.values():
        late = prune.ids - prune.committed
        for key in prune.keys:
            i = step_of(key)
            if i is None or i in late or key.startswith("snapshots/"):
                continue
            if key.startswith("packs/") or i not in look.snapshots:
                released.add(key)
    newest = look.newest_run
    top: dict[RunId, int] = {}
    for i in look.snapshots:
        top[i.run] = max(i.step, top.get(i.run, 0))
    groups: dict[SnapshotId, list[str]] = {}
    for key in look.listed:
        i = step_of(key)
        if i is None or i in gone or key in named | released:
            continue
        if i not in kept or (i in look.snapshots and key.startswith("packs/")):
            groups.setdefault(i, []).append(key)
    left = set()
    for i, keys in groups.items():
        over = i.step < top.get(i.run, 0) or (newest is not None and i.run < newest)
        over = over or "leftovers of the newest run stay" in without
        young = max(look.listed[k] for k in keys) >= now - GRACE
        if over and (not young or "leftovers younger than grace stay" in without):
            left.add(i)
    taken = {
        key
        for key in look.listed
        if (i := step_of(key)) is not None
        and ((i in gone and not key.startswith("packs/")) or key in released or (i in left and key in groups[i]))
        and key not in named
    }
    order = ("snapshots/", "parts/", "packs/")
    return gone, frozenset(left), tuple(sorted(taken, key=lambda k: (order.index(k[: k.index("/") + 1]), k)))


def protected(look: Look, now: float, told_off: Iterable[SnapshotId], without: frozenset[str]) -> set[SnapshotId]:
    found = set(look.pins)
    newest_commit = max((i.run for i in look.snapshots), default=None)
    for run, doc in look.runs.items():
        if doc.resumed_from is not None and (newest_commit is None or run > newest_commit):
            found.add(doc.resumed_from)
    leaning: list[tuple[RunId, float]] = []
    if look.newest_run is not None and "the newest run keeps what it may lean on" not in without:
        leaning.append((look.newest_run, float("inf")))
    steps: dict[SnapshotId, list[str]] = {}
    for key in look.listed:
        if (name := PartName.parse(key)) is not None:
            steps.setdefault(name.id, []).append(key)
    for i, keys in steps.items():
        complete = i.run not in look.runs or len(keys) >= look.runs[i.run].ranks
        young = any(look.listed[k] >= now - GRACE for k in keys)
        may_yet = complete and young and i not in look.snapshots and i not in told_off
        if may_yet and "a step that may yet be committed keeps what it leans on" not in without:
            leaning.append((i.run, i.step))
    for run, below in leaning:
        top = max((i for i in look.snapshots if i.run == run and i.step < below), default=None)
        if top is not None:
            oldest = min(look.snapshots[top].reference or top, top)
            found |= {i for i in look.snapshots if i >= oldest}
        elif run in look.runs and (source := look.runs[run].resumed_from) is not None:
            found.add(source)
    return found


def going(announced: Mapping[str, Prune]) -> frozenset[SnapshotId]:
    return frozenset[SnapshotId]().union(*(p.ids for p in announced.values()))


def line(look: Look, tip: SnapshotId | None, among: Iterable[SnapshotId]) -> set[SnapshotId]:
    found: set[SnapshotId] = set()
    while tip is not None:
        found |= {i for i in among if i.run == tip.run and i.step <= tip.step}
        tip = look.runs[tip.run].resumed_from if tip.run in look.runs else None
    return found


def step_of(key: str) -> SnapshotId | None:
    name = PackName.parse(key) or PartName.parse(key) or SnapshotName.parse(key)
    return None if name is None else name.id


def run_of(key: str) -> RunId | None:
    step = step_of(key)
    return parse_run_key(key) if step is None else step.run
