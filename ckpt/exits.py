"""Work that must be done while threads still run, when a script falls off its end.

`atexit` is too late: by then concurrent.futures and asyncio refuse new work, and object stores need both. So we use
the hook that concurrent.futures itself uses, which runs when the main thread ends, before any pool is shut down
(hooks run in reverse order of registration, and importing the pools first makes ours run first).
"""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401 - its hook must be registered before ours
import itertools
import logging
import os
import threading
from collections.abc import Callable

log = logging.getLogger("ckpt")

_waiting: dict[int, tuple[int, Callable[[], None]]] = {}
_numbers = itertools.count()
_hooked = False


def register(call: Callable[[], None]) -> int:
    """Have `call` run at the end of this process, not of one forked from it; returns a number for `unregister`."""
    global _hooked
    if not _hooked:
        threading._register_atexit(_run_all)  # type: ignore[attr-defined]
        _hooked = True
    number = next(_numbers)
    _waiting[number] = os.getpid(), call
    return number


def unregister(number: int) -> None:
    """It is done already."""
    _waiting.pop(number, None)


def _run_all() -> None:
    while _waiting:
        _, (pid, call) = _waiting.popitem()
        if pid != os.getpid():
            continue  # a forked child (a DataLoader worker) comes by here too; what is to be finished is its parent's
        try:
            call()
        except Exception:
            log.exception("at exit")
