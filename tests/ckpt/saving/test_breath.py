"""When a background thread pauses for training."""

from __future__ import annotations

from ckpt.saving.breath import PAUSE, STRETCH, Breath


class Watch:
    """A clock that moves only when told, and counts the sleeps."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def test_it_pauses_once_a_stretch_of_work_is_over_and_not_before() -> None:
    watch = Watch()
    breathe = Breath(watch.clock, watch.sleep)
    for _ in range(9):
        watch.now += STRETCH / 10
        breathe()
    assert watch.slept == []
    watch.now += STRETCH / 5
    breathe()
    assert watch.slept == [PAUSE]


def test_a_pause_starts_a_new_stretch_so_that_the_pauses_cost_a_bounded_share() -> None:
    watch = Watch()
    breathe = Breath(watch.clock, watch.sleep)
    work = 0.0
    for _ in range(1000):
        watch.now += STRETCH / 4
        work += STRETCH / 4
        breathe()
    assert 0 < len(watch.slept) <= work / STRETCH
    assert sum(watch.slept) <= 0.2 * work


def test_a_long_call_is_followed_by_a_pause() -> None:
    watch = Watch()
    breathe = Breath(watch.clock, watch.sleep)
    watch.now += 100 * STRETCH
    breathe()
    breathe()
    assert watch.slept == [PAUSE]
