"""What `save()` hands back: a claim on the outcome of one save."""

from __future__ import annotations

import os
import threading

from ckpt.errors import CheckpointError
from ckpt.saving.job import Failed, Outcome, Report, Saved


class Ticket:
    """One save, in flight or done. Safe to use from any thread."""

    def __init__(self, step: int, *, skipped: bool = False) -> None:
        self.step = step
        self.skipped = skipped
        """True if the save was left out because an earlier one was still in flight (``when_busy="skip"``)."""
        self._outcome: Outcome | None = None
        self._settled = threading.Event()
        self._pid = os.getpid()
        if skipped:
            self._settled.set()

    def __repr__(self) -> str:
        match self._outcome:
            case Saved():
                state = "saved"
            case Failed(error=error):
                state = f"failed: {error}"
            case _:
                state = "skipped" if self.skipped else "in flight"
        return f"Ticket(step={self.step}, {state})"

    def done(self) -> bool:
        """Whether the outcome is known: the snapshot was seen committed, or the save failed, or it was skipped."""
        return self._settled.is_set()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the snapshot is durable and visible.

        Raises:
            TimeoutError: not done within `timeout` seconds; the save goes on.
            CheckpointError: in a forked child, which would never learn of it.
            SaveFailed, StoreInUse, StorageError: what failed.
        """
        if self._pid != os.getpid() and not self.done():
            raise CheckpointError(
                f"step {self.step}: its save is in flight in process {self._pid}, which this one ({os.getpid()}) was "
                "forked from; wait for it there"
            )
        if not self._settled.wait(timeout):
            raise TimeoutError(f"step {self.step}: not seen committed within {timeout} s; the save goes on")
        if self.error is not None:
            raise self.error

    @property
    def error(self) -> Exception | None:
        """What failed, once that is known."""
        return self._outcome.error if isinstance(self._outcome, Failed) else None

    @property
    def report(self) -> Report | None:
        """Bytes captured, changed and stored, seconds per stage, kinds used; None while in flight."""
        return self._outcome.report if self._outcome is not None else None

    def settle(self, outcome: Outcome) -> None:
        """Called once, by whoever learns the outcome."""
        self._outcome = outcome
        self._settled.set()
