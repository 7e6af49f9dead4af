"""A store whose documents are encrypted on their way out and opened on their way in.

Who writes and reads documents above it knows nothing of it: so none can be written in the clear by mistake, and none
that nobody with the key wrote is believed. Packs pass as they are: their blobs are sealed and opened one by one, where
they are made and fetched (`key_of`), and a pack without its mark is not let through.

The place of a key is in store.json, the one object that is always in the clear. Before the first call is passed on it
is compared with the key at hand: nothing is read or written with a wrong one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

from ckpt.errors import DamagedError, WrongKey
from ckpt.format.key import Key, Unopened, read_key
from ckpt.format.manifest import StoreDoc, unseal
from ckpt.format.names import PACKS, STORE_KEY
from ckpt.format.pack import sealed_with
from storage_backends import open_store
from storage_backends.base import Buffer, Entry, NotFound, Refused, Store, past_the_end
from storage_backends.copies import Copied, wrapped

KeyName = str | os.PathLike[str]


class KeyedStore:
    """A store behind a key; see above. Sizes in listings are those of what `get` returns."""

    def __init__(self, store: Store, key: Key) -> None:
        self.key = key
        self._store = store
        self._looked = False

    @property
    def url(self) -> str:
        return self._store.url

    def put(self, key: str, data: Buffer) -> None:
        self._look()
        if isinstance(data, Unopened):
            raise Refused(f"{self.url}: {key} could not be opened, so it cannot be copied", store=self.url, key=key)
        if key.startswith(PACKS):
            if sealed_with(data) != self.key.id:
                text = f"{self.url}: {key} is not encrypted with key {self.key.id}; it is not stored in the clear"
                raise Refused(text, store=self.url, key=key)
        elif key != STORE_KEY:
            data = self.key.seal(bytes(data), key)
        self._store.put(key, data)

    def get(self, key: str) -> bytes:
        """A document's text; of one that cannot be opened `Unopened`, for the decoder to tell."""
        self._look()
        data = self._store.get(key)
        return data if _plain(key) else self.key.open(data, key)

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        self._look()
        if _plain(key):
            return self._store.get_range(key, start, stop)
        text = self.get(key)
        if isinstance(text, Unopened):
            raise Refused(f"{self.url}: {key}: expected {text.expected}, found {text.found}", store=self.url, key=key)
        if not 0 <= start <= stop <= len(text):
            raise past_the_end(key, start, stop, len(text), store=self.url)
        return text[start:stop]

    def list(self, prefix: str) -> Sequence[Entry]:
        self._look()
        return [e if _plain(e.key) else replace(e, size=self._text_size(e)) for e in self._store.list(prefix)]

    def delete(self, keys: Sequence[str]) -> None:
        self._look()
        self._store.delete(keys)

    def below(self, wrap: Callable[[Store], Store]) -> KeyedStore:
        """The same above a wrapper: limits count stored bytes."""
        return KeyedStore(wrap(self._store), self.key)

    def _text_size(self, entry: Entry) -> int:
        return max(entry.size - self.key.overhead(entry.key), 0)

    def _look(self) -> None:
        if not self._looked:  # no lock: two threads may both look, and none waits for another one's deadline
            check_key(self._store, self.key)
            self._looked = True


def store_at(url: KeyName | Store, key: KeyName | Key | None = None) -> Store:
    """The store that a user names, behind the key that is named: what every function of the public surface opens.

    Raises:
        Refused: the URL makes no sense.
        ValueError: the key makes none.
    """
    return with_key(url if isinstance(url, Store) else open_store(url), key)


def with_key(store: Store, key: KeyName | Key | None) -> Store:
    """`store` behind the key of this name (see `read_key`); as it is, if there is none.

    Raises:
        ValueError: there is no such key, or encryption is not installed.
    """
    if key is None:
        return store
    found = key if isinstance(key, Key) else read_key(key)
    return wrapped(store, lambda place: KeyedStore(place, found))


@runtime_checkable
class Keyed(Protocol):
    """A `Store` behind a key; or a wrapper around one, which must say so, since blobs are opened above it."""

    @property
    def key(self) -> Key | None:
        """The key, or None."""
        ...


def key_of(store: Store) -> Key | None:
    """The key that `store` is behind."""
    while isinstance(store, Copied):
        store = next(iter(store.places.values()))
    return store.key if isinstance(store, Keyed) else None


def key_id(store: Store) -> str | None:
    """Which key the store's mark asks for. Raises StorageError."""
    mark = _mark(store)
    return None if mark is None else mark.key_id


def check_key(store: Store, key: Key | None) -> None:
    """Compare a key, or that there is none, with what the store's mark says. A store without one, or with one that
    cannot be read, says nothing: then each document speaks for itself.

    Raises:
        WrongKey: they differ.
        StorageError: the store does not answer.
    """
    mark = _mark(store)
    if mark is not None:
        check_mark(mark, store.url, key)


def _mark(store: Store) -> StoreDoc | None:
    try:
        return unseal(store.get(STORE_KEY), StoreDoc, key=STORE_KEY)
    except (NotFound, DamagedError):
        return None


def check_mark(mark: StoreDoc, url: str, key: Key | None) -> None:
    """Raises WrongKey where the mark of the store at `url` asks for another key, for one, or for none."""
    found = None if key is None else key.id
    if mark.key_id == found:
        return
    if mark.key_id is None:
        text = f"{url}: this store is not encrypted, and key {found} was given; leave key out, or give another URL"
    elif found is None:
        text = (
            f"{url}: this store is encrypted with key {mark.key_id}, and none was given; pass "
            "Options(key=…), key=… or --key: a file, or env:NAME"
        )
    else:
        text = f"{url}: this store is encrypted with key {mark.key_id}, and key {found} was given; give the right one"
    raise WrongKey(text, expected=mark.key_id, found=found)


def _plain(key: str) -> bool:
    """Whether an object is handed through as it is."""
    return key == STORE_KEY or key.startswith(PACKS)
