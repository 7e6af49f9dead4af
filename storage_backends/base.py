"""The storage contract: five verbs, each a promise. Every backend inherits the tests of these promises.

Keys are relative, '/'-separated ASCII names such as ``packs/000001-0badcafe/…``; `check_key` refuses everything else,
so no key can leave the store's root. Faults, retries, limits and tiers are wrappers that are stores themselves.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

Buffer: TypeAlias = bytes | bytearray | memoryview


class StorageError(Exception):
    """A store could not do what was asked. Says which store, which key, and what was tried.

    Attributes:
        store: URL of the store.
        key: the key or prefix concerned.
        attempts: how often it was tried.
        seconds: time spent on all attempts.
        held: how many of these seconds a limit that the user set held it back; no deadline counts them.
    """

    held = 0.0

    def __init__(self, message: str, *, store: str, key: str, attempts: int = 1, seconds: float = 0.0) -> None:
        super().__init__(message)
        self.store = store
        self.key = key
        self.attempts = attempts
        self.seconds = seconds


class NotFound(StorageError):  # noqa: N818 - a name of the public surface
    """The object is not there, and the store was able to say so."""


class Unavailable(StorageError):  # noqa: N818
    """Timeouts, throttling, resets, short reads: worth trying again; when a user sees it, it has been."""


class Throttled(Unavailable):
    """The store asks to be asked less often. Nothing that a user does differently for it; our own traffic does."""


class Refused(StorageError):  # noqa: N818
    """Permission, no space, read-only, a bad key: trying again does not help."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One listed object: key, size in bytes, and the store's own modification time (POSIX seconds), if it has one.

    `places`: of a store that keeps objects in several places, the names of those that listed it; else nothing."""

    key: str
    size: int
    mtime: float | None
    places: tuple[str, ...] = ()


@runtime_checkable
class Store(Protocol):
    """Where objects live. Safe to use from several threads. Nothing above this floor knows which one it is.

    Every method raises only `StorageError` and its children for what the store does wrong.
    """

    @property
    def url(self) -> str:
        """What a user would type to open this store; holds no secrets."""
        ...

    def put(self, key: str, data: Buffer) -> None:
        """Write the whole object, replacing an older one. All or nothing: a reader sees the old object, or the whole
        new one. Durable on return. A put that raised may still have landed, or land later."""
        ...

    def get(self, key: str) -> bytes:
        """The whole object. Raises `NotFound` if it is absent."""
        ...

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        """Exactly ``stop - start`` bytes from byte `start`, or an error; never fewer. An object that ends before
        `stop` is `Refused` (it will not grow); an absent one is `NotFound`."""
        ...

    def list(self, prefix: str) -> Sequence[Entry]:
        """Every object whose key starts with `prefix` ("" or a folder ending in "/"), at any depth, sorted by key.
        Looks at the store itself, never at a cache. No objects is an empty list; "could not list" is an error, never
        an empty list. Names of half-written objects never appear."""
        ...

    def delete(self, keys: Sequence[str]) -> None:
        """Remove these objects, in bulk or in parallel where the store can. Removing an absent object is not an
        error. If some could not be removed, the others are, and the error names how many and the first."""
        ...


MAX_WHOLE = 1 << 30
"""Bytes of the largest object that is read whole: a part. Nothing is ever put that is larger, but a file that somebody
laid there may claim any length, for nothing (a sparse one)."""

_KEY = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*")
MAX_KEY = 512


def is_key(key: str) -> bool:
    """Whether `check_key` would accept it: what else lies on a store is not an object of ours, and is not listed."""
    return len(key) <= MAX_KEY and _KEY.fullmatch(key) is not None


def check_key(key: str, *, store: str) -> None:
    """Refuse a key that could leave the store's root, collide with temporary names, or be read two ways.

    Raises:
        Refused: the key is not of the form ``name/name/…`` with names of letters, digits, '.', '_', '-' that do not
            start with a dot.
    """
    if not is_key(key):
        raise Refused(f"{store}: {key[:80]!r} is not a valid object name; expected name/name/…", store=store, key=key)


def check_prefix(prefix: str, *, store: str) -> None:
    """Like `check_key`, for what `Store.list` accepts: "" or a folder ending in "/"."""
    if prefix:
        if not prefix.endswith("/"):
            raise Refused(f"{store}: list prefix {prefix[:80]!r} must end in '/'", store=store, key=prefix)
        check_key(prefix[:-1], store=store)


def check_range(key: str, start: int, stop: int, *, store: str) -> None:
    """Refuse a range that runs backwards or starts before the object (backends read negative starts differently)."""
    check_key(key, store=store)
    if not 0 <= start <= stop:
        raise Refused(
            f"{store}: {key} has no bytes {start} to {stop}; expected 0 <= start <= stop", store=store, key=key
        )


def past_the_end(key: str, start: int, stop: int, size: int, *, store: str) -> Refused:
    """The error for a range that an object is too short for."""
    asked = f"{store}: {key} was asked for bytes {start} to {stop} and holds only {size}"
    return Refused(f"{asked}: it is cut short, or another object", store=store, key=key)


def most_hopeful(errors: Iterable[StorageError]) -> type[StorageError]:
    """What several failures are together: `Unavailable` if trying again may help any of them (`Throttled`, if only at
    a slower pace), else `Refused`."""
    found = list(errors)
    kinds = (kind for kind in (Throttled, Unavailable) if any(isinstance(error, kind) for error in found))
    return next(kinds, Refused)


def delete_failed(failures: Sequence[tuple[str, StorageError]], asked: int, *, store: str) -> StorageError:
    """One error for the keys of a `Store.delete` that are still there."""
    first, cause = failures[0]
    kind = most_hopeful(error for _, error in failures)
    message = f"{store}: {len(failures)} of {asked} objects could not be removed, first {first}: {cause}"
    return kind(message, store=store, key=first)
