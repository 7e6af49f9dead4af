"""A snapshot without a store: a state taken apart, its bytes copied, its values through JSON; and back."""

from __future__ import annotations

import warnings
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

import torch

from ckpt.format import values
from ckpt.format.shards import Box, Shard
from ckpt.leaves import Flat, Flattener, Stored, plan_restore


@dataclass(frozen=True)
class Snapshot:
    """What one rank would store."""

    stored: Stored
    data: dict[Shard, torch.Tensor]


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The logical bytes of a tensor in row-major order; a copy."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "ComplexHalf support is experimental"
        dense = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
    return dense.reshape(-1).view(torch.uint8).clone()


def take(state: MutableMapping[str, object], flattener: Flattener | None = None) -> Snapshot:
    return keep((flattener or Flattener(state)).flatten())


def keep(flat: Flat) -> Snapshot:
    leaves, boxes, data, per_rank = {}, {}, {}, set()
    for live in flat.shards:
        shard = live.shard
        leaves[shard.leaf.path] = shard.leaf
        boxes[shard.leaf.path] = (shard.box,)
        data[shard] = raw(live.tensor)
        if shard.per_rank:
            per_rank.add(shard.leaf.path)
    trees = {name: values.decode(values.encode(tree, name)) for name, tree in flat.values.items()}
    return Snapshot(Stored(leaves, boxes, frozenset(per_rank), trees, dict(flat.aliases)), data)


def put(state: MutableMapping[str, object], snapshot: Snapshot) -> None:
    """Restore one rank's snapshot into a state of the same layout."""
    restoration = plan_restore(state, snapshot.stored)
    for shard in restoration.wanted:
        restoration.install(shard, snapshot.data[shard].clone())
    restoration.finish()


def content(state: MutableMapping[str, object]) -> tuple[dict[tuple[str, Box], bytes], dict[str, Any]]:
    """Everything in a state, comparable with ==: bytes by path and box, values as JSON."""
    flat = Flattener(state).flatten()
    tensors = {(live.shard.leaf.path, live.shard.box): raw(live.tensor).numpy().tobytes() for live in flat.shards}
    return tensors, {name: values.encode(tree, name) for name, tree in flat.values.items()}
