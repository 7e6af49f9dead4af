"""Packs: many blobs in one object, which is a plain safetensors file that any safetensors reader opens.

====================  =========================================================================================
u64, little-endian    length of the header in bytes
header                JSON, padded with spaces to a multiple of 8; its entries in this order:
  ``__metadata__``      ``format``: "1"
                        ``dtypes``: rows ``<dtype>:<element size>``, separated by commas
                        ``blobs``: rows ``<chunk digest>:<i>[:<base digest>]``, separated by commas, row n for blob n;
                        i is the number of the chunk's dtype among `dtypes`; digests are those of whole chunks
                        (manifest.chunk_digest), of the chunk that the blob makes and of the one it is laid on
  one entry per blob    ``<n>-<xxh3-64 of the blob>-<codec kind>``: dtype "U8", shape [length], data_offsets
the blobs             in order, without gaps, to the end of the file
====================  =========================================================================================

Parts say where blobs lie; the header is only for a reader without parts (salvage) and for whoever looks into a store
with other tools. Rows are short because a sparse blob may be a few hundred bytes.
"""

from __future__ import annotations

import json
import re
from base64 import b64decode, b64encode
from collections.abc import Callable, Collection
from itertools import accumulate, pairwise
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw, Struct

from ckpt.format.key import Key
from ckpt.format.kinds import KINDS, NEEDS_BASE
from ckpt.format.manifest import Blob, Natural, digest64
from ckpt.format.shards import DTYPES
from storage_backends.base import Buffer

PACK_LIMIT = 32 << 20
"""Bytes of a pack at most: whoever builds one looks at `PackBuilder.size` before adding."""

MAX_HEADER = 32 << 20
"""A header that claims to be longer is damaged; ours describe at most what a pack can hold."""

# Whoever sees the first bytes of a pack, and no more, can tell whose it is.
_SEALED = '"__metadata__":{"format":"2","key_id":"'
_SEALED_START = re.compile(
    rb'.{8}\{"__metadata__":\{"format":"2","key_id":"([0-9a-f]{16})","place":"([!#-~]*)"', re.DOTALL
)

_NAME = re.compile("(0|[1-9][0-9]{0,8})-([0-9a-f]{16})-([0-9]{1,3})")
_ROW = re.compile("([0-9a-f]{32}):([0-9]{1,3})(?::([0-9a-f]{32}))?")

TEXT_BOUND = 200
"""Bytes of header per blob, and of what every header holds, at most."""


TEXT = 150
"""Bytes that a pack's header spends on a blob, about. They count as live with it: a new pack needs them again, and
packs of tiny blobs, half of which are header, would else be rewritten for ever."""


class FinishedPack(Struct, frozen=True):
    """A whole pack: its bytes, their xxh3-64, and per blob its byte range ``[start, stop)`` in the file."""

    data: bytes
    digest: str
    ranges: tuple[tuple[int, int], ...]


class PackBuilder:
    """Collects blobs, in order, and becomes a pack once. Text is made as blobs come: one long stretch of Python at the
    end would hold the GIL against the training thread."""

    def __init__(self, key: Key | None = None, place: str = "") -> None:
        """`key`: seals what the header says of chunks; the blobs come sealed. `place`: this pack's name without its
        digest."""
        self._key = key
        self._place = place
        self._blobs: list[bytes] = []
        self._entries: list[str] = []
        self._rows: list[str] = []
        self._dtypes: dict[str, int] = {}
        self._length = 0

    @property
    def count(self) -> int:
        """Blobs added."""
        return len(self._blobs)

    @property
    def size(self) -> int:
        """An upper bound of the finished pack's bytes, within `TEXT_BOUND` for each blob and dtype."""
        return self._length + TEXT_BOUND * (1 + len(self._blobs) + len(self._dtypes) + (self._key is not None))

    def add(
        self, blob: bytes, *, kind: int, digest: str, chunk_digest: str, dtype: str, base_digest: str | None
    ) -> int:
        """Append a blob and return its number in this pack.

        Args:
            digest: xxh3-64 of the blob, `chunk_digest`: of the chunk it makes (the last of its chain), `base_digest`:
                of the chunk it is laid on, None for a keyframe.
        """
        n, start = len(self._blobs), self._length
        self._length += len(blob)
        number = self._dtypes.setdefault(dtype, len(self._dtypes))
        self._blobs.append(blob)
        self._rows.append(
            f"{chunk_digest}:{number}" if base_digest is None else f"{chunk_digest}:{number}:{base_digest}"
        )
        self._entries.append(
            f'"{n}-{digest}-{kind}":{{"dtype":"U8","shape":[{len(blob)}],"data_offsets":[{start},{self._length}]}}'
        )
        return n

    def finish(self) -> FinishedPack:
        """The pack. Equal blobs in equal order give equal bytes."""
        dtypes = ",".join(f"{name}:{DTYPES[name].size}" for name in self._dtypes)
        if self._key is None:
            meta = f'"__metadata__":{{"format":"1","dtypes":"{dtypes}","blobs":"{",".join(self._rows)}"}}'
        else:
            # Digests of chunks are digests of what is secret: whoever guesses a chunk could tell that it is there.
            rows = b64encode(self._key.seal_rows(f"{dtypes}\n{','.join(self._rows)}", self._place)).decode()
            meta = f'{_SEALED}{self._key.id}","place":"{self._place}","rows":"{rows}"}}'
        header = ("{" + ",".join([meta, *self._entries]) + "}").encode()
        header += b" " * (-len(header) % 8)
        data = b"".join([len(header).to_bytes(8, "little"), header, *self._blobs])
        # Not a loop: over the blobs of a pack of small chunks it would hold the GIL for milliseconds.
        edges = list(accumulate(map(len, self._blobs), initial=8 + len(header)))
        return FinishedPack(data, digest64(data), tuple(pairwise(edges)))


class PackedBlob(Struct, frozen=True):
    """What a pack's header says of one blob. `start` and `stop` are bytes from the start of the file."""

    n: int
    digest: str
    kind: int
    start: int
    stop: int
    chunk_digest: str
    dtype: str
    element_size: int
    base_digest: str | None


class _Metadata(Struct, frozen=True):
    format: str
    dtypes: str
    blobs: str


class _Sealed(Struct, frozen=True):
    format: str
    key_id: str
    place: str
    rows: str


class _Entry(Struct, frozen=True):
    dtype: str
    shape: tuple[Natural]
    data_offsets: tuple[Natural, Annotated[int, Meta(ge=0, le=1 << 62)]]


LEAD = 256
"""Bytes of a pack from which `sealed_with` and `stray_place` tell whose it is."""


def sealed_with(data: Buffer) -> str | None:
    """The id of the key that a pack is sealed with, from its first bytes; None if it is in the clear."""
    found = _SEALED_START.match(bytes(memoryview(data).cast("B")[:LEAD]))
    return None if found is None else found[1].decode()


def stray_place(data: Buffer, name: str) -> str | None:
    """Where a sealed pack belongs, from its first bytes, if that is not under this name."""
    found = _SEALED_START.match(bytes(memoryview(data).cast("B")[:LEAD]))
    place = None if found is None else found[2].decode()
    return None if place is None or name.startswith(f"{place}-") else place


def read_header(data: Buffer, size: int | None = None, key: Key | None = None) -> tuple[PackedBlob, ...]:
    """The blobs of a pack, in order, from its bytes; with `size` (the file's length), `data` may end anywhere after the
    header. The blobs' own bytes are not looked at. `key`: opens an encrypted store's.

    Raises:
        ValueError: this is not a pack as `PackBuilder` writes it: a header that is cut, too long, too deep, with names
            that repeat, blobs that overlap, leave gaps or do not end where the file does, or rows that do not match.
    """
    view = memoryview(data).cast("B")
    size = len(view) if size is None else size
    if len(view) < 8:
        raise ValueError(f"pack: {len(view)} bytes are shorter than its head")
    length = int.from_bytes(view[:8], "little")
    if length > min(MAX_HEADER, size - 8, len(view) - 8):
        raise ValueError(f"pack: a header of {length} bytes in {len(view)} of {size} bytes")
    try:
        fields = json.loads(bytes(view[8 : 8 + length]), object_pairs_hook=_unique)
        if not isinstance(fields, dict):
            raise ValueError("pack: the header is not an object")
        metadata = _metadata(fields.pop("__metadata__", None), key)
        entries = msgspec.convert(fields, dict[str, _Entry])
    except (RecursionError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise ValueError(f"pack: {error}") from error
    dtypes = _dtype_rows(metadata.dtypes)
    rows = metadata.blobs.split(",") if metadata.blobs else []
    if len(rows) != len(entries):
        raise ValueError(f"pack: {len(rows)} rows for {len(entries)} blobs")
    base, at = 8 + length, 0
    blobs: list[PackedBlob] = []
    for n, (row, (name, entry)) in enumerate(zip(rows, entries.items(), strict=True)):
        blob = _blob(n, name, entry, row, dtypes, base)
        start, stop = entry.data_offsets
        if start != at or stop - start != entry.shape[0]:
            raise ValueError(
                f"pack: blob {n} at {start}:{stop}, of {entry.shape[0]} bytes, after one that ends at {at}"
            )
        at = stop
        blobs.append(blob)
    if base + at != size:
        raise ValueError(f"pack: blobs end at byte {base + at} of {size}")
    return tuple(blobs)


def describe_some(
    header: bytes, blobs: Collection[Blob], breathe: Callable[[], None], key: Key | None = None
) -> dict[Blob, PackedBlob]:
    """What a pack's first bytes, header included and nothing else, say of some of its blobs. Unlike `read_header` it
    looks at no others, so it may be called next to a training thread.

    Raises:
        ValueError: no header, or it does not describe them as they are named.
    """
    try:
        fields = msgspec.json.decode(header[8:], type=dict[str, Raw])
        breathe()
        metadata = _metadata(msgspec.json.decode(fields.pop("__metadata__", Raw(b"null"))), key)
        breathe()
        dtypes, rows = _dtype_rows(metadata.dtypes), metadata.blobs.split(",")
        wanted = {f"{blob.digest}-{blob.kind}": blob for blob in blobs}
        found: dict[Blob, PackedBlob] = {}
        for n, (name, entry) in enumerate(fields.items()):
            blob = wanted.get(name.partition("-")[2])
            if blob is not None and n < len(rows):
                said = _blob(n, name, msgspec.json.decode(entry, type=_Entry), rows[n], dtypes, len(header))
                if (said.start, said.stop) == (blob.start, blob.stop):
                    found[blob] = said
            breathe()
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ValueError(f"pack: {error}") from error
    if len(found) != len(blobs):
        raise ValueError(f"pack: its header describes {len(found)} of {len(blobs)} blobs as they are named")
    return found


def _metadata(fields: Any, key: Key | None) -> _Metadata:
    number = fields.get("format") if isinstance(fields, dict) else None
    match number, key:
        case "1", None:
            return msgspec.convert(fields, _Metadata)
        case "2", Key():
            sealed = msgspec.convert(fields, _Sealed)
            if sealed.key_id != key.id:
                raise ValueError(f"pack: sealed with key {sealed.key_id[:20]!r}, and this is key {key.id}")
            dtypes, _, blobs = key.open_rows(b64decode(sealed.rows, validate=True), sealed.place).partition("\n")
            return _Metadata(number, dtypes, blobs)
        case "1" | "2", _:
            raise ValueError(f"pack: {'in the clear, in an encrypted store' if key else 'sealed, and no key is given'}")
        case _:
            raise ValueError(f"pack: format {number!r:.20}, and this version reads 1 and 2")


def _blob(n: int, name: str, entry: _Entry, row: str, dtypes: list[tuple[str, int]], base: int) -> PackedBlob:
    named, described = _NAME.fullmatch(name), _ROW.fullmatch(row)
    if named is None or described is None or int(named[1]) != n or entry.dtype != "U8":
        raise ValueError(f"pack: blob {n} is described as {name[:40]!r}, {entry.dtype[:10]!r}, {row[:80]!r}")
    kind, number = int(named[3]), int(described[2])
    if kind not in KINDS or number >= len(dtypes) or (kind in NEEDS_BASE) != (described[3] is not None):
        raise ValueError(f"pack: blob {n} of kind {kind} and dtype number {number}, base {described[3]}")
    start, stop = entry.data_offsets
    dtype, element = dtypes[number]
    return PackedBlob(n, named[2], kind, base + start, base + stop, described[1], dtype, element, described[3])


def _dtype_rows(text: str) -> list[tuple[str, int]]:
    out: list[tuple[str, int]] = []
    for row in text.split(",") if text else []:
        name, _, size = row.partition(":")
        if name not in DTYPES or size != str(DTYPES[name].size):
            raise ValueError(f"pack: unknown dtype {row[:40]!r}")
        out.append((name, DTYPES[name].size))
    return out


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("pack: a name occurs twice in the header")
    return found
