"""The thread that brings copies up to date."""

from __future__ import annotations

import threading

import pytest

from ckpt.errors import CheckpointError
from ckpt.format.names import RunId
from ckpt.history.clock import SystemClock
from ckpt.history.copier import Copier, bring_over, chores
from ckpt.history.levelling import Levelling
from ckpt.history.tiers import Tiers
from storage_backends.base import Unavailable
from storage_backends.fanout import FanoutStore
from storage_backends.memory import MemoryStore
from storage_backends.tiered import TieredStore
from tests.support.stores import RUN, drifting, make_store


class Counted:
    """A chore that tells of its passes, waits at a gate, and says what it is told to say."""

    def __init__(self) -> None:
        self.passes: list[RunId] = []
        self.began = threading.Event()
        self.gate = threading.Event()
        self.says: str | Exception | None = None

    def catch_up(self, run: RunId) -> str | None:
        self.passes.append(run)
        self.began.set()
        assert self.gate.wait(30)
        if isinstance(self.says, Exception):
            raise self.says
        return self.says


def copier(chore: Counted, run: RunId | None = RUN) -> Copier:
    return Copier(MemoryStore(), [chore], lambda: run)


def test_nothing_runs_before_the_first_nudge_nor_without_anything_to_do() -> None:
    chore = Counted()
    assert copier(chore).stop(0) is None
    assert chore.passes == []
    idle = Copier(MemoryStore(), [], lambda: RUN)
    idle.nudge()
    assert idle.stop(0) is None


def test_nudges_while_it_works_become_one_pass_and_what_came_before_stop_is_copied() -> None:
    chore = Counted()
    one = copier(chore)
    one.nudge()
    assert chore.began.wait(30)
    for _ in range(5):
        one.nudge()
    chore.gate.set()
    assert one.stop(30) is None
    assert 2 <= len(chore.passes) <= 3


@pytest.mark.parametrize(
    "said", ["2 of 3", Unavailable("tier away", store="s", key="k"), CheckpointError("taken over"), KeyError("a bug")]
)
def test_stop_says_what_the_last_pass_could_not_do(said: str | Exception) -> None:
    chore = Counted()
    chore.gate.set()
    one = copier(chore)
    chore.says = said
    one.nudge()
    assert str(said) in str(one.stop(30)) or repr(said) in str(one.stop(30))


def test_a_pass_that_is_slower_than_the_timeout_is_still_copying() -> None:
    chore = Counted()
    one = copier(chore)
    one.nudge()
    assert chore.began.wait(30)
    assert one.stop(0) == "still copying"
    chore.gate.set()
    assert one.stop(30) is None


def test_between_runs_nothing_is_copied() -> None:
    chore = Counted()
    one = copier(chore, run=None)
    one.nudge()
    assert one.stop(30) is None
    assert chore.passes == []


def test_each_place_that_may_be_behind_has_its_chore() -> None:
    a, b, c = (MemoryStore(name) for name in "abc")
    clock = SystemClock()
    assert chores(a, clock, 0, 1) == []
    assert [type(chore) for chore in chores(FanoutStore(a, b), clock, 0, 1)] == [Levelling]
    nested = TieredStore(a, FanoutStore(b, c))
    assert [type(chore) for chore in chores(nested, clock, 0, 1)] == [Tiers, Levelling]


def test_a_verb_brings_everything_over_at_once() -> None:
    fast, one, other = (MemoryStore(name) for name in "abc")
    store = TieredStore(fast, FanoutStore(one, other))
    assert bring_over(store, SystemClock()) is None  # nothing is there yet
    make_store(store, drifting(2, rows=16))
    assert bring_over(store, SystemClock()) is None
    assert [e.key for e in one.list("")] == [e.key for e in other.list("")] == [e.key for e in fast.list("")]
