"""Whether ranks that should hold equal tensors do, found out where the tensors live (torch).

A checksum reads a tensor once, on its own device, and brings 16 bytes back. Its bytes are taken as 32-bit words w of
the row-major order, in blocks of 2^16, and two sums wrap at 64 bits:

    sum of w            and            sum over blocks b of Q^b * sum over words i of the block of w * c[i]

The weights c are odd, and all differ in their low 17 bits. So a flipped bit always shows: it moves both sums by a
multiple of at most 2^31 and an odd number. And so do two different elements of up to four bytes that changed places
within a block, or at the same place of two blocks: their difference is below 2^32, that of the weights (or of powers of
Q) has few factors of two, and the product is no multiple of 2^64. Other damage escapes with a chance near 2^-64.
Integer sums come out the same in any order, so on any device and for any number of threads. A digest such as xxh3
would need the bytes on the host.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch
import xxhash

from ckpt.format.shards import whole
from ckpt.leaves.tensors import as_bits

if TYPE_CHECKING:
    from ckpt.leaves import Flat

BLOCK = 1 << 16
"""Words whose weights differ. On the CPU a block and its scratch stay in the cache."""

DEVICE_BLOCKS = 64
"""Blocks per kernel on a device: 32 MiB of scratch."""

SMALL = BLOCK // 4
"""Tensors of up to so many words are taken together: kernels per tensor would cost more than its bytes."""

BATCH = 4 * BLOCK
"""Words of small tensors taken together, at most."""

_Q = 0x9E3779B97F4A7C13  # odd, 3 modulo 8: powers of it differ in their low bits as long as they can
_MASK = (1 << 64) - 1


def checksum(tensor: torch.Tensor) -> str:
    """The checksum (32 hex digits) of a tensor's row-major bytes, taken where it lives."""
    return checksums([tensor])[0]


def checksums(tensors: Sequence[torch.Tensor]) -> list[str]:
    """The checksum of each tensor. Many small ones cost few kernels and few transfers; scratch is bounded."""
    sums: list[tuple[int, int]] = [(0, 0)] * len(tensors)
    batches: dict[torch.device, list[int]] = {}
    sizes: dict[torch.device, int] = {}
    for i, tensor in enumerate(tensors):
        count = -(-tensor.nbytes // 4)
        if not count:
            continue
        if count > SMALL:
            sums[i] = _large(tensor)
            continue
        device = tensor.device
        if sizes.get(device, 0) + count > BATCH:
            _small(tensors, batches.pop(device), sums)
            sizes[device] = 0
        batches.setdefault(device, []).append(i)
        sizes[device] = sizes.get(device, 0) + count
    for members in batches.values():
        _small(tensors, members, sums)
    return [f"{weighted & _MASK:016x}{plain & _MASK:016x}" for plain, weighted in sums]


def buffers_hash(flat: Flat, only: Collection[str] | None = None) -> tuple[int, dict[str, int]]:
    """Hashes of the module buffers that this rank holds whole, to find those that differ between ranks (BatchNorm).

    Args:
        flat: the state.
        only: paths to look at; None: all.

    Returns:
        One 63-bit hash of them all (0 if there is none), and the 63-bit hash of each by path.
    """
    held = {
        live.shard.leaf.path: live.tensor
        for live in flat.shards
        if live.shard.leaf.cls == "buffer"
        and not live.shard.per_rank
        and (only is None or live.shard.leaf.path in only)
        and live.shard.box == whole(live.shard.leaf.shape)
    }
    far = [path for path, tensor in held.items() if tensor.device.type != "cpu"]
    texts = dict(zip(far, checksums([held[path] for path in far]), strict=True))
    hashes = {
        path: xxhash.xxh3_64_intdigest(
            texts[path].encode() if path in texts else as_bits(tensor).contiguous().numpy().data
        )
        >> 1
        for path, tensor in sorted(held.items())
    }
    if not hashes:
        return 0, hashes
    table = "".join(f"{path}\0{value:x}\n" for path, value in hashes.items())
    return xxhash.xxh3_64_intdigest(table.encode(errors="surrogatepass")) >> 1, hashes


# --- one large tensor ----------------------------------------------------------------------------------------------


def _large(tensor: torch.Tensor) -> tuple[int, int]:
    """Both sums, block by block; nothing comes to the host before the end."""
    device = tensor.device
    weights = _weights(device)
    blocks = 1 if device.type == "cpu" else DEVICE_BLOCKS
    scratch = torch.empty(blocks * BLOCK, dtype=torch.int64, device=device)
    plain: list[torch.Tensor] = []
    weighted: list[torch.Tensor] = []
    for words in _words(tensor, blocks * BLOCK):
        wide = scratch[: words.numel()].copy_(words)
        plain.append(wide.sum())
        rows, rest = divmod(words.numel(), BLOCK)
        if rows:
            table = wide[: rows * BLOCK].view(rows, BLOCK).mul_(weights)
            weighted.append(table.sum(1))
        if rest:
            weighted.append(wide[rows * BLOCK :].mul_(weights[:rest]).sum().view(1))
    by_block = torch.cat(weighted)
    powers = torch.from_numpy(_powers(by_block.numel())).to(device)
    both = torch.stack([torch.stack(plain).sum(), by_block.mul_(powers).sum()]).tolist()
    return int(both[0]), int(both[1])


def _words(tensor: torch.Tensor, count: int) -> Iterator[torch.Tensor]:
    """The row-major bytes as int32 words, `count` at a time; the last ones padded with zeros."""
    bits = as_bits(tensor)
    size = bits.element_size()
    step = 4 * count // size
    flat = bits.is_contiguous()
    aligned = flat and bits.storage_offset() * size % 4 == 0
    total = bits.numel()
    for start in range(0, total, step):
        stop = min(start + step, total)
        if flat:
            piece = bits[start:stop] if aligned else bits[start:stop].clone()
        else:
            piece = torch.empty(stop - start, dtype=bits.dtype, device=bits.device)
            _gather(bits, start, stop, piece)
        raw = piece.view(torch.uint8)
        if raw.numel() % 4:
            raw = torch.cat([raw, raw.new_zeros(4 - raw.numel() % 4)])
        yield raw.view(torch.int32)


def _gather(bits: torch.Tensor, start: int, stop: int, out: torch.Tensor) -> None:
    """Elements `start` to `stop` of the row-major order into `out`: `contiguous()` would double the tensor."""
    if bits.dim() == 1:
        out.copy_(bits[start:stop])
        return
    row = bits[0].numel()
    first, last = -(-start // row), stop // row
    if first > last:  # inside one row
        _gather(bits[last], start - last * row, stop - last * row, out)
        return
    head = first * row - start
    if head:
        _gather(bits[first - 1], row - head, row, out[:head])
    middle = (last - first) * row
    if middle:
        out[head : head + middle].view(last - first, *bits.shape[1:]).copy_(bits[first:last])
    if head + middle < stop - start:
        _gather(bits[last], 0, stop - last * row, out[head + middle :])


# --- many small tensors --------------------------------------------------------------------------------------------


def _small(tensors: Sequence[torch.Tensor], members: Sequence[int], sums: list[tuple[int, int]]) -> None:
    """Both sums of each member, all on one device, at most one block each, by differences of running sums."""
    device = tensors[members[0]].device
    pieces: list[torch.Tensor] = []
    counts = []
    pad = torch.zeros(4, dtype=torch.uint8, device=device)
    for i in members:
        raw = as_bits(tensors[i]).contiguous().view(-1).view(torch.uint8)
        pieces.append(raw)
        if raw.numel() % 4:
            pieces.append(pad[raw.numel() % 4 :])
        counts.append(-(-raw.numel() // 4))
    ends = np.cumsum(np.array(counts, dtype=np.int64))
    inside = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
    words = torch.cat(pieces).view(torch.int32).to(torch.int64)
    weighted = words * _weights(device)[torch.from_numpy(inside).to(device)]
    last = torch.from_numpy(ends - 1).to(device)
    both = torch.stack([words.cumsum(0)[last], weighted.cumsum(0)[last]]).cpu()
    totals = torch.diff(both, dim=1, prepend=torch.zeros(2, 1, dtype=torch.int64)).tolist()
    for i, plain, heavy in zip(members, *totals, strict=True):
        sums[i] = (plain, heavy)


# --- constants -----------------------------------------------------------------------------------------------------


@lru_cache(maxsize=16)
def _weights(device: torch.device) -> torch.Tensor:
    """2^16 odd 64-bit weights: the index in bits 1 to 17, mixed bits above."""
    index = np.arange(BLOCK, dtype=np.uint64)
    mixed = (index + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    weights = (mixed << np.uint64(18)) | (index << np.uint64(1)) | np.uint64(1)
    return torch.from_numpy(weights.view(np.int64)).to(device)


def _powers(count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Q^0 … Q^(count - 1), wrapped."""
    factors = np.full(count, _Q, dtype=np.uint64)
    factors[0] = 1
    return np.multiply.accumulate(factors).view(np.int64)
