"""PROTOCOL.md §3-§5 once more, as a model: every object a plain value, every actor a generator whose steps are single
calls on the store. It shares no code with `ckpt.history`; it plays the same scenarios under the same rules.

`without` switches a rule of the protocol off. The exploration must then find a schedule that violates something: that
shows both that the rule is needed and that the exploration would see its absence.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

from ckpt.format.names import (
    PackName,
    PartName,
    RunId,
    SnapshotId,
    SnapshotName,
    alive_key,
    parse_run_key,
    parts_prefix,
    pin_key,
    prune_key,
    run_key,
)
from storage_backends.base import NotFound, StorageError
from tests.faults.model_prune import RULES, Look, Part, Prune, Run, Snapshot, decide, going, run_of
from tests.faults.playing import JobPlan, Scenario
from tests.faults.rules import PRUNE, Announced, Commit, Rules
from tests.faults.simulated import GRACE, INTERVAL, WAIT, Process, Scripted, Steps, Violated, World


class ModelReading:
    """Objects as values."""

    def commit(self, key: str, value: Any) -> Commit:
        return Commit(value.id, dict(zip(value.part_keys, value.parts, strict=True)), value.packs)

    def token(self, value: Any) -> Any:
        return value

    def announced(self, key: str, value: Any) -> Announced:
        return Announced(value.ids, value.committed)


class InUse(Exception):  # noqa: N818 - what the protocol calls it
    """A newer or a living run."""


class NotSeen(Exception):  # noqa: N818
    """A save that was not seen committed."""


@dataclass
class Job:
    """What the ranks of one start know of each other without the store."""

    plan: JobPlan
    run: RunId | None = None
    first: int = 1
    held: dict[int, tuple[SnapshotId, tuple[str, ...]]] = field(default_factory=dict)
    arrived: dict[int, int] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)


@dataclass
class Model:
    """All actors of one schedule."""

    world: World
    rules: Rules
    without: frozenset[str]

    # --- a job

    def lead(self, job: Job) -> Steps:
        try:
            yield from self.resume(job)
        except (StorageError, InUse):
            return
        for rank in range(1, job.plan.ranks):
            by = f"{job.plan.name}.{rank}"
            self.spawn(Process(by), by, lambda rank=rank: self.save(job, rank))
        yield from self.save(job, 0)
        if job.plan.ends:
            try:
                yield "put", alive_key(job.run), "ended"
            except StorageError:
                return

    def resume(self, job: Job) -> Steps:
        look = yield from self.read()
        candidates: list[SnapshotId | None] = sorted(look.snapshots, reverse=True)  # type: ignore[assignment]
        if job.plan.older and len(candidates) > 1:
            del candidates[0]
        for candidate in [*candidates, None]:
            yield from self.open(job, candidate)
            if candidate is None:
                return
            if (yield from self.announced(candidate)) and "claims give way to announcements" not in self.without:
                continue
            snapshot = yield from self.fetch(job.run, candidate)
            if snapshot is None:
                continue
            job.first = candidate.step + 1
            if self.world.random.random() < 0.5:
                parts = snapshot.parts
                job.held = {r: (candidate, parts[r % len(parts)].packs) for r in range(job.plan.ranks)}
            return

    def open(self, job: Job, resumed_from: SnapshotId | None) -> Steps:
        """§3.1, §3.3"""
        listed: set[str] = set()
        for prefix in ("runs/", "snapshots/", "parts/", "packs/"):
            listed |= {e.key for e in (yield "list", prefix)}
        newest = max((r for key in listed if (r := parse_run_key(key)) is not None), default=None)
        if newest is not None:
            other = yield "get", run_key(newest)
            if other.job != job.plan.job and (newest != job.run):
                yield from self.silence(newest)
        largest = max((run.generation for key in listed if (run := run_of(key)) is not None), default=0)
        job.run = RunId(largest + 1, self.world.nonce())
        yield "put", run_key(job.run), Run(job.plan.ranks, resumed_from, job.plan.job)

    def silence(self, run: RunId) -> Steps:
        first = yield from self.get(alive_key(run))
        deadline = self.world.time + 3 * INTERVAL
        while first != "ended" and self.world.time < deadline:
            yield "sleep", INTERVAL / 2
            now = yield from self.get(alive_key(run))
            if now == "ended":
                return
            if now != first:
                raise InUse

    def announced(self, id_: SnapshotId) -> Steps:
        for entry in (yield "list", "prunes/"):
            prune = yield from self.get(entry.key)
            if prune is not None and id_ in prune.ids:
                return True
        return False

    def fetch(self, run: RunId, id_: SnapshotId) -> Steps:
        snapshot = yield from self.get(SnapshotName(id_).key)
        if snapshot is None:
            return None
        for key in snapshot.part_keys:
            if (yield from self.get(key)) is None:
                return None
        self.rules.claimed(run, id_)
        for key in snapshot.packs:
            if (yield from self.get(key)) is None:
                if not self.rules.leads(run):
                    return None
                raise Violated(f"run {run} claimed {id_}, and {key} is gone")
        return snapshot

    def save(self, job: Job, rank: int) -> Steps:
        rng, plan, by = self.world.random, job.plan, f"{job.plan.name}.{rank}"
        held = job.held.get(rank)
        unseen: tuple[SnapshotId, Part] | None = None
        for step in range(job.first, job.first + plan.saves):
            job.arrived[step] = job.arrived.get(step, 0) + 1
            yield "wait", lambda step=step: job.arrived[step] >= plan.ranks
            id_ = SnapshotId(job.run, step)
            try:
                if unseen is not None and rng.random() < 0.5 and (yield from self.seen(unseen[0], rank, unseen[1])):
                    held = unseen[0], unseen[1].packs
                if rank == 0:
                    yield "put", alive_key(job.run), step
            except StorageError:
                pass
            base = () if held is None or rng.random() < plan.keyframes else held[1]
            new = () if base and rng.random() < 0.2 else (PackName(id_, rank, 0, "0" * 16).key,)
            part = Part(None if held is None else held[0], (*base, *new), plan.ranks)
            unseen = id_, part
            puts: list[tuple[str, Any]] = [*((key, by) for key in new), (PartName(id_, rank).key, part)]
            if "packs before the part" in self.without:
                puts.reverse()
            try:
                for key, value in puts:
                    yield "put", key, value
                yield from self.publish(job, id_, rank, part)
            except InUse:
                return
            except (StorageError, NotSeen):
                job.failed.add(step)
                continue
            self.rules.told_committed(id_, by)
            held, unseen = (id_, part.packs), None
            if rank == 0 and rng.random() < plan.prunes:
                name = f"{PRUNE} of {id_.short}"
                self.spawn(Process(name, stoppable=GRACE / 2), name, lambda: self.prune(plan.keep))

    # --- §4

    def publish(self, job: Job, id_: SnapshotId, rank: int, own: Part) -> Steps:
        ranks = job.plan.ranks
        deadline = self.world.time + WAIT
        turn = self.world.time + 0.2 * ((rank - id_.step) % ranks)
        keys = [PartName(id_, r).key for r in range(ranks)]
        while True:
            if ranks > 1 and (yield from self.seen(id_, rank, own)):
                return
            if self.world.time >= turn:
                there = {e.key for e in (yield "list", parts_prefix(id_))} if ranks > 1 else set(keys)
                parts: list[Any] = []
                if there.issuperset(keys):
                    for key in keys:
                        parts += [(yield from self.get(key))]
                if parts and None not in parts:
                    break
            if self.world.time > deadline or id_.step in job.failed:
                raise NotSeen
            yield "sleep", 0.3
        if "the fence" not in self.without:
            runs = [r for e in (yield "list", "runs/") if (r := parse_run_key(e.key)) is not None]
            if max(runs, default=id_.run) > id_.run:
                raise InUse
        with contextlib.suppress(StorageError):  # it may have landed
            yield "put", SnapshotName(id_).key, Snapshot(id_, tuple(parts))
        gives_way = "commits give way to announcements" not in self.without
        if gives_way and (yield from self.announced(id_)):
            yield "delete", SnapshotName(id_).key
            raise NotSeen
        if "parts listed once more" not in self.without:
            there = {e.key for e in (yield "list", parts_prefix(id_))}
            for key in keys:
                if key not in there and (yield from self.get(key)) is None:
                    yield "delete", SnapshotName(id_).key
                    raise NotSeen
        if not (yield from self.seen(id_, rank, own)):
            raise NotSeen

    def seen(self, id_: SnapshotId, rank: int, own: Part) -> Steps:
        snapshot = yield from self.get(SnapshotName(id_).key)
        return snapshot is not None and snapshot.parts[rank] == own

    # --- §5

    def prune(self, keep: int) -> Steps:
        try:
            look = yield from self.read(packs=True)
            ids, leftovers, keys = decide(look, keep, self.world.time, self.without)
            if not keys and not look.announced:
                return
            own = prune_key(self.world.nonce())
            yield "put", own, Prune(ids | leftovers, keys)
            allowed, announced = set(keys), look.announced
            if "the second look" not in self.without:
                try:
                    if self.world.rates.lag:
                        yield "sleep", 2 * self.world.rates.lag
                    look = yield from self.read(packs=True, but=own)
                    announced = look.announced
                    now = {e.key: e.mtime for e in (yield "list", "prunes/")}.get(own)
                    allowed = set() if now is None else set(decide(look, keep, now, self.without, ids)[2])
                    if (newest := max(look.snapshots.keys() - going(announced), default=None)) is not None:
                        there = {e.key for e in (yield "list", parts_prefix(newest))}
                        if not there.issuperset(look.snapshots[newest].part_keys):
                            allowed = set()
                except StorageError:
                    yield "delete", own
                    raise
            removed = [key for key in keys if key in allowed]
            for key in removed:
                yield "delete", key
            left = look.listed.keys() - set(removed)
            for key, prune in announced.items():
                if not left.intersection(prune.keys):
                    yield "delete", key
            yield "delete", own
        except StorageError:
            return

    def read(self, packs: bool = False, but: str = "") -> Steps:
        """Runs, then parts, then packs, then snapshots: see `ckpt/history/catalog.py`, and rules.py on why."""
        order = ["runs/", "parts/", *(["packs/"] if packs else []), "snapshots/", "pins/"]
        if "runs are listed before parts" in self.without:
            order = [*order[1:-1], "runs/", "pins/"]
        listed: dict[str, float] = {}
        for prefix in order:
            listed |= {e.key: e.mtime for e in (yield "list", prefix)}
        snapshots: dict[SnapshotId, Snapshot] = {}
        runs: dict[RunId, Run] = {}
        for key in list(listed):
            if (name := SnapshotName.parse(key)) is not None:
                snapshot = yield from self.get(key)
                if snapshot is None:
                    del listed[key]
                    continue
                for part in snapshot.part_keys:
                    if part not in listed and (yield from self.get(part)) is None:
                        break
                else:
                    snapshots[name.id] = snapshot
        started = {*(r for key in listed if (r := parse_run_key(key)) is not None), *(i.run for i in snapshots)}
        for run in sorted(started):  # in an order that a seed repeats
            doc = yield from self.get(run_key(run))
            if doc is not None:
                runs[run] = doc
        pins = set()
        for key in [k for k in listed if k.startswith("pins/")]:
            pins.add((yield from self.get(key)))
        announced = {}
        for entry in (yield "list", "prunes/") if packs else ():
            prune = yield from self.get(entry.key)
            if prune is not None and entry.key != but:
                announced[entry.key] = prune
        return Look(listed, runs, snapshots, frozenset(pins - {None}), announced)

    def pin(self) -> Steps:
        try:
            look = yield from self.read()
            if not look.snapshots:
                return
            chosen = sorted(look.snapshots)[self.world.random.randrange(len(look.snapshots))]
            name = f"p{self.world.nonce()}"
            yield "put", pin_key(name), chosen
            if (yield from self.announced(chosen)):
                yield "delete", pin_key(name)
            elif (yield from self.get(SnapshotName(chosen).key)) is not None:
                self.rules.pinned(name, chosen)
        except StorageError:
            return

    # --- how actors ask

    def get(self, key: str) -> Steps:
        try:
            return (yield "get", key)
        except NotFound:
            return None

    def spawn(self, process: Process, by: str, steps: Any, after: float = 0.0) -> None:
        self.world.spawn(Scripted(self.world, process, by, lambda actor: steps()), after)


def play_model(plan: Scenario, without: frozenset[str] = frozenset()) -> tuple[World, Rules]:
    """One schedule of the model. Raises Violated."""
    assert without <= RULES, without - RULES
    rules = Rules(ModelReading(), plan.rates.lag)
    world = World(plan.seed, plan.rates, rules)
    rules.objects = world.objects
    model = Model(world, rules, without)
    for job_plan in plan.jobs:
        by = f"{job_plan.name}.0"
        job = Job(job_plan)
        model.spawn(Process(by), by, lambda job=job: model.lead(job), job_plan.start)
    for at in plan.prunes:
        name = f"{PRUNE} at {at:.0f}"
        model.spawn(Process(name, stoppable=GRACE / 2), name, lambda at=at: model.prune(1 + int(at) % 2), at)
    for at in plan.pins:
        model.spawn(Process(f"pin at {at:.0f}"), f"pin at {at:.0f}", model.pin, at)
    world.play()
    return world, rules
