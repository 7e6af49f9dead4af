"""Node losses at random moments, on four sharded ranks with a journal: no completed step is lost, no bit differs."""

from __future__ import annotations

import random
import re
import shutil
from pathlib import Path

import pytest

from tests.support.procs import succeed, torchrun
from tests.support.rolling import hurt, outcome, unhurt

pytestmark = pytest.mark.e2e

CASES = [
    ("AdamW", False),
    ("AdamW:foreach", False),
    ("AdamW:fused", False),
    ("SGD", False),
    ("AdamW", True),
    ("AdamW:fused", True),
    ("AdamW:foreach", True),
    ("SGD", True),
]


@pytest.mark.parametrize(
    ("cases", "total", "losses"),
    [
        pytest.param([("AdamW", False)], 30, 2, id="AdamW-fp32"),
        pytest.param([("AdamW:fused", True)], 30, 1, id="fused-bf16"),
        pytest.param([("SGD", False)], 30, 1, id="SGD-fp32"),
        pytest.param(CASES, 220, 20, id="campaign", marks=[pytest.mark.campaign, pytest.mark.timeout(7200)]),
    ],
)
def test_training_goes_on_from_the_last_completed_step_and_ends_bit_identical(
    tmp_path: Path, cases: list[tuple[str, bool]], total: int, losses: int
) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    for n, (kind, half) in enumerate(cases):
        base = tmp_path / str(n)
        (base / "hurt").mkdir(parents=True)
        unhurt(str(base / "unhurt-store"), base / "unhurt", kind, half, total)
        hurt(str(base / "store"), base / "hurt", kind, half, total, losses, 25, rng)
        assert outcome(base / "hurt") == outcome(base / "unhurt"), f"seed {seed}: {kind} {half}"


SCRIPT = """
import os, signal, sys
from pathlib import Path

import ckpt
from tests.support.procs import succeed, torchrun
from tests.support.rolling import life

url, out, total, *nodes = sys.argv[1:]


def hold(completed):
    if completed == 11 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        print(f"rank {os.environ['RANK']} has completed 11", flush=True)
        signal.pause()  # up to the agent's SIGTERM: every rank dies between two steps


life(url, Path(out), "AdamW", False, int(total), nodes, ckpt.Journal(flush="1 step", to="both"), 25, hold)
"""


def test_a_torchrun_agent_restarts_the_job_at_its_last_step(tmp_path: Path) -> None:
    """One node of two dies with its mirrors; the agent starts all four workers again."""
    (tmp_path / "hurt").mkdir()
    unhurt(str(tmp_path / "unhurt-store"), tmp_path / "unhurt", "AdamW", False, 20)
    nodes = [str(tmp_path / "node-a"), str(tmp_path / "node-b")]
    with torchrun(SCRIPT, 4, [tmp_path / "store", tmp_path / "hurt", 20, *nodes], max_restarts=1) as job:
        for rank in range(4):
            job.until(0, f"rank {rank} has completed 11")
        job.kill(2)
        job.kill(3)
        shutil.rmtree(nodes[1], ignore_errors=True)
        out = succeed(job.wait())[0]
    starts = [int(found) for found in re.findall(r"resumed (\d+) lost", out)]
    assert starts.count(0) == 4 and len(starts) == 8
    assert len(set(starts[4:])) == 1 and starts[4] >= 11 and "lost 0" in out
    assert outcome(tmp_path / "hurt") == outcome(tmp_path / "unhurt")
