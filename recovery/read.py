"""The documents of one snapshot: which revision counts, its parts, and what it means when an object is not there.

A reader holds no lock. When a part or a pack is not found, the snapshot is read again (PROTOCOL.md §5.4): gone, it was
pruned under the reader, who goes on with the revision that replaced it, if there is one; there, it is damaged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import msgspec

from ckpt.errors import CheckpointError, DamagedError, LayoutMismatch
from ckpt.format.manifest import Part, PartRef, Snapshot, digest128, read_part, unseal
from ckpt.format.names import SNAPSHOTS, PartName, SnapshotId, SnapshotName
from ckpt.format.values import decode
from ckpt.history.copies import checked, read
from recovery.parallel import THREADS, in_threads
from storage_backends.base import NotFound, Store
from storage_backends.copies import Copied

T = TypeVar("T")


class Missing(DamagedError):  # noqa: N818 - what happened, not an error a user sees
    """An object that a snapshot names is not there: pruned or lost, as `verdict` finds out."""


class Pruned(CheckpointError):  # noqa: N818
    """The snapshot was removed while it was being read: take the next older one. Never leaves this room but as a
    reason for a skip, or as `NoSnapshot`."""


@dataclass(frozen=True, slots=True)
class OpenSnapshot:
    """A snapshot and the object it was read from (its highest readable revision)."""

    key: str
    snapshot: Snapshot

    @property
    def id(self) -> SnapshotId:
        return self.snapshot.id


def open_snapshot(store: Store, wanted: SnapshotId) -> OpenSnapshot:
    """Read the snapshot, at its highest readable revision.

    Raises:
        Pruned: there is none.
        DamagedError: there are some, and none can be read.
        FormatTooNew: a later version wrote it.
    """
    damage: DamagedError | None = None
    tried: set[SnapshotName] = set()
    went = True
    while went:  # what was listed and has gone since may have been replaced: then the next listing says by what
        listed = {n for e in store.list(SNAPSHOTS) if (n := SnapshotName.parse(e.key)) and n.id == wanted}
        went = False
        # The commit itself is asked for whether listed or not: a listing may lag behind.
        for name in sorted((listed | {SnapshotName(wanted)}) - tried, reverse=True):
            try:
                return read(store, name.key, partial(check_snapshot, key=name.key))
            except NotFound:
                went = went or name in listed
            except DamagedError as error:
                damage = damage or error
            tried.add(name)
    if damage is not None:
        raise damage
    raise Pruned(f"snapshot {wanted.short} ({wanted}) is no longer on {store.url}: it was pruned; take another one")


def check_snapshot(data: bytes, key: str) -> OpenSnapshot:
    """Decode a snapshot and compare it with its own name. Raises DamagedError, FormatTooNew."""
    name = SnapshotName.parse(key)
    if name is None:
        raise ValueError(f"{key!r} is not the name of a snapshot")
    try:
        snapshot = unseal(data, Snapshot, key=key)
    except DamagedError as error:
        error.step = name.id.step
        raise
    found = (snapshot.id, snapshot.revision, len(snapshot.parts))
    if found != (expected := (name.id, name.revision, snapshot.world_size)):
        raise DamagedError(
            f"{key}: expected (snapshot, revision, parts) {expected}, found {found}; run 'ckpt verify'",
            key=key,
            step=name.id.step,
            expected=str(expected),
            found=str(found),
        )
    for rank, ref in enumerate(snapshot.parts):
        part = PartName.parse(ref.key)
        if part is None or part.id != snapshot.id or part.rank != rank:
            raise DamagedError(
                f"{key}: part number {rank} is named {ref.key!r}; run 'ckpt verify'",
                key=key,
                step=name.id.step,
                rank=rank,
                expected=f"the part of rank {rank} of {snapshot.id}",
                found=ref.key,
            )
    return OpenSnapshot(key, snapshot)


def read_part_bytes(store: Store, snapshot: Snapshot, rank: int) -> bytes:
    """The stored bytes of one rank's part, unchecked but where that chooses between copies. Raises Missing."""
    ref = snapshot.parts[rank]
    try:
        data = store.get(ref.key)
        if isinstance(store, Copied):
            with contextlib.suppress(DamagedError):  # every copy is bad: `check_part` says in which way
                return checked(store, ref.key, data, partial(_as_named, ref))
        return data
    except NotFound:
        raise Missing(
            f"step {snapshot.id.step}, rank {rank}: {ref.key} is not on {store.url}, though snapshot "
            f"{snapshot.id} names it; run 'ckpt verify'",
            key=ref.key,
            step=snapshot.id.step,
            rank=rank,
            expected=f"{ref.length} bytes",
            found="none",
        ) from None


def _as_named(ref: PartRef, data: bytes) -> bytes:
    if digest128(data) != ref.digest:
        raise DamagedError(f"{ref.key}: not what the snapshot names", key=ref.key)
    return data


def check_part(data: bytes, snapshot: Snapshot, rank: int) -> Part:
    """Decode a part, compare it with what the snapshot says of it, and with its place. Raises DamagedError."""
    ref: PartRef = snapshot.parts[rank]
    try:
        part = read_part(data, key=ref.key, name=ref)
    except DamagedError as error:
        error.step, error.rank = snapshot.id.step, rank
        raise
    found = (part.id, part.rank, part.world_size)
    if found != (expected := (snapshot.id, rank, snapshot.world_size)):
        raise DamagedError(
            f"{ref.key}: expected (snapshot, rank, world size) {expected}, found {found}; run 'ckpt verify'",
            key=ref.key,
            step=snapshot.id.step,
            rank=rank,
            expected=str(expected),
            found=str(found),
        )
    return part


def stored_value(part: Part, name: str) -> Any:
    """One top-level value of a part, decoded. Raises DamagedError."""
    try:
        return decode(part.values.get(name, msgspec.Raw(b"null")))
    except ValueError as error:
        raise DamagedError(
            f"step {part.id.step}, rank {part.rank}: value {name!r} cannot be decoded: expected a tagged value, found "
            f"{error}; run 'ckpt verify'",
            key=PartName(part.id, part.rank, part.revision).key,
            step=part.id.step,
            rank=part.rank,
            leaf=name,
            expected="a tagged value",
            found=str(error),
        ) from error


def read_parts(
    store: Store, snapshot: Snapshot, ranks: Iterable[int] | None = None, *, threads: int = THREADS
) -> dict[int, Part]:
    """The parts of these ranks (all, by default), read in parallel and checked against the snapshot.

    Raises:
        Missing, DamagedError: see `verdict` for the first.
    """
    wanted = range(snapshot.world_size) if ranks is None else sorted(set(ranks))

    def one(rank: int) -> tuple[int, Part]:
        return rank, check_part(read_part_bytes(store, snapshot, rank), snapshot, rank)

    return dict(sorted(in_threads(wanted, one, threads=min(threads, max(len(wanted), 1)))))


def weights_only(store: Store, opened: OpenSnapshot) -> LayoutMismatch:
    """The error of whoever needs the optimizers that were taken out of a snapshot."""
    names = opened.snapshot.without
    return LayoutMismatch(
        f"{opened.id.short} on {store.url} is weights only: {' and '.join(names)} was taken out of it by "
        f"Keep(moments_last=…); restore a whole one ('ckpt list' tells which), or what is left of this one: "
        f"ckpt.load_into(url, {{'model': model}}, {opened.id.step})",
        missing=names,
    )


def verdict(store: Store, opened: OpenSnapshot, error: DamagedError) -> DamagedError | Pruned:
    """What an error while reading `opened` means: the error itself, or that the snapshot was pruned under the reader.

    Raises:
        StorageError: the store cannot say.
    """
    if not isinstance(error, Missing):
        return error
    lost = DamagedError(
        str(error),
        key=error.key,
        step=error.step,
        rank=error.rank,
        leaf=error.leaf,
        expected=error.expected,
        found=error.found,
    )
    try:
        store.get(opened.key)
    except NotFound:
        return Pruned(
            f"snapshot {opened.id.short} ({opened.id}) was pruned while it was being read ({error.key} is gone)"
        )
    return lost


def successor(store: Store, opened: OpenSnapshot, error: DamagedError) -> OpenSnapshot:
    """The revision to go on with after `error`: what went was replaced by it.

    Raises:
        DamagedError, Pruned: there is none; `error`, as `verdict` judges it.
        StorageError: the store cannot say.
    """
    judged = verdict(store, opened, error)
    if isinstance(judged, Pruned):
        newer = open_snapshot(store, opened.id)
        if newer.key != opened.key:
            return newer
    raise judged from error


def following(store: Store, wanted: SnapshotId, read: Callable[[OpenSnapshot], T]) -> T:
    """Open the snapshot and `read` it; from the start at the next revision, if one replaces it meanwhile.

    Raises:
        DamagedError, Pruned, StorageError: it cannot be read.
    """
    opened = open_snapshot(store, wanted)
    while True:
        try:
            return read(opened)
        except DamagedError as error:
            opened = successor(store, opened, error)
