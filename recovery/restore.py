"""Bring a live state back to a committed step: every rank, in place, all or nothing (torch).

    choose      rank 0 reads the history; all ranks try the same snapshots, newest first
    claim       a run is opened that names the snapshot, before its first part is read (PROTOCOL.md §3, §5.2)
    documents   each rank reads its own part, and gets the others' from its peers only where it needs them
    read        every wanted box into host memory, every byte checked: from mirrors, then peers, then the store
    install     only now, after every rank has everything, are live tensors written

Until the last stage nothing live has changed: a damaged snapshot, a layout that does not fit or a store that fails
leaves the state as it was. The price is host memory for one copy of the rank's own state, freed at the end.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import msgspec
import numpy as np
import torch

from ckpt.errors import DamagedError, LayoutMismatch, NoSnapshot
from ckpt.format.manifest import Part, seal
from ckpt.format.names import SnapshotId
from ckpt.format.shards import Shard
from ckpt.leaves import Restoration, plan_restore
from recovery.agree import Peers, Skip, together
from recovery.assemble import covered, plan_chunks
from recovery.boxes import Bytes
from recovery.choose import Skipped, exhausted
from recovery.choose_together import choose_together
from recovery.exchange import from_peers
from recovery.fetch import Tally
from recovery.meter import Meter
from recovery.near import from_node
from recovery.parallel import THREADS, in_threads
from recovery.place import Resize, Seat, asked_for, merged, stored_state, wants
from recovery.read import OpenSnapshot, check_part, check_snapshot, open_snapshot, read_part_bytes, verdict
from recovery.reading import Delivered, Reading
from recovery.report import Restored
from recovery.shards import MEMORY, from_store
from recovery.spans import Describer
from recovery.survey import Holdings
from storage_backends.base import Store

log = logging.getLogger("ckpt")


def restore(
    store: Store,
    ranks: Peers,
    state: MutableMapping[str, object],
    *,
    step: int | str | None = None,
    claim: Callable[[SnapshotId], bool],
    on_resize: Resize | None = None,
    holdings: Holdings | None = None,
    memory: int = MEMORY,
    threads: int = THREADS,
) -> Restored | None:
    """Restore `state` in place. Collective: every rank calls it, and all end on one snapshot or raise alike.

    Args:
        step: None or "latest": the newest of the live line, falling back past damaged ones; else exactly that one.
        claim: collective; makes the snapshot safe from a prune that begins now. False: one has announced its end.
        on_resize: the rule for what differed between ranks, where the snapshot has another number of them.
        holdings: what mirrors on this node still hold; this rank's own are those of `holdings.prefer`.
        memory: most encoded bytes in flight, and so about what is needed beside one copy of the rank's state.

    Returns:
        What was done, or None if the store holds no snapshot and none was asked for.

    Raises:
        NoSnapshot: the one asked for does not exist (any more).
        DamagedError: it is damaged; or all are.
        LayoutMismatch, UnsupportedState, FormatTooNew: it cannot become this state.
        StorageError: the store does not answer: that is neither damage nor emptiness.
    """
    seat = Seat(ranks.rank, ranks.world_size, rule=on_resize)
    return restore_seat(
        store, ranks, seat, state, step=step, claim=claim, holdings=holdings, memory=memory, threads=threads
    )


def restore_seat(
    store: Store,
    peers: Peers,
    seat: Seat,
    state: MutableMapping[str, object],
    *,
    step: int | str | None,
    claim: Callable[[SnapshotId], bool],
    memory: int,
    threads: int,
    holdings: Holdings | None = None,
) -> Restored | None:
    """`restore` for the state of any seat: `load_into` restores rank 2 of 4 and asks nobody."""
    meter = Meter()
    with meter.stage("choose"):
        choice = choose_together(store, peers, step)
    skipped: list[Skipped] = list(choice.unreadable)
    for id_, reason in choice.unreadable:
        _say(peers, id_, reason)
    last: Exception | None = None
    for id_ in choice.candidates:
        if not claim(id_):
            reason = "a prune has announced its removal"
            last = NoSnapshot(f"snapshot {id_.short}: {reason}")
        else:
            attempt = _Attempt(store, peers, seat, state, id_, holdings, meter, memory, threads)
            found = attempt.run()
            if not isinstance(found, Skip):
                return _restored(found, seat, meter, tuple(skipped), holdings)
            last, reason = found.error, str(found.error)
        skipped.append((id_, reason))
        _say(peers, id_, reason)
    if not choice.candidates:
        return None
    raise exhausted(store, choice, tuple(skipped), last)


def _say(peers: Peers, id_: SnapshotId, reason: str) -> None:
    """All ranks know; one speaks."""
    log.log(logging.WARNING if peers.rank == 0 else logging.INFO, "snapshot %s passed over: %s", id_.short, reason)


@dataclass(frozen=True, slots=True)
class _Documents:
    """One snapshot's parts as far as this rank has them (`raw`: their stored bytes), and what they mean for the live
    state. `plan` None: more must be known to say; with all parts here, whether `unclaimed` leaves are other ranks'."""

    opened: OpenSnapshot
    parts: Mapping[int, Part]
    raw: Mapping[int, bytes]
    plan: Restoration | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    unclaimed: frozenset[str] = frozenset()


@dataclass(eq=False, slots=True)
class _Attempt:
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

    def run(self) -> _Documents | Skip:
        with self.meter.stage("documents"):
            documents = self._documents()
            if isinstance(documents, Skip):
                return documents
        read = self._read(documents)
        if isinstance(read, Skip):
            return read
        with self.meter.stage("install"):
            installed = together(self.peers, lambda: self._install(documents, read))
            if isinstance(installed, Skip):
                raise installed.error
        return documents

    def _documents(self) -> _Documents | Skip:
        done = together(self.peers, self._open)
        if isinstance(done, Skip):
            return done
        # One read, and one revision for everybody: a compaction may be publishing another one right now.
        key, _, document = self.peers.broadcast(done.value if self.peers.rank == 0 else None).partition(b"\n")
        opened = check_snapshot(document, key.decode())
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

    def _without_others(self, documents: _Documents) -> _Documents | Skip:
        """Plan where leaves of some ranks are not live on others (an average on rank 0, the stages of a pipeline):
        what is stored and live on no rank is a difference, what is live on another rank is not this one's business."""
        everyone = [
            msgspec.json.decode(data, type=frozenset[str])
            for data in self.peers.gather(msgspec.json.encode(sorted(documents.unclaimed)))
        ]
        others = documents.unclaimed - frozenset.intersection(*everyone)

        def planned() -> _Documents:
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

    def _own(self, opened: OpenSnapshot) -> _Documents:
        """The seat's own part; or, in a job of another size, this rank's share of the parts."""
        world_size = opened.snapshot.world_size
        own = self.seat.own(world_size)
        ranks = (own,) if own is not None else range(self.peers.rank, world_size, self.peers.world_size)
        with self._judged(opened):
            return self._understood(opened, self._read_raw(opened, ranks))

    def _every(self, opened: OpenSnapshot, raw: Mapping[int, bytes]) -> _Documents:
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

    def _hand_on(self, documents: _Documents) -> Mapping[int, bytes]:
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

    def _more(self, documents: _Documents, raw: Mapping[int, bytes]) -> _Documents:
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
    ) -> _Documents:
        """Check the parts, and plan if they are enough for it. `others`: leaves that are other ranks' alone, once that
        is known."""
        snapshot = opened.snapshot
        parts = {rank: check_part(data, snapshot, rank) for rank, data in sorted(raw.items())}
        complete = len(parts) == snapshot.world_size
        own = self.seat.own(snapshot.world_size)
        if not complete and (own is None or not parts.keys() >= set(parts[own].others)):
            return _Documents(opened, parts, raw)
        try:
            stored = stored_state(parts, self.seat).without(others or ())
            plan = plan_restore(self.state, asked_for(stored, self.seat))
        except LayoutMismatch as error:
            # What seems to be missing may be another rank's: replicated leaves are stored by one of their holders.
            if not complete:
                return _Documents(opened, parts, raw)
            unclaimed = frozenset(error.unexpected)
            if others is not None or error.missing or error.changed or not unclaimed <= _leaves(parts):
                raise
            return _Documents(opened, parts, raw, unclaimed=unclaimed)
        if not complete and not covered(parts, wants(plan.wanted, parts, self.seat)):
            return _Documents(opened, parts, raw)
        return _Documents(opened, parts, raw, plan, stored.values)

    def _read(self, documents: _Documents) -> dict[Shard, Bytes] | Skip:
        """Every wanted box, each chunk from the nearest source that has it; nothing near is trusted without its digest,
        and what a source does not give, or gives wrong, is left to the next."""
        with self.meter.stage("mirrors"):
            near = together(self.peers, lambda: self._from_node(documents))
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
                read = together(self.peers, lambda: self._from_store(documents, reading, boxes))
        return read if isinstance(read, Skip) else read.value

    def _from_node(self, documents: _Documents) -> tuple[Reading, Describer, Delivered]:
        assert documents.plan is not None
        with self._judged(documents.opened):
            wanted = wants(documents.plan.wanted, documents.parts, self.seat)
            reading, describer = Reading(plan_chunks(documents.parts, wanted)), Describer(documents.parts)
        boxes = list(reading.nothing())
        if self.holdings is not None:
            boxes += from_node(
                reading, describer, self.holdings, self.id, threads=self.threads, count=self.meter.count
            )  # fmt: skip
        return reading, describer, boxes

    def _from_store(self, documents: _Documents, reading: Reading, boxes: Delivered) -> dict[Shard, Bytes]:
        tally = Tally()
        try:
            with self._judged(documents.opened):
                rest = from_store(self.store, reading, memory=self.memory, threads=self.threads, tally=tally)
                return merged(chain(boxes, rest), self.seat, documents.opened.snapshot.world_size)
        finally:
            self.meter.count("store", tally.bytes)

    def _install(self, documents: _Documents, read: dict[Shard, Bytes]) -> None:
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


def _raise(error: Exception) -> dict[Shard, Bytes]:
    raise error


def _restored(
    documents: _Documents, seat: Seat, meter: Meter, skipped: tuple[Skipped, ...], holdings: Holdings | None
) -> Restored:
    own = seat.own(documents.opened.snapshot.world_size)
    return Restored(
        documents.opened.id,
        meter.bytes,
        meter.seconds,
        skipped,
        {name: value for name, value in documents.values.items() if name.startswith("$")},
        documents.opened.snapshot,
        documents.parts,
        own,
        () if holdings is None else tuple(map(str, holdings.problems)),
    )
