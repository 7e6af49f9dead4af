"""The bytes of a mirror file: four pages of records, two slots of data, the layouts that say what lies in them.

    page 0   head: what the file is; never changes
    page 1   owner: the process that writes it
    page 2   slot 0: its state word, and what it holds
    page 3   slot 1
    …        data of slot 0, data of slot 1, each from a page boundary; layouts after that

A record is sealed: its length, its xxh3-128, then JSON. A slot's state word is written last when it becomes whole, and
first when it is about to change. There is no index of which slot is the newer one: each says its own step, and a reader
is offered both.

Nothing here is believed. A record says where to look; what lies there is used only after it was compared with the
digest that the store's own documents give.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, TypeVar

import msgspec
import zstandard
from msgspec import Meta, Struct

from ckpt.format.documents import Hex128, Natural, RunText, digest128, snapshot_id
from ckpt.format.frames import expand
from ckpt.format.names import SnapshotId
from ckpt.format.shards import DTYPES, Box, Leaf, Shard
from ckpt.mirror.owners import Owner

PAGE = 4096
HEAD, OWNER = 0, PAGE
SLOT_PAGES = (2 * PAGE, 3 * PAGE)
ALIGN = max(PAGE, mmap.PAGESIZE)
DATA = -(-4 * PAGE // ALIGN) * ALIGN
"""Where the first slot's data begins."""

MAGIC = b"CKPTMIR1"
DIRTY, WHOLE = b"\0" * 8, b"WHOLE\n\r\1"
"""State words of a slot. A word cut in two is neither, and counts as dirty."""

MAX_LAYOUT = 1 << 28
MAX_LAYOUT_TEXT = 1 << 30

_SEAL = struct.Struct("<I16s")
_AT = 8 + _SEAL.size  # where the JSON begins in a page: after the word and the seal


class Head(Struct, frozen=True):
    """`store`: store_identity; `capacity`: bytes of data a slot may hold; `slots`: where their data begins."""

    store: str
    rank: Natural
    capacity: Natural
    slots: tuple[Natural, Natural]


class SlotRecord(Struct, frozen=True):
    """What a slot holds: `nbytes` bytes of one captured state. `layout`: offset, length and digest of its layout in the
    file. `time` in POSIX seconds."""

    run: RunText
    step: Natural
    rank: Natural
    world_size: Annotated[int, Meta(ge=1)]
    nbytes: Natural
    layout: tuple[Natural, Natural, Hex128]
    time: float

    @property
    def id(self) -> SnapshotId:
        return snapshot_id(self.run, self.step)


Record = TypeVar("Record", Head, Owner, SlotRecord)


def sealed(record: Head | Owner | SlotRecord) -> bytes:
    """What follows the first eight bytes of a page."""
    body = msgspec.json.encode(record)
    assert _AT + len(body) <= PAGE, f"a record of {len(body)} bytes"
    return _SEAL.pack(len(body), bytes.fromhex(digest128(body))) + body


def unsealed(page: bytes, kind: type[Record]) -> Record:
    """The record of a page.

    Raises:
        ValueError: cut, torn, or not such a record.
    """
    if len(page) < _AT:
        raise ValueError(f"a page of {len(page)} bytes")
    length, digest = _SEAL.unpack_from(page, 8)
    body = page[_AT : _AT + length]
    if len(body) != length or bytes.fromhex(digest128(body)) != digest:
        raise ValueError(f"a {kind.__name__} record that is cut or torn")
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(f"no {kind.__name__} record: {error}") from error


def read_head(fd: int) -> Head:
    """Raises ValueError (not a mirror file of this version, or damaged), OSError."""
    page = os.pread(fd, PAGE, HEAD)
    if page[:8] != MAGIC:
        raise ValueError(f"begins with {page[:8]!r}, expected {MAGIC!r}: no mirror, or another version's")
    head = unsealed(page, Head)
    for start, stop in zip(head.slots, (head.slots[1], 1 << 62), strict=True):
        if start % ALIGN or not DATA <= start <= start + head.capacity <= stop:
            raise ValueError(f"slots at {head.slots} of {head.capacity} bytes each")
    return head


def read_owner(fd: int) -> Owner | None:
    """None where it cannot be read, as while it is written."""
    try:
        return unsealed(os.pread(fd, PAGE, OWNER), Owner)
    except ValueError:
        return None


def read_slot(fd: int, number: int, head: Head) -> SlotRecord | None:
    """What a slot holds; None while it is being filled.

    Raises:
        ValueError: torn, or it holds more than the file has.
    """
    page = os.pread(fd, PAGE, SLOT_PAGES[number])
    if page[:8] != WHOLE:
        return None
    record = unsealed(page, SlotRecord)
    if record.nbytes > head.capacity:
        raise ValueError(f"{record.nbytes} bytes in a slot of {head.capacity}")
    if (stop := head.slots[number] + record.nbytes) > (size := os.fstat(fd).st_size):
        raise ValueError(f"cut: its bytes end at {stop}, the file at {size}")
    return record


def was_used(fd: int, number: int) -> bool:
    """Whether a slot ever was whole."""
    return any(os.pread(fd, _SEAL.size, SLOT_PAGES[number] + 8))


# --- layouts -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Placed:
    """A shard in a slot: row-major, from byte `start` of the slot's data."""

    shard: Shard
    start: int


@dataclass(frozen=True, slots=True)
class Described:
    """A layout as a mirror keeps it: `blob` (a zstd frame), its xxh3-128, and the bytes of data it lays out. Equal
    layouts have equal digests."""

    blob: bytes
    digest: str
    nbytes: int


class _LeafRow(Struct, frozen=True, array_like=True, gc=False):
    path: str
    cls: str
    dtype: str
    shape: tuple[Natural, ...]


class _PlaceRow(Struct, frozen=True, array_like=True, gc=False):
    leaf: Natural
    offsets: tuple[Natural, ...]
    lengths: tuple[Natural, ...]
    start: Natural
    per_rank: bool


class _LayoutDoc(Struct, frozen=True):
    nbytes: Natural
    leaves: tuple[_LeafRow, ...]
    places: tuple[_PlaceRow, ...]


def describe(places: Iterable[tuple[Shard, int]], nbytes: int) -> Described:
    """The layout of one slot, made once per layout: 20,000 shards take some 50 ms.

    Args:
        places: shard → where its bytes begin, e.g. ``((r.shard, r.start) for r in layout.regions)``.
        nbytes: of the whole slot.
    """
    numbers: dict[tuple[str, bool], int] = {}
    leaves: list[_LeafRow] = []
    rows: list[_PlaceRow] = []
    for shard, start in places:
        leaf = shard.leaf
        number = numbers.setdefault((leaf.path, shard.per_rank), len(leaves))
        if number == len(leaves):
            leaves.append(_LeafRow(leaf.path, leaf.cls, leaf.dtype, leaf.shape))
        rows.append(_PlaceRow(number, shard.box.offsets, shard.box.lengths, start, shard.per_rank))
    text = msgspec.json.encode(_LayoutDoc(nbytes, tuple(leaves), tuple(rows)))
    blob = zstandard.ZstdCompressor(level=1).compress(text)
    return Described(blob, digest128(blob), nbytes)


def read_layout(fd: int, record: SlotRecord) -> tuple[Placed, ...]:
    """What lies where in a slot.

    Raises:
        ValueError: cut, changed, or impossible.
    """
    offset, length, digest = record.layout
    size = os.fstat(fd).st_size
    if length > MAX_LAYOUT or offset + length > size:
        raise ValueError(f"a layout of {length} bytes at {offset}, in a file of {size}")
    blob = os.pread(fd, length, offset)
    if len(blob) != length or digest128(blob) != digest:
        raise ValueError(f"a layout that is not what its slot says: {len(blob)} of {length} bytes, expected {digest}")
    try:
        doc = msgspec.json.decode(expand(blob, MAX_LAYOUT_TEXT), type=_LayoutDoc)
    except (ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"no layout: {error}") from error
    if doc.nbytes != record.nbytes:
        raise ValueError(f"a layout of {doc.nbytes} bytes in a slot of {record.nbytes}")
    leaves = [Leaf(row.path, row.cls, row.dtype, row.shape) for row in doc.leaves]
    placed = []
    for row in doc.places:
        if row.leaf >= len(leaves) or (leaf := leaves[row.leaf]).dtype not in DTYPES:
            raise ValueError(f"a layout that names leaf {row.leaf} of {len(leaves)}, or a dtype nobody knows")
        shard = Shard(leaf, Box(row.offsets, row.lengths), row.per_rank)
        if not shard.box.within(leaf.shape) or row.start + shard.nbytes > record.nbytes:
            raise ValueError(f"{leaf.path} {shard.box} at byte {row.start} of {record.nbytes}")
        placed.append(Placed(shard, row.start))
    return tuple(placed)
