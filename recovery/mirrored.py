"""One whole slot of a mirror, and how slots give the bytes of a stored chunk, whatever layout they were filled by.

Files are read, not mapped: a file that is cut under our hands gives a short read, where a mapping would give a signal
that kills. And the bytes that are checked are the bytes that were copied, not those that lie there a moment later.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ckpt.format.manifest import chunk_digest
from ckpt.format.names import SnapshotId
from ckpt.format.shards import DTYPES, Box, uncovered
from ckpt.mirror.records import Placed, SlotRecord
from recovery.boxes import Bytes, Copy, Run, carry_out, copies
from recovery.spans import Span, StoredChunk

MAX_HULL = 64 << 20
"""Most bytes read to pick a box out of a wider one; beyond, another source is cheaper."""


@dataclass(frozen=True, slots=True, eq=False)
class HeldSlot:
    """One whole slot of one mirror file. `places`: leaf → where its boxes lie; None if that cannot be read."""

    path: Path
    number: int
    record: SlotRecord
    start: int
    fd: int
    places: Mapping[str, Sequence[Placed]] | None

    @property
    def id(self) -> SnapshotId:
        return self.record.id

    @property
    def rank(self) -> int:
        return self.record.rank

    @property
    def layout(self) -> str:
        """Digest of the layout: equal to `Described.digest` of an equal one."""
        return self.record.layout[2]

    def read(self, out: Bytes, at: int) -> bool:
        """Fill `out` from byte `at` of the slot; False if the file ends before."""
        view = out.data
        at += self.start
        while view:
            count = os.preadv(self.fd, [view], at)
            if not count:
                return False
            view, at = view[count:], at + count
        return True


@dataclass(frozen=True, slots=True)
class _Straight:
    """Bytes of a chunk that follow each other in a slot too."""

    slot: HeldSlot
    start: int
    nbytes: int
    at: int

    def read(self, out: Bytes) -> bool:
        return self.slot.read(out[self.at : self.at + self.nbytes], self.start)


@dataclass(frozen=True, slots=True)
class _Gathered:
    """A span put together from boxes that lie otherwise: each is a run of a slot, and how it goes into the span's."""

    span: Span
    nbytes: int
    runs: tuple[tuple[HeldSlot, int, int, Copy], ...]

    def read(self, out: Bytes) -> bool:
        box = np.empty(self.nbytes, np.uint8)
        for slot, start, nbytes, copy in self.runs:
            piece = np.empty(nbytes, np.uint8)
            if not slot.read(piece, start):
                return False
            carry_out(copy, piece, box)
        span = self.span
        out[span.at : span.at + span.stop - span.start] = box[span.start : span.stop]
        return True


@dataclass(frozen=True, slots=True)
class HeldChunk:
    """Where a chunk lies. It was there when it was found; `read` makes sure of the bytes it gives."""

    chunk: StoredChunk
    pieces: tuple[_Straight | _Gathered, ...]

    @property
    def slots(self) -> tuple[HeldSlot, ...]:
        """The slots its bytes lie in; mostly one."""
        found: dict[HeldSlot, None] = {}
        for piece in self.pieces:
            match piece:
                case _Straight(slot=slot):
                    found[slot] = None
                case _Gathered(runs=runs):
                    found.update((run[0], None) for run in runs)
        return tuple(found)

    @property
    def slot(self) -> HeldSlot:
        """The slot in which the first of its bytes lies."""
        return self.slots[0]

    @property
    def start(self) -> int | None:
        """Byte of `slot` from which the chunk lies in one run; None if it does not."""
        match self.pieces:
            case (_Straight(start=start),):
                return start
            case _:
                return None

    def read(self, out: Bytes) -> bool:
        """Copy the chunk into `out` (its ``nbytes`` bytes) and check what was copied. False if it is not the chunk:
        what is in `out` then is nothing."""
        whole = all(piece.read(out) for piece in self.pieces)
        return whole and chunk_digest(self.chunk.dtype, out) == self.chunk.digest


def cover(chunk: StoredChunk, slots: Sequence[HeldSlot]) -> tuple[_Straight | _Gathered, ...] | None:
    """How these slots give all bytes of a chunk; None if they do not have them."""
    pieces: list[_Straight | _Gathered] = []
    at = 0
    for span in chunk.spans:
        piece = _cover_span(span, chunk.dtype, slots)
        if piece is None or span.at != at:
            return None
        at += span.stop - span.start
        last = pieces[-1] if pieces else None
        if (
            isinstance(piece, _Straight)
            and isinstance(last, _Straight)
            and last.slot is piece.slot
            and last.start + last.nbytes == piece.start
        ):
            # The small leaves of a bundle lie side by side here as there: one read, not a thousand.
            pieces[-1] = _Straight(last.slot, last.start, last.nbytes + piece.nbytes, last.at)
        else:
            pieces.append(piece)
    return tuple(pieces) if at == chunk.nbytes and pieces else None


def _cover_span(span: Span, dtype: str, slots: Sequence[HeldSlot]) -> _Straight | _Gathered | None:
    size = DTYPES[dtype].size
    meeting: list[tuple[HeldSlot, Placed]] = []
    for slot in slots:
        assert slot.places is not None, "slots that say nothing are left out"
        for placed in slot.places.get(span.leaf, ()):
            held = placed.shard
            if held.leaf.dtype != dtype or held.per_rank != (span.rank is not None):
                continue
            if (held.per_rank and slot.rank != span.rank) or len(held.box.offsets) != len(span.box.offsets):
                continue
            copy = copies(held.box, span.box, size)
            if copy is None:
                continue
            if isinstance(copy, Run) and copy.stop - copy.start == span.box.numel * size:
                start = placed.start + copy.start + span.start
                return _Straight(slot, start, span.stop - span.start, span.at)
            meeting.append((slot, placed))
    runs: dict[Box, tuple[HeldSlot, int, int, Copy]] = {}
    for slot, placed in meeting:
        held_box = placed.shard.box
        common = held_box.intersect(span.box)
        assert common is not None, "only boxes that meet are here"
        hull = _hull(common, held_box)
        into, out = copies(held_box, hull, size), copies(hull, span.box, size)
        assert isinstance(into, Run) and out is not None, "a hull is one run of its box"
        if into.stop - into.start <= MAX_HULL:
            runs.setdefault(common, (slot, placed.start + into.start, into.stop - into.start, out))
    if not runs or uncovered(span.box.lengths, [box.relative_to(span.box) for box in runs]) is not None:
        return None
    return _Gathered(span, span.box.numel * size, tuple(runs.values()))


def _hull(common: Box, held: Box) -> Box:
    """The smallest box that holds `common` and is one run of the row-major bytes of `held`."""
    offsets, lengths = list(held.offsets), list(held.lengths)
    for i, (a, n) in enumerate(zip(common.offsets, common.lengths, strict=True)):
        offsets[i], lengths[i] = a, n
        if n != 1:
            break  # what follows in `held` are whole rows
    return Box(tuple(offsets), tuple(lengths))
