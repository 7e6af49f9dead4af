"""What a record of the journal says, for the state it follows: bytes into tensors and options (torch)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ckpt.format.codec import Codec
from ckpt.format.journal import Coded, OpenRecord, decode_run
from ckpt.format.shards import DTYPES
from ckpt.format.values import decode
from ckpt.rolling import Bytes, Call, Change, Rolled, Unlike


def opened(record: OpenRecord, before: Rolled, codec: Codec) -> Change:
    """What a record says, decoded, for the state it follows.

    Raises:
        Unlike, ValueError: it is not a record of this state.
    """
    head = record.head
    if (head.previous, head.count) != (before.step, len(head.rows or before.table)):
        raise Unlike(
            f"a record of step {head.step} follows step {head.previous} with {head.count} tensors; here is step "
            f"{before.step} with {len(head.rows or before.table)}"
        )
    table = before.table if head.rows is None else tuple(row.shard for row in head.rows)
    blobs = iter(record.blobs)

    def run(coded: Coded, base: bool) -> dict[str, Bytes]:
        shards = [table[member] for member in coded.members]
        sizes = [shard.box.numel * DTYPES[coded.dtype].size for shard in shards]
        data = np.empty(sum(sizes), np.uint8)
        some = [next(blobs) for _ in coded.chunks]
        old = None
        if base and all(shard.leaf.path in before.tensors for shard in shards):
            old = np.concatenate([before.bytes_of(shard.leaf.path) for shard in shards] or [np.empty(0, np.uint8)])
            old = old if len(old) == len(data) else None
        decode_run(codec, coded, some, old, data)
        ends = np.cumsum([0, *sizes])
        return {s.leaf.path: data[a:b] for s, a, b in zip(shards, ends[:-1], ends[1:], strict=True)}

    calls = []
    for event in head.events:
        gradients: dict[str, torch.Tensor] = {}
        for coded in event.gradients:
            found = run(coded, base=False)
            for member in coded.members:
                shard = table[member]
                dtype: torch.dtype = getattr(torch, coded.dtype)
                data = found[shard.leaf.path]
                plain = torch.from_numpy(data).view(dtype) if len(data) else torch.empty(0, dtype=dtype)
                gradients[shard.leaf.path] = plain.view(shard.box.lengths)
        groups = None
        if event.groups is not None:
            groups = tuple(
                (tuple(table[p].leaf.path for p in g.params), _options(bytes(g.options))) for g in event.groups
            )
        calls.append(Call(event.optimizer, event.kind, groups, gradients, event.scale))
    tensors: dict[str, Bytes] = {}
    for coded in head.tensors:
        tensors |= run(coded, base=True)
    given = {name: bytes(raw) for name, raw in head.values.items()}
    return Change(
        head.step, calls, tensors, given, head.gone, None if head.rows is None else table, head.aliases, record.sums
    )


def _options(raw: bytes) -> dict[str, Any]:
    options = decode(raw)
    if not isinstance(options, dict) or not all(isinstance(name, str) for name in options):
        raise Unlike(f"options of a parameter group are {options!r}")
    return options
