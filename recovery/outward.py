"""A snapshot on its way out: which tensors under which names, streamed in bounded windows. What file they go into is
another room's business.

Files are made beside their place and renamed when whole: a crash, Ctrl-C or a full disk leaves a name that nobody takes
for an export, and never half of one.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import xxhash

from ckpt.errors import NoSnapshot
from ckpt.format.documents import damaged
from ckpt.format.manifest import Part, ShardRow
from ckpt.format.names import PartName, SnapshotId
from ckpt.format.shards import DTYPES, Box, Leaf, Shard, grid, whole
from ckpt.format.values import decode, encode, flat
from ckpt.progress import UNWATCHED, Watch
from recovery.assemble import Wanted
from recovery.boxes import Bytes
from recovery.followed import Followed
from storage_backends.base import Store

WINDOW = 16 * 1024 * 1024
"""Raw bytes read at a time."""
MEMORY = 64 * 1024 * 1024
"""Encoded bytes in flight at most, over all threads."""

STATE = "ckpt.state"
"""The entry of an exported file that holds a `Rest`, as JSON, for `ckpt import` to read back."""


class Rest(msgspec.Struct, frozen=True):
    """What the formats of others have no place for. `values`: tracked name → tagged JSON. `classes`: class of leaf →
    paths; an optimizer is put together by them."""

    values: dict[str, msgspec.Raw]
    classes: dict[str, list[str]]


_Said: TypeAlias = dict[int, tuple[bytes, Any]]


@dataclass(frozen=True, slots=True)
class Outgoing:
    """One tensor. `names`: every name it goes out under; tied ones have several."""

    names: tuple[str, ...]
    want: Wanted

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def leaf(self) -> Leaf:
        return self.want.shard.leaf

    @property
    def nbytes(self) -> int:
        return self.leaf.nbytes


@dataclass(frozen=True)
class Export:
    """What goes out of one snapshot.

    Attributes:
        tensors: by name.
        values: flat path → plain value.
        rest: what else an import of all of it needs, as JSON; None where only one tracked name goes out.
        watch: told of raw bytes as they are read.
    """

    source: Followed
    tensors: tuple[Outgoing, ...]
    values: dict[str, Any]
    rest: str | None
    watch: Watch = UNWATCHED

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def read(self, wanted: Iterable[Wanted]) -> list[tuple[Wanted, Bytes]]:
        """Raises DamagedError, Pruned, StorageError."""
        found = self.source.read(list(wanted), memory=MEMORY)
        self.watch.done(sum(len(data) for _, data in found))
        return found

    def stream(self, tensors: Iterable[Outgoing]) -> Iterator[tuple[Outgoing, Bytes]]:
        """The row-major bytes of these tensors, one after the other, in pieces of at most about `WINDOW` bytes."""
        window: list[tuple[Outgoing, Wanted]] = []
        size = 0
        for tensor in tensors:
            for want in self.pieces(tensor):
                if window and size + want.shard.nbytes > WINDOW:
                    yield from self._read_in_order(window)
                    window, size = [], 0
                window.append((tensor, want))
                size += want.shard.nbytes
        yield from self._read_in_order(window)

    def pieces(self, tensor: Outgoing) -> Iterator[Wanted]:
        """A tensor as boxes that follow each other in its row-major bytes."""
        leaf, chunk = tensor.leaf, min(part.chunk for part in self.source.parts.values())
        for box in _runs(leaf.shape, DTYPES[leaf.dtype].size, chunk):
            yield Wanted(Shard(leaf, box, tensor.want.shard.per_rank), tensor.want.rank)

    def _read_in_order(self, window: list[tuple[Outgoing, Wanted]]) -> Iterator[tuple[Outgoing, Bytes]]:
        if window:
            data = dict(self.read(want for _, want in window))
            for tensor, want in window:
                yield tensor, data.pop(want)


def open_export(store: Store, id_: SnapshotId, name: str | None = None) -> Export:
    """Read the documents of a snapshot and say what goes out.

    Args:
        name: only what is tracked under this name, and its name taken off: what the model itself calls its tensors.
            None: everything, under the full paths that ``ckpt show`` lists.

    Raises:
        NoSnapshot: nothing of that name is there.
        Pruned, DamagedError, StorageError: it cannot be read.
    """
    source = Followed(store, id_)
    parts = source.parts
    tensors: list[Outgoing] = []
    aliases: dict[str, list[str]] = {}
    for alias, path in {a: p for part in parts.values() for a, p in part.aliases.items()}.items():
        aliases.setdefault(path, [path]).append(alias)
    bare = Export(source, (), {}, None)
    for path, wants in sorted(_wants(parts).items()):
        names = [n for full in aliases.get(path, [path]) if (n := _stripped(full, name)) is not None]
        if names:
            same = len(wants) == 1 or len({_content(bare, want) for want in wants}) == 1
            for want in wants[: 1 if same else None]:
                suffix = "" if same else f"@rank{want.rank}"
                tensors.append(Outgoing(tuple(n + suffix for n in sorted(names)), want))
    values, common = _values(parts, name)
    rest: str | None = None
    if name is None:
        classes: dict[str, list[str]] = {}
        for tensor in tensors:
            classes.setdefault(tensor.leaf.cls, []).append(tensor.name)
        rest = msgspec.json.encode(Rest(common, classes)).decode()
    if name is not None and not tensors and not values:
        tops = sorted({path.split(".")[0].split("[")[0] for path in _wants(parts)})
        raise NoSnapshot(f"{id_.short} on {store.url} has nothing under the name {name!r}; there is {', '.join(tops)}")
    return Export(source, tuple(tensors), values, rest)


def _wants(parts: Mapping[int, Part]) -> dict[str, list[Wanted]]:
    """Path → the whole leaf; for a per-rank one, of each rank."""
    found: dict[str, dict[Wanted, None]] = {}
    for rank, part in sorted(parts.items()):
        for row in part.shards:
            found.setdefault(row.leaf, {})[Wanted(_whole(row), rank if row.per_rank else None)] = None
    return {path: list(wants) for path, wants in found.items()}


def _whole(row: ShardRow) -> Shard:
    return Shard(Leaf(row.leaf, row.cls, row.dtype, row.shape), whole(row.shape), row.per_rank)


def _stripped(path: str, name: str | None) -> str | None:
    """A path without the tracked name before it; None if it does not belong to that name."""
    if name is None or path == name:
        return path
    return path[len(name) + 1 :] if path.startswith(name + ".") else None


def _content(export: Export, want: Wanted) -> str:
    hasher = xxhash.xxh3_128(repr((want.shard.leaf.dtype, want.shard.leaf.shape)).encode())
    for _, data in export.stream([Outgoing((want.shard.leaf.path,), want)]):
        hasher.update(data.data)
    return hasher.hexdigest()


def _values(parts: Mapping[int, Part], name: str | None) -> tuple[dict[str, Any], dict[str, msgspec.Raw]]:
    """Flat path → value; and the stored text of each tracked name on which all ranks agree."""
    by_path: dict[str, _Said] = {}
    texts: dict[str, set[bytes]] = {}
    for rank, part in sorted(parts.items()):
        for top, raw in part.values.items():
            if top.startswith("$"):  # random states and the data position mean nothing elsewhere
                continue
            texts.setdefault(top, set()).add(bytes(raw))
            try:
                found = flat(decode(raw), top)
            except ValueError as error:
                key = PartName(part.id, rank, part.revision).key
                raise damaged(key, f"a tagged value as {top!r}", str(error), step=part.step, rank=rank) from error
            for path, value in found.items():
                short = _stripped(path, name)
                if short is not None and value != {}:
                    by_path.setdefault(short, {})[rank] = (encode(value, path), value)
    values: dict[str, Any] = {}
    for path, said in by_path.items():
        if len(said) == len(parts) and len({text for text, _ in said.values()}) == 1:
            values[path] = next(iter(said.values()))[1]
        else:
            values |= {f"{path}@rank{rank}": value for rank, (_, value) in said.items()}
    return values, {top: msgspec.Raw(next(iter(each))) for top, each in texts.items() if len(each) == 1}


def _runs(shape: tuple[int, ...], size: int, chunk: int) -> Iterator[Box]:
    """A tensor as boxes of at most about `WINDOW` bytes that follow each other in its row-major bytes, cut where its
    chunks are."""
    box = whole(shape)
    if box.numel * size <= WINDOW:
        yield box
        return
    tail = size
    for n in shape[1:]:
        tail *= n
    if tail <= WINDOW:
        rows = WINDOW // tail
        cells = grid(shape, size, chunk)
        if cells.cut == 0 and rows > cells.block:
            rows -= rows % cells.block
        for first in range(0, shape[0], rows):
            yield Box((first, *box.offsets[1:]), (min(rows, shape[0] - first), *shape[1:]))
        return
    for first in range(shape[0]):
        for inner in _runs(shape[1:], size, chunk):
            yield Box((first, *inner.offsets), (1, *inner.lengths))


@contextlib.contextmanager
def landing(out: Path) -> Iterator[Path]:
    """A name beside `out` to write a file or folder under, which becomes `out` at the end; removed if that is never
    reached.

    Raises:
        ValueError: there is something at `out`, or it cannot be written.
    """
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ValueError(f"{out} is there already, and nothing is overwritten; remove it, or give another name")
    partial = out.with_name(f".{out.name}.partial-{os.getpid()}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        for path in (partial, *(partial.iterdir() if partial.is_dir() else ()), partial.parent):
            _sync(path)
        partial.replace(out)
    except OSError as error:
        raise ValueError(f"{out} cannot be written: {error}") from error
    finally:
        if partial.is_dir():
            shutil.rmtree(partial, ignore_errors=True)
        else:
            partial.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
