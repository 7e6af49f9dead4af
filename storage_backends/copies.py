"""What is known of stores that keep an object in several places: where, and which copies turned out bad.

A store moves bytes and knows no digests. So whoever reads and checks them says which copy was bad (`Slips`), asks the
other places itself, and mends later, in one go and off the path of the read (`ckpt.history.copies`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol, runtime_checkable

from storage_backends.base import Entry, Store


class Slips:
    """Keys of which some copy could not be read, or was not what was written. Safe from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[str, str | None] = {}

    def note(self, key: str, digest: str | None = None) -> None:
        """A copy of `key` is bad. `digest`: xxh3-128 of the whole good object, where the reader knows it."""
        with self._lock:
            self._found[key] = digest or self._found.get(key)

    def take(self) -> dict[str, str | None]:
        """Everything noted since the last time: key → digest, if one was given."""
        with self._lock:
            found, self._found = self._found, {}
        return found


@runtime_checkable
class Copied(Store, Protocol):
    """A store that declares that it holds copies of its objects."""

    @property
    def places(self) -> Mapping[str, Store]:
        """Name → place, nearest first. Each is a store by itself."""
        ...

    @property
    def slips(self) -> Slips:
        """What reads found wrong with single copies."""
        ...

    @property
    def everywhere(self) -> bool:
        """Whether every place should hold every object: then one that lacks it has lost it."""
        ...

    def copies(self, key: str) -> Mapping[str, Store]:
        """The places that should hold a copy of `key`, the one that `Store.get` asks first in front."""
        ...

    def over(self, wrap: Callable[[Store], Store]) -> Store:
        """The same store with every place wrapped: limits and encryption belong under the copies, where a copy that
        fails alone is noticed alone. What is known of the copies (`slips`, what a place lacks) both know."""
        ...


def each_copy(store: Copied, key: str) -> Iterator[tuple[Copied, Store]]:
    """Every single copy of `key`, with the store that keeps it beside others: a durable tier may be several places."""
    for place in store.copies(key).values():
        if isinstance(place, Copied):
            yield from each_copy(place, key)
        else:
            yield store, place


def wrapped(store: Store, wrap: Callable[[Store], Store]) -> Store:
    """`store` behind a wrapper; of a store of several places, each place behind one of its own."""
    return store.over(wrap) if isinstance(store, Copied) else wrap(store)


def united(listings: Mapping[str, Sequence[Entry]]) -> Sequence[Entry]:
    """One listing of several: every key once, sorted, with the places that have it.

    Of sizes and times the largest: a copy that was cut short must not hide a whole one, and an object is as young as
    its youngest copy, since ages decide what a prune may sweep.
    """
    found: dict[str, Entry] = {}
    for name, entries in listings.items():
        for entry in entries:
            before = found.get(entry.key)
            if before is None:
                found[entry.key] = Entry(entry.key, entry.size, entry.mtime, (name,))
                continue
            times = [time for time in (before.mtime, entry.mtime) if time is not None]
            found[entry.key] = Entry(
                entry.key, max(before.size, entry.size), max(times, default=None), (*before.places, name)
            )
    return [found[key] for key in sorted(found)]
