"""What an optimizer is about to consume, and whether that is all its step depends on (torch)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch.optim.optimizer import _default_to_fused_or_foreach

from ckpt.errors import UnsupportedState
from ckpt.format.shards import Shard
from ckpt.leaves import PerRank
from ckpt.leaves.tensors import as_dtensor
from ckpt.rolling import OPTIMIZERS, Groups, Unlike, plain_options


def tracked(state: Mapping[str, object]) -> dict[str, object]:
    return {name: value.value if isinstance(value, PerRank) else value for name, value in state.items()}


def journaled_optimizers(state: Mapping[str, object]) -> dict[str, torch.optim.Optimizer]:
    """The tracked optimizers. Raises UnsupportedState for those whose steps cannot be replayed from gradients."""
    found: dict[str, torch.optim.Optimizer] = {}
    for name, value in tracked(state).items():
        if not isinstance(value, torch.optim.Optimizer):
            continue
        kind = type(value)
        if OPTIMIZERS.get(kind.__name__) is not kind:
            why = (
                "its step() calls a closure, so what it consumes is not known before it"
                if kind is torch.optim.LBFGS
                else "its step may look across shards, or at more than each element's own state and gradient"
            )
            raise UnsupportedState(
                f"{name}: {kind.__module__}.{kind.__qualname__} cannot be journaled: {why}; leave journal= out, or use "
                f"one of {', '.join(OPTIMIZERS)}",
                leaf=name,
            )
        if any(group.get("differentiable") for group in value.param_groups):
            raise UnsupportedState(f"{name}: a differentiable optimizer cannot be journaled", leaf=name)
        found[name] = value
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Members:
    """The parameters of one group and their paths. `foreach`: what the optimizer decides where nobody said: by the
    live parameters' types and devices, and plain tensors would decide otherwise."""

    parameters: Sequence[torch.Tensor]
    paths: tuple[str, ...]
    foreach: bool


def members_of(group: Mapping[str, Any], paths: Mapping[int, str]) -> Members:
    parameters = list(group["params"])
    foreach = _default_to_fused_or_foreach(parameters, False, use_fused=False)[1]
    return Members(parameters, tuple(paths.get(id(p), "?") for p in parameters), foreach)


def same_objects(some: Sequence[object], others: Sequence[object]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))


def check_tables(before: Sequence[Shard], after: Sequence[Shard], optimizers: Mapping[str, object]) -> None:
    """Whether the only news are slots that a replayed optimizer makes by itself. Raises Unlike naming the leaf."""
    old = {shard.leaf.path: shard for shard in before}
    prefixes = tuple(f"{name}.state." for name in optimizers)
    for shard in after:
        leaf = shard.leaf
        was = old.pop(leaf.path, None)
        if was is not None and was != shard:
            raise Unlike(f"{leaf.path}: was {was.leaf.dtype} {was.box}, is {leaf.dtype} {shard.box}")
        if was is None and not (leaf.cls.startswith("slot:") and leaf.path.startswith(prefixes)):
            raise Unlike(f"{leaf.path}: was added to the state")
    for path in old:
        raise Unlike(f"{path}: is no longer in the state")


def local_gradient(path: str, parameter: torch.Tensor) -> torch.Tensor:
    gradient = parameter.grad
    assert gradient is not None
    plain = type(gradient) is torch.Tensor and type(parameter) is torch.nn.Parameter
    if plain and gradient.layout is torch.strided and gradient.dtype is parameter.dtype:
        return gradient  # torch sees to the shape
    sharded, mine = as_dtensor(gradient), as_dtensor(parameter)
    local = gradient if sharded is None else sharded._local_tensor
    own = parameter if mine is None else mine._local_tensor
    if local.layout != torch.strided or local.shape != own.shape or local.dtype != own.dtype:
        raise Unlike(
            f"{path}: a gradient of {local.layout} {local.dtype} {list(local.shape)} for a parameter of {own.dtype} "
            f"{list(own.shape)} cannot be journaled"
        )
    return local.detach()


def options_of(group: Mapping[str, Any], *, foreach: bool) -> dict[str, Any]:
    """Its options as plain data, with what the optimizer decides by itself."""
    options = plain_options(group)
    if options.get("foreach", False) is None and not options.get("fused"):
        options["foreach"] = foreach
    return options


def same_groups(told: Groups, groups: Sequence[tuple[tuple[str, ...], dict[str, Any]]]) -> bool:
    return len(told) == len(groups) and all(
        a == b and x == y and repr(x) == repr(y) for (a, x), (b, y) in zip(told, groups, strict=True)
    )


def scale_of(optimizer: torch.optim.Optimizer) -> tuple[float, float] | None:
    """What a GradScaler tells a fused optimizer, which unscales and skips by itself."""
    scale, found = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
    if scale is None and found is None:
        return None
    return (1.0 if scale is None else float(scale), 0.0 if found is None else float(found))


def version_of(tensor: torch.Tensor) -> tuple[int, int]:
    try:
        return tensor._version, tensor.data_ptr()
    except RuntimeError:  # an inference tensor keeps no count
        return -1, 0
