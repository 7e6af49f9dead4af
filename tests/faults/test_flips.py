"""One flipped bit, anywhere: verify names the object, and reading refuses exactly what it reads."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from ckpt.errors import DamagedError
from ckpt.format.key import Key
from ckpt.format.manifest import Chunk, Part, PinDoc, PruneDoc, seal
from ckpt.format.names import (
    ALIVE,
    PACKS,
    PARTS,
    PINS,
    PRUNES,
    RUNS,
    SNAPSHOTS,
    STORE_KEY,
    PackName,
    PartName,
    SnapshotId,
    SnapshotName,
    pin_key,
    prune_key,
)
from ckpt.format.shards import Leaf, Shard, whole
from ckpt.history.keyed import with_key
from recovery.assemble import Wanted
from recovery.load import load
from recovery.read import open_snapshot, read_parts
from recovery.shards import read_shards
from recovery.verify import verify
from storage_backends.memory import MemoryStore
from tests.support.stores import RUN, DirectWriter, State, cut, drifting, flipped, written_store

FLIPS = 520
# Packs three times: they have the most bytes, and the most to tell apart.
KINDS = (PACKS, PACKS, PACKS, PARTS, SNAPSHOTS, RUNS, PINS, PRUNES, STORE_KEY)


class Sample:
    """Keyframes, deltas of all kinds, three ranks, and one object of every kind; leftovers of a crashed save too."""

    def __init__(self, key: Key | None = None) -> None:
        self.disk = MemoryStore()
        self.store = with_key(self.disk, key)
        self.states: list[State] = list(drifting(4, rows=32))
        self.ids = written_store(self.store, self.states, ranks=3, chunk=4096)
        if key is None:
            leftover = DirectWriter(self.store, ranks=3, chunk=4096, last=self.ids[-1])
            leftover.step(50, drifting(1, seed=5, rows=16)[0], commit=False)
        self.store.put(pin_key("best"), seal(PinDoc(1, "best", str(self.ids[1]))))
        self.store.put(prune_key("0f0f"), seal(PruneDoc(1, (str(SnapshotId(RUN, 1)),), ())))
        self.needed = self._needed()
        blobs = [len(c.blobs) for id_ in self.ids for part in self._parts(id_) for c in _chunks(part)]
        assert min(blobs) == 1, "no keyframes"
        assert max(blobs) > 1, "no deltas"

    def keys(self, kind: str) -> list[str]:
        return [entry.key for entry in self.store.list("") if entry.key.startswith(kind)]

    def _needed(self) -> dict[SnapshotId, list[tuple[str, int, int]]]:
        """Per snapshot, (key, first byte, end) of everything that reading it reads."""
        needed = {}
        for id_ in self.ids:
            snapshot = open_snapshot(self.store, id_).snapshot
            documents = [SnapshotName(id_).key, *(ref.key for ref in snapshot.parts)]
            ranges = [(key, 0, 1 << 60) for key in documents]
            for part in self._parts(id_):
                ranges += [(b.pack, b.start, b.stop) for c in _chunks(part) for b in c.blobs]
            needed[id_] = ranges
        return needed

    def _parts(self, id_: SnapshotId) -> list[Part]:
        return list(read_parts(self.store, open_snapshot(self.store, id_).snapshot).values())

    def hit(self, key: str, byte: int) -> set[SnapshotId]:
        """The snapshots whose reading reads this byte."""
        return {id_ for id_, ranges in self.needed.items() if any(k == key and a <= byte < b for k, a, b in ranges)}

    def read(self, id_: SnapshotId, state: State) -> None:
        """Everything of one snapshot, compared with what was saved. Raises DamagedError."""
        parts = read_parts(self.store, open_snapshot(self.store, id_).snapshot)
        wants = [Wanted(Shard(Leaf(p, "array", v.dtype.name, v.shape), whole(v.shape))) for p, v in state.items()]
        for want, data in read_shards(self.store, parts, wants, threads=1):
            assert data.tobytes() == cut(state[want.shard.leaf.path], want.shard.box)


def _chunks(part: Part) -> list[Chunk]:
    return [chunk for row in (*part.shards, *part.bundles) for chunk in part.chunks(row)]


def _flips(sample: Sample, count: int) -> Iterator[tuple[str, int]]:
    """(key, bit), all kinds of objects in turn, and within a kind all objects alike."""
    random_ = random.Random(20260)
    for n in range(count):
        key = random_.choice(sample.keys(KINDS[n % len(KINDS)]))
        yield key, random_.randrange(8 * len(sample.disk.get(key)))


@pytest.mark.parametrize("key", [None, Key(bytes(range(32)))], ids=["in the clear", "encrypted"])
def test_no_single_flipped_bit_goes_unnoticed_and_only_its_readers_are_refused(key: Key | None) -> None:
    """At least 500 flips over all kinds of objects but the heartbeat."""
    sample = Sample(key)
    assert {f.level for f in verify(sample.store, deep=True)} <= {"note"}
    refused = unread = fallen_back = 0
    for where, bit in _flips(sample, FLIPS):
        flipped(sample.disk, where, bit)
        hit = sample.hit(where, bit // 8)
        findings = [f for f in verify(sample.store, deep=True, threads=1) if f.level != "note"]
        assert where in {f.key for f in findings}, f"bit {bit} of {where} went unnoticed"
        found = next(f for f in findings if f.key == where)
        assert set(found.steps) == {id_.step for id_ in hit}, f"bit {bit} of {where}: {found}"
        _belongs(where, found.step, found.rank, found.leaf, hit)
        for id_, state in zip(sample.ids, sample.states, strict=True):
            if id_ in hit:
                with pytest.raises(DamagedError):
                    sample.read(id_, state)
                refused += 1
            else:
                sample.read(id_, state)
                unread += 1
        if hit:
            fallen_back += _newest_whole(sample, hit)
        flipped(sample.disk, where, bit)
    assert refused > 200
    assert unread > 1000
    assert fallen_back > 50
    assert not sample.keys(ALIVE)


def _newest_whole(sample: Sample, hit: set[SnapshotId]) -> bool:
    """Reading "the latest" uses the newest snapshot that does not read the damage. True if that is an older one."""
    good = [(id_, state) for id_, state in zip(sample.ids, sample.states, strict=True) if id_ not in hit]
    if not good:
        with pytest.raises(DamagedError):
            load(sample.store)
        return False
    id_, state = good[-1]
    found = load(sample.store)
    assert {path: array.tobytes() for path, array in found.items()} == {p: v.tobytes() for p, v in state.items()}
    return id_ != sample.ids[-1]


def _belongs(key: str, step: int | None, rank: int | None, leaf: str | None, hit: set[SnapshotId]) -> None:
    """Step, rank and leaf where the object belongs to one."""
    if (snapshot := SnapshotName.parse(key)) is not None:
        assert step == snapshot.id.step
    elif (part := PartName.parse(key)) is not None:
        assert (step, rank) == (part.id.step, part.rank)
    elif (pack := PackName.parse(key)) is not None:
        assert rank == pack.rank
        assert step == (min(id_.step for id_ in hit) if hit else pack.id.step)
        assert (leaf is not None) == bool(hit)
    else:
        assert (step, rank, leaf) == (None, None, None)
