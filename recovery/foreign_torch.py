"""torch's own files, written and read (torch). The one room where `torch.load` is called, and always with
``weights_only=True``: then a file can name nothing but tensors and plain values.

Nothing of a tensor is loaded: torch reads and writes the outline of a file with fake tensors, which say where the real
bytes belong, and these are streamed.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from ckpt.errors import UnsupportedState
from ckpt.format.shards import DTYPES, Leaf, Shard, whole
from ckpt.format.values import Ref, encode
from ckpt.leaves.tensors import Found
from ckpt.leaves.tree import walk
from recovery.foreign import Arrival, Incoming, Refused, plain_size, read_rest
from recovery.outward import STATE, Export, landing

_PLAIN = (type(None), bool, int, float, str, bytes)


def write_torch(export: Export, out: Path) -> list[str]:
    """Write a dict of path → tensor or plain value that ``torch.load(out, weights_only=True)`` returns. Tied tensors
    stand under all of their names and share memory.

    Returns:
        The values that such a file cannot hold; they are left out (of the dict: `ckpt import` gets all).

    Raises:
        ValueError: `out` is there, or cannot be written.
        DamagedError, Pruned, StorageError: the snapshot cannot be read.
    """
    values = {path: value for path, value in export.values.items() if plain(value)}
    if export.rest is not None:
        values[STATE] = export.rest
    with landing(out) as partial:
        with FakeTensorMode():
            outline: dict[str, Any] = {}
            for tensor in export.tensors:
                fake = torch.empty(tensor.leaf.shape, dtype=getattr(torch, tensor.leaf.dtype))
                outline |= dict.fromkeys(tensor.names, fake)
            with torch.serialization.skip_data(materialize_fake_tensors=True):
                torch.save({**outline, **values}, partial)
        with partial.open("rb") as file:
            places = {t.shard.leaf.path: t.offset for t in _extents(_outline(file, partial), partial)}
        with partial.open("r+b") as target:
            last = None
            for tensor, data in export.stream([t for t in export.tensors if t.nbytes]):
                if tensor is not last:
                    target.seek(places[tensor.name])
                    last = tensor
                target.write(data.data)
    return sorted(export.values.keys() - values.keys())


def plain(value: Any) -> bool:
    """Whether a weights-only reader takes a value."""
    if type(value) in (list, tuple):
        return all(map(plain, value))
    if type(value) is dict:
        return all(type(key) in _PLAIN and plain(item) for key, item in value.items())
    return type(value) in _PLAIN


def read_torch(source: Path) -> Arrival:
    """What is in a file of `torch.save`: a state dict, or a dict of state dicts and plain values.

    A dict of tensors alone is taken for a module's state dict; any other becomes a tree with its tensors in it, as a
    `Checkpointer` saves a dict.

    Raises:
        Refused: it names code, is of the old format, is cut short, or holds tensors that cannot be taken in.
    """
    try:
        plain_size(source)
        with source.open("rb") as file:
            content = _outline(file, source)
    except OSError as error:
        raise Refused(f"{source} cannot be read: {error}") from error
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise Refused(f"{source}: a {type(content).__name__}; expected a dict of names and tensors")
    ours = content.pop(STATE, None)
    tensors, trees = _sorted_out(content, source)
    extents, aliases = _untied(_extents(tensors, source))
    if isinstance(ours, str):  # what is plain in the file is a copy of some of it
        return Arrival(tuple(extents), {}, aliases).with_rest(read_rest(ours, source))
    return Arrival(tuple(extents), {name: encode(tree, name) for name, tree in trees.items()}, aliases)


def read_one(file: IO[bytes] | io.RawIOBase, source: Path, name: str) -> Any:
    """The single object that a file of `torch.save` holds; a tensor comes as a fake one. Raises Refused."""
    return _outline(file, source, name)


def stored_tensor(tensor: torch.Tensor) -> tuple[int, str, tuple[int, ...], tuple[int, ...] | None]:
    """Of a fake tensor of `read_one`: its byte offset in the file, dtype, shape, and strides where scattered."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if not isinstance(tensor, FakeTensor) or tensor.layout != torch.strided or dtype not in DTYPES:
        raise Refused(f"a {type(tensor).__name__} of {tensor.layout}, {dtype}; expected a dense one of a plain dtype")
    start: int | None = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
    if start is None:
        raise Refused("a tensor without a place in the file")
    offset = start + int(tensor.storage_offset()) * DTYPES[dtype].size
    return offset, dtype, tuple(tensor.shape), None if tensor.is_contiguous() else tuple(tensor.stride())


def _outline(file: IO[bytes] | io.RawIOBase, source: Path, what: str = "") -> Any:
    told = f"{source}: {what}" if what else str(source)
    try:
        with zipfile.ZipFile(
            cast(IO[bytes], file)
        ) as archive:  # the old format is no zip; its tensors have no place of their own
            for entry in archive.infolist():
                # torch packs nothing, and makes room for what an entry claims: a bomb would be one that is packed.
                if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
                    claim = f"{entry.file_size} bytes packed into {entry.compress_size}"
                    raise Refused(f"{told}: {entry.filename[:80]!r} is {claim}; torch.save packs nothing")
            order = next((n for n in archive.namelist() if n.rpartition("/")[2] == "byteorder"), None)
            if order is not None and archive.read(order) != b"little":
                raise Refused(f"{told}: big-endian; save it again on a little-endian machine")
        file.seek(0)
        with FakeTensorMode():
            return torch.load(cast(IO[bytes], file), weights_only=True)
    except Refused:
        raise
    except zipfile.BadZipFile as error:
        raise Refused(f"{told}: not a file of torch.save, or of before torch 1.6; save it again") from error
    except Exception as error:  # what a reader of untrusted bytes may raise has no end
        raise Refused(f"{told}: refused by torch's weights-only reader: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _sorted_out(content: Mapping[str, Any], source: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Path → tensor; and name → tree for what is not a tensor or a state dict."""
    tensors: dict[str, Any] = {}
    trees: dict[str, Any] = {}
    for name, value in content.items():
        if isinstance(value, torch.Tensor):
            tensors[name] = value
        elif isinstance(value, dict) and value and all(map(_names_tensor, value.items())):
            tensors |= {f"{name}.{key}": tensor for key, tensor in value.items()}
        else:
            found: list[Found] = []
            try:
                trees[name] = walk(value, name, found)
            except UnsupportedState as error:
                raise Refused(f"{source}: {error}") from error
            if isinstance(trees[name], Ref):
                raise Refused(f"{source}: {name} is a {type(value).__name__}, which cannot be taken in")
            tensors |= {one.path: one.tensor for one in found}
    return tensors, trees


def _names_tensor(item: tuple[Any, Any]) -> bool:
    return isinstance(item[0], str) and isinstance(item[1], torch.Tensor)


def _extents(tensors: Mapping[str, Any], source: Path) -> Iterator[Incoming]:
    size = source.stat().st_size
    for path, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor):
            try:
                offset, dtype, shape, strides = stored_tensor(tensor)
            except Refused as error:
                raise Refused(f"{source}: {path} is {error}") from None
            leaf = Leaf(path, "tensor", dtype, shape)
            if leaf.nbytes > size:
                raise Refused(
                    f"{source}: {path} has {leaf.nbytes} bytes, in a file of {size}; is it a view? save a copy"
                )
            yield Incoming(Shard(leaf, whole(shape)), source, offset, strides)


def _untied(extents: Iterator[Incoming]) -> tuple[list[Incoming], dict[str, str]]:
    """Tensors that are the same bytes are one, with several names."""
    firsts: dict[object, str] = {}
    kept: list[Incoming] = []
    aliases: dict[str, str] = {}
    for one in extents:
        leaf = one.shard.leaf
        key = (one.offset, leaf.dtype, leaf.shape, one.strides)
        if leaf.nbytes and (first := firsts.setdefault(key, leaf.path)) != leaf.path:
            aliases[leaf.path] = first
        else:
            kept.append(one)
    return kept, aliases


def bytes_of(value: Any) -> io.BytesIO:
    """A plain value as `torch.save` writes it."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream
