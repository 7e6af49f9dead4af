"""`each`."""

from __future__ import annotations

import threading

import pytest

from storage_backends.parallel import each


def test_results_come_in_the_order_of_the_items() -> None:
    assert each(lambda n: n * n, list(range(100)), threads=4) == [n * n for n in range(100)]
    assert each(str, [], threads=4) == []
    assert each(str, [1], threads=4) == ["1"]


def test_calls_really_run_at_the_same_time_and_no_more_than_asked() -> None:
    meeting = threading.Barrier(3, timeout=60)
    running, most, lock = [0], [0], threading.Lock()

    def call(_: int) -> None:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        meeting.wait()
        with lock:
            running[0] -= 1

    each(call, list(range(9)), threads=3)
    assert most[0] == 3


def test_one_thread_means_the_callers_own() -> None:
    assert set(each(lambda _: threading.current_thread(), [1, 2, 3], threads=1)) == {threading.current_thread()}


def test_the_first_failure_is_raised_and_nothing_more_is_begun() -> None:
    begun = []

    def call(n: int) -> None:
        begun.append(n)
        raise KeyError(n)

    with pytest.raises(KeyError):
        each(call, list(range(100)), threads=2)
    assert len(begun) <= 2


def test_the_caller_does_the_work_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert each(lambda n: n + 1, list(range(10)), threads=4) == list(range(1, 11))
