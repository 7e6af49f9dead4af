"""Parts: what one rank stored for one step, to bytes and back (PROTOCOL.md §2, FORMAT.md §2).

A part is a zstd frame of JSON; the snapshot that names it holds its length and xxh3-128, so a part is never trusted by
itself. Data read from a store is checked here once: types and signs by msgspec, sizes and cross references by
`read_part`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec
import zstandard
from msgspec import Meta, Raw, Struct
from msgspec.structs import fields

from ckpt.format.chunks import Blob, Chunk, Loan, OldBundle
from ckpt.format.documents import (
    FORMAT,
    Hex64,
    Hex128,
    Natural,
    RunText,
    SnapshotText,
    damaged,
    decode,
    digest128,
    snapshot_id,
)
from ckpt.format.frames import expand
from ckpt.format.key import Unopened
from ckpt.format.layout import Layout
from ckpt.format.names import PackName, RunId, SnapshotId
from ckpt.format.shards import DTYPES, MAX_CHUNK, MAX_DIMS, Box, cut_count, whole

MAX_PART = 1 << 30
"""A part that claims to decode to more bytes is damaged: nothing on a store makes us allocate without bound."""

MAX_BLOB = 2 * MAX_CHUNK + 4096
"""Bytes of the longest blob that is read: far more than any kind makes of the largest chunk."""


# --- parts -------------------------------------------------------------------------------------------------------


class BlobRow(Struct, frozen=True, array_like=True, gc=False):
    """A blob in a part: `pack` is an index into the part's own pack list."""

    pack: Natural
    start: Natural
    stop: Natural
    kind: Natural
    digest: Hex64


class ChunkRow(Struct, frozen=True, array_like=True, omit_defaults=True, gc=False):
    digest: Hex128
    blobs: tuple[BlobRow, ...]
    of: tuple[tuple[Natural, ...], tuple[Natural, ...]] | None = None


class BundleRow(Struct, frozen=True, omit_defaults=True, gc=False):
    """Small leaves of one class and dtype, `length` elements in all, cut like a vector. `kept`: none where the part's
    shards fill it; else for each chunk the digest of those of its bytes that are theirs (`OldBundle`)."""

    cls: str
    dtype: str
    length: Natural
    chunks: tuple[ChunkRow, ...]
    kept: tuple[Hex128, ...] = ()


class ShardRow(Struct, frozen=True, omit_defaults=True, gc=False):
    """A shard: the box of a leaf this rank stored. `bundle` is (bundle number, first element) for a small leaf, whose
    bytes are the bundle's; else `chunks` are the grid's cells cut to the box, in order."""

    leaf: str
    cls: str
    dtype: str
    shape: tuple[Natural, ...]
    box: tuple[tuple[Natural, ...], tuple[Natural, ...]]
    per_rank: bool = False
    bundle: tuple[Natural, Natural] | None = None
    chunks: tuple[ChunkRow, ...] = ()

    @property
    def as_box(self) -> Box:
        return Box(*self.box)

    @property
    def nbytes(self) -> int:
        return self.as_box.numel * DTYPES[self.dtype].size


Durable: TypeAlias = tuple[Natural, float]
"""How long an earlier save of the run took from its call to the commit that rank 0 saw: (its step, seconds). A save
cannot tell this of itself, as its own documents are written before; the next one does. What it does tell of itself is
how long it `blocked` the training thread, in seconds. Both are None but on rank 0, and where nobody measured."""


class Part(Struct, frozen=True, omit_defaults=True):
    """What one rank stored for one step. `values`: top-level state name → tagged JSON (values.py). `replicas`:
    ``"<leaf> <box>"`` → checksum. `stored`: bytes of blobs this save put on the store, by codec kind number. `metrics`
    and `time` (POSIX seconds) are null but on rank 0. `others`: the ranks whose
    parts hold something that this rank held too (replicas are stored once). `blocked` and `durable`: see `Durable`.
    `without`: names of optimizers that were taken out since, on all ranks: the snapshot is weights only.
    `cadence`: seconds between saves that rank 0 aimed at; None where it counts steps.
    """

    format: Natural
    run: RunText
    step: Natural
    world_size: Annotated[int, Meta(ge=1)]
    rank: Natural
    revision: Natural
    ownership: Hex128
    reference: SnapshotText | None
    chunk: Annotated[int, Meta(ge=1)]
    time: float | None
    metrics: dict[str, Any] | None
    stored: dict[str, Natural]
    packs: tuple[tuple[str, Natural], ...]
    bundles: tuple[BundleRow, ...]
    shards: tuple[ShardRow, ...]
    values: dict[str, Raw]
    aliases: dict[str, str]
    replicas: dict[str, str]
    others: tuple[Natural, ...] = ()
    blocked: float | None = None
    durable: Durable | None = None
    without: tuple[str, ...] = ()
    cadence: float | None = None

    @property
    def id(self) -> SnapshotId:
        return snapshot_id(self.run, self.step)

    def blob(self, row: BlobRow) -> Blob:
        return Blob(self.packs[row.pack][0], row.start, row.stop, row.kind, row.digest)

    def chunks(self, row: ShardRow | BundleRow) -> tuple[Chunk, ...]:
        """The chunks of a row with pack keys put in."""
        return tuple(
            Chunk(c.digest, tuple(self.blob(b) for b in c.blobs), None if c.of is None else Box(*c.of))
            for c in row.chunks
        )

    @property
    def size(self) -> int:
        """Bytes of all shards, raw."""
        return sum(row.nbytes for row in self.shards)


class PartRef(Struct, frozen=True, array_like=True):
    """How a snapshot names a part: its key, length and digest of its stored bytes."""

    key: str
    length: Natural
    digest: Hex128


class PartHead(Struct, frozen=True):
    """What a part says besides its chunks: the fields of `Part` that the writer passes in."""

    run: RunId
    step: int
    world_size: int
    rank: int
    ownership: str
    reference: SnapshotId | None
    time: float | None
    metrics: dict[str, Any] | None
    stored: dict[int, int]
    aliases: Mapping[str, str]
    replicas: Mapping[str, str]
    values: Mapping[str, bytes]
    revision: int = 0
    others: tuple[int, ...] = ()
    blocked: float | None = None
    durable: Durable | None = None
    cadence: float | None = None


_NO_LOANS: Mapping[int, Loan] = MappingProxyType({})


def _hold() -> None:
    """No background thread, no need to give way."""


def write_part(
    head: PartHead,
    layout: Layout,
    table: Sequence[Chunk],
    pack_sizes: Mapping[str, int],
    breathe: Callable[[], None],
    loans: Mapping[int, Loan] = _NO_LOANS,
) -> bytes:
    """The stored bytes of a part. `table` runs parallel to ``layout.pieces``; `pack_sizes`: key → length in bytes;
    `loans`: number of a bundle in the layout → where its members lie instead.

    Encoded row by row; `breathe` is called after each, so that a caller on a background thread can give way to the
    training thread (PYTORCH.md §5). Equal arguments give equal bytes.
    """
    named: set[str] = set()
    for chunk in table:
        named.update(b.pack for b in chunk.blobs)
        breathe()
    for loan in loans.values():
        named |= loan.packs
        breathe()
    keys = sorted(named)
    packs = {key: i for i, key in enumerate(keys)}

    def rows(chunks: Sequence[Chunk]) -> tuple[ChunkRow, ...]:
        made: list[ChunkRow] = []
        for c in chunks:
            blobs = tuple(BlobRow(packs[b.pack], b.start, b.stop, b.kind, b.digest) for b in c.blobs)
            made.append(ChunkRow(c.digest, blobs, None if c.of is None else (c.of.offsets, c.of.lengths)))
            breathe()
        return tuple(made)

    fixed: dict[str, Any] = {
        "aliases": dict(head.aliases),
        "chunk": layout.chunk,
        "format": FORMAT,
        "metrics": head.metrics,
        "others": head.others,
        "ownership": head.ownership,
        "packs": [(key, pack_sizes[key]) for key in keys],
        "rank": head.rank,
        "reference": None if head.reference is None else str(head.reference),
        "replicas": dict(head.replicas),
        "revision": head.revision,
        "run": str(head.run),
        "step": head.step,
        "stored": {str(k): v for k, v in head.stored.items()},
        "time": head.time,
        "values": {name: Raw(text) for name, text in head.values.items()},
        "world_size": head.world_size,
    }
    fixed |= {name: told for name in ("blocked", "durable", "cadence") if (told := getattr(head, name)) is not None}
    starts: list[int] = []  # number of the bundle in the layout → of the first row for it

    def bundles() -> Iterator[BundleRow]:
        listed = 0
        for i, bundle in enumerate(layout.bundles):
            starts.append(listed)
            own = OldBundle(bundle.length, tuple(table[bundle.piece : bundle.piece_stop]), ())
            for old in loans[i].bundles if i in loans else (own,):
                yield BundleRow(bundle.cls, bundle.dtype, old.length, rows(old.chunks), old.kept)
                listed += 1

    def shards() -> Iterator[ShardRow]:
        lent = {i: iter(loan.places) for i, loan in loans.items()}
        for region in layout.regions:
            leaf, box, place = region.shard.leaf, region.shard.box, None
            if region.bundle is not None:
                number, first = next(lent[region.bundle]) if region.bundle in lent else (0, region.first)
                place = starts[region.bundle] + number, first
            yield ShardRow(
                leaf.path,
                leaf.cls,
                leaf.dtype,
                leaf.shape,
                (box.offsets, box.lengths),
                region.shard.per_rank,
                place,
                rows(table[region.piece : region.piece_stop]),
            )

    return _encoded(fixed, bundles(), shards(), breathe)


def encode_part(part: Part, breathe: Callable[[], None] = _hold) -> bytes:
    """The stored bytes of a part that is at hand whole: one that was read, say, and got other chunks. `breathe`: as for
    `write_part`."""
    told = {f.name: getattr(part, f.name) for f in fields(Part) if getattr(part, f.name) != f.default}
    bundles, shards = told.pop("bundles"), told.pop("shards")
    return _encoded(told, bundles, shards, breathe)


def _encoded(
    fixed: Mapping[str, Any], bundles: Iterable[BundleRow], shards: Iterable[ShardRow], breathe: Callable[[], None]
) -> bytes:
    encode = msgspec.json.Encoder(order="sorted").encode
    out = [encode(fixed)[:-1]]
    breathe()
    for name, rows in ((b"bundles", bundles), (b"shards", shards)):
        out.append(b',"' + name + b'":[')
        for i, row in enumerate(rows):
            out.append((b",\n" if i else b"\n") + encode(row))
            breathe()
        out.append(b"]")
    out.append(b"}")
    return zstandard.ZstdCompressor(level=3, write_checksum=True).compress(b"".join(out))


class _Outline(Part, frozen=True):
    """A part whose rows are not decoded yet."""

    bundles: tuple[Raw, ...]  # type: ignore[assignment]
    shards: tuple[Raw, ...]  # type: ignore[assignment]


def read_part(data: bytes, *, key: str, name: PartRef | None = None, breathe: Callable[[], None] = _hold) -> Part:
    """Decode a part and check it as far as one part can be checked.

    Args:
        data: the stored bytes.
        key: the object, for messages.
        name: what the snapshot says of it; length and digest are compared first. None only where no snapshot exists
            yet (the committer), or for salvage.
        breathe: called between rows, for callers on a background thread; that is why rows are decoded one by one.

    Raises:
        DamagedError: bytes, fields or cross references are wrong.
        FormatTooNew: a later version of this library wrote it.
    """
    if isinstance(data, Unopened):
        raise damaged(key, data.expected, data.found)
    if name is not None:
        if len(data) != name.length:
            raise damaged(key, f"{name.length} bytes", f"{len(data)} bytes")
        if (found := digest128(data)) != name.digest:
            raise damaged(key, f"digest {name.digest}", f"digest {found}")
    try:
        text = expand(data, MAX_PART)
    except ValueError as error:
        raise damaged(key, "one zstd frame of JSON", str(error)) from error
    outline = decode(text, _Outline, key)
    breathe()
    told = {field: getattr(outline, field) for field in Part.__struct_fields__}
    told["bundles"] = _rows(outline.bundles, BundleRow, key, breathe)
    told["shards"] = _rows(outline.shards, ShardRow, key, breathe)
    part = Part(**told)
    for problem in _part_problems(part, breathe):
        raise damaged(key, "a consistent part", problem, step=part.step, rank=part.rank)
    return part


T = TypeVar("T")


def _rows(raw: Sequence[Raw], kind: type[T], key: str, breathe: Callable[[], None]) -> tuple[T, ...]:
    read = msgspec.json.Decoder(kind).decode
    rows: list[T] = []
    for number, row in enumerate(raw):
        try:
            rows.append(read(row))
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise damaged(key, f"a {kind.__name__} as row {number}", str(error)) from error
        breathe()
    return tuple(rows)


def _part_problems(part: Part, breathe: Callable[[], None]) -> Iterator[str]:
    if part.rank >= part.world_size:
        yield f"rank {part.rank} of world size {part.world_size}"
    if part.chunk > MAX_CHUNK:
        yield f"chunks of {part.chunk} bytes, and none has more than {MAX_CHUNK}"
    for key, _ in part.packs:
        if PackName.parse(key) is None:
            yield f"a pack named {key[:80]!r}, which is no name of one"
    if beyond := [rank for rank in part.others if rank >= part.world_size]:
        yield f"rank {beyond[0]} among the others of a world of {part.world_size}"

    def chunk_problems(what: str, dtype: str, chunks: Sequence[ChunkRow], expected: int) -> Iterator[str]:
        if len(chunks) != expected:
            yield f"{what}: {len(chunks)} chunks where its box has {expected}"
        for c in chunks:
            if not c.blobs:
                yield f"{what}: a chunk without blobs"
            if c.of is not None and (len(c.of[0]) != len(c.of[1]) or Box(*c.of).empty):
                yield f"{what}: blobs that decode to {c.of}, which is no box"
            elif c.of is not None and Box(*c.of).numel * DTYPES[dtype].size > MAX_CHUNK:
                yield f"{what}: blobs that decode to {c.of}, more than {MAX_CHUNK} bytes"
            for b in c.blobs:
                if b.stop - b.start > MAX_BLOB:
                    yield f"{what}: a blob of {b.stop - b.start} bytes"
                if b.pack >= len(part.packs) or not b.start < b.stop <= part.packs[b.pack][1]:
                    yield f"{what}: blob {b.start}:{b.stop} of pack number {b.pack} does not exist"

    for bundle in part.bundles:
        what = f"bundle ({bundle.cls}, {bundle.dtype})"
        if bundle.dtype not in DTYPES:
            yield f"{what}: unknown dtype"
            continue
        shape = (bundle.length,)
        count = cut_count(shape, whole(shape), DTYPES[bundle.dtype].size, part.chunk)
        yield from chunk_problems(what, bundle.dtype, bundle.chunks, count)
        if len(bundle.kept) not in (0, count):
            yield f"{what}: digests of what is kept of {len(bundle.kept)} chunks, where it has {count}"
    for row in part.shards:
        if row.dtype not in DTYPES:
            yield f"{row.leaf}: unknown dtype {row.dtype}"
            continue
        if len(row.shape) > MAX_DIMS:
            yield f"{row.leaf}: {len(row.shape)} dimensions, and no tensor has more than {MAX_DIMS}"
            continue
        box = row.as_box
        if not box.within(row.shape):
            yield f"{row.leaf}: box {row.box} outside shape {row.shape}"
            continue
        if row.bundle is not None:
            number, first = row.bundle
            if number >= len(part.bundles) or part.bundles[number].dtype != row.dtype:
                yield f"{row.leaf}: bundle {number} does not exist"
            elif first + box.numel > part.bundles[number].length:
                yield f"{row.leaf}: elements {first}:{first + box.numel} outside bundle {number}"
            if row.chunks:
                yield f"{row.leaf}: both bundled and with chunks"
        else:
            count = cut_count(row.shape, box, DTYPES[row.dtype].size, part.chunk)
            yield from chunk_problems(row.leaf, row.dtype, row.chunks, count)
        breathe()
