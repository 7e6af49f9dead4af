"""`ckpt import`: somebody else's file as the first snapshot of a store."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import ckpt as library
from tests.cli.conftest import Ckpt


class Malicious:
    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("/tmp/ckpt-import-was-here",)


def test_a_file_becomes_the_named_step(ckpt: Ckpt, tmp_path: Path) -> None:
    torch.save({"a.weight": torch.arange(3000), "b": torch.ones(2)}, tmp_path / "x.pt")
    said = ckpt("import", tmp_path / "s", tmp_path / "x.pt", "--from", "torch", "--names", "model", "--step", 500)
    assert (said.code, said.err) == (0, "")
    assert said.out == f"step 500: 2 tensors, 24.0 kB, on {tmp_path / 's'}\n"
    assert torch.equal(library.load(tmp_path / "s", 500)["model.a.weight"], torch.arange(3000))
    assert ckpt("verify", tmp_path / "s", "--deep").code == 0
    said = ckpt("import", tmp_path / "s", tmp_path / "x.pt", "--from", "torch")
    assert said.code == 2 and "already holds checkpoints" in said.err


@pytest.mark.parametrize("via", ["safetensors", "torch", "dcp"])
def test_out_and_in_again_is_the_same_training(ckpt: Ckpt, tmp_path: Path, via: str) -> None:
    """Import, restore, save: equal bits; optimizer, plain values and tied names included."""

    def made() -> dict[str, object]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(40, 40, bias=False), torch.nn.Linear(40, 40, bias=False))
        model[1].weight = model[0].weight
        optimizer = torch.optim.AdamW(model.parameters())
        return {"model": model, "optimizer": optimizer, "best": 0.0}

    def bits(store: Path) -> dict[str, object]:
        return {
            path: value.tolist() if isinstance(value, torch.Tensor) else value
            for path, value in library.load(store).items()
            if not path.startswith("$")
        }

    state = made()
    state["model"](torch.ones(2, 40)).sum().backward()  # type: ignore[operator]
    state["optimizer"].step()  # type: ignore[attr-defined]
    with library.Checkpointer(tmp_path / "one", {**state, "best": 0.25}, mirror="off") as saver:
        saver.save(7).wait()
    assert ckpt("export", tmp_path / "one", 7, tmp_path / "out", "--to", via).code == 0
    assert ckpt("import", tmp_path / "two", tmp_path / "out", "--from", via, "--step", 7).code == 0
    with library.Checkpointer(tmp_path / "two", made(), mirror="off") as saver:
        assert saver.restore() == 7
        saver.save(8).wait()
    assert bits(tmp_path / "two") == bits(tmp_path / "one")


def test_a_file_that_names_code_leaves_no_store(ckpt: Ckpt, tmp_path: Path) -> None:
    torch.save({"x": Malicious()}, tmp_path / "x.pt")
    said = ckpt("import", tmp_path / "s", tmp_path / "x.pt", "--from", "torch")
    assert said.code == 2 and "weights-only" in said.err
    assert not (tmp_path / "s").exists() and not Path("/tmp/ckpt-import-was-here").exists()


def test_what_is_left_out_is_told(ckpt: Ckpt, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "epoch": 3}, tmp_path / "x.pt")
    said = ckpt("import", tmp_path / "s", tmp_path / "x.pt", "--from", "torch", "--names", "model", "--json")
    assert said.json["left_out"] == ["value epoch: a model has tensors only"]
    torch.save({}, tmp_path / "y.pt")
    assert "no tensors" in ckpt("import", tmp_path / "t", tmp_path / "y.pt", "--from", "torch").err
