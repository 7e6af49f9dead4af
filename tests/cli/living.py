"""Stores as a command line meets them: two lines, pins, debris, chains of deltas; in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ckpt.format.manifest import FORMAT, PinDoc, Snapshot, seal, unseal
from ckpt.format.names import RunId, SnapshotId, SnapshotName, pin_key
from storage_backends.base import Store
from storage_backends.local import LocalStore
from tests.support.stores import DirectWriter, State, make_store

NEXT = RunId(2, "0ddba11e")
MADE = 1e9
"""POSIX seconds at which the snapshots of these stores were taken."""


def chain(folder: Path, steps: int = 4, *, ranks: int = 1) -> tuple[LocalStore, list[SnapshotId]]:
    """Steps 10, 20, …: one keyframe, then deltas against the step before, of one leaf; another leaf never changes."""
    store = LocalStore(folder)
    still = np.arange(64 * 16, dtype=np.float32).reshape(64, 16)
    states: list[State] = [{"moving": still + n, "still": still} for n in range(steps)]
    return store, make_store(store, states, ranks=ranks, chunk=4096)


def two_lines(folder: Path) -> tuple[LocalStore, list[SnapshotId]]:
    """500, 600, 700; then the job went back to 500 and saved 510. And a second 600, so that the step is ambiguous."""
    store = LocalStore(folder)
    state: State = {"w": np.arange(64.0)}
    first = DirectWriter(store)
    first.begin()
    ids = [first.step(step, state) for step in (500, 600, 700)]
    second = DirectWriter(store, run=NEXT)
    second.begin(resumed_from=ids[0])
    return store, [*ids, *(second.step(step, state) for step in (510, 600))]


def pin(store: Store, name: str, id_: SnapshotId) -> None:
    store.put(pin_key(name), seal(PinDoc(FORMAT, name, str(id_))))


def restate(store: Store, id_: SnapshotId, **fields: Any) -> None:
    """The snapshot says something else of itself: what `list` reads is nowhere else."""
    key = SnapshotName(id_).key
    store.put(key, seal(msgspec.structs.replace(unseal(store.get(key), Snapshot, key=key), **fields)))


def keys(store: Store) -> set[str]:
    return {entry.key for entry in store.list("")}
