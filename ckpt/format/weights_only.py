"""A snapshot without its optimizers: the same parts, with what belongs to optimizers taken out (FORMAT.md §7). Pure.

What is an optimizer is told by its value (`is_optimizer`). Out goes all of it: the value, the tensors that the value
names, and those of class ``slot:…`` below its name. Less would leave a state that looks whole: a reader that finds
parameter groups and no moments takes them for an optimizer that has not stepped yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import replace

from ckpt.format.chunks import Chunk
from ckpt.format.parts import BundleRow, Part, ShardRow
from ckpt.format.revised import described
from ckpt.format.values import Ref, decode, names_in

SLOT = "slot:"
"""How the class of a leaf begins that is a tensor of an optimizer's state."""


def is_optimizer(tree: object) -> bool:
    """Whether a decoded value is what an optimizer leaves besides its tensors."""
    match tree:
        case {"param_groups": list(groups), "state": dict(), "shared": dict()}:
            return all(isinstance(g, dict) and isinstance(g.get("params"), tuple) for g in groups)
        case _:
            return False


def weights_only(parts: Sequence[Part], revision: int, breathe: Callable[[], None]) -> list[Part] | None:
    """All parts of a snapshot without its optimizers, as `revision`; None if no optimizer in it has tensors.

    Args:
        breathe: called between rows, for callers on a background thread.

    Raises:
        ValueError: a value cannot be decoded.
    """
    trees: dict[str, list[Any]] = {}
    for part in parts:
        for name, raw in part.values.items():
            if b'"param_groups"' in bytes(raw) and is_optimizer(tree := decode(raw)):
                trees.setdefault(name, []).append(tree)
            breathe()
    inside = tuple(f"{name}." for name in trees)
    referred = {n.path for each in trees.values() for tree in each for n in names_in(tree) if isinstance(n, Ref)}
    aliases = {alias: path for part in parts for alias, path in part.aliases.items()}
    # What something else than an optimizer calls its own, too, stays.
    shared = {path for alias, path in aliases.items() if not alias.startswith(inside)}
    out: set[str] = set()
    for part in parts:
        for row in part.shards:
            if row.leaf.startswith(inside) and (row.cls.startswith(SLOT) or row.leaf in referred):
                out.add(row.leaf)
            breathe()
    out -= shared
    if not out:
        return None
    return [_without(part, revision, out, tuple(sorted(trees)), inside, breathe) for part in parts]


def _without(
    part: Part,
    revision: int,
    out: set[str],
    names: tuple[str, ...],
    inside: tuple[str, ...],
    breathe: Callable[[], None],
) -> Part:
    kept = [row for row in part.shards if row.leaf not in out]
    numbers = sorted({row.bundle[0] for row in kept if row.bundle is not None})
    renumbered = {old: new for new, old in enumerate(numbers)}
    bundles: list[tuple[BundleRow, Sequence[Chunk]]] = []
    for number in numbers:
        bundles.append((part.bundles[number], part.chunks(part.bundles[number])))
        breathe()
    shards: list[tuple[ShardRow, Sequence[Chunk]]] = []
    for row in kept:
        moved = row if row.bundle is None else replace(row, bundle=(renumbered[row.bundle[0]], row.bundle[1]))
        shards.append((moved, part.chunks(row)))
        breathe()
    return replace(
        described(part, revision, bundles, shards, dict(part.packs), breathe),
        without=names,
        values={name: raw for name, raw in part.values.items() if name not in names},
        aliases={a: path for a, path in part.aliases.items() if path not in out and not a.startswith(inside)},
        replicas={at: checksum for at, checksum in part.replicas.items() if at.rpartition(" [")[0] not in out},
    )
