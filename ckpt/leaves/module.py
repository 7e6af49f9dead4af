"""A module's leaves: parameters and persistent buffers under their clean names, and extra state (PYTORCH.md §1).

`state_dict(keep_vars=True)` says *what* belongs to the state, and is asked once per structure; *where* it stands (the
names, every one of a tied tensor's) comes from walking the modules, whose dictionaries are re-checked at each save.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from operator import is_, methodcaller
from typing import Any

import torch
from torch import nn

from ckpt.errors import UnsupportedState
from ckpt.leaves.tensors import Found, instance_of
from ckpt.leaves.tree import NOTHING, walk

_EXTRA = "_extra_state"

# (class by its home, the name under which it holds the module it wraps). Only there is the name left out: a real
# submodule may be called "module" too.
_WRAPPERS = (
    ("torch.nn.parallel.distributed", "DistributedDataParallel", "module"),
    ("torch.nn.parallel.data_parallel", "DataParallel", "module"),
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    (
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "ActivationWrapper",
        "_checkpoint_wrapped_module",
    ),
)


_values = methodcaller("values")


class _Tables:
    """The dictionaries of all submodules (children, parameters, buffers), as they were when planned."""

    def __init__(self, root: nn.Module) -> None:
        self._tables: list[Any] = [t for m in root.modules() for t in (m._modules, m._parameters, m._buffers)]
        self._sizes = list(map(len, self._tables))
        self._members = list(chain.from_iterable(map(_values, self._tables)))

    def same(self) -> bool:
        """One pass in C: 5,000 parameters take a third of a millisecond."""
        return list(map(len, self._tables)) == self._sizes and all(
            map(is_, chain.from_iterable(map(_values, self._tables)), self._members)
        )


class ModuleLeaves:
    """One tracked module. `look` is cheap while no submodule, parameter or buffer object was added or replaced."""

    def __init__(self, name: str, module: nn.Module, per_rank: bool) -> None:
        self.name = name
        self.module = module
        self.per_rank = per_rank
        self._tables: _Tables | None = None
        self._sharded: list[Any] = []
        self._found: tuple[Found, ...] = ()
        self.extra: dict[str, nn.Module] = {}
        """Path of an extra state → the module it belongs to."""

    def look(self) -> tuple[Found, ...]:
        """Tensors under each of their names, tied ones several times. The same tuple while nothing has changed."""
        for module in self._sharded:
            module.reshard()  # after an evaluation forward the root holds unsharded copies, not the real parameters
        if self._tables is None or not self._tables.same():
            self._plan()
        return self._found

    def value(self, found: list[Found]) -> Any:
        """Path → copy of what `get_extra_state()` returns now, or NOTHING; tensors in it are added to `found`."""
        if not self.extra:
            return NOTHING
        return {
            path: walk(module.get_extra_state(), path, found, per_rank=self.per_rank)
            for path, module in self.extra.items()
        }

    def _plan(self) -> None:
        self._refuse()
        self._sharded = [m for m in self.module.modules() if instance_of(m, "torch.distributed.fsdp", "FSDPModule")]
        for module in self._sharded:
            module.reshard()
        places: list[Found] = []
        extra: dict[str, nn.Module] = {}
        for path, module in _walk_modules(self.module, self.name, ()):
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    places.append(Found(f"{path}.{key}", "parameter", parameter, self.per_rank))
            for key, buffer in module._buffers.items():
                if buffer is not None and key not in module._non_persistent_buffers_set:
                    places.append(Found(f"{path}.{key}", "buffer", buffer, self.per_rank))
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                extra[f"{path}.{_EXTRA}"] = module
        kept = self._kept(places)
        self._tables = _Tables(self.module)
        self._found = tuple(f for f in places if id(f.tensor) in kept)
        self.extra = extra

    def _kept(self, places: Iterable[Found]) -> set[int]:
        """Ids of the tensors that the module's own `state_dict` returns. Raises UnsupportedState for others' things."""
        known = {id(f.tensor) for f in places}
        kept: set[int] = set()
        for key, value in self.module.state_dict(keep_vars=True).items():
            if key.rpartition(".")[2] == _EXTRA:
                continue
            if id(value) not in known:
                path = f"{self.name}.{key}"
                what = "a tensor that is" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}, which is"
                raise UnsupportedState(
                    f"{path}: state_dict() returns {what} neither parameter nor buffer (a hook or an overridden "
                    "method made it), so it could not be restored in place; keep it as a buffer, or in "
                    "get_extra_state()",
                    leaf=path,
                )
            kept.add(id(value))
        return kept

    def _refuse(self) -> None:
        """Before any `state_dict()`, which would gather the whole model under FSDP1."""
        for path, module in self.module.named_modules(prefix=self.name):
            if instance_of(module, "torch.distributed.fsdp", "FullyShardedDataParallel"):
                raise UnsupportedState(
                    f"{path}: wrapped in FullyShardedDataParallel (FSDP1), whose flat parameters have no boxes of "
                    "their own; use torch.distributed.fsdp.fully_shard",
                    leaf=path,
                )


def _walk_modules(module: nn.Module, path: str, above: tuple[int, ...]) -> Iterator[tuple[str, nn.Module]]:
    """Every module under every path it is reachable by (a shared one several times), names of wrappers left out."""
    yield path, module
    inner = next((held for home, kind, held in _WRAPPERS if instance_of(module, home, kind)), None)
    for key, item in module._modules.items():
        if item is None or id(item) in above:
            continue
        yield from _walk_modules(item, path if key == inner else f"{path}.{key}", (*above, id(module)))
