"""Ranks come to one conclusion, whatever happens to each."""

from __future__ import annotations

import pytest

from ckpt.errors import DamagedError, LayoutMismatch, Unavailable
from recovery.agree import Alone, Done, Skip, together
from recovery.read import Pruned
from tests.support.peers import ThreadRanks, on_ranks

DAMAGE = DamagedError("bad bytes", key="packs/x", step=3, rank=1, leaf="w", expected="a", found="b")
SILENCE = Unavailable("no answer", store="memory://", key="packs/x")
MISMATCH = LayoutMismatch("no fit", missing=("w",), changed={"v": "stored 1, live 2"})


def _run(*faults: Exception | None) -> list[Done[int] | Skip | Exception]:
    def stage(ranks: ThreadRanks) -> Done[int] | Skip:
        def work() -> int:
            fault = faults[ranks.rank]
            if fault is not None:
                raise fault
            return ranks.rank

        return together(ranks, work, wishes=lambda n: n == 2)

    return on_ranks(len(faults), stage)


def test_when_all_succeed_each_has_its_own_result_and_all_know_of_a_wish() -> None:
    assert _run(None, None, None) == [Done(0, True), Done(1, True), Done(2, True)]
    assert _run(None, None) == [Done(0, False), Done(1, False)]


def test_damage_on_one_rank_is_a_skip_for_all_with_all_that_is_known() -> None:
    """F5."""
    for result in _run(None, DAMAGE, None):
        assert isinstance(result, Skip)
        error = result.error
        assert isinstance(error, DamagedError)
        assert (error.key, error.step, error.rank, error.leaf) == ("packs/x", 3, 1, "w")


def test_a_silent_store_on_one_rank_is_raised_on_all() -> None:
    """F5: all raise the same error, nobody blocks."""
    for result in _run(None, None, SILENCE):
        assert isinstance(result, Unavailable)
        assert "no answer" in str(result)


def test_a_layout_mismatch_keeps_its_lists_on_every_rank() -> None:
    for result in _run(MISMATCH, None):
        assert isinstance(result, LayoutMismatch)
        assert (result.missing, result.changed) == (("w",), {"v": "stored 1, live 2"})


@pytest.mark.parametrize("other", [DAMAGE, Pruned("gone")])
def test_what_no_other_snapshot_cures_outweighs_what_one_would(other: Exception) -> None:
    assert all(isinstance(result, LayoutMismatch) for result in _run(other, MISMATCH))


def test_an_unknown_error_reaches_all_ranks_with_its_name() -> None:
    mine, others = _run(ZeroDivisionError("oops"), None)
    assert isinstance(mine, ZeroDivisionError)
    assert "rank 0: ZeroDivisionError: oops" in str(others)


def test_alone_everything_is_decided_at_once() -> None:
    assert together(Alone(), lambda: 5) == Done(5, False)
    skip = together(Alone(), lambda: (_ for _ in ()).throw(DAMAGE))
    assert isinstance(skip, Skip)
    assert skip.error is DAMAGE
