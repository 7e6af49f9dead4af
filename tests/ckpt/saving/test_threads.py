"""Background threads that outlive what their work raises."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from ckpt.saving.threads import Crew


class Tool:
    """Made on the thread that uses it."""

    def __init__(self) -> None:
        self.thread = threading.current_thread()


def test_each_thread_has_tools_of_its_own() -> None:
    crew = Crew("t", 2, Tool)
    crew.start()
    barrier = threading.Barrier(2)

    def work(tool: Tool) -> tuple[Tool, bool]:
        barrier.wait(30)
        return tool, tool.thread is threading.current_thread()

    first, second = [crew.submit(work) for _ in range(2)]
    assert first.result()[1]
    assert second.result()[1]
    assert first.result()[0] is not second.result()[0]
    crew.stop()


@pytest.mark.parametrize("error", [ValueError, MemoryError, KeyboardInterrupt, SystemExit])
def test_a_thread_outlives_its_work_and_gets_new_tools(error: type[BaseException]) -> None:
    crew = Crew("t", 1, Tool)
    crew.start()

    def fail(tool: Tool) -> None:
        raise error("boom")

    before = crew.submit(lambda tool: tool)
    failed = crew.submit(fail)
    after = crew.submit(lambda tool: tool)
    with pytest.raises(error, match="boom"):
        failed.result()
    assert after.result().thread is before.result().thread
    assert after.result() is not before.result(), "half-used scratch is not trusted"
    crew.stop()


def test_tools_that_cannot_be_made_fail_the_work_and_not_the_thread() -> None:
    broken = [True]

    def make() -> str:
        if broken:
            broken.pop()
            raise MemoryError("no scratch")
        return "tools"

    crew = Crew("t", 1, make)
    crew.start()
    first, second = crew.submit(str.upper), crew.submit(str.upper)
    with pytest.raises(MemoryError):
        first.result()
    assert second.result() == "TOOLS"
    crew.stop()


def test_a_stopped_crew_finishes_what_it_has_and_can_be_started_again() -> None:
    crew = Crew("t", 1, Tool)
    crew.start()
    thread = crew.submit(lambda tool: tool.thread).result()
    last = crew.submit(lambda tool: 5)
    crew.stop()
    assert last.result() == 5
    thread.join(30)
    assert not thread.is_alive()
    crew.start()
    assert crew.submit(lambda tool: 6).result() == 6
    crew.stop()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a priority per thread")
def test_background_threads_give_way_and_do_not_keep_the_process() -> None:
    crew = Crew("t", 1, Tool)
    crew.start()
    nice = crew.submit(lambda tool: os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
    assert nice.result() == 19
    assert crew.submit(lambda tool: tool.thread.daemon).result()
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) < 19, "the caller keeps its own"
    crew.stop()
