"""A bounded number of threads over a stream of items: results as they come, the first error ends it all."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

THREADS = 8
"""Reads in flight: enough to hide an object store's latency, few enough to bound memory and sockets."""


def in_threads(items: Iterable[T], do: Callable[[T], R], *, threads: int = THREADS) -> Iterator[R]:
    """Yield ``do(item)`` for every item, in the order they finish, at most `threads` at a time.

    The first exception (a `BaseException` too: a thread must not die in silence) stops the taking of new items and is
    raised here after the running ones have ended, so that nothing works on behind the caller's back. Closing the
    iterator does the same. Items are taken one by one under a lock, so `items` may be any generator.
    """
    if threads <= 1:  # one item, or one thread: nothing to wait for side by side
        for only in items:
            yield do(only)
        return
    todo = iter(items)
    lock = threading.Lock()
    stopped = threading.Event()
    # Bounded, so that a slow reader of the results holds the workers back.
    results: queue.Queue[tuple[bool, object]] = queue.Queue(maxsize=2 * threads)
    done = object()

    def work() -> None:
        try:
            while not stopped.is_set():
                with lock:
                    item = next(todo, done)
                if item is done:
                    break
                results.put((True, do(item)))  # type: ignore[arg-type]
            results.put((True, done))
        except BaseException as error:
            results.put((False, error))

    workers = [threading.Thread(target=work, name=f"ckpt-read-{n}", daemon=True) for n in range(threads)]
    try:
        for worker in workers:
            worker.start()
        running = len(workers)
        while running:
            good, value = results.get()
            if not good:
                assert isinstance(value, BaseException)
                raise value
            if value is done:
                running -= 1
            else:
                yield value  # type: ignore[misc]
    finally:
        stopped.set()
        # Whoever waits for room gets it: each puts at most two more, and the emptied queue holds two for each.
        with contextlib.suppress(queue.Empty):
            while True:
                results.get_nowait()
        for worker in workers:
            if worker.ident is not None:
                worker.join()


def batched(items: Iterable[T], cost: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Consecutive items that cost at most `limit` together; one item may exceed it."""
    batch: list[T] = []
    size = 0
    for item in items:
        if batch and size + cost(item) > limit:
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += cost(item)
    if batch:
        yield batch
