"""Scenarios, and the real code playing them: jobs that resume, save, prune and pin, as the front door does.

A scenario says who starts when; the world decides everything else. `Job.lead` is what rank 0 does, `Job.save` what
every rank does; whatever they know of each other without the store goes through the `Job`, as it goes through gloo.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ckpt.errors import CheckpointError, SaveFailed, StorageError, StoreInUse
from ckpt.format.manifest import (
    FORMAT,
    PartRef,
    PinDoc,
    PruneDoc,
    Snapshot,
    digest128,
    read_part,
    seal,
    unseal,
)
from ckpt.format.names import RunId, SnapshotId, SnapshotName, pin_key
from ckpt.history import commit as committing
from ckpt.history import retention
from ckpt.history.catalog import read_history
from ckpt.history.runs import claimed_by_prune, open_run, put_alive
from storage_backends.base import NotFound, Store
from tests.ckpt.history.making import breathe, part_bytes, put_pack, ref_of, shares, somebody
from tests.faults.rules import PRUNE, Announced, Commit, Rules
from tests.faults.simulated import (
    GRACE,
    INTERVAL,
    WAIT,
    Actor,
    Process,
    Rates,
    SimulatedClock,
    SimulatedStore,
    Threaded,
    Violated,
    World,
)


@dataclass(frozen=True)
class JobPlan:
    """One start of a job: when, how many ranks and saves, the torchrun job it belongs to, and its habits."""

    name: str
    start: float
    ranks: int
    saves: int
    job: str
    older: bool
    """Resumes from the second newest snapshot."""
    keyframes: float
    """How often a rank stores a keyframe."""
    prunes: float
    """How often a commit is followed by a prune."""
    keep: int
    ends: bool
    """Marks its run as ended."""


@dataclass(frozen=True)
class Scenario:
    seed: int
    rates: Rates
    jobs: tuple[JobPlan, ...]
    prunes: tuple[float, ...]
    pins: tuple[float, ...]


def scenario(seed: int) -> Scenario:
    """Everything about a schedule but the order in which things happen."""
    rng = random.Random(seed * 7919 + 1)
    quiet = rng.random() < 0.25
    rates = Rates(
        put=0.0 if quiet else rng.choice([0.0, 0.02, 0.1]),
        other=0.0 if quiet else rng.choice([0.0, 0.0, 0.03, 0.15]),
        death=rng.choice([0.0, 0.002, 0.01]),
        stop=rng.choice([0.0, 0.01, 0.04]),
        lag=rng.choice([0.0, 0.0, 0.0, 1.5]),
    )
    jobs = []
    start = 0.0
    count = rng.choice([1, 2, 2, 3, 3])
    for n in range(count):
        jobs.append(
            JobPlan(
                name=f"job{n}",
                start=start,
                ranks=rng.choice([1, 1, 2, 2, 3]) if count > 1 else rng.choice([2, 3]),
                saves=rng.choice([2, 3, 4]) if count > 1 else 8,
                job=rng.choice(["training", "training", "another"]),
                older=rng.random() < 0.25,
                keyframes=rng.choice([0.1, 0.5]),
                prunes=rng.choice([0.0, 0.5, 1.0]) if count > 1 else 1.0,
                keep=rng.choice([1, 1, 2]),
                ends=rng.random() < 0.4,
            )
        )
        start += rng.choice([3.0, 10.0, 30.0, 1.5 * GRACE]) * rng.random()
    prunes = tuple(rng.random() * (start + 3 * GRACE) for _ in range(rng.choice([0, 1, 2])))
    pins = tuple(rng.random() * (start + 20) for _ in range(rng.choice([0, 0, 1])))
    return Scenario(seed, rates, tuple(jobs), prunes, pins)


class RealReading:
    """Objects as bytes."""

    def commit(self, key: str, value: Any) -> Commit:
        snapshot = unseal(value, Snapshot, key=key)
        return Commit(
            snapshot.id,
            {p.key: (p.length, p.digest) for p in snapshot.parts},
            tuple(pack for pack, _ in snapshot.packs),
        )

    def token(self, value: Any) -> Any:
        return len(value), digest128(value)

    def announced(self, key: str, value: Any) -> Announced:
        doc = unseal(value, PruneDoc, key=key)
        return Announced(
            frozenset(id_ for text in doc.snapshots if (id_ := SnapshotId.parse(text)) is not None),
            frozenset(name.id for k in doc.keys if (name := SnapshotName.parse(k)) is not None),
        )


@dataclass(frozen=True)
class Mutations:
    """Rules of the jobs themselves that a test can switch off, to see that their absence is noticed."""

    part_before_packs: bool = False
    claims_ignored: bool = False


@dataclass(frozen=True)
class Held:
    """What a rank holds of a committed step: its packs, base first."""

    id: SnapshotId
    packs: tuple[tuple[str, int], ...]


@dataclass
class Job:
    """One start: what its ranks share without a store."""

    world: World
    rules: Rules
    plan: JobPlan
    mutations: Mutations
    run: RunId | None = None
    first: int = 1
    held: dict[int, Held | None] = field(default_factory=dict)
    arrived: dict[int, int] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)
    processes: list[Process] = field(default_factory=list)

    def lead(self, actor: Threaded, store: Store, clock: SimulatedClock) -> None:
        """Rank 0: resume, tell the others, save."""
        try:
            self._resume(store, clock)
        except (StorageError, CheckpointError):
            return
        for rank in range(1, self.plan.ranks):
            process = Process(f"{self.plan.name}.{rank}")
            real(self.world, process, f"{self.plan.name}.{rank}", lambda a, s, c, rank=rank: self.save(rank, a, s, c))
        self.save(0, actor, store, clock)
        if self.plan.ends and self.run is not None:
            try:
                put_alive(store, self.run, 1_000_000, ended=True, interval=INTERVAL)
            except StorageError:
                return

    def _resume(self, store: Store, clock: SimulatedClock) -> None:
        history = read_history(store, threads=1)
        candidates: list[SnapshotId | None] = sorted(history.snapshots, reverse=True)  # type: ignore[assignment]
        if self.plan.older and len(candidates) > 1:
            del candidates[0]
        for candidate in [*candidates, None]:
            self.run = open_run(
                store, clock, world_size=self.plan.ranks, resumed_from=candidate, interval=INTERVAL,
                who=somebody(int(self.plan.name[3:]), job=self.plan.job), nonce=self.world.nonce,
            )  # fmt: skip
            if candidate is None:
                return
            if not self.mutations.claims_ignored and claimed_by_prune(store, candidate):
                continue
            packs = self._read(store, candidate)
            if packs is None:
                continue
            self.first = candidate.step + 1
            # Half of the jobs have mirrors, and lean on what they restored.
            if self.world.random.random() < 0.5:
                self.held = {r: Held(candidate, packs[r % len(packs)]) for r in range(self.plan.ranks)}
            return

    def _read(self, store: Store, id_: SnapshotId) -> list[tuple[tuple[str, int], ...]] | None:
        """Everything of a snapshot: each part's packs. None if it was pruned under the reader."""
        key = SnapshotName(id_).key
        assert self.run is not None
        try:
            snapshot = unseal(store.get(key), Snapshot, key=key)
            parts = [read_part(store.get(ref.key), key=ref.key, name=ref) for ref in snapshot.parts]
        except NotFound:
            return None
        self.rules.claimed(self.run, id_)
        for pack, length in snapshot.packs:
            try:
                found = store.get(pack)
            except NotFound as error:
                if not self.rules.leads(self.run):
                    return None  # overtaken while it read
                raise Violated(f"run {self.run} claimed {id_}, and {pack} is gone") from error
            if len(found) != length:
                raise Violated(f"{pack} has {len(found)} bytes, {id_} says {length}")
        return [part.packs for part in parts]

    def save(self, rank: int, actor: Threaded, store: Store, clock: SimulatedClock) -> None:
        """One rank: every step after all ranks have called for it."""
        held = self.held.get(rank)
        unseen: tuple[Held, PartRef] | None = None
        run, plan, rng = self.run, self.plan, self.world.random
        assert run is not None
        by = f"{plan.name}.{rank}"
        for step in range(self.first, self.first + plan.saves):
            self.arrived[step] = self.arrived.get(step, 0) + 1
            actor.ask(("wait", lambda step=step: self.arrived[step] >= plan.ranks))
            id_ = SnapshotId(run, step)
            try:
                # A look can fail, and then the next diff leans on an older reference.
                if (
                    unseen is not None
                    and rng.random() < 0.7
                    and committing.look(store, unseen[0].id, unseen[1]) is not None
                ):
                    held = unseen[0]
                if rank == 0:
                    put_alive(store, run, step, ended=False, interval=INTERVAL)
            except StorageError:
                pass
            base = () if held is None or rng.random() < plan.keyframes else held.packs
            unchanged = bool(base) and rng.random() < 0.2
            unseen = None
            try:
                mine: tuple[tuple[str, int], ...]
                if unchanged:
                    mine = base
                elif self.mutations.part_before_packs:
                    mine = (*base, self._pack(id_, rank))
                else:
                    mine = (*base, put_pack(store, id_, rank, f"{by} {id_}".encode()))
                data = part_bytes(
                    id_, rank, shares(plan.ranks)[rank], mine, ranks=plan.ranks,
                    reference=None if held is None else held.id, stored=0 if unchanged else None,
                )  # fmt: skip
                unseen = (Held(id_, mine), ref_of(id_, rank, data))
                own = committing.put_part(store, id_, rank, data)
                if self.mutations.part_before_packs and not unchanged:
                    put_pack(store, id_, rank, f"{by} {id_}".encode())
                committing.publish(
                    store, clock, id=id_, rank=rank, world_size=plan.ranks, own=own, wait=WAIT,
                    stopped=lambda step=step: step in self.failed, breathe=breathe, threads=1,
                )  # fmt: skip
            except StoreInUse:
                return
            except (StorageError, SaveFailed):
                self.failed.add(step)
                continue
            self.rules.told_committed(id_, by)
            held, unseen = unseen[0], None
            if rank == 0 and rng.random() < plan.prunes:
                keep = retention.Keep(last=plan.keep)
                process = Process(f"{PRUNE} of {id_.short}", stoppable=GRACE / 2)
                real(self.world, process, process.name, lambda a, s, c, keep=keep: prune(self.world, s, c, keep))

    @staticmethod
    def _pack(id_: SnapshotId, rank: int) -> tuple[str, int]:
        from storage_backends.memory import MemoryStore

        return put_pack(MemoryStore(), id_, rank)


def prune(world: World, store: Store, clock: SimulatedClock, keep: retention.Keep) -> None:
    """One prune, as the sweeper or a person starts it; now and then somebody names a step to remove."""
    try:
        remove = []
        if world.random.random() < 0.2:
            snapshots = sorted(read_history(store, threads=1).snapshots)
            remove = snapshots[: world.random.randrange(2)]
        plan = retention.plan_prune(store, keep, grace=GRACE, remove=remove, clock=clock, threads=1)
        retention.execute(plan, store, clock=clock, listing_lag=world.rates.lag, threads=1, nonce=world.nonce)
    except (StorageError, CheckpointError):
        return


def pin(world: World, rules: Rules, store: Store) -> None:
    """Pin some snapshot: write the claim, then look for prunes, then see that it is still there."""
    try:
        ids = sorted(read_history(store, threads=1).snapshots)
        if not ids:
            return
        chosen = ids[world.random.randrange(len(ids))]
        name = f"p{world.nonce()}"
        store.put(pin_key(name), seal(PinDoc(FORMAT, name, str(chosen))))
        if claimed_by_prune(store, chosen):
            store.delete([pin_key(name)])
            return
        store.get(SnapshotName(chosen).key)
    except (StorageError, CheckpointError):
        return
    rules.pinned(name, chosen)


def real(
    world: World,
    process: Process,
    by: str,
    body: Callable[[Threaded, Store, SimulatedClock], None],
    after: float = 0.0,
) -> None:
    """Start real code as an actor."""

    def live(actor: Actor) -> None:
        assert isinstance(actor, Threaded)
        body(actor, SimulatedStore(actor), SimulatedClock(actor))

    world.spawn(Threaded(world, process, by, live), after)


def play_real(plan: Scenario, mutations: Mutations | None = None) -> tuple[World, Rules]:
    """One schedule on the real code. Raises Violated."""
    mutations = mutations or Mutations()
    rules = Rules(RealReading(), plan.rates.lag)
    world = World(plan.seed, plan.rates, rules)
    rules.objects = world.objects
    for job_plan in plan.jobs:
        job = Job(world, rules, job_plan, mutations)
        real(world, Process(f"{job_plan.name}.0"), f"{job_plan.name}.0", job.lead, job_plan.start)
    for at in plan.prunes:
        process = Process(f"{PRUNE} at {at:.0f}", stoppable=GRACE / 2)
        keep = retention.Keep(last=1 + int(at) % 2)
        real(world, process, process.name, lambda a, s, c, keep=keep: prune(world, s, c, keep), at)
    for at in plan.pins:
        real(world, Process(f"pin at {at:.0f}"), f"pin at {at:.0f}", lambda a, s, c: pin(world, rules, s), at)
    world.play()
    return world, rules
