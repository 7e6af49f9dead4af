"""Which layers change: the shares are those of the states that were saved, and what is read is bounded."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from ckpt.format.manifest import Snapshot
from ckpt.history.catalog import read_history
from recovery.compact import compact
from recovery.compaction import plan_compact
from recovery.layers import COLUMNS, PARTS, Sample, choose, evenly, layers
from storage_backends.base import Store
from storage_backends.memory import MemoryStore
from tests.recovery.test_compact import thinned
from tests.support.faulty import FaultyStore
from tests.support.stores import Each, State, flipped, make_store, repeated

CHUNK = 4096


def snapshots(store: Store) -> list[Snapshot]:
    return [snapshot for _, snapshot in sorted(read_history(store).snapshots.items())]


def states() -> list[State]:
    """Of `half` every second chunk changes in the second step, `still` never does, `small` lies in a bundle."""
    first = {
        "model.half": np.zeros((64, 64), np.float32),  # four chunks
        "model.still": np.ones((64, 64), np.float32),
        "model.small": np.zeros(8, np.float32),
    }
    second = {name: array.copy() for name, array in first.items()}
    second["model.half"][:16] += 1
    second["model.half"][32:48] += 1
    third = {name: array.copy() for name, array in second.items()}
    third["model.small"] += 1
    return [first, second, third, {**third, "model.new": np.ones((64, 64), np.float32)}]


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_share_is_what_the_save_stored_anew(ranks: int) -> None:
    store = MemoryStore()
    make_store(store, states(), ranks=ranks, chunk=CHUNK)
    told = layers(store, choose(snapshots(store)))
    shares = {group.name: group.shares for group in told.groups}
    assert shares == {
        "model.half": (1.0, 0.5, 0.0, 0.0),
        "model.new": (None, None, None, 1.0),
        "model.small": (1.0, 0.0, 1.0, 0.0),
        "model.still": (1.0, 0.0, 0.0, 0.0),
    }
    assert {group.name: (group.leaves, group.nbytes) for group in told.groups}["model.half"] == (1, 64 * 64 * 4)


def test_chains_are_as_long_as_they_are() -> None:
    store = MemoryStore()
    make_store(store, states(), ranks=2, chunk=CHUNK, classes={"model.still": "parameter"})
    told = {depth.cls: depth for depth in layers(store, choose(snapshots(store))).depths}
    assert told["parameter"].mean == (1.0,) * 4 and told["parameter"].most == (1,) * 4
    half, small = 64 * 64 * 4, 8 * 4
    mean = told["array"].mean
    assert told["array"].most == (1, 2, 2, 2)
    assert mean[1] == pytest.approx((half * 1.5 + small) / (half + small))
    assert mean[2] == pytest.approx((half * 1.5 + small * 2) / (half + small))


def test_leaves_that_each_rank_has_count_for_each() -> None:
    store = MemoryStore()
    arrays = tuple(np.full(2048, float(n), np.float32) for n in range(2))
    make_store(store, [{"own": Each(arrays)}, {"own": Each((arrays[0], arrays[1] + 1))}], ranks=2, chunk=CHUNK)
    [group] = layers(store, choose(snapshots(store))).groups
    assert (group.nbytes, group.shares) == (2 * 2048 * 4, (1.0, 0.5))


def test_a_compacted_snapshot_no_longer_tells_what_changed_but_how_long_its_chains_are() -> None:
    store, ids, _ = thinned()
    before = layers(store, choose(snapshots(store)))
    compact(plan_compact(store), store)
    told = layers(store, choose(snapshots(store)))
    assert not before.compacted and before.depths[0].most[0] > 1
    assert told.compacted == set(ids)
    assert all(group.shares[:2] == (None, None) for group in told.groups)
    assert all(1 < after <= was for after, was in zip(told.depths[0].most[:2], before.depths[0].most[:2], strict=True))


def test_what_cannot_be_read_is_left_out_and_named() -> None:
    store = MemoryStore()
    ids = make_store(store, states(), ranks=2, chunk=CHUNK)
    flipped(store, snapshots(store)[1].parts[1].key, 100)
    told = layers(store, choose(snapshots(store)))
    assert told.lost == {ids[1]}
    assert [group.shares[1] for group in told.groups] == [None] * 4
    assert {g.name: g.shares[2] for g in told.groups}["model.small"] == 1.0


def test_no_pack_is_read_and_each_part_once() -> None:
    store = FaultyStore(MemoryStore())
    make_store(store, states(), ranks=3, chunk=CHUNK)
    sample = choose(snapshots(store))
    store.calls.clear()
    read: list[int] = []
    layers(store, sample, each=read.append)
    assert Counter(verb for verb, _ in store.calls) == {"get": 12} and sample.parts == 12
    assert all(key.startswith("parts/") for _, key in store.calls)
    assert sum(read) == sample.nbytes


def test_what_is_chosen_is_bounded_and_evenly_spread() -> None:
    store = MemoryStore()
    [id_] = make_store(store, [{"w": np.ones(600)}], ranks=8)
    repeated(store, id_, range(20, 1019))
    all_of_them = snapshots(store)
    assert len(all_of_them) == 1000
    sample = choose(all_of_them)
    assert len(sample.reads) == COLUMNS and sample.parts == 8 * COLUMNS <= PARTS
    steps = [snapshot.step for snapshot, _ in sample.reads]
    assert steps[0] == 10 and steps[-1] == 1018
    assert max(b - a for a, b in pairwise(steps)) <= 32
    few = choose(all_of_them, nbytes=sample.nbytes // 4)
    assert few.nbytes <= sample.nbytes // 4 and len(few.reads) >= 8
    some = choose(all_of_them, parts=24)
    assert some.parts <= 24 and {len(ranks) for _, ranks in some.reads} == {3}
    assert choose([]) == Sample(())


def test_evenly() -> None:
    assert evenly(3, 8) == [0, 1, 2]
    assert evenly(100, 4) == [0, 33, 66, 99]
    assert evenly(0, 4) == [] and evenly(7, 1) == [0]
