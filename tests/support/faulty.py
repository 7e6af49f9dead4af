"""Stores that go wrong on purpose. Each wraps a store and is one; each counts what it did; none sleeps.

A test that expects a fault must check that it `fired`: a fault that never fires proves nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from storage_backends.base import Buffer, Entry, Refused, StorageError, Store, Unavailable

T = TypeVar("T")

VERBS = frozenset({"put", "get", "get_range", "list", "delete"})
WRITES = frozenset({"put", "delete"})


class Crash(BaseException):
    """The process is gone: no `except Exception` outlives it, and the dead make no more calls."""


class FaultyStore:
    """Fails the n-th call (from 1) among those of `verbs` on keys that `where` accepts.

    A delete counts, fails and lands key by key, so that a crash can fall between any two of its removals. The other
    keys of a delete that merely fails are still removed, as `Store.delete` promises.

    Args:
        fail_at: the call that fails, with `error`; None: none does.
        crash_at: the call in which the process dies; it and every later call, counted or not, raises `Crash`.
        error: what `fail_at` raises.
        for_ever: all later matching calls fail too.
        lands: the write of the failing call is done before the error. Both are true of real stores: try both.

    Attributes:
        calls: every call made, as (verb, key), in order. The key of a list is its prefix.
        fired: whether the fault has happened.
        struck: the call at which it happened first, as in `calls`.
    """

    def __init__(
        self,
        inner: Store,
        *,
        fail_at: int | None = None,
        crash_at: int | None = None,
        error: type[Unavailable] | type[Refused] = Unavailable,
        for_ever: bool = False,
        lands: bool = False,
        verbs: frozenset[str] = VERBS,
        where: Callable[[str], bool] = lambda key: True,
    ) -> None:
        if fail_at is not None and crash_at is not None:
            raise ValueError("fail_at and crash_at exclude each other")
        self._inner = inner
        self._at = crash_at if crash_at is not None else fail_at
        self._crashes = crash_at is not None
        self._error = error
        self._for_ever = for_ever
        self._lands = lands
        self._verbs = verbs
        self._where = where
        self._lock = threading.Lock()
        self._counted = 0
        self._dead = False
        self.calls: list[tuple[str, str]] = []
        self.fired = False
        self.struck: tuple[str, str] | None = None

    @property
    def url(self) -> str:
        return self._inner.url

    def survived(self) -> Store:
        """The store as the next process finds it."""
        return self._inner

    def count(self, *verbs: str) -> int:
        """How many calls of these verbs were made."""
        return sum(verb in verbs for verb, _ in self.calls)

    def put(self, key: str, data: Buffer) -> None:
        self._call("put", key, lambda: self._inner.put(key, data))

    def get(self, key: str) -> bytes:
        return self._call("get", key, lambda: self._inner.get(key))

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        return self._call("get_range", key, lambda: self._inner.get_range(key, start, stop))

    def list(self, prefix: str) -> Sequence[Entry]:
        return self._call("list", prefix, lambda: self._inner.list(prefix))

    def delete(self, keys: Sequence[str]) -> None:
        failed: StorageError | None = None
        for key in keys:
            try:
                self._call("delete", key, partial(self._inner.delete, [key]))
            except StorageError as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def _call(self, verb: str, key: str, do: Callable[[], T]) -> T:
        if not self._fails(verb, key):
            return do()
        if self._lands and verb in WRITES:
            do()
        if self._crashes:
            raise Crash(f"crashed in {verb} {key}")
        raise self._error(f"{self.url}: {verb} of {key} failed on purpose", store=self.url, key=key)

    def _fails(self, verb: str, key: str) -> bool:
        with self._lock:
            if self._dead:
                raise Crash(f"{verb} {key} after the crash")
            self.calls.append((verb, key))
            if self._at is None or verb not in self._verbs or not self._where(key):
                return False
            self._counted += 1
            if self._counted != self._at and not (self._for_ever and self._counted > self._at):
                return False
            self.fired = True
            self.struck = self.struck or (verb, key)
            self._dead = self._crashes
            return True


class LaggingStore:
    """A listing shows an object only once it is older than `lag`, on the clock `now`. Reads and writes are at once.

    Put through it, that is: what the inner store held before is listed at once. An overwritten object stays listed.
    """

    def __init__(self, inner: Store, *, lag: float, now: Callable[[], float]) -> None:
        self._inner = inner
        self._lag = lag
        self._now = now
        self._lock = threading.Lock()
        self._born: dict[str, float] = {}
        self.hidden = 0

    @property
    def url(self) -> str:
        return self._inner.url

    def put(self, key: str, data: Buffer) -> None:
        with self._lock:
            self._born.setdefault(key, self._now())
        self._inner.put(key, data)

    def get(self, key: str) -> bytes:
        return self._inner.get(key)

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        return self._inner.get_range(key, start, stop)

    def list(self, prefix: str) -> Sequence[Entry]:
        entries = self._inner.list(prefix)
        with self._lock:
            horizon = self._now() - self._lag
            seen = [entry for entry in entries if self._born.get(entry.key, horizon) <= horizon]
            self.hidden += len(entries) - len(seen)
        return seen

    def delete(self, keys: Sequence[str]) -> None:
        self._inner.delete(keys)
        with self._lock:
            for key in keys:
                self._born.pop(key, None)


class _Watched:
    """Passes every call on, after a look at it (`_before`)."""

    _inner: Store

    def _before(self, verb: str, key: str) -> None:
        raise NotImplementedError

    @property
    def url(self) -> str:
        return self._inner.url

    def put(self, key: str, data: Buffer) -> None:
        self._before("put", key)
        self._inner.put(key, data)

    def get(self, key: str) -> bytes:
        self._before("get", key)
        return self._inner.get(key)

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        self._before("get_range", key)
        return self._inner.get_range(key, start, stop)

    def list(self, prefix: str) -> Sequence[Entry]:
        self._before("list", prefix)
        return self._inner.list(prefix)

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._before("delete", key)
        self._inner.delete(keys)


class GateStore(_Watched):
    """Calls of `verbs` on keys that `where` accepts wait at a gate, before they touch the inner store.

    Attributes:
        arrived: set once a call has reached the closed gate; wait on it instead of sleeping.
        gate: closed at first; `gate.set()` opens it for all, `gate.clear()` closes it again.
    """

    def __init__(
        self, inner: Store, *, verbs: frozenset[str] = WRITES, where: Callable[[str], bool] = lambda key: True
    ) -> None:
        self._inner = inner
        self._verbs = verbs
        self._where = where
        self.arrived = threading.Event()
        self.gate = threading.Event()

    def _before(self, verb: str, key: str) -> None:
        if verb in self._verbs and self._where(key) and not self.gate.is_set():
            self.arrived.set()
            # A test that forgets to open the gate fails with this message rather than with a stack dump.
            if not self.gate.wait(timeout=60):
                raise AssertionError(f"nobody opened the gate for {verb} {key}")


class SizedStore:
    """A disk that is full after `capacity` bytes: a put beyond it is `Refused` and leaves the old object.

    Attributes:
        capacity: may be raised (or lowered) by the test at any time.
        refused: puts that did not fit.
    """

    def __init__(self, inner: Store, *, capacity: int) -> None:
        self._inner = inner
        self._lock = threading.Lock()
        self.capacity = capacity
        self.refused = 0

    @property
    def url(self) -> str:
        return self._inner.url

    @property
    def used(self) -> int:
        """Bytes that the inner store holds."""
        return sum(entry.size for entry in self._inner.list(""))

    def put(self, key: str, data: Buffer) -> None:
        with self._lock:
            others = sum(entry.size for entry in self._inner.list("") if entry.key != key)
            if others + memoryview(data).nbytes > self.capacity:
                self.refused += 1
                raise Refused(f"{self.url}: no space left on device for {key}", store=self.url, key=key)
            self._inner.put(key, data)

    def get(self, key: str) -> bytes:
        return self._inner.get(key)

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        return self._inner.get_range(key, start, stop)

    def list(self, prefix: str) -> Sequence[Entry]:
        return self._inner.list(prefix)

    def delete(self, keys: Sequence[str]) -> None:
        self._inner.delete(keys)


class SwitchStore(_Watched):
    """Calls of one verb on keys with one prefix fail from `fail()` until `heal()`; counts every call."""

    def __init__(self, inner: Store) -> None:
        self._inner = inner
        self._fault: tuple[type[Unavailable] | type[Refused], str, str] | None = None
        self.calls: list[tuple[str, str]] = []

    def fail(self, error: type[Unavailable] | type[Refused], *, verb: str, key: str = "") -> None:
        self._fault = (error, verb, key)

    def heal(self) -> None:
        self._fault = None

    def _before(self, verb: str, key: str) -> None:
        self.calls.append((verb, key))
        if self._fault is not None and verb == self._fault[1] and key.startswith(self._fault[2]):
            raise self._fault[0](f"{self.url}: {verb} of {key} failed on purpose", store=self.url, key=key)
