"""An optimizer's leaves: its state by the names of its parameters, found by identity (PYTORCH.md §1).

Tensors directly in a parameter's state are leaves ``<name>.state.<path of the parameter>.<slot>`` of class
``slot:<slot>``; nothing more is written about them. What else is there (counters, lists of tensors as in LBFGS), and
the parameter groups with their parameters by name, is the optimizer's value:

    {"param_groups": [{"params": (names…), option: …}], "state": {name: {slot: …}}, "shared": {key: …}}
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from operator import is_, methodcaller
from typing import Any

import torch

from ckpt.errors import UnsupportedState
from ckpt.leaves.tensors import Found, instance_of
from ckpt.leaves.tree import walk

_values = methodcaller("values")

# Optimizers (by where their class lives) that keep flat copies of their own instead of the parameters they were given.
_FLAT_COPIES = ("deepspeed.runtime", "megatron", "apex.contrib", "apex.fp16_utils", "fairscale")

Names = Mapping[int, str]
"""id of a tracked tensor → its path."""


class OptimizerLeaves:
    """One tracked optimizer. `look` is cheap while its parameters and the tensors in its state are the same objects."""

    def __init__(self, name: str, optimizer: torch.optim.Optimizer, per_rank: bool) -> None:
        self.name = name
        self.optimizer = optimizer
        self.per_rank = per_rank
        _refuse(name, optimizer)
        self._names: Names | None = None
        self._params: list[torch.Tensor] = []
        self._found: tuple[Found, ...] = ()
        self._states: list[dict[str, Any]] = []
        self._sizes: list[int] = []
        self._keys: list[str] = []
        self._tensors: list[torch.Tensor] = []
        self._mixed: list[tuple[str, dict[str, Any]]] = []
        self.groups: list[tuple[str, ...]] = []
        """Names of the parameters, group by group."""

    def look(self, names: Names) -> tuple[Found, ...]:
        """The tensors directly in the parameters' states. The same tuple while nothing has changed.

        Raises:
            UnsupportedState: a parameter is no tracked leaf; state is half present or belongs to no parameter.
        """
        if self._names is not names or not self._same():
            self._plan(names)
        return self._found

    def value(self, found: list[Found]) -> dict[str, Any]:
        """A copy of everything else; tensors in it are added to `found`."""
        state = {
            path: {
                slot: walk(v, f"{self.name}.state.{path}.{slot}", found, cls=f"slot:{slot}", per_rank=self.per_rank)
                for slot, v in slots.items()
                if not isinstance(v, torch.Tensor)
            }
            for path, slots in self._mixed
        }
        return {"param_groups": self._group_values(found), "state": state, "shared": self._shared(found)}

    def _group_values(self, found: list[Found]) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = []
        for i, group in enumerate(self.optimizer.param_groups):
            path = f"{self.name}.param_groups[{i}]"
            options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
            groups.append({"params": self.groups[i], **walk(options, path, found, per_rank=self.per_rank)})
        return groups

    def _shared(self, found: list[Found]) -> dict[str, Any]:
        shared = {k: v for k, v in self.optimizer.state.items() if not isinstance(k, torch.Tensor)}
        copied: dict[str, Any] = walk(shared, f"{self.name}.shared", found, per_rank=self.per_rank)
        return copied

    def _same(self) -> bool:
        state: Any = self.optimizer.state
        params = list(chain.from_iterable(group["params"] for group in self.optimizer.param_groups))
        if len(params) != len(self._params) or not all(map(is_, params, self._params)):
            return False
        if [len(g["params"]) for g in self.optimizer.param_groups] != [len(g) for g in self.groups]:
            return False
        states = [s for s in map(state.get, params) if s]  # .get: indexing the defaultdict would create entries
        return (
            len(states) == len(self._states)
            and all(map(is_, states, self._states))
            and list(map(len, states)) == self._sizes
            and all(map(is_, chain.from_iterable(states), self._keys))
            and self._same_tensors(states)
            and self._strays() == 0
        )

    def _same_tensors(self, states: list[dict[str, Any]]) -> bool:
        now = list(chain.from_iterable(map(_values, states)))
        if self._mixed:
            now = [v for v in now if isinstance(v, torch.Tensor)]
        return len(now) == len(self._tensors) and all(map(is_, now, self._tensors))

    def _strays(self) -> int:
        """How many parameters have state without being in a group."""
        state: Any = self.optimizer.state
        if len(state) <= len(self._states):
            return 0
        known = set(map(id, self._params))
        return sum(1 for k, v in state.items() if isinstance(k, torch.Tensor) and v and id(k) not in known)

    def _plan(self, names: Names) -> None:
        state: Any = self.optimizer.state
        params: list[torch.Tensor] = []
        groups: list[tuple[str, ...]] = []
        states: list[dict[str, Any]] = []
        found: list[Found] = []
        mixed: list[tuple[str, dict[str, Any]]] = []
        for i, group in enumerate(self.optimizer.param_groups):
            params += group["params"]
            groups.append(tuple(self._name(p, names, i, j) for j, p in enumerate(group["params"])))
            present: dict[str, dict[str, Any]] = {}
            for path, parameter in zip(groups[-1], group["params"], strict=True):
                slots = state.get(parameter)
                if slots:
                    present[path] = slots
                    states.append(slots)
            for path, slots in present.items():
                tensors = self._tensors_of(path, slots)
                found += tensors
                if len(tensors) < len(slots):
                    mixed.append((path, slots))
            for path, lacks in half_present({path: frozenset(slots) for path, slots in present.items()}).items():
                raise UnsupportedState(
                    f"{self.name}: the state of {path} lacks {', '.join(lacks)}, which other parameters of group {i} "
                    "have; half a state cannot be continued: put it back, or delete the parameter's whole state",
                    leaf=f"{self.name}.state.{path}",
                )
        self._params, self.groups, self._states, self._mixed = params, groups, states, mixed
        if self._strays():
            raise UnsupportedState(
                f"{self.name}: its state holds entries for parameters that are in none of its groups any more; "
                "delete them: del optimizer.state[parameter]",
                leaf=self.name,
            )
        self._sizes = list(map(len, states))
        self._keys = list(chain.from_iterable(states))
        self._tensors = [f.tensor for f in found if isinstance(f.tensor, torch.Tensor)]
        self._names, self._found = names, tuple(found)

    def _name(self, parameter: torch.Tensor, names: Names, group: int, index: int) -> str:
        path = names.get(id(parameter))
        if path is None:
            raise UnsupportedState(
                f"{self.name}: parameter {index} of group {group} (shape {tuple(parameter.shape)}) is no tensor of the "
                "tracked state; track its module too, and build the optimizer after fully_shard, .to() and the like, "
                "which replace parameters",
                leaf=f"{self.name}.param_groups[{group}].params[{index}]",
            )
        return path

    def _tensors_of(self, path: str, slots: dict[str, Any]) -> list[Found]:
        tensors = []
        for slot, value in slots.items():
            leaf = f"{self.name}.state.{path}.{slot}"
            if not isinstance(slot, str):
                raise UnsupportedState(f"{leaf}: the slot {slot!r} is not named by a string", leaf=leaf)
            if isinstance(value, torch.Tensor):
                tensors.append(Found(leaf, f"slot:{slot}", value, self.per_rank))
        return tensors


def half_present(slots: Mapping[str, frozenset[str]]) -> dict[str, list[str]]:
    """Of the parameters of one group that have state: those with some, but not all, of the slots of another one.

    (Sets that only overlap are fine: Adafactor keeps other slots for matrices than for vectors.)
    Returns path → the slots it lacks.
    """
    kinds = set(slots.values())
    return {path: sorted(other - have) for path, have in slots.items() for other in kinds if have < other}


def _refuse(name: str, optimizer: torch.optim.Optimizer) -> None:
    if instance_of(optimizer, "torch.distributed.optim.zero_redundancy_optimizer", "ZeroRedundancyOptimizer"):
        raise UnsupportedState(
            f"{name}: ZeroRedundancyOptimizer keeps each rank's share of the state in an optimizer of its own; use "
            "fully_shard, which shards the state by boxes",
            leaf=name,
        )
    refuse_flat_copies(name, optimizer)
    kind = type(optimizer)
    if kind.state_dict is not torch.optim.Optimizer.state_dict:
        extra = sorted(set(optimizer.state_dict()) - {"state", "param_groups"})
        if extra:
            raise UnsupportedState(
                f"{name}: {kind.__qualname__}.state_dict() also holds {', '.join(extra)}, which can only be restored "
                "with the whole; track those under names of their own",
                leaf=name,
            )


def refuse_flat_copies(name: str, value: object) -> None:
    """Refuse engines and optimizers that train flat copies of the parameters. Raises UnsupportedState."""
    for kind in type(value).__mro__:
        home = kind.__module__
        if any(home == flat or home.startswith(f"{flat}.") for flat in _FLAT_COPIES):
            raise UnsupportedState(
                f"{name}: {home}.{kind.__qualname__} owns flat copies of the parameters, which follow no module's "
                "names; save through its own checkpointing, or use fully_shard with a torch optimizer",
                leaf=name,
            )
