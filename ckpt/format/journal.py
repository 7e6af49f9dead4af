"""Records of what each step between two snapshots consumed and changed, and segments of them (FORMAT.md §8).

A record takes one rank from the state after step `previous` to the state after `step`, bit by bit:

    events    what each call of an optimizer consumed, in order: gradients, and the groups' options where they changed
    tensors   the new bytes of every other tensor that changed (buffers, averages)
    values    the new tagged JSON of every plain value that changed (schedules, random states, data position)
    sums      a checksum of every tensor of the state after the step: what a replay must arrive at

Records lean on nothing but the one before, and the first after a snapshot (it has `rows`) on that snapshot alone. The
bytes of tensors are laid one after the other, row-major, by dtype, and cut every `CHUNK` bytes: chunks of one dtype
need no boxes, and a thousand small gradients make one.

    record    u32 length of the head · head (a zstd frame of JSON) · sums · blobs · XXH3-128 of all before
    segment   magic · for each record: u64 length, record · XXH3-128 of all before
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated

import msgspec
import numpy as np
import xxhash
import zstandard
from msgspec import Meta, Raw, Struct
from numpy.typing import NDArray

from ckpt.format.codec import Codec
from ckpt.format.documents import FORMAT, Natural, RunText, SnapshotText, damaged, decode, snapshot_id
from ckpt.format.kinds import KINDS, NEEDS_BASE
from ckpt.format.names import SnapshotId
from ckpt.format.probe import Learned
from ckpt.format.shards import DEFAULT_CHUNK, DTYPES, Box, Leaf, Shard
from storage_backends.base import Buffer

Bytes = NDArray[np.uint8]

MAGIC = b"ckptjrn1"
CHUNK = DEFAULT_CHUNK
SUM = 17
"""Bytes of one checksum: which one it is (`HOST` or `DEVICE`), then 16 bytes."""

HOST, DEVICE = 0, 1
"""`HOST`: the chunk digest (FORMAT.md §3) of the tensor's bytes. `DEVICE`: two wrapping sums (ckpt/checksums.py)."""

MAX_HEAD = 256 << 20
_SEAL = 16


class Row(Struct, frozen=True, array_like=True, gc=False):
    """One shard of the rank's table."""

    leaf: str
    cls: str
    dtype: str
    shape: tuple[Natural, ...]
    offsets: tuple[Natural, ...]
    lengths: tuple[Natural, ...]
    per_rank: bool

    @classmethod
    def of(cls, shard: Shard) -> Row:
        leaf = shard.leaf
        return cls(leaf.path, leaf.cls, leaf.dtype, leaf.shape, shard.box.offsets, shard.box.lengths, shard.per_rank)

    @property
    def shard(self) -> Shard:
        leaf = Leaf(self.leaf, self.cls, self.dtype, self.shape)
        return Shard(leaf, Box(self.offsets, self.lengths), self.per_rank)


class Coded(Struct, frozen=True, array_like=True):
    """Bytes of some tensors of one dtype, one after the other. `members`: rows of the table; `chunks`: (kind, stored
    bytes) of every `CHUNK` bytes. A chunk of a kind that needs a base leans on the same tensors before the step."""

    dtype: str
    members: tuple[Natural, ...]
    chunks: tuple[tuple[Natural, Natural], ...]


class Group(Struct, frozen=True, array_like=True):
    """One parameter group as it was when the step was taken: rows of its parameters, and its options (tagged JSON)."""

    params: tuple[Natural, ...]
    options: Raw


class Event(Struct, frozen=True):
    """One call of an optimizer. `optimizer`: its name in the state; `kind`: its class in torch.optim. `groups`: null
    where they are as at its event before. `scale`: what a fused optimizer was told by a GradScaler, (scale, found inf)
    as float32 values, or null. Parameters without a gradient are in no `gradients`."""

    optimizer: str
    kind: str
    groups: tuple[Group, ...] | None
    gradients: tuple[Coded, ...]
    scale: tuple[float, float] | None = None


class Record(Struct, frozen=True):
    """The head of a record. `extends`: the newest snapshot that its rank had captured. `rows`, `aliases`: the table
    after the step, null where it is as in the record before. `threads`: of torch, which split what fused kernels do."""

    format: Natural
    run: RunText
    step: Natural
    previous: Natural
    rank: Natural
    world_size: Annotated[int, Meta(ge=1)]
    extends: SnapshotText
    count: Natural
    threads: Annotated[int, Meta(ge=1)]
    rows: tuple[Row, ...] | None
    aliases: dict[str, str] | None
    events: tuple[Event, ...]
    tensors: tuple[Coded, ...]
    values: dict[str, Raw]
    gone: tuple[str, ...]

    @property
    def id(self) -> SnapshotId:
        """The state after the step, named like a snapshot."""
        return snapshot_id(self.run, self.step)


class OpenRecord(Struct, frozen=True):
    """A record whose bytes were checked. `blobs`: all of them, events first, in order."""

    head: Record
    sums: bytes
    blobs: tuple[memoryview, ...]


# --- runs of bytes -------------------------------------------------------------------------------------------------


def encode_run(
    codec: Codec,
    learned: Learned,
    cls: str,
    dtype: str,
    data: Bytes,
    base: Bytes | None,
    breathe: Callable[[], None],
) -> tuple[tuple[tuple[int, int], ...], list[bytes]]:
    """Chunks of one `Coded` and their blobs. `base`: the bytes of the same tensors before, or None."""
    kind_of = DTYPES[dtype]
    rows: list[tuple[int, int]] = []
    blobs: list[bytes] = []
    for start in range(0, len(data), CHUNK):
        new = data[start : start + CHUNK]
        old = None if base is None else base[start : start + CHUNK]
        choice = learned.choose(new, old, kind_of, cls)
        kind = choice.keyframe_kind
        if choice.delta_kind is not None and choice.delta_size < choice.keyframe_size:
            kind = choice.delta_kind
        blob = codec.encode(kind, new, old if kind in NEEDS_BASE else None, kind_of)
        learned.learn(cls, kind_of, kind, len(new), len(blob))
        rows.append((kind, len(blob)))
        blobs.append(blob)
        breathe()
    return tuple(rows), blobs


def decode_run(codec: Codec, coded: Coded, blobs: Sequence[memoryview], base: Bytes | None, out: Bytes) -> None:
    """Fill `out` with the bytes of a `Coded`. Raises ValueError if the blobs are not of it."""
    dtype = DTYPES[coded.dtype]
    if len(coded.chunks) != -(-len(out) // CHUNK) or len(blobs) != len(coded.chunks):
        raise ValueError(f"{len(coded.chunks)} chunks for {len(out)} bytes")
    for n, ((kind, _), blob) in enumerate(zip(coded.chunks, blobs, strict=True)):
        part = slice(n * CHUNK, n * CHUNK + CHUNK)
        if kind not in KINDS:
            raise ValueError(f"codec kind {kind} is not one of {KINDS}")
        old = None if base is None or kind not in NEEDS_BASE else base[part]
        codec.decode(kind, blob, old, out[part], dtype)


# --- records and segments ------------------------------------------------------------------------------------------


def write_record(head: Record, sums: bytes, blobs: Sequence[bytes]) -> bytes:
    """The bytes of a record. Equal arguments give equal bytes."""
    text = zstandard.ZstdCompressor(level=1).compress(msgspec.json.Encoder(order="sorted").encode(head))
    data = b"".join([len(text).to_bytes(4, "little"), text, sums, *blobs])
    return data + xxhash.xxh3_128_digest(data)


def read_record(data: Buffer, key: str) -> OpenRecord:
    """Check and open a record.

    Raises:
        DamagedError: cut, changed, or not such a record.
        FormatTooNew: a later version wrote it.
    """
    view = _unsealed(data, key, "a record")
    length = int.from_bytes(view[:4], "little")
    if 4 + length > len(view):
        raise damaged(key, f"a head of {length} bytes", f"{len(view)} bytes in all")
    head = decode(_expand(view[4 : 4 + length], key), Record, key)
    for problem in _problems(head):
        raise damaged(key, "a consistent record", problem, step=head.step, rank=head.rank)
    at = 4 + length + SUM * head.count
    sums = bytes(view[4 + length : at])
    blobs: list[memoryview] = []
    for coded in runs(head):
        for _, size in coded.chunks:
            blobs.append(view[at : at + size])
            at += size
    if at != len(view):
        raise damaged(key, f"{at} bytes", f"{len(view)} bytes", step=head.step, rank=head.rank)
    return OpenRecord(head, sums, tuple(blobs))


def runs(head: Record) -> Iterator[Coded]:
    """Every run of bytes of a record, in the order of its blobs."""
    for event in head.events:
        yield from event.gradients
    yield from head.tensors


def write_segment(records: Sequence[bytes]) -> bytes:
    """The bytes of a segment, of records in order."""
    pieces = [MAGIC]
    for record in records:
        pieces += [len(record).to_bytes(8, "little"), record]
    data = b"".join(pieces)
    return data + xxhash.xxh3_128_digest(data)


def read_segment(data: Buffer, key: str) -> list[memoryview]:
    """The records of a segment, unopened.

    Raises DamagedError: cut, changed, or not a segment.
    """
    view = _unsealed(data, key, "a segment")
    if bytes(view[: len(MAGIC)]) != MAGIC:
        raise damaged(key, f"a segment that begins with {MAGIC!r}", repr(bytes(view[: len(MAGIC)])))
    records: list[memoryview] = []
    at = len(MAGIC)
    while at < len(view):
        length = int.from_bytes(view[at : at + 8], "little")
        at += 8
        if at + length > len(view):
            raise damaged(key, f"a record of {length} bytes", f"{len(view) - at} bytes left")
        records.append(view[at : at + length])
        at += length
    return records


def _unsealed(data: Buffer, key: str, what: str) -> memoryview:
    view = memoryview(data).cast("B")
    if len(view) < _SEAL:
        raise damaged(key, what, f"{len(view)} bytes")
    body, seal = view[:-_SEAL], bytes(view[-_SEAL:])
    if (found := xxhash.xxh3_128_digest(body)) != seal:
        raise damaged(key, f"digest {seal.hex()}", f"digest {found.hex()}")
    return body


def _expand(frame: memoryview, key: str) -> bytes:
    try:
        size = zstandard.frame_content_size(frame)
        if not 0 <= size <= MAX_HEAD:
            raise damaged(key, f"at most {MAX_HEAD} bytes of JSON", f"a frame that claims {size}")
        text = zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise damaged(key, "a zstd frame", str(error)) from error
    if len(text) != size:
        raise damaged(key, f"{size} bytes of JSON", f"{len(text)} bytes")
    return text


def _problems(head: Record) -> Iterator[str]:
    if head.rank >= head.world_size:
        yield f"rank {head.rank} of world size {head.world_size}"
    if head.previous >= head.step:
        yield f"a step from {head.previous} to {head.step}"
    if head.rows is not None and len(head.rows) != head.count:
        yield f"{len(head.rows)} rows where {head.count} are counted"
    for row in head.rows or ():
        if row.dtype not in DTYPES or not Box(row.offsets, row.lengths).within(row.shape):
            yield f"{row.leaf}: {row.dtype}, box {row.offsets} {row.lengths} of shape {row.shape}"
    for coded in runs(head):
        if coded.dtype not in DTYPES or any(member >= head.count for member in coded.members):
            yield f"bytes of {coded.dtype} for rows up to {max(coded.members, default=0)} of {head.count}"
    for event in head.events:
        if any(param >= head.count for group in event.groups or () for param in group.params):
            yield f"{event.optimizer}: a parameter that is no row"


def record_head(
    *,
    id_: SnapshotId,
    previous: int,
    rank: int,
    world_size: int,
    extends: SnapshotId,
    threads: int,
    count: int,
    table: Sequence[Shard] | None,
    aliases: Mapping[str, str],
    events: Sequence[Event],
    tensors: Sequence[Coded],
    values: Mapping[str, bytes],
    gone: Sequence[str],
) -> Record:
    """A head from what a recorder has. `table` None: as in the record before."""
    return Record(
        format=FORMAT,
        run=str(id_.run),
        step=id_.step,
        previous=previous,
        rank=rank,
        world_size=world_size,
        extends=str(extends),
        count=count,
        threads=threads,
        rows=None if table is None else tuple(map(Row.of, table)),
        aliases=None if table is None else dict(aliases),
        events=tuple(events),
        tensors=tuple(tensors),
        values={name: Raw(text) for name, text in values.items()},
        gone=tuple(gone),
    )
