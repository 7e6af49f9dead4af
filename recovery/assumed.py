"""What a recovery would start from, judged by the documents alone: the job is not there to be asked. Pure.

Assumed: every rank but the lost ones still holds, in its mirror, what it stored, and what it shared with ranks that
are lost. Which leaves are replicas is not written in a part; it is told from which ranks list a leaf. Sharded state
is listed by all of them (an empty shard too), a replica by the one that stores it, or by a few where it was cut.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ckpt.format.manifest import Part, ShardRow, Snapshot
from ckpt.format.shards import Box, whole
from recovery.estimate import Bandwidths, estimate
from recovery.holdings import Chunks, Holding, Mask
from recovery.planner import Fetch, Plan, Stored, plan
from recovery.tables import Placed, Table, meeting, placed, table

CUT_REPLICAS = 2
"""Two ranks that share replicas cut at most so many of one class between them: they are dealt out in runs."""


@dataclass(frozen=True, slots=True)
class Scene:
    """The arguments of `planner.plan`, and what had to be assumed for them."""

    nodes: tuple[int, ...]
    wants: Mapping[int, tuple[Chunks, ...]]
    stored: Stored
    holdings: tuple[Holding, ...]
    notes: tuple[str, ...]

    def plan(self) -> Plan:
        return plan(self.nodes, self.wants, self.stored, self.holdings)

    def reload(self, given: Bandwidths) -> Reload:
        """What it takes when every rank reads all it wants from the store instead."""
        known = {rank: w for rank, w in self.wants.items() if all(some.part in self.stored.tables for some in w)}
        read = plan(self.nodes, known, self.stored, ())
        # Of ranks whose parts were not read: as much, by raw bytes, as of the others.
        seen = sum(self.stored.sizes[part] for part in self.stored.tables)
        share = 1.0 if len(known) == len(self.wants) or not seen else sum(self.stored.sizes) / seen
        nbytes = round(share * read.total(Fetch))
        door = 0.0 if given.store_total is None else nbytes / given.store_total
        return Reload(nbytes, max(estimate(read, given).seconds, door))


@dataclass(frozen=True, slots=True)
class Reload:
    """Encoded bytes read by all ranks together, and seconds."""

    nbytes: int
    seconds: float


def parts_to_read(own: Mapping[int, Part]) -> frozenset[int]:
    """Ranks whose parts tell what the lost ranks, whose parts these are, wanted besides."""
    return frozenset(other for part in own.values() for other in part.others) - own.keys()


def same_layout(snapshot: Snapshot, parts: Mapping[int, Part], lost: Sequence[int], *, per_node: int = 1) -> Scene:
    """The job comes back as it was, with new processes and empty mirrors in the places of the lost ranks.

    Args:
        parts: those of the lost ranks and of `parts_to_read`.
        per_node: ranks of a node, numbered one after the other.

    Raises:
        ValueError: a lost rank does not exist.
    """
    world_size = snapshot.world_size
    _check(lost, world_size)
    gone = sorted(set(lost))
    tables = {rank: table(part) for rank, part in parts.items()}
    wants: dict[int, list[Chunks]] = {rank: [Chunks(rank)] for rank in range(world_size)}
    held: dict[int, list[Chunks]] = {rank: [Chunks(rank)] for rank in range(world_size) if rank not in gone}
    replicated = False
    for rank, part in sorted(parts.items()):
        for other, theirs in sorted(parts.items()):
            if other == rank or not (rank in gone or other in gone):
                continue
            some, every = _shared(part, theirs, tables[rank].count)
            replicated |= bool(some.any())
            if other in gone and some.any():
                wants[other].append(Chunks.of(rank, some))
            elif rank in gone and other not in gone and every.any():
                held[other].append(Chunks.of(rank, every))
    sizes, about = _sizes(snapshot, parts, tables)
    notes = ["every rank but the lost ones holds what it stored"]
    if replicated:
        notes.append("replicas, told from which ranks list a leaf, are held by every rank that shared them")
    if about:
        notes.append("what the other ranks keep is an average: their parts were not read")
    holdings = tuple(Holding(rank, tuple(chunks)) for rank, chunks in held.items())
    nodes = tuple(rank // per_node for rank in range(world_size))
    return Scene(
        nodes, {rank: tuple(w) for rank, w in wants.items()}, Stored(sizes, tables), holdings, tuple(notes)
    )  # fmt: skip


def new_layout(
    snapshot: Snapshot, parts: Mapping[int, Part], lost: Sequence[int], world_size: int, *, per_node: int = 1
) -> Scene:
    """The job comes back with `world_size` ranks: the first survivors keep their order, further ranks are new.

    Args:
        parts: all of the snapshot.

    Raises:
        ValueError: a lost rank does not exist, or nobody would be left.
    """
    _check(lost, snapshot.world_size)
    if world_size < 1:
        raise ValueError(f"a world size of {world_size}")
    survivors = [rank for rank in range(snapshot.world_size) if rank not in set(lost)]
    tables = {rank: table(part) for rank, part in parts.items()}
    leaves, private = _leaves(parts)
    replicated = _replicated(snapshot, parts, leaves)
    wanted: dict[tuple[int, int], Mask] = {}
    shared: dict[int, Mask] = {}
    for path, rows in leaves.items():
        shape = rows[0][1].row.shape
        if path in replicated or not shape:
            for part, place in rows:
                mask = shared.setdefault(part, np.zeros(tables[part].count, np.bool_))
                mask[meeting(place, whole(shape), parts[part].chunk)] = True
            continue
        for rank, part, place, box in _dealt(rows, shape, world_size):
            mask = wanted.setdefault((rank, part), np.zeros(tables[part].count, np.bool_))
            mask[meeting(place, box, parts[part].chunk)] = True
    everybody = tuple(Chunks.of(part, mask) for part, mask in sorted(shared.items()))
    wants = {rank: list(everybody) for rank in range(world_size)}
    for (rank, part), mask in sorted(wanted.items()):
        wants[rank].append(Chunks.of(part, mask))
    nodes = [rank // per_node for rank in survivors[:world_size]]
    nodes += [snapshot.world_size + n // per_node for n in range(world_size - len(nodes))]
    holdings, out_of_reach = _mirrors(survivors, nodes, per_node, everybody if replicated else ())
    notes = [
        "every rank but the lost ones holds what it stored; the first survivors keep their order",
        "dimension 0 of each leaf is dealt out evenly over the new ranks, and a chunk is read whole",
    ]
    if replicated:
        notes.append(f"{len(replicated)} leaves are taken for replicas, whole on every rank and in every mirror")
    if private:
        notes.append(
            f"{len(private)} per-rank leaves ({', '.join(sorted(private)[:3])}) are not counted: a rank keeps its own, "
            "and what becomes of others is the job's own rule (on_resize)"
        )
    else:
        notes.append("values that differ from rank to rank go by the job's own rule (on_resize)")
    if out_of_reach:
        notes.append(f"mirrors of {out_of_reach} survivors lie on nodes without a new rank, and are out of reach")
    sizes = [tables[rank].nbytes for rank in range(snapshot.world_size)]
    return Scene(tuple(nodes), {r: tuple(w) for r, w in wants.items()}, Stored(sizes, tables), holdings, tuple(notes))


def _check(lost: Sequence[int], world_size: int) -> None:
    for rank in lost:
        if not 0 <= rank < world_size:
            raise ValueError(f"lost rank {rank}: the snapshot has ranks 0 to {world_size - 1}")


def _sizes(snapshot: Snapshot, parts: Mapping[int, Part], tables: Mapping[int, Table]) -> tuple[list[int], bool]:
    """Raw bytes by rank; of parts that were not read, an average."""
    unread = snapshot.world_size - len(parts)
    rest = max(snapshot.totals.size - sum(part.size for part in parts.values()), 0)
    average = rest // max(unread, 1)
    return [tables[r].nbytes if r in tables else average for r in range(snapshot.world_size)], unread > 0


def _shared(part: Part, other: Part, count: int) -> tuple[Mask, Mask]:
    """Which of a part's chunks another rank held something of, and which it held whole."""
    theirs = {row.leaf for row in other.shards}
    mine = {row.leaf for row in part.shards}
    alone = Counter(row.cls for row in part.shards if row.leaf not in theirs)
    alone.update(row.cls for row in other.shards if row.leaf not in mine)
    both = Counter(row.cls for row in part.shards if row.leaf in theirs)
    related = other.rank in part.others or part.rank in other.others

    def replica(row: ShardRow) -> bool:
        if row.per_rank or not related:
            return False
        return row.leaf not in theirs or (alone[row.cls] > 0 and both[row.cls] <= CUT_REPLICAS)

    some, rest = np.zeros(count, np.bool_), np.zeros(count, np.bool_)
    for place in placed(part):
        mask = some if replica(place.row) else rest
        mask[meeting(place, place.box, part.chunk)] = True
    return some, some & ~rest


def _leaves(parts: Mapping[int, Part]) -> tuple[dict[str, list[tuple[int, Placed]]], set[str]]:
    """Leaf → its stored boxes by their first row; and the per-rank leaves."""
    leaves: dict[str, list[tuple[int, Placed]]] = {}
    private: set[str] = set()
    for rank, part in sorted(parts.items()):
        for place in placed(part):
            if place.row.per_rank:
                private.add(place.row.leaf)
            else:
                leaves.setdefault(place.row.leaf, []).append((rank, place))
    for rows in leaves.values():
        rows.sort(key=lambda row: row[1].box.offsets)
    return leaves, private


def _replicated(
    snapshot: Snapshot, parts: Mapping[int, Part], leaves: Mapping[str, Sequence[tuple[int, Placed]]]
) -> frozenset[str]:
    """Leaves that not every rank lists, stored by ranks that others need."""
    needed = {other for part in parts.values() for other in part.others}
    return frozenset(
        path
        for path, rows in leaves.items()
        if len({rank for rank, _ in rows}) < snapshot.world_size and all(rank in needed for rank, _ in rows)
    )


def _dealt(
    rows: Sequence[tuple[int, Placed]], shape: tuple[int, ...], world_size: int
) -> Iterator[tuple[int, int, Placed, Box]]:
    """Which stored boxes each new rank's rows of a leaf meet: (new rank, part, stored box, wanted box)."""
    each = -(-shape[0] // world_size)
    starts = [place.box.offsets[0] for _, place in rows]
    longest = max(place.box.lengths[0] for _, place in rows)
    for rank in range(world_size):
        start, stop = min(rank * each, shape[0]), min((rank + 1) * each, shape[0])
        box = Box((start, *(0,) * (len(shape) - 1)), (stop - start, *shape[1:]))
        for part, place in rows[bisect_right(starts, start - longest) : bisect_left(starts, stop)]:
            if place.box.intersect(box) is not None:
                yield rank, part, place, box


def _mirrors(
    survivors: Sequence[int], nodes: Sequence[int], per_node: int, everybody: Sequence[Chunks]
) -> tuple[tuple[Holding, ...], int]:
    """Survivor i is new rank i; a mirror whose rank does not come back is read by the ranks of its node."""
    on_node: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        on_node.setdefault(node, []).append(rank)
    holdings: list[Holding] = []
    out_of_reach = 0
    for i, old in enumerate(survivors):
        readers = [i] if i < len(nodes) else on_node.get(old // per_node, [])
        if readers:
            chunks = (Chunks(old), *(some for some in everybody if some.part != old))
            holdings.append(Holding(readers[i % len(readers)], chunks))
        else:
            out_of_reach += 1
    return tuple(holdings), out_of_reach
