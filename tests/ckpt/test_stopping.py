"""SIGTERM is noticed, passed on, and handed back."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from ckpt.stopping import Stopping


@pytest.fixture(autouse=True)
def handler_put_back() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def terminate() -> None:
    # raise_signal runs the Python handler before it returns.
    signal.raise_signal(signal.SIGTERM)


def test_sigterm_sets_the_flag_and_nothing_else() -> None:
    """F9, while idle."""
    stopping = Stopping()
    assert stopping.installed
    assert not stopping.asked
    terminate()
    assert stopping.asked


def test_a_second_sigterm_does_the_same_again_even_inside_the_first() -> None:
    """F9, twice: the second arrives while the first is being handled."""
    heard: list[int] = []

    def users(number: int, frame: object) -> None:
        heard.append(number)
        if len(heard) == 1:
            terminate()

    signal.signal(signal.SIGTERM, users)
    stopping = Stopping()
    terminate()
    assert stopping.asked
    assert heard == [signal.SIGTERM, signal.SIGTERM]


def test_the_users_handler_runs_each_time_and_after_the_flag_is_set() -> None:
    """F9, with a user's handler."""
    seen: list[bool] = []
    signal.signal(signal.SIGTERM, lambda *_: seen.append(stopping.asked))
    stopping = Stopping()
    terminate()
    terminate()
    assert seen == [True, True]


def test_what_the_users_handler_raises_goes_through() -> None:
    def leave(*_: object) -> None:
        raise SystemExit(3)

    signal.signal(signal.SIGTERM, leave)
    stopping = Stopping()
    with pytest.raises(SystemExit):
        terminate()
    assert stopping.asked


def test_restore_puts_the_previous_handler_back_and_is_harmless_twice() -> None:
    def users(*_: object) -> None: ...

    signal.signal(signal.SIGTERM, users)
    stopping = Stopping()
    stopping.restore()
    stopping.restore()
    assert not stopping.installed
    assert signal.getsignal(signal.SIGTERM) is users


def test_restore_leaves_a_handler_alone_that_was_installed_later_and_still_passes_the_signal_on() -> None:
    heard: list[str] = []
    signal.signal(signal.SIGTERM, lambda *_: heard.append("first"))
    stopping = Stopping()
    ours: Any = signal.getsignal(signal.SIGTERM)

    def later(number: int, frame: Any) -> None:
        heard.append("later")
        ours(number, frame)

    signal.signal(signal.SIGTERM, later)
    stopping.restore()
    assert signal.getsignal(signal.SIGTERM) is later
    terminate()
    assert heard == ["later", "first"]
    assert not stopping.asked, "it was restored before the signal"


def test_two_at_once_both_notice_and_unwind_in_any_order() -> None:
    first = Stopping()
    second = Stopping()
    terminate()
    assert first.asked
    assert second.asked
    first.restore()
    second.restore()
    # second put first's handler back; with nothing before it that one must not swallow the signal.
    assert not first.installed


def test_made_on_another_thread_it_listens_to_nothing() -> None:
    before = signal.getsignal(signal.SIGTERM)
    made: list[Stopping] = []
    thread = threading.Thread(target=lambda: made.append(Stopping()))
    thread.start()
    thread.join()
    (stopping,) = made
    assert not stopping.installed
    assert signal.getsignal(signal.SIGTERM) == before
    stopping.ask()
    assert stopping.asked
    stopping.restore()
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_handler_that_python_did_not_install_is_left_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "getsignal", lambda number: None)
    stopping = Stopping()
    assert not stopping.installed


def _wait_for_ever(ready: Any) -> None:
    ready.set()
    threading.Event().wait()


def test_a_forked_child_still_ends_when_it_is_terminated() -> None:
    fork = multiprocessing.get_context("fork")
    stopping = Stopping()
    ready = fork.Event()
    child = fork.Process(target=_wait_for_ever, args=(ready,))
    child.start()
    assert ready.wait(60)
    child.terminate()
    child.join(60)
    assert child.exitcode == -signal.SIGTERM
    assert not stopping.asked


def _stop_then_die(done: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    outer = Stopping()
    inner = Stopping()
    outer.restore()
    inner.restore()
    done.set()
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait()


def test_after_both_were_restored_out_of_order_sigterm_ends_the_process_again() -> None:
    fork = multiprocessing.get_context("fork")
    done = fork.Event()
    child = fork.Process(target=_stop_then_die, args=(done,))
    child.start()
    child.join(60)
    assert done.is_set()
    assert child.exitcode == -signal.SIGTERM
