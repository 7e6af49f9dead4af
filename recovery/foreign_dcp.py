"""Folders of torch.distributed.checkpoint, written and read (torch).

Written by torch itself, which asks for one box at a time. Read by us, since torch would run whatever its metadata file
says: that is parsed as data (`foreign_records`), and every piece is opened as weights only (`foreign_torch`).
"""

from __future__ import annotations

import io
import reprlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ckpt.format.shards import DTYPES, MAX_DIMS, Box, Leaf, Shard, uncovered, whole
from ckpt.format.values import encode
from recovery.assemble import Wanted
from recovery.foreign import Arrival, Incoming, Refused, plain_size, read_rest, sibling
from recovery.foreign_records import MAX_RECORD, Made, read_record
from recovery.foreign_torch import bytes_of, plain, read_one, stored_tensor
from recovery.outward import STATE, Export, landing

METADATA = ".metadata"

FILE = 128 * 1024 * 1024
"""Bytes of tensors in one file that we write, about."""


def write_dcp(export: Export, out: Path) -> list[str]:
    """Write the folder `out`, from which ``torch.distributed.checkpoint.load`` fills a state dict on any number of
    ranks. A tied tensor is there under each of its names.

    Returns:
        The values that are left out, since a weights-only reader would not take them.

    Raises:
        ValueError: `out` is there, or cannot be written.
        DamagedError, Pruned, StorageError: the snapshot cannot be read.
    """
    planner = _Planner(export)
    with landing(out) as partial, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as meant: this is one process
        try:
            save({}, storage_writer=_Files(partial), planner=planner, no_dist=True)
        except CheckpointException as error:
            raise next(iter(error.failures.values()))[0] from error
    return sorted(export.values.keys() - planner.values.keys())


class _Files(FileSystemWriter):
    """Several files of about `FILE` bytes, one after the other: torch keeps the last box of each tensor of a file
    until that file is done."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results: list[WriteResult] = []
        for number, items in enumerate(_grouped(plan.items)):
            prefix = replace(plan.storage_data, prefix=f"{plan.storage_data.prefix}{number}_")
            results += super().write_data(replace(plan, items=items, storage_data=prefix), planner).wait()
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done


def _grouped(items: Sequence[WriteItem]) -> Iterator[list[WriteItem]]:
    group: list[WriteItem] = []
    size = 0
    for item in items:
        data = item.tensor_data
        nbytes = 0 if data is None else data.chunk.sizes.numel() * data.properties.dtype.itemsize
        if group and size + nbytes > FILE:
            yield group
            group, size = [], 0
        group.append(item)
        size += nbytes
    if group:
        yield group


class _Planner(SavePlanner):
    """Says which boxes there are, and fetches one when it is asked for it."""

    def __init__(self, export: Export) -> None:
        self.export = export
        self.values = {path: value for path, value in export.values.items() if plain(value)}
        if export.rest is not None:
            self.values[STATE] = export.rest
        self.wants: dict[MetadataIndex, Wanted] = {}

    def set_up_planner(
        self, state_dict: Any, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        pass

    def create_local_plan(self) -> SavePlan:
        items = [WriteItem(MetadataIndex(path), WriteItemType.BYTE_IO) for path in self.values]
        for tensor in self.export.tensors:
            properties = TensorProperties(dtype=getattr(torch, tensor.leaf.dtype))
            size = torch.Size(tensor.leaf.shape)
            for name in tensor.names:
                for want in self.export.pieces(tensor):
                    box = want.shard.box
                    index = MetadataIndex(name, box.offsets)
                    self.wants[index] = want
                    chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.lengths))
                    items.append(
                        WriteItem(index, WriteItemType.SHARD, tensor_data=TensorWriteData(chunk, properties, size))
                    )
        return SavePlan(items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if write_item.type == WriteItemType.BYTE_IO:
            return bytes_of(self.values[write_item.index.fqn])
        want = self.wants[write_item.index]
        ((_, data),) = self.export.read([want])
        dtype, shape = getattr(torch, want.shard.leaf.dtype), want.shard.box.lengths
        if not data.size:
            return torch.empty(shape, dtype=dtype)
        return torch.from_numpy(data).view(dtype).reshape(shape)


@dataclass(frozen=True, slots=True)
class _Place:
    """A slice of a file, which is a file of `torch.save` in itself."""

    file: Path
    offset: int
    length: int


def read_dcp(source: Path) -> Arrival:
    """What is in a folder of torch.distributed.checkpoint.

    Raises:
        Refused: it is not one, is not whole, or holds what cannot be taken in.
    """
    try:
        if (size := plain_size(source / METADATA)) > MAX_RECORD:
            raise Refused(f"{source / METADATA}: {size} bytes of metadata; expected at most {MAX_RECORD}")
        record = read_record((source / METADATA).read_bytes())
    except OSError as error:
        raise Refused(f"{source}: no checkpoint of torch.distributed: {error}") from error
    except Refused as error:
        raise Refused(f"{source / METADATA}: {error}") from error
    try:
        entries = dict(record["state_dict_metadata"])
        places = {(index["fqn"], _size(index.get("offset"))): _place(source, info) for index, info in _pairs(record)}
        tensors = {str(n): _tensor(e) for n, e in entries.items() if e.name.endswith(".TensorStorageMetadata")}
    except Refused:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        what = reprlib.repr(error)
        raise Refused(f"{source / METADATA}: not as torch.distributed.checkpoint writes it: {what}") from error
    found = [
        one for name, (dtype, shape, boxes) in tensors.items() for one in _boxes(name, dtype, shape, boxes, places)
    ]
    values: dict[str, bytes] = {}
    left: list[str] = []
    loose = {name: places.get((name, None)) for name in entries if name not in tensors}
    if (ours := loose.get(STATE)) is not None:
        return Arrival(tuple(found)).with_rest(read_rest(str(_open(ours, STATE)), source))
    for name, place in loose.items():
        value = None if place is None else _open(place, name)
        if place is None or "." in name or not plain(value):  # what was nested comes flat, and is no tree any more
            left.append(f"value {name}")
        else:
            values[name] = encode(value, name)
    return Arrival(tuple(found), values, {}, tuple(left))


def _pairs(record: Made) -> Iterator[tuple[Made, Made]]:
    yield from record["storage_data"].items()


def _size(made: Made | None) -> tuple[int, ...] | None:
    """What a torch.Size was made of."""
    if made is None:
        return None
    (numbers,) = made.args
    if not all(type(n) is int and n >= 0 for n in numbers):
        raise ValueError(f"a size of {reprlib.repr(numbers)}")
    return tuple(numbers)


def _shape(made: Made) -> tuple[int, ...]:
    found = _size(made)
    if found is None or len(found) > MAX_DIMS:
        raise ValueError(f"a shape of {reprlib.repr(found)}")
    return found


def _place(source: Path, info: Made) -> _Place:
    name, offset, length = info["relative_path"], info["offset"], info["length"]
    if type(offset) is not int or type(length) is not int or min(offset, length) < 0:
        raise ValueError(f"a piece at {reprlib.repr(offset)} of {reprlib.repr(length)} bytes")
    if info.get("transform_descriptors"):
        raise ValueError(f"{name} is written by an extension: {reprlib.repr(info['transform_descriptors'])}")
    return _Place(sibling(source, name), offset, length)


def _tensor(entry: Made) -> tuple[str, tuple[int, ...], list[Box]]:
    dtype = entry["properties"].state[0].name.removeprefix("torch.")
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype}")
    chunks = [Box(_shape(chunk["offsets"]), _shape(chunk["sizes"])) for chunk in entry["chunks"]]
    return dtype, _shape(entry["size"]), chunks


def _boxes(
    name: str, dtype: str, shape: tuple[int, ...], boxes: list[Box], places: Mapping[Any, _Place]
) -> Iterator[Incoming]:
    if (problem := uncovered(shape, boxes)) is not None:
        raise Refused(f"{name}: {problem}")
    leaf = Leaf(name, "tensor", dtype, shape)
    if whole(shape).empty:
        yield Incoming(Shard(leaf, whole(shape)), Path(), 0)
        return
    for box in boxes:
        if box.empty:
            continue
        place = places.get((name, box.offsets), places.get((name, None)))
        if place is None:
            raise Refused(f"{name} {box}: no file holds it")
        inner = _open(place, name)
        if not isinstance(inner, torch.Tensor):
            raise Refused(f"{place.file}: {name} is a {type(inner).__name__}, expected a tensor")
        offset, found, lengths, strides = stored_tensor(inner)
        if (found, lengths) != (dtype, box.lengths) or Shard(leaf, box).nbytes > place.length:
            raise Refused(f"{place.file}: {name} {box} is {found} {list(lengths)}, expected {dtype}")
        yield Incoming(Shard(leaf, box), place.file, place.offset + offset, strides)


def _open(place: _Place, name: str) -> Any:
    try:
        plain_size(place.file)
        with place.file.open("rb") as file:
            return read_one(_Window(file, place.offset, place.length), place.file, name)
    except OSError as error:
        raise Refused(f"{place.file}: {name} cannot be read: {error}") from error


class _Window(io.RawIOBase):
    """A slice of a file, as a file."""

    def __init__(self, file: Any, offset: int, length: int) -> None:
        self._file = file
        self._offset = offset
        self._length = length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        self._at = max(base + offset, 0)
        return self._at

    def readinto(self, buffer: Any) -> int:
        size = min(len(buffer), max(self._length - self._at, 0))
        self._file.seek(self._offset + self._at)
        data: bytes = self._file.read(size)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)
