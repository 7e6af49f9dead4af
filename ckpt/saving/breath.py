"""Giving way to training: a pause that really lets go of the GIL, often enough and cheaply enough.

A background thread that runs bytecode without a pause starves the training thread, whatever the switch interval:
training fell to 2-3 % of its speed in a tight loop of tiny digests (PYTORCH.md §5). A call that drops the GIL for a
moment (`time.sleep(0)`, numpy on a small array) does not help: the dropping thread takes the GIL back before the
waiting one has woken up. So a loop over many small things calls a `Breath` after each; it sleeps 50 µs when half a
millisecond has gone by since the last pause, which costs the background thread a fifth at worst.
"""

from __future__ import annotations

import time
from collections.abc import Callable

STRETCH = 0.0005
"""Seconds of work after which the next call pauses: half of the longest stretch allowed, because work goes on for one
more small thing before it is called again."""

PAUSE = 0.00005
"""Seconds of sleep. The kernel adds about as much; a waiting thread wakes up within it."""


class Breath:
    """Call it after each small thing. One per thread: the time since the last pause is this thread's own."""

    __slots__ = ("_clock", "_last", "_sleep")

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._last = clock()

    def __call__(self) -> None:
        if self._clock() - self._last >= STRETCH:
            self._sleep(PAUSE)
            self._last = self._clock()
