"""From captured bytes to packs on the store: one pass over the pieces of a state.

The writer's thread compares and packs, the encode crew encodes a few batches ahead, the upload crew puts full packs:
all three at once. Results are taken in the order of the pieces, whichever worker is done first: what lies together in
the state lies together in a pack, and is read in one range.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import chain

from ckpt.format.codec import Codec
from ckpt.format.key import Key
from ckpt.format.kinds import KINDS
from ckpt.format.manifest import Blob, Chunk, Loan, digest64
from ckpt.format.names import packs_prefix
from ckpt.format.pack import TEXT
from ckpt.format.probe import Learned
from ckpt.saving.breath import Breath
from ckpt.saving.diff import (
    Changed,
    Encoded,
    Held,
    Known,
    Same,
    Task,
    Twin,
    Verdict,
    compare,
    encode,
    standing,
    task_of,
)
from ckpt.saving.job import Reference, Report, SaveJob
from ckpt.saving.moving import parcels
from ckpt.saving.packing import Outbox
from ckpt.saving.policy import MOVED, Lifetime, Rule, hardly_alive, lifetime, nearly_dead
from ckpt.saving.threads import Crew, Pending
from storage_backends.base import StorageError, Store

log = logging.getLogger(__name__)

BATCH = 512 * 1024
"""Raw bytes handed to an encode worker at once, at least: to hand over costs as much as to encode a small chunk."""

PACKS = 8
"""Nearly dead packs that one save empties at most: each takes a read or two of the store."""


class Bench:
    """What an encode worker works with."""

    def __init__(self) -> None:
        self.codec = Codec()
        self.breathe = Breath()


@dataclass(slots=True)
class Tally:
    """A report in the making, and how far its save has come."""

    stage: str = "writer"
    captured: int = 0
    changed: int = 0
    stored: dict[int, int] = field(default_factory=dict)
    document: int = 0
    packs: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    def report(self) -> Report:
        return Report(
            captured=self.captured,
            changed=self.changed,
            stored=sum(self.stored.values()),
            document=self.document,
            packs=self.packs,
            kinds={KINDS[kind]: size for kind, size in sorted(self.stored.items())},
            seconds=dict(self.seconds),
        )

    def spend(self, stage: str, seconds: float) -> None:
        self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds


@dataclass(frozen=True, slots=True)
class _Placed:
    """What is known of a chunk before its pack has a name."""

    digest: str
    below: tuple[Blob, ...]


class Storing:
    """One save's pass. `run` it once. `ahead`: raw bytes that may be with the encoders at a time (one batch always)."""

    def __init__(
        self,
        job: SaveJob,
        held: Held | None,
        *,
        rule: Rule,
        learned: Learned,
        encoders: Crew[Bench],
        ahead: int,
        store: Store,
        outbox: Outbox,
        tally: Tally,
        breathe: Breath,
        key: Key | None = None,
    ) -> None:
        self._job = job
        self._key = key
        self._held = held
        self._rule = rule
        self._learned = learned
        self._encoders = encoders
        self._store = store
        self._outbox = outbox
        self._tally = tally
        self._breathe = breathe
        count = len(job.layout.pieces)
        self._table: list[Chunk | None] = [None] * count
        self._young = bytearray(b"\1") * count
        self._placed: dict[int, _Placed] = {}
        self._twins: list[tuple[int, int]] = []
        self._batch: list[Task] = []
        self._batch_size = 0
        self._encoding: deque[Pending[tuple[list[Encoded], float]]] = deque()
        self._ahead = max(1, min(2 * encoders.size + 1, ahead // (BATCH + job.layout.chunk)))
        self._given_up = False
        self._dying: frozenset[str] = frozenset()
        self._leaning: dict[str, list[Same]] = {}
        self._may_move = int(MOVED * job.layout.nbytes)
        self._stale = 0
        self._loans: dict[int, Loan] = {}

    def run(self) -> Held:
        """Store what changed; returns what will be the reference once the commit is seen. All packs it names are on
        the store. After an error nothing is under way any more."""
        self._tally.stage = "encode"
        self._tally.captured = self._job.layout.nbytes
        started = time.perf_counter()
        try:
            mine: dict[str, int] = {}
            if self._held is not None:
                reference = self._held.reference
                mine = {pack: size for pack, size in reference.packs.items() if pack not in reference.shared}
                self._dying = nearly_dead(reference.table, mine, self._job.rank, self._breathe)
            self._loans = standing(self._job, self._held, self._breathe)
            for verdict in compare(self._job, self._held, self._breathe, self._loans):
                self._judge(verdict)
            if self._batch or self._encoding or self._placed:
                self._move()  # an unchanged state stores nothing at all
            self._hand_over()
            while self._encoding:
                self._collect()
            self._tally.stage = "upload"
            if self._placed:
                self._move_blobs(mine)
            packed = self._outbox.finish()
            self._tally.stage = "encode"
            return self._next(packed.blobs, packed.packs)
        except BaseException:
            self._given_up = True
            for pending in self._encoding:
                pending.wait()
            self._outbox.give_up()
            raise
        finally:
            self._tally.spend("upload", self._outbox.seconds)
            self._tally.spend("store", time.perf_counter() - started)
            if self._stale:
                log.warning(
                    "step %d: %d chunks of the reference in memory are not what its table says, so they were stored "
                    "in full; a mirror of another time, or memory that flips bits",
                    self._job.id.step,
                    self._stale,
                )

    def _judge(self, verdict: Verdict) -> None:
        match verdict:
            case Same(index, old):
                assert self._held is not None
                chunk = self._held.reference.table[old]
                self._table[index] = chunk
                self._young[index] = self._held.young[old]
                if self._leans(chunk):
                    self._leaning.setdefault(chunk.digest, []).append(verdict)
                return
            case Known(index, chunk):
                self._table[index] = chunk
            case Twin(index, of):
                self._twins.append((index, of))
            case Changed(index, digest, old):
                self._enqueue(task_of(self._job, index, digest, self._held, old, keyframe=self._moves(index, old)))
        piece = self._job.layout.pieces[verdict.index]
        self._tally.changed += piece.stop - piece.start

    # --- packs that are hardly worth keeping --------------------------------------------------------------------

    def _leans(self, chunk: Chunk) -> bool:
        return bool(self._dying) and any(blob.pack in self._dying for blob in chunk.blobs)

    def _moves(self, index: int, old: int | None) -> bool:
        """Whether a changed chunk gives up a chain that leans on a nearly dead pack."""
        if old is None or self._held is None or not self._leans(self._held.reference.table[old]):
            return False
        return self._spend_move(index)

    def _move(self) -> None:
        """Store again unchanged chunks that lean on nearly dead packs, as far as this save may."""
        for digest, same in self._leaning.items():
            first = same[0]
            if self._spend_move(first.index):
                self._enqueue(task_of(self._job, first.index, digest, self._held, first.old, keyframe=True))
                self._twins.extend((other.index, first.index) for other in same[1:])

    def _move_blobs(self, mine: Mapping[str, int]) -> None:
        """Take the few blobs that are still needed out of packs of long ago, as far as this save may. `mine`: packs
        that nobody else leans on, with their lengths."""
        # What the next part names: chunks that stayed, and what lies below new deltas.
        chunks = chain(self._table, (Chunk(placed.digest, placed.below) for placed in self._placed.values()))
        for pack, needed in hardly_alive(chunks, mine, self._job.rank, self._breathe)[:PACKS]:
            blobs = [blob for blob in needed if self._spend(blob.size + TEXT)]
            if not blobs:
                break
            try:
                for parcel in parcels(self._store, pack, mine[pack], blobs, self._breathe):
                    self._outbox.add(parcel, (Lifetime.MOVED, ""))
                    self._tally.stored[parcel.kind] = self._tally.stored.get(parcel.kind, 0) + len(parcel.data)
            except (
                StorageError,
                ValueError,
            ) as error:  # it stays where it is; nothing was going to be better but space
                log.warning("step %d: %s is kept for little: %s", self._job.id.step, pack, error)

    def _spend_move(self, index: int) -> bool:
        piece = self._job.layout.pieces[index]
        return self._spend(piece.stop - piece.start)

    def _spend(self, size: int) -> bool:
        if size > self._may_move:
            return False
        self._may_move -= size
        return True

    # --- encoding -------------------------------------------------------------------------------------------------

    def _enqueue(self, task: Task) -> None:
        self._batch.append(task)
        self._batch_size += len(task.new)
        if self._batch_size >= BATCH:
            self._hand_over()

    def _hand_over(self) -> None:
        if not self._batch:
            return
        batch, self._batch, self._batch_size = self._batch, [], 0
        self._encoding.append(self._encoders.submit(lambda bench: self._encode(bench, batch)))
        while self._encoding and self._encoding[0].over:
            self._collect()
        while len(self._encoding) > self._ahead:
            self._collect()

    def _encode(self, bench: Bench, batch: list[Task]) -> tuple[list[Encoded], float]:
        """On an encode worker."""
        started = time.perf_counter()
        encoded: list[Encoded] = []
        for task in batch:
            if self._given_up:
                break
            encoded.append(self._sealed(encode(bench.codec, self._learned, self._rule, task)))
            bench.breathe()
        return encoded, time.perf_counter() - started

    def _sealed(self, e: Encoded) -> Encoded:
        """Here, on the worker: it costs about as much as encoding, and from here on only stored bytes count."""
        if self._key is None:
            return e
        job = self._job
        blob = self._key.seal_blob(e.blob, e.kind, f"{packs_prefix(job.id)}{job.rank:05d}/{e.task.index}")
        return replace(e, blob=blob, digest=digest64(blob))

    def _collect(self) -> None:
        """Take the oldest batch and pass its blobs on; raises what encoding it raised."""
        encoded, seconds = self._encoding.popleft().result()
        self._tally.spend("encode", seconds)
        reference = None if self._held is None else self._held.reference.id
        for e in encoded:
            index, chained = e.task.index, e.task.chain
            self._placed[index] = _Placed(e.task.digest, e.below)
            self._young[index] = e.young
            self._stale += e.stale
            self._tally.stage = "upload"
            older = self._held is not None and bool(chained) and chained[0].pack in self._held.moved
            lasts = lifetime(chained, e.based, None if older else reference)
            self._outbox.add(e.parcel, (lasts, e.task.piece.cls))
            self._tally.stage = "encode"
            self._tally.stored[e.kind] = self._tally.stored.get(e.kind, 0) + len(e.blob)
            self._breathe()

    # --- the table ------------------------------------------------------------------------------------------------

    def _next(self, blobs: dict[int | Blob, Blob], new_packs: dict[str, int]) -> Held:
        """The reference to be."""
        while self._placed:  # emptied on the way: to free it all at once would hold the GIL
            index, placed = self._placed.popitem()
            self._table[index] = Chunk(placed.digest, (*placed.below, blobs.pop(index)))
            self._breathe()
        for index, of in self._twins:
            self._table[index] = self._table[of]
            self._young[index] = self._young[of]
            self._breathe()
        sizes = dict(new_packs)
        shared = frozenset[str]()
        if self._held is not None:
            sizes.update(self._held.reference.packs)
            shared = self._held.reference.shared
        table: list[Chunk] = []
        packs: dict[str, int] = {}
        moved = {old: new for old, new in blobs.items() if isinstance(old, Blob)}
        for chunk in self._table:
            assert chunk is not None, "every piece has had its verdict"
            if moved and not moved.keys().isdisjoint(chunk.blobs):
                chunk = Chunk(chunk.digest, tuple(moved.get(blob, blob) for blob in chunk.blobs), chunk.of)
            table.append(chunk)
            for blob in chunk.blobs:
                packs[blob.pack] = sizes[blob.pack]
            self._breathe()
        for loan in self._loans.values():
            packs |= {pack: sizes[pack] for pack in loan.packs}
        self._tally.packs = len(new_packs)
        job = self._job
        reference = Reference(job.id, job.layout, job.data, tuple(table), packs, shared & packs.keys(), self._loans)
        return Held(reference, self._young, frozenset(blob.pack for blob in moved.values()))
