"""What a rank mirrors for its node besides what it stores (pure).

Every replicated byte is stored by one rank, perhaps of another node. So that a node can bring its ranks back by itself,
what its ranks hold and ranks of other nodes store is mirrored once on the node, spread over the ranks that hold it.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckpt.format.ownership import Ownership
from ckpt.format.shards import Box, Shard


def node_extras(
    ownership: Ownership, tables: Sequence[Sequence[Shard]], nodes: Sequence[str], node: str
) -> dict[int, tuple[Shard, ...]]:
    """Rank of `node` → the shards it mirrors and does not store, sorted.

    Args:
        ownership: who stores what.
        tables: the shards each rank holds, by rank.
        nodes: the node of each rank.
        node: the one asked about. Every rank of it computes the same answer.
    """
    here = [rank for rank, name in enumerate(nodes) if name == node]
    replicated = {path for path, _ in ownership.replicated}
    held: dict[str, list[tuple[Box, int]]] = {}
    for rank in here:
        for shard in tables[rank]:
            if not shard.per_rank and shard.leaf.path in replicated:
                held.setdefault(shard.leaf.path, []).append((shard.box, rank))
    absent = [
        (shard, holders)
        for rank, name in enumerate(nodes)
        if name != node
        for shard in ownership.owned[rank]
        if not shard.per_rank and (holders := _holders(shard, held.get(shard.leaf.path, ())))
    ]
    extras: dict[int, list[Shard]] = {rank: [] for rank in here}
    load = dict.fromkeys(here, 0)
    # The largest first, each to whoever has least: no byte twice, and loads that differ by one shard at most.
    for shard, holders in sorted(absent, key=lambda each: (-each[0].nbytes, each[0])):
        rank = min(holders, key=lambda rank: (load[rank], rank))
        extras[rank].append(shard)
        load[rank] += shard.nbytes
    return {rank: tuple(sorted(shards)) for rank, shards in extras.items()}


def _holders(shard: Shard, held: Sequence[tuple[Box, int]]) -> list[int]:
    return [rank for box, rank in held if box == shard.box or box.intersect(shard.box) == shard.box]
