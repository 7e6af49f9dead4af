"""A campaign of faults, kills and restarts on a store: is anything that was committed ever lost, or a bit wrong?

    python -m scripts.fault_storm local --minutes 15             # or swift, weed, sftp: on a server of its own
    python -m scripts.fault_storm s3://bucket/empty --minutes 60 # your own store, at an empty place
    python -m scripts.fault_storm sftp --seed 7 --rounds 20      # the same dice again

A job of real ranks trains and saves without a pause, and in every round something happens to it: SIGKILL for one rank
or all, SIGTERM, ranks that freeze, jobs that freeze, are overtaken and thaw rounds later, a second job, a store that
fails, lies, tears and is slow, a server that is killed and started again, a network that loses and delays; beside it
other processes load, verify, prune, compact and pin. Then the next start, perhaps with another number of ranks. What
must hold is in `scripts/storm/watch.py`. Exit code 0 only if it held; 1 if not; 2 if the store cannot be had.
"""

from __future__ import annotations

import argparse
import functools
import io
import json
import random
import re
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ckpt.format.names import SnapshotId
from scripts.storm.faults import Weather
from scripts.storm.job import HEARTBEAT, Orders, trains, visits
from scripts.storm.places import Ground, ground
from scripts.storm.watch import Watch
from tests.support.procs import Job
from tests.support.servers import NotInstallable

PATIENCE = 240.0
"""Seconds after which a process that should have restored, or ended, hangs. Its own deadlines (60 s for a collective,
90 s for a store) come first, and the machine may be busy."""

ACTS = {
    "kill all": 30, "kill one": 18, "SIGTERM": 8, "overtaken": 10, "pause": 6, "second job": 5,
    "ends": 4, "server": 25, "network": 10,
}  # fmt: skip
CHECK, DEEP, SWEEP = 2, 4, 8
"""Every so many rounds snapshots are loaded, the store is verified to the last byte, and it is swept. What a start
restores is checked in each."""


@dataclass
class Sleeper:
    """A job that was frozen, and is thawed in round `until`."""

    job: Job
    world: int
    told_before: SnapshotId | None
    until: int


@dataclass
class Storm:
    ground: Ground
    ranks: int
    seed: int
    watch: Watch
    acts: Sequence[str] = tuple(ACTS)
    mark: int = 0
    sleepers: list[Sleeper] = field(default_factory=list)
    visitors: list[Job] = field(default_factory=list)
    living: list[Job] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.store = self.ground.address.open()
        self.dice = random.Random(self.seed)
        off = {"server"} if self.ground.server is None else set()
        off |= {"network"} if self.ground.proxy is None else set()
        self.acts = [act for act in self.acts if act not in off]

    def round(self, number: int) -> None:
        """One start of the job, and what becomes of it."""
        # Dice of each round's own: how far the last one came is a matter of time, and the next must not hang on it.
        self.dice = random.Random(self.seed * 1_000_003 + number)
        [act] = self.dice.choices(self.acts, [ACTS[act] for act in self.acts])
        world = self.dice.randint(1, self.ranks)
        for _ in range(self.dice.choice((0, 0, 1, 2, 3))):
            self._crash_early()
        before, told = self.watch.told, self.watch.counts["told"]
        job = self._start(world, self._orders(stop=self.dice.randint(5, 60) if act == "ends" else None))
        kept = False
        if self._up(job):
            self._visit()
            if self.dice.random() < 0.6:
                job.hears(0, "told ", 10.0)
            time.sleep(self.dice.expovariate(1.0) + 0.1)
            for sleeper in [s for s in self.sleepers if s.until <= number]:
                self._thaw(sleeper)
            kept = self._act(act, job, world, before, number)
        if not kept:
            self._finish(job, before)
        for visitor in self.visitors:
            self._finish(visitor, None)
        self.visitors = []
        if number % SWEEP == 0:
            self.calm()
        if number % CHECK == 0:
            self.watch.check(self.store, self.dice, deep=number % DEEP == 0)
        told = self.watch.counts["told"] - told
        self.watch.say(f"round {number:4}  {act:10} on {world}  {told:4} saves told  newest {self.watch.told}")

    def calm(self) -> None:
        """Nobody lives any more; what is left over goes."""
        for sleeper in self.sleepers:
            self._kill_all(sleeper.job)
            self._finish(sleeper.job, sleeper.told_before)
        self.sleepers = []
        self.watch.sweep(self.store)

    # --- what happens to a job ---

    def _act(self, act: str, job: Job, world: int, before: SnapshotId | None, number: int) -> bool:
        """Whether the job lives on, frozen."""
        if act in ("server", "network"):
            self._strike(act)
            act = self.dice.choice(("kill all", "kill one", "SIGTERM", "goes on"))
        match act:
            case "kill all":
                self._kill_all(job)
            case "kill one":
                self._kill(job, self.dice.randrange(world))
                # A cluster ends the others soon, or they find out by themselves.
                if self.dice.random() < 0.7:
                    time.sleep(self.dice.uniform(0.0, 1.0))
                    self._signal(job, world, signal.SIGKILL)
            case "SIGTERM":
                self._signal(job, 1 if self.dice.random() < 0.5 else world, signal.SIGTERM)
                if self.dice.random() < 0.2:
                    time.sleep(self.dice.uniform(0.0, 0.3))
                    self._kill_all(job)
            case "overtaken":
                self._signal(job, world, signal.SIGSTOP)
                self.sleepers.append(Sleeper(job, world, before, number + self.dice.randint(1, 4)))
                self.watch.counts["frozen"] += 1
                return True
            case "pause":
                rank = self.dice.randrange(world)
                self._signal_one(job, rank, signal.SIGSTOP)
                time.sleep(self.dice.uniform(0.1, 2 * HEARTBEAT))
                self._signal_one(job, rank, signal.SIGCONT)
                self.watch.counts["paused"] += 1
                time.sleep(self.dice.uniform(0.1, 1.0))
                self._kill_all(job)
            case "second job":
                self._second(before)
                self._kill_all(job)
            case "goes on":
                time.sleep(self.dice.uniform(0.5, 2.0))
                self._kill_all(job)
        return False

    def _crash_early(self) -> None:
        """A start that dies before or while it restores, as in a crash loop."""
        before, world = self.watch.told, self.dice.randint(1, self.ranks)
        job = self._start(world, self._orders())
        time.sleep(self.dice.uniform(0.0, 1.5))
        self._kill_all(job)
        self._finish(job, before)

    def _strike(self, what: str) -> None:
        server, proxy = self.ground.server, self.ground.proxy
        if what == "server" and server is not None:
            server.kill()
            time.sleep(self.dice.uniform(0.0, 2.0))
            server.start()
            self.watch.counts["server restarts"] += 1
        elif proxy is not None:
            kind = self.dice.choice(("latency", "fail", "reset", "hole", "cut"))
            self.watch.counts[f"network: {kind}"] += 1
            if kind != "cut":
                values: dict[str, Any] = {"latency": 0.2, "fail": 0.3, "reset": 0.3, "hole": True}
                proxy.set(**{kind: values[kind]})
                time.sleep(self.dice.uniform(0.5, 3.0))
                proxy.set()
            if kind in ("cut", "hole"):
                proxy.cut()

    def _thaw(self, sleeper: Sleeper) -> None:
        """An old job goes on where it was, and must find out that it was overtaken."""
        self.sleepers.remove(sleeper)
        self._signal(sleeper.job, sleeper.world, signal.SIGCONT)
        self.watch.counts["thawed"] += 1
        time.sleep(self.dice.uniform(0.5, 3.0))
        self._signal(sleeper.job, sleeper.world, self.dice.choice((signal.SIGTERM, signal.SIGKILL)))
        self._finish(sleeper.job, sleeper.told_before)

    def _second(self, before: SnapshotId | None) -> None:
        """A second job beside the first: refused, unless the first could not say for seconds that it lives."""
        second = self._start(1, self._orders(calm=True))
        if not self._up(second):
            self.watch.counts["second jobs refused"] += "refused " in second.said(0)
        self._kill_all(second)
        self._finish(second, before)

    def _visit(self) -> None:
        for _ in range(self.dice.choice((0, 0, 1, 1, 2))):
            what = self.dice.choice(("load", "verify", "prune", "prune", "compact", "pin"))
            visitor = Job(visits, 1, [self.ground.address, what, self.dice.getrandbits(32)])
            self.living.append(visitor)
            self.visitors.append(visitor)

    # --- processes ---

    def end(self) -> None:
        """Whatever happened, no process outlives the storm."""
        for job in self.living:
            job.kill_all()
            job.wait(PATIENCE)

    def _start(self, world: int, orders: Orders) -> Job:
        job = Job(trains, world, [orders])
        self.living.append(job)
        return job

    def _orders(self, *, stop: int | None = None, calm: bool = False) -> Orders:
        self.mark += 1
        weather, deadline = Weather(), 60.0
        if not calm and self.dice.random() < 0.6:
            kinds = self.dice.sample(("fails", "lands", "late", "torn", "refused", "slow"), self.dice.randint(1, 3))
            chances = {kind: self.dice.choice((0.005, 0.02, 0.05)) for kind in kinds}
            deadline = self.dice.choice((2.0, 10.0))
            if self.dice.random() < 0.3:
                chances["outage"] = 0.003
            weather = Weather(chances, self.dice.uniform(0.5, 2 * deadline))
        return Orders(
            address=self.ground.job,
            mark=self.mark,
            seed=self.dice.getrandbits(32),
            every=self.dice.randint(1, 4),
            keep=self.dice.choice((None, 2, 3)),
            mirror=self.dice.choice(("off", str(self.ground.folder / "mirrors"))),
            when_busy=self.dice.choice(("wait", "skip")),
            on_error=self.dice.choice(("warn", "warn", "raise")),
            weather=weather,
            deadline=deadline,
            stop=10**9 if stop is None else stop,
        )

    def _up(self, job: Job) -> bool:
        """Wait until rank 0 has restored; whether it has. One that neither does nor ends is found out at its end."""
        return job.hears(0, "restored ", PATIENCE)

    def _kill(self, job: Job, rank: int) -> None:
        self._signal_one(job, rank, signal.SIGKILL)
        self.watch.counts["kills"] += 1

    def _kill_all(self, job: Job) -> None:
        job.kill_all()
        self.watch.counts["kills"] += 1

    def _signal(self, job: Job, world: int, number: signal.Signals) -> None:
        for rank in range(world):
            self._signal_one(job, rank, number)

    def _signal_one(self, job: Job, rank: int, number: signal.Signals) -> None:
        try:
            job.kill(rank, number)
        except ProcessLookupError:
            return  # it has ended by itself

    def _finish(self, job: Job, told_before: SnapshotId | None) -> None:
        """Wait for its end, and note what it said."""
        try:
            said = [result.out for result in job.wait(PATIENCE)]
        except AssertionError as hung:  # with the stacks of all threads
            self.watch.blame(self.watch.hangs, str(hung))
            said = [str(hung)]
        self.living.remove(job)
        for text in said:
            self.watch.hear(text.splitlines(), told_before)


def storm(
    where: str, *, seed: int, ranks: int, rounds: int | None, minutes: float, quiet: bool = False,
    acts: Sequence[str] = tuple(ACTS),
) -> dict[str, Any]:  # fmt: skip
    """Let it rage for so many minutes, or rounds if they are given, whatever comes first; what came of it, as data.

    Raises:
        NotInstallable: the server cannot be had here.
    """
    began = time.monotonic()
    watch = Watch(io.StringIO().write if quiet else functools.partial(print, flush=True))
    watch.say(f"seed {seed}, up to {ranks} ranks, {where}")
    with ground(where) as place:
        raging = Storm(place, ranks, seed, watch, acts)
        number = 0
        try:
            while number != rounds and time.monotonic() - began < 60 * minutes and watch.tolerable:
                number += 1
                raging.round(number)
            raging.calm()
            watch.check(raging.store, raging.dice, deep=True)
        finally:
            raging.end()
    faults = {kind.removeprefix("fault: "): n for kind, n in sorted(watch.counts.items()) if kind.startswith("fault: ")}
    counts = {kind: n for kind, n in sorted(watch.counts.items()) if not kind.startswith("fault: ")}
    return {
        "store": where, "seed": seed, "ranks": ranks, "minutes": (time.monotonic() - began) / 60, "rounds": number,
        "commits": watch.counts["told"], "kills": watch.counts["kills"],
        "server restarts": watch.counts["server restarts"], "faults": faults, "counts": counts,
        "losses": watch.losses, "wrong bits": watch.wrong, "hangs": watch.hangs, "broken": watch.broken,
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", nargs="?", default="local", help="local, swift, weed, sftp, a path or a URL")
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--rounds", type=int, help="end after so many, if the minutes are not over before")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--ranks", type=int, default=3, help="at most so many (1 to 3)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(arguments)
    seed = random.SystemRandom().getrandbits(32) if args.seed is None else args.seed
    try:
        found = storm(
            args.store, seed=seed, ranks=args.ranks, rounds=args.rounds, minutes=args.minutes, quiet=args.json
        )
    except NotInstallable as reason:
        print(f"{args.store} cannot be had here: {reason}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(found))
    else:
        show(found)
    return 1 if any(found[kind] for kind in ("losses", "wrong bits", "hangs", "broken")) else 0


def show(found: dict[str, Any]) -> None:
    for kind in ("store", "seed", "ranks", "rounds", "commits", "kills", "server restarts"):
        print(f"{kind:>16}: {found[kind]}")
    print(f"{'minutes':>16}: {found['minutes']:.1f}")
    for kind in ("faults", "counts"):
        print(f"{kind:>16}: " + ", ".join(f"{n} {name}" for name, n in found[kind].items()))
    for kind in ("losses", "wrong bits", "hangs", "broken"):
        print(f"{kind:>16}: {len(found[kind])}")
        for text in found[kind]:
            print(re.sub(r"(?m)^", " " * 18, text))


if __name__ == "__main__":
    sys.exit(main())
