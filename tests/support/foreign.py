"""States as the formats of others must carry them: every dtype, odd shapes, tied and sharded tensors; as bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

import ckpt
from ckpt.format.names import SnapshotId
from ckpt.format.shards import DTYPES
from ckpt.format.values import encode
from storage_backends.base import Store
from tests.support.stores import DirectWriter, Each, Raw, State


def odd(dtypes: list[str]) -> dict[str, Raw]:
    """A leaf of each dtype (random bits: NaNs with payloads among them), large, empty and scalar ones."""
    rng = np.random.default_rng(0)
    found = {}
    for dtype in dtypes:
        data = rng.bytes(60 * DTYPES[dtype].size) if dtype != "bool" else rng.integers(0, 2, 60, np.uint8).tobytes()
        found[f"model.of.{dtype}"] = Raw(dtype, (3, 20), data)
    found["model.large"] = Raw("bfloat16", (300, 40), rng.bytes(24_000))
    found["model.empty"] = Raw("float32", (0, 3), b"")
    found["model.scalar"] = Raw("int64", (), rng.bytes(8))
    return found


def written(store: Store, leaves: State, *, ranks: int = 1) -> SnapshotId:
    """Those leaves, a per-rank one, a tied name and values, by the direct writer in small chunks."""
    writer = DirectWriter(store, ranks=ranks, chunk=4096, classes={"optimizer.m": "slot:exp_avg"})
    writer.begin()
    noise = Each(tuple(np.full(3, rank, np.int32) for rank in range(ranks)))
    values = [{"best": encode(0.5, "best"), "$random": encode([rank], "r")} for rank in range(ranks)]
    state = {**leaves, "optimizer.m": np.arange(2000.0), "noise": noise}
    return writer.step(10, state, values=values, aliases={"model.tied": "model.large"})


def bits(value: Any) -> bytes:
    """The bytes of a tensor or array, with what they are."""
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value)
    raw = value.detach().contiguous().reshape(-1)
    data = raw.view(torch.uint8).numpy().tobytes() if raw.numel() else b""
    return f"{value.dtype} {tuple(value.shape)} ".encode() + data


def loaded(store: Store) -> dict[str, Any]:
    """Everything on a store's newest snapshot: tensors as bits, values as they are; random states left out."""
    found: Mapping[str, Any] = ckpt.load(store)
    return {
        path: bits(value) if isinstance(value, torch.Tensor | np.ndarray) else value
        for path, value in found.items()
        if not path.startswith("$")
    }
