"""Merging of ranges, and what is said of blobs that are not what they should be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import Refused, Unavailable
from ckpt.format.manifest import Blob, digest64
from recovery.fetch import Tally, fetch, merge
from storage_backends.fanout import FanoutStore
from storage_backends.memory import MemoryStore
from tests.support.faulty import FaultyStore
from tests.support.stores import flipped


def _blob(start: int, stop: int, pack: str = "p", data: bytes = b"") -> Blob:
    return Blob(pack, start, stop, 0, digest64(data))


def test_near_blobs_share_a_request_and_far_ones_do_not() -> None:
    blobs = [_blob(100, 200), _blob(0, 90), _blob(1300, 1400), _blob(0, 50, "q")]
    requests = [(r.pack, r.start, r.stop, len(r.blobs)) for r in merge(blobs, gap=10, limit=1000, waste=0.04)]
    assert requests == [("p", 0, 200, 2), ("p", 1300, 1400, 1), ("q", 0, 50, 1)]


def test_a_request_stays_below_the_limit_unless_one_blob_is_larger() -> None:
    blobs = [_blob(0, 60), _blob(60, 120), _blob(120, 500)]
    assert [(r.start, r.stop) for r in merge(blobs, gap=0, limit=100)] == [(0, 60), (60, 120), (120, 500)]


@given(
    st.lists(st.tuples(st.sampled_from("pq"), st.integers(0, 500), st.integers(1, 60)), max_size=30),
    st.integers(0, 50),
    st.integers(1, 300),
    st.sampled_from([0.0, 0.02, 0.5]),
)
def test_merged_requests_hold_every_blob_once_within_the_limits(
    drawn: list[tuple[str, int, int]], gap: int, limit: int, waste: float
) -> None:
    blobs = [_blob(start, start + size, pack) for pack, start, size in drawn]
    requests = list(merge(blobs, gap=gap, limit=limit, waste=waste))
    held = [blob for request in requests for blob in request.blobs]
    assert sorted(held, key=repr) == sorted(set(blobs), key=repr)
    for request in requests:
        assert all(
            b.pack == request.pack and request.start <= b.start and b.stop <= request.stop for b in request.blobs
        )
        longest = max(b.size for b in request.blobs)
        assert request.stop - request.start <= max(limit, longest)
        covered = sorted((b.start, b.stop) for b in request.blobs)
        reach = covered[0][1]
        for start, stop in covered[1:]:
            assert start - reach <= gap
            reach = max(reach, stop)
    covering = {(b.pack, byte) for b in blobs for byte in range(b.start, b.stop)}
    reading = sum(len({(r.pack, byte) for byte in range(r.start, r.stop)} - covering) for r in requests)
    assert reading <= waste * sum(b.size for b in set(blobs))


def test_the_smallest_gaps_are_read_through_first() -> None:
    blobs = [_blob(0, 1000), _blob(1040, 2000), _blob(2010, 3000)]
    assert [(r.start, r.stop) for r in merge(blobs, waste=0.015)] == [(0, 1000), (1040, 3000)]
    assert [(r.start, r.stop) for r in merge(blobs, waste=0.02)] == [(0, 3000)]


def _packed(*data: bytes) -> tuple[MemoryStore, list[Blob]]:
    store, blobs, at = MemoryStore(), [], 0
    for each in data:
        blobs.append(_blob(at, at + len(each), "packs/p", each))
        at += len(each)
    store.put("packs/p", b"".join(data))
    return store, blobs


def test_every_blob_comes_with_its_own_bytes_and_is_counted() -> None:
    store, blobs = _packed(b"one", b"three", b"seven77")
    tally = Tally()
    found = fetch(store, blobs, tally)
    assert [bytes(found.data[b]) for b in blobs] == [b"one", b"three", b"seven77"]
    assert not found.faults
    assert (tally.requests, tally.bytes, tally.blobs) == (1, 15, 3)


def test_a_changed_blob_is_a_fault_and_its_neighbours_are_not() -> None:
    store, blobs = _packed(b"one", b"three", b"seven77")
    store.put("packs/p", b"oneThreeseven77")
    found = fetch(store, blobs)
    assert list(found.faults) == [blobs[1]]
    assert blobs[1].digest in found.faults[blobs[1]].expected
    assert [bytes(found.data[b]) for b in (blobs[0], blobs[2])] == [b"one", b"seven77"]


def test_of_a_cut_pack_the_beginning_is_still_good() -> None:
    """M2."""
    store, blobs = _packed(b"one", b"three", b"seven77")
    store.put("packs/p", b"onethrees")
    found = fetch(store, blobs)
    assert set(found.data) == {blobs[0], blobs[1]}
    assert found.faults[blobs[2]].found == "a pack of 9 bytes"
    assert not found.faults[blobs[2]].missing


def test_a_pack_that_is_not_there_is_missing_not_an_error() -> None:
    store, blobs = _packed(b"one")
    store.delete(["packs/p"])
    assert fetch(store, blobs).faults[blobs[0]].missing


@pytest.mark.parametrize("error", [Unavailable, Refused])
def test_a_store_that_refuses_or_does_not_answer_is_not_a_fault_of_the_blob(
    error: type[Unavailable] | type[Refused],
) -> None:
    store, blobs = _packed(b"one")
    faulty = FaultyStore(store, fail_at=1, verbs=frozenset({"get_range"}), error=error)
    with pytest.raises(error):
        fetch(faulty, blobs)
    assert faulty.fired


def test_a_body_that_is_shorter_than_asked_for_is_noticed() -> None:
    """M2: a store that breaks its promise."""
    store, blobs = _packed(b"one", b"three")

    class Short(FaultyStore):
        def get_range(self, key: str, start: int, stop: int) -> bytes:
            return super().get_range(key, start, stop)[:-1]

    found = fetch(Short(store), blobs)
    assert not found.data
    assert found.faults[blobs[0]].found == "7 of 8 bytes"


def test_gaps_are_not_kept_alive_by_the_blobs_around_them() -> None:
    filler = bytes(50_000)
    store, blobs = _packed(b"one", filler, b"two")
    found = fetch(store, [blobs[0], blobs[2]])
    assert all(len(view.obj) < 10 for view in found.data.values())


def test_blobs_that_are_bad_or_gone_in_one_place_come_from_the_next_and_are_noted() -> None:
    """Two copies of a pack, each of which has lost another blob; and one that is gone, and one that is cut."""
    one, other = MemoryStore("one"), MemoryStore("other")
    data = [bytes([n]) * 100 for n in range(4)]
    blobs = [Blob(f"packs/{k}", 100 * n, 100 * n + 100, 0, digest64(d)) for k in "abc" for n, d in enumerate(data)]
    for place in (one, other):
        for k in "abc":
            place.put(f"packs/{k}", b"".join(data))
    flipped(one, "packs/a", 5)
    flipped(other, "packs/a", 8 * 350)
    one.delete(["packs/b"])
    one.put("packs/c", one.get("packs/c")[:150])
    store = FanoutStore(one, other)
    tally = Tally()
    fetched = fetch(store, blobs, tally)
    assert fetched.faults == {}
    assert [bytes(fetched.data[blob]) for blob in blobs] == data * 3
    assert set(store.slips.take()) == {"packs/a", "packs/b", "packs/c"}
    assert fetch(one, blobs).faults.keys() == {blobs[0], *blobs[4:8], *blobs[9:]}
