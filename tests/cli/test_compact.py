"""`ckpt compact`: shows what it will do, and does that; what is rewritten, and why, is tested in tests/recovery."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from recovery.load import load
from storage_backends.local import LocalStore
from tests.cli.conftest import Ckpt
from tests.cli.living import NEXT, keys, pin
from tests.support.stores import DirectWriter, State


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A long chain of which only the last snapshot is left, and the run that goes on."""
    store = LocalStore(tmp_path)
    writer = DirectWriter(store, chunk=4096)
    writer.begin()
    rng = np.random.default_rng(0)
    states: list[State] = [{"w": rng.standard_normal(4096)} for _ in range(10)]
    ids = [writer.step(10 * n, state) for n, state in enumerate(states)]
    last = DirectWriter(store, run=NEXT)
    last.begin(resumed_from=ids[-1])
    last.step(500, {"w": np.zeros(3)})
    pin(store, "good", ids[-1])
    return tmp_path


def test_what_is_shown_done_and_freed(ckpt: Ckpt, folder: Path) -> None:
    ckpt("prune", folder, "--keep-last", 1, "--grace", 0)
    before, bits = keys(LocalStore(folder)), load(folder, "good")["w"].tobytes()
    dry = ckpt("compact", folder, "--dry-run")
    as_json = ckpt("compact", folder, "--dry-run", "--json").json
    assert keys(LocalStore(folder)) == before
    assert (dry.code, dry.err) == (0, "")
    assert dry.lines[:3] == [
        "step  gen  what     why",
        "  90    1  rewrite",
        " 500    2  leave    run 000002-0ddba11e may lean on it",
    ]
    assert dry.lines[3].startswith("would rewrite 1 snapshot: about ")
    assert (len(as_json["rewrite"]), as_json["rewritten"]) == (1, [])
    real = ckpt("compact", folder)
    assert (real.code, real.err) == (0, "")
    assert real.lines[-1].startswith("rewrote 1 snapshot, wrote ")
    assert keys(LocalStore(folder)) > before
    assert ckpt("compact", folder).lines[-1] == "nothing to compact"
    freed = ckpt("prune", folder, "--leftovers", "--json").json
    assert (freed["snapshots"], bool(freed["removed"])) == ([], True)
    assert freed["freed"] >= as_json["freed"]
    assert load(folder, "good")["w"].tobytes() == bits
    assert ckpt("verify", folder, "--deep").code == 0
    assert len(ckpt("list", folder, "--json").json["snapshots"]) == 2


@pytest.mark.parametrize("flags", [("--threshold", "2"), ("--threshold", "nan"), ("--step", "77"), ("--grace", "soon")])
def test_what_makes_no_sense_writes_nothing(ckpt: Ckpt, folder: Path, flags: tuple[str, ...]) -> None:
    before = keys(LocalStore(folder))
    said = ckpt("compact", folder, *flags)
    assert (said.code, said.out) == (2, "")
    assert said.err
    assert keys(LocalStore(folder)) == before


def test_a_step_alone(ckpt: Ckpt, folder: Path) -> None:
    ckpt("prune", folder, "--keep-last", 1, "--grace", 0)
    assert ckpt("compact", folder, "--step", "500", "--json").json["rewrite"] == []
    assert len(ckpt("compact", folder, "--step", "good", "--json").json["rewritten"]) == 1


def test_leftovers_alone_and_policies_exclude_each_other(ckpt: Ckpt, folder: Path) -> None:
    before = keys(LocalStore(folder))
    assert ckpt("prune", folder, "--leftovers", "--keep-last", 1).code == 2
    assert ckpt("prune", folder, "--leftovers").lines[-1] == "nothing to remove"
    assert keys(LocalStore(folder)) == before
