"""The stores of `tests.support.faulty`: without a fault they keep every promise, with one they break exactly that."""

from __future__ import annotations

import threading
from itertools import count

import pytest

from storage_backends.base import Refused, Unavailable
from storage_backends.memory import MemoryStore
from tests.storage_backends.contract import Opener, StoreContract
from tests.support.faulty import Crash, FaultyStore, GateStore, LaggingStore, SizedStore


class TestFaultyStoreWithoutAFault(StoreContract):
    @pytest.fixture
    def opener(self) -> Opener:
        inner = MemoryStore()
        return lambda: FaultyStore(inner)


class TestLaggingStoreWithoutALag(StoreContract):
    @pytest.fixture
    def opener(self) -> Opener:
        inner = MemoryStore()
        return lambda: LaggingStore(inner, lag=0, now=lambda: 0.0)


class TestGateStoreWithAnOpenGate(StoreContract):
    @pytest.fixture
    def opener(self) -> Opener:
        store = GateStore(MemoryStore())
        store.gate.set()
        return lambda: store


class TestSizedStoreWithRoom(StoreContract):
    @pytest.fixture
    def opener(self) -> Opener:
        store = SizedStore(MemoryStore(), capacity=1 << 30)
        return lambda: store


@pytest.mark.parametrize("lands", [False, True])
def test_a_crash_falls_between_any_two_calls_and_the_dead_call_no_more(lands: bool) -> None:
    left = []
    for n in count(1):
        store = FaultyStore(MemoryStore(), crash_at=n, lands=lands)
        try:
            store.put("a", b"1")
            store.put("b", b"2")
            store.delete(["a", "b"])
        except Crash:
            with pytest.raises(Crash):
                store.get("a")
        left.append("".join(e.key for e in store.survived().list("")))
        if not store.fired:
            break
    assert left == (["a", "ab", "b", "", ""] if lands else ["", "a", "ab", "b", ""])


def test_a_crash_is_not_caught_by_except_exception() -> None:
    assert not issubclass(Crash, Exception)


@pytest.mark.parametrize("error", [Unavailable, Refused])
def test_a_fault_happens_once_or_for_ever_at_the_counted_calls(error: type[Unavailable]) -> None:
    for for_ever in (False, True):
        store = FaultyStore(
            MemoryStore(),
            fail_at=2,
            error=error,
            for_ever=for_ever,
            verbs=frozenset({"put"}),
            where=lambda key: key.startswith("parts/"),
        )
        store.put("parts/1", b"")
        store.put("packs/1", b"")
        store.list("parts/")
        assert not store.fired
        with pytest.raises(error):
            store.put("parts/2", b"")
        assert store.fired
        if for_ever:
            with pytest.raises(error):
                store.put("parts/3", b"")
        else:
            store.put("parts/3", b"")
        assert store.calls[:3] == [("put", "parts/1"), ("put", "packs/1"), ("list", "parts/")]
        assert store.count("put") == 4


def test_a_failing_delete_still_removes_the_other_keys() -> None:
    store = FaultyStore(MemoryStore(), fail_at=2, verbs=frozenset({"delete"}))
    for key in "abc":
        store.put(key, b"")
    with pytest.raises(Unavailable):
        store.delete(["a", "b", "c"])
    assert [e.key for e in store.list("")] == ["b"]


def test_a_lagging_listing_shows_an_object_once_it_is_old_enough() -> None:
    now = [0.0]
    store = LaggingStore(MemoryStore(), lag=10, now=lambda: now[0])
    store.put("a", b"1")
    now[0] = 5
    store.put("a", b"22")
    store.put("b", b"1")
    assert list(store.list("")) == []
    assert store.hidden == 2
    assert store.get("b") == b"1"
    now[0] = 10
    assert [e.key for e in store.list("")] == ["a"]
    now[0] = 15
    assert [e.key for e in store.list("")] == ["a", "b"]


def test_a_closed_gate_holds_the_call_before_it_does_anything() -> None:
    inner = MemoryStore()
    store = GateStore(inner, where=lambda key: key == "held")
    store.put("free", b"1")
    thread = threading.Thread(target=store.put, args=("held", b"1"))
    thread.start()
    assert store.arrived.wait(timeout=60)
    assert [e.key for e in inner.list("")] == ["free"]
    store.gate.set()
    thread.join()
    assert inner.get("held") == b"1"


def test_a_full_store_refuses_what_does_not_fit_and_keeps_the_old_object() -> None:
    store = SizedStore(MemoryStore(), capacity=10)
    store.put("a", b"x" * 8)
    with pytest.raises(Refused, match="no space"):
        store.put("b", b"x" * 3)
    with pytest.raises(Refused):
        store.put("a", b"x" * 11)
    assert (store.refused, store.used, store.get("a")) == (2, 8, b"x" * 8)
    store.put("a", b"x" * 10)
    store.delete(["a"])
    store.put("b", b"x" * 3)
