"""What must hold in every schedule, whatever dies, stops, lags or lands late: the promises of PROTOCOL.md, looked after
from outside. The same rules watch the model and the real code; only how an object is read differs.

* No listed snapshot ever loses a byte: while all parts of a snapshot are there, so are all its packs.
* A part of a snapshot goes only if it is older than grace and a prune has announced that step. A snapshot goes only if
  announced, not pinned, not claimed by a run that leads, and a newer whole one remains. Whoever withdraws its own
  snapshot has lost a part, or is about to.
* No two attempts mix: all parts of a snapshot, and all packs of its step, come from one job.
* The fence: a run commits nothing of which a part landed after a newer run's document could be listed.
* What a rank was told is committed is there at that moment, and, if it wrote it, was whole when it landed, and stays
  so until a prune removes the snapshot.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from ckpt.format.names import (
    PackName,
    PartName,
    RunId,
    SnapshotId,
    SnapshotName,
    parse_run_key,
)
from tests.faults.simulated import GRACE, Object, Violated

PRUNE = "prune"
"""How the name of every prune begins, in `Actor.by`."""


@dataclass(frozen=True, slots=True)
class Commit:
    """A snapshot: part key → what its bytes must be, and pack keys."""

    id: SnapshotId
    parts: Mapping[str, Any]
    packs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Announced:
    """What a prune says will go: steps of which something goes, and those among them whose snapshots go."""

    steps: frozenset[SnapshotId]
    snapshots: frozenset[SnapshotId]


class Reading(Protocol):
    """How to read objects: bytes in the real store, plain values in the model."""

    def commit(self, key: str, value: Any) -> Commit: ...
    def token(self, value: Any) -> Any:
        """What a commit holds of a part, to know it again."""
        ...

    def announced(self, key: str, value: Any) -> Announced: ...


@dataclass
class Rules:
    """See the module."""

    reading: Reading
    lag: float = 0.0
    objects: dict[str, Object] = field(default_factory=dict)
    commits: dict[SnapshotId, Commit] = field(default_factory=dict)
    announcements: dict[str, Announced] = field(default_factory=dict)
    runs: dict[RunId, float] = field(default_factory=dict)
    pins: dict[str, SnapshotId] = field(default_factory=dict)
    claims: dict[RunId, SnapshotId] = field(default_factory=dict)
    told: set[SnapshotId] = field(default_factory=set)
    sure: set[SnapshotId] = field(default_factory=set)
    stood: set[SnapshotId] = field(default_factory=set)
    pruned: int = 0
    withdrawn: int = 0

    # --- what happens to the store

    def landed(self, key: str, found: Object) -> None:
        if key.startswith("snapshots/"):
            commit = self.reading.commit(key, found.value)
            self._check(commit, key)
            self.commits[commit.id] = commit
        elif key.startswith("prunes/"):
            self.announcements[key] = self.reading.announced(key, found.value)
        elif (run := parse_run_key(key)) is not None:
            self.runs.setdefault(run, found.landed)

    def removed(self, key: str, found: Object, by: str, now: float) -> None:
        if (name := SnapshotName.parse(key)) is not None:
            commit = self.commits.pop(name.id)
            self.sure.discard(name.id)
            if by.startswith(PRUNE):
                self._check_removal(name.id, by)
                self.pruned += 1
            else:
                self.withdrawn += 1
                if self.whole(commit) and name.id not in self.going:
                    raise Violated(f"{by} withdrew {name.id}, which has all its parts")
        elif key.startswith("prunes/"):
            del self.announcements[key]
        elif (part := PartName.parse(key)) is not None:
            # A step announced as a leftover may have been committed late, and is lost then: only when it is that old.
            # One whose snapshot was announced may have been committed once more, by a rank that came late.
            old = now - found.landed > GRACE or any(part.id in a.snapshots for a in self.announcements.values())
            if part.id in self.commits and (part.id not in self.going or not old):
                raise Violated(f"{by} removed {key}, whose step is committed, and not announced or too young")
            if part.id in self.sure:
                raise Violated(f"{by} removed {key}, and who committed its step was told that it is committed")
            # Another rank may have read the snapshot before its writer, who was stopped for longer than grace between
            # the fence and its put, found that a prune was sweeping it. That rank's next save stops at the fence.
            self.told.discard(part.id)
        elif PackName.parse(key) is not None:
            for commit in self.commits.values():
                if key in commit.packs and self.whole(commit):
                    raise Violated(f"{by} removed {key}, and {commit.id} is listed and names it")

    # --- what actors know

    def told_committed(self, id_: SnapshotId, by: str) -> None:
        """A rank has seen the commit of this step."""
        commit = self.commits.get(id_)
        if commit is None:
            raise Violated(f"{by} was told that {id_} is committed, and it is not there")
        # Another rank may read it before its writer, having looked at the parts once more, withdraws it: of a run that
        # a newer one has replaced, or its parts would be there. That rank's next save stops at the fence.
        if id_ not in self.stood and self.objects[SnapshotName(id_).key].by == by:
            raise Violated(f"{by} was told that {id_} is committed, and a part had gone before it landed")
        self.told.add(id_)
        if self.objects[SnapshotName(id_).key].by == by:
            self.sure.add(id_)

    def claimed(self, run: RunId, id_: SnapshotId) -> None:
        """A run has claimed the snapshot, looked for prunes, and read its document."""
        self.claims[run] = id_

    def pinned(self, name: str, id_: SnapshotId) -> None:
        self.pins[name] = id_

    # --- at the end

    def finish(self) -> None:
        for commit in self.commits.values():
            if self.whole(commit):
                self._check_packs(commit)
        if self.told and not any(self.whole(c) for c in self.commits.values()):
            raise Violated(f"{len(self.told)} steps were committed, and no snapshot is left")

    def whole(self, commit: Commit) -> bool:
        """Whether it is listed: all its parts are there."""
        return all(key in self.objects for key in commit.parts)

    def leads(self, run: RunId) -> bool:
        """Whether no newer run than this one, nor itself, has committed: then its claim counts."""
        return all(run > id_.run for id_ in self.commits)

    @property
    def going(self) -> frozenset[SnapshotId]:
        """What prunes have announced and may still remove."""
        return frozenset[SnapshotId]().union(*(a.steps for a in self.announcements.values()))

    # --- the rules

    def _check(self, commit: Commit, key: str) -> None:
        by, latest = set(), 0.0
        for part_key, token in commit.parts.items():
            name = PartName.parse(part_key)
            if name is None or name.id != commit.id:
                raise Violated(f"{key} names {part_key}, of another run or step")
            part = self.objects.get(part_key)
            if part is not None:
                by.add(part.by.rpartition(".")[0])
                latest = max(latest, part.landed)
                if self.reading.token(part.value) != token:
                    raise Violated(f"{key} names other bytes of {part_key} than are there")
        by |= {
            self.objects[pack].by.rpartition(".")[0]
            for pack in commit.packs
            if (n := PackName.parse(pack)) is not None and n.id == commit.id and pack in self.objects
        }
        if len(by) > 1:
            raise Violated(f"{key} mixes the work of {sorted(by)}")
        fence = min((at for run, at in self.runs.items() if run > commit.id.run), default=float("inf"))
        if latest > fence + self.lag:
            raise Violated(
                f"{key} was committed though a newer run began at {fence:.1f} and a part landed at {latest:.1f}"
            )
        if self.whole(commit):
            self.stood.add(commit.id)
            self._check_packs(commit)

    def _check_packs(self, commit: Commit) -> None:
        if lost := [pack for pack in commit.packs if pack not in self.objects]:
            raise Violated(f"{commit.id} is listed, and lacks {lost[0]}")

    def _check_removal(self, id_: SnapshotId, by: str) -> None:
        if id_ not in self.going:
            raise Violated(f"{by} removed snapshot {id_} without announcing it")
        for name, pinned in self.pins.items():
            if pinned == id_:
                raise Violated(f"{by} removed snapshot {id_}, which pin {name} protects")
        for run, claimed in self.claims.items():
            if claimed == id_ and self.leads(run):
                raise Violated(f"{by} removed snapshot {id_}, from which run {run} resumes")
        going = self.going
        if not any(other > id_ and other not in going and self.whole(c) for other, c in self.commits.items()):
            raise Violated(f"{by} removed snapshot {id_}, and no newer whole one stays")
