"""What became of the saves of one rank: tickets, totals, and failures that the caller has not been told yet."""

from __future__ import annotations

import logging
import threading
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ckpt.errors import CheckpointError, SaveFailed
from ckpt.saving.job import Failed, JournalStats, Outcome, Saved
from ckpt.ticket import Ticket

log = logging.getLogger("ckpt")


@dataclass(frozen=True, slots=True)
class Stats:
    """Totals since the checkpointer was made, of this rank. `bytes`: blobs stored. `seconds`: time `save()` and
    `step()` kept the training thread."""

    saves: int = 0
    skipped: int = 0
    failed: int = 0
    bytes: int = 0
    seconds: float = 0.0
    journal: JournalStats | None = None
    """What the journal took; None without one."""


class Outcomes:
    """Settled from the writer's thread, read on the training thread.

    Args:
        bearable: how many saves in a row may have failed when the last of them is told: from then on telling raises.
            None: it only warns.
        on_saved: called after each commit seen, on the writer's thread.
    """

    def __init__(self, rank: int, bearable: int | None, on_saved: Callable[[], None]) -> None:
        self._rank = rank
        self._bearable = bearable
        self._on_saved = on_saved
        self._lock = threading.Lock()
        self._untold: Ticket | None = None
        self._told: Ticket | None = None
        self._in_a_row = 0
        self._begun: deque[Ticket] = deque(maxlen=3)  # no failure is told later than two saves after it
        self.last: Ticket | None = None
        self.stats = Stats()

    def open(self, step: int) -> Ticket:
        """The ticket of a save that begins now, on all ranks."""
        self.last = Ticket(step)
        self._begun.append(self.last)
        return self.last

    def skip(self, step: int) -> Ticket:
        self.count(skipped=1)
        log.warning("step %d skipped: an earlier save is still in flight", step)
        return Ticket(step, skipped=True)

    def settle(self, ticket: Ticket, outcome: Outcome) -> None:
        match outcome:
            case Saved(report=report):
                self.count(saves=1, bytes=report.stored)
            case Failed(error=error):
                self.count(failed=1)
                # Where another rank's failure was told first, this rank's wait for the commit fails only afterwards.
                if ticket is not self._told:
                    self._untold = ticket
                log.warning("step %d was not saved: %s", ticket.step, error)
        ticket.settle(outcome)
        if isinstance(outcome, Saved):
            self._on_saved()

    def count(self, **more: float) -> None:
        with self._lock:
            self.stats = replace(self.stats, **_added(self.stats, more))

    def forget(self) -> None:
        """A restore begins a new line: what came before is no longer told."""
        self.last = self._untold = self._told = None
        self._in_a_row = 0
        self._begun.clear()

    @property
    def failed(self) -> tuple[int, int] | None:
        """(step, this rank) of a failure not told yet."""
        untold = self._untold
        return None if untold is None else (untold.step, self._rank)

    def raise_untold(self) -> None:
        """For close(): the failure that nobody was told of."""
        untold, self._untold = self._untold, None
        if untold is not None and untold.error is not None:
            raise untold.error

    def tell(self, failed: tuple[int, int]) -> None:
        """Warn, or raise, on all ranks alike, that `failed` = (step, a rank that did not see it committed)."""
        step, rank = failed
        self._count_told(step)
        mine, self._untold = self._untold, None
        cause = mine.error if mine is not None else None
        text = f"step {step} was not saved: {cause if cause is not None else f'rank {rank} failed; its log says why'}"
        if self._in_a_row > 1:
            text = f"{self._in_a_row} saves in a row have failed; {text}"
        if self._bearable is not None and self._in_a_row >= self._bearable:
            if isinstance(cause, CheckpointError) and self._in_a_row == 1:
                raise cause
            raise SaveFailed(text, step=step, stage="commit") from cause
        warnings.warn(text, RuntimeWarning, stacklevel=5)

    def _count_told(self, step: int) -> None:
        """By what all ranks know, the order of saves and which failures were told: so all of them raise, or none."""
        begun = list(self._begun)
        while begun and begun[-1].step != step:
            begun.pop()
        follows = len(begun) > 1 and begun[-2] is self._told
        self._in_a_row = self._in_a_row + 1 if follows else 1
        self._told = begun[-1] if begun else None


def _added(stats: Stats, more: dict[str, float]) -> dict[str, Any]:
    return {name: getattr(stats, name) + n for name, n in more.items()}
