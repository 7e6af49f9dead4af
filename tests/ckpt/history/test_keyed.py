"""A store behind a key: what passes, what does not, and that nothing is asked of it with a wrong one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ckpt.errors import DamagedError, WrongKey
from ckpt.format.key import Key, Unopened
from ckpt.format.manifest import StoreDoc, unseal
from ckpt.format.names import STORE_KEY, RunId, SnapshotId, pack_place
from ckpt.format.pack import PackBuilder, read_header
from ckpt.history.catalog import read_history
from ckpt.history.keyed import KeyedStore, key_id, key_of, with_key
from ckpt.history.runs import ensure_store
from recovery.load import load
from storage_backends.base import NotFound, Refused, Store
from storage_backends.fanout import FanoutStore
from storage_backends.memory import MemoryStore
from storage_backends.throttle import Limits, limited
from tests.support.faulty import FaultyStore
from tests.support.stores import drifting, written_store

KEY, OTHER = Key(bytes(range(32))), Key(bytes(32))
ID = SnapshotId(RunId(1, "0badcafe"), 10)


def pack(key: Key | None) -> tuple[str, bytes]:
    builder = PackBuilder(key, pack_place(ID, 0, 0))
    blob = b"content" if key is None else key.seal_blob(b"content", 0, "p")
    builder.add(blob, kind=0, digest="0" * 16, chunk_digest="1" * 32, dtype="uint8", base_digest=None)
    done = builder.finish()
    return f"{pack_place(ID, 0, 0)}-{done.digest}.safetensors", done.data


def test_documents_are_sealed_below_and_open_above_with_the_lengths_they_have() -> None:
    disk = MemoryStore()
    store = KeyedStore(disk, KEY)
    ensure_store(store)
    store.put("pins/a.json", bytearray(b"secret words"))
    assert store.get("pins/a.json") == b"secret words"
    assert store.get_range("pins/a.json", 7, 12) == b"words"
    assert [(e.key, e.size) for e in store.list("pins/")] == [("pins/a.json", 12)]
    assert b"secret" not in disk.get("pins/a.json")
    with pytest.raises(Refused, match="holds only 12"):
        store.get_range("pins/a.json", 0, 13)
    store.delete(["pins/a.json"])
    with pytest.raises(NotFound):
        store.get("pins/a.json")


def test_packs_pass_as_they_are_and_only_sealed_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = MemoryStore()
    store = KeyedStore(disk, KEY)
    name, data = pack(KEY)
    store.put(name, data)
    assert disk.get(name) == store.get(name) == data
    (blob,) = read_header(data, key=KEY)
    assert KEY.open_blob(store.get_range(name, blob.start, blob.stop), 0) == b"content"
    assert blob.chunk_digest == "1" * 32
    assert b"1" * 32 not in data, "a digest of what is secret lies there in the clear"
    for key in (None, OTHER):
        name, data = pack(key)
        with pytest.raises(Refused, match=f"is not encrypted with key {KEY.id}; it is not stored in the clear"):
            store.put(name, data)
    for key, says in ((None, "sealed, and no key is given"), (OTHER, f"this is key {OTHER.id}")):
        with pytest.raises(ValueError, match=says):
            read_header(pack(KEY)[1], key=key)
    with pytest.raises(ValueError, match="in the clear, in an encrypted store"):
        read_header(pack(None)[1], key=KEY)


def test_what_could_not_be_opened_is_not_copied_over_what_is_whole() -> None:
    disk = MemoryStore()
    store = KeyedStore(disk, KEY)
    disk.put("pins/a.json", b"in the clear")
    opened = store.get("pins/a.json")
    assert isinstance(opened, Unopened)
    with pytest.raises(Refused, match="could not be opened, so it cannot be copied"):
        store.put("pins/b.json", opened)
    with pytest.raises(Refused, match=r"pins/a\.json: expected .*, found one in the clear|without one"):
        store.get_range("pins/a.json", 0, 1)


def three() -> dict[str, tuple[MemoryStore, Key | None, str]]:
    """Store, the key it is opened with, and what is said."""
    locked, plain = MemoryStore("locked"), MemoryStore("plain")
    written_store(with_key(locked, KEY), drifting(2, rows=8), chunk=4096)
    written_store(plain, drifting(2, rows=8), chunk=4096)
    return {
        "no key": (locked, None, f"this store is encrypted with key {KEY.id}, and none was given; pass"),
        "another": (locked, OTHER, f"encrypted with key {KEY.id}, and key {OTHER.id} was given; give the right one"),
        "one too many": (plain, KEY, f"this store is not encrypted, and key {KEY.id} was given; leave key out"),
    }


ASKED: dict[str, Callable[[Store], Any]] = {
    "history": read_history,
    "load": load,
    "begin": ensure_store,
    "open a run": lambda store: written_store(store, drifting(1, rows=8)),
}


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("case", ["no key", "another", "one too many"])
def test_a_wrong_key_is_told_before_anything_is_read_or_written(case: str, asked: str) -> None:
    disk, key, says = three()[case]
    before = {e.key: disk.get(e.key) for e in disk.list("")}
    watched = FaultyStore(disk)
    with pytest.raises(WrongKey, match=says) as told:
        ASKED[asked](with_key(watched, key))
    assert (told.value.expected, told.value.found) == (
        None if case == "one too many" else KEY.id,
        None if key is None else key.id,
    )
    assert {e.key: disk.get(e.key) for e in disk.list("")} == before
    if key is not None:
        assert [(verb, name) for verb, name in watched.calls if verb != "list"] == [("get", STORE_KEY)]


def test_a_store_whose_mark_cannot_be_read_is_read_by_what_its_documents_say() -> None:
    for mark in (None, b"rubbish"):
        disk, _, _ = three()["no key"]
        if mark is None:
            disk.delete([STORE_KEY])
        else:
            disk.put(STORE_KEY, mark)
        assert len(read_history(with_key(disk, KEY)).snapshots) == 2
        history = read_history(with_key(disk, OTHER))
        assert not history.snapshots
        assert all(f"found one of key {KEY.id}" in p.text for p in history.problems)
        plain = read_history(disk)
        assert not plain.snapshots
        assert all(f"one that is encrypted with key {KEY.id}" in p.text for p in plain.problems)


def test_the_mark_of_an_encrypted_store_is_refused_by_versions_that_know_none() -> None:
    disk = MemoryStore()
    ensure_store(KeyedStore(disk, KEY))
    mark = unseal(disk.get(STORE_KEY), StoreDoc, key=STORE_KEY)
    assert (mark.format, mark.key_id) == (2, KEY.id)
    assert key_id(disk) == KEY.id
    ensure_store(KeyedStore(disk, KEY))
    with pytest.raises(WrongKey):
        ensure_store(disk)


def test_a_key_is_found_below_limits_and_in_every_place_of_several() -> None:
    one, two = MemoryStore("one"), MemoryStore("two")
    store = limited(with_key(FanoutStore(one, two), KEY), Limits(bandwidth=1e9))
    assert key_of(store) is KEY
    assert key_of(FanoutStore(one, two)) is None
    ensure_store(store)
    store.put("pins/a.json", b"secret")
    assert one.get("pins/a.json") == two.get("pins/a.json")
    assert b"secret" not in one.get("pins/a.json")
    one.put("pins/a.json", two.get("pins/a.json")[:-1])
    assert two.get("pins/a.json")


def test_a_damaged_mark_is_damage_to_who_would_write() -> None:
    disk = MemoryStore()
    disk.put(STORE_KEY, b"rubbish")
    with pytest.raises(DamagedError, match=STORE_KEY):
        ensure_store(with_key(disk, KEY))
