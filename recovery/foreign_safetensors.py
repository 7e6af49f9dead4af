"""safetensors files, written and read (no torch): a JSON header, then the tensors' bytes.

Several files have an index beside them, ``model.safetensors.index.json``, as Hugging Face's tools write and read it. A
tied tensor is written once; its other names stand in the header's metadata, as `safetensors.torch.save_model` does it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from ckpt.format.shards import DTYPES, MAX_DIMS
from recovery.foreign import Arrival, Incoming, Refused, files_in, incoming, plain_size, read_rest, sibling
from recovery.outward import STATE, Export, Outgoing, Rest, landing

LIMIT = 5_000_000_000
"""Bytes of tensors in one file, at most (one tensor may exceed it)."""
INDEX = "model.safetensors.index.json"
MAX_HEADER = 100_000_000
"""As in the reference implementation."""

NAMES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3", "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ", "float8_e8m0fnu": "F8_E8M0", "complex64": "C64", "bool": "BOOL",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8",
}  # fmt: skip
_DTYPES = {name: dtype for dtype, name in NAMES.items()}


def write_safetensors(export: Export, out: Path, *, limit: int = LIMIT) -> list[Path]:
    """Write the tensors into the folder `out`, or into one file where `out` ends in ``.safetensors``.

    Returns:
        The files of tensors.

    Raises:
        ValueError: `out` is there, cannot be written, or a tensor's dtype has no name in this format.
        DamagedError, Pruned, StorageError: the snapshot cannot be read.
    """
    for tensor in export.tensors:
        if tensor.leaf.dtype not in NAMES:
            raise ValueError(f"{tensor.name}: safetensors has no {tensor.leaf.dtype}; export to torch or dcp")
    single = out.suffix == ".safetensors"
    shards = [list(export.tensors)] if single else _split(export.tensors, limit)
    with landing(out) as partial:
        if single:
            _write(export, shards[0], partial)
            return [out]
        partial.mkdir()
        names = ["model.safetensors"]
        if len(shards) > 1:
            names = [f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)]
            where = {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
            index = {"metadata": {"total_size": export.nbytes}, "weight_map": dict(sorted(where.items()))}
            (partial / INDEX).write_bytes(msgspec.json.format(msgspec.json.encode(index), indent=2) + b"\n")
        for name, shard in zip(names, shards, strict=True):
            _write(export, shard, partial / name)
    return [out / name for name in names]


def _split(tensors: Sequence[Outgoing], limit: int) -> list[list[Outgoing]]:
    shards: list[list[Outgoing]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    return shards


def _write(export: Export, tensors: Sequence[Outgoing], path: Path) -> None:
    # Wide elements first, so that each tensor begins at a multiple of its element's size, as readers that map expect.
    ordered = sorted(tensors, key=lambda tensor: (-DTYPES[tensor.leaf.dtype].size, tensor.name))
    metadata = {"format": "pt"} | {alias: t.name for t in ordered for alias in t.names[1:]}
    if export.rest is not None:
        metadata[STATE] = export.rest
    header: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for tensor in ordered:
        header[tensor.name] = {
            "dtype": NAMES[tensor.leaf.dtype],
            "shape": tensor.leaf.shape,
            "data_offsets": (at, at + tensor.nbytes),
        }
        at += tensor.nbytes
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, data in export.stream(ordered):
            file.write(data.data)


class _Entry(Struct, frozen=True):
    dtype: str
    shape: tuple[Annotated[int, Meta(ge=0)], ...]
    data_offsets: tuple[Annotated[int, Meta(ge=0)], Annotated[int, Meta(ge=0)]]


class _Index(Struct, frozen=True):
    weight_map: dict[str, str]


def read_safetensors(source: Path) -> Arrival:
    """What is in a file, in the files of an index, or in a folder that holds either.

    Raises:
        Refused: it is not that, or not whole.
    """
    files = list(_files(source))
    tensors: dict[str, Incoming] = {}
    aliases: dict[str, str] = {}
    rest: Rest | None = None
    for file in files:
        metadata, found = _read_header(file)
        for tensor in found:
            if tensors.setdefault(tensor.shard.leaf.path, tensor) is not tensor:
                raise Refused(f"{file}: {tensor.shard.leaf.path} is in {tensors[tensor.shard.leaf.path].file}, too")
        here = {tensor.shard.leaf.path for tensor in found}
        aliases.update((alias, path) for alias, path in metadata.items() if path in here and alias not in here)
        if STATE in metadata:
            rest = read_rest(metadata[STATE], file)
    kept = {alias: path for alias, path in aliases.items() if alias not in tensors}
    return Arrival(tuple(tensors.values()), {}, kept).with_rest(rest)


def _files(source: Path) -> Iterator[Path]:
    if source.is_dir():
        index = source / INDEX
        if not index.is_file():
            found = list(files_in(source, "*.safetensors"))
            if not found:
                raise Refused(f"{source}: no .safetensors file is there")
            yield from found
            return
        source = index
    if source.suffix != ".json":
        yield source
        return
    try:
        names = set(msgspec.json.decode(source.read_bytes(), type=_Index).weight_map.values())
    except (OSError, msgspec.MsgspecError) as error:
        raise Refused(f"{source}: not an index of safetensors files: {error}") from error
    for name in sorted(names):
        yield sibling(source.parent, name)


def _read_header(file: Path) -> tuple[dict[str, str], list[Incoming]]:
    try:
        size = plain_size(file)
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 2 <= length <= min(MAX_HEADER, size - 8):
                raise Refused(f"{file}: a header of {length} bytes in a file of {size}; not a safetensors file")
            raw = msgspec.json.decode(stream.read(length), type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(raw.pop("__metadata__", msgspec.Raw(b"{}")), type=dict[str, str])
        entries = {name: msgspec.json.decode(text, type=_Entry) for name, text in raw.items()}
    except (OSError, msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise Refused(f"{file}: not a safetensors file: {error}") from error
    _check_apart(file, entries)
    found = []
    for name, entry in entries.items():
        dtype = _DTYPES.get(entry.dtype)
        start, stop = entry.data_offsets
        if dtype is None:
            raise Refused(f"{file}: {name} is of dtype {entry.dtype}, which is not known here")
        if len(entry.shape) > MAX_DIMS:
            raise Refused(f"{file}: {name} has {len(entry.shape)} dimensions; expected at most {MAX_DIMS}")
        if stop - start != math.prod(entry.shape) * DTYPES[dtype].size or 8 + length + stop > size:
            raise Refused(f"{file}: {name} does not fit: {entry}, in a file of {size} bytes")
        found.append(incoming(name, dtype, entry.shape, file, 8 + length + start))
    return metadata, found


def _check_apart(file: Path, entries: Mapping[str, _Entry]) -> None:
    """Refuse tensors that share bytes: a small file could stand for any amount of state. Tied tensors are written once
    and named in the metadata."""
    end, before = 0, ""
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        start, stop = entry.data_offsets
        if start < end and stop > start:
            raise Refused(f"{file}: {name} at bytes {start}:{stop} overlaps {before}, which ends at {end}")
        if stop > end:
            end, before = stop, name
