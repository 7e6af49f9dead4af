"""Two snapshots compared: what changed, by how much, and what was not read for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ckpt.format.values import encode
from recovery import compare as comparing
from recovery.compare import Difference, LeafChange, compare
from recovery.read import Pruned
from storage_backends.memory import MemoryStore
from tests.support.faulty import FaultyStore
from tests.support.stores import DirectWriter, Each, Raw, State, drifting, make_store


def pair(old: State, new: State, **settings: Any) -> Difference:
    store = MemoryStore()
    a, b = make_store(store, [old, new], **settings)
    return compare(store, a, b)


def by_name(found: Difference) -> dict[str, LeafChange]:
    return {leaf.name: leaf for leaf in found.leaves}


@pytest.mark.parametrize("ranks", [1, 3])
def test_share_and_norms_are_those_of_the_arrays(ranks: int) -> None:
    first, *_, last = drifting(4)
    found = by_name(pair(first, last, ranks=ranks, chunk=4096))
    assert found.keys() == first.keys()
    for path, leaf in found.items():
        old, new = first[path], last[path]
        assert leaf.changed == (old != new).sum(), path
        assert leaf.verdict == ("changed" if leaf.changed else "same")
        assert leaf.difference == pytest.approx(np.linalg.norm(np.subtract(new, old, dtype=np.float64)))
        assert leaf.largest == pytest.approx(np.abs(np.subtract(new, old, dtype=np.float64)).max())
    moving = found["model.moving"]
    assert moving.norm == pytest.approx(np.linalg.norm(first["model.moving"].astype(np.float64)))
    assert moving.relative == pytest.approx(moving.difference / moving.norm)


def test_what_a_bit_is_is_what_counts() -> None:
    """I3: another NaN payload and another sign of zero are changes, and no number is made of them."""
    old = np.array([0.0, np.nan, np.inf, 2.0], np.float32).repeat(2000)
    new = old.copy()
    new[0] = -0.0
    new.view(np.uint32)[2000] ^= 1
    new[-1] = 3.0
    leaf = by_name(pair({"w": old}, {"w": new}))["w"]
    assert (leaf.changed, leaf.not_finite, leaf.difference, leaf.largest) == (3, 1, 1.0, 1.0)
    assert leaf.norm == pytest.approx(np.sqrt(2000 * 4.0))


def test_leaves_come_go_and_take_another_form() -> None:
    old = {"gone": np.ones(3), "grown": np.ones(3), "cast": np.ones(2), "still": np.ones(2)}
    new = {"come": np.ones(3), "grown": np.ones(4), "cast": np.ones(2, np.float32), "still": np.ones(2)}
    found = pair(old, new)
    assert {leaf.name: leaf.verdict for leaf in found.leaves} == {
        "cast": "reshaped", "come": "added", "gone": "removed", "grown": "reshaped", "still": "same",
    }  # fmt: skip
    grown = by_name(found)["grown"]
    assert grown.before is not None and grown.after is not None
    assert (grown.before.shape, grown.after.shape) == ((3,), (4,))
    assert not found.equal


def test_per_rank_leaves_are_compared_rank_by_rank() -> None:
    old, new = np.arange(4.0), np.arange(4.0) + 1
    found = pair({"noise": Each((old, old))}, {"noise": Each((old, new))}, ranks=2)
    assert {leaf.name: leaf.verdict for leaf in found.leaves} == {"noise@rank0": "same", "noise@rank1": "changed"}


def test_dtypes_that_numpy_lacks_have_numbers_too() -> None:
    ones, twos = np.float32(1).view(np.uint32) >> 16, np.float32(2).view(np.uint32) >> 16
    old = np.full(4000, ones, np.uint16)
    new = old.copy()
    new[7] = twos
    leaf = by_name(pair(
        {"w": Raw("bfloat16", (4000,), old.tobytes())}, {"w": Raw("bfloat16", (4000,), new.tobytes())}
    ))["w"]  # fmt: skip
    assert (leaf.changed, leaf.difference, leaf.share) == (1, 1.0, 1 / 4000)


def test_values_are_compared_as_they_are_stored() -> None:
    store = MemoryStore()
    writer = DirectWriter(store, ranks=2)
    writer.begin()
    leaf: State = {"w": np.ones(2)}
    one = {"best": encode(1, "best"), "nan": encode(float("nan"), "nan"), "old": encode({"x": [1]}, "old")}
    two = {"best": encode(True, "best"), "nan": encode(float("nan"), "nan"), "new": encode("n", "new")}
    a = writer.step(10, leaf, values=[{**one, "$random": encode([1], "r")}] * 2)
    b = writer.step(20, leaf, values=[two, {**two, "best": encode(3, "best")}])
    found = compare(store, a, b)
    assert [(v.name, v.verdict, v.before, v.after) for v in found.values] == [
        ("best@rank0", "changed", 1, True),
        ("best@rank1", "changed", 1, 3),
        ("new", "added", None, "n"),
        ("old.x", "removed", [1], None),
    ]
    assert compare(store, a, a).equal


def test_unchanged_leaves_cost_no_pack_and_a_changed_row_costs_its_chunk() -> None:
    inner = MemoryStore()
    old = np.zeros((1024, 64), np.float32)
    new = old.copy()
    new[700, 3] = 1
    a, b, c = make_store(
        inner, [{"w": old, "v": old + 1}, {"w": old, "v": old + 1}, {"w": new, "v": old + 1}], chunk=4096
    )
    store = FaultyStore(inner)
    assert compare(store, a, b).equal
    assert not [key for _, key in store.calls if key.startswith("packs/")]
    store.calls.clear()
    found = by_name(compare(store, b, c))
    assert (found["w"].changed, found["w"].verdict, found["v"].verdict) == (1, "changed", "same")
    assert len([key for _, key in store.calls if key.startswith("packs/")]) <= 3  # base, and base and delta


def test_another_number_of_ranks_is_compared_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparing, "WINDOW", 10_000)  # many windows
    first, *_, last = drifting(3)
    one, three = MemoryStore(), MemoryStore()
    make_store(one, [first, last], chunk=4096)
    writer = DirectWriter(three, ranks=1, chunk=4096)
    writer.begin()
    a = writer.step(10, first)
    writer.ranks, writer._held = 3, {}
    b = writer.step(20, last)
    expected = pair(first, last, chunk=4096)
    for mine, other in zip(compare(three, a, b).leaves, expected.leaves, strict=True):
        assert (mine.name, mine.verdict, mine.changed) == (other.name, other.verdict, other.changed)
        assert mine.difference == pytest.approx(other.difference)


def test_names_choose_what_is_compared() -> None:
    store = MemoryStore()
    first, *_, last = drifting(3)
    a, b = make_store(store, [first, last])
    assert [leaf.path for leaf in compare(store, a, b, ["model.s*", "step"]).leaves] == [
        "model.scale", "model.sparse", "model.still", "step",
    ]  # fmt: skip


def test_a_snapshot_that_is_not_there_is_said_so() -> None:
    store = MemoryStore()
    a, b = make_store(store, drifting(2))
    store.delete([e.key for e in store.list("snapshots/") if e.key.endswith(f"{b}.json")] or [f"snapshots/{b}.json"])
    with pytest.raises(Pruned, match=b.short):
        compare(store, a, b)
