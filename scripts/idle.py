"""Whether the machine was idle but for us: timings taken beside other work say little, and the benchmarks say so."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

STAT = Path("/proc/stat")
WAITED = Path("/proc/thread-self/schedstat")


@dataclass(frozen=True, slots=True)
class Watch:
    """Begins when it is made. `others()`: cores that were busy since with anything but this process."""

    wall: float
    busy: float
    own: float

    @classmethod
    def start(cls) -> Watch:
        return cls(time.perf_counter(), _busy(), time.process_time())

    def others(self) -> float:
        elapsed = time.perf_counter() - self.wall
        return max(0.0, (_busy() - self.busy) - (time.process_time() - self.own)) / elapsed


def _busy() -> float:
    """Seconds that all cores together were not idle since the machine started; 0 where the system does not say."""
    try:
        fields = STAT.read_text().splitlines()[0].split()[1:]
    except OSError:
        return 0.0
    ticks = list(map(int, fields[:8]))  # user, nice, system, idle, iowait, irq, softirq, steal
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


def waited() -> float:
    """Seconds that this thread, since it began, was ready to run and had no core; 0 where the system does not say."""
    try:
        return int(WAITED.read_text().split()[1]) / 1e9
    except OSError:
        return 0.0


def busy_cores(seconds: float = 1.0) -> float:
    """Cores busy with others' work over the next `seconds`."""
    watch = Watch.start()
    time.sleep(seconds)
    return watch.others()
