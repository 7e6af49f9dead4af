"""Bounded threads: results, errors, and leaving early."""

from __future__ import annotations

import threading

import pytest

from recovery.parallel import in_threads


@pytest.mark.parametrize("threads", [1, 4])
def test_every_item_is_done_once(threads: int) -> None:
    assert sorted(in_threads(range(100), lambda n: n * n, threads=threads)) == [n * n for n in range(100)]


def test_no_more_run_at_once_than_allowed_and_those_do() -> None:
    together = threading.Barrier(3, timeout=30)  # breaks unless three are inside at once
    lock, inside, most = threading.Lock(), 0, 0

    def work(_: int) -> None:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        together.wait()
        with lock:
            inside -= 1

    list(in_threads(range(9), work, threads=3))
    assert most == 3


class Odd(BaseException):
    pass


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("kind", [ValueError, Odd, MemoryError])
def test_the_first_error_ends_it_and_is_raised_here(threads: int, kind: type[BaseException]) -> None:
    taken: list[int] = []

    def work(n: int) -> int:
        taken.append(n)
        if n == 5:
            raise kind("five")
        return n

    with pytest.raises(kind, match="five"):
        list(in_threads(iter(range(100_000)), work, threads=threads))
    assert len(taken) < 100_000
    assert not [t for t in threading.enumerate() if t.name.startswith("ckpt-read")]


def test_an_error_of_the_items_themselves_is_raised_too() -> None:
    def items():
        yield 1
        raise OSError("no more")

    with pytest.raises(OSError, match="no more"):
        list(in_threads(items(), lambda n: n, threads=2))


def test_leaving_early_ends_the_threads() -> None:
    results = in_threads(range(100_000), lambda n: n, threads=3)
    assert next(results) >= 0
    results.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("ckpt-read")]
