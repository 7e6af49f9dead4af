from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from ckpt.checksums import BATCH, BLOCK, SMALL, buffers_hash, checksum, checksums
from ckpt.format.shards import DTYPES, Box, Leaf, Shard, whole
from ckpt.leaves import Flat, LiveShard

Q = 0x9E3779B97F4A7C13


def weight(index: int) -> int:
    mask = (1 << 64) - 1
    mixed = (index + 1) * 0x9E3779B97F4A7C15 & mask
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & mask
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & mask
    mixed ^= mixed >> 31
    return (mixed << 18 | index << 1 | 1) & mask


WEIGHTS = [weight(index) for index in range(BLOCK)]


def by_the_book(data: bytes) -> str:
    """The formula of the module's docstring, in Python's own integers."""
    words = np.frombuffer(data + bytes(-len(data) % 4), np.int32).tolist()
    plain = sum(words)
    weighted = sum(word * WEIGHTS[i % BLOCK] * pow(Q, i // BLOCK, 1 << 64) for i, word in enumerate(words))
    return f"{weighted % (1 << 64):016x}{plain % (1 << 64):016x}"


def raw(count: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(random.Random(seed).randbytes(count), np.uint8).copy())


@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 4 * SMALL, 4 * SMALL + 1, 4 * BLOCK, 4 * BLOCK + 4, 12 * BLOCK + 7])
def test_a_checksum_is_what_the_formula_says(count: int) -> None:
    tensor = raw(count, count)
    assert checksum(tensor) == by_the_book(tensor.numpy().tobytes())


def test_many_tensors_at_once_come_out_as_each_alone() -> None:
    rng = random.Random(4)
    tensors = [raw(rng.choice([0, 1, 2, 3, 4, 9, 400, 4001, 4 * SMALL, 4 * SMALL + 8]), n) for n in range(300)]
    assert sum(tensor.nbytes for tensor in tensors if tensor.nbytes <= 4 * SMALL) > 4 * BATCH, "one batch only"
    together = checksums(tensors)
    assert together == [by_the_book(tensor.numpy().tobytes()) for tensor in tensors]
    assert checksums([]) == []


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_only_logical_bytes_count_whatever_the_dtype_and_the_strides(dtype: str) -> None:
    size = DTYPES[dtype].size
    for rows, columns in ((6, 5), (300, 4 * SMALL // 256 + 1)):
        data = raw(rows * columns * size)
        if dtype == "bool":
            data &= 1
        tensor = data.view(getattr(torch, dtype)).view(rows, columns)
        expected = checksum(tensor)
        assert expected == by_the_book(data.numpy().tobytes())
        turned = torch.empty_strided((rows, columns), (1, rows), dtype=torch.uint8)
        if size == 1:
            turned.copy_(data.view(rows, columns))
            assert checksum(turned.view(tensor.dtype)) == expected
        shifted = torch.cat([data[:size], data]).view(tensor.dtype)[1:].view(rows, columns)
        assert checksum(shifted) == expected


@pytest.mark.parametrize("shape", [(2000, 50), (7, 20_000), (3, 5, 7, 1000), (40_000, 3)])
def test_a_large_tensor_in_another_memory_order_is_read_in_row_major_order(shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    expected = checksum(tensor)
    backwards = tensor.permute(*reversed(range(len(shape)))).contiguous().permute(*reversed(range(len(shape))))
    assert not backwards.is_contiguous() and tensor.numel() > SMALL
    assert checksum(backwards) == expected


def test_every_flipped_bit_shows() -> None:
    """Each bit of a small tensor, and seeded ones of a large tensor."""
    small = raw(37)
    wrong = 0
    for at in range(37 * 8):
        flipped = small.clone()
        flipped[at // 8] ^= 1 << at % 8
        wrong += checksum(flipped) == checksum(small)
    large = raw(4 * BLOCK * 2 + 3)
    expected = checksum(large)
    rng = random.Random(2)
    for _ in range(200):
        at = rng.randrange(large.numel() * 8)
        large[at // 8] ^= 1 << at % 8
        wrong += checksum(large) == expected
        large[at // 8] ^= 1 << at % 8
    assert wrong == 0 and checksum(large) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
def test_elements_that_changed_places_show(dtype: torch.dtype) -> None:
    """Zeros of either sign are the hardest: they differ in one bit, the highest."""
    rng = random.Random(3)
    tensor = torch.zeros(600_000 // dtype.itemsize, dtype=dtype)
    marked = torch.tensor(1 if dtype == torch.uint8 else -0.0, dtype=dtype)
    for _ in range(60):
        a, b = rng.sample(range(tensor.numel()), 2)
        one, other = tensor.clone(), tensor.clone()
        one[a] = marked
        other[b] = marked
        assert checksum(one) != checksum(other)


def test_values_that_compare_equal_but_are_not_the_same_bits_differ() -> None:
    """I3"""
    assert checksum(torch.tensor([0.0])) != checksum(torch.tensor([-0.0]))
    quiet, other = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert checksum(quiet) != checksum(other)
    assert checksum(quiet) == checksum(quiet.clone())


def test_the_number_of_threads_does_not_matter() -> None:
    tensor = raw(4 * BLOCK * 3)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = checksum(tensor)
        torch.set_num_threads(4)
        assert checksum(tensor) == one
    finally:
        torch.set_num_threads(before)


# --- buffers


def flat_of(module: nn.Module) -> Flat:
    shards = []
    for cls, named in (("buffer", module.named_buffers()), ("parameter", module.named_parameters())):
        for name, tensor in named:
            leaf = Leaf(f"model.{name}", cls, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            shards.append(LiveShard(Shard(leaf, whole(leaf.shape)), tensor.detach()))
    return Flat(tuple(sorted(shards, key=lambda live: live.shard)), {}, {})


def test_buffers_are_hashed_one_by_one_and_together() -> None:
    flat = flat_of(nn.BatchNorm1d(9))
    total, each = buffers_hash(flat)
    assert sorted(each) == ["model.num_batches_tracked", "model.running_mean", "model.running_var"]
    assert all(0 <= value < 1 << 63 for value in (total, *each.values()))
    assert (total, each) == buffers_hash(flat_of(nn.BatchNorm1d(9)))


def test_a_buffer_that_differs_is_found_by_name_and_one_that_is_not_asked_for_is_not() -> None:
    one, other = nn.BatchNorm1d(9), nn.BatchNorm1d(9)
    other.running_mean[3] = -0.0
    total, each = buffers_hash(flat_of(one))
    changed_total, changed = buffers_hash(flat_of(other))
    assert total != changed_total
    assert [path for path in each if each[path] != changed[path]] == ["model.running_mean"]
    rest = set(each) - {"model.running_mean"}
    assert buffers_hash(flat_of(one), only=rest) == buffers_hash(flat_of(other), only=rest)
    assert buffers_hash(flat_of(one), only=rest)[1].keys() == rest


def test_parameters_sharded_and_per_rank_buffers_do_not_count() -> None:
    norm = nn.BatchNorm1d(4)
    flat = flat_of(norm)
    before = buffers_hash(flat)
    norm.weight.data.fill_(5)
    leaf = Leaf("model.rows", "buffer", "float32", (8,))
    sharded = LiveShard(Shard(leaf, Box((0,), (4,))), torch.zeros(4))
    mine = LiveShard(Shard(replace(leaf, path="model.mine"), whole((8,)), per_rank=True), torch.zeros(8))
    assert buffers_hash(Flat((*flat.shards, sharded, mine), {}, {})) == before


def test_the_memory_order_of_a_buffer_does_not_count() -> None:
    tensor = torch.randn(6, 5)
    leaf = Leaf("b", "buffer", "float32", (6, 5))
    turned = tensor.t().contiguous().t()
    hashes = {buffers_hash(Flat((LiveShard(Shard(leaf, whole((6, 5))), one),), {}, {}))[0] for one in (tensor, turned)}
    assert len(hashes) == 1


def test_a_model_without_buffers_hashes_to_zero() -> None:
    assert buffers_hash(flat_of(nn.Linear(2, 2))) == (0, {})
