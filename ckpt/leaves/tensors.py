"""One tensor as a leaf: what is accepted, and which box of the global tensor this rank holds (PYTORCH.md §1, §2)."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from ckpt.errors import UnsupportedState
from ckpt.format.shards import DTYPES, Box, Leaf, Shard, whole

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Array: TypeAlias = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True, eq=False)
class LiveShard:
    """What this rank holds of a leaf. `tensor` is local and detached and has the storage of the live one (a lazily
    conjugated or negated one is resolved into a copy), with the shape of ``shard.box``."""

    shard: Shard
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class PerRank:
    """Declares that `value` (a tensor or an array, or something whose state holds some) differs from rank to rank:
    every rank stores and gets back its own, instead of one replica standing for all.

    ``saver = Checkpointer(url, {"noise": PerRank(noise)})``
    """

    value: object


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """A tensor or array met in the state at `path`; `cls` as in `Leaf`."""

    path: str
    cls: str
    tensor: torch.Tensor | Array
    per_rank: bool = False


def loaded(module: str, name: str) -> Any:
    """A class by its home, or None while that module is not imported: then no object of that class can exist, and
    importing it just to ask would cost every user half a second."""
    return getattr(sys.modules.get(module), name, None)


def instance_of(value: object, module: str, name: str) -> bool:
    kind = loaded(module, name)
    return kind is not None and isinstance(value, kind)


def as_dtensor(value: object) -> DTensor | None:
    """The value itself if it is a DTensor, exactly."""
    kind = loaded("torch.distributed.tensor", "DTensor")
    return value if kind is not None and type(value) is kind else None  # type: ignore[return-value]


@cache
def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def torch_dtype(leaf: Leaf) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, leaf.dtype)
    return dtype


class Boxes:
    """This rank's box of DTensors, by (mesh, placements, shape): asking torch takes 80 to 260 µs each time."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], Box | None] = {}

    def of(self, tensor: DTensor, path: str) -> Box | None:
        """The box, empty where this rank's share is, None where the rank is not in the mesh.

        Raises UnsupportedState for placements whose box torch gets silently wrong, or that are no boxes at all.
        """
        key = (tensor.device_mesh, tensor.placements, tensor.shape)
        if key not in self._known:
            self._known[key] = _box(tensor, path)
        return self._known[key]


def _box(tensor: DTensor, path: str) -> Box | None:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh, placements = tensor.device_mesh, tensor.placements
    for i, placement in enumerate(placements):
        if isinstance(placement, _StridedShard):
            inner = math.prod(
                mesh.size(j)
                for j, p in enumerate(placements)
                if j > i and isinstance(p, Shard) and not isinstance(p, _StridedShard) and p.dim == placement.dim
            )
            if placement.split_factor != inner:
                raise UnsupportedState(
                    f"{path}: placements {placements}: the split factor {placement.split_factor} of mesh dimension {i} "
                    f"is not the product {inner} of the shards inside it, so a rank's rows are no box; shard it with "
                    "fully_shard on top of tensor parallelism, or redistribute it first",
                    leaf=path,
                )
        elif not isinstance(placement, Shard | Replicate):
            raise UnsupportedState(
                f"{path}: placement {placement} on mesh dimension {i}: the value is spread over ranks that each hold "
                "a summand; reduce it first with .redistribute(placements=[Replicate()])",
                leaf=path,
            )
    if mesh.get_coordinate() is None:
        return None
    lengths, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    if 0 in lengths:  # torch puts an empty share anywhere, and every rank must call it the same
        return Box((0,) * len(lengths), tuple(lengths))
    return Box(tuple(offsets), tuple(lengths))


def live_shard(found: Found, boxes: Boxes) -> LiveShard | None:
    """What this rank holds of a tensor found in the state; None if nothing (it is outside the tensor's mesh).

    Raises UnsupportedState naming the leaf and a remedy.
    """
    path, tensor = found.path, found.tensor
    if not isinstance(tensor, torch.Tensor):
        local = array_tensor(path, tensor)
        leaf = Leaf(path, found.cls, dtype_name(local.dtype), tuple(local.shape))
        return LiveShard(Shard(leaf, whole(leaf.shape), found.per_rank), local)
    sharded = as_dtensor(tensor)
    if sharded is None:
        check_tensor(path, tensor)
        leaf = Leaf(path, found.cls, dtype_name(tensor.dtype), tuple(tensor.shape))
        return LiveShard(Shard(leaf, whole(leaf.shape), found.per_rank), resolved(tensor))
    if found.per_rank:
        raise UnsupportedState(
            f"{path}: a DTensor is shared between ranks already; PerRank is for plain tensors", leaf=path
        )
    box = boxes.of(sharded, path)
    if box is None:
        return None
    local = sharded._local_tensor
    check_tensor(path, local)
    if tuple(local.shape) != box.lengths:
        raise UnsupportedState(
            f"{path}: this rank's local tensor has shape {tuple(local.shape)}, its placements "
            f"{sharded.placements} say {box.lengths}; build it with distribute_tensor or from_local(shape=…)",
            leaf=path,
        )
    leaf = Leaf(path, found.cls, dtype_name(local.dtype), tuple(sharded.shape))
    return LiveShard(Shard(leaf, box), resolved(local))


def resolved(tensor: torch.Tensor) -> torch.Tensor:
    """Detached, and with values where its memory says them: a lazy conjugate's storage holds the unconjugated ones."""
    return tensor.detach().resolve_conj().resolve_neg()


def check_tensor(path: str, tensor: torch.Tensor) -> None:
    """Refuse what cannot be saved and restored exactly, in place. Raises UnsupportedState."""
    if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
        raise UnsupportedState(_subclass_refusal(path, tensor), leaf=path)
    if tensor.layout != torch.strided or tensor.is_quantized:
        kind = "quantised" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
        raise UnsupportedState(
            f"{path}: a {kind} tensor; keep its parts as plain tensors (indices and values, or integers and scales)",
            leaf=path,
        )
    if tensor.is_meta:
        raise UnsupportedState(
            f"{path}: on the meta device, without values; materialise the module first (.to_empty(), then initialise)",
            leaf=path,
        )
    if dtype_name(tensor.dtype) not in DTYPES:
        raise UnsupportedState(
            f"{path}: dtype {tensor.dtype} has no exact copy here; keep a .view() of it as uint8, or another dtype",
            leaf=path,
        )
    if not tensor.is_contiguous() and _overlaps(tensor.shape, tensor.stride()):
        raise UnsupportedState(
            f"{path}: shape {tuple(tensor.shape)} with strides {tensor.stride()}: several elements share memory "
            "(expand, stride 0), so it cannot be restored in place; track a .clone() or the tensor it came from",
            leaf=path,
        )


def _subclass_refusal(path: str, tensor: torch.Tensor) -> str:
    kind = type(tensor)
    if torch.nn.parameter.is_lazy(tensor):
        return f"{path}: a lazy module's parameter without a shape yet; run one forward pass before tracking it"
    if instance_of(tensor, "torch.distributed.fsdp", "FlatParameter"):
        return f"{path}: a FlatParameter of FSDP1; use torch.distributed.fsdp.fully_shard"
    return (
        f"{path}: the tensor subclass {kind.__module__}.{kind.__qualname__} may hold more than its own elements; track "
        "the plain tensors inside it, or the master weights it was made from"
    )


def _overlaps(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two elements may lie on the same memory: a dimension steps less far than all smaller ones reach."""
    if 0 in shape:
        return False
    reach = 0
    for stride, length in sorted((s, n) for s, n in zip(strides, shape, strict=True) if n > 1):
        if stride <= reach:
            return True
        reach += stride * (length - 1)
    return False


def array_tensor(path: str, array: Array) -> torch.Tensor:
    """A tensor on the memory of an array; on a copy of it where torch has no view (backward, read-only, unaligned).

    Raises UnsupportedState.
    """
    if type(array) is not np.ndarray:
        kind = type(array)
        raise UnsupportedState(
            f"{path}: {kind.__module__}.{kind.__qualname__}, a subclass of numpy.ndarray, may hold more than its "
            "elements; track numpy.asarray(…) of it (and a mask as an array of its own)",
            leaf=path,
        )
    if array.dtype.name not in DTYPES or array.dtype.fields is not None:
        hint = ".view('int64')" if array.dtype.kind in "mM" else "arrays of numbers, or a list"
        raise UnsupportedState(f"{path}: a numpy array of dtype {array.dtype}; keep {hint} instead", leaf=path)
    if not array.dtype.isnative:
        raise UnsupportedState(
            f"{path}: a numpy array in foreign byte order ({array.dtype.str}); keep "
            "array.astype(array.dtype.newbyteorder('='))",
            leaf=path,
        )
    if _overlaps(array.shape, [abs(s) for s in array.strides]):
        raise UnsupportedState(
            f"{path}: elements of the array share memory (broadcast, strides {array.strides}); track a .copy()",
            leaf=path,
        )
    if not array.flags.writeable or any(s < 0 or s % array.itemsize for s in array.strides):
        array = np.array(array, order="C")  # a view would raise, or warn about memory that must not be written
    return torch.from_numpy(array)


_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers of the element's width (two int64 per complex128): shape and strides are kept, but
    for a contiguous tensor, which comes flat."""
    if tensor.dtype.itemsize == 16:
        tensor = torch.view_as_real(tensor)
    bits = tensor.view(_CARRIERS[tensor.dtype.itemsize])
    return bits.view(-1) if bits.is_contiguous() else bits
