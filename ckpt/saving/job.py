"""What passes between the training thread, the writer and whoever waits: frozen data, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ckpt.format.layout import Layout
from ckpt.format.manifest import Chunk, Loan, Snapshot
from ckpt.format.names import SnapshotId

Bytes: TypeAlias = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class SaveJob:
    """One captured state of one rank: all that the writer needs. `data` (layout.nbytes bytes) is not touched by
    anyone else until the job's outcome is known.

    `others`: ranks that store something of what this one holds. `values`: top-level state name → tagged JSON
    (values.encode). `replicas`: ``"<leaf> <box>"`` → checksum, empty but at a check. `metrics` and `time` (POSIX
    seconds) are None but on rank 0. `asked`: ``time.perf_counter()`` when `save()` was called, and `blocked`: seconds
    for which it then kept the training thread; None where nobody measured. `cadence`: seconds between saves that an
    adaptive cadence aims at; None but on rank 0.
    """

    id: SnapshotId
    rank: int
    world_size: int
    layout: Layout
    data: Bytes
    values: Mapping[str, bytes]
    aliases: Mapping[str, str]
    replicas: Mapping[str, str]
    ownership: str
    metrics: dict[str, Any] | None
    time: float | None
    others: tuple[int, ...] = ()
    asked: float | None = None
    blocked: float | None = None
    cadence: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """The committed state the next diff leans on. `table` runs parallel to ``layout.pieces``; `packs`: key → length
    of every pack that it names; `shared`: those of them that other ranks may lean on too. `loans`: number of a bundle
    → where its members lie; the chunks of its pieces have no blobs."""

    id: SnapshotId
    layout: Layout
    data: Bytes
    table: tuple[Chunk, ...]
    packs: Mapping[str, int]
    shared: frozenset[str] = frozenset()
    loans: Mapping[int, Loan] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class JournalStats:
    """What the journal took, of this rank, since the checkpointer was made.

    Attributes:
        steps: recorded; `bytes`: of their records, coded.
        seconds: the training thread was kept. `cpu`: seconds of processor time of the journal's threads.
        memory: host bytes it holds: a copy of the state to prove it with, buffers, the ring, what waits for the store.
        off: why it records nothing just now, or has ended; None while it records.
    """

    steps: int
    bytes: int
    seconds: float
    cpu: float
    memory: int
    off: str | None


@dataclass(frozen=True, slots=True)
class Report:
    """What one rank's save did. Bytes: `captured` copied out of the training process, `changed` in chunks that
    differ from the reference, `stored` of blobs put on the store (packs' headers apart), `document` of the part.
    `kinds`: codec kind name → stored bytes. `seconds`: stage → seconds; stages overlap."""

    captured: int = 0
    changed: int = 0
    stored: int = 0
    document: int = 0
    packs: int = 0
    kinds: Mapping[str, int] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    journal: JournalStats | None = None
    """The journal's totals when the save ended; None without one."""


@dataclass(frozen=True, slots=True)
class Saved:
    """The commit was seen."""

    snapshot: Snapshot
    report: Report


@dataclass(frozen=True, slots=True)
class Failed:
    """The commit was not seen; `error` is what `ticket.error` shows."""

    error: Exception
    report: Report


Outcome: TypeAlias = Saved | Failed
