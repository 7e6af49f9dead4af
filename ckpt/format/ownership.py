"""Who stores what. Every rank computes the same answer from the same gathered tables of shards.

A shard that only one rank holds is stored by that rank, and per-rank shards stay with theirs. A *replica* is what has
the same leaf and box on several ranks: each byte of it is stored once, and the ranks that hold it share the bytes
evenly, class by class, cut at rows of the chunk grid. By class, so that the slots that an optimizer creates at its
first step do not push parameters from rank to rank (a chunk that moves becomes a keyframe), and so that every rank
gets its part of what is dear to encode. In runs of whole leaves rather than round robin, so that few leaves are cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import msgspec
import xxhash
import zstandard

from ckpt.errors import LayoutMismatch
from ckpt.format.shards import DEFAULT_CHUNK, DTYPES, Box, Leaf, Shard, grid, place_of, uncovered, whole

CRUMBS = 64 << 10
"""Replicas of small leaves of one class that are at most so many bytes in all are stored by one rank."""

NAMED = 5
"""How many leaves a message names; the error's attributes have them all."""


@dataclass(frozen=True, slots=True)
class Ownership:
    """What every rank stores.

    Attributes:
        owned: shards by rank, sorted. A replicated box may be split along dimension 0.
        digest: xxh3-128 (hex) of the sorted table of leaf, box and owner.
        replicated: (path, box) of every non-empty box that several ranks hold, before any split, sorted.
        others: by rank, the ranks that store something of what it holds, ascending: whose parts it needs to come back.
    """

    owned: tuple[tuple[Shard, ...], ...]
    digest: str
    replicated: tuple[tuple[str, Box], ...]
    others: tuple[tuple[int, ...], ...]


@dataclass(slots=True)
class _Held:
    """One box, and the ranks that hold it, ascending."""

    shard: Shard
    ranks: list[int]


_Boxes: TypeAlias = dict[tuple[tuple[int, ...], tuple[int, ...]], _Held]
"""By offsets and lengths: plain tuples hash several times faster than boxes, and this is done per leaf and rank."""


def share_out(tables: Sequence[Sequence[Shard]], chunk: int = DEFAULT_CHUNK) -> Ownership:
    """Share the state among the ranks that hold it.

    Args:
        tables: the shards each rank holds, by rank.
        chunk: bytes per chunk; replicas are split at rows of its grid.

    Raises:
        LayoutMismatch: ranks disagree on what a leaf is, or the boxes of a leaf do not cover it exactly once.
    """
    owned: list[list[Shard]] = [[] for _ in tables]
    boxes = _by_leaf(tables, owned)
    _check_coverage(boxes)
    groups: dict[tuple[str, tuple[int, ...]], list[Shard]] = {}
    for held in boxes.values():
        for one in held.values():
            if one.shard.box.empty or len(one.ranks) == 1:
                # An empty box costs nothing, and is listed by each rank that has it.
                for rank in one.ranks:
                    owned[rank].append(one.shard)
            else:
                groups.setdefault((one.shard.leaf.cls, tuple(one.ranks)), []).append(one.shard)
    load = [sum(shard.nbytes for shard in mine) for mine in owned]
    others: list[set[int]] = [set() for _ in tables]
    for (_, ranks), shards in sorted(groups.items()):
        before = [len(owned[rank]) for rank in ranks]
        _spread(sorted(shards, key=place_of), ranks, chunk, owned, load)
        owners = {rank for rank, count in zip(ranks, before, strict=True) if len(owned[rank]) > count}
        for rank in ranks:
            others[rank] |= owners - {rank}
    result = tuple(tuple(sorted(mine, key=place_of)) for mine in owned)
    replicated = sorted((shard.leaf.path, shard.box) for shards in groups.values() for shard in shards)
    return Ownership(result, _digest(result), tuple(replicated), tuple(tuple(sorted(found)) for found in others))


def _by_leaf(tables: Sequence[Sequence[Shard]], owned: list[list[Shard]]) -> dict[str, _Boxes]:
    """Every box by leaf, with its holders; per-rank shards go to `owned` at once."""
    boxes: dict[str, _Boxes] = {}
    changed: dict[str, str] = {}
    seen: dict[str, tuple[Shard, int]] = {}
    everyone = list(range(len(tables)))
    same = all(table is tables[0] for table in tables)  # plain replication; decode_table gives one object then
    for rank, table in enumerate(tables[:1] if same else tables):
        for shard in table:
            leaf, box = shard.leaf, shard.box
            known = seen.get(leaf.path)
            if known is None:
                seen[leaf.path] = (shard, rank)
            elif (known[0].leaf is not leaf or known[0].per_rank != shard.per_rank) and (
                problem := _differ(*known, shard, rank)
            ):
                changed.setdefault(leaf.path, problem)
                continue
            if not shard.per_rank:
                held = boxes.get(leaf.path)
                if held is None:
                    held = boxes[leaf.path] = {}
                key = (box.offsets, box.lengths)
                one = held.get(key)
                if one is None:
                    held[key] = _Held(shard, everyone if same else [rank])
                elif not same:
                    one.ranks.append(rank)
            elif box.lengths != leaf.shape:
                changed.setdefault(leaf.path, f"rank {rank} holds {box} of it; a per-rank tensor is whole on its rank")
            else:
                for holder in everyone if same else (rank,):
                    owned[holder].append(shard)
    _refuse("ranks hold different things under one name", changed)
    return boxes


def _differ(a: Shard, rank_a: int, b: Shard, rank_b: int) -> str | None:
    """What is wrong with two ranks' shards of one leaf; None if nothing is. Per-rank leaves may differ in shape."""
    if a.per_rank != b.per_rank:
        declared, plain = (rank_a, rank_b) if a.per_rank else (rank_b, rank_a)
        return f"per rank on rank {declared} and not on rank {plain}; wrap it in ckpt.PerRank on every rank that has it"
    x, y = a.leaf, b.leaf
    if (x.cls, x.dtype) == (y.cls, y.dtype) and (x.shape == y.shape or a.per_rank):
        return None
    return (
        f"{x.cls} {x.dtype} {list(x.shape)} on rank {rank_a} and {y.cls} {y.dtype} {list(y.shape)} on rank {rank_b}; "
        "a plain tensor that differs per rank must be wrapped in ckpt.PerRank"
    )


def _check_coverage(boxes: dict[str, _Boxes]) -> None:
    """The boxes of each leaf, replicas counted once, cover it exactly once."""
    changed: dict[str, str] = {}
    for path, held in boxes.items():
        one = next(iter(held.values())).shard
        if _stacked(one.leaf.shape, held):
            continue
        problem = uncovered(one.leaf.shape, [each.shard.box for each in held.values()])
        if problem is not None:
            holders = ", ".join(f"rank {each.ranks[0]}: {each.shard.box}" for each in list(held.values())[:NAMED])
            changed[path] = (
                f"{problem} ({holders}); every box must be on some rank, and boxes that overlap must be equal: "
                "a plain tensor that differs per rank must be wrapped in ckpt.PerRank"
            )
    _refuse("the ranks' boxes do not make one whole", changed)


def _stacked(shape: tuple[int, ...], held: _Boxes) -> bool:
    """Whether the boxes are rows laid end to end: the usual case, seen without comparing pairs."""
    if len(held) == 1:
        return next(iter(held))[1] == shape
    at, tail = 0, shape[1:]
    for offsets, lengths in sorted(held):
        if lengths[1:] != tail or any(offsets[1:]) or (lengths[0] and offsets[0] != at):
            return False
        at += lengths[0]
    return at == shape[0]


def _refuse(what: str, changed: dict[str, str]) -> None:
    if not changed:
        return
    named = "; ".join(f"{path}: {text}" for path, text in list(changed.items())[:NAMED])
    more = f"; and {len(changed) - NAMED} more" if len(changed) > NAMED else ""
    raise LayoutMismatch(f"{what}: {named}{more}", changed=changed)


def _spread(
    shards: Sequence[Shard], ranks: tuple[int, ...], chunk: int, owned: list[list[Shard]], load: list[int]
) -> None:
    """Give replicas (of one class, held by the same ranks) out so that the ranks' loads come out even."""
    crumbs = [shard for shard in shards if shard.leaf.small]
    if crumbs and (nbytes := sum(shard.nbytes for shard in crumbs)) <= CRUMBS:
        # Biases, say, or optimizers' step counters. One rank stores them all: spread out, they would be in everybody's
        # part, and every rank of thousands would need thousands of parts to come back. And their bundle is the same
        # however many ranks there are, so a job that comes back with another number does not store it again.
        rank = min(ranks, key=lambda rank: (load[rank], rank))
        owned[rank].extend(crumbs)
        load[rank] += nbytes
        shards = [shard for shard in shards if not shard.leaf.small]
    # What cannot be cut goes first, the largest to whoever has least; what can be cut levels the rest.
    solid: list[Shard] = []
    rest: list[Shard] = []
    for shard in shards:
        whole_only = shard.nbytes > chunk and _step(shard, chunk) is None
        (solid if whole_only else rest).append(shard)
    for shard in sorted(solid, key=lambda shard: (-shard.nbytes, place_of(shard))):
        rank = min(ranks, key=lambda rank: (load[rank], rank))
        owned[rank].append(shard)
        load[rank] += shard.nbytes
    room = _level([load[rank] for rank in ranks], sum(shard.nbytes for shard in rest))
    number = 0  # whose turn it is
    edge = room[0]  # where that turn ends, in bytes from the first of `rest`
    at = 0

    for shard in rest:
        rows = _row_count(shard)
        row = shard.nbytes // rows
        taken = 0
        while taken < rows:
            if number + 1 == len(ranks) or at + (rows - taken) * row <= edge:
                cut = rows
            else:
                cut = _nearest_cut(shard, taken, taken + (edge - at) / row, chunk)
            if cut > taken:
                owned[ranks[number]].append(_rows(shard, taken, cut))
                load[ranks[number]] += (cut - taken) * row
                at += (cut - taken) * row
                taken = cut
            if taken < rows:
                number += 1
                edge += room[number]


def _level(loads: Sequence[int], total: int) -> list[int]:
    """How much of `total` each one gets so that the lowest loads rise to one level, like water."""
    order = sorted(range(len(loads)), key=lambda i: (loads[i], i))
    below = 0
    for count in range(1, len(order) + 1):
        below += loads[order[count - 1]]
        level, extra = divmod(total + below, count)
        if count == len(order) or level <= loads[order[count]]:
            break
    room = [0] * len(loads)
    for place, i in enumerate(order[:count]):
        room[i] = level - loads[i] + (place < extra)
    return room


def _step(shard: Shard, chunk: int) -> int | None:
    """Rows of dimension 0 between cuts of the grid, or None where this shard cannot be cut."""
    leaf = shard.leaf
    if leaf.small or not leaf.shape:
        return None
    cells = grid(leaf.shape, DTYPES[leaf.dtype].size, chunk)
    step = cells.block if cells.cut == 0 else 1
    first, rows = shard.box.offsets[0], shard.box.lengths[0]
    return step if first // step != (first + rows - 1) // step else None


def _nearest_cut(shard: Shard, taken: int, wanted: float, chunk: int) -> int:
    """The row from `taken` to the end, nearest to `wanted`, at which the grid cuts this shard."""
    rows = _row_count(shard)
    choices = [taken, rows]
    step = _step(shard, chunk)
    if step is not None:
        first = shard.box.offsets[0]
        below = int(first + wanted) // step * step - first
        choices += [cut for cut in (below, below + step) if taken < cut < rows]
    return min(choices, key=lambda cut: (abs(cut - wanted), cut))


def _row_count(shard: Shard) -> int:
    return shard.box.lengths[0] if shard.box.lengths else 1


def _rows(shard: Shard, start: int, stop: int) -> Shard:
    if stop - start == _row_count(shard):
        return shard
    box = shard.box
    return Shard(shard.leaf, Box((box.offsets[0] + start, *box.offsets[1:]), (stop - start, *box.lengths[1:])))


def _digest(owned: Sequence[Sequence[Shard]]) -> str:
    rows = sorted(
        (shard.leaf.path, shard.box.offsets, shard.box.lengths, rank)
        for rank, mine in enumerate(owned)
        for shard in mine
    )
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(rows))


# --- tables on their way between ranks ---------------------------------------------------------------------------


class _LeafRow(msgspec.Struct, array_like=True):
    path: str
    cls: str
    dtype: str
    shape: tuple[int, ...]


class _Table(msgspec.Struct):
    """`leaves`: the distinct leaves. `shards`: (leaf number, offsets, lengths), null offsets and lengths for a whole
    tensor. `per_rank`: numbers of the shards that are."""

    leaves: msgspec.Raw
    shards: list[tuple[int, tuple[int, ...] | None, tuple[int, ...] | None]]
    per_rank: list[int]


def encode_table(shards: Iterable[Shard]) -> bytes:
    """A rank's table of shards, for the other ranks. Equal tables give equal bytes."""
    numbers: dict[Leaf, int] = {}
    rows: list[tuple[int, tuple[int, ...] | None, tuple[int, ...] | None]] = []
    per_rank = []
    for shard in shards:
        number = numbers.setdefault(shard.leaf, len(numbers))
        if shard.per_rank:
            per_rank.append(len(rows))
        box = shard.box
        if box.lengths == shard.leaf.shape:
            rows.append((number, None, None))
        else:
            rows.append((number, box.offsets, box.lengths))
    leaves = msgspec.json.encode([_LeafRow(leaf.path, leaf.cls, leaf.dtype, leaf.shape) for leaf in numbers])
    return zstandard.compress(msgspec.json.encode(_Table(msgspec.Raw(leaves), rows, per_rank)), 1)


@lru_cache(maxsize=2)
def decode_table(data: bytes) -> tuple[Shard, ...]:
    """Back from `encode_table`. Equal bytes, in turn, give one object: replicated state is decoded once, not once per
    rank, and `share_out` sees by identity that tables are equal."""
    table = msgspec.json.decode(zstandard.decompress(data), type=_Table)
    leaves = _leaves(bytes(table.leaves))
    per_rank = frozenset(table.per_rank)
    wholes = [whole(leaf.shape) for leaf in leaves]
    return tuple(
        Shard(
            leaves[number],
            wholes[number] if offsets is None or lengths is None else Box(offsets, lengths),
            i in per_rank,
        )
        for i, (number, offsets, lengths) in enumerate(table.shards)
    )


@lru_cache(maxsize=2)
def _leaves(data: bytes) -> tuple[Leaf, ...]:
    # Ranks that hold different boxes of the same leaves share the leaves.
    rows = msgspec.json.decode(data, type=list[_LeafRow])
    return tuple(Leaf(row.path, row.cls, row.dtype, row.shape) for row in rows)
