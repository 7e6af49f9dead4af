"""An encrypted store in the hands of somebody without the key: nothing is learnt, nothing forged is believed, and what
was cut, swapped, moved or made with another key is told apart. The step before is read instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt
from ckpt.cli import main
from ckpt.errors import DamagedError
from ckpt.format.key import NONCE, TAG, Key
from ckpt.format.names import PACKS, PartName, SnapshotId, SnapshotName
from ckpt.history.clock import SystemClock
from ckpt.history.keyed import with_key
from ckpt.history.retention import Keep, execute, plan_prune
from recovery.compact import compact
from recovery.compaction import plan_compact
from recovery.fetch import Tally, fetch
from recovery.read import open_snapshot, read_parts
from recovery.scrub import scrub
from recovery.verify import verify
from storage_backends.base import Store
from storage_backends.local import LocalStore
from storage_backends.memory import MemoryStore
from tests.support.stores import State, drifting, written_store

KEY = Key(bytes(range(32)))
STATES: list[State] = list(drifting(3, rows=64))


@pytest.fixture
def disk() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def ids(disk: MemoryStore) -> list[SnapshotId]:
    return written_store(with_key(disk, KEY), STATES, chunk=4096)


def opened(disk: MemoryStore) -> Store:
    return with_key(disk, KEY)


def packs_of(disk: MemoryStore, id_: SnapshotId) -> list[str]:
    return [e.key for e in disk.list(f"{PACKS}{id_.run}/{id_.step:012d}/")]


def swap(disk: MemoryStore, one: str, other: str) -> None:
    first, second = disk.get(one), disk.get(other)
    disk.put(one, second)
    disk.put(other, first)


def refused(disk: MemoryStore, id_: SnapshotId, says: str) -> None:
    with pytest.raises(DamagedError, match=says):
        ckpt.load(opened(disk), step=id_.step)
    findings = [f.text for f in verify(opened(disk), deep=True) if f.level == "error"]
    assert findings


def test_nothing_of_the_state_lies_there_in_the_clear(disk: MemoryStore, ids: list[SnapshotId]) -> None:
    """Neither names of leaves, nor values, metrics, hosts, digests of chunks, nor bytes of tensors."""
    parts = read_parts(opened(disk), open_snapshot(opened(disk), ids[0]).snapshot)
    digests = [c.digest.encode() for part in parts.values() for row in part.shards for c in row.chunks]
    assert digests
    raw = STATES[0]["model.still"].tobytes()[:32]  # type: ignore[union-attr]
    secrets = [b"model", b"moving", b"loss", b"boot", b"float", *digests, raw]
    for entry in disk.list(""):
        data = disk.get(entry.key)
        assert not [secret for secret in secrets if secret in data], entry.key


def test_who_writes_it_again_writes_the_same_bytes(disk: MemoryStore, ids: list[SnapshotId]) -> None:
    again = MemoryStore()
    written_store(with_key(again, KEY), STATES, chunk=4096)
    different = {e.key for e in disk.list("") if not e.key.startswith("runs/") and again.get(e.key) != disk.get(e.key)}
    assert not different
    assert [e.key for e in again.list("")] == [e.key for e in disk.list("")]


def test_a_blob_is_read_by_itself_and_costs_28_bytes(disk: MemoryStore, ids: list[SnapshotId]) -> None:
    plain = MemoryStore()
    written_store(plain, STATES, chunk=4096)

    def read(store: Store) -> tuple[int, int, int]:
        parts = read_parts(store, open_snapshot(store, ids[2]).snapshot)
        blobs = sorted({b for part in parts.values() for row in part.shards for c in part.chunks(row) for b in c.blobs},
                       key=lambda b: (b.pack, b.start))  # fmt: skip
        tally = Tally()
        for blob in blobs[:20]:
            found = fetch(store, [blob], tally)
            assert not found.faults
        return tally.requests, tally.bytes, sum(len(fetch(store, [b]).data[b]) for b in blobs[:20])

    requests, read_, opened_ = read(opened(disk))
    assert requests > 10
    assert read_ == opened_ + requests * (NONCE + TAG)
    assert read(plain) == (requests, opened_, opened_)


def test_two_documents_swapped(disk: MemoryStore, ids: list[SnapshotId]) -> None:
    swap(disk, SnapshotName(ids[1]).key, SnapshotName(ids[2]).key)
    refused(disk, ids[2], "document of snapshots/.*0030.json, found the document that belongs at .*0020.json")
    assert ckpt.load(opened(disk))["step"] == 0


def test_two_parts_swapped(disk: MemoryStore, ids: list[SnapshotId]) -> None:
    swap(disk, PartName(ids[1], 0).key, PartName(ids[2], 0).key)
    refused(disk, ids[2], "found the document that belongs at parts/")


def test_two_packs_swapped(disk: MemoryStore, ids: list[SnapshotId]) -> None:
    one, other = packs_of(disk, ids[0])[0], packs_of(disk, ids[2])[0]
    swap(disk, one, other)
    with pytest.raises(DamagedError, match=r"it is the pack that belongs at packs/|a pack of [0-9]+ bytes"):
        ckpt.load(opened(disk), step=ids[2].step)
    found = [f.text for f in verify(opened(disk), deep=True) if f.level == "error"]
    assert any("it is the pack that belongs at packs/" in text for text in found)


def test_two_blobs_swapped_or_one_in_the_place_of_another(disk: MemoryStore, ids: list[SnapshotId]) -> None:
    store = opened(disk)
    parts = read_parts(store, open_snapshot(store, ids[0]).snapshot)
    blobs = {b for part in parts.values() for row in part.shards for c in part.chunks(row) for b in c.blobs}
    by_size: dict[tuple[int, int], list[Any]] = {}
    for blob in sorted(blobs, key=lambda b: (b.pack, b.start)):
        by_size.setdefault((blob.size, blob.kind), []).append(blob)
    pair = next((same for same in by_size.values() if len(same) > 1), None)
    assert pair is not None, "no two blobs of one size: this test shows nothing"
    first, second = pair[:2]
    content = {b: disk.get_range(b.pack, b.start, b.stop) for b in (first, second)}
    for blob, other in ((first, second), (second, first)):
        data = bytearray(disk.get(blob.pack))
        data[blob.start : blob.stop] = content[other]
        disk.put(blob.pack, bytes(data))
    with pytest.raises(DamagedError, match="it is a whole blob of this store that belongs elsewhere"):
        ckpt.load(store, step=ids[0].step)


def test_cut_and_flipped_objects_are_not_taken_for_swapped_ones(disk: MemoryStore, ids: list[SnapshotId]) -> None:
    pack = packs_of(disk, ids[2])[0]
    whole = disk.get(pack)
    disk.put(pack, whole[:-5])
    with pytest.raises(DamagedError, match=r"a pack of [0-9]+ bytes") as told:
        ckpt.load(opened(disk), step=ids[2].step)
    assert "belongs" not in str(told.value)
    disk.put(pack, whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:])
    with pytest.raises(DamagedError, match=r"expected digest [0-9a-f]+ of bytes .*, found digest") as told:
        ckpt.load(opened(disk), step=ids[2].step)
    assert "belongs" not in str(told.value)


def test_what_another_key_wrote_is_told(disk: MemoryStore, ids: list[SnapshotId]) -> None:
    """Under the same names, by somebody with a key of his own."""
    other = Key(bytes(32))
    theirs = MemoryStore()
    written_store(with_key(theirs, other), STATES, chunk=4096)
    key = SnapshotName(ids[2]).key
    disk.put(key, theirs.get(key))
    refused(disk, ids[2], f"expected a document encrypted with key {KEY.id}, found one of key {other.id}")


def test_a_document_in_the_clear_is_not_believed(disk: MemoryStore, ids: list[SnapshotId]) -> None:
    plain = MemoryStore()
    written_store(plain, STATES, chunk=4096)
    for key in (SnapshotName(ids[2]).key, PartName(ids[2], 0).key):
        before = disk.get(key)
        disk.put(key, plain.get(key))
        refused(disk, ids[2], "one in the clear: nobody with the key wrote it|without one")
        disk.put(key, before)


def test_compaction_moves_blobs_as_they_are_and_a_prune_takes_the_rest(disk: MemoryStore) -> None:
    store = opened(disk)
    ids = written_store(store, list(drifting(8, rows=64)), chunk=4096)
    execute(plan_prune(store, Keep(last=1), grace=0), store, clock=SystemClock())
    before = {id_: {p: v.tobytes() for p, v in ckpt.load(store, step=id_.step).items()} for id_ in ids[-1:]}
    plan = plan_compact(store, threshold=1.0)
    compact(plan, store)
    for id_, state in before.items():
        assert {p: v.tobytes() for p, v in ckpt.load(store, step=id_.step).items()} == state
    execute(plan_prune(store, Keep(last=1), grace=0), store, clock=SystemClock())
    assert not [f for f in verify(store, deep=True) if f.level == "error"]


def test_without_the_key_every_object_can_be_checked_by_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = LocalStore(tmp_path / "store")
    written_store(with_key(store, KEY), STATES, chunk=4096)
    assert not list(scrub(store, deep=True))
    assert main(["verify", store.url, "--deep"]) == 0
    assert "is what was written; what they say together only the key can tell" in capsys.readouterr().out
    bad = 0
    for entry in store.list(""):
        if entry.key == "store.json":
            continue
        whole = store.get(entry.key)
        for data in (whole[:-1], whole[:50] + bytes([whole[50] ^ 1]) + whole[51:], b""):
            store.put(entry.key, data)
            assert [f.key for f in scrub(store, deep=True)] == [entry.key]
            bad += 1
        store.put(entry.key, whole)
    assert bad > 20
    keys = [e.key for e in store.list("snapshots/")]
    first, second = store.get(keys[0]), store.get(keys[1])
    store.put(keys[0], second)
    store.put(keys[1], first)
    assert main(["verify", store.url]) == 1
    said = capsys.readouterr().out
    assert said.count("it is the document that belongs at snapshots/") == 2
    assert "which steps they cost only the key can tell" in said


def test_a_job_comes_back_from_an_encrypted_store_and_writes_deltas_there(tmp_path: Path) -> None:
    """The whole way: save, kill off, restore, save again; each verb with the key from a variable or a file."""
    import torch

    from tests.support.training import Training

    key = tmp_path / "key"
    key.write_text("5a" * 32)
    options = ckpt.Options(key=key)
    first = Training()
    with ckpt.Checkpointer(tmp_path / "s", first.state, options=options, mirror="off") as saver:
        for step in (1, 2):
            first.train(step)
            saver.save(step).wait()
    second = Training(seed=1)
    with ckpt.Checkpointer(tmp_path / "s", second.state, options=options, mirror="off") as saver:
        assert saver.restore() == 2
        assert second.bytes() == first.bytes()
        for training in (first, second):
            torch.manual_seed(3)
            training.train(3)
        saver.save(3).wait()
    third = Training(seed=2)
    ckpt.load_into(tmp_path / "s", third.state, key=key)  # type: ignore[arg-type]
    assert third.bytes() == first.bytes()
    assert [one.step for one in ckpt.History(tmp_path / "s", key=key).list()] == [1, 2, 3]
    verbs = (["list"], ["show"], ["diff", "1", "3"], ["du"], ["verify", "--deep"], ["plan", "--lost", "0"], ["compact"],
             ["pin", "good"], ["unpin", "good"], ["prune", "--keep-last", "1"],
             ["export", "3", str(tmp_path / "out"), "--to", "safetensors"])  # fmt: skip
    for verb in verbs:
        if verb != ["verify", "--deep"]:
            assert main([verb[0], str(tmp_path / "s"), *verb[1:]]) == 2, verb
        assert main([verb[0], str(tmp_path / "s"), *verb[1:], "--key", str(key)]) == 0, verb
    imported = ["import", str(tmp_path / "t"), str(tmp_path / "out"), "--from", "safetensors", "--key", str(key)]
    assert main(imported) == 0
    assert ckpt.load(tmp_path / "t", key=key)
    with pytest.raises(ckpt.WrongKey):
        ckpt.load(tmp_path / "t")
    assert np.all(np.isfinite(first.model.out.weight.detach().numpy()))
