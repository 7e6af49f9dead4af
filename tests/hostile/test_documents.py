"""Documents that lie: their digests hold, so only what they say can give them away. The step before is read instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import zstandard

import ckpt
from ckpt.errors import DamagedError, StoreInUse
from ckpt.format.names import PINS, PRUNES, STORE_KEY, PartName, RunId, SnapshotId, SnapshotName, alive_key, run_key
from ckpt.history.catalog import read_history
from ckpt.history.retention import Keep, plan_prune
from ckpt.history.runs import claimed_by_prune, ensure_store, in_use, open_run
from recovery.compaction import plan_compact
from recovery.verify import verify
from storage_backends.base import Store
from storage_backends.memory import MemoryStore
from tests.ckpt.history.making import FakeClock, somebody
from tests.hostile.forging import (
    FIRST,
    MB,
    at_most,
    forge_part,
    forge_snapshot,
    replace_part,
    reseal,
    sealed,
    victim,
    zstd_claiming,
)
from tests.support.stores import RUN

HUGE = 1 << 62
ARABIC = "".join(chr(0x660 + n) for n in (0, 0, 0, 0, 0, 1))
"""The number 000001: digits to many a reader, and to int()."""


def first_shard(part: Any) -> Any:
    return next(shard for shard in part["shards"] if "chunks" in shard)


def set_in(path: str, value: Any) -> Callable[[Any], None]:
    """Sets ``a.0.b`` of a tree; ``shard`` begins at its first large shard."""

    def change(tree: Any) -> None:
        *way, last = (int(word) if word.isdigit() else word for word in path.split("."))
        node = tree
        for word in way:
            node = first_shard(node) if word == "shard" else node[word]
        node[last] = value

    return change


def both(*changes: Callable[[Any], None]) -> Callable[[Any], None]:
    def change(tree: Any) -> None:
        for one in changes:
            one(tree)

    return change


def falls_back(store: Store, ids: list[SnapshotId], says: str) -> None:
    """Step 20 is refused by name, the latest is step 10, and verify names the object; nothing of it takes memory."""
    with at_most(24 * MB):
        with pytest.raises(DamagedError, match=says) as told:
            ckpt.load(store, step=20)
        assert told.value.key
        assert "found" in str(told.value)
        found = ckpt.load(store)
        assert np.array_equal(found["w"], np.full((64, 32), FIRST, np.float32))
        assert any(f.level == "error" and (20 in f.steps or "0020" in f.key) for f in verify(store, deep=True))


PARTS = {
    "a shape of 2^124 elements": (
        both(set_in("shard.shape", [HUGE, HUGE]), set_in("shard.box", [[0, 0], [HUGE, HUGE]])),
        "chunks where its box has",
    ),
    "65 dimensions": (
        both(set_in("shard.shape", [1] * 65), set_in("shard.box", [[0] * 65, [1] * 65])),
        "65 dimensions",
    ),
    "chunks of 2^62 bytes": (set_in("chunk", HUGE), "none has more than"),
    "a chunk cut out of a box of 2^62 rows": (
        set_in("shard.chunks.0", ["0" * 32, [[0, 0, 1, 0, "0" * 16]], [[0, 0], [HUGE, 32]]]),
        "more than",
    ),
    "a blob of 2^50 bytes": (both(set_in("packs.0.1", HUGE), set_in("shard.chunks.0.1.0.2", 1 << 50)), "a blob of"),
    "a blob behind the end of its pack": (set_in("shard.chunks.0.1.0.2", 1 << 20), "does not exist"),
    "a blob of a pack that is not listed": (set_in("shard.chunks.0.1.0.0", HUGE), "does not exist"),
    "a chain of no blobs": (set_in("shard.chunks.0.1", []), "without blobs"),
    "an unknown codec kind": (set_in("shard.chunks.0.1.0.3", 99), "codec kind 99"),
    "a chain that begins with a delta": (set_in("shard.chunks.0.1.0.3", 3), "begins with a delta"),
    "a pack outside of the store": (set_in("packs.0.0", "../../../etc/passwd"), "no name of one"),
    "a pack by an absolute path": (set_in("packs.0.0", "/etc/passwd"), "no name of one"),
    "a pack with NUL in its name": (set_in("packs.0.0", "packs/\0"), "no name of one"),
    "a pack with a name of a megabyte": (set_in("packs.0.0", "packs/" + "x" * MB), "no name of one"),
    "a pack named in digits of another script": (
        set_in("packs.0.0", f"packs/{ARABIC}-0badcafe/000000000010/00000-000-0000000000000000.safetensors"),
        "no name of one",
    ),
    "a rank beyond the world": (set_in("rank", 7), "rank 7"),
    "others beyond the world": (set_in("others", [5]), "among the others"),
    "another rank's step": (set_in("step", 10), "snapshot, rank, world size"),
    "a number of 5,000 digits": (set_in("step", 10**4000), "out of range"),
    "a negative length": (set_in("shard.box.1.0", -1), "Expected `int` >= 0"),
    "a dtype nobody knows": (set_in("shard.dtype", "__class__"), "unknown dtype"),
    "a leaf that is there twice": (lambda part: part["shards"].append(first_shard(part)), "exactly once|overlap|hold"),
    "a leaf that is there by half": (lambda part: part["shards"].remove(first_shard(part)), "w|make another snapshot"),
    "a value that names a class": (set_in("values.best", {"class": ["os.system", "true"]}), "unknown tag 'class'"),
    "a value that names a function": (set_in("values.best", {"default": ["exec", []]}), "exec"),
    "a value 5,000 deep": (set_in("values.best", 0), "deep|recursion"),
    "a value with a key twice": (set_in("values.best", {"dict": [["a", 1], ["a", 2]]}), "occurs twice"),
    "a bare number beyond 2^53": (set_in("values.best", 1 << 60), "beyond"),
}  # fmt: skip


@pytest.mark.parametrize("name", PARTS)
def test_a_forged_part_is_damage_and_the_step_before_is_read(name: str) -> None:
    change, says = PARTS[name]
    store = MemoryStore()
    ids = victim(store)
    if "5,000 deep" in name:
        text = zstandard.decompress(store.get(PartName(ids[1], 0).key))
        deep = b"[" * 5000 + b"]" * 5000
        replace_part(store, ids[1], zstandard.compress(text.replace(b'"best":0.5', b'"best":' + deep)))
    elif "5,000 digits" in name:
        text = zstandard.decompress(store.get(PartName(ids[1], 0).key))
        replace_part(store, ids[1], zstandard.compress(text.replace(b'"step":20', b'"step":' + b"9" * 5000)))
    elif "by half" in name:
        # All is consistent but the total: such a snapshot can be read, and is not what its parts say.
        forge_part(store, ids[1], change)
        assert any("another snapshot" in f.text for f in verify(store))
        return
    else:
        forge_part(store, ids[1], change)
    falls_back(store, ids, says)


def test_json_that_says_a_thing_twice_says_it_once_and_a_name_must_agree() -> None:
    store = MemoryStore()
    ids = victim(store)
    text = zstandard.decompress(store.get(PartName(ids[1], 0).key))
    replace_part(store, ids[1], zstandard.compress(text.replace(b'"step":20', b'"step":20,"step":10')))
    falls_back(store, ids, "snapshot, rank, world size")


@pytest.mark.parametrize("claim", [100, 1 << 20, 1 << 40, None], ids=["too little", "a megabyte", "a terabyte", "none"])
def test_a_part_that_is_a_zstd_bomb_takes_no_memory(claim: int | None) -> None:
    store = MemoryStore()
    ids = victim(store)
    replace_part(store, ids[1], zstd_claiming(claim, repeat=512 * MB))
    falls_back(store, ids, "claims|zstd|Destination buffer")


SNAPSHOTS = {
    "a world of 10^18 ranks": set_in("world_size", 10**18),
    "no parts": set_in("parts", []),
    "a part outside of the store": set_in("parts.0.0", "../outside"),
    "a part by an absolute path": set_in("parts.0.0", "/etc/passwd"),
    "store.json as its part": set_in("parts.0.0", "store.json"),
    "a part of another step": set_in("parts.0.0", PartName(SnapshotId(RUN, 10), 0).key),
    "a part of another rank": set_in("parts.0.0", PartName(SnapshotId(RUN, 20), 3).key),
    "a part in digits of another script": set_in("parts.0.0", f"parts/{ARABIC}-0badcafe/000000000020/00000.json.zst"),
    "a pack outside of the store": set_in("packs.0.0", "packs/../../outside"),
    "a pin as its pack": set_in("packs.0.0", "pins/good.json"),
    "another step's name": set_in("step", 10),
    "a step of 14 digits": set_in("step", 10**14),
    "another run's name": set_in("run", "000009-0badcafe"),
    "another revision": set_in("revision", 3),
    "a run with a path in it": set_in("run", "../../../etc"),
}


@pytest.mark.parametrize("name", SNAPSHOTS)
def test_a_forged_snapshot_is_skipped_by_all_that_read_and_nothing_is_removed_beside_it(name: str) -> None:
    store = MemoryStore()
    ids = victim(store)
    forge_snapshot(store, ids[1], SNAPSHOTS[name])
    with at_most(24 * MB):
        with pytest.raises(DamagedError, match=r"snapshots/"):
            ckpt.load(store, step=20)
        assert np.array_equal(ckpt.load(store)["w"], np.full((64, 32), FIRST, np.float32))
        history = read_history(store)
        assert list(history.snapshots) == ids[:1]
        assert [p.kind for p in history.problems] == ["unreadable"]
        with pytest.raises(DamagedError, match="nothing is compacted"):
            plan_compact(store)


@pytest.mark.parametrize("extreme", [{"a": 1e308, "b": [[[[]]]], "c": None, "d": "x" * 1000}, {"deep": "deep"}])
def test_metrics_and_times_may_say_anything(extreme: dict[str, Any]) -> None:
    store = MemoryStore()
    ids = victim(store)
    nest: Any = 0
    for _ in range(500):
        nest = [nest]
    metrics = {"deep": nest} if "deep" in extreme else extreme
    forge_snapshot(store, ids[1], both(set_in("metrics", metrics), set_in("time", 1e308)))
    listed = ckpt.History(store).list()
    assert [one.step for one in listed] == [10, 20]
    assert listed[1].time == 1e308


def test_documents_of_other_places_are_refused_under_names_that_are_not_theirs() -> None:
    """A snapshot and a part of another step, of another store; a run's, a heartbeat and a pin under another name."""
    other = MemoryStore("other")
    theirs = victim(other)
    store = MemoryStore()
    ids = victim(store)
    store.put(SnapshotName(ids[1]).key, store.get(SnapshotName(ids[0]).key))
    with pytest.raises(DamagedError, match="belongs at"):
        ckpt.load(store, step=20)
    ids = victim(store)
    forge_part(other, theirs[1], set_in("time", 5.0))  # the same names, other bytes
    store.put(PartName(ids[1], 0).key, other.get(PartName(theirs[1], 0).key))
    falls_back(store, ids, "bytes|digest")
    ids = victim(store)
    elsewhere = RunId(7, "0badcafe")
    store.put(run_key(elsewhere), store.get(run_key(RUN)))
    store.put(f"{PINS}mine.json", sealed({"format": 1, "name": "yours", "snapshot": str(ids[0])}))
    history = read_history(store)
    assert elsewhere not in history.runs
    assert not history.pins
    assert {p.key for p in history.problems} == {run_key(elsewhere), f"{PINS}mine.json"}


def test_a_run_document_or_heartbeat_of_another_run_says_nothing_of_this_one() -> None:
    store = MemoryStore()
    victim(store)
    newest = RunId(2, "0ddba11e")
    # The document of a run that is dead for certain would let us take over at once; a stranger's beat never ends.
    store.put(run_key(newest), store.get(run_key(RUN)))
    store.put(alive_key(newest), sealed({"format": 1, "run": str(RUN), "beat": 1, "ended": True, "interval": 1.0}))
    clock = FakeClock()
    run = open_run(store, clock, world_size=1, resumed_from=None, who=somebody(), interval=1.0)
    assert run.generation == 3
    assert sum(clock.slept) == pytest.approx(3.0), "it was taken over without a wait"


def test_a_run_that_started_at_no_time_is_still_named() -> None:
    store = MemoryStore()
    victim(store)
    reseal(store, run_key(RUN), set_in("started", 1e300))
    error = in_use(store, RUN, "another job writes here")
    assert isinstance(error, StoreInUse)
    assert "started at 1e+300, which is no time" in str(error)


def test_a_store_whose_generations_are_used_up_is_told_and_not_written_to() -> None:
    store = MemoryStore()
    victim(store)
    store.put("runs/999999-ffffffff.json", b"")
    before = {e.key for e in store.list("")}
    with pytest.raises(DamagedError, match=r"expected generations up to 999999, found .* 999999: no run can follow"):
        open_run(store, FakeClock(), world_size=1, resumed_from=None, who=somebody())
    assert {e.key for e in store.list("")} == before


@pytest.mark.parametrize(
    "mark",
    [b"", b"{}", sealed({"format": 1, "kind": "zarr"}), sealed(b"[" * 100_000), sealed({"format": 1, "kind": 5})],
)
def test_a_store_mark_of_something_else_is_refused_before_anything_is_written(mark: bytes) -> None:
    store = MemoryStore()
    store.put(STORE_KEY, mark)
    with pytest.raises(DamagedError, match=STORE_KEY):
        ensure_store(store)
    assert [e.key for e in store.list("")] == [STORE_KEY]
    assert store.get(STORE_KEY) == mark


class _Claiming(MemoryStore):
    """Lists some objects as longer than any memory, and does not expect to be asked for them."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self.prefix = prefix

    def list(self, prefix: str) -> Any:
        found = super().list(prefix)
        return [type(e)(e.key, 1 << 45, e.mtime) if e.key.startswith(self.prefix) else e for e in found]

    def get(self, key: str) -> bytes:
        assert not key.startswith(self.prefix), f"{key} was read"
        return super().get(key)


@pytest.mark.parametrize("prefix", [PRUNES, PINS, "snapshots/", "runs/"])
def test_documents_of_terabytes_are_not_read(prefix: str) -> None:
    store = _Claiming(prefix)
    ids = victim(store)
    if prefix == PRUNES:
        store.put("prunes/0a.json", sealed({"format": 1, "snapshots": [str(ids[0])], "keys": []}))
        assert not claimed_by_prune(store, ids[0])
        assert any("no document has more than" in note for note in plan_prune(store, Keep(last=1), grace=0).notes)
    else:
        if prefix == PINS:
            store.put("pins/x.json", sealed({"format": 1, "name": "x", "snapshot": str(ids[0])}))
        problems = read_history(store).problems
        assert problems
        assert all("no document has more than" in p.text for p in problems if p.key.startswith(prefix))
    assert any("no document has more than" in f.text for f in verify(store))
