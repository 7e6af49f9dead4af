from __future__ import annotations

import ctypes
import random
import weakref
from collections.abc import Mapping

import numpy as np
import pytest
import torch

from ckpt.errors import LayoutMismatch, UnsupportedState
from ckpt.format.layout import Layout, lay_out
from ckpt.format.shards import DTYPES, Box, Leaf, Shard, whole
from ckpt.leaves import Flat, Flattener, LiveShard
from ckpt.leaves.tensors import as_bits
from ckpt.saving import capture
from ckpt.saving.capture import SMALL, Capturer

Bytes = np.ndarray


def live(path: str, tensor: torch.Tensor, cls: str = "parameter") -> LiveShard:
    leaf = Leaf(path, cls, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
    return LiveShard(Shard(leaf, whole(leaf.shape)), tensor)


def flat_of(*shards: LiveShard) -> Flat:
    return Flat(tuple(sorted(shards, key=lambda one: one.shard)), {}, {})


def flat_of_tensors(tensors: Mapping[str, torch.Tensor]) -> Flat:
    return flat_of(*(live(path, tensor) for path, tensor in tensors.items()))


def layout_of(flat: Flat) -> Layout:
    return lay_out(one.shard for one in flat.shards)


def slot_for(layout: Layout) -> Bytes:
    return np.full(layout.nbytes + 64, 0xEE, np.uint8)


def random_bits(shape: tuple[int, ...], dtype: str, seed: int = 0) -> torch.Tensor:
    """Any bits at all: NaNs of every payload, denormals, -0.0. Booleans hold 0 or 1."""
    size = DTYPES[dtype].size
    count = int(np.prod(shape, dtype=np.int64))
    raw = np.frombuffer(random.Random(seed).randbytes(count * size), np.uint8).copy()
    if dtype == "bool":
        raw &= 1
    return torch.from_numpy(raw).view(getattr(torch, dtype)).view(shape)


def logical_bytes(tensor: torch.Tensor) -> bytes:
    """Row-major bytes, element by element: nothing here is shared with the code under test."""
    size, storage = tensor.dtype.itemsize, tensor.untyped_storage()
    if not tensor.numel():
        return b""
    memory = ctypes.string_at(storage.data_ptr(), storage.nbytes())
    strides = [stride * size for stride in tensor.stride()]
    return np.ndarray(tensor.shape, f"V{size}", memory, tensor.storage_offset() * size, strides).tobytes()


def check(layout: Layout, flat: Flat, slot: Bytes) -> None:
    held = {one.shard.leaf.path: one for one in flat.shards}
    for region in layout.regions:
        one = held[region.shard.leaf.path]
        tensor = one.tensor
        if region.shard.box != one.shard.box:
            first = region.shard.box.offsets[0] - one.shard.box.offsets[0]
            tensor = tensor[first : first + region.shard.box.lengths[0]]
        found = slot[region.start : region.start + region.nbytes].tobytes()
        assert found == logical_bytes(tensor), region.shard


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_every_dtype_is_copied_bit_by_bit_in_logical_order(dtype: str) -> None:
    """I1, I3"""
    tensors = {
        "flat": random_bits((77,), dtype, 1),
        "matrix": random_bits((9, 14), dtype, 2),
        "scalar": random_bits((1,), dtype, 3)[0],
        "empty": random_bits((1, 3), dtype)[:0],
        "transposed": random_bits((12, 7), dtype, 4).t(),
        "strided": random_bits((30,), dtype, 5)[1::3],
        "offset": random_bits((31,), dtype, 6)[3:20],
        "channels_last": random_bits((2, 3, 4, 5), dtype, 7).permute(0, 3, 1, 2),
        "large": random_bits((SMALL // DTYPES[dtype].size // 64 + 3, 64), dtype, 8),
        "large_t": random_bits((64, 70), dtype, 9).t(),
    }
    flat = flat_of_tensors(tensors)
    layout = layout_of(flat)
    capturer = Capturer(layout)
    for _ in range(2):
        slot = slot_for(layout)
        assert capturer.take(flat, slot) == sum(region.nbytes for region in layout.regions)
        check(layout, flat, slot)
        assert (slot[layout.nbytes :] == 0xEE).all()


def test_owned_rows_of_a_replica_are_taken_from_the_middle_of_the_tensor() -> None:
    tensor, column = torch.randn(400, 33), torch.randn(33, 400).t()
    shards = {one.shard.leaf.path: one.shard for one in flat_of_tensors({"w": tensor, "t": column}).shards}
    flat = flat_of_tensors({"w": tensor, "t": column, "not_mine": torch.randn(5000)})
    for start, stop in ((0, 100), (100, 390), (390, 400)):
        layout = lay_out(Shard(shard.leaf, Box((start, 0), (stop - start, 33))) for shard in shards.values())
        slot = slot_for(layout)
        Capturer(layout).take(flat, slot)
        check(layout, flat, slot)


def test_rows_are_counted_from_the_shard_this_rank_holds() -> None:
    leaf = Leaf("w", "parameter", "float32", (1000, 40))
    held = LiveShard(Shard(leaf, Box((600, 0), (200, 40))), torch.randn(200, 40))
    layout = lay_out([Shard(leaf, Box((650, 0), (100, 40)))])
    slot = slot_for(layout)
    Capturer(layout).take(flat_of(held), slot)
    assert slot[: layout.nbytes].tobytes() == held.tensor[50:150].numpy().tobytes()


def test_what_changes_after_take_is_not_in_the_buffer() -> None:
    """B1: one instant, for large and small, contiguous and other tensors, and for arrays."""
    array = np.arange(50.0)
    tensors = {
        "large": torch.zeros(300, 300),
        "small": torch.zeros(3),
        "scalar": torch.tensor(1.0),
        "turned": torch.zeros(200, 100).t(),
        "array": torch.from_numpy(array),
    }
    flat = flat_of_tensors(tensors)
    layout = layout_of(flat)
    slot = slot_for(layout)
    Capturer(layout).take(flat, slot)
    before = slot.copy()
    for tensor in tensors.values():
        tensor.add_(1)
    assert array[0] == 1
    assert (slot == before).all()


def test_later_saves_see_later_values_in_either_buffer() -> None:
    """B2: Adam's step is a 0-dim tensor changed in place."""
    tensors = {f"t.{n}": torch.zeros(n % 5 + 1) for n in range(200)} | {"step": torch.tensor(0.0)}
    flat = flat_of_tensors(tensors)
    layout = layout_of(flat)
    capturer = Capturer(layout)
    slots = [slot_for(layout), slot_for(layout)]
    for step in range(5):
        for tensor in tensors.values():
            tensor.fill_(step)
        capturer.take(flat, slots[step % 2])
        check(layout, flat, slots[step % 2])


def test_tensors_replaced_or_moved_between_saves_are_found_again() -> None:
    generator = torch.Generator().manual_seed(3)
    tensors = {f"t.{n}": torch.randn(n % 7 + 1, 4, generator=generator) for n in range(60)}
    tensors["big"] = torch.randn(300, 100, generator=generator)
    flat = flat_of_tensors(tensors)
    layout = layout_of(flat)
    capturer = Capturer(layout)
    slots = [slot_for(layout), slot_for(layout)]
    for n in range(12):
        name = f"t.{5 * n}"
        match n % 4:
            case 0:  # another tensor object
                tensors[name] = torch.randn(tensors[name].shape, generator=generator)
                flat = flat_of_tensors(tensors)
            case 1:  # the same object over other memory
                tensors[name].set_(torch.randn(tensors[name].shape, generator=generator))
            case 2:  # another order in memory: it can no longer be gathered
                rows, columns = tensors[name].shape
                tensors[name] = torch.randn(columns, rows, generator=generator).t()
                flat = flat_of_tensors(tensors)
            case _:
                tensors["big"] = torch.randn(100, 300, generator=generator).t()
                flat = flat_of_tensors(tensors)
        capturer.take(flat, slots[n % 2])
        check(layout, flat, slots[n % 2])


def test_views_are_kept_while_nothing_changed() -> None:
    flat = flat_of_tensors({f"t.{n}": torch.randn(5) for n in range(100)})
    layout = layout_of(flat)
    capturer = Capturer(layout)
    slot = slot_for(layout)
    capturer.take(flat, slot)
    views, places = list(capturer._views), capturer._target(slot)
    capturer.take(flat, slot)
    capturer.take(Flat(tuple(flat.shards), {}, {}), slot)
    assert all(a is b for a, b in zip(views, capturer._views, strict=True))
    assert capturer._target(slot) is places


def test_thousands_of_small_tensors_take_few_calls() -> None:
    sizes = random.Random(1)
    tensors: dict[str, LiveShard] = {}
    for n in range(500):
        for cls in ("parameter", "slot:exp_avg"):
            path = f"{cls}.{n}"
            tensors[path] = live(path, torch.randn(sizes.randint(64, 3000)), cls)
        tensors[f"step.{n}"] = live(f"step.{n}", torch.tensor(float(n)), "slot:step")
    flat = flat_of(*tensors.values())
    layout = layout_of(flat)
    capturer = Capturer(layout)
    slot = slot_for(layout)
    capturer.take(flat, slot)
    check(layout, flat, slot)
    assert len(capturer._runs) < 70


def test_only_the_two_buffers_in_use_are_remembered() -> None:
    flat = flat_of_tensors({"w": torch.randn(10)})
    layout = layout_of(flat)
    capturer = Capturer(layout)
    slots = [slot_for(layout) for _ in range(4)]
    for slot in slots:
        capturer.take(flat, slot)
        check(layout, flat, slot)
    assert len(capturer._targets) == 2


def test_freed_memory_is_refused_and_not_read() -> None:
    tensor = torch.randn(1000)
    flat = flat_of_tensors({"w": tensor, "v": torch.randn(4)})
    layout = layout_of(flat)
    capturer = Capturer(layout)
    slot = slot_for(layout)
    capturer.take(flat, slot)
    tensor.untyped_storage().resize_(0)
    for _ in range(2):
        with pytest.raises(UnsupportedState, match="w: its memory was freed") as caught:
            capturer.take(flat, slot)
        assert caught.value.leaf == "w"
    tensor.untyped_storage().resize_(4000)
    tensor.fill_(3)
    capturer.take(flat, slot)
    check(layout, flat, slot)


@pytest.mark.parametrize(
    "other",
    [{"v": torch.zeros(8)}, {"w": torch.zeros(9)}, {"w": torch.zeros(8, dtype=torch.float64)}],
)
def test_a_state_that_is_not_the_layouts_is_refused_by_name(other: dict[str, torch.Tensor]) -> None:
    flat = flat_of_tensors({"w": torch.zeros(8)})
    layout = layout_of(flat)
    capturer = Capturer(layout)
    slot = slot_for(layout)
    capturer.take(flat, slot)
    with pytest.raises(LayoutMismatch, match=r"^w: ") as caught:
        capturer.take(flat_of_tensors(other), slot)
    assert list(caught.value.changed) == ["w"]
    capturer.take(flat, slot)
    check(layout, flat, slot)


def test_a_buffer_that_is_too_small_is_refused() -> None:
    flat = flat_of_tensors({"w": torch.zeros(100)})
    layout = layout_of(flat)
    with pytest.raises(ValueError, match="a buffer of 399 bytes; expected 400"):
        Capturer(layout).take(flat, np.zeros(399, np.uint8))


def test_an_empty_state_copies_nothing() -> None:
    flat = flat_of_tensors({"e": torch.zeros(0, 4)})
    assert Capturer(layout_of(flat)).take(flat, np.zeros(0, np.uint8)) == 0


def test_bits_are_views_and_never_copies() -> None:
    tensor = torch.randn(4, 6, dtype=torch.complex128)
    assert as_bits(tensor).data_ptr() == tensor.data_ptr()
    assert as_bits(tensor.t()).shape == (6, 4, 2) and as_bits(tensor.t()).dtype == torch.int64
    assert as_bits(torch.tensor(True)).shape == (1,)


def test_a_training_step_after_take_changes_nothing_in_the_buffer() -> None:
    """B2: real leaves, Adam's step counters and BatchNorm's buffers included."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters())

    def train() -> None:
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().sum().backward()
        optimizer.step()

    train()
    flattener = Flattener({"model": model, "optimizer": optimizer})
    flat = flattener.flatten()
    layout = layout_of(flat)
    capturer = Capturer(layout)
    slots = [slot_for(layout), slot_for(layout)]
    for n in range(4):
        capturer.take(flattener.flatten(), slots[n % 2])
        check(layout, flattener.flatten(), slots[n % 2])
        before = slots[n % 2].copy()
        train()
        assert (slots[n % 2] == before).all()
        assert not np.array_equal(before, slots[1 - n % 2])


class FakeCudart:
    """Stands for the CUDA runtime, which is not here; remembers what it was asked."""

    class cudaError:  # noqa: N801 - torch's name
        success = 0

    def __init__(self, answer: int) -> None:
        self.answer = answer
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        if self.answer == 0:
            self.registered[address] = nbytes
        return self.answer

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.registered[address]
        return 0


def test_pages_are_locked_as_long_as_the_buffer_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    cudart = FakeCudart(0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    array = np.zeros(4096, np.uint8)
    target = capture._Target(array, [])
    capture._pin(target)
    assert list(cudart.registered.values()) == [4096]
    address = weakref.ref(array)
    del array
    assert address() is not None
    del target
    assert cudart.registered == {} and address() is None


def test_where_pages_cannot_be_locked_a_warning_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cudart = FakeCudart(712)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(capture, "_clear_error", lambda: None)
    target = capture._Target(np.zeros(4096, np.uint8), [])
    capture._pin(target)
    assert "cannot lock 4096 bytes of host memory (712)" in caplog.text
    del target
    assert cudart.registered == {}
