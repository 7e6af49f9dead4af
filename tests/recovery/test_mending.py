"""`verify` where a store holds copies: every bad copy is found and named, and mended if asked."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ckpt.format.manifest import FORMAT, PruneDoc, seal
from ckpt.format.names import PartName, prune_key
from ckpt.history.catalog import read_history
from ckpt.history.tiers import Tiers
from recovery.findings import Finding
from recovery.load import load
from recovery.read import read_parts
from recovery.verify import verify
from storage_backends.base import Store, Unavailable
from storage_backends.fanout import FanoutStore
from storage_backends.memory import MemoryStore
from storage_backends.tiered import TieredStore
from tests.ckpt.history.making import FakeClock
from tests.support.faulty import WRITES, SwitchStore
from tests.support.stores import RUN, drifting, flipped, make_store


def two(rows: int = 16) -> tuple[list[SwitchStore], FanoutStore]:
    places = [SwitchStore(MemoryStore(name)) for name in "ab"]
    store = FanoutStore(*places)
    make_store(store, drifting(3, rows=rows), ranks=2, chunk=4096, blobs_per_pack=8)
    return places, store


def contents(store: Store) -> dict[str, bytes]:
    return {entry.key: store.get(entry.key) for entry in store.list("")}


def found(store: Store, *levels: str, **how: bool) -> list[Finding]:
    return [f for f in verify(store, threads=1, **how) if f.level in (levels or ("error", "warning", "mended"))]


def damages(good: bytes) -> Iterator[bytes | None]:
    yield None
    yield good[: len(good) // 2]
    for bit in (3, 4 * len(good), 8 * len(good) - 1):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        yield bytes(bad)


def test_whole_copies_have_nothing_wrong_and_nothing_is_written() -> None:
    places, store = two()
    for place in places:
        place.calls.clear()
    assert found(store, deep=True) == []
    assert not {verb for place in places for verb, _ in place.calls} & WRITES


def test_any_bad_copy_of_any_object_is_found_costs_nothing_and_is_mended() -> None:
    """Every object in turn, either copy; absent, cut, and three single bits."""
    places, store = two()
    before = contents(places[0])
    for key, good in before.items():
        for place in places:
            for bad in damages(good):
                place.delete([key])
                if bad is not None:
                    place.put(key, bad)
                (finding,) = found(store, deep=True)
                assert (finding.level, finding.key, finding.steps) == ("error", key, ()), (key, bad)
                assert f"the copy on {place.url} is bad" in finding.text
                assert "'ckpt verify --repair' mends it" in finding.text
                assert (place.get(key) if bad is not None else None) == bad
                (finding,) = found(store, deep=True, repair=True)
                assert (finding.level, finding.key) == ("mended", key)
                assert finding.text.startswith(f"{key}: mended on {place.url}, where ")
                assert place.get(key) == good
    assert found(store, deep=True) == []
    assert contents(places[0]) == contents(places[1]) == before


def test_without_deep_lengths_and_documents_tell() -> None:
    places, store = two()
    pack, other = [entry.key for entry in places[0].list("packs/")][:2]
    flipped(places[0], pack, 900)
    assert found(store) == []
    places[1].put(other, places[1].get(other) + b"\0")
    (finding,) = found(store)
    assert finding.key == other
    assert "bytes, found" in finding.text
    assert [f.level for f in found(store, repair=True)] == ["mended"]
    assert places[1].get(other) == places[0].get(other)


def test_what_is_bad_everywhere_is_told_with_what_it_costs_and_is_not_touched() -> None:
    places, store = two()
    part = next(entry.key for entry in places[0].list("parts/"))
    for place in places:
        flipped(place, part, 4000)
    findings = found(store, deep=True, repair=True)
    name = PartName.parse(part)
    assert name is not None
    assert [(f.level, f.key, f.steps) for f in findings] == [("error", part, (name.id.step,))]


def test_two_copies_of_a_pack_that_lost_different_blobs_lose_no_step_together() -> None:
    """Neither copy is the good one, so nothing is mended; but every blob is whole in one of them."""
    places, store = two(rows=96)
    snapshot = max(read_history(store).snapshots.items())[1]
    part = read_parts(store, snapshot)[0]
    blobs = sorted(
        {blob for row in part.shards if row.bundle is None for c in part.chunks(row) for blob in c.blobs},
        key=lambda blob: blob.start,
    )
    pack = max({blob.pack for blob in blobs}, key=lambda pack: sum(blob.pack == pack for blob in blobs))
    first, *_, last = (blob for blob in blobs if blob.pack == pack)
    assert first.stop <= last.start
    flipped(places[0], pack, 8 * first.start)
    flipped(places[1], pack, 8 * last.start)
    findings = found(store, deep=True, repair=True)
    assert {f.key for f in findings} == {pack}
    assert all(f.steps == () for f in findings)
    assert "every blob that a snapshot needs from it is whole" in findings[0].text


def test_what_a_prune_is_removing_is_not_missed_and_not_brought_back() -> None:
    places, store = two()
    pack = next(entry.key for entry in places[0].list("packs/"))
    extra = pack.replace("/00000-", "/00009-")
    places[1].put(extra, places[1].get(pack))
    store.put(prune_key("0f"), seal(PruneDoc(FORMAT, (), (extra,))))
    assert found(store, "error", "mended", repair=True) == []
    assert extra not in contents(places[0])


def test_a_place_that_takes_no_mending_leaves_an_error() -> None:
    places, store = two()
    key = "store.json"
    flipped(places[0], key, 5)
    places[0].fail(Unavailable, verb="put")
    (finding,) = found(store, repair=True)
    assert (finding.level, finding.key) == ("error", key)
    assert "mending it failed: " in finding.text


def test_one_snapshot_alone_is_checked_in_all_places() -> None:
    places, store = two()
    first, last = min(read_history(store).snapshots), max(read_history(store).snapshots)
    for id_ in (first, last):
        flipped(places[1], f"snapshots/{id_}.json", 30)
    assert [f.key for f in verify(store, only=last) if f.level == "error"] == [f"snapshots/{last}.json"]
    assert [f.key for f in verify(store, only=last, repair=True) if f.level == "mended"] == [f"snapshots/{last}.json"]
    assert [f.key for f in found(store)] == [f"snapshots/{first}.json"]


def test_of_two_tiers_damage_is_mended_from_the_other_and_what_is_not_copied_is() -> None:
    fast, durable = MemoryStore("fast"), MemoryStore("durable")
    store = TieredStore(fast, durable, keep_fast=2)
    make_store(store, drifting(3, rows=16))
    notes = [f.text for f in found(store, "note", "error")]
    assert len(notes) == 3
    assert all("not yet on memory-store:durable; the job, or --repair, copies it" in text for text in notes)
    assert [f.level for f in found(store, "mended", "error", "note", repair=True)] == ["mended"] * 3
    assert len(read_history(durable).snapshots) == 3
    assert len(read_history(fast).snapshots) == 2
    Tiers(store, FakeClock(), 0, 1).catch_up(RUN)
    for tier in (fast, durable):
        needed = dict(max(read_history(fast).snapshots.items())[1].packs)
        pack = next(entry.key for entry in fast.list("packs/") if entry.key in needed)
        good = tier.get(pack)
        flipped(tier, pack, 500)
        assert [(f.level, f.key) for f in found(store, deep=True)] == [("error", pack)]
        assert [(f.level, f.key) for f in found(store, deep=True, repair=True)] == [("mended", pack)]
        assert tier.get(pack) == good
    assert found(store, deep=True) == []


def test_of_a_durable_tier_of_several_places_the_copy_that_is_whole_is_read_and_the_other_mended() -> None:
    states = drifting(3, rows=16)
    fast, one, other = (MemoryStore(name) for name in ("fast", "one", "other"))
    store = TieredStore(fast, FanoutStore(one, other), keep_fast=1)
    make_store(store, states)
    tiers = Tiers(store, FakeClock(), 0, 1)
    assert tiers.catch_up(RUN) is None
    first, last = min(read_history(store).snapshots), max(read_history(store).snapshots)
    pack = next(key for key, _ in read_history(store).snapshots[first].packs)
    document = read_history(store).keys[first]
    for key in (pack, document):
        fast.delete([key])  # as thinning does
        good = one.get(key)
        flipped(one, key, 8 * len(good) // 2)
        loaded = load(store, step=str(first))
        assert {path: np.asarray(value).tobytes() for path, value in loaded.items()} == {
            path: array.tobytes() for path, array in states[0].items()
        }
        assert one.get(key) == good, "what the read found was mended"
        flipped(one, key, 8 * len(good) // 2)
        assert ("mended", key) in [(f.level, f.key) for f in found(store, deep=True, repair=True)]
        assert one.get(key) == good
    assert first < last
    assert found(store, deep=True) == []
