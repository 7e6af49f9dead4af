"""What a history takes up on its store: by step, and by class of leaf. From documents and listings alone, never a pack.

A pack may serve many snapshots. So the bytes of steps do not add up to those of the store: what a step shares comes
free only when the last one that names it goes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ckpt.format.manifest import Blob, Part, Snapshot
from ckpt.format.names import PACKS, PackName, SnapshotId
from ckpt.history.catalog import History


@dataclass(frozen=True, slots=True)
class StepUsage:
    """Bytes of one snapshot.

    Attributes:
        size: the whole state, as it lies in memory.
        own: packs that this very save wrote, and that the snapshot still names.
        shared: packs it names that other snapshots name, too; its own among them.
        documents: its parts and its snapshot document.
        freed: what removing it alone would free: packs that nothing else names, and its documents. (Whether it may be
            removed is for ``ckpt prune`` to say.)
    """

    id: SnapshotId
    size: int
    own: int
    shared: int
    documents: int
    freed: int


@dataclass(frozen=True, slots=True)
class ClassUsage:
    """Leaves of one class ("parameter", "buffer", "slot:exp_avg", …) in one snapshot: how many, their bytes in memory,
    and the stored bytes that a restore of them reads (blobs they share with another class count there)."""

    cls: str
    leaves: int
    size: int
    to_read: int


@dataclass(frozen=True, slots=True)
class Usage:
    """A store as a whole. `unnamed`: bytes of packs that no snapshot names: a save under way, or debris of a crash that
    ``ckpt prune`` sweeps. `classes`: of the snapshot `of`."""

    steps: tuple[StepUsage, ...]
    packs: int
    documents: int
    unnamed: int
    of: SnapshotId | None
    classes: tuple[ClassUsage, ...]


def by_step(history: History) -> tuple[StepUsage, ...]:
    """Every snapshot of `history` (read with ``packs=True``), oldest first."""
    named: dict[SnapshotId, dict[str, int]] = {}
    documents: dict[SnapshotId, int] = {}
    for key, snapshot in history.documents.items():
        named.setdefault(snapshot.id, {}).update(snapshot.packs)
        documents[snapshot.id] = documents.get(snapshot.id, 0) + _documents(history, key, snapshot)
    users = Counter(key for packs in named.values() for key in packs)
    found = []
    for id_, snapshot in sorted(history.snapshots.items()):
        packs = named[id_]
        alone = sum(size for key, size in packs.items() if users[key] == 1)
        own = sum(size for key, size in packs.items() if (name := PackName.parse(key)) is not None and name.id == id_)
        found.append(
            StepUsage(
                id_,
                size=snapshot.totals.size,
                own=own,
                shared=sum(packs.values()) - alone,
                documents=documents[id_],
                freed=alone + documents[id_],
            )
        )
    return tuple(found)


def _documents(history: History, key: str, snapshot: Snapshot) -> int:
    """Of this revision: its document, and its parts (a revision has parts of its own)."""
    entry = history.entries.get(key)
    return (0 if entry is None else entry.size) + sum(ref.length for ref in snapshot.parts)


def by_class(parts: Mapping[int, Part]) -> tuple[ClassUsage, ...]:
    """The leaves of one snapshot by class, largest first."""
    leaves: dict[str, set[str]] = {}
    size: Counter[str] = Counter()
    to_read: Counter[str] = Counter()
    seen: set[tuple[str, int]] = set()

    def count(cls: str, blobs: Iterable[Blob]) -> None:
        for blob in blobs:
            if (blob.pack, blob.start) not in seen:
                seen.add((blob.pack, blob.start))
                to_read[cls] += blob.size

    for part in parts.values():
        for row in part.shards:
            leaves.setdefault(row.cls, set()).add(row.leaf)
            size[row.cls] += row.nbytes
            count(row.cls, (part.blob(b) for chunk in row.chunks for b in chunk.blobs))
        for bundle in part.bundles:
            count(bundle.cls, (part.blob(b) for chunk in bundle.chunks for b in chunk.blobs))
    return tuple(
        ClassUsage(cls, len(leaves[cls]), size[cls], to_read[cls])
        for cls in sorted(leaves, key=lambda c: (-size[c], c))
    )


def whole_store(history: History, of: SnapshotId | None, parts: Mapping[int, Part]) -> Usage:
    """`history` read with ``packs=True``; `parts` those of the snapshot `of`."""
    packs = {key: entry.size for key, entry in history.entries.items() if key.startswith(PACKS)}
    named = {key for snapshot in history.documents.values() for key, _ in snapshot.packs}
    return Usage(
        by_step(history),
        packs=sum(packs.values()),
        documents=sum(entry.size for key, entry in history.entries.items() if not key.startswith(PACKS)),
        unnamed=sum(size for key, size in packs.items() if key not in named),
        of=of,
        classes=by_class(parts),
    )
