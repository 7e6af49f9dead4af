"""A near tier and a safe one: saves are committed on the fast tier, and copied to the durable one behind them.

What lies where, by the first name of a key:
  packs/, parts/, snapshots/   written to the fast tier; `ckpt.history.copying` brings them to the durable one, each
                               snapshot after everything it names; `ckpt.history.thinning` takes them off the fast one;
  everything else              (runs, heartbeats, pins, announcements) small and decisive. The durable tier is their
                               authority: written there first, read and listed there alone. The fast tier gets a copy,
                               so that the fence at each commit stands there too, and so that it can be read by itself.
A crash between the two leaves a document that the fast tier lacks, which nothing there depends on: who may write is
decided where all jobs meet, and two jobs may have different fast tiers but not different durable ones.

The fast tier is one place for all ranks of a job (a disk of the one node, a parallel file system): ranks find each
other's parts on it. Opening a run checks that, and refuses what is not (`ckpt.tenure`).
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from storage_backends.base import (
    Buffer,
    Entry,
    NotFound,
    Refused,
    StorageError,
    Store,
    Unavailable,
    check_key,
    check_prefix,
    check_range,
)
from storage_backends.copies import Slips, united, wrapped

T = TypeVar("T")

FAST, DURABLE = "fast", "durable"
BEHIND = ("packs/", "parts/", "snapshots/")
"""What is copied behind."""

KEEP_FAST = 2
"""Newest snapshots that stay on the fast tier: the one a restart wants, and the one before, should that be damaged."""

_MARK = "store.json"
_ADOPTED = ("runs/", "pins/")


class TieredStore:
    """Two tiers as one store.

    Args:
        fast: near, shared by all ranks; may vanish.
        durable: where the history lives.
        keep_fast: how many of the newest snapshots stay on the fast tier once they are on the durable one; None: all.

    A pair whose durable tier is still empty may have a fast one with a history (a folder that was used alone so far):
    its documents are brought over before the first one is written.
    """

    def __init__(self, fast: Store, durable: Store, *, keep_fast: int | None = KEEP_FAST) -> None:
        if fast.url == durable.url:
            raise Refused(f"tiered: {fast.url} is both tiers; a copy beside itself is none", store=fast.url, key="")
        if keep_fast is not None and keep_fast < 1:
            raise Refused(f"keep_fast={keep_fast!r}: expected at least 1, or None for all", store=fast.url, key="")
        self.fast = fast
        self.durable = durable
        self.keep_fast = keep_fast
        self.slips = Slips()
        self._lock = threading.Lock()
        self._adopted = False
        self._fast_fails = False

    @property
    def url(self) -> str:
        return f"tiered::{self.fast.url}|{self.durable.url}"

    @property
    def places(self) -> Mapping[str, Store]:
        return {FAST: self.fast, DURABLE: self.durable}

    @property
    def everywhere(self) -> bool:
        return False

    def copies(self, key: str) -> Mapping[str, Store]:
        """What is copied behind is asked of the nearest first, everything else of the authority. A fast tier that
        failed once is asked last from then on: each failure costs the whole deadline of its retries."""
        if key.startswith(BEHIND) and not self._fast_fails:
            return self.places
        return {DURABLE: self.durable, FAST: self.fast} if self._has_authority() else {FAST: self.fast}

    def over(self, wrap: Callable[[Store], Store]) -> Store:
        other = copy.copy(self)
        other.fast, other.durable = wrapped(self.fast, wrap), wrapped(self.durable, wrap)
        return other

    def put(self, key: str, data: Buffer) -> None:
        check_key(key, store=self.url)
        if not key.startswith(BEHIND):
            self._adopt()
            self.durable.put(key, data)
        self.fast.put(key, data)

    def get(self, key: str) -> bytes:
        check_key(key, store=self.url)
        return self._read(key, lambda tier: tier.get(key))

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        check_range(key, start, stop, store=self.url)
        return self._read(key, lambda tier: tier.get_range(key, start, stop))

    def list(self, prefix: str) -> Sequence[Entry]:
        check_prefix(prefix, store=self.url)
        authority = DURABLE if self._has_authority() else FAST
        if prefix and not prefix.startswith(BEHIND):
            return self.places[authority].list(prefix)
        listings = {name: tier.list(prefix) for name, tier in self.places.items()}
        behind = {name: [e for e in found if e.key.startswith(BEHIND)] for name, found in listings.items()}
        others = [entry for entry in listings[authority] if not entry.key.startswith(BEHIND)]
        return sorted((*united(behind), *others), key=lambda entry: entry.key)

    def delete(self, keys: Sequence[str]) -> None:
        """From both. If the durable tier fails, what is left there is listed still, so a prune does not go on, and is
        finished by the next; the fast one comes second, since losing that loses nothing."""
        for key in keys:
            check_key(key, store=self.url)
        self.durable.delete(keys)
        self.fast.delete(keys)

    def _read(self, key: str, ask: Callable[[Store], T]) -> T:
        """What the first tier gives that can: a fast tier that fails is not worth a restore."""
        failed: list[StorageError] = []
        for name, tier in self.copies(key).items():
            try:
                found = ask(tier)
            except StorageError as error:
                failed.append(error)
                if name == FAST and isinstance(error, Unavailable):
                    self._fast_fails = True
                continue
            if any(isinstance(error, Refused) for error in failed):
                self.slips.note(key)
            return found
        # "Not there" only where every tier says so: the one that fails may hold it.
        if said := [error for error in failed if not isinstance(error, NotFound)]:
            raise said[0]
        raise NotFound(f"{self.url}: {key} is not there", store=self.url, key=key)

    def _has_authority(self) -> bool:
        """Whether the durable tier is a store already. Until then the fast one speaks for both."""
        with self._lock:
            if self._adopted:
                return True
        try:
            self.durable.get_range(_MARK, 0, 1)
        except NotFound:
            return False
        with self._lock:
            self._adopted = True
        return True

    def _adopt(self) -> None:
        """Before the durable tier gets its first document: those that the fast one has, `store.json` last."""
        if self._has_authority():
            return
        for folder in _ADOPTED:
            for entry in self.fast.list(folder):
                self.durable.put(entry.key, self.fast.get(entry.key))
        try:
            mark = self.fast.get(_MARK)
        except NotFound:
            return
        self.durable.put(_MARK, mark)


def near(store: Store) -> Store:
    """Where a save is written and committed: the fast tier, or the store itself if it has none."""
    return store.fast if isinstance(store, TieredStore) else store
