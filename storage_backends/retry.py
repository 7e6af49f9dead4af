"""Trying again: the one place where a passing fault is waited out.

One loop, here, instead of one in every backend on top of those of its libraries: stacked loops multiply (five tries of
five turn a timeout of 2 s into one of 50 s), and nobody can say when an error will be seen.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import tenacity

from storage_backends.base import Buffer, Entry, Refused, StorageError, Store, Unavailable

T = TypeVar("T")

log = logging.getLogger("ckpt.storage")

DEADLINE = 60.0
FIRST_WAIT = 0.1
LONGEST_WAIT = 10.0


class RetryingStore:
    """Repeats what was `Unavailable`, with growing, randomised pauses, until `deadline` seconds have passed.

    `NotFound` is an answer and `Refused` will not change: both are raised at once. Every verb may be repeated: a put
    writes the whole object again, a delete of what is already gone is not an error. An error that leaves says how
    often and how long it was tried.

    Args:
        store: what is asked.
        deadline: seconds after which no further attempt starts. It cannot cut an attempt short: that is the timeout
            of the backend.
        sleep, now: injected by tests, so that they wait for nothing.

    Time in which a limit of the user's held an attempt back (`StorageError.held`) does not count: else a slow limit
    would leave no time to try again in.
    """

    def __init__(
        self,
        store: Store,
        *,
        deadline: float = DEADLINE,
        sleep: Callable[[float], None] = time.sleep,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._deadline = deadline
        self._sleep = sleep
        self._now = now
        # Full jitter: after an outage a thousand ranks must not come back in the same instant.
        self._wait = tenacity.wait_random_exponential(multiplier=2 * FIRST_WAIT, max=LONGEST_WAIT)

    @property
    def url(self) -> str:
        return self._store.url

    def below(self, wrap: Callable[[Store], Store]) -> Store:
        """The same with what it asks wrapped, so that the wrapper sees each attempt."""
        return RetryingStore(wrap(self._store), deadline=self._deadline, sleep=self._sleep, now=self._now)

    def put(self, key: str, data: Buffer) -> None:
        self._persist("put", key, lambda: self._store.put(key, data))

    def get(self, key: str) -> bytes:
        return self._persist("get", key, lambda: self._store.get(key))

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        return self._persist("get_range", key, lambda: self._store.get_range(key, start, stop))

    def list(self, prefix: str) -> Sequence[Entry]:
        return self._persist("list", prefix, lambda: self._store.list(prefix))

    def delete(self, keys: Sequence[str]) -> None:
        self._persist("delete", keys[0] if keys else "", lambda: self._store.delete(keys))

    def _persist(self, verb: str, key: str, do: Callable[[], T]) -> T:
        began = self._now()

        def spent() -> float:
            return self._now() - began

        held = 0.0

        def out_of_time(state: tenacity.RetryCallState) -> bool:
            # Counts the pause that would come next: waiting past the deadline to give up then helps nobody.
            return spent() - held + state.upcoming_sleep > self._deadline

        def note(state: tenacity.RetryCallState) -> None:
            error = state.outcome.exception() if state.outcome is not None else None
            pause = state.upcoming_sleep
            log.info("%s of %r: attempt %d failed, next in %.1f s: %s", verb, key, state.attempt_number, pause, error)

        attempts = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(Unavailable),
            wait=self._wait,
            stop=out_of_time,
            sleep=self._sleep,
            before_sleep=note,
            reraise=True,
        )
        tries = 0

        def attempt() -> T:
            nonlocal tries, held
            tries += 1
            try:
                return do()
            except Unavailable as error:
                held += error.held
                raise

        def times() -> str:
            return f"{tries} attempt{'s' if tries > 1 else ''} in {spent():.1f} s"

        try:
            return attempts(attempt)
        except Unavailable as error:
            last = str(error).removeprefix(f"{self.url}: ")
            message = f"{self.url}: could not {verb.replace('_', ' ')} {key!r}: gave up after {times()}; last: {last}"
            raise Unavailable(message, store=error.store, key=error.key, attempts=tries, seconds=spent()) from error
        except StorageError as error:
            # Its own kind, for what it says is the answer already; only the count is known here alone.
            error.attempts, error.seconds = tries, spent()
            if isinstance(error, Refused):
                error.args = (f"{error} (after {times()})",)
            raise
