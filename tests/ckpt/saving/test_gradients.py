"""Tensors copied out in lots, into memory that is used again."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ckpt.saving.gradients import SPARE, Buffers, copy_out
from ckpt.saving.job import Bytes
from tests.support.training import raw


def mixed(count: int) -> list[tuple[str, torch.Tensor]]:
    """Small and large ones, of several dtypes, some not contiguous, some without elements."""
    generator = torch.Generator().manual_seed(count)
    made = []
    for n in range(count):
        dtype = (torch.float32, torch.bfloat16, torch.float64, torch.complex64)[n % 4]
        rows = (0, 1, 3, 40, 300)[n % 5]
        tensor = torch.randn(rows, 1 + n % 97, generator=generator).to(dtype)
        made.append((f"t{n}", tensor.t() if n % 7 == 3 else tensor))
    return made


@pytest.mark.parametrize("count", [0, 1, 2, 50, 400])
def test_every_tensor_is_copied_bit_for_bit_into_the_lot_of_its_dtype(count: int) -> None:
    named, used = mixed(count), list[Bytes]()
    lots = copy_out(named, Buffers(), used)
    expected = dict(named)
    found: dict[str, bytes] = {}
    for lot in lots:
        ends = np.cumsum([0, *lot.sizes])
        assert len(lot.data) == ends[-1]
        for path, a, b in zip(lot.paths, ends[:-1], ends[1:], strict=True):
            assert str(expected[path].dtype) == f"torch.{lot.dtype}"
            found[path] = lot.data[a:b].tobytes()
    assert found == {path: raw(tensor) for path, tensor in named}
    assert len(used) == len(lots)


def test_nothing_refers_to_the_tensors_afterwards() -> None:
    tensor, used = torch.ones(100), list[Bytes]()
    (lot,) = copy_out([("t", tensor)], Buffers(), used)
    tensor.zero_()
    assert lot.data.view(np.float32).tolist() == [1.0] * 100


def test_memory_that_comes_back_goes_out_again_whatever_else_is_asked_for() -> None:
    buffers = Buffers()
    large = buffers.take(1 << 20)
    for _ in range(3 * SPARE):
        small = buffers.take(100)
        buffers.give_back([large, small])
        again = buffers.take(1 << 20)
        assert again is large
        assert buffers.nbytes == (1 << 20) + 100
    buffers.give_back([large])
    for n in range(2 * SPARE):
        buffers.give_back([buffers.take((2 << 20) + (n << 22))])
    assert len(buffers._free) <= SPARE and buffers.nbytes == sum(map(len, buffers._free))
