"""How often to save: by number of steps, or by what a save costs and how often the job fails.

The interval that loses least time (Young 1974, Daly 2006, eq. 37): a save that keeps training for C seconds every T
seconds costs C / T of the time, and a failure every M seconds costs T / 2 of work each time on average, so

    T = sqrt(2 C M) * (1 + sqrt(C / 2M) / 3 + C / 2M / 9) - C      for C < 2 M, else M

and never so often that saving takes more than `overhead` of the time, nor more often than saves become durable.
"""

from __future__ import annotations

import logging
import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ckpt.history.failures import Lives
from ckpt.options import Duration, seconds

log = logging.getLogger("ckpt")

REMEMBERED = 5
"""Saves whose median cost counts: the first of a process makes buffers and agrees on a layout, and is no measure."""

TOLD = 1.2
"""By what factor the interval must have changed for the log to say so."""


@dataclass(frozen=True, slots=True)
class Adaptive:
    """Save as often as loses least time, by measured costs and failures: ``every=ckpt.Adaptive()``.

    Attributes:
        mtbf: the mean time between failures that is expected before any was seen. The runs on the store correct it:
            it counts as one failure in that time, besides those observed.
        overhead: the largest share of the time for which saves may keep training waiting.
    """

    mtbf: Duration = "3h"
    overhead: float = 0.03

    def __post_init__(self) -> None:
        if not seconds(self.mtbf) > 0:
            raise ValueError(f"mtbf={self.mtbf!r}: expected a duration such as '3h'")
        if not 0 < self.overhead < 1:
            raise ValueError(f"overhead={self.overhead!r}: expected a share of the time, such as 0.03")


def best_interval(blocked: float, durable: float, mtbf: float, overhead: float) -> float:
    """Seconds from one save to the next, see above; all of them in seconds, `overhead` a share."""
    share = blocked / (2 * mtbf)
    best = mtbf
    if share < 1:
        best = math.sqrt(2 * blocked * mtbf) * (1 + math.sqrt(share) / 3 + share / 9) - blocked
    return max(best, blocked / overhead, durable)


def expected_mtbf(prior: float, lives: Lives) -> float:
    """The prior as one failure in its time, together with what was observed."""
    return (prior + lives.seconds) / (1 + lives.failures)


class Pace:
    """When the next save is due, by one rank's clock; in a job of several, rank 0's word counts and the costs are those
    of the slowest. On the training thread, but for `committed`. `lives` looks at earlier runs, once."""

    def __init__(
        self, adaptive: Adaptive, lives: Callable[[], Lives], clock: Callable[[], float] = time.perf_counter
    ) -> None:  # fmt: skip
        self._adaptive = adaptive
        self._look = lives
        self._looking: threading.Thread | None = None
        self._clock = clock
        self._blocked: deque[float] = deque(maxlen=REMEMBERED)
        self._durable: deque[float] = deque(maxlen=REMEMBERED)
        self._elsewhere = (0.0, 0.0)
        self._lives = Lives()
        self._last: float | None = None
        self._told: float | None = None

    def began(self, at: float, blocked: float) -> None:
        """A save that began at `at` of the clock kept training for so many seconds."""
        self._last = at
        self._blocked.append(blocked)
        if self._looking is None:  # a run is open now, so that those before it are over
            self._looking = threading.Thread(target=self._count, name="ckpt-failures", daemon=True)
            self._looking.start()

    def _count(self) -> None:
        """Failures of earlier runs, on a thread: training does not wait for the store."""
        try:
            self._lives = self._look()
        except Exception as error:  # the prior will do
            log.debug("earlier runs are not known: %s", error)

    def held_back(self, more: float) -> None:
        """The last save's copy kept a step of the optimizer waiting, too."""
        if self._blocked:
            self._blocked[-1] += more

    def committed(self, durable: float) -> None:
        """A save took so many seconds until its commit was seen. From the writer's thread."""
        self._durable.append(durable)

    @property
    def costs(self) -> tuple[float, float]:
        """(blocked, durable): median seconds of this rank's last saves."""
        blocked, durable = list(self._blocked), list(self._durable)
        return (
            statistics.median_low(blocked) if blocked else 0.0,
            statistics.median_low(durable) if durable else 0.0,
        )

    def hear(self, blocked: float, durable: float) -> None:
        """The largest costs among all ranks."""
        self._elsewhere = (blocked, durable)

    @property
    def interval(self) -> float | None:
        """Seconds between saves; None before the first one was measured."""
        if not self._blocked:
            return None
        blocked, durable = map(max, self.costs, self._elsewhere)
        mtbf = expected_mtbf(seconds(self._adaptive.mtbf), self._lives)
        return best_interval(blocked, durable, mtbf, self._adaptive.overhead)

    def due(self) -> bool:
        """Whether it is time for a save. The first one is due at once: it is the measure of those to come."""
        interval = self.interval
        if interval is None or self._last is None:
            return True
        self._tell(interval)
        return self._clock() - self._last >= interval

    def _tell(self, interval: float) -> None:
        if self._told is not None and self._told / TOLD < interval < self._told * TOLD:
            return
        self._told = interval
        blocked, durable = map(max, self.costs, self._elsewhere)
        log.info(
            "a save every %.3g s: it keeps training %.3g s and is durable after %.3g s; %d failures in %.3g h of runs "
            "before, one in %s expected",
            interval,
            blocked,
            durable,
            self._lives.failures,
            self._lives.seconds / 3600,
            self._adaptive.mtbf,
        )
