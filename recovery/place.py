"""Between parts and live leaves: what the parts of a snapshot mean for one rank's state (torch, by way of leaves).

Rank r of a job takes the values and per-rank leaves of part r. In a job of another size
  what is equal on all ranks is taken;
  random states: a rank keeps its own, a new rank's are derived from (run, rank), those of vanished ranks are dropped;
  anything else goes through the user's `on_resize` rule, and is an error without one rather than a guess.
Tensors that ranks share are cut to any layout.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from ckpt.errors import DamagedError, LayoutMismatch
from ckpt.format.manifest import Part
from ckpt.format.shards import Box, Leaf, Shard
from ckpt.leaves import Stored
from ckpt.random_states import derived_states
from recovery.assemble import Wanted
from recovery.boxes import Bytes
from recovery.read import stored_value

log = logging.getLogger("ckpt")

Resize: TypeAlias = Callable[[str, Sequence[Any], int, int], Any]
"""``rule(name, values, rank, world_size)`` → what `rank` of `world_size` takes of a value (by its name in the state, or
"$data") or per-rank tensor (by its path) that differed between ranks; `values` by stored rank, None where one had none.
"""


@dataclass(frozen=True, slots=True)
class Seat:
    """Whose state is restored: this rank of so many.

    `names`: which tracked names are restored; None is all of them, and nothing may be left over. With names, nobody is
    going to train on: "$random" and "$data" are left out where a job of another size cannot tell whose to take.
    `rule`: `Options.on_resize`.
    """

    rank: int
    world_size: int
    names: frozenset[str] | None = None
    rule: Resize | None = None

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


def merged(read: Iterator[tuple[Wanted, Bytes]], seat: Seat, stored_world_size: int) -> dict[Shard, Bytes]:
    """The bytes of each shard, where several ranks' values of it must be one, or become one by the seat's rule.

    Raises:
        LayoutMismatch: they are not, and there is no rule, or it gives what does not fit.
    """
    found: dict[Shard, Bytes] = {}
    differing: dict[Shard, dict[int, Bytes]] = {}
    firsts: dict[Shard, int] = {}
    for want, data in read:
        first = found.setdefault(want.shard, data)
        rank = -1 if want.rank is None else want.rank
        if first is data:
            firsts[want.shard] = rank
        elif want.shard in differing or first.tobytes() != data.tobytes():
            if seat.rule is None:
                raise _per_rank_differ(want.shard.leaf.path)
            differing.setdefault(want.shard, {firsts[want.shard]: first})[rank] = data
    for shard, by_rank in differing.items():
        found[shard] = _ruled(shard, by_rank, seat, stored_world_size)
    return found


def _ruled(shard: Shard, by_rank: Mapping[int, Bytes], seat: Seat, stored_world_size: int) -> Bytes:
    """What the user's rule makes of a per-rank leaf."""
    assert seat.rule is not None
    dtype = getattr(torch, shard.leaf.dtype)
    given = {rank: torch.from_numpy(data).view(dtype).reshape(shard.box.lengths) for rank, data in by_rank.items()}
    # A rank whose bytes equalled the first one's was merged with it, so its value is the first one's.
    first = given[min(given)]
    taken = seat.rule(
        shard.leaf.path, [given.get(r, first) for r in range(stored_world_size)], seat.rank, seat.world_size
    )
    if not isinstance(taken, torch.Tensor) or taken.dtype != dtype or tuple(taken.shape) != shard.box.lengths:
        expected = f"a tensor of {dtype} and shape {list(shard.box.lengths)}"
        raise LayoutMismatch(
            f"{shard.leaf.path}: on_resize gave {_described(taken)}, expected {expected}",
            changed={shard.leaf.path: f"expected {expected}"},
        )
    return np.asarray(taken.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy(), dtype=np.uint8)


def _described(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"one of {value.dtype} and shape {list(value.shape)}"
    return f"a {type(value).__name__}"


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
        elif name == "$random" and seat.names is None:
            values[name] = _random_states(parts, seat)
        elif seat.names is None or name in seat.names:
            if seat.rule is None:
                raise _per_rank_differ(name)
            each = [stored_value(parts[rank], name) if name in parts[rank].values else None for rank in sorted(parts)]
            values[name] = seat.rule(name, each, seat.rank, seat.world_size)
    return values


def _random_states(parts: Mapping[int, Part], seat: Seat) -> Any:
    """The rank's own, or ones of its own making."""
    if seat.rank == 0 and seat.world_size < len(parts):
        log.warning("random states of ranks %d to %d are dropped: they are gone", seat.world_size, len(parts) - 1)
    own = parts.get(seat.rank)
    if own is not None and "$random" in own.values:
        return stored_value(own, "$random")
    run = parts[min(parts)].run
    log.warning("rank %d is new: its random states are derived from run %s and its number", seat.rank, run)
    return derived_states(run, seat.rank)


def _per_rank_differ(path: str) -> LayoutMismatch:
    return LayoutMismatch(
        f"{path}: its value differs from rank to rank, and this job has another number of ranks than the snapshot: "
        "say how to deal such values out with Options(on_resize=rule), restore with the stored number of ranks, or "
        "read single values with ckpt.load",
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
