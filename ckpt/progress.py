"""One line that says what a long wait is for; only on a terminal, and only once it has been a second."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator


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
