"""The shards of a state, remembered, and re-checked at every save in a few passes without bytecode per tensor."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter, is_

import torch

from ckpt.errors import UnsupportedState
from ckpt.leaves.tensors import Array, Boxes, Found, LiveShard, as_dtensor, live_shard

_BLOCK = 512
"""Tensors checked at a time: the second look at each finds it in the processor's cache."""

_dtype = attrgetter("dtype")
_local = attrgetter("_local_tensor")


@dataclass(slots=True, eq=False)
class _Entry:
    """`local` is the live tensor whose storage ``live.tensor`` shares; None for an array. `live` is None where this
    rank holds nothing."""

    found: Found
    local: torch.Tensor | None
    live: LiveShard | None

    @property
    def fresh(self) -> bool:
        """Whether the live tensor still is what `live` says. `is_set_to` compares storage, offset, shape and strides;
        our view keeps the old storage alive, so its address cannot come back as another's (data_ptr alone could)."""
        tensor = self.found.tensor
        if isinstance(tensor, torch.Tensor):
            sharded = as_dtensor(tensor)
            local = tensor if sharded is None else sharded._local_tensor
            return local is self.local and (self.live is None or _still(local, self.live.tensor))
        return self.live is not None and _place(tensor) == _place(self.live.tensor.numpy())


def _still(local: torch.Tensor, view: torch.Tensor) -> bool:
    return local.dtype is view.dtype and local.is_set_to(view)


def _place(array: Array) -> tuple[object, ...]:
    return array.__array_interface__["data"], array.shape, array.strides, array.dtype


class Table:
    """`shards` of the last `update` or `refresh`, sorted; the same tuple as long as nothing at all has changed."""

    def __init__(self) -> None:
        self.boxes = Boxes()
        self.shards: tuple[LiveShard, ...] = ()
        self._entries: dict[str, _Entry] = {}
        self._blocks: list[tuple[list[torch.Tensor], list[torch.Tensor], list[torch.dtype]]] = []
        self._sharded: list[torch.Tensor] = []
        self._sharded_locals: list[torch.Tensor | None] = []
        self._arrays: list[_Entry] = []

    def update(self, found: Iterable[Found]) -> tuple[LiveShard, ...]:
        """Another set of tensors. What was there before under the same path is reused. Raises UnsupportedState."""
        entries: dict[str, _Entry] = {}
        for f in found:
            if f.path in entries:
                raise UnsupportedState(
                    f"{f.path}: two tensors of the state have this path; rename a key (one of them holds a '.')",
                    leaf=f.path,
                )
            old = self._entries.get(f.path)
            same = old is not None and old.found.tensor is f.tensor and old.found.cls == f.cls
            if old is not None and same and old.found.per_rank == f.per_rank and old.fresh:
                entries[f.path] = old
            else:
                entries[f.path] = self._entry(f)
        self._entries = entries
        return self._index()

    def refresh(self) -> tuple[LiveShard, ...]:
        """The same tensors, but their storage, shape or dtype may have been swapped (``.data =``)."""
        if (
            all(map(is_, map(_local, self._sharded), self._sharded_locals))
            and all(
                all(map(torch.Tensor.is_set_to, tensors, views)) and all(map(is_, map(_dtype, tensors), dtypes))
                for tensors, views, dtypes in self._blocks
            )
            and all(entry.fresh for entry in self._arrays)
        ):
            return self.shards
        for path, entry in self._entries.items():
            if not entry.fresh:
                self._entries[path] = self._entry(entry.found)
        return self._index()

    def _entry(self, found: Found) -> _Entry:
        live = live_shard(found, self.boxes)
        tensor = found.tensor
        sharded = as_dtensor(tensor)
        local = sharded._local_tensor if sharded is not None else tensor if isinstance(tensor, torch.Tensor) else None
        return _Entry(found, local, live)

    def _index(self) -> tuple[LiveShard, ...]:
        # Paths are unique on a rank, so sorting by path is sorting by shard, without comparing dataclasses.
        self._entries = dict(sorted(self._entries.items()))
        entries = self._entries.values()
        self.shards = tuple(e.live for e in entries if e.live is not None)
        pairs = [(e.local, e.live.tensor) for e in entries if e.local is not None and e.live is not None]
        self._blocks = [
            ([a for a, _ in block], [b for _, b in block], [b.dtype for _, b in block])
            for block in (pairs[i : i + _BLOCK] for i in range(0, len(pairs), _BLOCK))
        ]
        sharded = [e for e in entries if e.local is not None and e.local is not e.found.tensor]
        self._sharded = [e.found.tensor for e in sharded if isinstance(e.found.tensor, torch.Tensor)]
        self._sharded_locals = [e.local for e in sharded]
        self._arrays = [e for e in entries if e.local is None]
        return self.shards
