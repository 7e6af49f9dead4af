"""Where the bytes of one box lie in those of another: pure index arithmetic and numpy views, no dtype semantics.

Everything is row-major. Elements are moved as opaque words of their size, so NaN payloads and dtypes that numpy does
not know are safe.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ckpt.format.shards import Box

Bytes: TypeAlias = NDArray[np.uint8]

_WORDS: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True, slots=True)
class Run:
    """One copy of contiguous bytes: ``source[start:stop]`` to ``target[at:]``."""

    start: int
    stop: int
    at: int


@dataclass(frozen=True, slots=True)
class Cells:
    """One copy of a box: `common`, cut out of a source that holds `source` and put into a target that holds `target`
    (all in global coordinates), elements of `size` bytes."""

    common: Box
    source: Box
    target: Box
    size: int

    @property
    def nbytes(self) -> int:
        return self.common.numel * self.size


Copy: TypeAlias = Run | Cells


def copies(source: Box, target: Box, size: int) -> Copy | None:
    """How to copy what two boxes of one tensor have in common; None if they have nothing."""
    common = source.intersect(target)
    if common is None:
        return None
    start, at = _flat_start(common, source), _flat_start(common, target)
    if start is not None and at is not None:
        return Run(start * size, (start + common.numel) * size, at * size)
    return Cells(common, source, target, size)


def carry_out(copy: Copy, source: Bytes, target: Bytes) -> None:
    """Do it. `source` and `target` are all bytes of their boxes."""
    match copy:
        case Run(start, stop, at):
            target[at : at + stop - start] = source[start:stop]
        case Cells(common, held, wanted, size):
            _view(target, wanted, size)[_slices(common, wanted)] = _view(source, held, size)[_slices(common, held)]


def copied(copy: Copy) -> int:
    """Bytes it moves."""
    return copy.stop - copy.start if isinstance(copy, Run) else copy.nbytes


def _flat_start(inner: Box, outer: Box) -> int | None:
    """First element of `inner` in the row-major order of `outer`, if inner's elements follow each other there."""
    at, stride = 0, 1
    gap = False  # a dimension further right is not whole: only single rows may follow to its left
    for a, n, b, m in zip(
        reversed(inner.offsets), reversed(inner.lengths), reversed(outer.offsets), reversed(outer.lengths), strict=True
    ):
        if gap and n != 1:
            return None
        gap = gap or n != m
        at += (a - b) * stride
        stride *= m
    return at


def _slices(inner: Box, outer: Box) -> tuple[slice, ...]:
    local = inner.relative_to(outer)
    return tuple(slice(a, a + n) for a, n in zip(local.offsets, local.lengths, strict=True))


def _view(data: Bytes, box: Box, size: int) -> NDArray[Any]:
    """The bytes of a box as an array of its shape, elements as opaque words."""
    word = _WORDS.get(size)
    if word is None:  # complex128: as pairs, so that nothing ever looks at the bytes as numbers
        word, shape = np.uint64, (*box.lengths, size // 8)
    else:
        shape = box.lengths
    view: NDArray[Any] = data.view(word).reshape(shape)
    return view
