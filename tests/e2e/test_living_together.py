"""One process saves, one prunes, strips and compacts, one restores: all on one store, and none waits for another."""

from __future__ import annotations

import hashlib
import json
import random
import sys
from functools import partial
from pathlib import Path

import pytest

import ckpt
from ckpt import checkpointer
from ckpt.errors import LayoutMismatch, NoSnapshot
from ckpt.history.clock import SystemClock
from ckpt.history.retention import execute, plan_prune
from ckpt.saving import packing
from ckpt.saving.writer import WriterSettings
from recovery.compact import compact
from recovery.compaction import plan_compact
from recovery.load import load_into
from recovery.looking import History
from recovery.verify import verify
from storage_backends.local import LocalStore
from tests.support.procs import Job, succeed
from tests.support.training import Training

pytestmark = pytest.mark.e2e

ONE_START = 7
"""Saves of one run; then the job restores, and goes on in another, so that older ones may be rewritten."""
KEEP = ckpt.Keep(last=3, every=10, moments_last=2)
OPTIONS = ckpt.Options(chunk=4096, heartbeat="1h")


def digests(training: Training) -> dict[str, str]:
    return {name: hashlib.sha256(data).hexdigest() for name, data in training.bytes().items()}


def saves(folder: Path) -> None:
    """Until it is over. What each step must come back as lies beside the store before it is saved."""
    checkpointer.WriterSettings = partial(WriterSettings, pack_limit=8192, workers=1)  # type: ignore[misc,assignment]
    packing.TINY = 512
    training, step = Training(), 0
    with ckpt.Checkpointer(folder / "store", training.state, mirror="off", options=OPTIONS) as saver:
        saver.restore()
        while not (folder / "over").exists():
            step += 1
            training.train(step)
            (folder / f"{step}.json").write_text(json.dumps(digests(training)))
            saver.save(step).wait(60)
            print(f"saved {step}.", flush=True)
            if step % ONE_START == 0:
                assert saver.restore() == step
    print(json.dumps({"saved": step}))


def tends(folder: Path) -> None:
    """A round whenever it is told to, beside a job: so by a grace that no upload exceeds."""
    store = LocalStore(folder / "store")
    did = dict.fromkeys(("rounds", "removed", "stripped", "rewritten"), 0)
    while sys.stdin.readline().strip() == "go":
        done = execute(plan_prune(store, KEEP, grace=3600), store, clock=SystemClock())
        did["removed"] += len(done.snapshots)
        did["stripped"] += len(done.stripped.ids)
        did["rewritten"] += len(compact(plan_compact(store, threshold=1.0), store).snapshots)
        did["rounds"] += 1
        print(f"round {did['rounds']}.", flush=True)
    print(json.dumps(did))


def restores(folder: Path) -> None:
    """The newest and any other in turn, until it is over."""
    store, luck = LocalStore(folder / "store"), random.Random(1)
    did = dict.fromkeys(("newest", "named", "weights", "gone"), 0)
    while not (folder / "over").exists():
        training = Training(seed=did["newest"])
        found = History(store).list()
        if not found:
            continue
        if did["newest"] <= did["named"] + did["weights"]:
            step, names = load_into(store, training.state).step, None
            did["newest"] += 1
        else:
            one = luck.choice(found)
            step = one.step
            names = training.model.state_dict().keys() if one.without else None
            try:
                load_into(store, {"model": training.model} if one.without else training.state, one.name)
            except (NoSnapshot, LayoutMismatch):  # it went, or became weights only, since it was listed
                did["gone"] += 1
                continue
            did["weights" if one.without else "named"] += 1
        expected, restored = json.loads((folder / f"{step}.json").read_text()), digests(training)
        for name in names or expected.keys():
            assert restored[name] == expected[name], f"step {step}, {name}: not what was saved"
    print(json.dumps(did))


@pytest.mark.parametrize("rounds", [6, pytest.param(50, marks=[pytest.mark.campaign, pytest.mark.timeout(1800)])])
def test_prunes_and_compactions_beside_a_job_that_saves_and_one_that_restores_lose_and_tear_nothing(
    rounds: int, tmp_path: Path
) -> None:
    """D4."""
    with (
        Job(saves, 1, [tmp_path]) as saver,
        Job(tends, 1, [tmp_path]) as tender,
        Job(restores, 1, [tmp_path]) as reader,
    ):
        for n in range(1, rounds + 1):
            saver.until(0, f"saved {4 * n}.")
            tender.tell(0, "go")
            tender.until(0, f"round {n}.")
        (tmp_path / "over").touch()
        tender.tell(0, "enough")
        told = [json.loads(succeed(job.wait())[0].splitlines()[-1]) for job in (saver, tender, reader)]
    saved, tended, read = told
    print(told)
    assert tended["rounds"] == rounds
    assert all(tended[what] >= rounds // 2 for what in ("removed", "stripped")), tended
    assert tended["rewritten"] > 0, tended
    assert all(read[what] > 0 for what in ("newest", "named", "weights")), read
    store = LocalStore(tmp_path / "store")
    execute(plan_prune(store, KEEP, grace=0), store, clock=SystemClock())
    listed = History(store).list()
    assert listed[-1].step == saved["saved"]
    assert {one.step for one in listed} >= {*range(10, saved["saved"] + 1, 10)}
    for one in listed:
        training = Training(seed=1)
        load_into(store, {"model": training.model} if one.without else training.state, one.name)
        expected, restored = json.loads((tmp_path / f"{one.step}.json").read_text()), digests(training)
        names = training.model.state_dict().keys() if one.without else expected.keys()
        assert {name: restored[name] for name in names} == {name: expected[name] for name in names}
    assert [f.text for f in verify(store, deep=True) if f.level == "error"] == []
