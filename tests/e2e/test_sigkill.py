"""SIGKILL at random moments: a real training in real processes, against one that was never hurt."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from ckpt.history.catalog import read_history
from recovery.verify import verify
from storage_backends import open_store
from tests.support.forks import start

SCRIPT = Path(__file__).with_name("forty_lines.py")

pytestmark = pytest.mark.e2e


def test_the_script_is_what_it_says() -> None:
    body = SCRIPT.read_text().split('"""', 2)[2].strip().splitlines()
    assert len([line for line in body if line.strip()]) <= 40


@pytest.mark.parametrize("rounds", [30, pytest.param(300, marks=[pytest.mark.campaign, pytest.mark.timeout(3600)])])
def test_killed_at_random_it_resumes_from_the_newest_published_step_and_ends_bit_identical(
    tmp_path: Path, rounds: int
) -> None:
    """C1 and L1."""
    steps = 12 * rounds
    log = tmp_path / "log"
    began = time.monotonic()
    unhurt = start(SCRIPT, str(tmp_path / "other"), str(tmp_path / "unhurt"), str(steps), log=log)
    unhurt.join()
    whole = time.monotonic() - began
    assert unhurt.exitcode == 0, log.read_text()

    seed = random.randrange(2**32)
    rng = random.Random(seed)
    url, out, starts = tmp_path / "store", tmp_path / "hurt", tmp_path / "hurt.starts"
    store = open_store(str(url))
    killed = 0
    while not out.exists():
        history = read_history(store)
        expected = 0 if history.newest is None else history.newest.step
        before = len(starts.read_text().splitlines()) if starts.exists() else 0
        process = start(SCRIPT, str(url), str(out), str(steps), log=log)
        # A moment anywhere from before the restore to somewhat above the fair share of the work: thirty kills must fit
        # in, also where the machine has become faster since the unhurt run was timed.
        process.join(rng.uniform(0, 1.4 * whole / rounds) if killed < rounds else None)
        process.kill()
        process.join()
        assert process.exitcode in (0, -9), f"seed {seed}: {log.read_text()}"
        killed += process.exitcode == -9
        resumed = starts.read_text().splitlines()[before:] if starts.exists() else []
        assert [int(line) for line in resumed] in ([], [expected]), f"seed {seed}"
    assert killed >= 25, f"only {killed} kills: the test proves too little"
    errors = [finding for finding in verify(store, deep=True, only=None) if finding.level == "error"]
    assert not errors, f"seed {seed}: {errors}"
    assert out.read_bytes() == (tmp_path / "unhurt").read_bytes(), f"seed {seed}"
