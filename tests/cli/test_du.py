"""What `ckpt du` says of a store, and that removing a step frees what it said."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ckpt.format.names import packs_prefix
from ckpt.history.clock import SystemClock
from ckpt.history.retention import Keep, execute, plan_prune
from storage_backends.local import LocalStore
from tests.cli.conftest import Ckpt
from tests.cli.living import chain
from tests.support.stores import DirectWriter, make_store


def size(store: LocalStore) -> int:
    return sum(entry.size for entry in store.list(""))


def test_own_and_shared_are_sizes_of_packs(ckpt: Ckpt, tmp_path: Path) -> None:
    store, ids = chain(tmp_path, 3)
    found = ckpt("du", tmp_path, "--json").json
    packs = {entry.key: entry.size for entry in store.list("packs/")}
    assert found["packs"] == sum(packs.values()) and found["unnamed"] == 0
    for step, id_ in zip(found["steps"], ids, strict=True):
        assert step["own"] == sum(n for key, n in packs.items() if key.startswith(packs_prefix(id_)))
    first, second, third = found["steps"]
    assert first["shared"] == first["own"], "all of the keyframe is needed by what came after"
    assert second["shared"] == first["own"] + second["own"]
    assert third["freed"] == third["own"] + third["documents"], "nothing leans on the newest"


def test_removing_a_step_frees_what_was_said(ckpt: Ckpt, tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    ids = make_store(store, [{"w": np.arange(3000.0) * n} for n in range(3)], deltas=False)
    found = ckpt("du", tmp_path, "--json").json
    assert found["steps"][0]["freed"] > 20_000
    before = size(store)
    plan = plan_prune(store, Keep(), grace=0, remove=[ids[0]])
    execute(plan, store, clock=SystemClock())
    assert before - size(store) == found["steps"][0]["freed"]


def test_piped_it_is_two_tables_and_a_line(ckpt: Ckpt, tmp_path: Path) -> None:
    chain(tmp_path, 2)
    said = ckpt("du", tmp_path)
    assert (said.code, said.err) == (0, "")
    steps, total, classes = said.out.split("\n\n")
    assert [line.split()[:2] for line in steps.splitlines()] == [["step", "gen"], ["10", "1"], ["20", "1"]]
    assert total.endswith("for 2 snapshots")
    assert classes.splitlines()[0] == "step 20, generation 1:"
    assert classes.splitlines()[2].split()[:4] == ["array", "2", "8.2", "kB"]


def test_classes_are_those_of_the_named_step(ckpt: Ckpt, tmp_path: Path) -> None:
    writer = DirectWriter(LocalStore(tmp_path), classes={"w": "parameter", "m": "slot:exp_avg"})
    writer.begin()
    writer.step(1, {"w": np.ones(2000)})
    writer.step(2, {"w": np.ones(2000), "m": np.zeros(3000)})
    assert [c["class"] for c in ckpt("du", tmp_path, "--json").json["classes"]] == ["slot:exp_avg", "parameter"]
    (only,) = ckpt("du", tmp_path, 1, "--json").json["classes"]
    assert (only["class"], only["leaves"], only["size"]) == ("parameter", 1, 16000)
    assert ckpt("du", tmp_path, 3).code == 2


def test_leftovers_are_told(ckpt: Ckpt, tmp_path: Path) -> None:
    writer = DirectWriter(LocalStore(tmp_path))
    writer.begin()
    assert ckpt("du", tmp_path).out.startswith("no snapshots on ")
    writer.step(1, {"w": np.ones(2000)})
    writer.step(2, {"w": np.zeros(2000)}, commit=False)
    assert "no snapshot names " in ckpt("du", tmp_path).out
