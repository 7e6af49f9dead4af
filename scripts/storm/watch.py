"""What a storm has seen, and whether it may be so: nothing that was said to be committed is ever lost, no bit is wrong.

The rules (PROTOCOL.md §3): a start restores the newest snapshot, by (run, step), or a newer one than it was told of;
every snapshot that is listed is there, whole, and what the law says; once nobody works, a prune leaves nothing over.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import ckpt
from ckpt.errors import DamagedError
from ckpt.format.names import PACKS, PARTS, PRUNES, RunId, SnapshotId
from ckpt.history.catalog import read_history
from ckpt.history.clock import SystemClock
from ckpt.history.pins import unpin
from ckpt.history.retention import execute, plan_prune
from ckpt.history.runs import newest_run
from scripts.storm.faults import LATE
from scripts.storm.job import damage, look_at
from storage_backends import Store

SAMPLE = 3


@dataclass
class Watch:
    """`told`: the newest snapshot that anybody was told of. `losses`, `wrong`, `hangs`, `broken`: in words, all empty
    if all is well. `counts`: of everything that happened."""

    say: Callable[[str], object] = print
    counts: Counter[str] = field(default_factory=Counter)
    told: SnapshotId | None = None
    losses: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    hangs: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    @property
    def well(self) -> bool:
        return not (self.losses or self.wrong or self.hangs or self.broken)

    @property
    def tolerable(self) -> bool:
        """Whether it is worth going on: what is wrong five times is wrong for good."""
        return max(map(len, (self.losses, self.wrong, self.hangs, self.broken))) < 5

    def blame(self, of: list[str], text: str) -> None:
        of.append(text)
        self.say(f"    !!! {text}")

    def hear(self, said: Iterable[str], told_before: SnapshotId | None) -> None:
        """What one process printed. `told_before`: what was told of when it was started."""
        for line in said:
            word, _, rest = line.partition(" ")
            match word:
                case "told":
                    self._commit(rest)
                case "restored":
                    self.counts["restores"] += 1
                    self._restored(rest.split()[0], told_before)
                case "fault":
                    self.counts[f"fault: {rest}"] += 1
                case "wrong":
                    self.blame(self.wrong, rest)
                case "broken":
                    self.blame(self.broken, rest)
                case "refused" | "away" | "left" | "visited":
                    self.counts[word] += 1
                case _:
                    continue  # a warning of some library, or the stacks of one that hangs

    def _commit(self, name: str) -> None:
        id_ = SnapshotId.parse(name)
        assert id_ is not None, name
        self.counts["told"] += 1
        self.told = id_ if self.told is None else max(self.told, id_)

    def _restored(self, name: str, told_before: SnapshotId | None) -> None:
        id_ = SnapshotId.parse(name)
        if told_before is not None and (id_ is None or id_ < told_before):
            self.blame(self.losses, f"{told_before} was committed, and a start restored {id_}")

    def check(self, store: Store, dice: random.Random, *, deep: bool) -> None:
        """While nobody works on the store: the newest is there, and a sample of what is listed is what it should be."""
        history = read_history(store)
        self.counts["checks"] += 1
        if self.told is not None and (history.newest is None or history.newest < self.told):
            self.blame(self.losses, f"{self.told} was committed, and the newest that is listed is {history.newest}")
        listed = sorted(history.snapshots)
        for id_ in {*dice.sample(listed, min(SAMPLE, len(listed))), *listed[-1:]}:
            self.counts["loads"] += 1
            try:
                found = look_at(store, id_)
            except DamagedError as error:
                self.blame(self.losses, f"{id_} is listed, and damaged: {error}")
                continue
            if found is None:
                self.blame(self.losses, f"{id_} is listed, and not there")
            elif found:
                self.blame(self.wrong, f"loaded {id_}: {' '.join(found)}")
        if deep:
            self.counts["deep checks"] += 1
            for text in damage(store):
                self.blame(self.losses, f"verify: {text}")

    def sweep(self, store: Store) -> None:
        """Prune while nobody works and no process lives: only what snapshots name may be left, and the last steps of
        the newest run, of which no prune can know that nobody will commit them."""
        for name in read_history(store).pins:
            if name.startswith("visitor-"):
                unpin(store, name)
        over: set[str] = set()
        for pause in (0.0, LATE):  # a request of a dead process may still have been on its way
            time.sleep(pause)
            execute(plan_prune(store, ckpt.Keep(last=2), grace=0), store, clock=SystemClock())
            kept = read_history(store).snapshots.values()
            needed = {ref.key for s in kept for ref in s.parts} | {pack for s in kept for pack, _ in s.packs}
            there = {entry.key for entry in store.list("")}
            newest = newest_run(store)
            over = {key for key in there if key.startswith((PARTS, PACKS)) and key not in needed}
            over = {key for key in over if RunId.parse(key.split("/")[1]) != newest}
            over |= {key for key in there if key.startswith(PRUNES)}
            if lacking := needed - there:
                self.blame(self.losses, f"named by snapshots, and gone: {' '.join(sorted(lacking))}")
            if not over:
                break
        self.counts["sweeps"] += 1
        if over:
            self.blame(self.broken, f"left over after a prune: {' '.join(sorted(over))}")
