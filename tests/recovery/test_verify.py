"""What verify must find, and what it must not call damage."""

from __future__ import annotations

import pytest

from ckpt.errors import Unavailable
from ckpt.format.manifest import PinDoc, PruneDoc, seal
from ckpt.format.names import PACKS, PARTS, RUNS, SNAPSHOTS, PartName, SnapshotId, SnapshotName, pin_key, prune_key
from recovery.findings import Finding
from recovery.read import open_snapshot, read_parts
from recovery.verify import verify
from storage_backends.memory import MemoryStore
from tests.support.faulty import FaultyStore
from tests.support.stores import RUN, DirectWriter, drifting, flipped, make_store


def _store(steps: int = 4) -> tuple[MemoryStore, list[SnapshotId]]:
    store = MemoryStore()
    return store, make_store(store, drifting(steps), ranks=3, chunk=4096, blobs_per_pack=4)


def _errors(store: MemoryStore, *, deep: bool, only: SnapshotId | None = None) -> list[Finding]:
    return [f for f in verify(store, deep=deep, only=only) if f.level == "error"]


@pytest.mark.parametrize("deep", [False, True])
def test_a_whole_store_gives_no_finding_at_all(deep: bool) -> None:
    store, ids = _store()
    assert list(verify(store, deep=deep)) == []
    assert list(verify(store, deep=deep, only=ids[1])) == []


def test_a_pack_that_is_gone_is_one_finding_that_names_every_dependent_step() -> None:
    """A2."""
    store, ids = _store()
    part = read_parts(store, open_snapshot(store, ids[0]).snapshot)[1]
    blob = next(part.blob(r.chunks[0].blobs[0]) for r in part.shards if r.leaf == "model.still")
    store.delete([blob.pack])
    [finding] = _errors(store, deep=False)
    assert (finding.key, finding.step, finding.rank) == (blob.pack, 10, 1)
    assert finding.steps == (10, 20, 30, 40)
    assert finding.leaf is not None
    assert "it is not there; needed by steps 1/10, 1/20, 1/30, 1/40, rank 1: " in finding.text
    assert "model.still" in finding.text
    assert _errors(store, deep=True) == [finding]


def test_a_flipped_bit_in_a_blob_names_only_the_leaf_and_the_steps_that_need_it() -> None:
    store, ids = _store()
    part = read_parts(store, open_snapshot(store, ids[2]).snapshot)[2]
    blob = next(part.blob(r.chunks[0].blobs[-1]) for r in part.shards if r.leaf == "model.moving")
    flipped(store, blob.pack, 8 * blob.start)
    assert _errors(store, deep=False) == []
    [finding] = _errors(store, deep=True)
    assert (finding.key, finding.step, finding.rank, finding.leaf) == (blob.pack, 30, 2, "model.moving")
    assert finding.steps == (30, 40)
    assert [f.steps for f in _errors(store, deep=True, only=ids[3])] == [(40,)]
    assert _errors(store, deep=True, only=ids[1]) == []


def test_a_flipped_bit_in_a_packs_header_is_damage_that_no_snapshot_needs() -> None:
    store, _ = _store()
    key = store.list(PACKS)[0].key
    flipped(store, key, 8 * 20)
    [finding] = _errors(store, deep=True)
    assert (finding.key, finding.steps) == (key, ())
    assert "every blob that a snapshot needs from it is whole" in finding.text


def test_a_cut_pack_is_found_without_reading_it() -> None:
    """M2."""
    store, ids = _store()
    key = open_snapshot(store, ids[-1]).snapshot.packs[0][0]
    store.put(key, store.get(key)[:-1])
    counted = FaultyStore(store)
    [finding] = [f for f in verify(counted, deep=False) if f.level == "error"]
    assert finding.key == key
    assert "bytes, found" in finding.text


def test_a_snapshot_without_one_of_its_parts_is_called_debris() -> None:
    store, ids = _store()
    store.delete([PartName(ids[1], 2).key])
    [finding] = _errors(store, deep=True)
    assert (finding.key, finding.step, finding.rank) == (PartName(ids[1], 2).key, 20, 2)
    assert "debris" in finding.text


@pytest.mark.parametrize("prefix", [SNAPSHOTS, PARTS, RUNS, "store.json"])
def test_a_flipped_bit_in_a_document_is_found_without_deep(prefix: str) -> None:
    store, _ = _store(2)
    key = next(entry.key for entry in store.list("") if entry.key.startswith(prefix))
    for bit in (3, 8 * (len(store.get(key)) // 2) + 1, 8 * len(store.get(key)) - 2):
        flipped(store, key, bit)
        assert key in {f.key for f in _errors(store, deep=False)}
        flipped(store, key, bit)
    assert _errors(store, deep=False) == []


def test_what_is_torn_of_a_step_that_was_never_committed_is_debris_and_no_error() -> None:
    store = MemoryStore()
    writer = DirectWriter(store, chunk=4096)
    writer.begin()
    states = drifting(2)
    writer.step(1, states[0])
    before = {e.key for e in store.list("")}
    writer.step(2, states[1], commit=False)
    torn = sorted(e.key for e in store.list("") if e.key not in before)
    for key in torn:
        store.put(key, store.get(key)[:-7])
    found = [f for f in verify(store, deep=True, threads=1) if f.key in torn]
    assert sorted(f.key for f in found if "debris" in f.text) == torn
    assert {(f.level, f.steps) for f in found} == {("warning", ())}


def test_leftovers_debris_and_foreign_files_are_notes_not_errors() -> None:
    """C7."""
    store, ids = _store(2)
    writer = DirectWriter(store, ranks=2, chunk=4096)
    writer.step(70, drifting(1, seed=9)[0], commit=False)
    store.put("README.txt", b"what is this")
    store.put(pin_key("gone"), seal(PinDoc(1, "gone", str(SnapshotId(RUN, 99)))))
    store.put(prune_key("abc"), seal(PruneDoc(1, (), ())))
    found = list(verify(store, deep=True))
    assert {f.level for f in found} == {"note", "warning"}
    assert {f.key for f in found} >= {
        "README.txt",
        pin_key("gone"),
        prune_key("abc"),
        PartName(SnapshotId(RUN, 70), 0).key,
    }
    assert any(f.key.startswith(PACKS) and f.step == 70 for f in found)
    assert all(f.step != ids[0].step for f in found)


@pytest.mark.parametrize("data", [b"", b"{", b"\0" * 40])
def test_a_cut_snapshot_document_is_an_error_that_names_its_step(data: bytes) -> None:
    store, ids = _store(2)
    store.put(SnapshotName(ids[1]).key, data)
    errors = _errors(store, deep=True)
    assert [(f.key, f.step, f.steps) for f in errors] == [(SnapshotName(ids[1]).key, 20, (20,))]


def test_a_part_that_is_anothers_is_found() -> None:
    store, ids = _store(2)
    store.put(PartName(ids[1], 0).key, store.get(PartName(ids[1], 1).key))
    [finding] = _errors(store, deep=False)
    assert (finding.key, finding.step, finding.rank) == (PartName(ids[1], 0).key, 20, 0)


def test_a_store_that_does_not_answer_is_not_called_whole() -> None:
    """M3."""
    store, _ = _store(1)
    counted = FaultyStore(store)
    list(verify(counted, deep=True))
    for n in range(1, len(counted.calls) + 1):
        faulty = FaultyStore(store, fail_at=n)
        with pytest.raises(Unavailable):
            list(verify(faulty, deep=True))
        assert faulty.fired


def test_every_pack_is_read_once_and_a_long_chain_once_more() -> None:
    """The deep check stays linear in a history of deltas."""
    store, _ = _store(8)
    size = sum(entry.size for entry in store.list(PACKS))
    read = 0

    class Watched(FaultyStore):
        def get_range(self, key: str, start: int, stop: int) -> bytes:
            nonlocal read
            read += stop - start
            return super().get_range(key, start, stop)

    assert list(verify(Watched(store), deep=True)) == []
    assert size < read < 2.2 * size
