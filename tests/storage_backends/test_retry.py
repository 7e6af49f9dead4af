"""`RetryingStore`: what is tried again, how long, and what the error says at the end."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from storage_backends.base import Entry, NotFound, Refused, Store, Unavailable
from storage_backends.memory import MemoryStore
from storage_backends.retry import LONGEST_WAIT, RetryingStore
from tests.storage_backends.contract import Opener, StoreContract
from tests.support.faulty import VERBS, Crash, FaultyStore


class TestRetryingStore(StoreContract):
    @pytest.fixture
    def opener(self) -> Opener:
        inner = MemoryStore()
        return lambda: RetryingStore(inner)


class Sleeper:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.time = 1000.0
        self.naps: list[float] = []

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.naps.append(seconds)
        self.time += seconds


def retrying(inner: Store, sleeper: Sleeper, deadline: float = 60.0) -> RetryingStore:
    return RetryingStore(inner, deadline=deadline, sleep=sleeper.sleep, now=sleeper.now)


CALLS: dict[str, Callable[[Store], object]] = {
    "put": lambda store: store.put("a/new", b"123"),
    "get": lambda store: store.get("a/old"),
    "get_range": lambda store: store.get_range("a/old", 1, 3),
    "list": lambda store: [entry.key for entry in store.list("a/")],
    "delete": lambda store: store.delete(["a/old", "a/other"]),
}


def filled() -> MemoryStore:
    store = MemoryStore()
    store.put("a/old", b"abc")
    store.put("a/other", b"abc")
    return store


def test_these_are_all_verbs() -> None:
    assert set(CALLS) == VERBS


@pytest.mark.parametrize("lands", [False, True])
@pytest.mark.parametrize("verb", CALLS)
def test_a_passing_fault_is_retried_by_every_verb_whether_or_not_it_landed(verb: str, lands: bool) -> None:
    """M5."""
    faulty, sleeper = FaultyStore(filled(), fail_at=1, lands=lands), Sleeper()
    untroubled = filled()
    assert CALLS[verb](retrying(faulty, sleeper)) == CALLS[verb](untroubled)
    assert faulty.fired
    assert len(sleeper.naps) == 1
    assert [e.key for e in faulty.survived().list("")] == [e.key for e in untroubled.list("")]


@pytest.mark.parametrize("verb", CALLS)
def test_what_is_refused_is_asked_once(verb: str) -> None:
    """M5."""
    faulty, sleeper = FaultyStore(filled(), fail_at=1, error=Refused, for_ever=True), Sleeper()
    with pytest.raises(Refused) as caught:
        CALLS[verb](retrying(faulty, sleeper))
    assert caught.value.attempts == 1
    assert sleeper.naps == []
    assert faulty.count(verb) == (2 if verb == "delete" else 1)  # FaultyStore counts deletes by key


def test_not_found_is_an_answer() -> None:
    faulty, sleeper = FaultyStore(filled()), Sleeper()
    with pytest.raises(NotFound):
        retrying(faulty, sleeper).get("absent")
    assert faulty.count("get") == 1
    assert sleeper.naps == []


def test_a_crash_is_not_retried() -> None:
    sleeper = Sleeper()
    with pytest.raises(Crash):
        retrying(FaultyStore(filled(), crash_at=1), sleeper).get("a/old")
    assert sleeper.naps == []


@pytest.mark.parametrize("verb", CALLS)
def test_a_fault_for_ever_ends_before_the_deadline_and_says_what_was_tried(verb: str) -> None:
    """M3: among them a listing that is throttled for ever: "could not list", never an empty list."""
    faulty, sleeper = FaultyStore(filled(), fail_at=1, for_ever=True), Sleeper()
    with pytest.raises(Unavailable) as caught:
        CALLS[verb](retrying(faulty, sleeper))
    error = caught.value
    spent = sleeper.time - 1000
    assert 60 - LONGEST_WAIT <= spent <= 60
    assert error.attempts == len(sleeper.naps) + 1 > 5
    assert error.seconds == spent
    assert error.store == "memory-store:memory"
    assert error.key.startswith("a/")
    for part in ("memory-store:memory", error.key, f"could not {verb.replace('_', ' ')}", "failed on purpose"):
        assert part in str(error)
    assert f"gave up after {error.attempts} attempts in {spent:.1f} s" in str(error)
    assert isinstance(error.__cause__, Unavailable)


def test_a_listing_throttled_twice_is_fine() -> None:
    """M3."""

    class Throttled(MemoryStore):
        left = 2

        def list(self, prefix: str) -> list[Entry]:
            if self.left:
                self.left -= 1
                raise Unavailable("slow down", store=self.url, key=prefix)
            return list(super().list(prefix))

    inner, sleeper = Throttled(), Sleeper()
    inner.put("a/x", b"1")
    assert [e.key for e in retrying(inner, sleeper).list("a/")] == ["a/x"]
    assert len(sleeper.naps) == 2


def test_pauses_may_grow_to_a_bound_and_differ_between_ranks() -> None:
    runs = []
    for _ in range(20):
        sleeper = Sleeper()
        with pytest.raises(Unavailable):
            retrying(FaultyStore(filled(), fail_at=1, for_ever=True), sleeper).get("a/old")
        runs.append(sleeper.naps)
    for naps in runs:
        assert all(0 <= nap <= min(LONGEST_WAIT, 0.2 * 2**n) for n, nap in enumerate(naps))
    assert len({naps[0] for naps in runs}) == len(runs)
    assert max(max(naps) for naps in runs) > 1


def test_an_attempt_that_takes_long_counts_towards_the_deadline() -> None:
    sleeper = Sleeper()

    class Slow(MemoryStore):
        tries = 0

        def get(self, key: str) -> bytes:
            self.tries += 1
            sleeper.time += 25
            raise Unavailable("timed out", store=self.url, key=key)

    slow = Slow()
    with pytest.raises(Unavailable):
        retrying(slow, sleeper).get("a")
    assert slow.tries == 3


def test_a_refusal_after_passing_faults_says_how_often_it_was_tried() -> None:
    sleeper = Sleeper()

    class Worse(MemoryStore):
        tries = 0

        def get(self, key: str) -> bytes:
            self.tries += 1
            kind = Unavailable if self.tries < 3 else Refused
            raise kind("no", store=self.url, key=key)

    with pytest.raises(Refused) as caught:
        retrying(Worse(), sleeper).get("a")
    assert caught.value.attempts == 3
    assert str(caught.value) == f"no (after 3 attempts in {sum(sleeper.naps):.1f} s)"
    assert caught.value.seconds == pytest.approx(sum(sleeper.naps))
