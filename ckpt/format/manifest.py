"""The documents on a store: their fields, their bytes, and the checks every read makes (PROTOCOL.md §2, FORMAT.md).

A *sealed* document is one JSON object, a newline, the xxh3-128 of everything before in 32 hex digits, a newline.
Unknown fields are ignored; a newer format number is refused before anything else is looked at. Parts have a room of
their own; all of it can be had from here.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from ckpt.format.chunks import Blob, Chunk, Loan, OldBundle
from ckpt.format.documents import (
    ENCRYPTED_FORMAT,
    FORMAT,
    Hex64,
    Hex128,
    Natural,
    RunText,
    SnapshotText,
    check_digest,
    chunk_digest,
    damaged,
    decode,
    digest64,
    digest128,
    parse_snapshot,
    snapshot_id,
    with_digest,
)
from ckpt.format.key import Unopened, head_of
from ckpt.format.names import PackName, PartName, SnapshotId
from ckpt.format.parts import (
    MAX_PART,
    BlobRow,
    BundleRow,
    ChunkRow,
    Durable,
    Part,
    PartHead,
    PartRef,
    ShardRow,
    read_part,
    write_part,
)

__all__ = [
    "ENCRYPTED_FORMAT",
    "FORMAT",
    "MAX_DOCUMENT",
    "MAX_PART",
    "Alive",
    "Blob",
    "BlobRow",
    "BundleRow",
    "Chunk",
    "ChunkRow",
    "Document",
    "Durable",
    "Hex64",
    "Hex128",
    "Holder",
    "Loan",
    "Natural",
    "OldBundle",
    "Part",
    "PartHead",
    "PartRef",
    "PinDoc",
    "PruneDoc",
    "RunDoc",
    "RunText",
    "ShardRow",
    "Snapshot",
    "SnapshotText",
    "StoreDoc",
    "Totals",
    "check_seal",
    "chunk_digest",
    "digest64",
    "digest128",
    "parse_snapshot",
    "read_part",
    "seal",
    "snapshot_id",
    "unseal",
    "write_part",
]

MAX_DOCUMENT = 64 << 20
"""Bytes of the largest sealed document that is read; a larger one is damage, and must not fill our memory."""

# --- sealed documents --------------------------------------------------------------------------------------------


class Totals(Struct, frozen=True):
    """Bytes of blobs this save stored, by codec kind number and in all, and the raw size of the whole state."""

    stored: Natural
    size: Natural
    by_kind: dict[str, Natural]


class Snapshot(Struct, frozen=True, omit_defaults=True):
    """The commit. Computed from the parts alone, so whoever writes it writes the same bytes. From `metrics` on: what
    rank 0's part says. `without`: the names of optimizers that it held once, and that were taken out since: then it is
    *weights only*."""

    format: Natural
    run: RunText
    step: Natural
    world_size: Annotated[int, Meta(ge=1)]
    revision: Natural
    parts: tuple[PartRef, ...]
    reference: SnapshotText | None
    packs: tuple[tuple[str, Natural], ...]
    totals: Totals
    metrics: dict[str, Any] | None
    time: float | None
    blocked: float | None = None
    durable: Durable | None = None
    without: tuple[str, ...] = ()
    cadence: float | None = None

    def __post_init__(self) -> None:
        """Checked wherever one is read, because a prune removes what a snapshot that goes has named: a document must
        not be able to name a pin, another snapshot, or anything that is no part or pack.

        Raises:
            ValueError: told as damage by `unseal`.
        """
        if len(self.parts) != self.world_size:
            raise ValueError(f"{len(self.parts)} parts of {self.world_size} ranks")
        for rank, ref in enumerate(self.parts):
            name = PartName.parse(ref.key)
            if name is None or (str(name.id.run), name.id.step, name.rank) != (self.run, self.step, rank):
                raise ValueError(f"part number {rank} is named {ref.key[:80]!r}")
        for key, _ in self.packs:
            if PackName.parse(key) is None:
                raise ValueError(f"{key[:80]!r} is not the name of a pack")

    @property
    def id(self) -> SnapshotId:
        return snapshot_id(self.run, self.step)


class RunDoc(Struct, frozen=True):
    """One start of the job. `pid_started`, `boot`, `pid_space`: with host and pid they name one process for ever.
    `resumed_from`: the snapshot this run restored, or null."""

    format: Natural
    run: RunText
    world_size: Annotated[int, Meta(ge=1)]
    host: str
    pid: Natural
    pid_started: str
    boot: str
    pid_space: str
    job: str | None
    started: float
    resumed_from: SnapshotText | None
    versions: dict[str, str]


class Alive(Struct, frozen=True):
    """The heartbeat: `beat` counts up; `ended` after a clean close."""

    format: Natural
    run: RunText
    beat: Natural
    ended: bool
    interval: float


class Holder(Struct, frozen=True):
    """The process behind a pin that is a claim: named for ever, as in `RunDoc`."""

    host: str
    pid: Natural
    pid_started: str
    boot: str
    pid_space: str


class PinDoc(Struct, frozen=True, omit_defaults=True):
    """`holder`: who claims the snapshot for a while; None: a pin that a person made."""

    format: Natural
    name: str
    snapshot: SnapshotText
    holder: Holder | None = None


class PruneDoc(Struct, frozen=True):
    """Everything a prune is about to remove: snapshot ids (for claims), and all object keys in order of removal."""

    format: Natural
    snapshots: tuple[SnapshotText, ...]
    keys: tuple[str, ...]


class StoreDoc(Struct, frozen=True):
    """store.json: says that this is a checkpoint store, of which format, and which key opens it. Constant bytes."""

    format: Natural
    kind: str = "incremental-ckpt store"
    key_id: str | None = None


Document = TypeVar("Document", Snapshot, RunDoc, Alive, PinDoc, PruneDoc, StoreDoc)


def seal(document: Snapshot | RunDoc | Alive | PinDoc | PruneDoc | StoreDoc) -> bytes:
    """The stored bytes of a document: JSON with sorted keys, newline, digest, newline."""
    return with_digest(msgspec.json.Encoder(order="sorted").encode(document))


def unseal(data: bytes, kind: type[Document], *, key: str) -> Document:
    """Check and decode a sealed document.

    Raises:
        DamagedError: cut, changed, or not such a document.
        FormatTooNew: a later version wrote it.
    """
    return decode(check_seal(data, key), kind, key, ENCRYPTED_FORMAT if kind is StoreDoc else FORMAT)


def check_seal(data: bytes, key: str) -> bytes:
    """The JSON of a sealed document whose digest holds. Raises DamagedError."""
    if isinstance(data, Unopened):
        raise damaged(key, data.expected, data.found)
    if (head := head_of(data)) is not None:
        raise damaged(key, "a document in the clear", f"one that is encrypted with key {head.key_id}")
    return check_digest(data, key)
