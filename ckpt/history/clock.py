"""Time, as history sees it: injected, so that a test can play any schedule without waiting."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol


class Clock(Protocol):
    """Where waiting and dates come from."""

    def monotonic(self) -> float:
        """Seconds that never go back."""
        ...

    def wall(self) -> float:
        """POSIX seconds; shown to people, never compared."""
        ...

    def sleep(self, seconds: float) -> None:
        """Wait this long."""
        ...


class SystemClock:
    """The real one."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def countdown(timeout: float | None) -> Callable[[], float | None]:
    """What is left of `timeout` seconds, each time it is asked: never less than 0; None is for ever."""
    deadline = None if timeout is None else time.monotonic() + timeout
    return lambda: None if deadline is None else max(0.0, deadline - time.monotonic())
