"""SIGTERM, noticed: a job that is asked to end finishes its step, saves, and leaves.

The handler only sets a plain attribute. A `threading.Event` would take a lock, and a second SIGTERM that arrives while
the main thread is inside that lock would wait for itself.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeAlias

_Action: TypeAlias = Callable[[int, FrameType | None], Any] | int | signal.Handlers | None


class Stopping:
    """Whether this process was asked to stop. Made on the main thread it listens for SIGTERM until `restore()`.

    Python runs signal handlers on the main thread only and lets nobody else install them: made on another thread this
    object listens to nothing (`installed` is False), and only `ask()` can set it. The same holds if SIGTERM belongs to
    a handler that was not installed from Python (some launchers do so), since that one could be neither called nor put
    back.

    The handler that was there before is called each time, after the flag is set; if it raises, as one that calls
    ``sys.exit`` does, that goes through.
    """

    def __init__(self) -> None:
        self._asked = False
        self._listening = False
        self._previous: _Action = signal.SIG_DFL
        self._pid = os.getpid()
        if threading.current_thread() is not threading.main_thread():
            return
        self._previous = signal.getsignal(signal.SIGTERM)
        if self._previous is None:
            return
        # Before the handler is in place: a SIGTERM may arrive right after it is.
        self._listening = True
        signal.signal(signal.SIGTERM, self._noticed)

    @property
    def asked(self) -> bool:
        """True from the first SIGTERM, or `ask()`, on."""
        return self._asked

    @property
    def installed(self) -> bool:
        """Whether SIGTERM is listened for."""
        return self._listening

    def ask(self) -> None:
        """Ask from inside the program, on any thread."""
        self._asked = True

    def restore(self) -> None:
        """Stop listening and put the previous handler back. Again, or on another thread: harmless.

        If somebody has installed a handler over this one, it stays: it may call this one, which then only passes the
        signal on.
        """
        if not self._listening:
            return
        self._listening = False
        # A bound method is a new object at each access, hence == and not `is`.
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == self._noticed:
            signal.signal(signal.SIGTERM, self._previous)

    def _noticed(self, number: int, frame: FrameType | None) -> None:
        # A forked child (multiprocessing) inherits the handler but not the training loop that would look at the flag:
        # there SIGTERM must do what it did before, or `Process.terminate()` would never end the child.
        here = self._listening and os.getpid() == self._pid
        if here:
            self._asked = True
        if callable(self._previous):
            self._previous(number, frame)
        elif not here and self._previous == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
