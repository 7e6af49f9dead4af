"""Where restored bytes go: into a live tensor or array, into one made for them, or into a comparison.

A target is made while planning, takes bytes once, and has the restored object as its `value` afterwards. Memory for
new tensors is taken when their bytes arrive, not before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from ckpt.errors import LayoutMismatch
from ckpt.format.shards import Leaf
from ckpt.leaves.tensors import Array, as_dtensor, torch_dtype


class Target(Protocol):
    def write(self, data: torch.Tensor) -> None:
        """Take the bytes of the box: uint8, one dimension, on the host, row-major. They may be reused afterwards."""

    @property
    def value(self) -> Any:
        """The restored tensor or array."""


class InPlace:
    """A live tensor or array; the user's code holds it, so it keeps its identity, device and strides."""

    def __init__(self, live: torch.Tensor | Array) -> None:
        self.value: Any = live

    def write(self, data: torch.Tensor) -> None:
        if isinstance(self.value, torch.Tensor):
            _copy(data, local_of(self.value))
        else:
            view = data.numpy().view(self.value.dtype).reshape(self.value.shape)
            self.value[...] = view


class Fresh:
    """A tensor (or array) that does not exist yet; `make` builds it, with its final dtype, device and placements."""

    def __init__(self, make: Callable[[], torch.Tensor], *, array: bool = False) -> None:
        self._make = make
        self._array = array
        self._made: torch.Tensor | None = None

    def write(self, data: torch.Tensor) -> None:
        self._made = self._make()
        _copy(data, local_of(self._made))

    @property
    def value(self) -> Any:
        if self._made is None:  # an empty share: there are no bytes to wait for
            self._made = self._make()
        return self._made.numpy() if self._array else self._made


class Twins:
    """One live tensor under several names that were stored apart: all must have the same bytes.

    Only the bytes can tell, and these arrive one leaf after the other; so a difference is found while restoring, not
    before. (Comparing digests beforehand would need every chunk on one grid, which a change of layout takes away.)
    """

    def __init__(self, target: Target, count: int) -> None:
        self._target = target
        self._first: tuple[str, torch.Tensor] | None = None
        self._missing = count

    def member(self, name: str) -> Callable[[torch.Tensor], None]:
        return lambda data: self._write(name, data)

    def _write(self, name: str, data: torch.Tensor) -> None:
        if self._first is None:
            self._target.write(data)
            self._first = (name, data.clone())
        elif not torch.equal(self._first[1], data):  # of uint8, where equal means equal
            raise LayoutMismatch(
                f"{name} and {self._first[0]} are one tensor here, but were stored with different values; untie them, "
                "or restore a snapshot from when they were tied (the state is half restored now)",
                changed={name: f"stored apart from {self._first[0]} and different, live tied to it"},
            )
        self._missing -= 1
        if not self._missing:
            self._first = (name, data.new_empty(0))


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """What of a tensor lies in this process, detached, on the same memory."""
    sharded = as_dtensor(tensor)
    return (tensor if sharded is None else sharded._local_tensor).detach()


def like(parameter: torch.Tensor, leaf: Leaf) -> Callable[[], torch.Tensor]:
    """Makes a tensor of the leaf's dtype with a parameter's shape, strides, device and placements."""
    return lambda: torch.empty_like(parameter.detach(), dtype=torch_dtype(leaf), requires_grad=False)


def plain(leaf: Leaf, device: torch.device) -> Callable[[], torch.Tensor]:
    """Makes a whole tensor of the leaf's shape and dtype."""
    return lambda: torch.empty(leaf.shape, dtype=torch_dtype(leaf), device=device)


def _copy(data: torch.Tensor, to: torch.Tensor) -> None:
    """Logical copy of a box's bytes, bit for bit: any strides, any device."""
    if data.storage_offset() % to.element_size():
        data = data.clone()  # a view as wider elements must start at a whole one
    to.copy_(data.view(to.dtype).reshape(to.shape))
