"""`flaw`: what an object's name and own bytes tell."""

from __future__ import annotations

import pytest

from ckpt.format.intact import flaw
from storage_backends.memory import MemoryStore
from tests.support.stores import drifting, make_store


@pytest.fixture(scope="module")
def store() -> MemoryStore:
    store = MemoryStore()
    make_store(store, drifting(2, rows=16), ranks=2)
    return store


def test_what_was_written_has_no_flaw(store: MemoryStore) -> None:
    keys = [entry.key for entry in store.list("")]
    assert {key.split("/")[0] for key in keys} == {"store.json", "runs", "parts", "packs", "snapshots"}
    assert [(key, found) for key in keys if (found := flaw(key, store.get(key))) is not None] == []


def test_every_cut_object_and_every_object_of_another_name_has_one(store: MemoryStore) -> None:
    keys = [entry.key for entry in store.list("")]
    for key in keys:
        data = store.get(key)
        for bad in (data[:-1], data[: len(data) // 2], b"", data + b"\0"):
            assert flaw(key, bad) is not None, key
    packs = [key for key in keys if key.startswith("packs/")]
    parts = [key for key in keys if key.startswith("parts/")]
    assert "as its name says" in str(flaw(packs[0], store.get(packs[1])))
    assert "it holds the part of" in str(flaw(parts[0], store.get(parts[1])))


def test_a_flipped_bit_is_a_flaw_of_packs_and_documents(store: MemoryStore) -> None:
    for entry in store.list(""):
        if entry.key.startswith("parts/"):
            continue  # some bits of a zstd frame mean nothing; the digest in the snapshot knows them all
        data = store.get(entry.key)
        for bit in range(0, 8 * len(data), max(1, len(data) // 10)):
            bad = bytearray(data)
            bad[bit // 8] ^= 1 << bit % 8
            assert flaw(entry.key, bytes(bad)) is not None, (entry.key, bit)


def test_what_is_not_ours_has_none() -> None:
    assert flaw("notes.txt", b"anything") is None
