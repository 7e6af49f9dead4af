"""The same call on many things, some at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def each(do: Callable[[T], R], items: Sequence[T], *, threads: int) -> list[R]:
    """``[do(item) for item in items]`` on up to `threads` threads, the caller's among them.

    The first exception is raised once no call runs any more; what had not begun by then is not begun.

    No ThreadPoolExecutor: it refuses work as soon as the main thread has fallen off its end, which is when the last
    save of a script is written and pruned. Here the caller's own thread works on where no other can be started.
    """
    results: dict[int, R] = {}
    failures: list[BaseException] = []
    lock = threading.Lock()
    waiting = iter(range(len(items)))

    def work() -> None:
        while True:
            with lock:
                index = next(waiting, None)
            if index is None or failures:
                return
            try:
                results[index] = do(items[index])
            except BaseException as error:
                failures.append(error)

    others = [
        threading.Thread(target=work, name="ckpt-store", daemon=True) for _ in range(min(threads, len(items)) - 1)
    ]
    started: list[threading.Thread] = []
    for thread in others:
        try:
            thread.start()
        except RuntimeError:  # the interpreter is ending, or the machine is out of threads
            break
        started.append(thread)
    work()
    for thread in started:
        thread.join()
    if failures:
        raise failures[0]
    return [results[index] for index in range(len(items))]
