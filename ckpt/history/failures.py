"""How long the runs on a store lived, and how many of them failed: what the heartbeats that they left say."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt.errors import DamagedError
from ckpt.format.manifest import Alive, unseal
from ckpt.format.names import RUNS, RunId, alive_key, parse_run_key
from ckpt.history.reading import read_many
from storage_backends.base import Store

RECENT = 50
"""Newest runs that count: a job that was mended long ago should not be judged by what it was."""


@dataclass(frozen=True, slots=True)
class Lives:
    """Of all runs before the newest: how many ended without saying so, and the seconds that all of them lived."""

    failures: int = 0
    seconds: float = 0.0


def observed(store: Store, recent: int = RECENT) -> Lives:
    """Look at the runs before the newest one, which is still alive or is the one that asks.

    A run whose heartbeat is gone or damaged counts for nothing. Seconds are beats times their interval, by nobody's
    wall clock. Raises StorageError.
    """
    runs = sorted(run for entry in store.list(RUNS) if (run := parse_run_key(entry.key)) is not None)
    failures, lived = 0, 0.0
    keys: dict[str, RunId] = {alive_key(run): run for run in runs[:-1][-recent:]}
    for key, data in read_many(store, list(keys)):
        if data is None:
            continue
        try:
            alive = unseal(data, Alive, key=key)
        except DamagedError:
            continue
        failures += not alive.ended
        lived += alive.beat * max(alive.interval, 0.0)
    return Lives(failures, lived)
