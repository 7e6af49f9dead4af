"""Stored leaves and values back into the live state: everything is checked before anything is written.

Tensors are restored in place, module by module, name by name; what does not exist yet (optimizer state in a fresh
process) is created where and as it was. Objects with `load_state_dict` get their tree back through it at the end, and
plain values replace what the mapping holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from functools import partial
from typing import Any

import torch

from ckpt.format.shards import Shard
from ckpt.format.values import Ref, names_in
from ckpt.leaves.flatten import Flattener, StatefulLeaves, TensorLeaf, TreeLeaves
from ckpt.leaves.matching import Matching, Write, few
from ckpt.leaves.module import ModuleLeaves
from ckpt.leaves.moments import plan_optimizer
from ckpt.leaves.optimizer import OptimizerLeaves
from ckpt.leaves.stored import Stored
from ckpt.leaves.tree import NOTHING, regrow


class Restoration:
    """A checked restore, to be carried out: `install` every wanted shard, in any order, then `finish` once."""

    def __init__(self, sinks: Mapping[Shard, list[Write]], steps: list[Callable[[], None]]) -> None:
        self._sinks = dict(sinks)
        self._steps = steps
        self.wanted: tuple[Shard, ...] = tuple(sinks)
        """What this rank needs, none of it empty. Leaves stored apart that are tied here come first: if their values
        differ, that is found before much has been written."""

    def install(self, shard: Shard, data: torch.Tensor) -> None:
        """Take the bytes of a wanted shard (uint8, one dimension, on the host, row-major); one thread at a time.

        Raises LayoutMismatch if leaves stored apart, but tied here, turn out to differ.
        """
        for sink in self._sinks.pop(shard):
            sink(data)

    def finish(self) -> None:
        """Create what was not there, hand trees to their objects, set plain values."""
        if self._sinks:
            some = ", ".join(shard.leaf.path for shard in list(self._sinks)[:3])
            raise RuntimeError(f"{len(self._sinks)} shards were never installed: {some}, …")
        for step in self._steps:
            step()


def plan_restore(state: MutableMapping[str, object], stored: Stored) -> Restoration:
    """Match what is stored with the live state. Nothing is written yet.

    Raises:
        LayoutMismatch: something live is not stored, something stored is not live, or shapes, dtypes, kinds differ.
        UnsupportedState: the live state could not be saved either.
    """
    flattener = Flattener(state)
    sources = flattener.sources()
    # A data loader's state_dict() starts its workers: stateful objects are asked only where that is needed.
    shards, _ = flattener.look({name: s for name, s in sources.items() if not isinstance(s, StatefulLeaves)})
    matching = Matching(stored, shards, flattener.aliases)
    steps: list[Callable[[], None]] = []
    for source in sources.values():
        if isinstance(source, ModuleLeaves | TensorLeaf):
            for found in source.look():
                if found.path not in flattener.aliases:
                    matching.claim(found.path, found.tensor)
    for name, source in sources.items():
        match source:
            case OptimizerLeaves():
                steps += plan_optimizer(matching, source)
            case ModuleLeaves():
                steps += _extra_states(matching, name, source)
            case StatefulLeaves():
                steps += _stateful(matching, name, source)
            case TreeLeaves():
                steps += _plain(matching, name, source, state)
            case TensorLeaf():
                pass
    matching.unexpected += [n for n in stored.values if n not in sources and not n.startswith("$")]
    return Restoration(matching.wanted(), steps)


def _extra_states(matching: Matching, name: str, source: ModuleLeaves) -> Iterator[Callable[[], None]]:
    tree = matching.stored.values.get(name, {})
    if not isinstance(tree, dict):
        matching.changed[name] = f"stored a {type(tree).__name__}, live a module"
        return
    for path, module in source.extra.items():
        if path in tree:
            restored = matching.tree(tree[path], NOTHING, path, in_place=False)
            yield partial(_set_extra_state, module, tree[path], restored)
        else:
            matching.missing.append(path)
    matching.unexpected += [str(path) for path in tree if path not in source.extra]


def _set_extra_state(module: torch.nn.Module, tree: Any, restored: Callable[[str], Any]) -> None:
    module.set_extra_state(regrow(tree, NOTHING, restored, in_place=False))


def _stateful(matching: Matching, name: str, source: StatefulLeaves) -> Iterator[Callable[[], None]]:
    tree = matching.stored.values.get(name, NOTHING)
    if tree is NOTHING:
        matching.missing.append(name)
        return
    judged = isinstance(source.live, torch.optim.lr_scheduler.LRScheduler | torch.amp.GradScaler)
    asked = judged or not tree or any(isinstance(n, Ref) for n in names_in(tree))
    live = source.live.state_dict() if asked else NOTHING
    if isinstance(tree, dict) and isinstance(live, dict):
        difference = _difference(source.live, tree, live)
        if difference:
            matching.changed[name] = difference
    restored = matching.tree(tree, live, name, in_place=False)
    yield lambda: source.live.load_state_dict(regrow(tree, NOTHING, restored, in_place=False))


def _difference(owner: object, tree: dict[Any, Any], live: dict[Any, Any]) -> str | None:
    """What tells that the stored tree was another kind of object's, in words."""
    if bool(tree) != bool(live):
        full, empty = ("stored", "live") if tree else ("live", "stored")
        hint = "one of the scalers is disabled" if isinstance(owner, torch.amp.GradScaler) else "one was never filled"
        return f"the {empty} state_dict is empty, the {full} one is not: {hint}"
    if isinstance(owner, torch.optim.lr_scheduler.LRScheduler):
        # load_state_dict would take anything. Another version of torch adds a field or drops one; another scheduler
        # does both.
        gone, new = tree.keys() - live.keys(), live.keys() - tree.keys()
        if gone and new:
            return f"stored a scheduler with {few(gone)}, live is a {type(owner).__name__} with {few(new)}"
    return None


def _plain(
    matching: Matching, name: str, source: TreeLeaves, state: MutableMapping[str, object]
) -> Iterator[Callable[[], None]]:
    tree = matching.stored.values.get(name, NOTHING)
    if tree is NOTHING:
        matching.missing.append(name)
        return
    restored = matching.tree(tree, source.live, name, in_place=True)

    def replace() -> None:
        state[name] = regrow(tree, state[name], restored, in_place=True)

    yield replace
