"""What changed since the reference, and the blob of one chunk that did.

`compare` runs on the writer's thread and only digests (several GB/s); `encode` runs on the encode workers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ckpt.format.codec import Codec
from ckpt.format.layout import Layout, Piece
from ckpt.format.loans import same_members
from ckpt.format.manifest import Blob, Chunk, Loan, chunk_digest, digest64
from ckpt.format.probe import Learned
from ckpt.format.shards import DTYPES
from ckpt.saving.job import Bytes, Reference, SaveJob
from ckpt.saving.packing import Parcel
from ckpt.saving.policy import Rule, first_scale

Breathe: TypeAlias = Callable[[], None]


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """The reference, and what the policy remembers beside it: ``young[i]`` is 1 until the first chain of piece `i` has
    ended. Unknown after a restart, and then taken for 1: a chain too short costs one keyframe, while all chains ending
    together cost a full save every time. `moved`: packs that the reference's save made of blobs older than itself."""

    reference: Reference
    young: bytearray
    moved: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Same:
    """The piece has the bytes it had in the reference, there as number `old`."""

    index: int
    old: int


@dataclass(frozen=True, slots=True)
class Known:
    """Equal bytes are stored already, in a chunk of another piece of the reference."""

    index: int
    chunk: Chunk


@dataclass(frozen=True, slots=True)
class Twin:
    """Equal to the piece `of`, earlier in this save, whose bytes are new."""

    index: int
    of: int


@dataclass(frozen=True, slots=True)
class Changed:
    """New bytes; `old` is the number of the piece in the reference, None where it has none."""

    index: int
    digest: str
    old: int | None


Verdict: TypeAlias = Same | Known | Twin | Changed


def match(old: Layout, new: Layout, breathe: Breathe) -> Sequence[int | None]:
    """For each piece of `new`, the number of the piece of `old` that covers the same box of the same leaf.

    Bundles match by position: their bytes are a base like any other, whatever leaves they are made of.
    """
    if old is new:
        return range(len(new.pieces))
    numbers = {}
    for number, piece in enumerate(old.pieces):
        numbers[_key(piece)] = number
        breathe()
    matches: list[int | None] = []
    for piece in new.pieces:
        matches.append(numbers.get(_key(piece)))
        breathe()
    return matches


def _key(piece: Piece) -> tuple[object, ...]:
    return piece.name, piece.cls, piece.dtype, piece.box.offsets, piece.box.lengths


def standing(job: SaveJob, held: Held | None, breathe: Breathe) -> dict[int, Loan]:
    """The loans of the reference that go on, by the number of the bundle: not one byte of its members has changed."""
    if held is None or not held.reference.loans:
        return {}
    old = {_key(piece): chunk.digest for piece, chunk in _lent(held.reference)}
    loans = same_members(job.layout, held.reference.loans.values())
    for number in list(loans):
        bundle = job.layout.bundles[number]
        for piece in job.layout.pieces[bundle.piece : bundle.piece_stop]:
            breathe()
            if old.get(_key(piece)) != chunk_digest(piece.dtype, job.data[piece.start : piece.stop]):
                del loans[number]
                break
    return loans


def _lent(reference: Reference) -> Iterator[tuple[Piece, Chunk]]:
    """The pieces of bundles that are lent."""
    return ((p, c) for p, c in zip(reference.layout.pieces, reference.table, strict=True) if not c.blobs)


def compare(job: SaveJob, held: Held | None, breathe: Breathe, loans: Collection[int] = ()) -> Iterator[Verdict]:
    """One verdict per piece, in order. Equal bytes are found wherever they lie in the state: ties, zeros, leaves that
    moved into another bundle. `loans`: the bundles that `standing` told; of others that were lent all is new."""
    matches: Sequence[int | None] = ()
    table: Sequence[Chunk] = ()
    if held is not None:
        table = held.reference.table
        matches = match(held.reference.layout, job.layout, breathe)
    lent = {n for number in loans for n in range(*_pieces_of(job.layout, number))}
    elsewhere: dict[str, Chunk] | None = None
    fresh: dict[str, int] = {}
    for index, piece in enumerate(job.layout.pieces):
        breathe()
        digest = chunk_digest(piece.dtype, job.data[piece.start : piece.stop])
        old = matches[index] if matches else None
        if old is not None and not table[old].blobs and index not in lent:
            old = None
        if old is not None and table[old].digest == digest:
            yield Same(index, old)
            continue
        if (twin := fresh.get(digest)) is not None:
            yield Twin(index, twin)
            continue
        if elsewhere is None:
            elsewhere = _by_digest(table, breathe)
        if (known := elsewhere.get(digest)) is not None:
            yield Known(index, known)
            continue
        fresh[digest] = index
        yield Changed(index, digest, old)


def _pieces_of(layout: Layout, number: int) -> tuple[int, int]:
    return layout.bundles[number].piece, layout.bundles[number].piece_stop


def _by_digest(table: Sequence[Chunk], breathe: Breathe) -> dict[str, Chunk]:
    # A clipped chunk (with `of`) holds its piece only together with that piece's own box: nobody else may use it.
    found = {}
    for chunk in table:
        if chunk.of is None and chunk.blobs:
            found[chunk.digest] = chunk
        breathe()
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """One chunk to encode. `base` are its bytes in the reference and `chain` the blobs that rebuild them (of digest
    `base_digest`); no base: `chain` only tells how long the last keyframe lived. `young`: see `Held`."""

    index: int
    piece: Piece
    digest: str
    new: Bytes
    base: Bytes | None
    base_digest: str
    chain: tuple[Blob, ...]
    young: bool


def task_of(job: SaveJob, index: int, digest: str, held: Held | None, old: int | None, *, keyframe: bool) -> Task:
    """What to encode for piece `index`. `keyframe`: without a base, whatever it may save."""
    piece = job.layout.pieces[index]
    new = job.data[piece.start : piece.stop]
    if held is None or old is None:
        return Task(index, piece, digest, new, None, "", (), True)
    chunk = held.reference.table[old]
    place = held.reference.layout.pieces[old]
    if chunk.of is not None:  # clipped by a change of layout: it begins anew on its own grid, and so do all others
        return Task(index, piece, digest, new, None, chunk.digest, chunk.blobs[:1], True)
    base = None if keyframe else held.reference.data[place.start : place.stop]
    return Task(index, piece, digest, new, base, chunk.digest, chunk.blobs, bool(held.young[old]))


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """The blob of a task. `based`: it is a delta, and needs the task's chain. `young`: see `Held`. `stale`: the
    reference's bytes were not those its table speaks of, so they were not used."""

    task: Task
    blob: bytes
    kind: int
    digest: str
    based: bool
    young: bool
    stale: bool

    @property
    def parcel(self) -> Parcel:
        """It, to be packed."""
        base = self.task.base_digest if self.based else None
        return Parcel(
            self.task.index, self.blob, self.kind, self.digest, self.task.digest, self.task.piece.dtype, base
        )  # fmt: skip

    @property
    def below(self) -> tuple[Blob, ...]:
        """The blobs this one needs, base first."""
        return self.task.chain if self.based else ()


def encode(codec: Codec, learned: Learned, rule: Rule, task: Task) -> Encoded:
    """A delta where it is admitted and pays, else a keyframe."""
    piece, dtype = task.piece, DTYPES[task.piece.dtype]
    base, stale, blocked = task.base, False, False
    bound = rule.scaled(first_scale(piece.name, piece.index)) if task.young else rule
    if base is not None and not rule.admits(task.chain, 1, task.chain[0].size):
        base = None  # whatever the delta: no time is spent on a look at it
    choice = learned.choose(task.new, base, dtype, piece.cls, most=rule.most(task.chain))
    if base is not None and choice.delta_kind is not None and choice.delta_size < choice.keyframe_size:
        if not bound.admits(task.chain, choice.delta_size, choice.keyframe_size):
            blocked = rule.admits(task.chain, choice.delta_size, choice.keyframe_size)
        elif chunk_digest(piece.dtype, base) != task.base_digest:
            # A base that is not what the store rebuilds would ruin this chunk and all after it. To look costs a
            # twentieth of encoding, and finds a flipped bit in memory as well as a mirror of another time.
            stale = True
        else:
            blob = codec.encode(choice.delta_kind, task.new, base, dtype)
            learned.learn(piece.cls, dtype, choice.delta_kind, len(task.new), len(blob))
            if len(blob) < choice.keyframe_size and bound.admits(task.chain, len(blob), choice.keyframe_size):
                return Encoded(task, blob, choice.delta_kind, digest64(blob), True, task.young, False)
            blocked = rule.admits(task.chain, len(blob), choice.keyframe_size)
    blob = codec.encode(choice.keyframe_kind, task.new, None, dtype)
    learned.learn(piece.cls, dtype, choice.keyframe_kind, len(task.new), len(blob))
    # A chunk that never had a delta is as young as before: when its deltas begin to pay, for all chunks of a leaf at
    # once perhaps (the learning rate fell), their keyframes must still be spread.
    young = task.young and len(task.chain) <= 1 and not blocked
    return Encoded(task, blob, choice.keyframe_kind, digest64(blob), False, young, stale)
