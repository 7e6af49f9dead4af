"""A store in this process's memory, owned by one object: what tests and simulations stand on.

Not fsspec's ``memory://``, whose objects are shared by everything in the process: two stores here never meet.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from storage_backends.base import (
    Buffer,
    Entry,
    NotFound,
    check_key,
    check_prefix,
    check_range,
    past_the_end,
)


class MemoryStore:
    """Every promise of `Store` under one lock. Dies with the object, so "durable on return" means as long as it lives.

    Args:
        name: shown in messages.
        wall: where modification times come from (POSIX seconds).
    """

    def __init__(self, name: str = "memory", *, wall: Callable[[], float] = time.time) -> None:
        self._name = name
        self._wall = wall
        self._lock = threading.Lock()
        self._objects: dict[str, tuple[bytes, float]] = {}

    @property
    def url(self) -> str:
        """A name for messages; no URL opens this store again."""
        return f"memory-store:{self._name}"

    def put(self, key: str, data: Buffer) -> None:
        check_key(key, store=self.url)
        # Copied before the lock is taken: the caller may reuse its buffer, and a large copy must not hold up readers.
        whole = bytes(data)
        with self._lock:
            self._objects[key] = (whole, self._wall())

    def get(self, key: str) -> bytes:
        check_key(key, store=self.url)
        with self._lock:
            found = self._objects.get(key)
        if found is None:
            raise NotFound(f"{self.url}: {key} is not there", store=self.url, key=key)
        return found[0]

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        check_range(key, start, stop, store=self.url)
        whole = self.get(key)
        if stop > len(whole):
            raise past_the_end(key, start, stop, len(whole), store=self.url)
        return whole[start:stop]

    def list(self, prefix: str) -> Sequence[Entry]:
        check_prefix(prefix, store=self.url)
        with self._lock:
            found = [Entry(k, len(data), at) for k, (data, at) in self._objects.items() if k.startswith(prefix)]
        return sorted(found, key=lambda entry: entry.key)

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            check_key(key, store=self.url)
        with self._lock:
            for key in keys:
                self._objects.pop(key, None)
