from __future__ import annotations

import itertools

import msgspec
import pytest

from ckpt.errors import DamagedError, SaveFailed
from ckpt.format.layout import lay_out
from ckpt.format.manifest import Part, PartRef, digest128, seal
from ckpt.format.names import RunId, SnapshotId
from ckpt.format.shards import Box, Leaf, Shard, whole
from ckpt.history.assemble import build_snapshot, check_replicas
from storage_backends.memory import MemoryStore
from tests.ckpt.history.making import NEXT, OWNERSHIP, RUN, decoded, part_bytes, put_pack, shares

ID = SnapshotId(RUN, 40)
W = Leaf("w", "parameter", "float32", (3,))


def three(**per_rank: list[object]) -> list[tuple[PartRef, Part]]:
    """The parts of three ranks with one float each; `per_rank`: argument of `part_bytes` → one value for each."""
    store = MemoryStore()
    return decoded(
        ID,
        [
            part_bytes(
                ID,
                rank,
                layout,
                [put_pack(store, ID, rank)],
                ranks=3,
                **{name: values[rank] for name, values in per_rank.items()},  # type: ignore[arg-type]
            )
            for rank, layout in enumerate(shares(3))
        ],
    )


def holding(*shards: list[Shard]) -> list[tuple[PartRef, Part]]:
    """Parts of ranks that hold these shards."""
    store = MemoryStore()
    return decoded(
        ID,
        [
            part_bytes(ID, rank, lay_out(mine), [put_pack(store, ID, rank)], ranks=len(shards))
            for rank, mine in enumerate(shards)
        ],
    )


def changed(parts: list[tuple[PartRef, Part]], rank: int, **fields: object) -> list[tuple[PartRef, Part]]:
    ref, part = parts[rank]
    return [*parts[:rank], (ref, msgspec.structs.replace(part, **fields)), *parts[rank + 1 :]]


def test_whoever_computes_a_snapshot_computes_the_same_bytes() -> None:
    parts = three(reference=[SnapshotId(RUN, 30), SnapshotId(RUN, 20), None], stored=[5, 7, 11])
    documents = {seal(build_snapshot(order)) for order in itertools.permutations(parts)}
    assert len(documents) == 1


def test_a_snapshot_holds_what_its_parts_say_together() -> None:
    parts = three(reference=[SnapshotId(NEXT, 3), SnapshotId(RUN, 20), None], stored=[5, 7, 11])
    snapshot = build_snapshot(parts)
    assert (snapshot.id, snapshot.world_size, snapshot.revision) == (ID, 3, 0)
    assert snapshot.reference == str(SnapshotId(RUN, 20)), "the oldest: runs count first, then steps"
    assert (snapshot.totals.stored, snapshot.totals.size, snapshot.totals.by_kind) == (23, 12, {"0": 23})
    assert (snapshot.metrics, snapshot.time) == ({"loss": 1.5}, 1e6)
    assert list(snapshot.packs) == sorted(p for _, part in parts for p in part.packs)
    assert [ref.key for ref in snapshot.parts] == [ref.key for ref, _ in parts]


def test_a_pack_that_several_ranks_lean_on_is_named_once() -> None:
    store = MemoryStore()
    shared = put_pack(store, SnapshotId(RUN, 30), 0)
    datas = [part_bytes(ID, r, lay, [shared, put_pack(store, ID, r)], ranks=3) for r, lay in enumerate(shares(3))]
    assert len(build_snapshot(decoded(ID, datas)).packs) == 4


def test_a_save_that_diffed_against_nothing_has_no_reference() -> None:
    assert build_snapshot(three()).reference is None


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"run": str(NEXT)}, "run"),
        ({"step": 41}, "step 40"),
        ({"world_size": 4}, "world size 3"),
        ({"ownership": digest128(b"another")}, f"ownership {OWNERSHIP}"),
        ({"revision": 1}, "revision 0"),
        ({"chunk": 4096}, "chunk size"),
    ],
)
def test_parts_that_do_not_belong_together_make_no_snapshot(fields: dict[str, object], said: str) -> None:
    with pytest.raises(DamagedError, match=rf"rank 1: .*expected {said}"):
        build_snapshot(changed(three(), 1, **fields))


def test_every_rank_must_have_exactly_one_part() -> None:
    parts = three()
    for wrong in (parts[:2], [*parts, parts[2]], []):
        with pytest.raises(DamagedError):
            build_snapshot(wrong)


def test_a_part_must_lie_where_its_fields_say() -> None:
    parts = three()
    (ref, _), (_, part) = parts[0], parts[1]
    with pytest.raises(DamagedError, match=r"00001\.json\.zst, found"):
        build_snapshot([parts[0], (ref, part), parts[2]])


def test_two_lengths_of_one_pack_are_damage() -> None:
    parts = three()
    shared = parts[0][1].packs[0]
    wrong = changed(parts, 1, packs=(*parts[1][1].packs, (shared[0], shared[1] + 1)))
    with pytest.raises(DamagedError, match=shared[0]):
        build_snapshot(wrong)


def test_a_leaf_must_be_covered_exactly_once() -> None:
    def rows(*spans: tuple[int, int]) -> list[Shard]:
        return [Shard(W, Box((a,), (n,))) for a, n in spans]

    assert build_snapshot(holding(rows((0, 2)), rows((2, 1)), rows((3, 0)))).totals.size == 12
    for bad, said in (
        (holding(rows((0, 1)), rows((2, 1))), "2 of 3 elements"),
        (holding(rows((0, 2)), rows((1, 2))), "overlap"),
        (holding(rows((0, 3)), rows((0, 3))), "overlap"),
    ):
        with pytest.raises(DamagedError, match=said) as caught:
            build_snapshot(bad)
        assert caught.value.leaf == "w"


def test_an_empty_leaf_needs_nobody_to_hold_anything() -> None:
    empty = Leaf("nothing", "parameter", "float32", (0, 4))
    assert build_snapshot(holding([Shard(empty, whole((0, 4)))], [Shard(empty, whole((0, 4)))])).totals.size == 0


def test_ranks_must_agree_on_what_a_leaf_is() -> None:
    for other in (
        Leaf("w", "parameter", "float64", (3,)),
        Leaf("w", "buffer", "float32", (3,)),
        Leaf("w", "parameter", "float32", (4,)),
    ):
        with pytest.raises(DamagedError, match="as rank 0 says"):
            build_snapshot(holding([Shard(W, Box((0,), (2,)))], [Shard(other, Box((2,), (1,)))]))


def test_a_per_rank_leaf_counts_once_on_each_rank_that_declares_it() -> None:
    mine, more = Shard(W, whole((3,)), True), Shard(Leaf("w", "parameter", "float32", (5,)), whole((5,)), True)
    assert build_snapshot(holding([mine], [more], [])).totals.size == 32
    for wrong, said in (
        (holding([mine], [Shard(W, whole((3,)))]), "per-rank parameter"),
        (holding([Shard(W, Box((0,), (2,)), True)], []), r"the whole of \(3,\)"),
    ):
        with pytest.raises(DamagedError, match=said):
            build_snapshot(wrong)
    twice = holding([mine], [])
    with pytest.raises(DamagedError, match="one value"):
        build_snapshot(changed(twice, 0, shards=twice[0][1].shards * 2))


def test_equal_replicas_pass_and_one_that_differs_is_named_with_its_leaf() -> None:
    place = "model.w [0:4]"
    check_replicas(three(replicas=[{place: "aa"}, {place: "aa"}, {}]))
    with pytest.raises(
        SaveFailed, match=r"leaf model.w \[0:4\].*ranks 0, 2 hold aa; rank 1 holds bb.*PerRank"
    ) as caught:
        check_replicas(three(replicas=[{place: "aa"}, {place: "bb"}, {place: "aa"}]))
    assert (caught.value.stage, caught.value.step) == ("replicas", 40)


def test_many_differing_leaves_make_one_message() -> None:
    places = {f"w{i} [0:1]": "aa" for i in range(50)}
    others = dict.fromkeys(places, "bb")
    with pytest.raises(SaveFailed, match=r"leaf w0 .*49 more leaves"):
        check_replicas(three(replicas=[places, others, {}]))


def test_giving_way_happens_between_rows() -> None:
    calls: list[None] = []
    build_snapshot(three(), lambda: calls.append(None))
    assert len(calls) >= 6


def test_a_run_of_another_generation_is_another_run() -> None:
    with pytest.raises(DamagedError):
        build_snapshot(changed(three(), 2, run=str(RunId(2, RUN.nonce))))
