"""What all documents share: the format number, types of fields, digests, and decoding that trusts nothing."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec
import xxhash
from msgspec import Meta, Struct

from ckpt.errors import DamagedError, FormatTooNew
from ckpt.format.names import RunId, SnapshotId
from ckpt.format.shards import DTYPES

FORMAT = 1
"""The format number written, and the newest one read."""

ENCRYPTED_FORMAT = 2
"""The number of an encrypted store's mark, of its packs and of the envelopes of its documents: a version that knows 1
alone must not take such a store for an empty or a damaged one, and begin it anew. In the envelopes it is 1 as ever."""

Natural = Annotated[int, Meta(ge=0)]
Hex64 = Annotated[str, Meta(pattern=r"^[0-9a-f]{16}\Z")]
Hex128 = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
RunText = Annotated[str, Meta(pattern=r"^[0-9]{6}-[0-9a-f]{8}\Z")]
SnapshotText = Annotated[str, Meta(pattern=r"^[0-9]{6}-[0-9a-f]{8}-[0-9]{12}\Z")]


def digest128(data: bytes | bytearray | memoryview) -> str:
    """xxh3-128, 32 hex digits, big-endian."""
    return xxhash.xxh3_128_hexdigest(data)


def digest64(data: bytes | bytearray | memoryview) -> str:
    """xxh3-64, 16 hex digits, big-endian."""
    return xxhash.xxh3_64_hexdigest(data)


_SEEDS = {name: xxhash.xxh3_64_intdigest(name.encode()) for name in DTYPES}


def chunk_digest(dtype: str, raw: Any) -> str:
    """Digest of a chunk: xxh3-128 of its raw bytes, seeded with the xxh3-64 of its dtype's name, because equal bytes
    of another dtype are another value. `raw` is any contiguous buffer."""
    return xxhash.xxh3_128_hexdigest(raw, seed=_SEEDS[dtype])


def with_digest(body: bytes) -> bytes:
    """The stored bytes of a sealed document: `body`, a newline, the digest of both, a newline."""
    body += b"\n"
    return body + digest128(body).encode() + b"\n"


def check_digest(data: bytes, key: str) -> bytes:
    """The `body` of a sealed document. Raises DamagedError: cut, changed, or not such a document."""
    if len(data) < 34 or data[-34:-33] != b"\n" or data[-1:] != b"\n":
        raise damaged(key, "a document that ends in its digest", f"{len(data)} bytes without one")
    body, seal_line = data[:-33], data[-33:-1]
    if (found := digest128(body).encode()) != seal_line:
        raise damaged(key, f"digest {seal_line.decode(errors='replace')}", f"digest {found.decode()}")
    return body[:-1]


class _Head(Struct):
    format: Natural


T = TypeVar("T")


def decode(text: bytes, kind: type[T], key: str, newest: int = FORMAT) -> T:
    """A document's JSON, checked against its type; a newer format is told before anything else is looked at."""
    try:
        head = msgspec.json.decode(text, type=_Head)
        if head.format > newest:
            raise FormatTooNew(
                f"{key}: format {head.format}, and this version reads up to {newest}; upgrade incremental-ckpt",
                found=head.format,
                supported=newest,
            )
        return msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise damaged(key, f"a {kind.__name__} document", str(error)) from error


def snapshot_id(run: str, step: int) -> SnapshotId:
    """From checked document fields."""
    parsed = RunId.parse(run)
    assert parsed is not None, run  # the field's pattern has been checked
    return SnapshotId(parsed, step)


def parse_snapshot(text: str | None) -> SnapshotId | None:
    """From a checked document field, or null."""
    return None if text is None else SnapshotId.parse(text)


def damaged(key: str, expected: str, found: str, *, step: int | None = None, rank: int | None = None) -> DamagedError:
    """The error of a document that is not what was written."""
    return DamagedError(
        f"{key}: expected {expected}, found {found}; run 'ckpt verify' to see what else is wrong",
        key=key,
        step=step,
        rank=rank,
        expected=expected,
        found=found,
    )
