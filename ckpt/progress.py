"""How far long work has come: what workers tell, and the one line that a training shows while it waits."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Protocol


class Watch(Protocol):
    """Whoever wants to know how far a piece of work has come. Told from any thread."""

    def expect(self, nbytes: int) -> None:
        """So many bytes more are to come."""

    def done(self, nbytes: int) -> None:
        """So many bytes more are done."""


class Unwatched:
    """Nobody wants to know."""

    def expect(self, nbytes: int) -> None: ...

    def done(self, nbytes: int) -> None: ...


UNWATCHED = Unwatched()


@contextlib.contextmanager
def waiting(text: str, *, after: float = 1.0) -> Iterator[None]:
    """Show `text` with a spinner and the time passed, on stderr, while the block runs longer than `after` seconds."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console  # only where there is a terminal to show it on
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    done = threading.Event()

    def show() -> None:
        if done.wait(after):
            return
        columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            progress.add_task(text, total=None)
            done.wait()

    thread = threading.Thread(target=show, name="ckpt-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
