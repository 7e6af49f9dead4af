"""Journaled steps from the command line: listed, compared and exported as snapshots are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckpt as library
from ckpt.errors import NoSnapshot
from ckpt.history.catalog import read_history
from recovery.verify import verify
from storage_backends import open_store
from tests.cli.conftest import Ckpt
from tests.support.journals import job
from tests.support.stores import flipped
from tests.support.training import Training


def test_a_journaled_step_is_listed_compared_and_exported_as_a_snapshot_is(ckpt: Ckpt, tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    seen: dict[int, dict[str, bytes]] = {}
    training = Training()
    job(store, training, 8, each=lambda step: seen.update({step: training.bytes()}))

    listed = ckpt("list", store, "--json")
    assert {key.split("-")[-1]: step for key, step in listed.json["journal"].items()} == {
        "000000000000": 8, "000000000005": 8,
    }  # fmt: skip
    assert "journal to step 8" in ckpt("list", store).out

    found = ckpt("diff", store, "5", "7", "--json")
    assert found.code == 0, found.err
    assert not found.json["equal"] and found.json["b"].endswith("-000000000007")
    assert ckpt("diff", store, "5", "9").code == 2

    out = tmp_path / "step7.pt"
    assert ckpt("export", store, "7", out, "--to", "torch").code == 0
    exported = torch.load(out, weights_only=True)
    assert exported["model.inp.weight"].numpy().tobytes() == seen[7]["inp.weight"]
    assert not [id_ for id_ in read_history(open_store(store)).snapshots if id_.step == 7], "nothing is written"


def test_a_history_compares_journaled_steps(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    job(store, Training(), 8)
    history = library.History(store)
    found = history.diff(5, 7)
    assert {leaf.path for leaf in found.leaves if leaf.verdict == "changed"} >= {"model.inp.weight", "model.out.bias"}
    assert (found.a.step, found.b.step) == (5, 7)
    assert history.diff(7, 7).equal and not history.diff("1/6", 7).equal
    with pytest.raises(NoSnapshot):
        history.diff(5, 9)


def test_a_plan_says_what_will_be_replayed(ckpt: Ckpt, tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    job(store, Training(), 8)
    sizes = [entry.size for entry in open_store(store).list("journal/")]
    assert ckpt("plan", store, "--json").json["replay"] == {"last": 8, "bytes": sum(sizes[5:])}
    assert "replay steps 6 to 8 of 1 saved ranks" in ckpt("plan", store).out
    assert ckpt("plan", store, "--step", "0", "--json").json["replay"] == {"last": 8, "bytes": sum(sizes)}


def test_verify_knows_segments_and_finds_any_flip_in_them(ckpt: Ckpt, tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "store"))
    job(store, Training(), 8)
    said = ckpt("verify", tmp_path / "store", "--deep", "--json")
    assert said.code == 0 and not said.json["findings"], said.out
    for n, entry in enumerate(store.list("journal/")):
        whole = store.get(entry.key)
        flipped(store, entry.key, 8 * (n * len(whole) // 8) + n % 8)
        found = [f for f in verify(store, deep=True) if f.level == "error"]
        assert [f.key for f in found] == [entry.key] and found[0].steps == (n + 1,)
        assert "snapshots are not touched by it" in found[0].text
        store.put(entry.key, whole)
    store.put("journal/000001-0123abcd/00000/odd.segment", b"?")
    assert any("not an object of this format" in f.text for f in verify(store))
