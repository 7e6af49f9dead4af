"""Blobs that leave a pack as they are: what is read, and what is noticed."""

from __future__ import annotations

import numpy as np
import pytest

from ckpt.format.manifest import Blob, digest64
from ckpt.format.pack import PackBuilder
from ckpt.saving.moving import GAP, HEAD, HEADER, REQUEST, parcels
from storage_backends.memory import MemoryStore
from tests.support.nodes import CountingStore
from tests.support.stores import flipped

KEY = "packs/pack"


def packed(store: CountingStore, sizes: list[int]) -> list[Blob]:
    """One pack with blobs of these sizes; every other one is a delta."""
    builder, dice, told = PackBuilder(), np.random.default_rng(len(sizes)), []
    for n, size in enumerate(sizes):
        data, kind = dice.bytes(size), 5 if n % 2 else 0
        base = f"{n + 1000:032x}" if kind else None
        told.append((kind, digest64(data)))
        builder.add(
            data, kind=kind, digest=told[-1][1], chunk_digest=f"{n:032x}", dtype="float32", base_digest=base
        )  # fmt: skip
    pack = builder.finish()
    store.put(KEY, pack.data)
    return [Blob(KEY, *lies, *about) for lies, about in zip(pack.ranges, told, strict=True)]


def moved(store: CountingStore, blobs: list[Blob]) -> list:  # type: ignore[type-arg]
    return list(parcels(store, KEY, len(store.get(KEY)), blobs, lambda: None))


@pytest.fixture
def store() -> CountingStore:
    return CountingStore(MemoryStore())


@pytest.mark.parametrize(
    ("sizes", "which", "reads"),
    [
        ([100] * 20, [19, 3, 4], 1),  # all of a small pack in one read
        ([HEAD, 50, 70, GAP + 1, 90], [1, 2, 4], 3),  # the head; two side by side; one far away
        ([HEAD, *([40] * 2500)], [7, 2000], 4),  # a header that is longer than what is read at first
        ([HEAD, REQUEST - 10, 20, 30], [1, 2, 3], 3),  # no request grows beyond its bound
    ],
)
def test_blobs_come_out_as_they_went_in_with_what_was_said_of_them(
    store: CountingStore, sizes: list[int], which: list[int], reads: int
) -> None:
    every = packed(store, sizes)
    blobs = [every[n] for n in which]
    data = store.get(KEY)
    store.reads.clear()
    found = list(parcels(store, KEY, len(data), blobs, lambda: None))
    assert len(store.reads) == reads
    assert {parcel.of for parcel in found} == set(blobs)
    for parcel in found:
        n = every.index(parcel.of)
        assert parcel.data == data[parcel.of.start : parcel.of.stop]
        assert (parcel.kind, parcel.digest) == (parcel.of.kind, parcel.of.digest)
        assert (parcel.chunk_digest, parcel.dtype) == (f"{n:032x}", "float32")
        assert parcel.base_digest == (f"{n + 1000:032x}" if n % 2 else None)


@pytest.mark.parametrize("what", ["blob", "name", "other", "header"])
def test_what_is_not_as_its_part_says_is_refused(store: CountingStore, what: str) -> None:
    blobs = packed(store, [100] * 20)
    if what == "blob":
        flipped(store, KEY, 8 * blobs[3].start + 5)
    elif what == "name":
        at = store.get(KEY).index(blobs[3].digest.encode())
        flipped(store, KEY, 8 * at)
    elif what == "header":
        flipped(store, KEY, 8 * 8 + 1)
    wanted = Blob(KEY, blobs[3].start, blobs[3].stop + 1, blobs[3].kind, blobs[3].digest)
    with pytest.raises(ValueError, match=r"digest|header|pack"):
        moved(store, [wanted if what == "other" else blobs[3]])


def test_a_header_that_is_too_long_to_be_read_beside_training_is_left_alone(store: CountingStore) -> None:
    blobs = packed(store, [1] * (HEADER // 90))
    with pytest.raises(ValueError, match="a header of"):
        moved(store, blobs[:1])
