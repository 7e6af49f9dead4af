"""Read without training: whole tensors as a dict, or into a live state. Opens no run and writes nothing (torch).

Works beside a live job and on read-only stores; nothing is claimed, so a prune may take the snapshot away while it is
read: then the next older one is taken, or, if a step was named, `NoSnapshot` says so.
"""

from __future__ import annotations

import fnmatch
import logging
import os
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ckpt.errors import DamagedError, NoSnapshot
from ckpt.format.manifest import Part, ShardRow
from ckpt.format.names import SnapshotId
from ckpt.format.shards import Leaf, Shard, whole
from ckpt.format.values import TorchName, encode, flat
from ckpt.history.copies import mending
from ckpt.history.keyed import store_at
from ckpt.leaves.tree import torch_constant
from recovery.agree import Alone
from recovery.assemble import Wanted
from recovery.boxes import Bytes
from recovery.choose import Skipped, choose, exhausted
from recovery.forward import replayed
from recovery.parallel import THREADS
from recovery.place import Seat
from recovery.read import OpenSnapshot, Pruned, following, read_parts, stored_value
from recovery.report import Restored
from recovery.restore import restore_seat
from recovery.shards import MEMORY, read_shards
from storage_backends.base import Store

log = logging.getLogger("ckpt")


def load(
    url: str | os.PathLike[str] | Store,
    step: int | str | None = None,
    names: str | Sequence[str] | None = None,
    *,
    key: str | os.PathLike[str] | None = None,
) -> dict[str, Any]:
    """The state of one snapshot, whole: path → CPU tensor (numpy array where one was saved) or plain value.

    Leaves of all ranks are put together; tied tensors stand under every name they have, as one object. Per-rank leaves
    and values that differ between ranks stand under ``path@rankN``, equal ones once.

    Args:
        step: None or "latest": the newest (of the live line) that can be read; a step, ``"GENERATION/STEP"`` or a pin:
            exactly that one. Where there is no snapshot of a step, it is replayed from the journal, if that has it.
        names: glob patterns of paths (``"model.*"``); only what they match is read.
        key: of an encrypted store, as in `Options`: a file, or ``env:NAME``.

    Raises:
        WrongKey: the store is behind another key, or none.
        NoSnapshot: there is none, or not the one asked for, or nothing in it is named so.
        DamagedError: it, or every one, is damaged.
        StorageError: the store does not answer.
    """
    store = store_at(url, key)
    patterns = None if names is None else (names,) if isinstance(names, str) else tuple(names)
    choice = choose(store, step)
    if choice.journaled is not None:
        return _load_journaled(store, choice.candidates[0], choice.journaled, patterns)
    skipped: list[Skipped] = list(choice.unreadable)
    last: Exception | None = None
    for id_ in choice.candidates:
        try:
            with mending(store):
                found = _load_one(store, id_, patterns)
        except (DamagedError, Pruned) as error:
            last = error
            skipped.append((id_, str(error)))
            continue
        for passed, reason in skipped:
            log.warning("snapshot %s passed over: %s", passed.short, reason)
        return found
    if not choice.candidates:
        raise NoSnapshot(f"there is no snapshot on {store.url}; check the URL, or save first")
    raise exhausted(store, choice, tuple(skipped), last)


def load_into(
    url: str | os.PathLike[str] | Store,
    state: MutableMapping[str, object],
    step: int | str | None = None,
    *,
    key: str | os.PathLike[str] | None = None,
) -> Restored:
    """Restore a live state in place, without opening a run: for evaluation, or beside a live job. Of what is stored,
    only the names in `state` are looked at: ``{"model": model}`` leaves the optimizer where it is.

    With torch.distributed each rank calls it for itself; nothing collective happens, so ranks that name no step may
    see different ones while a job saves. Random states and the data position are in `Restored.values`, and not set.

    Raises:
        NoSnapshot, DamagedError, LayoutMismatch, UnsupportedState, WrongKey, StorageError: as `Checkpointer.restore`.
    """
    store = store_at(url, key)
    grouped = dist.is_available() and dist.is_initialized()
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if grouped else (0, 1)
    seat = Seat(rank, world_size, names=frozenset(state))
    restored = restore_seat(
        store, Alone(), seat, state, step=step, claim=lambda _: True, memory=MEMORY, threads=THREADS
    )  # fmt: skip
    if restored is None:
        raise NoSnapshot(f"there is no snapshot on {store.url}; check the URL, or save first")
    return restored


def _load_one(store: Store, id_: SnapshotId, patterns: tuple[str, ...] | None) -> dict[str, Any]:
    return following(store, id_, lambda opened: _load_opened(store, opened, patterns))


def _load_journaled(store: Store, base: SnapshotId, step: int, patterns: tuple[str, ...] | None) -> dict[str, Any]:
    """A step between two snapshots: all saved ranks are replayed here, one after the other."""
    forward = replayed(store, base, step)
    names = _names(forward.parts)
    wanted = list(_wanted(forward.parts, names, patterns))
    tensors = {w: _tensor(w.shard, data) for w, data in forward.boxes(wanted)}
    found = {**_named(tensors, names, patterns), **_values(forward.parts, patterns)}
    if patterns and not found:
        raise NoSnapshot(f"step {step} on {store.url} has nothing named {' or '.join(patterns)}")
    return found


def _load_opened(store: Store, opened: OpenSnapshot, patterns: tuple[str, ...] | None) -> dict[str, Any]:
    parts = read_parts(store, opened.snapshot)
    names = _names(parts)
    wanted = list(_wanted(parts, names, patterns))
    tensors = {w: _tensor(w.shard, data) for w, data in read_shards(store, parts, wanted)}
    found = {**_named(tensors, names, patterns), **_values(parts, patterns)}
    if patterns and not found:
        paths = sorted({path for part in parts.values() for path in (*(row.leaf for row in part.shards), *part.values)})
        there = ", ".join(path for path in paths[:5] if not path.startswith("$")) + (" …" if len(paths) > 5 else "")
        raise NoSnapshot(
            f"{opened.id.short} on {store.url} has nothing named {' or '.join(patterns)}; names are patterns of whole "
            f"paths, such as 'model.*'; there is {there}"
        )
    return found


def _names(parts: Mapping[int, Part]) -> dict[str, list[str]]:
    """Stored path → every name of it: tied tensors have several."""
    names: dict[str, list[str]] = {}
    for name, path in {name: path for part in parts.values() for name, path in part.aliases.items()}.items():
        names.setdefault(path, [path]).append(name)
    return names


def _wanted(
    parts: Mapping[int, Part], names: Mapping[str, list[str]], patterns: tuple[str, ...] | None
) -> Iterator[Wanted]:
    """Every leaf once, whole; per-rank ones once for each rank that declares it."""
    seen: set[Wanted] = set()
    for rank, part in sorted(parts.items()):
        for row in part.shards:
            want = Wanted(_whole(row), rank if row.per_rank else None)
            if want not in seen and any(_matches(name, patterns) for name in names.get(row.leaf, (row.leaf,))):
                seen.add(want)
                yield want


def _whole(row: ShardRow) -> Shard:
    return Shard(Leaf(row.leaf, row.cls, row.dtype, row.shape), whole(row.shape), row.per_rank)


def _tensor(shard: Shard, data: Bytes) -> torch.Tensor | np.ndarray[Any, Any]:
    if shard.leaf.cls == "array":
        return data.view(np.dtype(shard.leaf.dtype)).reshape(shard.leaf.shape)
    kind: torch.dtype = getattr(torch, shard.leaf.dtype)  # the name is a key of DTYPES: the part was checked
    if not data.size:  # a view of nothing has strides that torch refuses
        return torch.empty(0, dtype=torch.uint8).view(kind).reshape(shard.leaf.shape)
    return torch.from_numpy(data).view(kind).reshape(shard.leaf.shape)


def _named(
    tensors: Mapping[Wanted, Any], names: Mapping[str, list[str]], patterns: tuple[str, ...] | None
) -> dict[str, Any]:
    """Name → tensor; ``name@rankN`` for per-rank leaves that differ."""
    by_path: dict[str, list[Wanted]] = {}
    for want in tensors:
        by_path.setdefault(want.shard.leaf.path, []).append(want)
    found: dict[str, Any] = {}
    for path, wants in sorted(by_path.items()):
        same = len({_content(tensors[w]) for w in wants}) == 1
        for want in sorted(wants, key=lambda w: -1 if w.rank is None else w.rank)[: 1 if same else None]:
            suffix = "" if same or want.rank is None else f"@rank{want.rank}"
            found |= {name + suffix: tensors[want] for name in names.get(path, (path,)) if _matches(name, patterns)}
    return found


def _content(value: torch.Tensor | np.ndarray[Any, Any]) -> bytes:
    if isinstance(value, np.ndarray):
        return value.tobytes()
    return value.reshape(-1).view(torch.uint8).numpy().tobytes()


def _values(parts: Mapping[int, Part], patterns: tuple[str, ...] | None) -> dict[str, Any]:
    """Plain values by path, equal ones once."""
    by_path: dict[str, dict[int, tuple[bytes, Any]]] = {}
    for rank, part in sorted(parts.items()):
        for name in part.values:
            for path, value in flat(stored_value(part, name), name).items():
                if _matches(path, patterns):
                    by_path.setdefault(path, {})[rank] = (encode(value, path), _plain(value))
    found: dict[str, Any] = {}
    for path, each in by_path.items():
        if len({text for text, _ in each.values()}) == 1 and len(each) == len(parts):
            found[path] = next(iter(each.values()))[1]
        else:
            found |= {f"{path}@rank{rank}": value for rank, (_, value) in each.items()}
    return found


def _plain(value: Any) -> Any:
    """The constant of torch that a stored name stands for, if this torch has it."""
    if not isinstance(value, TorchName):
        return value
    try:
        return torch_constant(value)
    except ValueError:
        return value


def _matches(path: str, patterns: tuple[str, ...] | None) -> bool:
    return patterns is None or any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)
