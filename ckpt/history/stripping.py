"""Older snapshots without the state of their optimizers (`Keep.moments_last`): which, and making them so.

Each becomes *weights only* as a revision (revising.py has the order of writes, and what a crash leaves): no pack is
written, since packs are split by class of leaf; those that hold optimizer state alone are named by nothing afterwards,
and go with the prune that this is a part of.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from ckpt.errors import DamagedError
from ckpt.format.manifest import Part, PartRef, Snapshot, digest128, read_part, seal
from ckpt.format.names import PartName, SnapshotId, SnapshotName
from ckpt.format.parts import encode_part
from ckpt.format.weights_only import weights_only
from ckpt.history.assemble import Breathe, build_snapshot
from ckpt.history.catalog import History, read_history
from ckpt.history.clock import Clock
from ckpt.history.copies import checked
from ckpt.history.reading import THREADS, read_many
from ckpt.history.revising import CLAIM, SWEPT, claiming, next_revision, publish_revised, put_revised
from storage_backends.base import Entry, Store


@dataclass(frozen=True)
class Stripping:
    """What will be made weights only. Data only.

    Attributes:
        ids: the snapshots, oldest first.
        written: bytes of the documents that this takes.
        bare: those that were looked into and have no optimizer state.
        after: the history as it will be then.
        notes: what a person should know, one line each.
    """

    ids: tuple[SnapshotId, ...]
    written: int
    bare: frozenset[SnapshotId]
    after: History
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Stripped:
    """What became weights only, bytes of the documents that were written, and in words what was passed over."""

    ids: tuple[SnapshotId, ...] = ()
    written: int = 0
    skipped: tuple[str, ...] = ()


def with_older_moments(
    history: History, kept: Collection[SnapshotId], leaned: Collection[SnapshotId], last: int
) -> list[SnapshotId]:
    """Whose optimizer state goes: of the snapshots that stay on the live line, all but the newest `last` that have
    theirs. A pin protects a snapshot as it is, and what a job may lean on stays as it is."""
    pinned = {id_ for name, id_ in history.pins.items() if not name.startswith(CLAIM)}
    whole = [id_ for id_ in sorted(history.live) if id_ in kept and not history.snapshots[id_].without]
    return [id_ for id_ in whole[:-last] if id_ not in pinned and id_ not in leaned]


def plan_stripping(
    store: Store, history: History, ids: Sequence[SnapshotId], *, bare: Collection[SnapshotId], breathe: Breathe
) -> Stripping:
    """Look into the parts of `ids` and say what the store will hold; touches nothing.

    What is held: the parts of one snapshot, as for a commit.

    Args:
        history: a look at the store, of which they are snapshots.
        bare: of these it is known already that they have no optimizer state.
        breathe: called between rows, to give way to a training thread.
    """
    documents, snapshots, keys = dict(history.documents), dict(history.snapshots), dict(history.keys)
    entries = dict(history.entries)
    found: list[SnapshotId] = []
    without: set[SnapshotId] = set(bare)
    notes: list[str] = []
    written = 0
    for id_ in ids:
        if id_ in without:
            continue
        revisions = [n.revision for key in entries if (n := PartName.parse(key)) is not None and n.id == id_]
        try:
            parts = _read(store, history.snapshots[id_], breathe)
            made = None if parts is None else weights_only(parts, 1 + max(revisions, default=0), breathe)
        except (DamagedError, ValueError) as error:
            notes.append(f"{id_.short} keeps its optimizer state: {error}")
            continue
        if made is None:
            without.update(() if parts is None else (id_,))  # or it went meanwhile
            continue
        refs = [_named(part, breathe) for part in made]
        snapshot = build_snapshot(list(zip(refs, made, strict=True)), breathe)
        key = SnapshotName(id_, snapshot.revision).key
        size = len(seal(snapshot))
        entries |= {ref.key: Entry(ref.key, ref.length, None) for ref in refs} | {key: Entry(key, size, None)}
        documents[key], snapshots[id_], keys[id_] = snapshot, snapshot, key
        written += size + sum(ref.length for ref in refs)
        found.append(id_)
    after = replace(history, documents=documents, snapshots=snapshots, keys=keys, entries=entries)
    return Stripping(tuple(found), written, frozenset(without & set(ids)), after, tuple(notes))


def strip(
    store: Store,
    history: History,
    ids: Sequence[SnapshotId],
    *,
    leaned: Callable[[History], Mapping[SnapshotId, str]],
    grace: float,
    clock: Clock,
    listing_lag: float,
    breathe: Breathe,
) -> Stripped:
    """Make these snapshots weights only. Safe beside jobs that save and restore, prunes, and compactions.

    Args:
        history: the look at the store in which they were chosen.
        leaned: what a job may lean on, by another look: asked once they are claimed.
        grace: as for `claiming`.
        clock, listing_lag: as for `execute`.

    Raises:
        StorageError: the store failed; what was made so by then is.
    """
    done: list[SnapshotId] = []
    written = 0
    with claiming(store, history, ids, grace=grace) as claimed:
        skipped = list(claimed.skipped)
        if claimed.ids and listing_lag > 0:
            clock.sleep(2 * listing_lag)
        again = read_history(store, known=history) if claimed.ids else history
        stay = dict(leaned(again)) | {
            id_: f"pin {name}" for name, id_ in again.pins.items() if not name.startswith(CLAIM)
        }
        for id_ in claimed.ids:
            if (why := stay.get(id_)) is not None:
                skipped.append(f"{id_.short}: {why}")
                continue
            size = _strip_one(store, history, id_, breathe)
            if isinstance(size, str):
                skipped.append(f"{id_.short}: {size}")
                continue
            done.append(id_)
            written += size
    return Stripped(tuple(done), written, tuple(skipped))


def _strip_one(store: Store, history: History, id_: SnapshotId, breathe: Breathe) -> int | str:
    """Bytes written; or why it stays as it is."""
    try:
        parts = _read(store, history.snapshots[id_], breathe)
        revision = next_revision(store, history, id_)
        made = None if parts is None else weights_only(parts, revision, breathe)
    except (DamagedError, ValueError) as error:
        return str(error)
    if made is None:
        return "its parts are gone"
    refs = [put_revised(store, part, breathe) for part in made]
    size = publish_revised(store, list(zip(refs, made, strict=True)), (), breathe)
    return SWEPT if size is None else size + sum(ref.length for ref in refs)


def _read(store: Store, snapshot: Snapshot, breathe: Breathe) -> list[Part] | None:
    """All parts of a snapshot; None if one is gone. Raises DamagedError."""
    refs = {ref.key: ref for ref in snapshot.parts}
    parts: list[Part] = []
    for key, data in read_many(store, list(refs), THREADS):
        if data is None:
            return None
        ref = refs[key]
        parts.append(
            checked(store, key, data, lambda data: read_part(data, key=ref.key, name=ref, breathe=breathe))  # noqa: B023
        )
        breathe()
    return parts


def _named(part: Part, breathe: Breathe) -> PartRef:
    data = encode_part(part, breathe)
    return PartRef(PartName(part.id, part.rank, part.revision).key, len(data), digest128(data))
