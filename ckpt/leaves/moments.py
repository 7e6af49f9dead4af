"""Optimizer state back into a live optimizer, by the names of its parameters (PYTORCH.md §1).

`optimizer.state` is written directly. Never through `load_state_dict`, which matches by position (a reordered
optimizer would swap moments) and casts moments to the parameter's dtype; never after a faked step, which changes the
very parameters that are being restored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from ckpt.format.shards import Leaf
from ckpt.format.values import Ref, encode
from ckpt.format.weights_only import is_optimizer
from ckpt.leaves.matching import Matching, few
from ckpt.leaves.optimizer import OptimizerLeaves, half_present
from ckpt.leaves.stored import Stored
from ckpt.leaves.targets import Fresh, InPlace, Target, like, plain
from ckpt.leaves.tensors import as_dtensor
from ckpt.leaves.tree import NOTHING, regrow

# How this process computes, not what it has computed: the live choice stays, and decides where scalars live.
_SWITCHES = frozenset({"foreach", "fused", "capturable", "differentiable"})

Slots = dict[str, dict[str, Leaf]]
"""Path of a parameter → slot → stored leaf."""


def plan_optimizer(matching: Matching, source: OptimizerLeaves) -> Iterator[Callable[[], None]]:
    """Claims what belongs to the optimizer; yields what is to be done when all bytes are there."""
    name = source.name
    tree = matching.stored.values.get(name, NOTHING)
    if tree is NOTHING:
        matching.missing.append(name)
        return
    if not is_optimizer(tree):
        matching.changed[name] = "stored something else, live an optimizer"
        return
    yield from _Plan(matching, source, tree).steps()


def _slots(stored: Stored, name: str) -> Slots:
    """The tensors directly in parameters' states: ``<name>.state.<parameter>.<slot>`` of class ``slot:<slot>``."""
    prefix = f"{name}.state."
    slots: Slots = {}
    for path, leaf in stored.leaves.items():
        slot = leaf.cls.removeprefix("slot:")
        if leaf.cls != slot and path.startswith(prefix) and path.endswith(f".{slot}"):
            slots.setdefault(path[len(prefix) : -len(slot) - 1], {})[slot] = leaf
    return slots


class _Plan:
    """One optimizer: `where` says which stored group a parameter (by stored name) was in."""

    def __init__(self, matching: Matching, source: OptimizerLeaves, tree: dict[str, Any]) -> None:
        self.matching = matching
        self.name = source.name
        self.optimizer = source.optimizer
        self.groups = source.groups
        self.tree = tree
        self.slots = _slots(matching.stored, source.name)
        self.stored_groups: list[dict[str, Any]] = tree["param_groups"]
        self.where = {path: i for i, group in enumerate(self.stored_groups) for path in group["params"]}

    def steps(self) -> Iterator[Callable[[], None]]:
        self._check_halves()
        met: set[str] = set()
        for i, (group, paths) in enumerate(zip(self.optimizer.param_groups, self.groups, strict=True)):
            origins: dict[int, str] = {}
            for parameter, path in zip(group["params"], paths, strict=True):
                names = [n for n in self.matching.stored_names(path) if n in self.where]
                if names:  # else it is new to the optimizer, and begins without state
                    met.update(names)
                    origins.setdefault(self.where[names[0]], path)
                    yield from self._state(group, parameter, path, names)
            yield from self._options(i, group, origins)
            self._check_order(i, paths, origins)
        gone = [path for path in self.tree["state"] if path not in met]
        self.matching.unexpected += [f"{self.name}.state.{path}" for path in gone]
        shared = self.tree["shared"]
        restored = self.matching.tree(shared, NOTHING, f"{self.name}.shared", in_place=False)
        yield lambda: self.optimizer.state.update(regrow(shared, NOTHING, restored, in_place=False))

    def _check_halves(self) -> None:
        for group in self.stored_groups:
            have = {p: frozenset(self.slots.get(p, {})) | self.tree["state"].get(p, {}).keys() for p in group["params"]}
            for path, lacks in half_present({p: frozenset(slots) for p, slots in have.items() if slots}).items():
                self.matching.missing += [f"{self.name}.state.{path}.{slot}" for slot in lacks]

    def _check_order(self, index: int, paths: Sequence[str], origins: dict[int, str]) -> None:
        # LBFGS keeps one flat vector over all parameters, in their order, as the state of the first.
        if not isinstance(self.optimizer, torch.optim.LBFGS) or not origins:
            return
        stored = self.stored_groups[next(iter(origins))]["params"]
        if [self.matching.stored_names(p)[0] for p in paths] != list(stored):
            self.matching.changed[f"{self.name}.param_groups[{index}].params"] = (
                f"stored the order {few(stored)}, live {few(paths)}; LBFGS cannot be matched by name"
            )

    # --- the state of one parameter ------------------------------------------------------------------------------

    def _state(
        self, group: dict[str, Any], parameter: torch.Tensor, path: str, names: list[str]
    ) -> Iterator[Callable[[], None]]:
        first, *others = names
        slots = self.slots.get(first, {})
        for other in others:
            if self.slots.get(other, {}).keys() != slots.keys():
                self.matching.changed[f"{self.name}.state.{path}"] = (
                    f"{first} and {other}, one parameter here, were stored with different slots"
                )
                return
        targets = {
            slot: self._target(leaf, [self.slots[o][slot] for o in others], group, parameter, path, slot)
            for slot, leaf in sorted(slots.items())  # in one order on all ranks, who may gather them one by one
        }
        rest = self.tree["state"].get(first, {})
        place = f"{self.name}.state.{path}"
        restored = self.matching.tree(rest, NOTHING, place, in_place=False, device=parameter.device)
        yield partial(self._put, parameter, targets, rest, restored)

    def _put(
        self, parameter: torch.Tensor, targets: dict[str, Target], rest: dict[str, Any], restored: Callable[[str], Any]
    ) -> None:
        state: Any = self.optimizer.state
        new = {slot: target.value for slot, target in targets.items()}
        new.update(regrow(rest, NOTHING, restored, in_place=False))
        live = state.get(parameter)  # indexing the defaultdict would create an entry where there is to be none
        if new and live is None:
            state[parameter] = new
        elif live is not None:
            live.clear()
            live.update(new)

    def _target(
        self, leaf: Leaf, twins: list[Leaf], group: dict[str, Any], parameter: torch.Tensor, path: str, slot: str
    ) -> Target:
        """Where a slot goes: into the live tensor if there is one like it, else into a new one."""
        matching, state = self.matching, self.optimizer.state
        live = matching.live.get(f"{self.name}.state.{path}.{slot}")
        there = state[parameter].get(slot) if parameter in state else None
        target: Target
        same = live is not None and (live.shard.leaf.dtype, live.shard.leaf.shape) == (leaf.dtype, leaf.shape)
        if same and isinstance(there, torch.Tensor):
            target = InPlace(there)
            matching.want([leaf, *twins], target, live)
        elif leaf.shape == tuple(parameter.shape) and not (leaf.shape == () and slot == "step"):
            target = Fresh(like(parameter, leaf))
            matching.want_like([leaf, *twins], target, path)
        elif leaf.shape == () or as_dtensor(parameter) is None:
            # A scalar is where its implementation looks for it: only capturable and fused ones keep it on the device.
            host = leaf.shape == () and not (group.get("capturable") or group.get("fused"))
            target = Fresh(plain(leaf, torch.device("cpu") if host else parameter.device))
            matching.want_whole([leaf, *twins], target)
        else:
            target = Fresh(plain(leaf, parameter.device))
            matching.changed[f"{self.name}.state.{path}.{slot}"] = (
                f"stored with shape {list(leaf.shape)}, which is not that of the sharded parameter "
                f"({list(parameter.shape)}), so its layout here is not known; restore into the same layout after the "
                "optimizer's first step, or keep that parameter unsharded"
            )
            matching.tick(leaf)
        return target

    # --- the options of one group --------------------------------------------------------------------------------

    def _options(self, index: int, group: dict[str, Any], origins: dict[int, str]) -> Iterator[Callable[[], None]]:
        """Options come from the stored group the parameters were in; merged groups must agree. A group of parameters
        that are new to the optimizer keeps what it was built with."""
        if not origins:
            return
        options = [{k: v for k, v in self.stored_groups[i].items() if k != "params"} for i in origins]
        first, *others = options
        path = f"{self.name}.param_groups[{index}]"
        for other, example in zip(others, list(origins.values())[1:], strict=True):
            for key in sorted({*first, *other} - _SWITCHES):
                if encode(first.get(key), path) != encode(other.get(key), path):
                    self.matching.changed[f"{path}.{key}"] = (
                        f"{next(iter(origins.values()))} was stored with {first.get(key)!r}, {example} with "
                        f"{other.get(key)!r}, and here they share a group"
                    )
        for key in first.keys() - _SWITCHES:
            yield from self._option(group, key, first[key], f"{path}.{key}")

    def _option(self, group: dict[str, Any], key: str, value: Any, path: str) -> Iterator[Callable[[], None]]:
        live = group.get(key, NOTHING)
        if live is not NOTHING and isinstance(live, torch.Tensor) != isinstance(value, Ref):
            stored = "a tensor" if isinstance(value, Ref) else repr(value)
            self.matching.changed[path] = f"stored {stored}, live {live!r}; build the optimizer with the same kind"
            return
        restored = self.matching.tree(value, live, path, in_place=True)
        yield partial(_set_option, group, key, value, restored)


def _set_option(group: dict[str, Any], key: str, value: Any, restored: Callable[[str], Any]) -> None:
    group[key] = regrow(value, NOTHING, restored, in_place=False)
