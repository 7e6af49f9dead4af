"""torch's own files: what `torch.load` gives has the bits that were saved; what names code is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn

from ckpt.format.shards import DTYPES
from ckpt.history.clock import SystemClock
from ckpt.history.runs import identity
from ckpt.saving.inward import store_snapshot
from recovery.foreign import Refused
from recovery.foreign_torch import read_torch, write_torch
from recovery.outward import open_export
from storage_backends.base import Store
from storage_backends.memory import MemoryStore
from tests.support.foreign import bits, loaded, odd, written

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def taken_in(source: Path) -> Store:
    store = MemoryStore()
    found = read_torch(source)
    store_snapshot(
        store, SystemClock(), identity(None), 7, found.tensors, values=found.values, aliases=found.aliases
    )  # fmt: skip
    return store


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("mmap", [False, True])
def test_torch_load_finds_the_bits_that_were_saved(tmp_path: Path, ranks: int, mmap: bool) -> None:
    store = MemoryStore()
    leaves = odd(sorted(DTYPES))
    export = open_export(store, written(store, leaves, ranks=ranks), "model")
    assert write_torch(export, tmp_path / "out.pt") == []
    found = torch.load(tmp_path / "out.pt", weights_only=True, mmap=mmap)
    assert found.keys() == {*(name.removeprefix("model.") for name in leaves), "tied"}
    for name, raw in leaves.items():
        assert bits(found[name.removeprefix("model.")]).endswith(raw.data), name
    assert found["tied"].data_ptr() == found["large"].data_ptr()


def test_everything_comes_back_values_and_classes_too(tmp_path: Path) -> None:
    store = MemoryStore()
    write_torch(open_export(store, written(store, odd(sorted(DTYPES)))), tmp_path / "all.pt")
    assert torch.load(tmp_path / "all.pt", weights_only=True)["best"] == 0.5
    assert loaded(taken_in(tmp_path / "all.pt")) == loaded(store)


def test_views_and_scattered_tensors_come_in_as_they_are_seen(tmp_path: Path) -> None:
    base = torch.arange(6000.0).reshape(60, 100)
    state = {"t": base.t(), "part": base[3:5, 10:20], "same": base, "again": base, "every": base.flatten()[::7]}
    torch.save(state, tmp_path / "x.pt")
    found = loaded(taken_in(tmp_path / "x.pt"))
    assert found == {name: bits(tensor) for name, tensor in state.items()}
    assert read_torch(tmp_path / "x.pt").aliases == {"again": "same"}


def test_a_checkpoint_of_a_loop_comes_in_whole(tmp_path: Path) -> None:
    """State dicts of modules as modules, anything else as a tree."""
    import ckpt

    model = nn.Linear(5, 7)
    state = {"model": model.state_dict(), "extra": {"ema": torch.ones(3), "n": 4}, "epoch": 3}
    torch.save(state, tmp_path / "x.pt")
    here = {"model": nn.Linear(5, 7), "extra": {"ema": torch.zeros(3), "n": 0}, "epoch": 0}
    ckpt.load_into(taken_in(tmp_path / "x.pt"), here)
    assert torch.equal(here["model"].weight, model.weight)  # type: ignore[attr-defined]
    assert (here["epoch"], here["extra"]["n"], here["extra"]["ema"].tolist()) == (3, 4, [1, 1, 1])  # type: ignore[index]


class Malicious:
    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("/tmp/ckpt-was-here",)


def test_a_file_that_names_code_is_refused_and_runs_nothing(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3), "x": Malicious()}, tmp_path / "x.pt")
    with pytest.raises(Refused, match=r"x\.pt: refused by torch's weights-only reader"):
        read_torch(tmp_path / "x.pt")
    assert not Path("/tmp/ckpt-was-here").exists()


def test_files_that_cannot_be_taken_in_say_why(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"w": torch.ones(3)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(Refused, match=r"before torch 1\.6"):
        read_torch(path)
    torch.save([torch.ones(3)], path)
    with pytest.raises(Refused, match="expected a dict"):
        read_torch(path)
    torch.save({"w": torch.ones(3).to_sparse()}, path)
    with pytest.raises(Refused, match="w"):
        read_torch(path)
    torch.save({"w": torch.ones(()).expand(10**6, 10**6)}, path)
    with pytest.raises(Refused, match="save a copy"):
        read_torch(path)
    torch.save({"w": torch.ones(30_000)}, path)
    path.write_bytes(path.read_bytes()[:60_000])
    with pytest.raises(Refused):
        read_torch(path)
    with pytest.raises(Refused, match="cannot be read"):
        read_torch(tmp_path / "nowhere")
