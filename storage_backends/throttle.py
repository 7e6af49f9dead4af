"""Asking no more often, and sending no more, than the user allows and the store bears.

Two limits of the user's, bytes and requests per second, are token buckets that are paid before: who wants to send 16 MB
at 4 MB/s waits four seconds, then sends them as fast as the line goes. So no window of time sees more than its share,
and a put, which no backend can be made to do slowly, still costs what it weighs. Callers queue in the order in which
they came, one call each, so that two uploads take turns.

The third limit is the store's own, found by asking: additive increase, multiplicative decrease of the request rate
(Chiu and Jain, "Analysis of the increase and decrease algorithms for congestion avoidance in computer networks", 1989:
of the linear controls it is the one by which those who share something come to equal shares without talking to each
other, as the ranks of a job do). Halved at a throttled answer, from what was really asked; raised by `INCREASE` with
every second that goes by without one. By requests rather than by bytes or by calls under way, because that is what
stores count when they say "slow down".
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar, runtime_checkable

from storage_backends.base import Buffer, Entry, StorageError, Store, Throttled, most_hopeful
from storage_backends.copies import wrapped

T = TypeVar("T")

BURST = 0.1
"""Seconds of a limit that may be saved up: the few small requests of a commit need not wait for each other."""

DECREASE = 0.5
INCREASE = 1.0
"""Requests per second, gained in each second."""
FLOOR, CEILING = 0.5, 100.0
"""Requests per second. Nobody is slowed below the one, so that a save still ends; from the other on the store is taken
to bear all that one rank asks."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the user allows, for each place of a store. None: no limit. `bandwidth`: bytes per second, `requests`: per
    second."""

    bandwidth: float | None = None
    requests: float | None = None


class Bucket:
    """Tokens that come at `rate` per second; those of `burst` seconds may be saved up. Not safe from several threads by
    itself."""

    def __init__(self, rate: float, burst: float = BURST) -> None:
        self.rate = rate
        self._burst = burst
        self._paid = float("-inf")

    def take(self, amount: float, now: float) -> float:
        """When `amount` will have been paid for; that may be before `now`. Whoever comes next pays after that."""
        self._paid = max(self._paid, now - self._burst) + amount / self.rate
        return self._paid


class Adaptive:
    """The request rate that a store bears, as far as it has told. Not safe from several threads by itself."""

    def __init__(self) -> None:
        self._bucket: Bucket | None = None
        self._cut = float("-inf")
        self._after_cut = CEILING
        self._starts: deque[float] = deque(maxlen=16)

    def rate(self, now: float) -> float | None:
        """Requests per second; None: as many as one likes."""
        rate = self._after_cut + INCREASE * (now - self._cut)
        return None if rate >= CEILING else rate

    def take(self, amount: int, now: float) -> float:
        """As `Bucket.take`."""
        rate = self.rate(now)
        at = now
        if rate is None:
            self._bucket = None
        else:
            self._bucket = self._bucket or Bucket(rate, burst=0.0)
            self._bucket.rate = rate
            at = max(now, self._bucket.take(amount, now))
        self._starts.append(at)
        return at

    def throttled(self, began: float, now: float) -> None:
        """A request that began then was answered with "slow down"."""
        if began <= self._cut:
            return  # it was on its way already when the rate was cut: one fault is one cut
        rate = self.rate(now) or min(CEILING, self._measured())
        self._after_cut, self._cut = max(FLOOR, DECREASE * rate), now

    def _measured(self) -> float:
        """Of late; `CEILING` where too little was asked to tell."""
        first, last = self._starts[0], self._starts[-1]
        return (len(self._starts) - 1) / (last - first) if last > first else CEILING


class Pace:
    """How fast one place is asked, by all that ask it through a `ThrottledStore` of this pace. Safe from several
    threads.

    Args:
        limits: the user's.
        now, sleep: injected by tests.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._bytes = None if limits.bandwidth is None else Bucket(limits.bandwidth)
        self._requests = None if limits.requests is None else Bucket(limits.requests)
        self._allowed = limits.requests
        self._adaptive = Adaptive()
        self._now = now
        self._sleep = sleep
        self._lock = threading.Lock()

    def asking(self, requests: int, nbytes: int, do: Callable[[], T]) -> T:
        """`do()`, once its turn has come."""
        with self._lock:
            now = self._now()
            allowed = max(now, self._sent(nbytes, now), self._requests.take(requests, now) if self._requests else now)
            start = max(allowed, self._adaptive.take(requests, now))
        if start > now:
            self._sleep(start - now)
        try:
            return do()
        except StorageError as error:
            error.held += allowed - now
            if isinstance(error, Throttled):
                with self._lock:
                    self._adaptive.throttled(start, self._now())
            raise

    def came(self, nbytes: int) -> None:
        """So many bytes were received that nobody could announce: whoever comes next pays for them."""
        with self._lock:
            self._sent(nbytes, self._now())

    def at_once(self) -> int | None:
        """How many requests of one call may go together: about a second's worth; None: any number."""
        with self._lock:
            rate = self._adaptive.rate(self._now())
        rates = [rate for rate in (rate, self._allowed) if rate is not None]
        return max(1, int(min(rates))) if rates else None

    def _sent(self, nbytes: int, now: float) -> float:
        return self._bytes.take(nbytes, now) if self._bytes is not None and nbytes else now


class ThrottledStore:
    """A store asked at a `pace`. Below the retries: each attempt costs, and each throttled answer is heard."""

    def __init__(self, store: Store, pace: Pace) -> None:
        self._store = store
        self._pace = pace

    @property
    def url(self) -> str:
        return self._store.url

    def put(self, key: str, data: Buffer) -> None:
        self._pace.asking(1, memoryview(data).nbytes, lambda: self._store.put(key, data))

    def get(self, key: str) -> bytes:
        data = self._pace.asking(1, 0, lambda: self._store.get(key))
        self._pace.came(len(data))
        return data

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        return self._pace.asking(1, max(0, stop - start), lambda: self._store.get_range(key, start, stop))

    def list(self, prefix: str) -> Sequence[Entry]:
        return self._pace.asking(1, 0, lambda: self._store.list(prefix))

    def delete(self, keys: Sequence[str]) -> None:
        """In slices, where there is a limit: what one call removes is as many requests, and others take turns."""
        left = list(keys)
        failed: list[StorageError] = []
        while left:
            count = self._pace.at_once() or len(left)
            some, left = left[:count], left[count:]
            try:
                self._pace.asking(len(some), 0, partial(self._store.delete, some))
            except StorageError as error:
                failed.append(error)
        if len(failed) == 1:
            raise failed[0]
        if failed:
            message = f"{self.url}: removals failed {len(failed)} times, first: {failed[0]}"
            raise most_hopeful(failed)(message, store=self.url, key=failed[0].key)


@runtime_checkable
class Layered(Protocol):
    """A `Store` above another that a limit belongs below."""

    def below(self, wrap: Callable[[Store], Store]) -> Store:
        """The same with what it asks wrapped."""
        ...


def limited(store: Store, limits: Limits) -> Store:
    """`store` for background traffic: within `limits`, and slower where it is throttled; of a store of several places
    each by itself. Nothing that is asked of `store` directly is held back, or counted."""
    return wrapped(store, lambda place: at_pace(place, Pace(limits)))


def at_pace(place: Store, pace: Pace) -> Store:
    """One place, at this pace below whatever of ours is above it."""
    if isinstance(place, Layered):
        return place.below(lambda inner: at_pace(inner, pace))
    return ThrottledStore(place, pace)
