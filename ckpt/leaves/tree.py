"""Trees of plain containers with tensors in them: what `state_dict()` returns, and what users keep in dicts and lists.

Out: tensors and arrays are found, and `Ref` stands for them in a copy of the tree. Back: `regrow` builds the tree anew
with what was restored in their place, inside the user's own containers where these are still there.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ckpt.errors import UnsupportedState
from ckpt.format.values import MAX_DEPTH, Ref, TorchName, UnsupportedValue, child, encode
from ckpt.leaves.tensors import Found, PerRank

NOTHING: Any = object()
"""Stands for "there is none" where None is a value."""

_DEPTH = MAX_DEPTH - 8
"""Trees become parts of larger ones (an optimizer's state, say), which `encode` must still take."""

_IMMUTABLE = frozenset({type(None), bool, int, float, complex, str, bytes})


def walk(value: object, path: str, found: list[Found], *, cls: str = "tensor", per_rank: bool = False) -> Any:
    """A copy of the tree at `path`, independent of the live one, with `Ref` for tensors, which are added to `found`.

    Raises UnsupportedState with the path of what cannot be saved exactly.
    """
    return _Walk(found, cls).tree(value, path, per_rank, 0)


class _Walk:
    def __init__(self, found: list[Found], cls: str) -> None:
        self.found = found
        self.cls = cls

    def tree(self, value: Any, path: str, per_rank: bool, depth: int) -> Any:
        kind = type(value)
        if kind in _IMMUTABLE:
            return value
        if isinstance(value, torch.Tensor):
            self.found.append(Found(path, self.cls, value, per_rank))
            return Ref(path)
        if isinstance(value, np.ndarray):
            self.found.append(Found(path, "array" if self.cls == "tensor" else self.cls, value, per_rank))
            return Ref(path)
        if depth >= _DEPTH:
            shown = path[:200]
            raise UnsupportedState(f"{shown}: nested more than {_DEPTH} deep, or contains itself", leaf=shown)
        if kind is list or kind is tuple:
            return kind(self.tree(v, f"{path}[{i}]", per_rank, depth + 1) for i, v in enumerate(value))
        if kind is deque:
            return deque((self.tree(v, f"{path}[{i}]", per_rank, depth + 1) for i, v in enumerate(value)), value.maxlen)
        if kind in _MAPPINGS:
            copy = _MAPPINGS[kind](value)
            if kind is defaultdict:
                self.plain(copy, path)
            for k, v in value.items():
                if type(k) not in _IMMUTABLE:
                    self.plain(k, f"key of {path}")
                copy[k] = self.tree(v, child(path, k), per_rank, depth + 1)
            return copy
        if kind is PerRank:
            return self.tree(value.value, path, True, depth)
        name = torch_name(value)
        return self.plain(value, path) if name is None else name

    def plain(self, value: Any, path: str) -> Any:
        """A rarer plain value: `encode` judges it. Mutable ones (sets, bytearrays) are copied."""
        try:
            encode(value, path)
        except UnsupportedValue as e:
            raise UnsupportedState(str(e), leaf=e.path) from None
        return type(value)(value) if isinstance(value, set | bytearray) else value


_MAPPINGS: dict[type, Callable[[Any], Any]] = {
    dict: lambda _: {},
    OrderedDict: lambda _: OrderedDict(),
    Counter: lambda _: Counter(),
    defaultdict: lambda live: defaultdict(live.default_factory),
}


def is_tree(value: object) -> bool:
    """Whether a value is a plain container or scalar, whatever methods it may have besides."""
    kind = type(value)
    return kind in _IMMUTABLE or kind in _MAPPINGS or kind in (list, tuple, deque, set, frozenset)


def torch_name(value: object) -> TorchName | None:
    """A constant of torch as data; None for anything else."""
    match value:
        case torch.Size():
            return TorchName("size", ",".join(map(str, value)))
        case torch.dtype():
            return TorchName("dtype", str(value).removeprefix("torch."))
        case torch.device():
            return TorchName("device", str(value))
        case torch.layout():
            return TorchName("layout", str(value).removeprefix("torch."))
        case torch.memory_format():
            return TorchName("memory_format", str(value).removeprefix("torch."))
        case _:
            return None


def torch_constant(name: TorchName) -> Any:
    """The constant that a `TorchName` names; ValueError if this torch has none of that kind and name."""
    match name.kind:
        case "size":
            return torch.Size(int(n) for n in name.text.split(",") if n)
        case "device":
            try:
                return torch.device(name.text)
            except RuntimeError as e:
                raise ValueError(f"torch has no device {name.text!r}") from e
        case kind:
            # Not getattr: torch imports some of its modules when they are asked for, and a value must not do that.
            constant = vars(torch).get(name.text)
            if not isinstance(constant, getattr(torch, kind)):
                raise ValueError(f"torch {torch.__version__} has no {kind} {name.text!r}")
            return constant


def regrow(tree: Any, live: Any, leaf: Callable[[str], Any], *, in_place: bool) -> Any:
    """The live value for a stored tree: `leaf` gives the restored tensor or array for a path.

    With `in_place`, a live dict, list or deque of the same type is refilled rather than replaced, because the user's
    code holds it; `live` is then the counterpart in the live state, or NOTHING.
    """
    if type(live) is PerRank:
        value = regrow(tree, live.value, leaf, in_place=in_place)
        return live if value is live.value else PerRank(value)
    match tree:
        case Ref():
            return leaf(tree.path)
        case TorchName():
            return torch_constant(tree)
        case dict():
            items = {k: regrow(v, _at(live, k), leaf, in_place=in_place) for k, v in tree.items()}
            target = live if in_place and type(live) is type(tree) else tree.copy()
            target.clear()
            for k, v in items.items():  # one by one: Counter.update would add
                target[k] = v
            return target
        case list() | tuple() | deque():
            grown = [regrow(v, _at(live, i), leaf, in_place=in_place) for i, v in enumerate(tree)]
            if isinstance(tree, deque):
                if in_place and type(live) is deque and live.maxlen == tree.maxlen:
                    live.clear()
                    live.extend(grown)
                    return live
                return deque(grown, tree.maxlen)
            if in_place and type(live) is list and type(tree) is list:
                live[:] = grown
                return live
            return type(tree)(grown)
        case _:
            return tree


def counterpart(tree: Any, live: Any) -> dict[str, Any]:
    """Path of every leaf a stored tree names → what stands at the same place of the live tree, or NOTHING."""
    if type(live) is PerRank:
        live = live.value
    match tree:
        case Ref():
            return {tree.path: live}
        case dict():
            return {p: v for k, item in tree.items() for p, v in counterpart(item, _at(live, k)).items()}
        case list() | tuple() | deque():
            return {p: v for i, item in enumerate(tree) for p, v in counterpart(item, _at(live, i)).items()}
        case _:
            return {}


def _at(live: Any, key: Any) -> Any:
    if isinstance(live, dict):
        return live.get(key, NOTHING)
    if isinstance(live, list | tuple | deque) and isinstance(key, int) and key < len(live):
        return live[key]
    return NOTHING
