"""Stored leaves against live tensors: which bytes go where, and every difference, found before anything is written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch

from ckpt.errors import LayoutMismatch
from ckpt.format.shards import Box, Leaf, Shard, whole
from ckpt.format.values import TorchName, names_in
from ckpt.leaves.stored import Stored
from ckpt.leaves.targets import Fresh, InPlace, Target, Twins, like, plain
from ckpt.leaves.tensors import Boxes, Found, LiveShard, as_dtensor, live_shard
from ckpt.leaves.tree import counterpart, torch_constant

_CPU = torch.device("cpu")

Write: TypeAlias = Callable[[torch.Tensor], None]


class Matching:
    """Collects wanted shards with what to do with their bytes, and the differences.

    Attributes: missing, unexpected (paths), changed (path → "stored X, live Y"); live, path → what this rank holds.
    """

    def __init__(self, stored: Stored, shards: Iterable[LiveShard], aliases: Mapping[str, str]) -> None:
        self.stored = stored
        self.live = {live.shard.leaf.path: live for live in shards}
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.changed: dict[str, str] = {}
        self._names: dict[str, list[str]] = {}
        for alias, path in aliases.items():
            self._names.setdefault(path, [path]).append(alias)
        self._boxes = Boxes()
        self._used: set[str] = set()
        self._writes: dict[Shard, list[Write]] = {}
        self._compared: dict[Shard, list[Write]] = {}

    def names(self, path: str) -> list[str]:
        """Every name of a live tensor, the one it is stored under first."""
        return self._names.get(path, [path])

    def stored_names(self, path: str) -> list[str]:
        """The distinct paths under which the names of a live tensor were stored, or would have been."""
        return list(dict.fromkeys(self.stored.aliases.get(n, n) for n in self.names(path)))

    def claim(self, path: str, live: torch.Tensor | np.ndarray[Any, Any]) -> None:
        """The live tensor at `path` gets its bytes in place, by any of its names."""
        leaves = [self.stored.leaves[p] for p in self.stored_names(path) if p in self.stored.leaves]
        if not leaves:
            self.missing.append(path)
            return
        self.want(leaves, InPlace(live), self.live.get(path))

    def want(self, leaves: list[Leaf], target: Target, live: LiveShard | None) -> None:
        """`target` gets the bytes of these stored leaves (several: they must be equal), in the box of `live`.

        `live` is None where this rank holds nothing of it; then only the leaf is ticked off.
        """
        self.tick(*leaves)
        if live is None:
            return
        fits = [self._fits(leaf, live.shard) for leaf in leaves]
        if all(fits):
            self._write(leaves, target, live.shard.box)

    def want_like(self, leaves: list[Leaf], target: Target, path: str) -> None:
        """`target`, which is yet to be made like the live tensor at `path`, gets the same box as that."""
        self.tick(*leaves)
        if path in self.live:
            self._write(leaves, target, self.live[path].shard.box)

    def want_whole(self, leaves: list[Leaf], target: Target) -> None:
        """`target`, which is yet to be made, gets the whole of these stored leaves."""
        self.tick(*leaves)
        self._write(leaves, target, whole(leaves[0].shape))

    def tick(self, *leaves: Leaf) -> None:
        """These stored leaves are accounted for."""
        self._used.update(leaf.path for leaf in leaves)

    def _write(self, leaves: list[Leaf], target: Target, box: Box) -> None:
        if box.empty:
            return
        if len(leaves) == 1:
            self._writes.setdefault(self._shard(leaves[0], box), []).append(target.write)
            return
        twins = Twins(target, len(leaves))
        for leaf in leaves:
            self._compared.setdefault(self._shard(leaf, box), []).append(twins.member(leaf.path))

    def _shard(self, leaf: Leaf, box: Box) -> Shard:
        return Shard(leaf, box, leaf.path in self.stored.per_rank)

    def _fits(self, leaf: Leaf, live: Shard) -> bool:
        if (leaf.dtype, leaf.shape) != (live.leaf.dtype, live.leaf.shape):
            self.changed[live.leaf.path] = (
                f"stored {leaf.dtype} {list(leaf.shape)}, live {live.leaf.dtype} {list(live.leaf.shape)}"
            )
            return False
        if leaf.path in self.stored.per_rank and live.box != whole(leaf.shape):
            self.changed[live.leaf.path] = f"stored whole on each rank, live sharded (this rank holds {live.box})"
            return False
        return True

    def tree(
        self, tree: Any, live: Any, path: str, *, in_place: bool, device: torch.device = _CPU
    ) -> Callable[[str], Any]:
        """Targets for every leaf that a stored tree (at `path`) names: the live tensor at the same place of `live`
        where `in_place` and there is one, else a new one on its device (or on `device`). Returns path → restored
        tensor or array."""
        for name in names_in(tree):
            if isinstance(name, TorchName):
                try:
                    torch_constant(name)
                except ValueError as e:
                    self.changed[path] = str(e)
        targets: dict[str, Target] = {}
        for ref, there in counterpart(tree, live).items():
            leaf = self.stored.leaf(ref)
            if leaf is None:
                self.changed[ref] = "named by the stored values, but stored by no rank"
                continue
            targets[ref] = self._tree_target(leaf, there, in_place, device)
        return lambda ref: targets[ref].value

    def _tree_target(self, leaf: Leaf, there: Any, in_place: bool, device: torch.device) -> Target:
        array = leaf.cls == "array"
        if not isinstance(there, torch.Tensor | np.ndarray):
            target: Target = Fresh(plain(leaf, _CPU if array else device), array=array)
            self.want_whole([leaf], target)
        elif isinstance(there, np.ndarray):
            writable = in_place and there.flags.writeable
            target = InPlace(there) if writable else Fresh(plain(leaf, _CPU), array=array)
            self.want([leaf], target, self._held(leaf, there))
        elif in_place:
            target = InPlace(there)
            self.want([leaf], target, self._held(leaf, there))
        elif as_dtensor(there) is not None:
            target = Fresh(like(there, leaf))
            self.want([leaf], target, self._held(leaf, there))
        else:
            target = Fresh(plain(leaf, there.device))
            self.want_whole([leaf], target)
        return target

    def _held(self, leaf: Leaf, tensor: torch.Tensor | np.ndarray[Any, Any]) -> LiveShard | None:
        return live_shard(Found(leaf.path, leaf.cls, tensor), self._boxes)

    def wanted(self) -> dict[Shard, list[Write]]:
        """Shard → what takes its bytes; comparisons first.

        Raises LayoutMismatch if there are differences.
        """
        left = [p for p in self.stored.leaves if p not in self._used]
        unexpected = sorted({*self.unexpected, *left})
        if self.missing or unexpected or self.changed:
            raise _mismatch(tuple(sorted(self.missing)), tuple(unexpected), self.changed)
        wanted = {shard: list(writes) for shard, writes in self._compared.items()}
        for shard, writes in self._writes.items():
            wanted.setdefault(shard, []).extend(writes)
        return wanted


def few(items: Iterable[str], most: int = 5) -> str:
    """A few of many, in words."""
    shown = sorted(items)
    more = f" and {len(shown) - most} more" if len(shown) > most else ""
    return ", ".join(shown[:most]) + more


def _mismatch(missing: tuple[str, ...], unexpected: tuple[str, ...], changed: dict[str, str]) -> LayoutMismatch:
    parts = []
    if missing:
        parts.append(f"live but not stored: {few(missing)}")
    if unexpected:
        parts.append(f"stored but not live: {few(unexpected)}")
    if changed:
        parts.append("different: " + few(f"{path} ({what})" for path, what in changed.items()))
    return LayoutMismatch(
        f"the snapshot does not fit the live state; {'; '.join(parts)}. Nothing was written. Build the model and the "
        "optimizer as they were at the save, or track what the snapshot holds",
        missing=missing,
        unexpected=unexpected,
        changed=changed,
    )
