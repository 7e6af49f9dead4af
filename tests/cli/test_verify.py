"""What `ckpt verify` finds, how it says so, and with which exit code. What it must find is in tests/recovery."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ckpt.cli import screen, verify
from ckpt.errors import Unavailable
from ckpt.format.names import PACKS, PARTS, PackName, SnapshotName
from storage_backends.local import LocalStore
from tests.cli.conftest import Ckpt
from tests.cli.living import NEXT, chain, pin, two_lines
from tests.support.faulty import FaultyStore
from tests.support.stores import DirectWriter, drifting, flipped, make_store


def first_pack(store: LocalStore, step: int) -> str:
    return next(e.key for e in store.list(PACKS) if (name := PackName.parse(e.key)) and name.id.step == step)


def test_a_whole_store_is_called_whole_and_counted(ckpt: Ckpt, tmp_path: Path) -> None:
    store, _ = chain(tmp_path, 3)
    size = screen.bytes_text(sum(e.size for e in store.list("")))
    said = ckpt("verify", tmp_path)
    assert (said.code, said.err) == (0, "")
    assert said.out == (
        f"whole: 3 snapshots, 3 packs, {size}, as far as documents and lengths tell; --deep reads every byte\n"
    )
    said = ckpt("verify", tmp_path, "--deep")
    assert (said.code, said.out, said.err) == (0, f"whole: 3 snapshots, 3 packs, {size}, every byte read\n", "")


def test_between_lengths_and_every_chunk_the_bytes_of_packs_are_compared_alone(
    ckpt: Ckpt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, _ = chain(tmp_path, 3)
    size = screen.bytes_text(sum(e.size for e in store.list("")))
    counted = FaultyStore(store)
    monkeypatch.setattr(verify, "open_url", lambda *_, **__: counted)
    said = ckpt("verify", tmp_path, "--packs")
    whole = f"whole: 3 snapshots, 3 packs, {size}, every byte is what was written; --deep rebuilds every chunk too\n"
    assert (said.code, said.out) == (0, whole)
    reads = [key for verb, key in counted.calls if verb in ("get", "get_range") and key.startswith(PACKS)]
    assert len(reads) == len(set(reads)) == 3, "each pack once"
    pack = first_pack(store, 20)
    flipped(store, pack, 8 * (len(store.get(pack)) - 1))
    assert ckpt("verify", tmp_path).code == 0, "its length is right"
    said = ckpt("verify", tmp_path, "--packs")
    assert said.code == 1
    assert said.lines[0].startswith(f"error: {pack}")
    assert "cannot be restored: step" in said.lines[-1]


def test_one_snapshot_alone(ckpt: Ckpt, tmp_path: Path) -> None:
    store, ids = chain(tmp_path, 3)
    pin(store, "best", ids[1])
    store.delete([first_pack(store, 30)])
    for name in ("20", "1/20", "best"):
        said = ckpt("verify", tmp_path, "--step", name, "--deep")
        assert (said.code, said.out) == (0, "whole: step 1/20, every byte read\n")
    said = ckpt("verify", tmp_path, "--step", "latest")
    assert said.code == 1
    assert said.lines[-1] == "1 error in step 1/30; cannot be restored: step 30"


def test_a_snapshot_that_cannot_be_read_can_be_asked_after_by_name(ckpt: Ckpt, tmp_path: Path) -> None:
    store, ids = chain(tmp_path, 3)
    damaged = SnapshotName(ids[1]).key
    flipped(store, damaged, 100)
    store.delete([e.key for e in store.list(f"parts/{ids[2].run}/{ids[2].step:012d}/")])
    said = ckpt("verify", tmp_path, "--step", "20")
    assert said.code == 1
    assert said.lines[0].startswith(f"error: {damaged}: ")
    assert said.lines[1] == "1 error in step 1/20; cannot be restored: step 20"
    said = ckpt("verify", tmp_path, "--step", "30")
    assert said.code == 1
    assert said.lines[0].startswith(f"error: {SnapshotName(ids[2]).key} is debris: ")


def test_an_ambiguous_or_unknown_step_is_refused(ckpt: Ckpt, tmp_path: Path) -> None:
    two_lines(tmp_path)
    said = ckpt("verify", tmp_path, "--step", 600)
    assert said.code == 2
    assert "1/600 (abandoned), 2/600 (live)" in said.err
    said = ckpt("verify", tmp_path, "--step", 7)
    assert said.code == 2
    assert "7: no such snapshot; there are 5" in said.err


def test_a_pack_that_is_gone_names_every_step_that_needs_it(ckpt: Ckpt, tmp_path: Path) -> None:
    """A2: one full and six deltas; a pack is removed by hand."""
    store, _ = chain(tmp_path, 7)
    lost = first_pack(store, 30)
    (tmp_path / lost).unlink()
    for flags in ((), ("--deep",)):
        said = ckpt("verify", tmp_path, *flags)
        assert (said.code, said.err) == (1, "")
        assert said.lines == [
            f"error: {lost}: it is not there; needed by steps 1/30, 1/40, 1/50, 1/60, 1/70, rank 0: moving",
            said.lines[1],
        ]
        assert said.lines[1].startswith("1 error in 7 snapshots, 6 packs, ")
        assert said.lines[1].endswith("; cannot be restored: steps 30, 40, 50, 60, 70")


def test_damage_is_named_with_object_step_rank_and_leaf(ckpt: Ckpt, tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    make_store(store, drifting(3), ranks=3, chunk=4096, blobs_per_pack=1)
    bad = next(
        e.key for e in store.list(PACKS) if (name := PackName.parse(e.key)) and (name.id.step, name.rank) == (20, 1)
    )
    flipped(store, bad, 8 * (len(store.get(bad)) - 1))
    assert ckpt("verify", tmp_path).code == 0, "lengths cannot tell"
    said = ckpt("verify", tmp_path, "--deep")
    assert said.code == 1
    assert re.fullmatch(rf"error: {bad}: .*; needed by steps? [1/23, 0]+, rank 1: (model\.\w+|step)", said.lines[0])
    document = ckpt("verify", tmp_path, "--deep", "--json")
    assert document.code == 1
    assert (document.json["whole"], document.json["deep"]) == (False, True)
    [finding] = document.json["findings"]
    assert (finding["level"], finding["key"], finding["step"], finding["rank"]) == ("error", bad, 20, 1)
    assert said.lines[0].endswith(f": {finding['leaf']}")
    assert finding["text"] == said.lines[0].removeprefix("error: ")
    assert 20 in finding["steps"]


@pytest.mark.parametrize("prefix", [PARTS, "snapshots/", "runs/"])
def test_a_damaged_document_needs_no_deep_look(ckpt: Ckpt, tmp_path: Path, prefix: str) -> None:
    store, _ = chain(tmp_path, 3)
    bad = store.list(prefix)[-1].key
    flipped(store, bad, 300)
    said = ckpt("verify", tmp_path)
    assert said.code == 1
    assert said.out.startswith(f"error: {bad}: ") or f" {bad}" in said.lines[0]
    assert "3 snapshots" in said.lines[-1]


def test_a_damage_that_costs_no_step_says_so(ckpt: Ckpt, tmp_path: Path) -> None:
    """A bit of the head of a pack: what reads the blobs does not read it."""
    store, _ = chain(tmp_path, 2)
    flipped(store, first_pack(store, 10), 8 * 12)
    said = ckpt("verify", tmp_path, "--deep")
    assert said.code == 1
    assert "every blob that a snapshot needs from it is whole" in said.lines[0]
    assert said.lines[-1].endswith("; no step is lost")


def test_leftovers_and_foreign_files_are_notes_and_the_store_is_whole(ckpt: Ckpt, tmp_path: Path) -> None:
    """C7"""
    store, _ = two_lines(tmp_path)
    DirectWriter(store, run=NEXT).step(610, {}, commit=False)
    (tmp_path / "notes.txt").write_text("mine")
    said = ckpt("verify", tmp_path, "--deep")
    assert (said.code, said.err) == (0, "")
    assert [line.split(": ")[0] for line in said.lines] == ["note", "note", "whole"]
    document = ckpt("verify", tmp_path, "--json").json
    assert document["whole"] is True
    assert (document["snapshots"], document["packs"]) == (5, 2)
    assert [finding["level"] for finding in document["findings"]] == ["note", "note"]
    assert all(finding["steps"] == [] for finding in document["findings"])


@pytest.mark.parametrize("flags", [(), ("--deep",), ("--json",)])
def test_a_mistyped_path_is_not_whole(ckpt: Ckpt, tmp_path: Path, flags: tuple[str, ...]) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "weights.pt").write_bytes(b"0")
    for name in ("tpyo", "elsewhere"):
        said = ckpt("verify", tmp_path / name, *flags)
        assert (said.code, said.out) == (2, "")
        assert said.err == (
            f"ckpt: {tmp_path}/{name}: no checkpoint store is there, so there is nothing to check; is the URL right?\n"
        )


def test_a_store_before_its_first_commit_is_whole(ckpt: Ckpt, tmp_path: Path) -> None:
    DirectWriter(LocalStore(tmp_path)).begin()
    said = ckpt("verify", tmp_path, "--deep")
    assert said.code == 0
    assert said.out.startswith("whole: 0 snapshots, 0 packs, ")


def test_a_store_that_does_not_answer_is_neither_whole_nor_damaged(
    ckpt: Ckpt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """M3"""
    store, _ = chain(tmp_path, 2)
    fired = 0
    for n in range(1, 50):
        faulty = FaultyStore(store, fail_at=n, for_ever=True, error=Unavailable)
        monkeypatch.setattr(screen, "open_store", lambda url, faulty=faulty, **options: faulty)
        said = ckpt("verify", tmp_path, "--deep")
        if not faulty.fired:
            assert said.code == 0
            break
        fired += 1
        assert said.code == 2
        assert "whole" not in said.out
        assert "failed on purpose" in said.err
    assert fired > 8


def test_verify_writes_nothing(ckpt: Ckpt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, ids = chain(tmp_path, 2)
    flipped(store, SnapshotName(ids[0]).key, 100)
    counted = FaultyStore(store)
    monkeypatch.setattr(screen, "open_store", lambda url, **options: counted)
    assert ckpt("verify", tmp_path, "--deep").code == 1
    assert counted.count("get", "get_range", "list") > 5
    assert counted.count("put", "delete") == 0
