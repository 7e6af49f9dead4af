"""Tensors in other people's files, as `ckpt import` takes them in: where their bytes lie. Nothing here is a format."""

from __future__ import annotations

import os
import reprlib
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import numpy as np

from ckpt.format.shards import DTYPES, Box, Leaf, Shard, whole
from ckpt.format.values import decode
from recovery.boxes import Bytes
from recovery.outward import STATE, Rest


class Refused(ValueError):  # noqa: N818 - what happened to the file
    """A file that is not what it should be, or holds what cannot be taken in."""


@dataclass(frozen=True, slots=True)
class Incoming:
    """A box of a tensor whose elements lie in a file from byte `offset`, little-endian: row after row, or (`strides`,
    in elements) scattered."""

    shard: Shard
    file: Path
    offset: int
    strides: tuple[int, ...] | None = None

    def read(self, start: int, stop: int) -> Bytes:
        """These bytes of its row-major bytes. Raises Refused."""
        out = np.empty(stop - start, np.uint8)
        if stop == start:
            return out
        try:
            if self.strides is None:
                self._fill(out.data, self.offset + start)
            else:
                out[:] = self._gathered(start, stop)
        except OSError as error:
            raise Refused(f"{self.file}: {self.shard.leaf.path} cannot be read: {error}") from error
        return out

    def _fill(self, out: memoryview, at: int) -> None:
        with self.file.open("rb", buffering=0) as file:
            file.seek(at)
            done = 0
            while done < len(out):
                n = file.readinto(out[done:])
                if not n:
                    raise Refused(f"{self.file}: ends inside {self.shard.leaf.path}; is the file cut short?")
                done += n

    def _gathered(self, start: int, stop: int) -> Bytes:
        assert self.strides is not None
        size = DTYPES[self.shard.leaf.dtype].size
        shape = self.shard.box.lengths
        span = 1 + sum((n - 1) * stride for n, stride in zip(shape, self.strides, strict=True))
        if self.offset + span * size > self.file.stat().st_size:
            raise Refused(f"{self.file}: ends inside {self.shard.leaf.path}; is the file cut short?")
        first, end = start // size, -(-stop // size)
        index = np.unravel_index(np.arange(first, end), shape)
        at = sum(
            (i * stride for i, stride in zip(index, self.strides, strict=True)), start=np.zeros(end - first, np.int64)
        )
        data = np.memmap(self.file, np.dtype(f"V{size}"), "r", self.offset, (span,))
        found: Bytes = np.ascontiguousarray(data[at]).view(np.uint8).ravel()
        return found[start - first * size : stop - first * size]


@dataclass(frozen=True, slots=True)
class Arrival:
    """All of a file, or of a folder of files.

    Attributes:
        tensors: the boxes; those of one leaf cover it.
        values: tracked name → tagged JSON (values.py).
        aliases: other names of tied tensors → path.
        left_out: what is not taken in, in words.
    """

    tensors: tuple[Incoming, ...]
    values: Mapping[str, bytes] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()

    def with_rest(self, rest: Rest | None) -> Arrival:
        """The same with what an export of ours holds besides, which is more than the format tells."""
        if rest is None:
            return self
        classes = {path: cls for cls, paths in rest.classes.items() for path in paths}
        tensors = tuple(
            replace(t, shard=replace(t.shard, leaf=replace(leaf, cls=classes.get(leaf.path, leaf.cls))))
            for t in self.tensors
            for leaf in (t.shard.leaf,)
        )
        return Arrival(tensors, {name: bytes(raw) for name, raw in rest.values.items()}, self.aliases)

    def named(self, name: str | None) -> Arrival:
        """The same under the tracked name `name`: what a model calls ``h.0.weight`` becomes ``model.h.0.weight``."""
        if name is None:
            return self
        moved = tuple(replace(t, shard=_moved(t.shard, name)) for t in self.tensors)
        aliases = {f"{name}.{alias}": f"{name}.{path}" for alias, path in self.aliases.items()}
        left = tuple(f"value {value}: a model has tensors only" for value in self.values)
        return Arrival(moved, {}, aliases, self.left_out + left)


def _moved(shard: Shard, name: str) -> Shard:
    leaf = shard.leaf
    return Shard(Leaf(f"{name}.{leaf.path}", leaf.cls, leaf.dtype, leaf.shape), shard.box)


def incoming(name: str, dtype: str, shape: tuple[int, ...], file: Path, offset: int) -> Incoming:
    """A whole tensor that lies row after row."""
    return Incoming(Shard(Leaf(name, "tensor", dtype, shape), whole(shape)), file, offset)


def boxed(name: str, dtype: str, shape: tuple[int, ...], box: Box, file: Path, offset: int) -> Incoming:
    """A box of a tensor that lies row after row."""
    return Incoming(Shard(Leaf(name, "tensor", dtype, shape), box), file, offset)


def read_rest(text: str, file: os.PathLike[str]) -> Rest:
    """What an export of ours holds besides. Raises Refused."""
    try:
        rest = msgspec.json.decode(text, type=Rest)
        for raw in rest.values.values():
            decode(raw)
    except (msgspec.MsgspecError, ValueError) as error:
        raise Refused(f"{file}: its entry {STATE!r} cannot be decoded: {error}") from error
    return rest


def sibling(folder: Path, name: str) -> Path:
    """The file that an index in `folder` names: one of that folder's own, and nothing else.

    Raises:
        Refused: a path, or a name that no file has.
    """
    if not isinstance(name, str) or Path(name).name != name or name in ("", ".", "..") or "\0" in name:
        raise Refused(f"{folder}: a file named {reprlib.repr(name)}, which is not in its own folder")
    return folder / name


def plain_size(file: Path) -> int:
    """Bytes of a plain file. A fifo would keep whoever opens it waiting, and a device has no end.

    Raises:
        Refused: it is something else.
        OSError: it is not there.
    """
    status = file.stat()
    if not stat.S_ISREG(status.st_mode):
        raise Refused(f"{file}: not a plain file")
    return status.st_size


def files_in(folder: Path, pattern: str) -> Iterator[Path]:
    yield from sorted(path for path in folder.glob(pattern) if path.is_file())
