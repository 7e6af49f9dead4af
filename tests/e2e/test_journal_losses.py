"""Node losses at random moments, on four sharded ranks with a journal: no completed step is lost, no bit differs."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

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
