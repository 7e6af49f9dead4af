"""A fan-out's places are brought level: what one missed while it was away, and what it lacks for any other reason.

Whoever wrote an object that a place missed remembers it and makes up for it once the place answers. What nobody
remembers (the process ended first, a disk was replaced) rank 0 finds at the start of a job, by comparing listings.
Snapshots come last, so that a place read by itself never lists one that lacks something.
"""

from __future__ import annotations

import contextlib
from functools import partial

from ckpt.errors import DamagedError
from ckpt.format.intact import flaw
from ckpt.format.manifest import PruneDoc, unseal
from ckpt.format.names import ALIVE, PACKS, PARTS, PRUNES, SNAPSHOTS, RunId
from ckpt.history.copies import mend_one, read
from storage_backends.base import Entry, NotFound, StorageError, Store
from storage_backends.fanout import FanoutStore


class Levelling:
    """The chore of one rank (`ckpt.history.copier`). `first`: it also compares the listings, once."""

    def __init__(self, store: FanoutStore, *, first: bool) -> None:
        self._store = store
        self._compare = first

    def catch_up(self, run: RunId) -> str | None:  # noqa: ARG002 - what is missing is missing whoever writes now
        """Bring the places level as far as they answer.

        Returns: which places do not answer, or lack what cannot be given to them; None if all are level.

        Raises:
            StorageError: a place failed in between; the next pass goes on.
        """
        for name in self._store.away():
            try:
                self._store.places[name].list(ALIVE)
            except StorageError as error:
                return f"{self._store.places[name].url} does not answer: {error}"
            self._store.answers(name)
        for key, names in self._store.missed().items():
            self._make_up(key, names)
        if self._compare:
            for key in uneven(self._store):
                mend_one(self._store, key)
            self._compare = False
        return None

    def _make_up(self, key: str, names: tuple[str, ...]) -> None:
        data = None if key.startswith(ALIVE) else self._whole(key, names)  # the next beat goes everywhere
        if data is not None:
            for name in names:
                self._store.places[name].put(key, data)
                if key not in self._store.missed():  # removed everywhere meanwhile, by another thread
                    self._store.places[name].delete([key])
        # Without a whole copy anywhere it is gone, or a reader will say so.
        self._store.caught_up(key, names)

    def _whole(self, key: str, behind: tuple[str, ...]) -> bytes | None:
        """The bytes of `key` from a place that has it whole."""
        for name, place in self._store.places.items():
            if name not in behind:
                with contextlib.suppress(NotFound):
                    data = place.get(key)
                    if flaw(key, data) is None:
                        return data
        return None


def uneven(store: FanoutStore) -> list[str]:
    """Keys of which some place lacks a copy, or has one of another size, in the order of writing. Heartbeats and what a
    prune has announced are left out: the one changes all the time, the other is about to go everywhere.

    Raises:
        StorageError: a place could not be listed: then nothing can be said.
    """
    doomed = announced_keys(store)
    held: dict[str, list[Entry]] = {}
    for place in store.places.values():
        for entry in place.list(""):
            held.setdefault(entry.key, []).append(entry)
    found = [
        key
        for key, copies in held.items()
        if (len(copies) < len(store.places) or len({entry.size for entry in copies}) > 1)
        and key not in doomed
        and not key.startswith((ALIVE, PRUNES))
    ]
    return sorted(found, key=writing_order)


def announced_keys(store: Store) -> set[str]:
    """What prunes are about to remove: some places may lack it already. Raises StorageError."""
    doomed: set[str] = set()
    for entry in store.list(PRUNES):
        with contextlib.suppress(NotFound, DamagedError):
            doomed |= {*read(store, entry.key, partial(unseal, kind=PruneDoc, key=entry.key)).keys}
    return doomed


def writing_order(key: str) -> tuple[bool, bool, str]:
    """Sorts what a snapshot names before it: packs and parts, then other documents, then snapshots."""
    return key.startswith(SNAPSHOTS), not key.startswith((PACKS, PARTS)), key
