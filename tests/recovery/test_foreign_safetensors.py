"""safetensors: what other people's readers open has the bits that were saved, and comes back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from ckpt.history.clock import SystemClock
from ckpt.history.runs import identity
from ckpt.saving.inward import store_snapshot
from recovery import outward
from recovery.foreign import Refused
from recovery.foreign_safetensors import INDEX, NAMES, read_safetensors, write_safetensors
from recovery.outward import open_export
from storage_backends.base import Store
from storage_backends.memory import MemoryStore
from tests.support.foreign import bits, loaded, odd, written

# The reader in Python has no name for it; the one in Rust, which this library's format is, has.
READABLE = sorted(NAMES.keys() - {"float8_e8m0fnu"})


def taken_in(source: Path) -> Store:
    store = MemoryStore()
    found = read_safetensors(source)
    store_snapshot(
        store, SystemClock(), identity(None), 7, found.tensors, values=found.values, aliases=found.aliases
    )  # fmt: skip
    return store


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_reference_reader_finds_the_bits_that_were_saved(tmp_path: Path, ranks: int) -> None:
    store = MemoryStore()
    leaves = odd(READABLE)
    id_ = written(store, leaves, ranks=ranks)
    (path,) = write_safetensors(open_export(store, id_, "model"), tmp_path / "out")
    found = load_file(path)
    assert found.keys() == {name.removeprefix("model.") for name in leaves}
    for name, raw in leaves.items():
        assert bits(found[name.removeprefix("model.")]).endswith(raw.data)
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "tied": "large"}


def test_above_the_limit_there_are_several_files_and_an_index(tmp_path: Path) -> None:
    store = MemoryStore()
    leaves = odd(["float32", "int8"])
    export = open_export(store, written(store, leaves), "model")
    paths = write_safetensors(export, tmp_path / "out", limit=1000)
    assert [path.name for path in paths] == [f"model-{n:05d}-of-00003.safetensors" for n in (1, 2, 3)]
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(len(raw.data) for raw in leaves.values())
    assert set(index["weight_map"]) == {name.removeprefix("model.") for name in leaves}
    for name, file in index["weight_map"].items():
        assert bits(load_file(tmp_path / "out" / file)[name]).endswith(leaves[f"model.{name}"].data)
    expected = {name: value for name, value in loaded(store).items() if name.startswith("model.")}
    moved = {f"model.{name}": value for name, value in loaded(taken_in(tmp_path / "out")).items()}
    assert moved == expected


@pytest.mark.parametrize("window", [outward.WINDOW, 4000])
def test_everything_comes_back_values_and_classes_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    monkeypatch.setattr(outward, "WINDOW", window)
    store = MemoryStore()
    id_ = written(store, odd(sorted(NAMES)))
    write_safetensors(open_export(store, id_), tmp_path / "all.safetensors")
    found = read_safetensors(tmp_path / "all.safetensors")
    assert {t.shard.leaf.path: t.shard.leaf.cls for t in found.tensors}["optimizer.m"] == "slot:exp_avg"
    assert loaded(taken_in(tmp_path / "all.safetensors")) == loaded(store)


def test_a_file_of_others_is_restored_into_a_model(tmp_path: Path) -> None:
    import ckpt

    there = nn.Linear(30, 40)
    save_file(there.state_dict(), tmp_path / "model.safetensors")
    store = MemoryStore()
    arrival = read_safetensors(tmp_path).named("model")
    store_snapshot(store, SystemClock(), identity(None), 0, arrival.tensors, values={}, aliases={})
    here = nn.Linear(30, 40)
    assert ckpt.load_into(store, {"model": here}).step == 0
    assert all(torch.equal(a, b) for a, b in zip(there.parameters(), here.parameters(), strict=True))


def test_what_the_format_has_no_name_for_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    store = MemoryStore()
    export = open_export(store, written(store, odd(["complex128"])))
    with pytest.raises(ValueError, match=r"model\.of\.complex128: safetensors has no complex128"):
        write_safetensors(export, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_files_that_are_not_whole_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"w": torch.arange(100)}, path)
    whole = path.read_bytes()
    for data in (
        b"",
        whole[:5],
        whole[:40],
        whole[:-1],
        whole.replace(b"I64", b"I6x"),
        whole.replace(b"800]", b"801]"),
    ):
        path.write_bytes(data)
        with pytest.raises(Refused, match=r"x\.safetensors"):
            read_safetensors(path)
    (tmp_path / INDEX).write_text('{"weight_map": {"w": "../x.safetensors"}}')
    with pytest.raises(Refused, match="not in its own folder"):
        read_safetensors(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(Refused, match=r"no \.safetensors file"):
        read_safetensors(tmp_path / "empty")
