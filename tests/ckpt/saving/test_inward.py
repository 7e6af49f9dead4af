"""One snapshot from boxes of tensors: whole, bit for bit, each chunk once, and only on an empty store."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from itertools import count

import numpy as np
import pytest

from ckpt.errors import HistoryExists, SaveFailed
from ckpt.format.shards import Box, Leaf, Shard, whole
from ckpt.format.values import encode
from ckpt.history.catalog import read_history
from ckpt.history.clock import SystemClock
from ckpt.history.runs import identity
from ckpt.saving import inward
from ckpt.saving.inward import Bytes, store_snapshot
from recovery.load import load
from recovery.verify import verify
from storage_backends.base import StorageError, Store
from storage_backends.memory import MemoryStore
from tests.support.faulty import FaultyStore


@dataclass(frozen=True)
class Held:
    shard: Shard
    data: bytes

    def read(self, start: int, stop: int) -> Bytes:
        return np.frombuffer(self.data[start:stop], np.uint8)


def held(path: str, array: np.ndarray[tuple[int, ...], np.dtype[np.generic]], box: Box | None = None) -> Held:
    box = box or whole(array.shape)
    where = tuple(slice(a, a + n) for a, n in zip(box.offsets, box.lengths, strict=True))
    leaf = Leaf(path, "array", array.dtype.name, array.shape)
    return Held(Shard(leaf, box), np.ascontiguousarray(array[where]).tobytes())


def take_in(store: Store, sources: list[Held]) -> None:
    store_snapshot(store, SystemClock(), identity(None), 5, sources, values={"n": encode(3, "n")}, aliases={"b": "a"})


BIG = np.random.default_rng(0).standard_normal((700, 400))
TOP, LOW = Box((0, 0), (300, 400)), Box((300, 0), (400, 400))


def test_boxes_small_leaves_values_and_aliases_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inward, "WINDOW", 1_000_000)
    store = MemoryStore()
    small = np.arange(5, dtype=np.int16)
    take_in(store, [held("big", BIG, TOP), held("big", BIG, LOW), held("a", small), held("c", small + 1)])
    found = load(store)
    assert found.keys() == {"big", "a", "b", "c", "n"}
    assert np.array_equal(found["big"], BIG) and np.array_equal(found["c"], small + 1)
    assert found["a"] is found["b"] and found["n"] == 3
    assert not list(verify(store, deep=True, only=None))


def test_equal_chunks_are_stored_once() -> None:
    store = MemoryStore()
    take_in(store, [held("a", BIG), held("c", BIG)])
    assert sum(entry.size for entry in store.list("packs/")) < 1.05 * BIG.nbytes


def test_only_an_empty_store_takes_it() -> None:
    store = MemoryStore()
    take_in(store, [held("a", BIG[:3])])
    with pytest.raises(HistoryExists, match="empty store"):
        take_in(store, [held("a", BIG[:3])])


def test_boxes_that_do_not_cover_their_leaf_commit_nothing() -> None:
    store = MemoryStore()
    with pytest.raises(SaveFailed):
        take_in(store, [held("big", BIG, TOP)])
    assert not read_history(store).snapshots


def test_a_store_that_fails_at_any_call_holds_all_of_it_or_nothing() -> None:
    for n in count(1):
        store = FaultyStore(MemoryStore(), fail_at=n, for_ever=True, where=lambda key: not key.startswith("alive/"))
        with contextlib.suppress(SaveFailed, StorageError):
            take_in(store, [held("big", BIG), held("a", BIG[0, :5])])
        if read_history(store.survived()).snapshots:
            assert np.array_equal(load(store.survived())["big"], BIG)
        if not store.fired:
            break
    assert n > 5, "the fault never fired"
