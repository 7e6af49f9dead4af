"""Disk use over live bytes, in small; scripts/bench_space.py is the same over 500 saves."""

from __future__ import annotations

from pathlib import Path

from scripts.bench_space import BAR, measure


def test_sixty_saves_of_a_mixed_state_keep_less_than_twice_what_is_live(tmp_path: Path) -> None:
    """Weights and moments that change all over, or here and there; a frozen base; layers frozen in turn."""
    use = measure("mixed", saves=60, keep=3, every=5, url=str(tmp_path / "store"))
    assert len(use.ratios) == 12
    assert 1 < use.worst < 1.7, use.ratios
    assert use.compacted < use.ratios[-1] * 1.02


def test_rows_that_are_rarely_touched_keep_less_than_twice_what_is_live(tmp_path: Path) -> None:
    """Each has a small delta somewhere, and with it would keep a pack of deltas long dead."""
    use = measure("rows", saves=60, keep=3, every=5, url=str(tmp_path / "store"))
    assert 1 < use.worst < BAR, use.ratios
