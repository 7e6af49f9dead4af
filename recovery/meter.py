"""Bytes and seconds of a restore while it goes on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(eq=False, slots=True)
class Meter:
    """Bytes and seconds so far, over all snapshots tried."""

    bytes: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began

    def count(self, source: str, n: int) -> None:
        if n:
            self.bytes[source] = self.bytes.get(source, 0) + n
