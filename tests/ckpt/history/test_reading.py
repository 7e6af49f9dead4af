from __future__ import annotations

import pytest

from ckpt.history.reading import read_many
from storage_backends.base import Unavailable
from storage_backends.memory import MemoryStore
from tests.support.faulty import FaultyStore


def filled(n: int) -> MemoryStore:
    store = MemoryStore()
    for i in range(n):
        store.put(f"runs/{i}", str(i).encode())
    return store


@pytest.mark.parametrize("threads", [1, 3, 16])
def test_documents_come_in_the_order_asked_for_and_absent_ones_as_none(threads: int) -> None:
    store = filled(40)
    store.delete(["runs/7"])
    keys = [f"runs/{i}" for i in reversed(range(40))]
    expected = [(key, None if key == "runs/7" else key[5:].encode()) for key in keys]
    assert list(read_many(store, keys, threads)) == expected


@pytest.mark.parametrize("threads", [1, 4])
def test_a_store_that_cannot_read_is_an_error_and_never_an_absent_document(threads: int) -> None:
    """M3"""
    store = FaultyStore(filled(10), fail_at=5, verbs=frozenset({"get"}))
    with pytest.raises(Unavailable):
        list(read_many(store, [f"runs/{i}" for i in range(10)], threads))
    assert store.fired


def test_no_more_is_read_ahead_than_there_are_threads() -> None:
    store = FaultyStore(filled(50))
    documents = read_many(store, [f"runs/{i}" for i in range(50)], 4)
    for _ in range(10):
        next(documents)
    documents.close()  # waits for what is in flight
    assert 10 <= store.count("get") <= 14
