"""Progress bars: what a verb is at, bytes, rate and the time it will take, on a terminal and nowhere else.

Verbs that work tell a `Watch` (`ckpt.progress`), or the store they work on is watched: what is read and written tells
by itself, and listings tell what there is to read.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from ckpt.format.key import Key
from ckpt.format.names import PARTS, PINS, RUNS, SNAPSHOTS, SnapshotId
from ckpt.history.catalog import History
from ckpt.history.keyed import key_of
from storage_backends.base import Buffer, Entry, StorageError, Store
from storage_backends.copies import wrapped

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

AFTER = 1.0
"""Seconds after which a bar is shown: what is done sooner needs none."""
DELETES = 256
"""Objects removed by one call, so that there is something to tell between two."""

Weigh = Callable[[Entry], int]


def documents(entry: Entry) -> int:
    """What a look at the history reads of a listed object (`ckpt.history.catalog.read_history`)."""
    return entry.size if entry.key.startswith((RUNS, SNAPSHOTS, PINS)) else 0


def parts_too(entry: Entry) -> int:
    """The same where every part is read as well."""
    return entry.size if entry.key.startswith(PARTS) else documents(entry)


def own_documents(history: History, id_: SnapshotId) -> int:
    """Bytes of one snapshot's document and its parts: what is read to know what is in it."""
    snapshot = history.snapshots.get(id_)
    if snapshot is None:
        return 0
    entry = history.entries.get(history.keys[id_])
    return sum(ref.length for ref in snapshot.parts) + (0 if entry is None else entry.size)


@contextlib.contextmanager
def bar(text: str, *, quiet: bool) -> Iterator[Bar]:
    """A bar that is there while the block runs, once that has taken `AFTER` seconds, and gone afterwards.

    Args:
        text: what is being done.
        quiet: never show it. It is never shown either where stdout or stderr is no terminal.
    """
    shown = Bar(text, quiet or not (sys.stderr.isatty() and sys.stdout.isatty()))
    try:
        yield shown
    finally:
        shown.end()


class Bar:
    """How far one piece of work has come. Told from any thread."""

    def __init__(self, text: str, quiet: bool) -> None:
        self._text = text
        self._quiet = quiet
        self._lock = threading.Lock()
        self._expected = self._done = 0
        self._listed: set[str] = set()
        self._over = False
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._timer: threading.Timer | None = None
        if not quiet:
            self._timer = threading.Timer(AFTER, self._show)
            self._timer.daemon = True
            self._timer.start()

    def expect(self, nbytes: int) -> None:
        with self._lock:
            self._expected += nbytes
            self._update()

    def listed(self, entries: Sequence[Entry], weigh: Weigh) -> None:
        """A listing shows what will be read; what was shown before is not expected twice."""
        with self._lock:
            new = [entry for entry in entries if entry.key not in self._listed]
            self._listed.update(entry.key for entry in new)
            self._expected += sum(map(weigh, new))
            self._update()

    def done(self, nbytes: int) -> None:
        with self._lock:
            if not self._over:  # a store may be watched for longer than by this bar
                self._done += nbytes
                self._update()

    def reads(self, store: Store, weigh: Weigh | None = None) -> Store:
        """`store`, whose reads this bar counts. `weigh`: the bytes that will be read of an object that a listing shows,
        if that listing is to count."""
        if self._quiet:
            return store
        return wrapped(store, lambda inner: _Watched(inner, self, weigh, writes=False))

    def writes(self, store: Store) -> Store:
        """`store`, whose puts and removals this bar counts; these by the bytes that come free."""
        if self._quiet:
            return store
        return wrapped(store, lambda inner: _Watched(inner, self, None, writes=True))

    def end(self) -> None:
        """Gone, as if it had never been there."""
        if self._timer is not None:
            self._timer.cancel()
        with self._lock:
            self._over = True
            if self._progress is not None:
                self._progress.stop()

    def _show(self) -> None:
        from rich.console import Console  # only where there is a terminal to show it on
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            SpinnerColumn,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        with self._lock:
            if self._over:
                return
            self._progress = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=24),
                DownloadColumn(),
                TransferSpeedColumn(),
                TimeRemainingColumn(),
                console=Console(file=sys.stderr),
                transient=True,
            )
            self._task = self._progress.add_task(self._text, total=None)
            self._update()
            self._progress.start()

    def _update(self) -> None:
        """Under the lock. Nothing was expected: nobody knows how much there is. Too little: the bar stays full."""
        if self._progress is not None and self._task is not None:
            total = max(self._expected, self._done) if self._expected else None
            self._progress.update(self._task, completed=self._done, total=total)


class _Watched:
    """A store that tells a bar what passes."""

    def __init__(self, inner: Store, bar: Bar, weigh: Weigh | None, *, writes: bool) -> None:
        self._inner = inner
        self._bar = bar
        self._weigh = weigh
        self._writes = writes
        self._sizes: dict[str, int] = {}

    @property
    def url(self) -> str:
        return self._inner.url

    @property
    def key(self) -> Key | None:
        return key_of(self._inner)

    def put(self, key: str, data: Buffer) -> None:
        self._inner.put(key, data)
        if self._writes:
            self._bar.done(memoryview(data).nbytes)

    def get(self, key: str) -> bytes:
        return self._read(self._inner.get(key))

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        return self._read(self._inner.get_range(key, start, stop))

    def _read(self, data: bytes) -> bytes:
        if not self._writes:
            self._bar.done(len(data))
        return data

    def list(self, prefix: str) -> Sequence[Entry]:
        entries = self._inner.list(prefix)
        if self._writes:
            self._sizes.update((entry.key, entry.size) for entry in entries)
        elif self._weigh is not None:
            self._bar.listed(entries, self._weigh)
        return entries

    def delete(self, keys: Sequence[str]) -> None:
        failed: StorageError | None = None
        for start in range(0, len(keys), DELETES):
            some = keys[start : start + DELETES]
            try:
                self._inner.delete(some)
            except StorageError as error:  # the others are removed all the same, as `Store.delete` promises
                failed = failed or error
            else:
                self._bar.done(sum(self._sizes.get(key, 0) for key in some) if self._writes else 0)
        if failed is not None:
            raise failed
