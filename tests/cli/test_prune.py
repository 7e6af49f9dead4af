"""The command line's part in pruning: it shows what goes, does that and nothing else, and does nothing by accident.

What may go at all is decided, and tested, in tests/ckpt/history.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from ckpt.cli import screen
from ckpt.errors import Unavailable
from ckpt.format.names import PACKS, PRUNES, PackName, SnapshotId, SnapshotName
from ckpt.history.clock import SystemClock
from ckpt.history.retention import Keep, execute, plan_prune
from recovery.load import load
from storage_backends.local import LocalStore
from tests.cli.conftest import Ckpt, Said
from tests.cli.living import NEXT, chain, keys, pin, restate, two_lines
from tests.support.faulty import Crash, FaultyStore
from tests.support.stores import RUN, DirectWriter, flipped


def listed(ckpt: Ckpt, folder: Path) -> list[str]:
    """GENERATION/STEP of every snapshot."""
    return [f"{s['generation']}/{s['step']}" for s in ckpt("list", folder, "--json").json["snapshots"]]


def shown_keys(said: Said) -> list[str]:
    """The objects that a dry run names."""
    return [line.strip() for line in said.lines if line.startswith("  ") and "/" in line.split()[0]]


def loads_bit_exactly(folder: Path, step: int) -> bool:
    """Of a store made by `chain`."""
    flat = load(folder, step)
    still = np.arange(64 * 16, dtype=np.float32).reshape(64, 16)
    changes = step // 10 - 1
    return np.array_equal(flat["still"], still) and np.array_equal(flat["moving"], still + changes)


def test_without_a_selection_nothing_happens(ckpt: Ckpt, tmp_path: Path) -> None:
    store, _ = chain(tmp_path, 3)
    before = keys(store)
    for flags in ((), ("--dry-run",), ("--json",), ("--grace", "0")):
        said = ckpt("prune", tmp_path, *flags)
        assert (said.code, said.out) == (2, "")
        assert said.err == ("ckpt: say what to keep (--keep-last, --keep-every, …) or what to remove (--remove STEP)\n")
    assert keys(store) == before


@pytest.mark.parametrize(
    "flags",
    [
        ("--keep-last", "0"),
        ("--keep-last", "-1"),
        ("--keep-every", "0"),
        ("--keep-last", "two"),
        ("--keep-last", "1", "--grace", "soon"),
        ("--keep-last", "1", "--grace", "-1"),
        ("--keep-last", "1", "--grace", "nan"),
        ("--keep-best", "loss"),
        ("--keep-best", "loss:least:3"),
        ("--keep-within", "soon"),
        ("--keep-hourly", "0"),
        ("--keep-daily", "-1"),
        ("--remove", "15"),
        ("--remove", "latest", "--remove", "nosuchpin"),
        ("--keep-last", "1", "--storage-option", "anon"),
        ("--keep", "1"),
    ],
)
def test_a_selection_that_makes_no_sense_removes_nothing(ckpt: Ckpt, tmp_path: Path, flags: tuple[str, ...]) -> None:
    store, _ = chain(tmp_path, 5)
    before = keys(store)
    said = ckpt("prune", tmp_path, *flags)
    assert (said.code, said.out) == (2, "")
    assert said.err
    assert keys(store) == before


def test_a_dry_run_touches_nothing_and_names_exactly_what_the_real_one_removes(ckpt: Ckpt, tmp_path: Path) -> None:
    """A3"""
    store, _ = chain(tmp_path, 5)
    DirectWriter(store).step(25, {"w": np.zeros(9)}, commit=False)
    flags = ("--keep-last", "1", "--remove", "20", "--grace", "0")
    before = keys(store)
    dry = ckpt("prune", tmp_path, *flags, "--dry-run")
    as_json = ckpt("prune", tmp_path, *flags, "--dry-run", "--json").json
    assert keys(store) == before
    real = ckpt("prune", tmp_path, *flags)
    gone = before - keys(store)
    assert gone
    assert keys(store) < before, "nothing is added"
    assert sorted(shown_keys(dry)) == sorted(as_json["keys"]) == sorted(gone)
    assert as_json["removed"] == []
    assert shown_keys(real) == []
    assert {key.partition("/")[0] for key in gone} == {"snapshots", "parts", "packs"}


def test_every_policy_has_a_flag_and_is_named_as_the_reason(ckpt: Ckpt, tmp_path: Path) -> None:
    store, ids = chain(tmp_path, 8)
    hour = 3600.0
    for n, (id_, loss) in enumerate(zip(ids, (0.1, 0.5, 0.4, 0.9, 0.3, 0.8, 0.7, 0.6), strict=True)):
        restate(store, id_, time=1e9 + n * hour, metrics={"loss": loss})
    flags = {
        ("--keep-last", "2"): [70, 80],
        ("--keep-every", "40"): [40, 80],
        ("--keep-best", "loss:min:2"): [10, 50],
        ("--keep-best", "loss:max:1"): [40],
        ("--keep-within", "2h"): [60, 70, 80],
        ("--keep-hourly", "3"): [60, 70, 80],
        ("--keep-daily", "1"): [80],
    }
    for flag, steps in flags.items():
        protected = ckpt("prune", tmp_path, *flag, "--dry-run", "--json").json["protected"]
        assert {int(id_[-12:]) for id_ in protected} == {*steps, 70, 80}, "the job may lean on the last two"
        whys = [why for id_, why in protected.items() if int(id_[-12:]) < 70]
        assert whys == [f"keep {flag[0][7:]} {flag[1]}"] * len(whys) or flag[0] in ("--keep-hourly", "--keep-within")
    said = ckpt(
        "prune", tmp_path, "--keep-every", 20, "--keep-best", "loss:min:2", "--keep-within", "7200", "--dry-run"
    )
    whys = [line.split(None, 3)[3] for line in said.lines[1:] if " keep " in line][:4]
    assert whys == ["keep best loss:min:2", "keep every 20", "keep every 20", "keep best loss:min:2"]


def test_what_is_shown_line_by_line(ckpt: Ckpt, tmp_path: Path) -> None:
    store, ids = chain(tmp_path, 5)
    pin(store, "best", ids[1])
    DirectWriter(store).step(25, {"w": np.zeros(9)}, commit=False)
    dry = ckpt("prune", tmp_path, "--keep-last", 2, "--grace", 0, "--dry-run")
    assert (dry.code, dry.err) == (0, "")
    assert dry.lines[:7] == [
        "step  gen  what    why",
        "  10    1  remove",
        "  20    1  keep    pin best",
        "  25    1  remove  leftovers of a step that was never committed",
        "  30    1  remove",
        "  40    1  keep    run 000001-0badcafe may lean on it",
        "  50    1  keep    run 000001-0badcafe may lean on it",
    ]
    size = screen.bytes_text(sum(e.size for e in store.list("") if e.key in shown_keys(dry)))
    assert dry.lines[7] == f"would remove 2 snapshots, 6 objects, {size}"
    assert len(dry.lines) == 8 + 6
    real = ckpt("prune", tmp_path, "--keep-last", 2, "--grace", 0)
    assert real.lines == [
        *dry.lines[:7],
        f"removing 2 snapshots, 6 objects, {size}",
        f"removed 6 objects, {size}",
    ]
    again = ckpt("prune", tmp_path, "--keep-last", 2, "--grace", 0)
    assert again.code == 0
    assert again.lines[-1] == "nothing to remove"


def test_json_says_the_same(ckpt: Ckpt, tmp_path: Path) -> None:
    store, ids = chain(tmp_path, 4)
    before = keys(store)
    said = ckpt("prune", tmp_path, "--keep-last", 1, "--json")
    assert (said.code, said.err) == (0, "")
    document = said.json
    assert document["snapshots"] == [str(id_) for id_ in ids[:2]]
    assert set(document["protected"]) == {str(id_) for id_ in ids[2:]}
    assert document["keys"] == document["removed"]
    assert set(document["removed"]) == before - keys(store)
    assert (document["dry_run"], document["spared"], document["leftovers"], document["notes"]) == (False, [], [], [])
    assert document["freed"] > 0


def test_one_full_and_six_deltas_pruned_to_two_load_bit_exactly(ckpt: Ckpt, tmp_path: Path) -> None:
    """A2. Then a pack is removed by hand: a clear error, and verify names every step that needs it."""
    store, _ = chain(tmp_path, 7)
    assert ckpt("prune", tmp_path, "--keep-last", 2).code == 0
    assert listed(ckpt, tmp_path) == ["1/60", "1/70"]
    assert loads_bit_exactly(tmp_path, 60)
    assert loads_bit_exactly(tmp_path, 70)
    said = ckpt("verify", tmp_path, "--deep")
    assert said.code == 0
    assert "2 snapshots, 7 packs" in said.out

    lost = next(e.key for e in store.list(PACKS) if (name := PackName.parse(e.key)) and name.id.step == 30)
    store.delete([lost])
    said = ckpt("verify", tmp_path)
    assert said.code == 1
    assert said.lines[0] == f"error: {lost}: it is not there; needed by steps 1/60, 1/70, rank 0: moving"
    with pytest.raises(Exception, match=f"step 70.*{lost}"):
        load(tmp_path)


def test_removing_exactly_the_steps_that_others_lean_on_leaves_their_blobs(ckpt: Ckpt, tmp_path: Path) -> None:
    """A3: by hand."""
    store, ids = chain(tmp_path, 6)
    packs = {key for key in keys(store) if key.startswith(PACKS)}
    assert ckpt("prune", tmp_path, "--remove", "10", "--remove", "1/20", "--remove", ids[2]).code == 0
    assert listed(ckpt, tmp_path) == ["1/40", "1/50", "1/60"]
    assert {key for key in keys(store) if key.startswith(PACKS)} == packs
    assert all(loads_bit_exactly(tmp_path, step) for step in (40, 50, 60))
    assert ckpt("verify", tmp_path, "--deep").code == 0


def test_a_snapshot_asked_for_that_must_stay_is_told_and_is_no_success(ckpt: Ckpt, tmp_path: Path) -> None:
    store, ids = chain(tmp_path, 4)
    pin(store, "best", ids[0])
    for name, why in (
        ("latest", "1/40 was asked for, and stays: run 000001-0badcafe may lean on it"),
        ("best", "1/10 was asked for, and stays: pin best"),
    ):
        for dry in ((), ("--dry-run",)):
            said = ckpt("prune", tmp_path, "--remove", name, *dry)
            assert said.code == 1
            assert why in said.lines
            assert said.lines[-1] == "nothing to remove"
    said = ckpt("prune", tmp_path, "--remove", "20", "--remove", "10")
    assert said.code == 1
    assert listed(ckpt, tmp_path) == ["1/10", "1/30", "1/40"], "what can go does go"


def test_order_is_what_was_recorded_not_when_files_were_written(ckpt: Ckpt, tmp_path: Path) -> None:
    """D1: mtimes equal, reversed, in the future."""
    for name, mtimes in (
        ("equal", [1e9] * 5),
        ("reversed", [1e9 - 100 * n for n in range(5)]),
        ("future", [4e9 - 100 * n for n in range(5)]),
    ):
        store, ids = chain(tmp_path / name, 5)
        for id_, mtime in zip(ids, mtimes, strict=True):
            for key in keys(store):
                if f"{id_.step:012d}" in key:
                    os.utime(tmp_path / name / key, (mtime, mtime))
        assert ckpt("prune", tmp_path / name, "--keep-last", 2, "--grace", 0).code == 0
        assert listed(ckpt, tmp_path / name) == ["1/40", "1/50"]


def test_the_live_line_is_kept_and_the_abandoned_one_goes(ckpt: Ckpt, tmp_path: Path) -> None:
    """D2: 500, 600, 700; back to 500, saved 510 (and 600 anew); keep 2."""
    two_lines(tmp_path)
    assert listed(ckpt, tmp_path) == ["1/500", "1/600", "1/700", "2/510", "2/600"]
    said = ckpt("prune", tmp_path, "--keep-last", 3, "--grace", 0)
    assert said.code == 0
    assert said.lines[1] == " 500    1  keep    keep last 3"
    assert listed(ckpt, tmp_path) == ["1/500", "2/510", "2/600"]
    assert ckpt("list", tmp_path, "--json").json["newest"] == str(SnapshotId(NEXT, 600))


def test_keep_every_alone_and_beside_keep_last(ckpt: Ckpt, tmp_path: Path) -> None:
    chain(tmp_path, 8)
    said = ckpt("prune", tmp_path, "--keep-every", 40, "--dry-run", "--json").json
    assert [name[-2:] for name in said["snapshots"]] == ["10", "20", "30", "50", "60"]
    assert ckpt("prune", tmp_path, "--keep-every", 40, "--keep-last", 3).code == 0
    assert listed(ckpt, tmp_path) == ["1/40", "1/60", "1/70", "1/80"]


def test_leftovers_stay_for_the_grace_that_is_given(ckpt: Ckpt, tmp_path: Path) -> None:
    """C1. `--grace` takes durations as the Checkpointer does, and bare seconds."""
    store, _ = chain(tmp_path, 3)
    DirectWriter(store).step(15, {"w": np.zeros(9)}, commit=False)
    for grace in ("1h", "10min", "3600", "86400.5"):
        assert ckpt("prune", tmp_path, "--keep-last", 3, "--grace", grace).lines[-1] == "nothing to remove"
    said = ckpt("prune", tmp_path, "--keep-last", 3, "--grace", "0")
    assert said.lines[-1].startswith("removed 2 objects, ")
    assert not [key for key in keys(store) if f"{15:012d}" in key]


def test_a_damaged_snapshot_stops_everything_until_it_is_removed_by_name(ckpt: Ckpt, tmp_path: Path) -> None:
    store, ids = chain(tmp_path, 4)
    damaged = SnapshotName(ids[1]).key
    flipped(store, damaged, 100)
    said = ckpt("prune", tmp_path, "--keep-last", 1)
    assert said.code == 0
    assert said.lines[-1] == "nothing to remove"
    assert f"nothing is removed: {damaged}: " in said.out
    for name in ("20", "1/20", str(ids[1])):
        assert damaged in shown_keys(ckpt("prune", tmp_path, "--remove", name, "--dry-run"))
    assert ckpt("prune", tmp_path, "--remove", "20").code == 0
    assert listed(ckpt, tmp_path) == ["1/10", "1/30", "1/40"]
    assert ckpt("list", tmp_path).err == ""
    assert ckpt("prune", tmp_path, "--keep-last", 1).code == 0
    assert listed(ckpt, tmp_path) == ["1/30", "1/40"]


def test_an_ambiguous_step_is_not_removed_by_a_guess(ckpt: Ckpt, tmp_path: Path) -> None:
    """E4"""
    store, _ = two_lines(tmp_path)
    before = keys(store)
    said = ckpt("prune", tmp_path, "--remove", 600)
    assert (said.code, said.out) == (2, "")
    assert "1/600 (abandoned), 2/600 (live); name one of them" in said.err
    assert keys(store) == before
    assert ckpt("prune", tmp_path, "--remove", "1/600").code == 0
    assert listed(ckpt, tmp_path) == ["1/500", "1/700", "2/510", "2/600"]


def test_a_prune_killed_half_way_is_finished_by_the_next(ckpt: Ckpt, tmp_path: Path) -> None:
    chain(tmp_path / "unhurt", 6)
    shutil.copytree(tmp_path / "unhurt", tmp_path / "hurt")
    ckpt("prune", tmp_path / "unhurt", "--keep-last", 2)
    hurt = LocalStore(tmp_path / "hurt")
    dying = FaultyStore(hurt, crash_at=3, verbs=frozenset({"delete"}))
    with pytest.raises(Crash):
        execute(plan_prune(dying, Keep(last=2), grace=3600.0), dying, clock=SystemClock())
    assert len(hurt.list(PRUNES)) == 1
    assert ckpt("verify", tmp_path / "hurt", "--deep").code == 0, "a crash never leaves a snapshot that lacks something"
    said = ckpt("prune", tmp_path / "hurt", "--keep-last", 2)
    assert said.code == 0
    assert keys(hurt) == keys(LocalStore(tmp_path / "unhurt"))
    assert not hurt.list(PRUNES)


def test_ctrl_c_among_the_removals_is_told_and_the_next_prune_finishes(
    ckpt: Ckpt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupting(LocalStore):
        """Ctrl-C while the second batch of removals goes on."""

        deletes = 0

        def delete(self, keys: Sequence[str]) -> None:
            self.deletes += 1
            if self.deletes == 2:
                signal.raise_signal(signal.SIGINT)
            super().delete(keys)

    chain(tmp_path, 5)
    store = Interrupting(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(screen, "open_store", lambda url, **options: store)
        said = ckpt("prune", tmp_path, "--keep-last", 1)
    assert store.deletes == 2
    assert said.code == 130
    assert said.err == "ckpt: interrupted; nothing is left half done, and running it again does the rest\n"
    assert said.lines[-1].startswith("removing 3 snapshots")
    assert listed(ckpt, tmp_path) == ["1/40", "1/50"]
    assert store.list(PRUNES)
    assert ckpt("prune", tmp_path, "--keep-last", 1).code == 0
    assert not store.list(PRUNES)
    assert not [key for key in keys(store) if f"{10:012d}/00000.json" in key]


def test_a_store_that_fails_is_an_error_and_the_next_prune_goes_on(
    ckpt: Ckpt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """M3, D7"""
    store, _ = chain(tmp_path, 5)
    before = keys(store)
    for verb in ("list", "put", "delete"):
        faulty = FaultyStore(store, fail_at=1, for_ever=True, error=Unavailable, verbs=frozenset({verb}))
        with monkeypatch.context() as patched:
            patched.setattr(screen, "open_store", lambda url, faulty=faulty, **options: faulty)
            said = ckpt("prune", tmp_path, "--keep-last", 1)
        assert faulty.fired
        assert said.code == 2
        assert "failed on purpose" in said.err
        assert "removed" not in said.out
        assert keys(store) - {e.key for e in store.list(PRUNES)} == before
    assert ckpt("prune", tmp_path, "--keep-last", 1).code == 0
    assert listed(ckpt, tmp_path) == ["1/40", "1/50"]
    assert not store.list(PRUNES)


def test_where_nothing_is_there_is_nothing_to_remove(ckpt: Ckpt, tmp_path: Path) -> None:
    said = ckpt("prune", tmp_path / "nowhere", "--keep-last", 1)
    assert (said.code, said.out, said.err) == (0, "nothing to remove\n", "")
    assert not (tmp_path / "nowhere").exists()
    assert ckpt("prune", tmp_path / "nowhere", "--remove", 10).code == 2


def test_what_a_job_resumed_from_is_spared_with_the_reason(ckpt: Ckpt, tmp_path: Path) -> None:
    store, ids = chain(tmp_path, 4)
    DirectWriter(store, run=NEXT).begin(resumed_from=ids[0])
    said = ckpt("prune", tmp_path, "--keep-last", 1)
    assert f"  10    1  keep    run {NEXT} resumed from it" in said.lines
    assert listed(ckpt, tmp_path)[0] == "1/10"
    assert RUN < NEXT
