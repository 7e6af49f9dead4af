"""`ckpt pin` and `ckpt unpin`; what pins are worth beside a prune is tested in tests/ckpt/history."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from recovery.load import load
from tests.cli.conftest import Ckpt
from tests.cli.living import chain, two_lines


def test_a_pin_is_shown_kept_restored_by_name_and_taken_away(ckpt: Ckpt, tmp_path: Path) -> None:
    chain(tmp_path, 4)
    said = ckpt("pin", tmp_path, "best", 10)
    assert (said.code, said.out, said.err) == (0, "1/10 is pinned as best\n", "")
    assert "pin best" in ckpt("list", tmp_path).lines[1]
    assert ckpt("prune", tmp_path, "--keep-last", 1).code == 0
    assert np.array_equal(load(tmp_path, "best")["moving"], np.arange(64 * 16, dtype=np.float32).reshape(64, 16))
    assert ckpt("pin", tmp_path, "also", "best", "--json").json["snapshot"].endswith("10")
    assert ckpt("unpin", tmp_path, "best").out == "1/10 is no longer pinned as best\n"
    assert ckpt("unpin", tmp_path, "also", "--json").json["name"] == "also"
    ckpt("prune", tmp_path, "--keep-last", 1)
    assert [s["step"] for s in ckpt("list", tmp_path, "--json").json["snapshots"]] == [30, 40]


def test_without_a_step_the_newest_is_pinned(ckpt: Ckpt, tmp_path: Path) -> None:
    chain(tmp_path, 2)
    assert ckpt("pin", tmp_path, "now").out == "1/20 is pinned as now\n"


def test_what_cannot_be_pinned_is_said_and_changes_nothing(ckpt: Ckpt, tmp_path: Path) -> None:
    store, _ = two_lines(tmp_path)
    ckpt("pin", tmp_path, "taken", 500)
    before = {e.key for e in store.list("")}
    for arguments in (
        ("pin", tmp_path, "x", 999), ("pin", tmp_path, "x", 600), ("pin", tmp_path, "12"), ("pin", tmp_path, "a/b"),
        ("pin", tmp_path, "taken", 510), ("unpin", tmp_path, "nosuch"), ("unpin", tmp_path, "a/b"), ("pin", tmp_path),
    ):  # fmt: skip
        said = ckpt(*arguments)
        assert (said.code, said.out) == (2, ""), arguments
        assert said.err
    assert {e.key for e in store.list("")} == before
    assert ckpt("pin", tmp_path, "taken", 510, "--move").code == 0
