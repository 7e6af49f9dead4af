"""One snapshot, tried by all ranks together: its documents, its bytes, and the live state they go into (torch).

Until `install` nothing live has changed: a damaged snapshot, a layout that does not fit or a store that fails leaves
the state as it was. The price is host memory for one copy of the rank's own state, freed at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch

from ckpt.errors import DamagedError, LayoutMismatch
from ckpt.format.manifest import Part, seal
from ckpt.format.names import SnapshotId
from ckpt.format.shards import Shard
from ckpt.leaves import Restoration, plan_restore
from recovery.agree import Peers, Skip, together
from recovery.assemble import Wanted, covered, plan_chunks
from recovery.boxes import Bytes
from recovery.exchange import from_peers
from recovery.fetch import Tally
from recovery.meter import Meter
from recovery.near import from_node
from recovery.parallel import in_threads
from recovery.place import Seat, asked_for, merged, stored_state, wants
from recovery.read import (
    OpenSnapshot,
    check_part,
    check_snapshot,
    open_snapshot,
    read_part_bytes,
    verdict,
    weights_only,
)
from recovery.reading import Delivered, Reading
from recovery.shards import from_store
from recovery.spans import Describer
from recovery.survey import Holdings
from storage_backends.base import Store

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Documents:
    """One snapshot's parts as far as this rank has them (`raw`: their stored bytes), and what they mean for the live
    state. `plan` None: more must be known to say; with all parts here, whether `unclaimed` leaves are other ranks'."""

    opened: OpenSnapshot
    parts: Mapping[int, Part]
    raw: Mapping[int, bytes]
    plan: Restoration | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    unclaimed: frozenset[str] = frozenset()


@dataclass(eq=False)
class Attempt:
    """One snapshot, tried by all ranks together."""

    store: Store
    peers: Peers
    seat: Seat
    state: MutableMapping[str, object]
    id: SnapshotId
    holdings: Holdings | None
    meter: Meter
    memory: int
    threads: int
    key: str = ""

    def follow(self) -> Documents | Skip:
        """`run`, followed."""
        return self.followed(self.run)

    def followed(self, once: Callable[[], T | Skip]) -> T | Skip:
        """`once`; and once more whenever what was pruned under a reader had been replaced by another revision."""
        while True:
            before = self.key
            found = once()
            # All ranks know which object was opened, so all decide alike.
            if not isinstance(found, Skip) or not found.pruned or self.key == before:
                return found

    def run(self) -> Documents | Skip:
        with self.meter.stage("documents"):
            documents = self._documents()
            if isinstance(documents, Skip):
                return documents
        read = self._read(documents)
        return read if isinstance(read, Skip) else self._installed(documents, read)

    def _installed(self, documents: Documents, read: dict[Shard, Bytes]) -> Documents:
        """All ranks write; what fails now leaves a state that is neither, and is raised."""
        with self.meter.stage("install"):
            installed = together(self.peers, lambda: self._install(documents, read))
            if isinstance(installed, Skip):
                raise installed.error
        return documents

    def _documents(self) -> Documents | Skip:
        opened = self._opened()
        if isinstance(opened, Skip):
            return opened
        if opened.snapshot.without and isinstance(lacking := self._lacking(opened), Skip):
            return lacking
        own = together(self.peers, lambda: self._own(opened), wishes=lambda documents: documents.plan is None)
        if isinstance(own, Skip):
            return own
        if not own.wish:
            return own.value
        # Every part is read from the store by one rank only, and handed on: thousands of ranks that each read
        # thousands of parts would be millions of requests. First to those alone whose own part says that they need it.
        raw = own.value.raw
        if self.seat.own(opened.snapshot.world_size) is not None:
            raw = self._hand_on(own.value)
            some = together(self.peers, lambda: self._more(own.value, raw), wishes=lambda found: found.plan is None)
            if isinstance(some, Skip) or not some.wish:
                return some if isinstance(some, Skip) else some.value
        raw = self._exchange(raw)
        every = together(self.peers, lambda: self._every(opened, raw), wishes=lambda documents: documents.plan is None)
        if isinstance(every, Skip):
            return every
        return self._without_others(every.value) if every.wish else every.value

    def _lacking(self, opened: OpenSnapshot) -> Skip | None:
        """What is weights only goes into no state with an optimizer: that would go on as if it had not stepped yet."""
        names = sorted(set(opened.snapshot.without) & set(self.state))
        asked = together(self.peers, lambda: None, wishes=lambda _: bool(names))
        return Skip(weights_only(self.store, opened), pruned=False) if isinstance(asked, Skip) or asked.wish else None

    def _opened(self) -> OpenSnapshot | Skip:
        """One read, and one revision for everybody: a compaction may be publishing another one right now."""
        done = together(self.peers, self._open)
        if isinstance(done, Skip):
            return done
        key, _, document = self.peers.broadcast(done.value if self.peers.rank == 0 else None).partition(b"\n")
        opened = check_snapshot(document, key.decode())
        self.key = opened.key
        return opened

    def _without_others(self, documents: Documents) -> Documents | Skip:
        """Plan where leaves of some ranks are not live on others (an average on rank 0, the stages of a pipeline):
        what is stored and live on no rank is a difference, what is live on another rank is not this one's business."""
        everyone = [
            msgspec.json.decode(data, type=frozenset[str])
            for data in self.peers.gather(msgspec.json.encode(sorted(documents.unclaimed)))
        ]
        others = documents.unclaimed - frozenset.intersection(*everyone)

        def planned() -> Documents:
            if documents.plan is not None:
                return documents
            return self._understood(documents.opened, documents.raw, others)

        done = together(self.peers, planned)
        return done if isinstance(done, Skip) else done.value

    def _open(self) -> bytes:
        if self.peers.rank != 0:
            return b""
        opened = open_snapshot(self.store, self.id)
        return opened.key.encode() + b"\n" + seal(opened.snapshot)

    def _own(self, opened: OpenSnapshot) -> Documents:
        """The seat's own part; or, in a job of another size, this rank's share of the parts."""
        world_size = opened.snapshot.world_size
        own = self.seat.own(world_size)
        ranks = (own,) if own is not None else range(self.peers.rank, world_size, self.peers.world_size)
        with self._judged(opened):
            return self._understood(opened, self._read_raw(opened, ranks))

    def _every(self, opened: OpenSnapshot, raw: Mapping[int, bytes]) -> Documents:
        """All parts; those that no peer had from the store."""
        with self._judged(opened):
            rest = [rank for rank in range(opened.snapshot.world_size) if rank not in raw]
            return self._understood(opened, {**raw, **self._read_raw(opened, rest)})

    def _read_raw(self, opened: OpenSnapshot, ranks: Sequence[int]) -> dict[int, bytes]:
        def one(rank: int) -> tuple[int, bytes]:
            return rank, read_part_bytes(self.store, opened.snapshot, rank)

        raw = dict(in_threads(ranks, one, threads=min(self.threads, max(len(ranks), 1))))
        self.meter.count("documents", sum(map(len, raw.values())))
        return raw

    def _hand_on(self, documents: Documents) -> Mapping[int, bytes]:
        """Own parts, to the ranks that need them. In a job of the same size every rank has read its own."""
        me = self.peers.rank
        own = np.frombuffer(bytearray(documents.raw[me]), np.uint8)  # torch takes no memory that is read-only
        needed = [] if documents.plan is not None else [r for r in documents.parts[me].others if r != me]
        everyone = [
            msgspec.msgpack.decode(data, type=tuple[int, list[int]])
            for data in self.peers.gather(msgspec.msgpack.encode((own.nbytes, needed)))
        ]
        out = {rank: own for rank, (_, wants_of) in enumerate(everyone) if me in wants_of}
        got = self.peers.exchange(out, {rank: everyone[rank][0] for rank in needed})
        self.meter.count("peers", sum(data.nbytes for data in got.values()))
        return {**documents.raw, **{rank: data.tobytes() for rank, data in got.items()}}

    def _more(self, documents: Documents, raw: Mapping[int, bytes]) -> Documents:
        if documents.plan is not None:
            return documents
        with self._judged(documents.opened):
            return self._understood(documents.opened, raw)

    def _exchange(self, own: Mapping[int, bytes]) -> dict[int, bytes]:
        raw: dict[int, bytes] = {}
        for data in self.peers.gather(msgspec.msgpack.encode(own)):
            raw |= msgspec.msgpack.decode(data, type=dict[int, bytes])
        self.meter.count("peers", sum(len(data) for rank, data in raw.items() if rank not in own))
        return raw

    def _understood(
        self, opened: OpenSnapshot, raw: Mapping[int, bytes], others: frozenset[str] | None = None
    ) -> Documents:
        """Check the parts, and plan if they are enough for it. `others`: leaves that are other ranks' alone, once that
        is known."""
        snapshot = opened.snapshot
        parts = {rank: check_part(data, snapshot, rank) for rank, data in sorted(raw.items())}
        complete = len(parts) == snapshot.world_size
        own = self.seat.own(snapshot.world_size)
        if not complete and (own is None or not parts.keys() >= set(parts[own].others)):
            return Documents(opened, parts, raw)
        return self._planned(opened, parts, raw, others)

    def _planned(
        self, opened: OpenSnapshot, parts: Mapping[int, Part], raw: Mapping[int, bytes], others: frozenset[str] | None
    ) -> Documents:
        """Documents with what they mean for the live state, if they are enough to say so."""
        complete = len(parts) == opened.snapshot.world_size
        try:
            stored = stored_state(parts, self.seat).without(others or ())
            plan = plan_restore(self.state, asked_for(stored, self.seat))
        except LayoutMismatch as error:
            # What seems to be missing may be another rank's: replicated leaves are stored by one of their holders.
            if not complete:
                return Documents(opened, parts, raw)
            unclaimed = frozenset(error.unexpected)
            if others is not None or error.missing or error.changed or not unclaimed <= _leaves(parts):
                raise
            return Documents(opened, parts, raw, unclaimed=unclaimed)
        if not complete and not covered(parts, wants(plan.wanted, parts, self.seat)):
            return Documents(opened, parts, raw)
        return Documents(opened, parts, raw, plan, stored.values)

    def _read(self, documents: Documents) -> dict[Shard, Bytes] | Skip:
        """Every wanted box."""
        assert documents.plan is not None
        plan, world_size = documents.plan, documents.opened.snapshot.world_size
        return self._boxes(
            documents,
            lambda: wants(plan.wanted, documents.parts, self.seat),
            lambda read: merged(read, self.seat, world_size),
        )

    def _boxes(
        self,
        documents: Documents,
        wanted: Callable[[], list[Wanted]],
        take: Callable[[Iterator[tuple[Wanted, Bytes]]], T],
    ) -> T | Skip:
        """Boxes of the snapshot, each chunk from the nearest source that has it; nothing near is trusted without its
        digest, and what a source does not give, or gives wrong, is left to the next."""
        with self.meter.stage("mirrors"):
            near = together(self.peers, lambda: self._from_node(documents, wanted()))
            if isinstance(near, Skip):
                return near
            reading, describer, boxes = near.value
        with self.meter.stage("peers"):
            received = from_peers(self.peers, reading, describer, self.holdings, self.id, threads=self.threads)
            self.meter.count("peers", received.nbytes)
            boxes += received.boxes
        with self.meter.stage("store"):
            if received.error is not None:  # raised where all can hear it
                read = together(self.peers, partial(_raise, received.error))
            else:
                read = together(self.peers, lambda: self._from_store(documents, reading, boxes, take))
        return read if isinstance(read, Skip) else read.value

    def _from_node(self, documents: Documents, wanted: list[Wanted]) -> tuple[Reading, Describer, Delivered]:
        with self._judged(documents.opened):
            reading, describer = Reading(plan_chunks(documents.parts, wanted)), Describer(documents.parts)
        boxes = list(reading.nothing())
        if self.holdings is not None:
            boxes += from_node(
                reading, describer, self.holdings, self.id, threads=self.threads, count=self.meter.count
            )  # fmt: skip
        return reading, describer, boxes

    def _from_store(
        self,
        documents: Documents,
        reading: Reading,
        boxes: Delivered,
        take: Callable[[Iterator[tuple[Wanted, Bytes]]], T],
    ) -> T:
        tally = Tally()
        try:
            with self._judged(documents.opened):
                rest = from_store(self.store, reading, memory=self.memory, threads=self.threads, tally=tally)
                return take(chain(boxes, rest))
        finally:
            self.meter.count("store", tally.bytes)

    def _install(self, documents: Documents, read: dict[Shard, Bytes]) -> None:
        assert documents.plan is not None
        try:
            for shard in documents.plan.wanted:  # in the plan's order: it puts first what may still be refused
                documents.plan.install(shard, torch.from_numpy(read.pop(shard)))  # and freed as soon as it is in place
            documents.plan.finish()
        except Exception as error:
            error.add_note("raised while live state was being written: some of it is restored, some is not")
            raise

    @contextmanager
    def _judged(self, opened: OpenSnapshot) -> Iterator[None]:
        """Tell what was pruned under the reader from what is damaged."""
        try:
            yield
        except DamagedError as error:
            raise verdict(self.store, opened, error) from error


def _leaves(parts: Mapping[int, Part]) -> set[str]:
    return {row.leaf for part in parts.values() for row in part.shards}


def _raise(error: Exception) -> Any:
    raise error
