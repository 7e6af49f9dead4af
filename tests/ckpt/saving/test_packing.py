"""Blobs into packs, and how much may wait for a slow store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ckpt.format.manifest import digest64
from ckpt.format.names import SnapshotId
from ckpt.format.pack import read_header
from ckpt.saving.packing import TINY, Outbox, Parcel
from ckpt.saving.policy import Lifetime
from storage_backends.base import Unavailable
from storage_backends.memory import MemoryStore
from tests.ckpt.saving.jobs import RUN
from tests.support.faulty import FaultyStore

GROUP = (Lifetime.LASTING, "parameter")


class LazyPending:
    """Work that is not done before somebody waits for it: the slowest store there is."""

    def __init__(self, work: Callable[[None], Any]) -> None:
        self._work = work
        self.over = False

    def wait(self) -> None:
        self.over = True

    def result(self) -> Any:
        self.over = True
        return self._work(None)


class LazyCrew:
    def submit(self, work: Callable[[None], Any]) -> LazyPending:
        return LazyPending(work)


class CountingStore(FaultyStore):
    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self.sizes: dict[str, int] = {}

    def put(self, key, data):  # type: ignore[no-untyped-def]
        super().put(key, data)
        self.sizes[key] = len(data)

    @property
    def landed(self) -> int:
        return sum(self.sizes.values())


def outbox(store: FaultyStore, *, pack_limit: int = 32 << 20, memory: int = 256 << 20) -> Outbox:
    crew: Any = LazyCrew()
    return Outbox(store, crew, SnapshotId(RUN, 9), 2, pack_limit=pack_limit, memory=memory, breathe=lambda: None)


def blob_of(index: int, size: int) -> Parcel:
    data = bytes([index % 251]) * size
    return Parcel(index, data, 0, digest64(data), f"{index:032x}", "uint8", None)


def test_every_blob_lies_where_it_is_said_to_lie() -> None:
    store = CountingStore()
    box = outbox(store, pack_limit=5000)
    blobs = [blob_of(i, 100 + 300 * i) for i in range(12)]
    for i, blob in enumerate(blobs):
        box.add(blob, (Lifetime(i % 3), "parameter"))
    packed = box.finish()
    assert packed.packs == store.sizes
    for blob in blobs:
        at = packed.blobs[blob.of]
        assert store.get_range(at.pack, at.start, at.stop) == blob.data
        header = {(b.start, b.stop): b for b in read_header(store.get(at.pack))}
        assert header[at.start, at.stop].chunk_digest == blob.chunk_digest


def test_what_waits_for_a_slow_store_stays_within_the_memory() -> None:
    store = CountingStore()
    memory, pack_limit = 1 << 20, 128 << 10
    box = outbox(store, pack_limit=pack_limit, memory=memory)
    added, most = 0, 0
    for i in range(600):
        box.add(blob_of(i, 10_000), (Lifetime.DELTA, f"slot:{i % 40}"))
        added += 10_000
        most = max(most, added - store.landed)
    assert memory // 2 < most <= memory, "it waits, but not for every blob"
    box.finish()
    assert added <= store.landed <= added + 600 * 256


def test_uploads_begin_before_the_last_blob_is_there() -> None:
    store = CountingStore()
    box = outbox(store, pack_limit=100_000, memory=400_000)
    for i in range(100):
        box.add(blob_of(i, 10_000), GROUP)
    assert store.landed > 500_000


def test_tiny_groups_share_a_pack_across_classes_and_never_across_lifetimes() -> None:
    store = CountingStore()
    box = outbox(store)
    for i in range(20):
        box.add(blob_of(i, 5000), (Lifetime.DELTA, f"slot:{i}"))
        box.add(blob_of(100 + i, 5000), (Lifetime.LASTING, f"slot:{i}"))
    box.add(blob_of(200, TINY), (Lifetime.LASTING, "parameter"))
    packed = box.finish()
    assert len(packed.packs) == 3
    deltas = {packed.blobs[i].pack for i in range(20)}
    lasting = {packed.blobs[100 + i].pack for i in range(20)}
    assert len(deltas) == len(lasting) == 1
    assert not deltas & lasting


def test_many_tiny_groups_make_no_pack_beyond_the_limit() -> None:
    store = CountingStore()
    box = outbox(store, pack_limit=60_000)
    for i in range(20):
        box.add(blob_of(i, 20_000), (Lifetime.DELTA, f"slot:{i}"))
    box.finish()
    assert max(store.sizes.values()) <= 60_000
    assert len(store.sizes) == 10


def test_nothing_added_puts_nothing() -> None:
    store = CountingStore()
    assert outbox(store).finish().packs == {}
    assert store.calls == []


def test_a_failed_upload_is_told_at_the_latest_at_the_end() -> None:
    store = FaultyStore(MemoryStore(), fail_at=1)
    box = outbox(store)
    box.add(blob_of(0, 1000), GROUP)
    with pytest.raises(Unavailable, match="failed on purpose"):
        box.finish()


def test_after_giving_up_nothing_more_is_put() -> None:
    store = CountingStore()
    box = outbox(store, pack_limit=20_000)
    for i in range(10):
        box.add(blob_of(i, 10_000), GROUP)
    flying = [pending for pending, _ in box._flying]
    assert flying
    before = len(store.calls)
    box.give_up()
    for pending in flying:
        pending.result()
    assert len(store.calls) == before
