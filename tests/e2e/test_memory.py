"""Peak memory of the verbs that move a whole state, each in a process of its own: it does not grow with the state."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.bench_moves import LIMIT, measure

pytestmark = pytest.mark.e2e

SMALL, BOUND = 200, 200e6
"""MB of the state, and bytes above the interpreter."""


def test_verbs_need_less_memory_than_the_state_they_move(tmp_path: Path) -> None:
    """In small, where the windows that they hold weigh most; and what is bounded here stays so at 1 GB."""
    peaks = {verb: peak for verb, _, peak in measure(tmp_path, SMALL, ["safetensors"])}
    assert peaks.keys() == {"verify deep", "export safetensors", "import safetensors", "compact"}
    assert all(peak < BOUND for peak in peaks.values()), peaks


@pytest.mark.campaign
@pytest.mark.timeout(1800)
def test_a_state_of_1_gb_needs_at_most_400_mb_above_the_interpreter(tmp_path: Path) -> None:
    peaks = {verb: peak for verb, _, peak in measure(tmp_path, 1000)}
    print({verb: f"{peak / 1e6:.0f} MB" for verb, peak in peaks.items()})
    assert len(peaks) == 8
    assert all(peak < LIMIT for peak in peaks.values()), peaks
