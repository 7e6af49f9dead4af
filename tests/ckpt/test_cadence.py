"""How often to save, with a clock of our own."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ckpt
from ckpt.cadence import REMEMBERED, Adaptive, Pace, best_interval, expected_mtbf
from ckpt.errors import Unavailable
from ckpt.history.failures import Lives

HOUR = 3600.0
costs = st.floats(1e-4, 1e4)


@given(blocked=costs, durable=st.floats(0, 1e5), mtbf=st.floats(1.0, 1e7), overhead=st.floats(1e-4, 0.9))
def test_saving_never_takes_more_than_the_overhead_nor_laps_itself(
    blocked: float, durable: float, mtbf: float, overhead: float
) -> None:
    interval = best_interval(blocked, durable, mtbf, overhead)
    assert blocked <= overhead * interval * (1 + 1e-9)
    assert interval >= durable


@given(blocked=st.floats(1e-3, 10), mtbf=st.floats(1e3, 1e6))
def test_the_interval_loses_least_where_nothing_else_binds(blocked: float, mtbf: float) -> None:
    """Expected time for work of length 1, exponential failures, no restart cost (Daly 2006, eq. 13)."""

    def lost(interval: float) -> float:
        return mtbf * math.expm1((interval + blocked) / mtbf) / interval

    best = best_interval(blocked, 0.0, mtbf, 0.999)
    assert lost(best) <= 1.001 * min(lost(best * factor) for factor in (0.5, 0.8, 1.25, 2.0))


def test_young_s_example() -> None:
    assert best_interval(1.0, 0.0, 3 * HOUR, 0.03) == pytest.approx(math.sqrt(2 * 3 * HOUR), rel=0.01)
    assert best_interval(0.1, 0.0, 3 * HOUR, 0.001) == pytest.approx(100.0), "the overhead binds"
    assert best_interval(0.1, 500.0, 3 * HOUR, 0.03) == 500.0, "no save begins before the last one is durable"
    assert best_interval(1e6, 0.0, HOUR, 0.9) >= 1e6


def test_observed_failures_correct_the_prior() -> None:
    assert expected_mtbf(3 * HOUR, Lives()) == 3 * HOUR
    assert expected_mtbf(3 * HOUR, Lives(failures=5, seconds=3 * HOUR)) == HOUR
    assert expected_mtbf(3 * HOUR, Lives(failures=0, seconds=97 * HOUR)) == 100 * HOUR


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def pace(clock: Clock, lives: Callable[[], Lives] = Lives, **settings: float | str) -> Pace:
    made = Pace(Adaptive(**settings), lives, clock)  # type: ignore[arg-type]
    assert made.due(), "the first save is the measure of those to come"
    return made


def looked(made: Pace) -> Pace:
    assert made._looking is not None
    made._looking.join()
    return made


def test_a_save_is_due_when_the_interval_has_passed_since_the_last_one_began() -> None:
    clock = Clock()
    made = pace(clock, mtbf="3h")
    clock.now = 10.0
    made.began(10.0, 0.5)
    made.committed(4.0)
    interval = looked(made).interval
    assert interval == pytest.approx(best_interval(0.5, 4.0, 3 * HOUR, 0.03))
    clock.now = 10.0 + interval - 0.01
    assert not made.due()
    clock.now = 10.0 + interval
    assert made.due()


def test_the_first_save_of_a_process_is_forgotten_as_a_measure() -> None:
    made = pace(Clock())
    for blocked in (30.0, *[0.1] * (REMEMBERED - 1)):
        made.began(0.0, blocked)
    assert made.costs[0] == 0.1
    looked(made)


def test_what_a_step_waited_for_a_copy_counts_as_blocked() -> None:
    made = pace(Clock())
    made.held_back(9.0)  # nothing was saved yet
    made.began(0.0, 0.25)
    made.held_back(0.5)
    assert looked(made).costs[0] == 0.75


def test_the_slowest_rank_s_costs_count() -> None:
    made = pace(Clock())
    made.began(0.0, 0.1)
    mine = looked(made).interval
    made.hear(0.4, 1.0)
    assert mine is not None and made.interval == pytest.approx(best_interval(0.4, 1.0, 3 * HOUR, 0.03))
    made.hear(0.0, 0.0)
    assert made.interval == mine


def test_failures_on_the_store_shorten_the_interval_and_an_unreachable_store_does_not_matter() -> None:
    often = pace(Clock(), lambda: Lives(failures=9, seconds=HOUR))
    often.began(0.0, 1.0)

    def unreachable() -> Lives:
        raise Unavailable("gone", store="s", key="runs/")

    seldom = pace(Clock(), unreachable)
    seldom.began(0.0, 1.0)
    a, b = looked(often).interval, looked(seldom).interval
    assert a is not None and b is not None and a < b == pytest.approx(best_interval(1.0, 0.0, 3 * HOUR, 0.03))


def test_the_log_says_the_interval_when_it_changed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ckpt")
    made = pace(Clock())
    for blocked in (1.0, 1.0, 1.01):
        made.began(0.0, blocked)
        looked(made).due()
    assert [r.getMessage()[:14] for r in caplog.records] == ["a save every 1"]
    for _ in range(REMEMBERED):
        made.began(0.0, 4.0)
    made.due()
    assert len(caplog.records) == 2 and "keeps training 4 s" in caplog.records[1].getMessage()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"mtbf": "0s"}, "mtbf"),
        ({"mtbf": "soon"}, "soon"),
        ({"overhead": 0}, "overhead"),
        ({"overhead": 1.0}, "overhead"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ckpt.Adaptive(**settings)  # type: ignore[arg-type]
