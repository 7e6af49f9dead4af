"""Capture and checksums with tensors on a CUDA device; skipped where there is none."""

from __future__ import annotations

import pytest
import torch

from ckpt.checksums import BLOCK, SMALL, checksum, checksums
from ckpt.format.layout import lay_out
from ckpt.format.shards import DTYPES
from ckpt.mirror.slots import Slots
from ckpt.saving.capture import Capturer
from tests.ckpt.saving.test_capture import flat_of_tensors, random_bits

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def state() -> dict[str, torch.Tensor]:
    tensors = {}
    for n, dtype in enumerate(sorted(DTYPES)):
        tensors[f"{dtype}.small"] = random_bits((33, 3), dtype, n)
        tensors[f"{dtype}.scalar"] = random_bits((1,), dtype, n)[0]
        tensors[f"{dtype}.large"] = random_bits((70_000,), dtype, n)
        tensors[f"{dtype}.turned"] = random_bits((70, 40), dtype, n).t()
    return tensors


def test_device_tensors_reach_the_buffer_bit_by_bit() -> None:
    host = state()
    flat = flat_of_tensors(host)
    # Every other tensor stays on the host, as Adam's step does.
    mixed = flat_of_tensors({path: t.cuda() if n % 2 else t for n, (path, t) in enumerate(host.items())})
    layout = lay_out(live.shard for live in flat.shards)
    slots = Slots(layout.nbytes)
    expected = slots.free(None)
    Capturer(layout).take(flat, expected)
    capturer = Capturer(layout)
    found = slots.free(expected)
    for _ in range(2):
        found[:] = 0xEE
        capturer.take(mixed, found)
        for region in layout.regions:
            span = slice(region.start, region.start + region.nbytes)
            assert found[span].tobytes() == expected[span].tobytes(), region.shard


def test_what_changes_on_the_device_after_take_is_not_in_the_buffer() -> None:
    """B1"""
    large, small = torch.zeros(64 << 20, device="cuda"), [torch.zeros(100, device="cuda") for _ in range(500)]
    flat = flat_of_tensors({"large": large, **{f"s.{n}": t for n, t in enumerate(small)}})
    layout = lay_out(live.shard for live in flat.shards)
    slot = Slots(layout.nbytes).free(None)
    capturer = Capturer(layout)
    for value in (1.0, 2.0):
        for tensor in (large, *small):
            tensor.fill_(value)
        capturer.take(flat, slot)
        for tensor in (large, *small):
            tensor.fill_(9.0)
        torch.cuda.synchronize()
        for region in layout.regions:
            span = slot[region.start : region.start + region.nbytes]
            assert (torch.from_numpy(span).view(torch.float32) == value).all()


def test_checksums_come_out_the_same_on_every_device() -> None:
    tensors = [
        *state().values(),
        *(random_bits((n,), "uint8", n) for n in (1, 4 * SMALL, 4 * BLOCK * 3 + 5)),
        random_bits((3000, 900), "float32", 1).t(),
        random_bits((BLOCK * 200,), "float32", 2),
    ]
    assert checksums([tensor.cuda() for tensor in tensors]) == checksums(tensors)
    assert checksum(tensors[0].cuda()) == checksum(tensors[0])
