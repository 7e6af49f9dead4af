"""Background threads of our own: daemons, at nice 19 but for those that training may wait for, each with tools that are
made on it and never shared.

Not `concurrent.futures`: its pools refuse work as soon as the main thread ends, before our flush at exit has run, and
the last save of a script that falls off its end must still become durable.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

Tools = TypeVar("Tools")
Result = TypeVar("Result")


def background() -> None:
    """Make the calling thread give way to everything else on this machine, as far as the system lets it."""
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
    except (OSError, AttributeError):  # refused, or a system without priorities per thread: slower training, no harm
        return


def spare_cores() -> int:
    """The cores this process may use but one, which trains; at least 1."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        cores = os.cpu_count() or 1
    return max(1, cores - 1)


class Pending(Generic[Result]):
    """What a piece of work will come to."""

    __slots__ = ("_error", "_over", "_result")

    def __init__(self) -> None:
        self._over = threading.Event()
        self._result: list[Result] = []
        self._error: BaseException | None = None

    @property
    def over(self) -> bool:
        return self._over.is_set()

    def settle(self, result: Result) -> None:
        self._result.append(result)
        self._over.set()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._over.set()

    def wait(self) -> None:
        """Until it is over, whatever came of it."""
        self._over.wait()

    def result(self) -> Result:
        """Waits; raises what the work raised."""
        self._over.wait()
        if self._error is not None:
            raise self._error
        return self._result[0]


class Crew(Generic[Tools]):
    """`size` daemon threads that take work in the order it came. `make` is called on each thread for its tools, and
    again after a failure: half-used scratch is not trusted. A thread outlives whatever its work raises. `yielding`:
    the threads give way to everything else on the machine."""

    def __init__(self, name: str, size: int, make: Callable[[], Tools], *, yielding: bool = True) -> None:
        self._name = name
        self._make = make
        self._yielding = yielding
        self._queue: SimpleQueue[Callable[[Tools | None], Tools | None] | None] = SimpleQueue()
        self._threads: list[threading.Thread | None] = [None] * size

    @property
    def size(self) -> int:
        return len(self._threads)

    def start(self) -> None:
        """Start the threads that do not run. Early: an interpreter that is shutting down starts no more."""
        for number, thread in enumerate(self._threads):
            if thread is None or not thread.is_alive():
                fresh = threading.Thread(target=self._serve, name=f"{self._name}-{number}", daemon=True)
                self._threads[number] = fresh
                fresh.start()

    def submit(self, work: Callable[[Tools], Result]) -> Pending[Result]:
        pending: Pending[Result] = Pending()

        def run(tools: Tools | None) -> Tools | None:
            try:
                if tools is None:
                    tools = self._make()
                pending.settle(work(tools))
            except BaseException as error:  # whoever waits must learn of it, and the thread must go on
                pending.fail(error)
                return None
            return tools

        self._queue.put(run)
        return pending

    def stop(self) -> None:
        """Let every thread end once all work before this call is done. Does not wait."""
        for _ in self._threads:
            self._queue.put(None)

    def _serve(self) -> None:
        if self._yielding:
            background()
        tools: Tools | None = None
        while (run := self._queue.get()) is not None:
            tools = run(tools)
            del run  # it holds the work, and the work holds views of the captured state
