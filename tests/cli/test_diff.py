"""What `ckpt diff` says of two snapshots."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from ckpt.cli.diff import share_text
from ckpt.format.values import encode
from storage_backends.local import LocalStore
from tests.cli.conftest import Ckpt
from tests.cli.living import chain, pin, two_lines
from tests.support.stores import DirectWriter


def moved(folder: Path) -> None:
    store = LocalStore(folder)
    writer = DirectWriter(store)
    writer.begin()
    row = np.ones((2000, 8), np.float32)
    other = row.copy()
    other[3] = 2
    state = {"model.h.10.w": row, "model.h.2.w": row, "model.gone": row[:4], "model.cast": row[:2]}
    later = {"model.h.10.w": other, "model.h.2.w": row + 1, "model.new": row[:4], "model.cast": row[:3]}
    writer.step(100, state, values=[{"best": encode(0.5, "best")}])
    writer.step(200, later, values=[{"best": encode(0.25, "best")}])


def cells(lines: list[str]) -> list[list[str]]:
    return [re.split(r"  +", line.strip()) for line in lines]


def test_piped_it_is_a_line_a_table_and_the_values(ckpt: Ckpt, tmp_path: Path) -> None:
    moved(tmp_path)
    said = ckpt("diff", tmp_path, 100, 200)
    assert (said.code, said.err) == (0, "")
    head, table, values = said.out.split("\n\n")
    assert head == "1/100 → 1/200: 2 changed, 1 added, 1 removed, 1 of another form; 1 value changed"
    assert cells(table.splitlines()) == [
        ["leaf", "size", "changed", "rel norm", "largest", "notes"],
        ["model.cast", "96 B", "-", "-", "-", "float32 2x8 → float32 3x8"],
        ["model.gone", "128 B", "-", "-", "-", "removed"],
        ["model.h.2.w", "64.0 kB", "100 %", "1", "1"],
        ["model.h.10.w", "64.0 kB", "0.05 %", "0.022", "1"],
        ["model.new", "128 B", "-", "-", "-", "added"],
    ]
    assert values == "best: 0.5 → 0.25\n"


def test_the_order_and_the_paths_can_be_chosen(ckpt: Ckpt, tmp_path: Path) -> None:
    moved(tmp_path)
    by_share = ckpt("diff", tmp_path, 100, 200, "--only", "*.w", "--sort", "share").lines
    assert [row[0] for row in cells(by_share[3:])] == ["model.h.2.w", "model.h.10.w"]
    by_norm = ckpt("diff", tmp_path, 100, 200, "--only", "*.w", "--sort", "norm", "--json").json
    assert [leaf["path"] for leaf in by_norm["leaves"]] == ["model.h.2.w", "model.h.10.w"]
    assert by_norm["values"] == []
    by_size = ckpt("diff", tmp_path, 100, 200, "--sort", "size").lines
    assert cells(by_size[3:])[0][0] == "model.h.2.w"


def test_unchanged_leaves_are_counted_and_listed_when_asked_for(ckpt: Ckpt, tmp_path: Path) -> None:
    chain(tmp_path, 2)
    assert ckpt("diff", tmp_path, 10, 20).lines[0] == "1/10 → 1/20: 1 unchanged, 1 changed"
    assert "still" not in ckpt("diff", tmp_path, 10, 20).out
    assert "still" in ckpt("diff", tmp_path, 10, 20, "--all").out
    assert ckpt("diff", tmp_path, 20, 20).lines == ["1/20 → 1/20: 2 unchanged"]


def test_json_has_everything(ckpt: Ckpt, tmp_path: Path) -> None:
    moved(tmp_path)
    found = ckpt("diff", tmp_path, 100, 200, "--json").json
    leaf = next(leaf for leaf in found["leaves"] if leaf["path"] == "model.h.10.w")
    assert (leaf["verdict"], leaf["changed"], leaf["share"], leaf["largest"]) == ("changed", 8, 0.0005, 1.0)
    assert leaf["after"] == {"class": "array", "dtype": "float32", "shape": [2000, 8]}
    assert found["values"] == [{"path": "best", "rank": None, "verdict": "changed", "before": 0.5, "after": 0.25}]
    assert not found["equal"]


def test_snapshots_have_the_names_they_have_everywhere(ckpt: Ckpt, tmp_path: Path) -> None:
    store, ids = two_lines(tmp_path)
    pin(store, "good", ids[0])
    assert ckpt("diff", tmp_path, "good", "latest").lines[0].startswith("1/500 → 2/600: ")
    said = ckpt("diff", tmp_path, "600", "latest")
    assert said.code == 2 and "2 snapshots have this name" in said.err
    assert ckpt("diff", tmp_path, "500", "999").code == 2


def test_a_share_is_never_rounded_to_nothing_or_all() -> None:
    assert [share_text(x) for x in (0.0, 1e-9, 0.05, 0.999999, 1.0)] == ["0 %", "<0.01 %", "5 %", ">99.99 %", "100 %"]
