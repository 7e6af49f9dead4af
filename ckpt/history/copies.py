"""Reading where a store holds copies: the next one if a digest does not match, and mending the bad one later.

Stores know no digests, so they cannot choose between copies; whoever checks what was read comes here. A read never
writes. What it found is mended afterwards, in one go (`mend`): the good bytes are put over the bad ones, and since
every object but a heartbeat is written once, that can be repeated, and done by several at a time, without harm. A crash
  before a put  leaves a bad copy that the next read finds again;
  after it      leaves a good one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from ckpt.errors import DamagedError
from ckpt.format.intact import flaw
from ckpt.format.manifest import digest128
from ckpt.format.names import ALIVE, PRUNES
from storage_backends.base import NotFound, StorageError, Store
from storage_backends.copies import Copied, each_copy

T = TypeVar("T")

log = logging.getLogger("ckpt")


def read(store: Store, key: str, decode: Callable[[bytes], T]) -> T:
    """``decode(store.get(key))``, of the first copy in which `decode` finds no damage.

    Raises:
        NotFound, StorageError: as `Store.get`.
        DamagedError: what `decode` said of the first copy; no other is better.
    """
    return checked(store, key, store.get(key), decode)


def checked(store: Store, key: str, data: bytes, decode: Callable[[bytes], T]) -> T:
    """The same for an object whose first copy has been read already."""
    try:
        return decode(data)
    except DamagedError:
        if not isinstance(store, Copied):
            raise
        for keeper, place in each_copy(store, key):
            try:
                other = place.get(key)
                value = decode(other)
            except (StorageError, DamagedError):
                continue
            keeper.slips.note(key, digest128(other))
            return value
        raise


@dataclass(frozen=True, slots=True)
class Mended:
    """A copy of `key` that was bad and is good again. `place`: its name, `url`: where that is; `flaw`: what it was."""

    key: str
    place: str
    url: str
    flaw: str

    def __str__(self) -> str:
        return f"{self.key}: mended on {self.url}, where {self.flaw}"


def mend(store: Store) -> list[Mended]:
    """Mend every copy that reads of this process found to be bad, as far as it can be done now; each is logged.

    Never raises `StorageError`: whoever read has what it wanted, and a read-only place must not spoil that.
    """
    if not isinstance(store, Copied):
        return []
    mended = [one for place in store.places.values() for one in mend(place)]
    if not (found := store.slips.take()):
        return mended
    deeper = len(mended)
    try:
        if store.list(PRUNES):
            # What is missing somewhere may be about to go everywhere, and would be brought back.
            for key, digest in found.items():
                store.slips.note(key, digest)
            return mended
        for key, digest in found.items():
            mended += mend_one(store, key, digest)
    except StorageError as error:
        log.warning("a bad copy was not mended: %s", error)
    for one in mended[deeper:]:
        log.warning("%s", one)
    return mended


@contextmanager
def mending(store: Store) -> Iterator[None]:
    """Reads, and after them what they found is mended, however they ended."""
    try:
        yield
    finally:
        mend(store)


def mend_one(store: Copied, key: str, digest: str | None = None) -> list[Mended]:
    """Mend all copies of `key` that differ from the good one, if there is exactly one kind of good one.

    Args:
        digest: xxh3-128 of the whole good object, where something names it.

    Raises:
        StorageError: a place could not be read or written, other than by lacking the object.
    """
    if key.startswith(ALIVE):
        return []  # the next beat mends it, and copies of different beats are no damage
    held = {name: _held(place, key) for name, place in store.places.items()}
    flaws = {name: flaw_of(key, data, digest) for name, data in held.items() if not isinstance(data, StorageError)}
    good = {data for name, data in held.items() if isinstance(data, bytes) and flaws[name] is None}
    if len(good) != 1:
        return []
    mended: list[Mended] = []
    for name, found in flaws.items():
        if found is None or (held[name] is None and not store.everywhere):
            continue
        place = store.places[name]
        place.put(key, *good)
        mended.append(Mended(key, name, place.url, found))
    return mended


def flaw_of(key: str, data: bytes | None, digest: str | None = None) -> str | None:
    """What is wrong with one copy (None: it is not there), by its own bytes and by the digest that something names."""
    if data is None:
        return "it was not there"
    if digest is not None and (found := digest128(data)) != digest:
        return f"expected digest {digest}, found {found}"
    return flaw(key, data)


def _held(place: Store, key: str) -> bytes | StorageError | None:
    """One copy: its bytes, None if it is not there, or why that could not be found out."""
    try:
        return place.get(key)
    except NotFound:
        return None
    except StorageError as error:
        return error
