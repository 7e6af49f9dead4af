"""`MemoryStore`."""

from __future__ import annotations

import pytest

from storage_backends.base import Store
from storage_backends.memory import MemoryStore
from tests.storage_backends.contract import Opener, StoreContract


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def opener(self) -> Opener:
        store = MemoryStore()
        return lambda: store


def test_two_memory_stores_never_meet() -> None:
    one, other = MemoryStore("x"), MemoryStore("x")
    one.put("a", b"1")
    assert list(other.list("")) == []


def test_modification_times_come_from_the_given_clock() -> None:
    store: Store = MemoryStore(wall=iter([5.0, 7.0]).__next__)
    store.put("a", b"1")
    store.put("b", b"1")
    assert [e.mtime for e in store.list("")] == [5.0, 7.0]
