from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from ckpt.errors import LayoutMismatch
from ckpt.format.ownership import decode_table, encode_table, share_out
from ckpt.format.shards import DTYPES, Box, Leaf, Shard, cuts, uncovered, whole

CHUNK = 64 * 1024


def full(path: str, *shape: int, cls: str = "parameter", dtype: str = "float32", per_rank: bool = False) -> Shard:
    leaf = Leaf(path, cls, dtype, shape)
    return Shard(leaf, whole(shape), per_rank)


def rows(path: str, shape: tuple[int, ...], start: int, stop: int) -> Shard:
    return Shard(Leaf(path, "parameter", "float32", shape), Box((start, 0), (stop - start, shape[1])))


def loads(owned: Sequence[Sequence[Shard]]) -> list[int]:
    return [sum(shard.nbytes for shard in mine) for mine in owned]


def test_every_replicated_byte_is_stored_once_by_a_rank_that_holds_it() -> None:
    rng = random.Random(5)
    for _ in range(200):
        world = rng.randint(1, 6)
        tables: list[list[Shard]] = [[] for _ in range(world)]
        for n in range(rng.randint(1, 30)):
            shape = tuple(rng.randint(1, 300) for _ in range(rng.randint(0, 3)))
            dtype = rng.choice(["float32", "bfloat16", "complex128", "bool"])
            shard = full(f"m.{n}", *shape, dtype=dtype, cls=rng.choice(["parameter", "slot:exp_avg"]))
            for rank in rng.sample(range(world), rng.randint(1, world)):
                tables[rank].append(shard)
        result = share_out([sorted(table) for table in tables], 4096)
        pieces: dict[Leaf, list[Box]] = {}
        for rank, mine in enumerate(result.owned):
            assert list(mine) == sorted(mine)
            held = {shard.leaf for shard in tables[rank]}
            for shard in mine:
                assert shard.leaf in held
                pieces.setdefault(shard.leaf, []).append(shard.box)
        assert set(pieces) == {shard.leaf for table in tables for shard in table}
        for leaf, boxes in pieces.items():
            assert uncovered(leaf.shape, boxes) is None


def test_splits_follow_the_grid_so_that_no_chunk_is_cut_in_two() -> None:
    state = [full(f"m.{n}", 1000 + n, 37) for n in range(6)] + [full("m.wide", 7, 100_000)]
    result = share_out([state] * 3, CHUNK)
    whole_cells = Counter(
        (shard.leaf, cut.box)
        for shard in state
        for cut in cuts(shard.leaf.shape, shard.box, DTYPES[shard.leaf.dtype].size, CHUNK)
    )
    owned_cells = Counter(
        (shard.leaf, cut.box)
        for mine in result.owned
        for shard in mine
        for cut in cuts(shard.leaf.shape, shard.box, DTYPES[shard.leaf.dtype].size, CHUNK)
    )
    assert whole_cells == owned_cells
    assert sum(len(mine) for mine in result.owned) > len(state), "nothing was split: this test proves nothing"


@pytest.mark.parametrize("world", [2, 3, 5, 64])
def test_replicated_state_is_spread_evenly_class_by_class(world: int) -> None:
    state = [
        full(f"{cls}.{n}", 50 + 131 * n % 700, 256, cls=cls)
        for cls in ("parameter", "slot:exp_avg", "slot:exp_avg_sq")
        for n in range(40)
    ]
    result = share_out([state] * world, CHUNK)
    assert max(loads(result.owned)) - min(loads(result.owned)) <= 3 * CHUNK
    for cls in ("parameter", "slot:exp_avg", "slot:exp_avg_sq"):
        of_class = [sum(shard.nbytes for shard in mine if shard.leaf.cls == cls) for mine in result.owned]
        assert max(of_class) - min(of_class) <= 6 * CHUNK


def test_ranks_with_less_of_their_own_store_more_of_what_is_shared() -> None:
    shared = [full(f"m.{n}", 64, 256) for n in range(30)]
    mine = full("own", 1000, 256)
    result = share_out([[*shared, mine], shared, shared], CHUNK)
    assert max(loads(result.owned)) - min(loads(result.owned)) <= 3 * CHUNK
    assert mine in result.owned[0]


def test_a_tensor_that_cannot_be_cut_goes_whole_to_whoever_has_least() -> None:
    solid = [full(f"m.{n}", 1, 100_000 * (n + 1)) for n in range(3)]
    result = share_out([[*solid, full("z", 6000, 64)]] * 2, CHUNK)
    assert {shard for mine in result.owned for shard in mine if shard.leaf.path != "z"} == set(solid)
    assert max(loads(result.owned)) - min(loads(result.owned)) <= 3 * CHUNK


def test_small_leaves_are_never_split() -> None:
    state = [full(f"m.{n}", 31, 32) for n in range(100)] + [full(f"s.{n}", cls="slot:step") for n in range(100)]
    result = share_out([state] * 7, 128)
    assert sorted(shard for mine in result.owned for shard in mine) == sorted(state)


def test_new_optimizer_slots_move_no_parameter_to_another_rank() -> None:
    """J2: a save before the first optimizer step, then one after."""
    parameters = [full(f"m.{n}", 300, 64) for n in range(40)]
    slots = [full(f"opt.{n}.exp_avg", 300, 64, cls="slot:exp_avg") for n in range(40)]
    before = share_out([parameters] * 3, CHUNK)
    after = share_out([sorted(parameters + slots)] * 3, CHUNK)
    for one, two in zip(before.owned, after.owned, strict=True):
        assert set(one) <= set(two)


def test_shards_and_per_rank_tensors_stay_with_their_ranks() -> None:
    tables = [
        [rows("w", (13, 4), 0, 5), full("noise", 3, per_rank=True)],
        [rows("w", (13, 4), 5, 10), full("noise", 4, per_rank=True)],
        [rows("w", (13, 4), 10, 13), rows("e", (0, 4), 0, 0)],
    ]
    result = share_out(tables)
    assert result.owned == tuple(tuple(sorted(table)) for table in tables)
    assert result.replicated == ()


def test_empty_shards_are_listed_by_every_rank_that_has_them() -> None:
    """H2: fewer rows than ranks."""
    tables = [[rows("w", (2, 3), min(r, 2), min(r + 1, 2))] for r in range(4)]
    assert share_out(tables).owned == tuple(tuple(table) for table in tables)


def test_replicas_of_shards_are_found_by_box_not_by_mesh() -> None:
    """HSDP: two groups of ranks hold the same two boxes."""
    top, bottom = rows("w", (2000, 64), 0, 1000), rows("w", (2000, 64), 1000, 2000)
    result = share_out([[top], [bottom], [top], [bottom]], CHUNK)
    assert result.replicated == (("w", top.box), ("w", bottom.box))
    assert max(loads(result.owned)) - min(loads(result.owned)) <= CHUNK
    for rank, outer in enumerate([top, bottom, top, bottom]):
        for shard in result.owned[rank]:
            assert shard.box.intersect(outer.box) == shard.box


def test_every_rank_comes_to_the_same_answer_and_the_digest_names_it() -> None:
    state = [full(f"m.{n}", 200, 64) for n in range(9)]
    one = share_out([state, state])
    two = share_out([decode_table(encode_table(state)), list(state)])
    assert one == two
    moved = share_out([state, state[:-1]])
    assert len({one.digest, moved.digest, share_out([state]).digest}) == 3
    assert len(one.digest) == 32


def test_tables_survive_the_way_between_ranks() -> None:
    table = sorted(
        [
            full("a.ü/😀", 3, 4),
            full("scalar"),
            full("empty", 0, 5),
            full("mine", 2, per_rank=True),
            rows("w", (13, 4), 5, 10),
            rows("w2", (13, 4), 13, 13),
            full("c", 7, dtype="complex64", cls="slot:a b"),
        ]
    )
    data = encode_table(table)
    assert list(decode_table(data)) == table
    assert encode_table(list(table)) == data
    assert decode_table(bytes(bytearray(data))) is decode_table(data)


@pytest.mark.parametrize(
    ("tables", "path", "words"),
    [
        (
            [[full("w", 3, 4)], [full("w", 3, 4)], [full("w", 5, 4)]],
            "w",
            [r"[3, 4] on rank 0", "[5, 4] on rank 2", "ckpt.PerRank"],
        ),
        ([[full("w", 3)], [full("w", 3, dtype="bfloat16")]], "w", ["float32", "bfloat16"]),
        ([[full("w", 3)], [full("w", 3, cls="buffer")]], "w", ["parameter", "buffer"]),
        ([[full("w", 3)], [full("w", 3, per_rank=True)]], "w", ["per rank on rank 1 and not on rank 0"]),
        ([[rows("w", (10, 2), 0, 4)], [rows("w", (10, 2), 5, 10)]], "w", ["18 of 20 elements", "rank 1: [5:10, 0:2]"]),
        ([[rows("w", (10, 2), 0, 6)], [rows("w", (10, 2), 5, 10)]], "w", ["overlap", "[5:10, 0:2]"]),
        ([[rows("w", (10, 2), 0, 6)], [rows("w", (10, 2), 4, 8)]], "w", ["overlap"]),
        ([[rows("w", (10, 2), 0, 12)]], "w", ["outside shape (10, 2)"]),
        ([[Shard(Leaf("p", "tensor", "float32", (4,)), Box((0,), (2,)), True)]], "p", ["whole on its rank"]),
    ],
)
def test_tables_that_do_not_describe_one_state_are_refused(
    tables: list[list[Shard]], path: str, words: list[str]
) -> None:
    with pytest.raises(LayoutMismatch) as caught:
        share_out(tables)
    assert list(caught.value.changed) == [path]
    for word in [path, *words]:
        assert word in str(caught.value)


def test_a_message_names_the_first_leaves_and_counts_the_rest() -> None:
    bad = [rows(f"w{n}", (10, 2), 0, 4) for n in range(9)]
    with pytest.raises(LayoutMismatch, match=r"w4: .* and 4 more") as caught:
        share_out([bad])
    assert len(caught.value.changed) == 9
