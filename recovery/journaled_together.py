"""Ranks agree on how far a journal leads: one lists the store, all say what lies on their nodes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from ckpt.agreement import on_first
from ckpt.errors import DamagedError
from ckpt.format.manifest import RunDoc, unseal
from ckpt.format.names import RunId, SegmentName, SnapshotId, run_key
from ckpt.mirror.ring import RecordName
from recovery.agree import Peers
from recovery.journaled import Records, ReplayPlan, plan_replay, records_of, stored_segments
from storage_backends.base import NotFound, Store

Ring = Sequence[tuple[RecordName, Path]]
"""Records in this node's folder of mirrors."""


class _Run(msgspec.Struct, frozen=True):
    """What is on the store of one run: its number of ranks (0: not known), and its segments."""

    world_size: int
    segments: tuple[str, ...]


class Journals:
    """The journals of a store, looked at once per run. Every method is collective."""

    def __init__(self, store: Store, peers: Peers, ring: Ring) -> None:
        self._store, self._peers, self._ring = store, peers, ring
        self._known: dict[RunId, tuple[int, Records]] = {}

    def records(self, run: RunId) -> Records:
        """What this rank can read of a run."""
        return self._look(run)[1]

    def plan(self, base: SnapshotId, limit: int | None = None) -> ReplayPlan | None:
        """How far the journal after a snapshot leads, and who replays what; None where the run is not known."""
        world_size, records = self._look(base.run)
        if not world_size:
            return None
        mine = [records.reach(q, base.step) for q in range(world_size)], records.newest(base.step)
        told = [
            msgspec.msgpack.decode(data, type=tuple[list[int], int])
            for data in self._peers.gather(msgspec.msgpack.encode(mine))
        ]
        return plan_replay(base, [reaches for reaches, _ in told], max(newest for _, newest in told), limit)

    def _look(self, run: RunId) -> tuple[int, Records]:
        found = self._known.get(run)
        if found is None:
            told = msgspec.json.decode(on_first(self._peers, lambda: self._ask(run)), type=_Run)
            names = [name for key in told.segments if (name := SegmentName.parse(key)) is not None]
            found = self._known[run] = told.world_size, records_of(names, self._ring, run)
        return found

    def _ask(self, run: RunId) -> bytes:
        key = run_key(run)
        try:
            world_size = unseal(self._store.get(key), RunDoc, key=key).world_size
        except (NotFound, DamagedError):
            world_size = 0
        return msgspec.json.encode(_Run(world_size, tuple(n.key for n in stored_segments(self._store, run))))
