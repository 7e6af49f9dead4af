"""Capture and checksums with tensors on a CUDA device; skipped where there is none."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import ckpt
from ckpt.checksums import BLOCK, SMALL, checksum, checksums
from ckpt.errors import SaveFailed
from ckpt.format.layout import lay_out
from ckpt.format.shards import DTYPES
from ckpt.mirror.slots import Slots
from ckpt.saving.capture import Capturer
from ckpt.saving.overlap import Copying
from storage_backends.memory import MemoryStore
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


def stepped_state() -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """Large and small tensors on the device, of which every other one is an optimizer's."""
    tensors = {}
    for n in range(6):
        tensors[f"large{n}"] = torch.zeros(16 << 20, device="cuda")
        tensors[f"small{n}"] = torch.zeros(100, device="cuda")
    return tensors, list(tensors.values())


def test_overlapped_copies_hold_what_was_there_and_the_host_does_not_wait() -> None:
    """B1: a spinning kernel keeps the device busy while `begin` returns."""
    tensors, everything = stepped_state()
    flat = replace(flat_of_tensors(tensors), stepped=frozenset(p for p in tensors if int(p[-1]) % 2))
    layout = lay_out(live.shard for live in flat.shards)
    slot = Slots(layout.nbytes).free(None)
    capturer = Capturer(layout)
    capturer.take(flat, slot)  # views are made and pages locked
    for value in (1.0, 2.0):
        for tensor in everything:
            tensor.fill_(value)
        torch.cuda._sleep(500_000_000)
        busy = torch.cuda.current_stream().record_event()
        copying = Copying(1, [capturer.begin(flat, slot)], lambda: None)
        assert not busy.query(), "begin() waited for the device"
        for path, tensor in tensors.items():
            if path not in flat.stepped:
                tensor.fill_(9.0)  # by the next forward, say
        copying.hold_back()
        assert not busy.query(), "hold_back() waited for the device"
        for tensor in everything:
            tensor.fill_(9.0)
        copying.run()
        copying.wait()
        assert (torch.from_numpy(slot[: layout.nbytes]).view(torch.float32) == value).all()


def test_an_edit_on_the_device_outside_of_a_step_fails_the_save() -> None:
    tensors, _ = stepped_state()
    flat = replace(flat_of_tensors(tensors), stepped=frozenset(tensors))
    layout = lay_out(live.shard for live in flat.shards)
    slot = Slots(layout.nbytes).free(None)
    copying = Copying(1, [Capturer(layout).begin(flat, slot)], lambda: None)
    tensors["large1"].add_(1.0)
    copying.hold_back()
    copying.run()
    with pytest.raises(SaveFailed, match="large1 was changed"):
        copying.wait()


def test_a_training_on_the_device_saves_each_state_as_it_was() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(512, 4096), torch.nn.BatchNorm1d(4096), torch.nn.Linear(4096, 512)
    ).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    store, states = MemoryStore(), {}
    with ckpt.Checkpointer(store, {"model": model, "optimizer": optimizer}, capture="overlap") as saver:
        for step in range(1, 9):
            model(torch.randn(8, 512, device="cuda")).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            states[step] = {name: tensor.cpu().clone() for name, tensor in model.state_dict().items()}
            saver.save(step)
    for step, expected in states.items():
        found = ckpt.load(store, step, names="model.*")
        assert all(torch.equal(found[f"model.{name}"], tensor) for name, tensor in expected.items())


def test_checksums_come_out_the_same_on_every_device() -> None:
    tensors = [
        *state().values(),
        *(random_bits((n,), "uint8", n) for n in (1, 4 * SMALL, 4 * BLOCK * 3 + 5)),
        random_bits((3000, 900), "float32", 1).t(),
        random_bits((BLOCK * 200,), "float32", 2),
    ]
    assert checksums([tensor.cuda() for tensor in tensors]) == checksums(tensors)
    assert checksum(tensors[0].cuda()) == checksum(tensors[0])
