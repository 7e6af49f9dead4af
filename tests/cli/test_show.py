"""What `ckpt show` says of one snapshot."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest

from ckpt.cli import show
from ckpt.cli.screen import age_text
from ckpt.cli.show import VALUE_WIDTH, VALUES_SHOWN
from ckpt.format.names import SnapshotName
from ckpt.format.values import Ref, encode
from storage_backends.local import LocalStore
from tests.cli.conftest import Ckpt
from tests.cli.living import MADE, chain, pin, restate, two_lines
from tests.support.stores import DirectWriter, Each, flipped, make_store


@pytest.fixture(autouse=True)
def _today(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three hours after these stores were made."""
    monkeypatch.setattr(show, "age_text", lambda when: age_text(when, now=MADE + 3 * 3600))


def test_piped_it_is_a_few_lines_and_aligned_columns(ckpt: Ckpt, tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    state = {
        "model.h.10.weight": np.zeros((64, 32), np.float32),
        "model.h.2.weight": np.zeros((64, 32), np.float32),
        "model.bias": np.zeros(3, np.float16),
        "step": np.array(7, np.int64),
        "noise": Each((np.zeros(5, np.int32), np.ones(5, np.int32), np.ones(5, np.int32))),
    }
    values = [{"best": encode(0.5, "best")}] * 3
    writer = DirectWriter(store, ranks=3)
    writer.begin()
    id_ = writer.step(10, state, values=values, aliases={"model.head.weight": "model.h.2.weight"})
    pin(store, "best", id_)
    said = ckpt("show", tmp_path)
    assert (said.code, said.err) == (0, "")
    head, table, rest = said.out.split("\n\n")
    assert head.splitlines()[:2] == [
        f"step 10, generation 1, 3 ranks ({id_})",
        "saved 3 h ago, pin best",
    ]
    assert head.splitlines()[2].startswith("16.5 kB in 5 leaves: ")
    assert head.splitlines()[3:] == ["metrics: loss=1.5"]
    assert [line.split("  ")[0] for line in table.splitlines()] == [
        "leaf",
        "model.bias",
        "model.h.2.weight",
        "model.h.10.weight",
        "noise (per rank)",
        "step",
    ]
    cells = [re.split(r"  +", line) for line in table.splitlines()]
    assert cells[0] == ["leaf", "dtype", "shape", "size", "to read", "depth", "ranks"]
    assert cells[1] == ["model.bias", "float16", "3", "6 B", "bundled", "1", "0-2"]
    assert cells[2][:4] == ["model.h.2.weight", "float32", "64x32", "8.2 kB"]
    assert cells[4] == ["noise (per rank)", "int32", "5", "60 B", "bundled", "1", "0-2"]
    assert cells[5] == ["step", "int64", "scalar", "8 B", "bundled", "1", "0"]
    for column in ("dtype", "shape"):
        at = table.splitlines()[0].index(column)
        assert all(line[at - 1] == " " and line[at] != " " for line in table.splitlines()), "not aligned"
    assert rest.splitlines() == ["model.head.weight is tied to model.h.2.weight", "best = 0.5"]


def test_what_a_restore_reads_is_told_beside_what_the_save_stored(ckpt: Ckpt, tmp_path: Path) -> None:
    _, ids = chain(tmp_path, 4)
    documents = [ckpt("show", tmp_path, id_.step, "--json").json for id_ in ids]
    # Every byte was stored once, and all of it is needed still: deltas on deltas, and the leaf that never changed.
    assert documents[3]["to_read"] == sum(document["stored"] for document in documents)
    assert [document["to_read"] for document in documents] == sorted(document["to_read"] for document in documents)
    leaves = {leaf["path"]: leaf for leaf in documents[3]["leaves"]}
    assert (leaves["moving"]["depth"], leaves["still"]["depth"]) == (4, 1)
    assert leaves["moving"]["to_read"] + leaves["still"]["to_read"] == documents[3]["to_read"]
    assert (
        "7.0 kB to read, of which this save stored 270 B" in ckpt("show", tmp_path).out or documents[3]["stored"] != 270
    )


@pytest.mark.parametrize("name", ["20", "1/20", "000001-0badcafe-000000000020", "best"])
def test_a_snapshot_goes_by_every_name_it_has(ckpt: Ckpt, tmp_path: Path, name: str) -> None:
    store, ids = chain(tmp_path, 3)
    pin(store, "best", ids[1])
    by_argument = ckpt("show", tmp_path, name)
    assert by_argument.lines[0] == f"step 20, generation 1, 1 rank ({ids[1]})"
    assert ckpt("show", tmp_path, "--step", name) == by_argument
    assert ckpt("show", tmp_path, name, "--step", name) == by_argument


def test_without_a_name_it_is_the_newest(ckpt: Ckpt, tmp_path: Path) -> None:
    _, ids = chain(tmp_path, 3)
    assert ckpt("show", tmp_path).lines[0].endswith(f"({ids[2]})")
    assert ckpt("show", tmp_path, "latest") == ckpt("show", tmp_path)


def test_two_different_names_are_refused(ckpt: Ckpt, tmp_path: Path) -> None:
    chain(tmp_path, 2)
    said = ckpt("show", tmp_path, 10, "--step", 20)
    assert (said.code, said.out) == (2, "")
    assert said.err == "ckpt: STEP 10 and --step 20 are two snapshots; name one of them\n"


def test_an_ambiguous_step_is_refused_and_the_choices_are_named(ckpt: Ckpt, tmp_path: Path) -> None:
    """E4"""
    two_lines(tmp_path)
    said = ckpt("show", tmp_path, 600)
    assert (said.code, said.out) == (2, "")
    assert said.err == (
        f"ckpt: {tmp_path}: 600: 2 snapshots have this name: 1/600 (abandoned), 2/600 (live); name one of them\n"
    )
    assert ckpt("show", tmp_path, "1/600").lines[1] == "saved 3 h ago, abandoned"
    assert ckpt("show", tmp_path, "2/600").lines[1] == "saved 3 h ago"


def test_an_unknown_step_is_told_with_what_there_is(ckpt: Ckpt, tmp_path: Path) -> None:
    chain(tmp_path, 3)
    said = ckpt("show", tmp_path, 15)
    assert (said.code, said.out) == (2, "")
    assert said.err == f"ckpt: {tmp_path}: 15: no such snapshot; there are 3: 1/10, 1/20, 1/30\n"


def test_a_store_that_is_not_there_is_named(ckpt: Ckpt, tmp_path: Path) -> None:
    said = ckpt("show", tmp_path / "tpyo")
    assert (said.code, said.out) == (2, "")
    assert said.err == f"ckpt: {tmp_path}/tpyo: latest: no such snapshot; the store holds none\n"


def test_values_that_differ_are_shown_for_each_rank(ckpt: Ckpt, tmp_path: Path) -> None:
    values = [
        {
            "lr": encode(0.1, "lr"),
            "seed": encode(100 + rank // 2, "seed"),
            "nan": encode(math.nan, "nan"),
            **({"only": encode("here", "only")} if rank == 2 else {}),
        }
        for rank in range(4)
    ]
    make_store(LocalStore(tmp_path), [{"w": np.zeros(8)}], ranks=4, values=values)
    assert ckpt("show", tmp_path).out.split("\n\n")[2].splitlines() == [
        "lr = 0.1",
        "nan = nan",
        "only = 'here'  (rank 2)",
        "seed = 100  (ranks 0,1)",
        "seed = 101  (ranks 2,3)",
    ]
    assert ckpt("show", tmp_path, "--json").json["values"]["2"] == {
        "lr": 0.1,
        "seed": 101,
        "nan": "nan",
        "only": "here",
    }


def test_random_states_are_not_shown_and_tensors_have_a_row_not_a_line(ckpt: Ckpt, tmp_path: Path) -> None:
    values = [
        {
            "$random": encode({"python": [1, 2]}, "$random"),
            "optimizer": encode({"lr": 0.1, "moment": Ref("optimizer.moment"), "shared": {}}, "optimizer"),
            "seen": encode({}, "seen"),
        }
    ]
    make_store(LocalStore(tmp_path), [{"optimizer.moment": np.zeros(8)}], values=values)
    said = ckpt("show", tmp_path)
    assert said.out.split("\n\n")[2] == "optimizer.lr = 0.1\nseen = {}\n"
    assert ckpt("show", tmp_path, "--json").json["values"] == {
        "0": {"optimizer.lr": 0.1, "optimizer.shared": {}, "seen": {}}
    }


def test_long_values_are_cut_and_are_whole_in_json(ckpt: Ckpt, tmp_path: Path) -> None:
    losses, text, table = list(range(10_000)), "x" * 5_000, {f"token{n:05d}": n for n in range(10_000)}
    values = [{"losses": encode(losses, "losses"), "text": encode(text, "text"), "vocab": encode(table, "vocab")}]
    make_store(LocalStore(tmp_path), [{"w": np.zeros(8)}], values=values)
    lines = ckpt("show", tmp_path).out.split("\n\n")[2].splitlines()
    assert lines[0].startswith("losses = [0, 1, 2,")
    assert lines[0].endswith("… (10000 items)")
    assert lines[1].endswith("x…")
    assert lines[1] == "text = '" + "x" * (VALUE_WIDTH - 2) + "…"
    assert lines[2:4] == ["vocab.token00000 = 0", "vocab.token00001 = 1"]
    assert lines[-1] == f"… and {10_000 - VALUES_SHOWN} more values like these; --json has all"
    assert len(lines) == 3 + VALUES_SHOWN
    found = ckpt("show", tmp_path, "--json").json["values"]["0"]
    assert (found["losses"], found["text"]) == (losses, text)
    assert len(found) == 10_002


def test_names_and_values_can_neither_break_a_line_nor_steer_the_terminal(ckpt: Ckpt, tmp_path: Path) -> None:
    values = [{"note": encode({"a\n\x1b[31mb": "c\n\x1b[0m"}, "note")}]
    make_store(LocalStore(tmp_path), [{"w\n\x1b[2J": np.zeros(8)}], values=values)
    said = ckpt("show", tmp_path)
    assert "\x1b" not in said.out
    assert r"w\n\x1b[2J" in said.out.split("\n\n")[1]
    assert len(said.out.split("\n\n")[2].splitlines()) == 1


def test_a_thousand_leaves_are_a_thousand_rows(ckpt: Ckpt, tmp_path: Path) -> None:
    state = {f"model.layers.{n}.weight": np.full(2, n, np.float32) for n in range(1000)}
    make_store(LocalStore(tmp_path), [state])
    rows = ckpt("show", tmp_path).out.split("\n\n")[1].splitlines()[1:]
    assert [row.split()[0] for row in rows] == list(state), "layer 2 comes before layer 10"


def test_a_snapshot_of_plain_values_alone_has_no_table(ckpt: Ckpt, tmp_path: Path) -> None:
    make_store(LocalStore(tmp_path), [{}], values=[{"best": encode(1, "best")}])
    said = ckpt("show", tmp_path)
    assert said.lines[2:] == [
        "0 B in 0 leaves: 0 B to read, of which this save stored 0 B",
        "metrics: loss=1.5",
        "",
        "best = 1",
    ]


def test_metrics_are_shown_whole(ckpt: Ckpt, tmp_path: Path) -> None:
    store, [id_] = chain(tmp_path, 1)
    restate(store, id_, metrics={f"m{n:02d}": n for n in range(100)})
    assert ckpt("show", tmp_path).lines[3] == "metrics: " + " ".join(f"m{n:02d}={n}" for n in range(100))
    restate(store, id_, metrics=None)
    assert ckpt("show", tmp_path).lines[3] == ""


def test_a_damaged_snapshot_cannot_be_shown(ckpt: Ckpt, tmp_path: Path) -> None:
    store, ids = chain(tmp_path, 2)
    part = store.list("parts/")[-1].key
    flipped(store, part, 200)
    said = ckpt("show", tmp_path)
    assert (said.code, said.out) == (2, "")
    assert part in said.err
    assert ckpt("show", tmp_path, 10).code == 0
    damaged = SnapshotName(ids[0]).key
    flipped(store, damaged, 200)
    for name in ("10", "1/10", str(ids[0])):
        said = ckpt("show", tmp_path, name)
        assert (said.code, said.out) == (2, "")
        assert said.err.startswith(f"ckpt: {damaged}: "), "damaged, and not 'no such snapshot'"


def test_packs_are_not_read(ckpt: Ckpt, tmp_path: Path) -> None:
    """M11"""
    store, _ = chain(tmp_path, 3)
    whole = ckpt("show", tmp_path)
    store.delete([entry.key for entry in store.list("packs/")])
    assert ckpt("show", tmp_path) == whole
