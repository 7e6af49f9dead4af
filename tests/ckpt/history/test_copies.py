"""Reading the next copy, and mending the bad one."""

from __future__ import annotations

import logging

import pytest

from ckpt.errors import DamagedError
from ckpt.format.intact import flaw
from ckpt.format.manifest import FORMAT, PruneDoc, StoreDoc, digest128, seal, unseal
from ckpt.format.names import STORE_KEY, alive_key, prune_key
from ckpt.history.copies import mend, mend_one, mending, read
from storage_backends.base import NotFound, Refused, Unavailable
from storage_backends.fanout import FanoutStore
from storage_backends.memory import MemoryStore
from storage_backends.tiered import TieredStore
from tests.support.faulty import SwitchStore
from tests.support.stores import RUN, drifting, flipped, make_store


def decoded(data: bytes) -> StoreDoc:
    return unseal(data, StoreDoc, key=STORE_KEY)


def three() -> tuple[list[SwitchStore], FanoutStore]:
    places = [SwitchStore(MemoryStore(name)) for name in "abc"]
    store = FanoutStore(*places)
    store.put(STORE_KEY, seal(StoreDoc(FORMAT)))
    return places, store


@pytest.mark.parametrize("bad", [(), (0,), (1,), (0, 1), (0, 2)])
def test_a_read_takes_the_first_good_copy_and_mending_makes_all_good(bad: tuple[int, ...]) -> None:
    places, store = three()
    good = places[0].get(STORE_KEY)
    for n in bad:
        flipped(places[n], STORE_KEY, 17 + n)
    with mending(store):
        assert read(store, STORE_KEY, decoded) == StoreDoc(FORMAT)
    # A copy behind a good one is not read, so nobody knows.
    assert [place.get(STORE_KEY) == good for place in places] == [0 in bad or n not in bad for n in range(3)]


def test_reading_alone_writes_nothing() -> None:
    places, store = three()
    flipped(places[0], STORE_KEY, 3)
    for place in places:
        place.calls.clear()
    read(store, STORE_KEY, decoded)
    assert {verb for place in places for verb, _ in place.calls} == {"get"}


def test_where_no_copy_is_good_the_damage_of_the_first_is_raised_and_nothing_is_mended() -> None:
    places, store = three()
    for n, place in enumerate(places):
        flipped(place, STORE_KEY, n)
    before = [place.get(STORE_KEY) for place in places]
    with pytest.raises(DamagedError, match="digest"), mending(store):
        read(store, STORE_KEY, decoded)
    assert [place.get(STORE_KEY) for place in places] == before


def test_a_plain_store_has_no_other_copy() -> None:
    store = MemoryStore()
    store.put(STORE_KEY, b"{}")
    with pytest.raises(DamagedError):
        read(store, STORE_KEY, decoded)
    with pytest.raises(NotFound):
        read(store, "runs/x.json", decoded)
    assert mend(store) == []


def test_mending_says_what_it_did(caplog: pytest.LogCaptureFixture) -> None:
    places, store = three()
    places[0].delete([STORE_KEY])
    read(store, STORE_KEY, decoded)
    with caplog.at_level(logging.WARNING, logger="ckpt"):
        assert [(m.key, m.place, m.flaw) for m in mend(store)] == [(STORE_KEY, "1", "it was not there")]
    assert "store.json: mended on memory-store:a, where it was not there" in caplog.text
    assert mend(store) == []


@pytest.mark.parametrize("error", [Unavailable, Refused])
def test_a_place_that_takes_no_mending_spoils_no_read(
    error: type[Unavailable] | type[Refused], caplog: pytest.LogCaptureFixture
) -> None:
    places, store = three()
    flipped(places[0], STORE_KEY, 3)
    places[0].fail(error, verb="put")
    with mending(store):
        assert read(store, STORE_KEY, decoded) == StoreDoc(FORMAT)
    assert "a bad copy was not mended" in caplog.text


def test_nothing_is_mended_while_a_prune_is_at_work_but_after_it() -> None:
    """What one place lacks may be what the prune is removing everywhere."""
    places, store = three()
    store.put(prune_key("0f"), seal(PruneDoc(FORMAT, (), ())))
    places[0].delete([STORE_KEY])
    read(store, STORE_KEY, decoded)
    assert mend(store) == []
    store.delete([prune_key("0f")])
    assert [m.key for m in mend(store)] == [STORE_KEY]


def test_what_has_gone_everywhere_meanwhile_is_not_brought_back() -> None:
    places, store = three()
    places[0].delete([STORE_KEY])
    read(store, STORE_KEY, decoded)
    store.delete([STORE_KEY])
    assert mend(store) == []
    assert list(store.list("")) == []


def test_two_good_copies_that_differ_are_left_alone_unless_a_digest_chooses() -> None:
    """Some bits of a part's zstd frame mean nothing: only the snapshot's digest of it tells which copy is right."""
    one, other = MemoryStore("one"), MemoryStore("other")
    store = FanoutStore(one, other)
    make_store(store, drifting(1, rows=16))
    key = next(entry.key for entry in store.list("parts/"))
    good = one.get(key)
    flips = [bytes((*good[:n], good[n] ^ 1 << bit, *good[n + 1 :])) for n in range(len(good)) for bit in range(8)]
    one.put(key, next(data for data in flips if flaw(key, data) is None))
    assert mend_one(store, key) == []
    assert [m.place for m in mend_one(store, key, digest128(good))] == ["1"]
    assert one.get(key) == good


def test_heartbeats_are_not_mended() -> None:
    places, store = three()
    store.put(alive_key(RUN), b"beat")
    places[0].delete([alive_key(RUN)])
    assert mend_one(store, alive_key(RUN)) == []


def test_a_tier_that_lacks_a_pack_lacks_nothing_but_a_bad_one_is_mended() -> None:
    fast, durable = MemoryStore("fast"), MemoryStore("durable")
    make_store(durable, drifting(1, rows=16))
    store = TieredStore(fast, durable)
    key = next(entry.key for entry in store.list("packs/"))
    assert mend_one(store, key) == []
    fast.put(key, durable.get(key)[:-1])
    assert [(m.place, m.key) for m in mend_one(store, key)] == [("fast", key)]
    assert fast.get(key) == durable.get(key)
