"""`TieredStore`: two places as one store, before anything is copied."""

from __future__ import annotations

import pytest

from storage_backends.base import NotFound, Refused, Unavailable
from storage_backends.fanout import FanoutStore
from storage_backends.local import LocalStore
from storage_backends.memory import MemoryStore
from storage_backends.retry import RetryingStore
from storage_backends.tiered import TieredStore
from tests.storage_backends.contract import Opener, StoreContract
from tests.support.faulty import SwitchStore


class TestTiered(StoreContract):
    @pytest.fixture
    def opener(self) -> Opener:
        fast, durable = MemoryStore("fast"), MemoryStore("durable")
        return lambda: TieredStore(fast, durable)


class TestTieredWithAHistory(StoreContract):
    """Once `store.json` is on the durable tier, that one is asked first for everything but packs, parts, snapshots."""

    @pytest.fixture
    def opener(self) -> Opener:
        fast, durable = MemoryStore("fast"), _Marked(MemoryStore("durable"))
        return lambda: TieredStore(fast, durable)


class _Marked(SwitchStore):
    def get_range(self, key: str, start: int, stop: int) -> bytes:
        return b"{" if key == "store.json" else super().get_range(key, start, stop)


class TestTieredFolders(StoreContract):
    @pytest.fixture
    def opener(self, tmp_path_factory: pytest.TempPathFactory) -> Opener:
        fast, one, other = (tmp_path_factory.mktemp(name) for name in ("fast", "one", "other"))
        return lambda: TieredStore(
            RetryingStore(LocalStore(fast)),
            FanoutStore(RetryingStore(LocalStore(one)), RetryingStore(LocalStore(other))),
        )


def pair() -> tuple[SwitchStore, SwitchStore, TieredStore]:
    fast, durable = SwitchStore(MemoryStore("fast")), SwitchStore(MemoryStore("durable"))
    durable.put("store.json", b"{}")
    return fast, durable, TieredStore(fast, durable)


@pytest.mark.parametrize("key", ["packs/r/1/x", "parts/r/1/0", "snapshots/r-1.json"])
def test_what_a_save_writes_goes_to_the_fast_tier_alone(key: str) -> None:
    fast, durable, store = pair()
    durable.calls.clear()
    store.put(key, b"1")
    assert fast.get(key) == store.get(key) == b"1"
    assert durable.calls == []
    assert [(entry.key, entry.places) for entry in store.list(key.split("/")[0] + "/")] == [(key, ("fast",))]


@pytest.mark.parametrize("key", ["runs/r.json", "alive/r.json", "pins/good.json", "prunes/x.json", "store.json"])
def test_what_decides_goes_to_the_durable_tier_first_and_is_read_there(key: str) -> None:
    fast, durable, store = pair()
    durable.fail(Unavailable, verb="put")
    with pytest.raises(Unavailable):
        store.put(key, b"1")
    with pytest.raises(NotFound):
        fast.get(key)
    durable.heal()
    store.put(key, b"1")
    assert fast.get(key) == durable.get(key) == b"1"
    fast.put(key, b"stale")
    assert store.get(key) == b"1"
    durable.fail(Unavailable, verb="list")
    if "/" in key:
        with pytest.raises(Unavailable):  # a fast tier that another job may not share is no answer
            store.list(key.split("/")[0] + "/")


def test_reads_take_the_nearest_tier_that_has_it() -> None:
    fast, durable, store = pair()
    durable.put("packs/r/1/a", b"0123")
    assert store.get("packs/r/1/a") == b"0123"
    fast.put("packs/r/1/a", b"0123")
    durable.calls.clear()
    assert store.get_range("packs/r/1/a", 1, 3) == b"12"
    assert durable.calls == []
    fast.put("packs/r/1/a", b"01")
    assert store.get_range("packs/r/1/a", 1, 3) == b"12"
    assert store.slips.take() == {"packs/r/1/a": None}


def test_a_fast_tier_that_fails_costs_its_deadline_once_and_is_never_taken_for_empty() -> None:
    fast, durable, store = pair()
    durable.put("packs/r/1/a", b"1")
    fast.put("packs/r/1/b", b"2")
    fast.calls.clear()
    fast.fail(Unavailable, verb="get")
    for _ in range(3):
        assert store.get("packs/r/1/a") == b"1"
    assert fast.calls == [("get", "packs/r/1/a")]
    with pytest.raises(Unavailable):
        store.get("packs/r/1/b")
    fast.fail(Unavailable, verb="list")
    with pytest.raises(Unavailable):
        store.list("snapshots/")


def test_a_listing_says_where_everything_is() -> None:
    fast, durable, store = pair()
    for tier, keys in ((fast, ("packs/a", "snapshots/b")), (durable, ("packs/a", "packs/c", "runs/r.json"))):
        for key in keys:
            tier.put(key, b"1")
    fast.put("runs/stale.json", b"1")
    assert {entry.key: entry.places for entry in store.list("")} == {
        "packs/a": ("fast", "durable"),
        "packs/c": ("durable",),
        "snapshots/b": ("fast",),
        "runs/r.json": (),
        "store.json": (),
    }


def test_a_deletion_goes_to_the_durable_tier_first() -> None:
    fast, durable, store = pair()
    for tier in (fast, durable):
        tier.put("snapshots/a", b"1")
    durable.fail(Unavailable, verb="delete")
    with pytest.raises(Unavailable):
        store.delete(["snapshots/a"])
    assert fast.get("snapshots/a") == b"1"
    durable.heal()
    store.delete(["snapshots/a"])
    assert list(store.list("snapshots/")) == []


def test_a_folder_that_was_used_alone_becomes_the_fast_tier_of_a_new_pair() -> None:
    fast, durable = MemoryStore("fast"), MemoryStore("durable")
    for key in ("store.json", "runs/1.json", "pins/good.json", "alive/1.json", "packs/x"):
        fast.put(key, key.encode())
    store = TieredStore(fast, durable)
    assert [entry.key for entry in store.list("runs/")] == ["runs/1.json"]
    assert store.get("pins/good.json") == b"pins/good.json"
    store.put("runs/2.json", b"2")
    assert {entry.key for entry in durable.list("")} == {"store.json", "runs/1.json", "runs/2.json", "pins/good.json"}
    assert [entry.key for entry in store.list("runs/")] == ["runs/1.json", "runs/2.json"]


def test_what_makes_no_pair_is_refused() -> None:
    with pytest.raises(Refused, match="is both tiers"):
        TieredStore(MemoryStore("x"), MemoryStore("x"))
    with pytest.raises(Refused, match="expected at least 1"):
        TieredStore(MemoryStore("x"), MemoryStore("y"), keep_fast=0)


def test_wrappers_go_under_the_tiers_and_under_copies_below_them() -> None:
    durable = FanoutStore(MemoryStore("one"), MemoryStore("other"))
    store = TieredStore(MemoryStore("fast"), durable, keep_fast=None).over(SwitchStore)
    assert isinstance(store, TieredStore)
    assert isinstance(store.fast, SwitchStore)
    assert isinstance(store.durable, FanoutStore)
    assert all(isinstance(place, SwitchStore) for place in store.durable.places.values())
    assert store.keep_fast is None
