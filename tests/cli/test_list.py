"""What `ckpt list` says, of stores in every condition."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from ckpt.cli import list_, screen
from ckpt.cli.list_ import METRICS_WIDTH
from ckpt.cli.screen import age_text
from ckpt.errors import Unavailable
from ckpt.format.manifest import FORMAT, RunDoc, Totals, seal, unseal
from ckpt.format.names import SnapshotName, run_key
from storage_backends.local import LocalStore
from tests.cli.conftest import Ckpt
from tests.cli.living import MADE, NEXT, chain, pin, restate, two_lines
from tests.support.faulty import FaultyStore
from tests.support.stores import RUN, DirectWriter, flipped


@pytest.fixture(autouse=True)
def _today(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three hours after these stores were made."""
    monkeypatch.setattr(list_, "age_text", lambda when: age_text(when, now=MADE + 3 * 3600))


def test_piped_it_is_aligned_columns_and_nothing_else(ckpt: Ckpt, tmp_path: Path) -> None:
    store, ids = chain(tmp_path, 3)
    restate(store, ids[0], totals=Totals(1_234_567, 2_000_000, {"2": 1_200_000, "1": 34_567}))
    restate(store, ids[1], totals=Totals(0, 2_000_000, {}), metrics={"loss": 0.123456, "epoch": 3}, time=MADE + 9000)
    restate(store, ids[2], totals=Totals(999, 2_000_000, {"5": 995, "3": 4}), metrics=None, time=None)
    pin(store, "best", ids[1])
    pin(store, "also", ids[1])
    said = ckpt("list", tmp_path)
    assert (said.code, said.err) == (0, "")
    assert said.lines == [
        "step  gen     age  stored  full size  kinds               metrics              notes",
        "  10    1     3 h  1.2 MB     2.0 MB  planes 97% zstd 3%  loss=1.5",
        "  20    1  30 min     0 B     2.0 MB  -                   epoch=3 loss=0.1235  pin also, pin best",
        "  30    1       ?   999 B     2.0 MB  sparse 100%",
    ]


def test_an_adaptive_cadence_says_what_it_aims_at(ckpt: Ckpt, tmp_path: Path) -> None:
    store, ids = chain(tmp_path, 2)
    restate(store, ids[1], cadence=252.0)
    lines = ckpt("list", tmp_path).lines[1:]
    assert "every" not in lines[0] and lines[1].endswith("a save every 4 min")
    assert [snapshot["cadence"] for snapshot in ckpt("list", tmp_path, "--json").json["snapshots"]] == [None, 252.0]


def test_abandoned_snapshots_are_marked_and_the_live_line_is_not(ckpt: Ckpt, tmp_path: Path) -> None:
    """D2: 500, 600, 700 exist; the job resumed from 500 and saved 510, and 600 anew."""
    two_lines(tmp_path)
    rows = [line.split() for line in ckpt("list", tmp_path).lines[1:]]
    assert [(row[0], row[1], row[-1] == "abandoned") for row in rows] == [
        ("500", "1", False),
        ("600", "1", True),
        ("700", "1", True),
        ("510", "2", False),
        ("600", "2", False),
    ]


def test_the_order_is_that_of_runs_and_steps_whatever_the_clocks_said(ckpt: Ckpt, tmp_path: Path) -> None:
    """D1: the wall clock was set back between saves; the ages show it, the order does not."""
    store, ids = chain(tmp_path, 3)
    for n, id_ in enumerate(ids):
        restate(store, id_, time=MADE - 86400 * n + 7200)
    rows = [line.split()[:4] for line in ckpt("list", tmp_path).lines[1:]]
    assert rows == [["10", "1", "60", "min"], ["20", "1", "25", "h"], ["30", "1", "2", "d"]]
    assert ckpt("list", tmp_path, "--json").json["newest"] == str(ids[2])


def test_json_has_everything(ckpt: Ckpt, tmp_path: Path) -> None:
    store, ids = two_lines(tmp_path)
    pin(store, "best", ids[0])
    document = ckpt("list", tmp_path, "--json").json
    assert document["newest"] == str(ids[-1])
    assert document["problems"] == []
    assert [s["id"] for s in document["snapshots"]] == [str(id_) for id_ in ids]
    first = document["snapshots"][0]
    assert first == {
        "id": "000001-0badcafe-000000000500",
        "step": 500,
        "generation": 1,
        "run": "000001-0badcafe",
        "time": MADE,
        "world_size": 1,
        "stored": 512,
        "size": 512,
        "by_kind": {"raw": 512},
        "metrics": {"loss": 1.5},
        "cadence": None,
        "pins": ["best"],
        "abandoned": False,
        "without": [],
    }
    assert [s["abandoned"] for s in document["snapshots"]] == [False, True, True, False, False]


def test_long_metrics_are_cut_and_are_whole_in_json(ckpt: Ckpt, tmp_path: Path) -> None:
    store, [id_] = chain(tmp_path, 1)
    metrics = {f"layer{n}.gradient_norm": n + 0.5 for n in range(60)}
    restate(store, id_, metrics=metrics)
    line = ckpt("list", tmp_path).lines[1]
    assert line.endswith("…")
    assert len(line.partition("layer0")[2]) + len("layer0") == METRICS_WIDTH
    assert ckpt("list", tmp_path, "--json").json["snapshots"][0]["metrics"] == metrics


def test_text_among_the_metrics_can_neither_break_a_line_nor_steer_the_terminal(ckpt: Ckpt, tmp_path: Path) -> None:
    store, [id_] = chain(tmp_path, 1)
    restate(store, id_, metrics={"note": "two\nlines \x1b[31mred"})
    said = ckpt("list", tmp_path)
    assert len(said.lines) == 2
    assert said.lines[1].endswith(r"note=two\nlines \x1b[31mred")


def test_a_kind_of_a_newer_version_is_shown_by_its_number(ckpt: Ckpt, tmp_path: Path) -> None:
    store, [id_] = chain(tmp_path, 1)
    restate(store, id_, totals=Totals(100, 100, {"0": 50, "77": 50}))
    assert "raw 50% 77 50%" in ckpt("list", tmp_path).out


@pytest.mark.parametrize("there", [False, True])
def test_an_empty_folder_or_none_at_all_has_no_snapshots(ckpt: Ckpt, tmp_path: Path, there: bool) -> None:
    folder = tmp_path / "runs"
    if there:
        folder.mkdir()
    said = ckpt("list", folder)
    assert (said.code, said.out, said.err) == (0, f"no snapshots on {folder}\n", "")
    assert ckpt("list", folder, "--json").json == {"snapshots": [], "newest": None, "problems": [], "journal": {}}
    assert folder.exists() == there, "looking must not make a store"


def test_a_store_before_its_first_commit_has_no_snapshots(ckpt: Ckpt, tmp_path: Path) -> None:
    DirectWriter(LocalStore(tmp_path)).begin()
    assert ckpt("list", tmp_path).out == f"no snapshots on {tmp_path}\n"


def test_debris_is_skipped_with_one_warning_and_named_on_request(ckpt: Ckpt, tmp_path: Path) -> None:
    """C7: a damaged snapshot, one whose part is gone, a foreign file, a torn pin, an empty folder."""
    store, ids = chain(tmp_path, 4)
    damaged, halved = SnapshotName(ids[1]).key, SnapshotName(ids[2]).key
    flipped(store, damaged, 100)
    store.delete([e.key for e in store.list(f"parts/{RUN}/{ids[2].step:012d}/")])
    (tmp_path / "snapshots" / "notes.txt").write_text("mine")
    (tmp_path / "pins").mkdir()
    (tmp_path / "pins" / "torn.json").write_text("{")
    (tmp_path / "snapshots" / "empty").mkdir()
    said = ckpt("list", tmp_path)
    assert said.code == 0
    assert [line.split()[0] for line in said.lines] == ["step", "10", "40"]
    assert said.err == (
        "ckpt: 4 objects skipped; 'ckpt list --problems' says which and why, 'ckpt verify' checks everything\n"
    )
    named = ckpt("list", tmp_path, "--problems")
    assert named.out == said.out
    assert [line.split(": ")[1] for line in named.err.splitlines()] == sorted(
        [damaged, halved, "snapshots/notes.txt", "pins/torn.json"]
    )
    document = ckpt("list", tmp_path, "--json")
    assert (document.code, document.err) == (0, "")
    assert [p["key"] for p in document.json["problems"]] == sorted(
        [damaged, halved, "snapshots/notes.txt", "pins/torn.json"]
    )


def test_a_single_skipped_object_is_not_called_objects(ckpt: Ckpt, tmp_path: Path) -> None:
    store, ids = chain(tmp_path, 2)
    flipped(store, SnapshotName(ids[1]).key, 100)
    assert ckpt("list", tmp_path).err.startswith("ckpt: 1 object skipped;")


def test_steps_that_were_never_committed_are_not_listed(ckpt: Ckpt, tmp_path: Path) -> None:
    """C1"""
    store, _ = two_lines(tmp_path)
    writer = DirectWriter(store, run=NEXT)
    writer.step(610, {}, commit=False)
    said = ckpt("list", tmp_path)
    assert (len(said.lines), said.err) == (6, "")


def test_a_store_that_cannot_be_listed_is_an_error_and_never_empty(
    ckpt: Ckpt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """M3"""
    store, _ = chain(tmp_path, 2)
    for n in range(1, 5):
        faulty = FaultyStore(store, fail_at=n, for_ever=True, error=Unavailable, verbs=frozenset({"list"}))
        monkeypatch.setattr(screen, "open_store", lambda url, faulty=faulty, **options: faulty)
        said = ckpt("list", tmp_path)
        assert faulty.fired
        assert (said.code, said.out) == (2, "")
        assert said.err.startswith(f"ckpt: {tmp_path}: list of ")


def test_a_file_is_no_store(ckpt: Ckpt, tmp_path: Path) -> None:
    file = tmp_path / "model.pt"
    file.write_bytes(b"weights")
    said = ckpt("list", file)
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith(f"ckpt: {file}: Not a directory; a store on disk is a folder (after 1 attempt in ")


def test_a_store_of_a_newer_version_says_upgrade(ckpt: Ckpt, tmp_path: Path) -> None:
    store, _ = chain(tmp_path, 1)
    document = unseal(store.get(run_key(RUN)), RunDoc, key=run_key(RUN))
    store.put(run_key(RUN), seal(msgspec.structs.replace(document, format=FORMAT + 1)))
    said = ckpt("list", tmp_path)
    assert (said.code, said.out) == (2, "")
    assert f"format {FORMAT + 1}" in said.err
    assert "upgrade" in said.err


def test_a_pin_of_a_snapshot_that_is_gone_is_shown_nowhere(ckpt: Ckpt, tmp_path: Path) -> None:
    store, ids = chain(tmp_path, 2)
    pin(store, "old", ids[0])
    store.delete([SnapshotName(ids[0]).key])
    assert "old" not in ckpt("list", tmp_path).out
