"""Folders of torch.distributed.checkpoint: torch loads ours, we read theirs, and run nothing of what they name."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from ckpt.format.shards import DTYPES
from ckpt.history.clock import SystemClock
from ckpt.history.runs import identity
from ckpt.saving.inward import store_snapshot
from recovery import foreign_dcp, outward
from recovery.foreign import Refused
from recovery.foreign_dcp import METADATA, read_dcp, write_dcp
from recovery.outward import open_export
from storage_backends.base import Store
from storage_backends.memory import MemoryStore
from tests.support.foreign import bits, loaded, odd, written

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]


def taken_in(source: Path) -> Store:
    store = MemoryStore()
    found = read_dcp(source)
    store_snapshot(
        store, SystemClock(), identity(None), 7, found.tensors, values=found.values, aliases=found.aliases
    )  # fmt: skip
    return store


@pytest.mark.parametrize(("ranks", "window"), [(1, 1 << 24), (3, 4000)])
def test_torch_loads_the_bits_that_were_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, window: int
) -> None:
    monkeypatch.setattr(foreign_dcp, "FILE", 10_000)
    monkeypatch.setattr(outward, "WINDOW", window)  # a small one cuts the large leaf into many boxes
    store = MemoryStore()
    leaves = odd(sorted(DTYPES.keys() - {"float4_e2m1fn_x2"}))  # torch cannot copy those
    export = open_export(store, written(store, leaves, ranks=ranks), "model")
    assert write_dcp(export, tmp_path / "out") == []
    assert len(list((tmp_path / "out").glob("*.distcp"))) > 3
    state: dict[str, Any] = {
        name.removeprefix("model."): torch.zeros(raw.shape, dtype=getattr(torch, raw.dtype))
        for name, raw in leaves.items()
    }
    state["tied"] = torch.zeros(300, 40, dtype=torch.bfloat16)
    dcp.load(state, checkpoint_id=tmp_path / "out", no_dist=True)
    for name, raw in leaves.items():
        assert bits(state[name.removeprefix("model.")]).endswith(raw.data), name
    assert bits(state["tied"]) == bits(state["large"])


def test_everything_comes_back_values_and_classes_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outward, "WINDOW", 4000)
    store = MemoryStore()
    write_dcp(open_export(store, written(store, odd(sorted(DTYPES)))), tmp_path / "out")
    found = read_dcp(tmp_path / "out")
    assert {t.shard.leaf.path: t.shard.leaf.cls for t in found.tensors}["optimizer.m"] == "slot:exp_avg"
    assert loaded(taken_in(tmp_path / "out")) == loaded(store)


def test_a_folder_of_torch_is_restored_into_a_model(tmp_path: Path) -> None:
    import ckpt

    there = nn.Linear(30, 40)
    dcp.save({"model": there.state_dict(), "epoch": 3, "deep": {"n": [1]}}, checkpoint_id=tmp_path / "x", no_dist=True)
    found = read_dcp(tmp_path / "x")
    assert len(found.left_out) == 1 and found.left_out[0].startswith("value deep.n")
    here = {"model": nn.Linear(30, 40), "epoch": 0}
    ckpt.load_into(taken_in(tmp_path / "x"), here)
    assert torch.equal(here["model"].weight, there.weight)  # type: ignore[attr-defined]
    assert here["epoch"] == 3


class Malicious:
    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("/tmp/ckpt-was-here-too",)


def test_metadata_that_names_code_runs_nothing(tmp_path: Path) -> None:
    (tmp_path / METADATA).write_bytes(pickle.dumps({"state_dict_metadata": Malicious()}))
    with pytest.raises(Refused, match=r"not as torch\.distributed.checkpoint writes it"):
        read_dcp(tmp_path)
    assert not Path("/tmp/ckpt-was-here-too").exists()


def test_folders_that_are_not_whole_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"no checkpoint of torch\.distributed"):
        read_dcp(tmp_path)
    dcp.save({"w": torch.arange(5000)}, checkpoint_id=tmp_path / "x", no_dist=True)
    (data,) = (tmp_path / "x").glob("*.distcp")
    whole = data.read_bytes()
    data.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(Refused, match="distcp"):
        read_dcp(tmp_path / "x")
    data.unlink()
    with pytest.raises(Refused, match="cannot be read"):
        read_dcp(tmp_path / "x")
    record = (tmp_path / "x" / METADATA).read_bytes()
    (tmp_path / "x" / METADATA).write_bytes(record.replace(data.name.encode(), b"../" + data.name.encode()[3:]))
    with pytest.raises(Refused):
        read_dcp(tmp_path / "x")
