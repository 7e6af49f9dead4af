"""Between parts and live leaves: what the parts of a snapshot mean for one rank's state (torch, by way of leaves).

Rank r of a job takes the values and per-rank leaves of part r. In a job of another size there is no such part: then
what is equal on all ranks is taken, and what is not cannot be dealt out without a rule, which is an error rather than
a guess. Tensors that ranks share are cut to any layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from ckpt.errors import DamagedError, LayoutMismatch
from ckpt.format.manifest import Part
from ckpt.format.shards import Box, Leaf, Shard
from ckpt.format.values import decode
from ckpt.leaves import Stored
from recovery.assemble import Wanted
from recovery.boxes import Bytes


@dataclass(frozen=True, slots=True)
class Seat:
    """Whose state is restored: this rank of so many.

    `names`: which tracked names are restored; None is all of them, and nothing may be left over. With names, nobody is
    going to train on: "$random" and "$data" are left out where a job of another size cannot tell whose to take.
    """

    rank: int
    world_size: int
    names: frozenset[str] | None = None

    def own(self, stored_world_size: int) -> int | None:
        """The rank whose values and per-rank leaves this seat takes; None if only equal ones can be taken."""
        return self.rank if self.world_size == stored_world_size else None


def stored_state(parts: Mapping[int, Part], seat: Seat) -> Stored:
    """What these parts hold, in the words of `ckpt.leaves`. Boxes of the seat's own part come first.

    Raises:
        LayoutMismatch: per-rank values differ, and the job has another size.
        DamagedError: a value cannot be decoded, or parts contradict each other.
    """
    some = next(iter(parts.values()))
    own = seat.own(some.world_size)
    leaves: dict[str, Leaf] = {}
    boxes: dict[str, list[Box]] = {}
    aliases: dict[str, str] = {}
    per_rank: set[str] = set()
    for rank in sorted(parts, key=lambda r: (r != own, r)):
        part = parts[rank]
        aliases = {**part.aliases, **aliases}
        for row in part.shards:
            if row.per_rank:
                per_rank.add(row.leaf)
                if own is not None and rank != own:
                    continue
            leaf = Leaf(row.leaf, row.cls, row.dtype, row.shape)
            if leaves.setdefault(row.leaf, leaf) != leaf:
                raise _contradiction(part, row.leaf, leaves[row.leaf], leaf)
            boxes.setdefault(row.leaf, []).append(row.as_box)
    if own is not None and own in parts:
        values = {name: stored_value(parts[own], name) for name in parts[own].values}
    else:
        values = _common_values(parts, seat)
    return Stored(leaves, {path: tuple(b) for path, b in boxes.items()}, frozenset(per_rank), values, aliases)


def asked_for(stored: Stored, seat: Seat) -> Stored:
    """What the seat restores of it."""
    return stored if seat.names is None else stored.only(seat.names)


def wants(shards: Iterable[Shard], parts: Mapping[int, Part], seat: Seat) -> list[Wanted]:
    """What to read for these live shards. A per-rank leaf is read from the own part; in a job of another size from
    every part, so that `merged` can see whether it makes a difference."""
    some = next(iter(parts.values()))
    own = seat.own(some.world_size)
    holders: dict[str, list[int]] = {}
    for rank in sorted(parts):
        for row in parts[rank].shards:
            if row.per_rank and own in (None, rank):
                holders.setdefault(row.leaf, []).append(rank)
    return [Wanted(shard, rank) for shard in shards for rank in holders.get(shard.leaf.path, (None,))]


def merged(read: Iterator[tuple[Wanted, Bytes]]) -> dict[Shard, Bytes]:
    """The bytes of each shard, where several ranks' values of it must be one.

    Raises:
        LayoutMismatch: they are not.
    """
    found: dict[Shard, Bytes] = {}
    for want, data in read:
        first = found.setdefault(want.shard, data)
        if first is not data and first.tobytes() != data.tobytes():
            raise _per_rank_differ(want.shard.leaf.path)
    return found


def _common_values(parts: Mapping[int, Part], seat: Seat) -> dict[str, Any]:
    """Top-level values that are equal, byte for byte, on all ranks."""
    texts: dict[str, set[bytes]] = {}
    for part in parts.values():
        for name, raw in part.values.items():
            texts.setdefault(name, set()).add(bytes(raw))
    some = parts[min(parts)]
    values = {}
    for name, found in texts.items():
        if len(found) == 1 and all(name in part.values for part in parts.values()):
            values[name] = stored_value(some, name)
        elif seat.names is None or name in seat.names:
            raise _per_rank_differ(name)
    return values


def stored_value(part: Part, name: str) -> Any:
    """One top-level value of a part, decoded. Raises DamagedError."""
    try:
        return decode(part.values.get(name, msgspec.Raw(b"null")))
    except ValueError as error:
        raise DamagedError(
            f"step {part.id.step}, rank {part.rank}: value {name!r} cannot be decoded: {error}; run 'ckpt verify'",
            key="",
            step=part.id.step,
            rank=part.rank,
            leaf=name,
            expected="a tagged value",
            found=str(error),
        ) from error


def _per_rank_differ(path: str) -> LayoutMismatch:
    return LayoutMismatch(
        f"{path}: its value differs from rank to rank, and this job has another number of ranks than the snapshot: "
        "how to deal such values out needs a rule (on_resize), which this version does not have; restore with the "
        "stored number of ranks, or read single values with ckpt.load",
        changed={path: "stored one value per rank, live another number of ranks"},
    )


def _contradiction(part: Part, path: str, one: Leaf, other: Leaf) -> DamagedError:
    return DamagedError(
        f"step {part.id.step}, rank {part.rank}: {path} is {other}, and {one} in another part; run 'ckpt verify'",
        key="",
        step=part.id.step,
        rank=part.rank,
        leaf=path,
        expected=str(one),
        found=str(other),
    )
