"""The verbs on stores of several places: where snapshots are, what is mended, what leaves the fast tier."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ckpt.history.catalog import read_history
from ckpt.history.clock import SystemClock
from ckpt.history.copier import bring_over
from storage_backends import open_store
from storage_backends.local import LocalStore
from tests.cli.conftest import Ckpt
from tests.cli.living import NEXT, pin
from tests.support.stores import DirectWriter, drifting, flipped, make_store


@pytest.fixture
def fanout(tmp_path: Path) -> str:
    url = f"fanout::{tmp_path}/a|{tmp_path}/b"
    make_store(open_store(url), drifting(3, rows=16))
    return url


@pytest.fixture
def tiers(tmp_path: Path) -> str:
    """Steps 10 and 20 on both tiers, 30 on the fast one alone."""
    url = f"tiered::{tmp_path}/fast|{tmp_path}/durable"
    store = open_store(url)
    writer = DirectWriter(store)
    writer.begin()
    states = drifting(3, rows=16)
    for step in (10, 20):
        writer.step(step, states[step // 10 - 1])
    bring_over(store, SystemClock())
    writer.step(30, states[2])
    return url


def test_list_shows_where_each_snapshot_is(ckpt: Ckpt, tiers: str, tmp_path: Path) -> None:
    said = ckpt("list", tiers)
    assert said.code == 0
    assert "on" in said.lines[0].split()
    assert ["fast, durable" in line for line in said.lines[1:4]] == [True, True, False]
    assert said.lines[-1] == f"fast = {tmp_path}/fast, durable = {tmp_path}/durable"
    listed = ckpt("list", tiers, "--json").json
    assert [snapshot["places"] for snapshot in listed["snapshots"]] == [["fast", "durable"]] * 2 + [["fast"]]
    assert listed["places"] == {"fast": f"{tmp_path}/fast", "durable": f"{tmp_path}/durable"}


def test_list_of_one_place_says_nothing_of_places(ckpt: Ckpt, fanout: str, tmp_path: Path) -> None:
    assert "on" not in ckpt("list", tmp_path / "a").lines[0].split()
    listed = ckpt("list", tmp_path / "a", "--json").json
    assert "places" not in listed
    assert "places" not in listed["snapshots"][0]
    (tmp_path / "b" / "snapshots" / f"{max(read_history(LocalStore(tmp_path / 'b')).snapshots)}.json").unlink()
    listed = ckpt("list", fanout, "--json").json
    assert [snapshot["places"] for snapshot in listed["snapshots"]] == [["1", "2"], ["1", "2"], ["1"]]


def test_verify_finds_a_bad_copy_and_repair_mends_it(ckpt: Ckpt, fanout: str, tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "b")
    pack = next(entry.key for entry in store.list("packs/"))
    flipped(store, pack, 1000)
    (tmp_path / "a" / "store.json").unlink()
    said = ckpt("verify", fanout, "--deep")
    assert said.code == 1
    assert said.lines[-1].startswith("2 errors in 3 snapshots")
    assert said.lines[-1].endswith("no step is lost")
    said = ckpt("verify", fanout, "--deep", "--repair")
    assert said.code == 0
    assert sorted(line.split(":")[0] for line in said.lines) == ["mended", "mended", "whole"]
    assert f"mended: store.json: mended on {tmp_path}/a, where it is not there" in said.lines
    assert said.lines[-1].startswith("whole: 3 snapshots")
    assert said.lines[-1].endswith("2 copies mended, every byte read")
    assert ckpt("verify", fanout, "--deep").code == 0
    said = ckpt("verify", fanout, "--deep", "--repair", "--json")
    assert (said.json["whole"], said.json["mended"]) == (True, [])


def test_repair_says_in_json_what_it_mended_and_fails_where_nothing_is_whole(
    ckpt: Ckpt, fanout: str, tmp_path: Path
) -> None:
    part = next(entry.key for entry in LocalStore(tmp_path / "a").list("parts/"))
    pack = next(entry.key for entry in LocalStore(tmp_path / "a").list("packs/"))
    flipped(LocalStore(tmp_path / "a"), pack, 1000)
    for place in "ab":
        flipped(LocalStore(tmp_path / place), part, 1000)
    said = ckpt("verify", fanout, "--deep", "--repair", "--json")
    assert said.code == 1
    assert said.json["mended"] == [pack]
    assert not said.json["whole"]
    assert {f["key"] for f in said.json["findings"] if f["level"] == "error"} == {part}


def test_repair_of_a_store_with_one_copy_is_refused(ckpt: Ckpt, fanout: str, tmp_path: Path) -> None:
    said = ckpt("verify", tmp_path / "a", "--repair")
    assert said.code == 2
    assert "holds one copy of everything" in said.err


def test_repair_copies_what_a_killed_job_left_on_the_fast_tier(ckpt: Ckpt, tiers: str, tmp_path: Path) -> None:
    assert ckpt("verify", tiers).code == 0
    assert any("not yet on" in line for line in ckpt("verify", tiers).lines)
    said = ckpt("verify", tiers, "--repair")
    assert said.code == 0
    assert any(line.startswith("mended: snapshots/") and "copied to" in line for line in said.lines)
    assert ckpt("list", tmp_path / "durable").lines[-1].split()[0] == "30"


def test_prune_takes_snapshots_off_the_fast_tier_alone(ckpt: Ckpt, tiers: str, tmp_path: Path) -> None:
    said = ckpt("prune", tiers, "--fast", "--keep-last", "1", "--dry-run")
    assert said.code == 0
    assert "would take 2 snapshots" in said.out
    assert len(ckpt("list", tmp_path / "fast", "--json").json["snapshots"]) == 3
    said = ckpt("prune", tiers, "--fast", "--keep-last", "1")
    assert (said.code, said.lines[-1].startswith("taking 2 snapshots")) == (0, True)
    assert [s["step"] for s in ckpt("list", tmp_path / "fast", "--json").json["snapshots"]] == [30]
    assert [s["step"] for s in ckpt("list", tmp_path / "durable", "--json").json["snapshots"]] == [10, 20]
    assert ckpt("verify", tiers, "--deep").code == 0
    said = ckpt("prune", tiers, "--fast", "--keep-last", "1", "--json")
    assert said.json["keys"] == []
    assert said.json["tier"] == f"{tmp_path}/fast"


def test_prune_of_both_tiers_spares_what_only_one_of_them_has(ckpt: Ckpt, tiers: str, tmp_path: Path) -> None:
    said = ckpt("prune", tiers, "--keep-last", "1", "--grace", "0")
    assert said.code == 0
    assert any(line.split()[0] == "20" and "the newest on the durable tier" in line for line in said.lines)
    assert [s["step"] for s in ckpt("list", tiers, "--json").json["snapshots"]] == [20, 30]
    assert ckpt("verify", tmp_path / "durable", "--deep").code == 0


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--fast", "--remove", "10"], "--fast goes by the --keep policies"),
        (["--fast", "--leftovers"], "--fast goes by the --keep policies"),
    ],
)
def test_prune_fast_goes_by_policies(ckpt: Ckpt, tiers: str, flags: list[str], says: str) -> None:
    said = ckpt("prune", tiers, *flags)
    assert said.code == 2
    assert says in said.err


def test_prune_fast_of_a_plain_store_is_refused(ckpt: Ckpt, tiers: str, tmp_path: Path) -> None:
    said = ckpt("prune", tmp_path / "durable", "--fast", "--keep-last", "1")
    assert said.code == 2
    assert "has no fast tier" in said.err


def test_compact_leaves_its_revisions_on_both_tiers(ckpt: Ckpt, tmp_path: Path) -> None:
    url = f"tiered::{tmp_path}/fast|{tmp_path}/durable"
    store = open_store(url)
    writer = DirectWriter(store, chunk=4096)
    writer.begin()
    rng = np.random.default_rng(0)
    ids = [writer.step(10 * n, {"w": rng.standard_normal(4096)}) for n in range(6)]
    last = DirectWriter(store, run=NEXT)
    last.begin(resumed_from=ids[-1])
    last.step(500, {"w": np.zeros(3)})
    pin(store, "good", ids[-1])
    bring_over(store, SystemClock())
    assert ckpt("prune", url, "--keep-last", 1, "--grace", 0).code == 0
    said = ckpt("compact", url)
    assert (said.code, said.err) == (0, "")
    assert said.lines[-1].startswith("rewrote 1 snapshot")
    there = {entry.key for entry in LocalStore(tmp_path / "durable").list("snapshots/")}
    assert sum(".r1." in key for key in there) == 1
    assert ckpt("verify", tmp_path / "durable", "--deep").code == ckpt("verify", url, "--deep").code == 0
