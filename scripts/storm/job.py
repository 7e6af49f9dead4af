"""The processes of a storm: ranks that train and save, and visitors that prune, compact, verify and load beside them.

What they see, they print, one line each, as it happens: what was printed before a SIGKILL has been seen.

    restored ID STEP MARKS       the state is that of the law     wrong WHERE NAMES   it is not
    told ID                      a save was said to be committed  fault KIND          the store is about to go wrong
    refused PID                  another live job writes here     away ERROR          ended by an error that may come
    left STEP                    closed, and nothing failed       broken ERROR        ended by one that must not
"""

from __future__ import annotations

import os
import random
import time
import traceback
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import ckpt
from ckpt.errors import (
    CheckpointError,
    DamagedError,
    HistoryExists,
    LayoutMismatch,
    NoSnapshot,
    StoreInUse,
    UnsupportedState,
)
from ckpt.format.names import SnapshotId
from ckpt.history.catalog import read_history
from ckpt.history.clock import SystemClock
from ckpt.history.pins import pin, unpin
from ckpt.history.retention import execute, plan_prune
from ckpt.saving.job import Saved
from ckpt.ticket import Ticket
from recovery.compact import compact
from recovery.compaction import plan_compact
from recovery.verify import verify
from scripts.storm.faults import StormyStore, Weather
from scripts.storm.law import Subject, deal, wrong_loaded
from storage_backends import FsspecStore, LocalStore, RetryingStore, Store

GRACE = 30.0
HEARTBEAT = 1.0
FOUL = (DamagedError, HistoryExists, LayoutMismatch, NoSnapshot, UnsupportedState)
"""What no fault, kill or restart explains."""


@dataclass(frozen=True)
class Address:
    """A store as plain data: what a process is told."""

    url: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def bare(self) -> Store:
        return FsspecStore(self.url, self.options) if "://" in self.url else LocalStore(self.url)

    def open(self, deadline: float = 90.0) -> Store:
        return RetryingStore(self.bare(), deadline=deadline)


@dataclass(frozen=True)
class Orders:
    """One start of the job. `mark`: its number, from 1. `stop`: steps after which it ends by itself."""

    address: Address
    mark: int
    seed: int
    every: int
    keep: int | None
    mirror: str
    when_busy: Literal["wait", "skip"]
    on_error: Literal["warn", "raise"]
    weather: Weather
    deadline: float
    stop: int = 10**9


def say(*words: object) -> None:
    """One write each, so that a kill cuts no line in two."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def trains(orders: Orders) -> None:
    """One rank, until it is killed, told to stop, or its store fails for good."""
    warnings.simplefilter("ignore", RuntimeWarning)  # saves that fail are what this is for
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    code = 3
    try:
        if world > 1:
            dist.init_process_group("gloo")
        _train(orders, rank, world)
        code = 0
    except StoreInUse as error:
        say("refused", error.pid)
    except FOUL as error:
        say("broken", f"{type(error).__name__}: {error}".replace("\n", " | "))
    except (CheckpointError, ckpt.StorageError, dist.DistError, RuntimeError) as error:
        say("away", f"{type(error).__name__}: {error}".replace("\n", " | ")[:300])
    except BaseException:
        say("broken", traceback.format_exc().replace("\n", " | "))
    # Without the interpreter's end: gloo's would wait for ranks that are gone.
    os._exit(code)


def _train(orders: Orders, rank: int, world: int) -> None:
    dice = random.Random(orders.seed * 10 + rank)
    stormy = StormyStore(orders.address.bare(), orders.weather, dice, lambda kind: say("fault", kind))
    subject = Subject(rank, world, init_device_mesh("cpu", (world,)) if world > 1 else None)
    saver = ckpt.Checkpointer(
        RetryingStore(stormy, deadline=orders.deadline),
        subject.state,
        every=orders.every,
        keep=None if orders.keep is None else ckpt.Keep(last=orders.keep),
        mirror=orders.mirror,
        when_busy=orders.when_busy,
        options=ckpt.Options(
            chunk=4096, heartbeat=HEARTBEAT, commit_wait=30, group_timeout=60, grace=GRACE, on_error=orders.on_error,
            on_resize=deal,
        ),
    )  # fmt: skip
    with saver:
        start = saver.restore()
        if start and (wrong := subject.wrong(saver.state, start)):
            say("wrong", f"restored {start} on rank {rank}:", *wrong)
        id_ = None if saver.restored is None else saver.restored.id
        say("restored", id_, start, *(mark for _, mark in saver.state["path"]))  # type: ignore[attr-defined]
        subject.begin(saver.state, start, orders.mark)
        waiting: list[Ticket] = []
        for step in range(start + 1, start + orders.stop + 1):
            subject.train(step, saver.state)
            if (ticket := saver.step(step)) is not None and not ticket.skipped:
                waiting.append(ticket)
            waiting = [ticket for ticket in waiting if not _told(ticket)]
            if saver.stopping:
                break
            time.sleep(dice.uniform(0, 0.03))
    for ticket in waiting:
        _told(ticket)
    say("left", step)


def _told(ticket: Ticket) -> bool:
    """Whether its outcome is known, and was said. A job that was overtaken gives up, as a user's should."""
    if not ticket.done():
        return False
    if isinstance(ticket._outcome, Saved):
        say("told", ticket._outcome.snapshot.id)
    elif isinstance(ticket.error, StoreInUse):
        raise ticket.error
    return True


Visit = Literal["load", "verify", "prune", "compact", "pin"]


def visits(address: Address, what: Visit, seed: int) -> None:
    """A process beside the job, on a store that is only as bad as it is."""
    dice = random.Random(seed)
    try:
        _visit(address.open(), what, dice)
        say("visited", what)
    except ckpt.StorageError as error:
        say("away", f"{what}: {error}")
    except BaseException:
        say("broken", f"{what}: {traceback.format_exc()}".replace("\n", " | "))
    os._exit(0)


def _visit(store: Store, what: Visit, dice: random.Random) -> None:
    history = read_history(store)
    snapshots = sorted(history.snapshots)
    match what:
        case "load" if snapshots:
            _load(store, dice.choice(snapshots))
        case "verify":
            for text in damage(store):
                say("broken", "verify:", text)
        case "prune":
            keep = ckpt.Keep(last=dice.randint(1, 3))
            execute(plan_prune(store, keep, grace=GRACE), store, clock=SystemClock())
        case "compact":
            compact(plan_compact(store, threshold=0.9), store, grace=GRACE)
        case "pin" if snapshots:
            id_, name = dice.choice(snapshots), f"visitor-{dice.getrandbits(32):08x}"
            try:
                pin(store, history, name, id_)
            except NoSnapshot:
                return  # it was being pruned
            if not _load(store, id_):
                say("broken", f"pin: {id_} was pinned as {name}, and is gone")
            unpin(store, name)


def _load(store: Store, id_: SnapshotId) -> bool:
    """Load one snapshot and say what is wrong with it; whether it was still there."""
    wrong = look_at(store, id_)
    if wrong:
        say("wrong", f"loaded {id_}:", *wrong)
    return wrong is not None


def look_at(store: Store, id_: SnapshotId) -> list[str] | None:
    """What of a snapshot is not what the law says; None: it is gone."""
    try:
        loaded = ckpt.load(store, str(id_))
    except NoSnapshot:
        return None
    return wrong_loaded(loaded, id_.step)


def damage(store: Store) -> list[str]:
    """What `ckpt verify --deep` calls an error."""
    return [f.text for f in verify(store, deep=True, threads=4) if f.level == "error"]
