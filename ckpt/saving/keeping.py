"""The journal's own thread: what was captured becomes a record, goes where it outlives us, and is proven (torch).

In this order, moment by moment: the record is encoded; it goes into the ring, and on to the segments; only then is the
proof rolled over the same step. What a crash leaves behind is told by what follows whom: a record without the one
before it, or of a step that not all ranks recorded, leads nowhere, and is removed with the snapshot it extends.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, TypeAlias

import msgspec
import numpy as np
import torch

from ckpt.format import values
from ckpt.format.codec import Codec
from ckpt.format.journal import Coded, Event, Group, encode_run, record_head, write_record
from ckpt.format.layout import Layout
from ckpt.format.names import RunId, SnapshotId
from ckpt.format.probe import Learned
from ckpt.format.shards import Shard
from ckpt.mirror.ring import RecordName, Ring
from ckpt.rolling import Call, Change, Groups, Rolled, as_tensor, encode_options
from ckpt.saving.breath import Breath
from ckpt.saving.gradients import Buffers, Lot
from ckpt.saving.job import Bytes
from ckpt.saving.proving import Diverged, Proof
from ckpt.saving.segments import Segments
from ckpt.saving.threads import Pending, background

log = logging.getLogger("ckpt")


@dataclass(frozen=True, slots=True, eq=False)
class Consumed:
    """What one call of an optimizer was about to consume. `groups` None: as at its call before."""

    optimizer: str
    kind: str
    groups: Groups | None
    gradients: Sequence[Lot]
    scale: tuple[float, float] | None


@dataclass(frozen=True, slots=True, eq=False)
class Moment:
    """One step, captured. `others`: tensors that may have changed outside the optimizers; `trees`: every plain value.
    `table`: None where the one before holds. `first`: of those that extend a snapshot."""

    step: int
    consumed: Sequence[Consumed]
    others: Sequence[Lot]
    trees: Mapping[str, Any]
    table: tuple[Shard, ...]
    aliases: Mapping[str, str]
    sums: Pending[bytes]
    first: bool
    threads: int
    buffers: Sequence[Bytes]


@dataclass(frozen=True, slots=True, eq=False)
class Begin:
    """A snapshot was captured, and this is a copy of the whole state at that instant."""

    id: SnapshotId
    rolled: Rolled
    trees: Mapping[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class Mark:
    """The moment before this was captured as a snapshot too."""

    id: SnapshotId
    layout: Layout


@dataclass(frozen=True, slots=True, eq=False)
class Committed:
    """That snapshot is there, with these chunk digests."""

    id: SnapshotId
    digests: Sequence[str]


@dataclass(frozen=True, slots=True)
class Pause:
    """Nothing follows until the next `Begin`."""


BEHIND = 256 << 20
"""Bytes of records that may wait for a store that is down or slow; beyond, training would run out of memory."""

News: TypeAlias = Moment | Begin | Mark | Committed | Pause


@dataclass(slots=True)
class Counts:
    """What the journal took so far. `cpu`: seconds of its threads; `bytes`: of records; `memory`: host bytes held."""

    steps: int = 0
    bytes: int = 0
    cpu: float = 0.0
    memory: int = 0


@dataclass(eq=False)
class Keeper:
    """Owns ring, segments and proof. `put` may be called by the training and the writer's thread.

    Attributes:
        over: why the journal has ended for good; None while it goes on.
        behind: why nothing is recorded until the next snapshot; None while all is. The training thread clears it.
    """

    rank: int
    world_size: int
    ring: Ring | None
    segments: Segments | None
    buffers: Buffers
    changed: threading.Condition
    most: int
    over: str | None = None
    behind: str | None = None
    counts: Counts = field(default_factory=Counts)
    _queue: SimpleQueue[News | None] = field(default_factory=SimpleQueue)
    _thread: threading.Thread | None = None
    _waiting: int = 0
    _durable: tuple[RunId, int] | None = None
    _failure: str | None = None
    _proof: Proof | None = None
    _base: SnapshotId | None = None
    _begun: int = 0
    _values: dict[str, bytes] = field(default_factory=dict)
    _aliases: Mapping[str, str] = field(default_factory=dict)
    _commits: list[SnapshotId] = field(default_factory=list)
    _index: tuple[tuple[Shard, ...], Mapping[str, int]] | None = None
    _codec: Codec = field(default_factory=Codec)
    _learned: Learned = field(default_factory=Learned)
    _breathe: Breath = field(default_factory=Breath)

    # --- callers' side ---------------------------------------------------------------------------------------------

    def put(self, news: News) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="ckpt-journal", daemon=True)
            self._thread.start()
        if isinstance(news, Moment):
            with self.changed:
                # Not one more than can be held: what falls behind for good slows training down rather than eat memory.
                self.changed.wait_for(lambda: self._waiting < self.most or self.over is not None)
                self._waiting += 1
        self._queue.put(news)

    def begin(self, news: Begin) -> None:
        """`put`, and forget at once why recording had paused: whoever waits for the next record must not be told so."""
        with self.changed:
            self.behind = self._failure = None
        self.put(news)

    def wait_durable(self, run: RunId, step: int, timeout: float) -> str | None:
        """Until the record of `step` is where it is to be; else why not."""

        def there() -> bool:
            done = self.segments.durable if self.segments is not None else self._durable
            return (done is not None and done >= (run, step)) or self.over is not None or self._broken is not None

        with self.changed:
            if self.changed.wait_for(there, timeout):
                return self._broken
        why = self.segments.failure if self.segments is not None else None
        return f"step {step} is not durable after {timeout:g} s" + (f": {why}" if why is not None else "")

    @property
    def _broken(self) -> str | None:
        return self._failure or (self.segments.broken if self.segments is not None else None)

    def stop(self, timeout: float | None) -> bool:
        """Write down what was captured, and end."""
        began = time.monotonic()
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(timeout)
            if self._thread.is_alive():
                return False
        left = None if timeout is None else max(0.0, timeout - (time.monotonic() - began))
        return self.segments is None or self.segments.stop(left)

    def told(self) -> None:
        """The segments have news."""
        with self.changed:
            self.changed.notify_all()

    # --- the thread ------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        background()
        while (news := self._queue.get()) is not None:
            began = time.thread_time()
            try:
                if self.over is None:
                    self._take(news)
            except Diverged as error:
                self._end(str(error))
            except Exception as error:  # training and snapshots go on, whatever happens to the journal
                log.exception("journal")
                self._end(f"{type(error).__name__}: {error}")
            finally:
                if isinstance(news, Moment):
                    self.buffers.give_back(news.buffers)
                    with self.changed:
                        self._waiting -= 1
                        self.changed.notify_all()
            self.counts.cpu += time.thread_time() - began
            del news  # it holds the captured state, and this thread now sleeps

    def _end(self, why: str) -> None:
        self._proof = None
        log.warning(
            "rank %d: the journal has switched itself off: %s. Snapshots go on; steps since the last one are lost in a "
            "failure, as without a journal",
            self.rank,
            why,
        )
        with self.changed:
            self.over = why
            self.changed.notify_all()

    def _take(self, news: News) -> None:
        match news:
            case Begin(id=id_, rolled=rolled, trees=trees):
                rolled.breathe = self._breathe
                self._proof = Proof(rolled)
                self._base, self._begun = id_, id_.step
                self._values = self._encoded(trees)
                rolled.values = dict(self._values)
                self._commits.clear()
            case Moment():
                if self._proof is not None:
                    self._record(news, self._proof)
            case Mark(id=id_, layout=layout):
                self._base = id_
                if self.segments is not None:
                    self.segments.cut()
                if self._proof is not None:
                    self._proof.mark(id_, layout)
            case Committed(id=id_, digests=digests):
                self._settle(id_, digests)
            case Pause():
                self._proof = None

    def _settle(self, id_: SnapshotId, digests: Sequence[str]) -> None:
        if self.ring is not None:
            # What leads to the snapshot before stays, for the case that this one turns out damaged.
            if self._commits:
                self.ring.forget(id_.run, self._commits[-1].step)
            self.ring.forget_older(id_.run)
        self._commits.append(id_)
        if self._proof is not None:
            self._proof.compare(id_, digests)

    def _encoded(self, trees: Mapping[str, Any]) -> dict[str, bytes]:
        try:
            return {name: values.encode(tree, name) for name, tree in trees.items()}
        except values.UnsupportedValue as error:
            raise Diverged(f"a plain value cannot be recorded: {error}") from None

    def _record(self, moment: Moment, proof: Proof) -> None:
        base, rolled = self._base, proof.rolled
        assert base is not None
        index = self._index_of(moment.table)
        blobs: list[bytes] = []

        def coded(lot: Lot, cls: str, old: Bytes | None) -> Coded:
            rows, some = encode_run(self._codec, self._learned, cls, lot.dtype, lot.data, old, self._breathe)
            blobs.extend(some)
            return Coded(lot.dtype, tuple(map(index.__getitem__, lot.paths)), rows)

        events = [
            Event(
                consumed.optimizer,
                consumed.kind,
                None if consumed.groups is None else tuple(_group(paths, o, index) for paths, o in consumed.groups),
                tuple(coded(lot, "gradient", None) for lot in consumed.gradients),
                consumed.scale,
            )
            for consumed in moment.consumed
        ]
        new = [changed for lot in moment.others if (changed := _changed(lot, rolled)) is not None]
        tensors = [coded(lot, moment.table[index[lot.paths[0]]].leaf.cls, _before(lot, rolled)) for lot in new]
        now = self._encoded(moment.trees)
        given = {name: text for name, text in now.items() if self._values.get(name) != text}
        gone = sorted(self._values.keys() - now.keys())
        table = moment.table if moment.first or moment.table != rolled.table else None
        sums = moment.sums.result()
        self._breathe()
        previous, id_ = rolled.step, SnapshotId(base.run, moment.step)
        head = record_head(
            id_=id_,
            previous=previous,
            rank=self.rank,
            world_size=self.world_size,
            extends=base,
            threads=moment.threads,
            count=len(moment.table),
            table=table,
            aliases=moment.aliases,
            events=events,
            tensors=tensors,
            values=given,
            gone=gone,
        )
        data = write_record(head, sums, blobs)
        self._keep(id_, previous, data)
        self._values = now
        changes = {path: part for lot in new for path, part in _parts(lot)}
        calls = [self._call(consumed, moment.table, index) for consumed in moment.consumed]
        proof.follow(Change(moment.step, calls, changes, given, gone, table, moment.aliases, sums))
        held = 0 if self.ring is None else self.ring.nbytes
        held += 0 if self.segments is None else self.segments.held
        self.counts.memory = proof.nbytes + self.buffers.nbytes + held
        self.counts.steps += 1
        self.counts.bytes += len(data)

    def _index_of(self, table: tuple[Shard, ...]) -> Mapping[str, int]:
        """Path → row. Made once for a table: it holds the GIL for long where there are many."""
        if self._index is None or self._index[0] is not table:
            self._index = table, {shard.leaf.path: n for n, shard in enumerate(table)}
        return self._index[1]

    def _call(self, consumed: Consumed, table: Sequence[Shard], index: Mapping[str, int]) -> Call:
        gradients: dict[str, torch.Tensor] = {}
        for lot in consumed.gradients:
            for path, data in _parts(lot):
                gradients[path] = as_tensor(data, table[index[path]])
                self._breathe()
        return Call(consumed.optimizer, consumed.kind, consumed.groups, gradients, consumed.scale)

    def _keep(self, id_: SnapshotId, previous: int, data: bytes) -> None:
        if self.ring is not None:
            try:
                gone = self.ring.put(RecordName(id_.run, self.rank, previous, id_.step), data)
                since = self._commits[-1].step if self._commits else self._begun
                if self.segments is None and any(name.run == id_.run and name.step > since for name in gone):
                    self._fall_behind(
                        "the ring does not hold the steps between two snapshots; give Journal(ring=) more"
                    )
                    return
            except OSError as error:
                if self.segments is None:
                    with self.changed:
                        self._failure = f"the mirror's folder takes no record: {error.strerror or error}"
                        self.changed.notify_all()
                    return
                log.warning("journal: step %d is not in the mirror's folder: %s", id_.step, error)
        if self.segments is not None:
            if self.segments.held > BEHIND:
                self.segments.forget()
                self._fall_behind(f"more than {BEHIND} bytes of records wait for the store")
                return
            self.segments.add(id_.run, previous, id_.step, data)
        with self.changed:
            self._durable = id_.run, id_.step
            self.changed.notify_all()

    def _fall_behind(self, why: str) -> None:
        """What was recorded since the last snapshot leads nowhere, or soon would fill the memory."""
        log.warning("rank %d: the journal pauses until the next snapshot: %s", self.rank, why)
        self._proof = None
        with self.changed:
            self._failure = self.behind = why
            self.changed.notify_all()


def _group(paths: Sequence[str], options: Mapping[str, Any], index: Mapping[str, int]) -> Group:
    return Group(tuple(index[path] for path in paths), msgspec.Raw(encode_options(options)))


def _parts(lot: Lot) -> Iterator[tuple[str, Bytes]]:
    at = 0
    for path, nbytes in zip(lot.paths, lot.sizes, strict=True):
        yield path, lot.data[at : at + nbytes]
        at += nbytes


def _changed(lot: Lot, rolled: Rolled) -> Lot | None:
    """The members whose bytes are not those of the state before."""
    parts = [
        (path, data)
        for path, data in _parts(lot)
        if path not in rolled.tensors or not np.array_equal(rolled.bytes_of(path), data)
    ]
    if not parts:
        return None
    if len(parts) == len(lot.paths):
        return lot
    paths, pieces = zip(*parts, strict=True)
    return Lot(lot.dtype, tuple(paths), tuple(map(len, pieces)), np.concatenate(pieces))


def _before(lot: Lot, rolled: Rolled) -> Bytes | None:
    """The bytes that the lot's tensors had before; None if one was not there, or had another size."""
    held = [rolled.bytes_of(path) if path in rolled.tensors else None for path in lot.paths]
    if any(data is None or len(data) != size for data, size in zip(held, lot.sizes, strict=True)):
        return None
    return np.concatenate([data for data in held if data is not None])
