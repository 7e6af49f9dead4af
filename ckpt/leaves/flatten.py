"""The whole tracked mapping at one instant: leaves with their live tensors, plain values, tied names.

Everything is looked at anew at each save, because training code may do anything in between; what did not change is
recognised by identity, and then costs next to nothing (PYTORCH.md §5).
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from ckpt.errors import UnsupportedState
from ckpt.leaves.module import ModuleLeaves
from ckpt.leaves.optimizer import OptimizerLeaves, refuse_flat_copies
from ckpt.leaves.table import Table
from ckpt.leaves.tensors import Found, LiveShard, PerRank
from ckpt.leaves.tree import NOTHING, is_tree, walk


@dataclass(frozen=True, slots=True, eq=False)
class Flat:
    """A state taken apart. `shards` (sorted) refer to the live tensors; `values` (tracked name → tree with `Ref` for
    tensors) are copies; `aliases`: other names of tied tensors → the path under which they are stored; `stepped`: paths
    of what tracked optimizers own, their parameters and the tensors of their state."""

    shards: tuple[LiveShard, ...]
    values: dict[str, Any]
    aliases: dict[str, str]
    stepped: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, eq=False)
class TensorLeaf:
    """A tracked tensor or array: one leaf under the tracked name."""

    found: tuple[Found, ...]

    def look(self) -> tuple[Found, ...]:
        return self.found

    def value(self, _found: list[Found]) -> Any:
        return NOTHING


@dataclass(frozen=True, slots=True, eq=False)
class TreeLeaves:
    """A tracked plain value, or containers of them with tensors inside."""

    name: str
    live: Any
    per_rank: bool

    def look(self) -> tuple[Found, ...]:
        return ()

    def value(self, found: list[Found]) -> Any:
        return walk(self.live, self.name, found, per_rank=self.per_rank)


@dataclass(frozen=True, slots=True, eq=False)
class StatefulLeaves:
    """Anything else with `state_dict` and `load_state_dict`: schedulers, scalers, samplers, the user's own."""

    name: str
    live: Any
    per_rank: bool

    def look(self) -> tuple[Found, ...]:
        return ()

    def value(self, found: list[Found]) -> Any:
        return walk(self.live.state_dict(), self.name, found, per_rank=self.per_rank)


Source: TypeAlias = ModuleLeaves | OptimizerLeaves | TensorLeaf | TreeLeaves | StatefulLeaves


def classify(name: str, value: object) -> Source:
    """How a tracked object is taken apart. Raises UnsupportedState for what cannot be tracked."""
    per_rank = isinstance(value, PerRank)
    if isinstance(value, PerRank):
        value = value.value
    match value:
        case nn.Module():
            if type(value).__module__.startswith("deepspeed."):
                refuse_flat_copies(name, value)
            return ModuleLeaves(name, value, per_rank)
        case torch.optim.Optimizer():
            return OptimizerLeaves(name, value, per_rank)
        case torch.Tensor():
            return TensorLeaf((Found(name, "tensor", value, per_rank),))
        case np.ndarray():
            if not value.flags.writeable:
                raise UnsupportedState(
                    f"{name}: a read-only array, which could not be restored in place; track a .copy() of it, or keep "
                    "it in a dict, where it can be replaced",
                    leaf=name,
                )
            return TensorLeaf((Found(name, "array", value, per_rank),))
        case _ if is_tree(value):
            return TreeLeaves(name, value, per_rank)
        case type():
            raise UnsupportedState(f"{name}: {value!r} is a class; track an instance of it", leaf=name)
        case _ if callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
            refuse_flat_copies(name, value)
            # A loader's position is each rank's own (DESIGN.md §5), so the tensors in it are no replicas.
            own = type(value).__module__.startswith("torchdata.")
            return StatefulLeaves(name, value, per_rank or own)
        case DataLoader():
            raise UnsupportedState(
                f"{name}: a DataLoader has no position of its own to save; draw from it through "
                "`for step, batch in saver.batches(loader, total)`, which saves and restores the position",
                leaf=name,
            )
        case torch.Generator():
            raise UnsupportedState(
                f"{name}: a torch.Generator; a loader's is saved by saver.batches(); for another one track an object "
                "whose state_dict() returns generator.get_state() and whose load_state_dict() sets it",
                leaf=name,
            )
        case _:
            return TreeLeaves(name, value, per_rank)


class Flattener:
    """Takes a mapping apart again and again. Keep one per mapping: it remembers what it saw.

    Attributes (as of the last look): names, id of every tensor outside optimizer states → its path; aliases, as in
    `Flat`.
    """

    def __init__(self, state: MutableMapping[str, object]) -> None:
        self._state = state
        self._sources: dict[str, tuple[object, Source]] = {}
        self._tied: tuple[tuple[Found, ...], ...] = ()
        self._slots: tuple[tuple[Found, ...], ...] = ()
        self._loose: tuple[Found, ...] = ()
        self._rest: tuple[Found, ...] = ()
        self._stored: tuple[Found, ...] = ()
        self._table = Table()
        self._complete = False
        self._stepped: frozenset[str] = frozenset()
        self.names: dict[int, str] = {}
        self.aliases: dict[str, str] = {}

    def flatten(self) -> Flat:
        """The state as it is now.

        `shards` is the same tuple as last time if no tensor and no storage was added, removed or replaced.

        Raises:
            UnsupportedState: something cannot be saved exactly; names the leaf and what to do.
        """
        shards, values = self.look(self.sources())
        return Flat(shards, values, self.aliases, self._stepped)

    def sources(self) -> dict[str, Source]:
        """How each tracked object is taken apart; looked up anew where another object stands under the name."""
        now: dict[str, tuple[object, Source]] = {}
        for name, value in self._state.items():
            if not isinstance(name, str) or not name or name.startswith("$"):
                raise UnsupportedState(
                    f"{name!r} cannot be the name of a tracked object: it must be a string, not empty, and names that "
                    "start with '$' are the library's own",
                    leaf=str(name),
                )
            old = self._sources.get(name)
            now[name] = old if old is not None and old[0] is value else (value, classify(name, value))
        self._sources = now
        return {name: source for name, (_, source) in now.items()}

    def look(self, sources: dict[str, Source]) -> tuple[tuple[LiveShard, ...], dict[str, Any]]:
        """Shards and values of these sources. Raises UnsupportedState."""
        values: dict[str, Any] = {}
        loose: list[Found] = []
        tied: list[tuple[Found, ...]] = []
        optimizers = {name: s for name, s in sources.items() if isinstance(s, OptimizerLeaves)}
        for name, source in sources.items():
            if isinstance(source, OptimizerLeaves):
                continue
            tied.append(source.look())
            if (value := source.value(loose)) is not NOTHING:
                values[name] = value
        changed = self._name(tuple(tied), loose)
        slots = tuple(optimizer.look(self.names) for optimizer in optimizers.values())
        rest: list[Found] = []
        for name, optimizer in optimizers.items():
            values[name] = optimizer.value(rest)
        known = steady(self._rest, rest)
        if self._complete and not changed and known is self._rest and _identical(slots, self._slots):
            return self._table.refresh(), values
        self._complete = False  # a refusal below must not leave an older table to be taken for this one
        self._slots, self._rest = slots, known
        shards = self._table.update(chain(self._stored, self._loose, *slots, known))
        owned = (path for optimizer in optimizers.values() for group in optimizer.groups for path in group)
        self._stepped = frozenset(chain(owned, (found.path for found in chain(*slots))))
        self._complete = True
        return shards, values

    def _name(self, tied: tuple[tuple[Found, ...], ...], loose: list[Found]) -> bool:
        """Give every tensor its path, the first one found where it has several. False if all is as it was."""
        known = steady(self._loose, loose)
        if known is self._loose and _identical(tied, self._tied):
            return False
        first: dict[int, Found] = {}
        aliases: dict[str, str] = {}
        for found in chain(*tied):
            canonical = first.setdefault(id(found.tensor), found)
            if canonical is not found:
                aliases[found.path] = canonical.path
        self._stored = tuple(first.values())
        names = {key: found.path for key, found in first.items()}
        for found in known:
            names.setdefault(id(found.tensor), found.path)
        self._tied, self._loose, self.names, self.aliases = tied, known, names, aliases
        return True


def steady(old: tuple[Found, ...], new: Sequence[Found]) -> tuple[Found, ...]:
    """The old tuple if the new findings are the same tensors under the same paths, else the new ones."""
    if len(old) == len(new) and all(
        a.tensor is b.tensor and a.path == b.path and a.cls == b.cls and a.per_rank == b.per_rank
        for a, b in zip(old, new, strict=True)
    ):
        return old
    return tuple(new)


def _identical(a: Sequence[object], b: Sequence[object]) -> bool:
    return len(a) == len(b) and all(map(is_, a, b))
