"""`ckpt export`: a snapshot as somebody else's file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from ckpt.format.values import encode
from storage_backends.local import LocalStore
from tests.cli.conftest import Ckpt
from tests.cli.living import chain
from tests.support.stores import DirectWriter


@pytest.fixture
def store(tmp_path: Path) -> Path:
    writer = DirectWriter(LocalStore(tmp_path / "store"))
    writer.begin()
    state = {"model.h.0.w": np.arange(3000.0), "model.b": np.ones(4, np.float32), "other": np.ones(3)}
    writer.step(10, state, values=[{"best": encode(0.5, "b"), "when": encode(range(3), "w")}])
    return tmp_path / "store"


def test_safetensors_under_the_names_of_the_model(ckpt: Ckpt, store: Path, tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    out = tmp_path / "out"
    said = ckpt("export", store, 10, out, "--to", "safetensors", "--names", "model")
    assert (said.code, said.err) == (0, "")
    assert said.out == f"step 10: 2 tensors, 24.0 kB, in {out / 'model.safetensors'}\n"
    found = load_file(out / "model.safetensors")
    assert found.keys() == {"h.0.w", "b"} and np.array_equal(found["h.0.w"], np.arange(3000.0))


def test_the_size_of_files_can_be_set(ckpt: Ckpt, store: Path, tmp_path: Path) -> None:
    said = ckpt(
        "export", store, "latest", tmp_path / "o", "--to", "safetensors", "--shard-size", "20kB", "--json",
        "--names", "model",
    )  # fmt: skip
    assert [Path(file).name for file in said.json["files"]] == [
        "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
    ]  # fmt: skip
    assert (said.json["tensors"], said.json["bytes"], said.json["left_out"]) == (["b", "h.0.w"], 24016, [])


def test_what_torch_cannot_hold_is_told(ckpt: Ckpt, store: Path, tmp_path: Path) -> None:
    said = ckpt("export", store, 10, tmp_path / "x.pt", "--to", "torch")
    assert said.code == 0
    assert said.err == "ckpt: 1 value that such files do not hold: when; 'ckpt import' finds them all the same\n"
    assert torch.load(tmp_path / "x.pt", weights_only=True)["best"] == 0.5


def test_dcp_is_a_folder(ckpt: Ckpt, store: Path, tmp_path: Path) -> None:
    assert ckpt("export", store, 10, tmp_path / "d", "--to", "dcp", "--names", "model").code == 0
    assert (tmp_path / "d" / ".metadata").is_file()


@pytest.mark.parametrize("to", ["safetensors", "torch", "dcp"])
def test_damage_and_what_is_there_leave_all_as_it_was(ckpt: Ckpt, tmp_path: Path, to: str) -> None:
    store, _ = chain(tmp_path / "s", 1)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "x").write_text("x")
    said = ckpt("export", tmp_path / "s", 10, tmp_path / "mine", "--to", to)
    assert said.code == 2 and "nothing is overwritten" in said.err
    (pack, *_) = [entry.key for entry in store.list("packs/")]
    store.put(pack, bytes(len(store.get(pack))))
    said = ckpt("export", tmp_path / "s", 10, tmp_path / "out", "--to", to)
    assert said.code == 2 and said.err.startswith("ckpt: step 10, ")
    assert {path.name for path in tmp_path.iterdir()} == {"s", "mine"}


def test_wrong_usage_is_exit_code_2(ckpt: Ckpt, store: Path, tmp_path: Path) -> None:
    for more in (["--to", "zip"], [], ["--to", "torch", "--names", "modle"], ["--to", "torch", "--shard-size", "big"]):
        assert ckpt("export", store, 10, tmp_path / "out", *more).code == 2
    assert ckpt("export", store, 11, tmp_path / "out", "--to", "torch").code == 2
