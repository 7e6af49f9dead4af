"""`throttle`: rates measured on a clock that only sleeping moves; how a throttled rate falls and comes back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage_backends.base import Buffer, Entry, NotFound, Refused, Store, Throttled, Unavailable
from storage_backends.fanout import FanoutStore
from storage_backends.memory import MemoryStore
from storage_backends.retry import RetryingStore
from storage_backends.throttle import (
    BURST,
    CEILING,
    DECREASE,
    FLOOR,
    INCREASE,
    Adaptive,
    Bucket,
    Limits,
    Pace,
    ThrottledStore,
    at_pace,
    limited,
)
from storage_backends.tiered import TieredStore
from tests.storage_backends.contract import Opener, StoreContract
from tests.support.faulty import FaultyStore, SwitchStore

MB = 1_000_000


class TestThrottledStore(StoreContract):
    @pytest.fixture(params=[Limits(), Limits(bandwidth=1e12, requests=1e9)], ids=["no limit", "limits"])
    def opener(self, request: pytest.FixtureRequest) -> Opener:
        store = limited(RetryingStore(MemoryStore()), request.param)
        return lambda: store


class Sleeper:
    """A clock that moves when everybody on it sleeps: `threads` callers."""

    def __init__(self, threads: int = 1) -> None:
        self._awake = threads
        self._changed = threading.Condition()
        self._alarms: list[float] = []
        self.time = 1000.0

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        with self._changed:
            alarm = self.time + seconds
            self._alarms.append(alarm)
            self._awake -= 1
            self._wake()
            assert self._changed.wait_for(lambda: self.time >= alarm and alarm == min(self._alarms), timeout=60)
            self._alarms.remove(alarm)
            self._awake += 1

    def leave(self) -> None:
        """This thread calls no more."""
        with self._changed:
            self._awake -= 1
            self._wake()

    def _wake(self) -> None:
        if not self._awake and self._alarms:
            self.time = max(self.time, min(self._alarms))
            self._changed.notify_all()


def paced(limits: Limits, sleeper: Sleeper, inner: Store | None = None) -> ThrottledStore:
    return ThrottledStore(inner or MemoryStore(), Pace(limits, now=sleeper.now, sleep=sleeper.sleep))


# The user's limits


def test_the_measured_bandwidth_is_within_a_tenth_of_the_limit_in_both_directions() -> None:
    sleeper = Sleeper()
    store = paced(Limits(bandwidth=4 * MB), sleeper)
    for n in range(40):
        store.put(f"packs/{n}", bytes(MB))
    assert 40 * MB / (sleeper.time - 1000) == pytest.approx(4 * MB, rel=0.1)
    began = sleeper.time
    for n in range(20):
        store.get(f"packs/{n}")
        store.get_range(f"packs/{n}", MB // 2, MB)
    assert 30 * MB / (sleeper.time - began) == pytest.approx(4 * MB, rel=0.1)


def test_the_measured_request_rate_is_within_a_tenth_of_the_limit_for_every_verb() -> None:
    """A removal is a request for each object."""
    sleeper = Sleeper()
    store = paced(Limits(requests=50), sleeper)
    for n in range(200):
        store.put(f"a/{n}", b"")
        store.get(f"a/{n}")
        store.list("b/")
    assert 600 / (sleeper.time - 1000) == pytest.approx(50, rel=0.1)
    began = sleeper.time
    store.delete([f"a/{n}" for n in range(200)])
    assert 200 / (sleeper.time - began) == pytest.approx(50, rel=0.1)
    assert store.list("a/") == []


def test_without_limits_nothing_waits() -> None:
    sleeper = Sleeper()
    inner = FaultyStore(MemoryStore())
    store = paced(Limits(), sleeper, inner)
    for n in range(1000):
        store.put(f"a/{n}", bytes(1000))
    store.delete([f"a/{n}" for n in range(1000)])
    assert sleeper.time == 1000


@given(
    rate=st.floats(0.1, 1e6),
    calls=st.lists(st.tuples(st.floats(0, 10), st.floats(0.01, 1000)), min_size=1, max_size=30),
)
def test_no_window_of_time_sees_more_than_its_share(rate: float, calls: list[tuple[float, float]]) -> None:
    bucket, now = Bucket(rate), 0.0
    went: list[tuple[float, float]] = []
    for pause, amount in calls:
        now += pause
        went.append((max(now, bucket.take(amount, now)), amount))
    for first in range(len(went)):
        for last in range(first + 1, len(went)):
            sent = sum(amount for _, amount in went[first + 1 : last + 1])
            assert sent <= rate * (went[last][0] - went[first][0] + BURST) * (1 + 1e-6)


def test_two_uploads_take_turns_and_a_small_request_waits_for_one_of_each_at_most() -> None:
    sleeper = Sleeper(threads=3)
    order: list[str] = []

    class Noting(MemoryStore):
        def put(self, key: str, data: Buffer) -> None:
            order.append(key.partition("/")[0])

    store = paced(Limits(bandwidth=MB), sleeper, Noting())
    began = threading.Barrier(3)

    def upload(name: str, size: int, count: int, late: float) -> None:
        began.wait()
        if late:
            sleeper.sleep(late)
        for n in range(count):
            store.put(f"{name}/{n}", bytes(size))
        sleeper.leave()

    jobs = [("a", MB, 6, 0.0), ("b", MB, 6, 0.0), ("small", 100, 1, 1.5)]
    threads = [threading.Thread(target=upload, args=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    big = [name for name in order if name != "small"]
    assert big in (["a", "b"] * 6, ["b", "a"] * 6), order
    # It came after the first put of one second, and behind one that waits for each of the two.
    assert order.index("small") <= 3, order


# What the store bears


class Weak:
    """A store that answers "slow down" to what comes faster than `rate` per second, a second's worth apart."""

    def __init__(self, rate: float, now: Callable[[], float]) -> None:
        self._inner = MemoryStore()
        self._rate = rate
        self._now = now
        self._tokens, self._at = rate, now()
        self.done = self.refused = 0

    @property
    def url(self) -> str:
        return self._inner.url

    def put(self, key: str, data: Buffer) -> None:
        now = self._now()
        self._tokens, self._at = min(self._rate, self._tokens + self._rate * (now - self._at)), now
        if self._tokens < 1:
            self.refused += 1
            raise Throttled("slow down", store=self.url, key=key)
        self._tokens -= 1
        self.done += 1

    def get(self, key: str) -> bytes:
        return self._inner.get(key)

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        return self._inner.get_range(key, start, stop)

    def list(self, prefix: str) -> Sequence[Entry]:
        return self._inner.list(prefix)

    def delete(self, keys: Sequence[str]) -> None:
        self._inner.delete(keys)


def asks(pace: Pace, error: type[Exception] | None = None) -> None:
    def do() -> None:
        if error is not None:
            raise error("on purpose", store="s", key="k")  # type: ignore[call-arg]

    if error is None:
        pace.asking(1, 0, do)
    else:
        with pytest.raises(error):
            pace.asking(1, 0, do)


def interval(pace: Pace, sleeper: Sleeper) -> float:
    """Between two requests of somebody who asks without a pause."""
    asks(pace)
    began = sleeper.time
    asks(pace)
    return sleeper.time - began


def test_a_throttled_answer_halves_the_rate_and_time_without_one_raises_it_in_equal_steps() -> None:
    sleeper = Sleeper()
    pace = Pace(Limits(), now=sleeper.now, sleep=sleeper.sleep)
    for _ in range(20):
        asks(pace)
        sleeper.time += 0.05
    asks(pace, Throttled)  # at 20 a second
    after = DECREASE * 20
    assert 1 / interval(pace, sleeper) == pytest.approx(after, rel=0.1)
    for seconds in (10, 20, 30):
        sleeper.time = max(sleeper.time, 1001 + seconds)
        assert 1 / interval(pace, sleeper) == pytest.approx(after + INCREASE * seconds, rel=0.1)
    sleeper.time += CEILING / INCREASE
    assert interval(pace, sleeper) == 0, "recovered: no limit any more"


def test_there_is_a_floor() -> None:
    adaptive = Adaptive()
    now = 1000.0
    for _ in range(30):
        now += 0.001
        adaptive.take(1, now)
        adaptive.throttled(now, now)
    assert adaptive.rate(now) == FLOOR


@pytest.mark.parametrize("error", [Unavailable, Refused, NotFound])
def test_other_errors_slow_nothing(error: type[Exception]) -> None:
    sleeper = Sleeper()
    pace = Pace(Limits(), now=sleeper.now, sleep=sleeper.sleep)
    for _ in range(30):
        asks(pace, error)
    assert sleeper.time == 1000


def test_requests_under_way_together_are_one_fault_not_many() -> None:
    sleeper = Sleeper()
    pace = Pace(Limits(), now=sleeper.now, sleep=sleeper.sleep)
    for _ in range(20):
        asks(pace)
        sleeper.time += 0.05
    together = threading.Barrier(8)

    def fail() -> None:
        together.wait()
        raise Throttled("slow down", store="s", key="k")

    def one() -> None:
        with pytest.raises(Throttled):
            pace.asking(1, 0, fail)

    threads = [threading.Thread(target=one) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 1 / interval(pace, sleeper) > DECREASE * 20 * 0.9


def test_a_weak_store_gets_what_it_bears_and_is_seldom_asked_for_more() -> None:
    sleeper = Sleeper()
    weak = Weak(10, sleeper.now)
    store = paced(Limits(), sleeper, weak)
    while sleeper.time < 1300:
        try:
            store.put("a", b"")
        except Throttled:
            continue
        sleeper.time += 0.001  # the request itself
    assert weak.done / 300 > 0.6 * 10
    assert weak.refused / (weak.done + weak.refused) < 0.05


def test_two_who_share_a_weak_store_come_to_equal_shares() -> None:
    """Without talking to each other, and although one began long before (Chiu and Jain)."""
    sleeper = Sleeper(threads=2)
    weak = Weak(10, sleeper.now)
    got = [0, 0]

    def work(n: int) -> None:
        store = paced(Limits(), sleeper, weak)
        sleeper.sleep(30.0 * n + 0.001)
        while sleeper.time < 1300:
            try:
                store.put("a", b"")
                got[n] += sleeper.time > 1100
            except Throttled:
                pass
            sleeper.sleep(0.001)
        sleeper.leave()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 0.5 < got[0] / got[1] < 2, got


# Where it stands


def test_each_attempt_is_seen_and_held_time_is_not_taken_from_the_deadline() -> None:
    sleeper = Sleeper()
    faulty = FaultyStore(MemoryStore(), fail_at=1, for_ever=True)
    retrying = RetryingStore(faulty, deadline=60, sleep=sleeper.sleep, now=sleeper.now)
    store = at_pace(retrying, Pace(Limits(bandwidth=MB), now=sleeper.now, sleep=sleeper.sleep))
    with pytest.raises(Unavailable) as caught:
        store.put("a", bytes(50 * MB))  # 50 s of the limit
    error = caught.value
    assert error.attempts == faulty.count("put") > 5
    held = 50 * error.attempts - BURST
    assert error.seconds == pytest.approx(sleeper.time - 1000)
    assert held <= error.seconds <= held + 60


def test_a_throttled_store_s_own_slowness_does_count() -> None:
    sleeper = Sleeper()

    class Never(MemoryStore):
        def put(self, key: str, data: Buffer) -> None:
            raise Throttled("slow down", store=self.url, key=key)

    retrying = RetryingStore(Never(), deadline=60, sleep=sleeper.sleep, now=sleeper.now)
    store = at_pace(retrying, Pace(Limits(), now=sleeper.now, sleep=sleeper.sleep))
    with pytest.raises(Unavailable):
        store.put("a", b"1")
    assert sleeper.time - 1000 <= 60 + 1 / FLOOR


def test_what_is_asked_of_the_store_itself_is_not_held_back() -> None:
    """A restore, a heartbeat."""
    inner = MemoryStore()
    store = RetryingStore(inner)
    sleeper = Sleeper()
    behind = at_pace(store, Pace(Limits(bandwidth=1), now=sleeper.now, sleep=sleeper.sleep))
    behind.put("packs/1", bytes(1000))
    before = sleeper.time
    store.put("alive/1", bytes(1000))
    assert store.get("packs/1") == bytes(1000)
    assert sleeper.time == before == pytest.approx(2000, abs=1)


def test_each_place_has_limits_of_its_own_and_what_one_missed_is_known_to_both() -> None:
    places = [SwitchStore(MemoryStore(name)) for name in "ab"]
    store = FanoutStore(*map(RetryingStore, places), at_least=1)
    behind = limited(store, Limits(bandwidth=1e9))
    assert isinstance(behind, FanoutStore)
    paces = {id(place._store._pace) for place in behind.places.values()}  # type: ignore[attr-defined]
    assert len(paces) == 2
    places[1].fail(Refused, verb="put")
    behind.put("packs/1", b"1")
    assert store.missed() == behind.missed() == {"packs/1": ("2",)}
    store.caught_up("packs/1", ["2"])
    assert behind.missed() == {}
    store.slips.note("packs/1")
    assert behind.slips.take() == {"packs/1": None}


def test_both_tiers_are_asked_at_a_pace() -> None:
    store = TieredStore(RetryingStore(MemoryStore("fast")), MemoryStore("durable"))
    behind = limited(store, Limits(requests=1e6))
    assert isinstance(behind, TieredStore)
    assert behind.keep_fast == store.keep_fast
    assert isinstance(behind.fast, RetryingStore)
    assert isinstance(behind.durable, ThrottledStore)
    behind.put("runs/1.json", b"1")
    assert store.fast.get("runs/1.json") == store.durable.get("runs/1.json") == b"1"


def test_one_failed_slice_of_a_removal_does_not_save_the_others() -> None:
    sleeper = Sleeper()
    inner = FaultyStore(MemoryStore(), fail_at=3, verbs=frozenset({"delete"}))
    store = paced(Limits(requests=2), sleeper, inner)
    keys = [f"a/{n}" for n in range(7)]
    for key in keys:
        inner.put(key, b"")
    with pytest.raises(Unavailable, match="a/2"):
        store.delete(keys)
    assert [entry.key for entry in store.list("")] == ["a/2"]
