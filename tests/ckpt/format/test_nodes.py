from __future__ import annotations

from ckpt.format.nodes import node_extras
from ckpt.format.ownership import share_out
from ckpt.format.shards import Box, Leaf, Shard, whole

CHUNK = 4096


def leaf(path: str, *shape: int) -> Leaf:
    return Leaf(path, "parameter", "float32", shape)


def test_each_node_mirrors_all_replicated_state_once_spread_over_its_ranks() -> None:
    table = [Shard(leaf(f"w{i}", 700, 10), whole((700, 10))) for i in range(12)] + [Shard(leaf("s"), whole(()))]
    tables = [table] * 4
    ownership = share_out(tables, CHUNK)
    nodes = ["a", "a", "b", "b"]
    for node, ranks in (("a", (0, 1)), ("b", (2, 3))):
        extras = node_extras(ownership, tables, nodes, node)
        assert set(extras) == set(ranks)
        here = [shard for rank in ranks for shard in (*ownership.owned[rank], *extras[rank])]
        everything = [shard for owned in ownership.owned for shard in owned]
        assert sorted(here) == sorted(everything), "all of it, and nothing twice"
        sizes = [sum(shard.nbytes for shard in extras[rank]) for rank in ranks]
        assert max(sizes) - min(sizes) <= max(shard.nbytes for shard in everything)


def test_what_is_sharded_or_per_rank_stays_where_it_is() -> None:
    tables = [
        [Shard(leaf("w", 400, 10), Box((100 * r, 0), (100, 10))), Shard(leaf("b", 2000), whole((2000,)), True)]
        for r in range(4)
    ]
    ownership = share_out(tables, CHUNK)
    assert node_extras(ownership, tables, ["a", "a", "b", "b"], "a") == {0: (), 1: ()}


def test_one_node_needs_no_extras() -> None:
    tables = [[Shard(leaf("w", 400, 10), whole((400, 10)))]] * 3
    assert node_extras(share_out(tables, CHUNK), tables, ["a"] * 3, "a") == {0: (), 1: (), 2: ()}


def test_hybrid_shards_are_mirrored_by_the_rank_of_the_node_that_holds_them() -> None:
    """HSDP 2 x 2: each shard lies on one rank of each node."""
    halves = [Box((0, 0), (200, 10)), Box((200, 0), (200, 10))]
    tables = [[Shard(leaf("w", 400, 10), halves[r % 2])] for r in range(4)]
    ownership = share_out(tables, CHUNK)
    for node, ranks in (("a", (0, 1)), ("b", (2, 3))):
        extras = node_extras(ownership, tables, ["a", "a", "b", "b"], node)
        for rank in ranks:
            mine = [*ownership.owned[rank], *extras[rank]]
            assert sum(shard.nbytes for shard in mine) == tables[rank][0].nbytes
