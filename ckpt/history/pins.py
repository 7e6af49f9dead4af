"""Pins: names that protect a snapshot until they are taken away (PROTOCOL.md §5.2).

A pin is a claim, and a claim is written first and only then looked for in what prunes have announced. A prune announces
first and only then looks for claims. So at least one of the two sees the other, and a claim gives way. A crash
  before the pin         leaves nothing;
  between pin and look   leaves a pin, perhaps of a snapshot that a prune takes away; it is shown, and protects nothing.
"""

from __future__ import annotations

import re

from ckpt.errors import DamagedError, NoSnapshot
from ckpt.format.manifest import FORMAT, Holder, PinDoc, parse_snapshot, seal, unseal
from ckpt.format.names import PINS, SnapshotId, pin_key
from ckpt.history.catalog import History
from ckpt.history.runs import claimed_by_prune
from storage_backends.base import NotFound, Store

_TAKEN = re.compile(r"latest|[0-9]+|\d{6}-[0-9a-f]{8}-\d{12}")
"""Names that `find` reads as something else."""


def pin(store: Store, history: History, name: str, id_: SnapshotId, *, move: bool = False) -> None:
    """Protect `id_` from every prune, under `name`; again with the same snapshot changes nothing.

    Args:
        store: where.
        history: a look at it, in which `id_` is a snapshot.
        name: 1-100 letters, digits, ``.``, ``_``, ``-``.
        move: take a name that pins another snapshot.

    Raises:
        ValueError: not a name for a pin, or one that pins another snapshot and is not to be moved.
        NoSnapshot: a prune has announced that the snapshot goes, or it is gone; the pin was taken back.
        StorageError: the store failed; the pin may have landed.
    """
    check_name(name)
    before = history.pins.get(name)
    if before is not None and before != id_ and not move:
        raise ValueError(f"{history.url}: pin {name} names {before.short}; unpin it first, or take another name")
    claim(store, name, id_)
    if claimed_by_prune(store, id_) or not still_there(store, history, id_):
        store.delete([pin_key(name)])
        raise NoSnapshot(f"{history.url}: {id_.short}: a prune is removing it, so it cannot be pinned any more")


def unpin(store: Store, name: str) -> SnapshotId | None:
    """Take a pin away; what it named, None if its document was damaged. The snapshot stays until a prune takes it.

    Raises:
        NoSnapshot: there is no such pin.
        StorageError: the store failed; the pin may be gone.
    """
    key = pin_key(name)
    there = [entry.key for entry in store.list(PINS)]
    try:
        data = store.get(key)
    except NotFound:
        names = ", ".join(one.removeprefix(PINS).removesuffix(".json") for one in there[:20])
        raise NoSnapshot(f"{store.url}: {name}: no such pin; there is {names or 'none'}") from None
    store.delete([key])
    return _pinned(data, key)


def check_name(name: str) -> None:
    """Raises ValueError for what cannot name a pin, because it would name something else where a snapshot is asked
    for, or is no name of an object."""
    pin_key(name)
    if _TAKEN.fullmatch(name):
        raise ValueError(f"pin name {name!r}: it would be read as a step; add a letter")


def claim(store: Store, name: str, id_: SnapshotId, holder: Holder | None = None) -> None:
    """Write a pin, and look at nothing: the caller must look at prunes/ next."""
    store.put(pin_key(name), seal(PinDoc(FORMAT, name, str(id_), holder)))


def still_there(store: Store, history: History, id_: SnapshotId) -> bool:
    """Whether the document that the look at the store found is still there: a prune may have come and gone since."""
    try:
        store.get_range(history.keys[id_], 0, 1)
    except NotFound:
        return False
    return True


def _pinned(data: bytes, key: str) -> SnapshotId | None:
    try:
        return parse_snapshot(unseal(data, PinDoc, key=key).snapshot)
    except DamagedError:
        return None  # whatever it protected, it says so no more: to take it away is what was asked for
