"""Private fsspec instances for `FsspecStore`, lent to one call at a time where a backend needs that."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from storage_backends.base import NotFound
from storage_backends.causes import meaning
from storage_backends.facts import FileSystem


class Instances:
    """Private instances of one backend: one for all threads, or one for each call in flight.

    An instance that failed is closed where each call has its own: its connection may be what broke, and the next
    attempt then opens another. After a fork the child makes its own: neither sockets nor event loops survive it.
    """

    def __init__(self, make: Callable[[], FileSystem], *, shared: bool, close: Callable[[FileSystem], None]) -> None:
        self._make = make
        self._close = close
        self._shared = shared
        self._lock = threading.Lock()
        self._idle: list[FileSystem] = []
        self._inherited: list[FileSystem] = []
        self._pid = os.getpid()

    @contextmanager
    def borrowed(self) -> Iterator[FileSystem]:
        if self._pid != os.getpid():
            # Kept, not dropped: an instance that is collected says goodbye on a connection that is its parent's too.
            self._inherited += self._idle
            self._lock, self._idle, self._pid = threading.Lock(), [], os.getpid()
        if self._shared:
            with self._lock:
                if not self._idle:
                    self._idle.append(self._make())
            yield self._idle[0]
            return
        with self._lock:
            fs = self._idle.pop() if self._idle else None
        if fs is None:
            fs = self._make()
        try:
            yield fs
        except Exception as error:
            if meaning(error) is NotFound:
                self._give_back(fs)
            else:
                with suppress(Exception):  # the first error is the one to tell
                    self._close(fs)
            raise
        self._give_back(fs)

    def _give_back(self, fs: FileSystem) -> None:
        with self._lock:
            self._idle.append(fs)
