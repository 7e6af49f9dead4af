"""PROTOCOL.md explored at random: a model of it, and the real code over a simulated store, on the same scenarios.

2,000 seeds each: ranks, restarts, jobs that overlap, zombies that go on after hours, prunes, pins, listings that lag,
puts that fail and land, or land later. `rules.py` says what must hold; that it can be broken is tested too: each rule
of the protocol in turn is switched off, and the exploration must notice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import pytest

from ckpt.history import commit as committing
from ckpt.history import plan, retention
from ckpt.history.catalog import History, read_history
from storage_backends.base import Store
from tests.faults.model import play_model
from tests.faults.model_prune import RULES
from tests.faults.playing import Mutations, Scenario, play_real, scenario
from tests.faults.rules import Rules
from tests.faults.simulated import Violated, World

SCHEDULES = 2000
BLOCK = 250
CAMPAIGN = 100_000

Play = Callable[[Scenario], tuple[World, Rules]]

HAPPENINGS = (
    "fails, and has landed", "fails, and lands later", "fails, for good", "dies", "stops until", "delete snapshots/",
    "put pins/", "put prunes/", "list parts/",
)  # fmt: skip


def explore(play: Play, seeds: Iterable[int]) -> Counter[str]:
    """Play these seeds; what happened in them all. Raises Violated, with the seed and the end of its schedule."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        world, rules = play(scenario(seed))
        seen.update(calls=world.calls, committed=len(rules.told), pruned=rules.pruned, withdrawn=rules.withdrawn)
        seen.update(claims=len(rules.claims), pins=len(rules.pins), runs=len(rules.runs))
        seen.update({what: sum(what in line for line in world.log) for what in HAPPENINGS})
    return seen


@pytest.mark.parametrize("play", [play_model, play_real], ids=["model", "real code"])
@pytest.mark.parametrize("block", range(0, SCHEDULES, BLOCK))
def test_no_listed_snapshot_ever_loses_a_byte_and_no_two_attempts_mix(play: Play, block: int) -> None:
    """C1, C2, C5, D4, E5, B6, at this floor"""
    seen = explore(play, range(block, block + BLOCK))
    proof = ("committed", "pruned", "claims", "pins", *HAPPENINGS)
    assert all(seen[what] > 10 for what in proof), f"hardly anything happened: {seen}"
    assert seen["runs"] > BLOCK


@pytest.mark.campaign
@pytest.mark.parametrize("play", [play_model, play_real], ids=["model", "real code"])
def test_many_more_schedules_hold_too(play: Play) -> None:
    assert explore(play, range(SCHEDULES, CAMPAIGN))["withdrawn"] > 100


@pytest.mark.parametrize("play", [play_model, play_real], ids=["model", "real code"])
def test_a_schedule_can_be_played_again(play: Play) -> None:
    for seed in (1, 5, 9):
        assert play(scenario(seed))[0].log == play(scenario(seed))[0].log


# --- the exploration would notice ----------------------------------------------------------------------------------

KNOWN = {
    "packs before the part": 3,
    "the fence": 0,
    "parts listed once more": 161,
    "claims give way to announcements": 1058,
    "commits give way to announcements": 332,
    "the second look": 73,
    "the newest run keeps what it may lean on": 267,
    "a step that may yet be committed keeps what it leans on": 586,
    "leftovers younger than grace stay": 6114,
    "leftovers of the newest run stay": 243,
    "runs are listed before parts": 9981,
}
"""For each rule a seed that shows what happens without it, tried first; when the scenarios change, others will."""


def violation(play: Play, first: int = 0) -> str | None:
    for seed in chain([first], range(2 * SCHEDULES)):
        try:
            play(scenario(seed))
        except Violated as found:
            return str(found).splitlines()[0]
    return None


@pytest.mark.parametrize("rule", sorted(RULES))
def test_the_model_goes_wrong_without_any_one_of_its_rules(rule: str) -> None:
    assert set(KNOWN) == RULES
    assert violation(lambda s: play_model(s, frozenset({rule})), KNOWN[rule]), "the rule is not needed, or not watched"


def _without_the_fence(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(committing, "newest_run", lambda store: None)


def _without_listing_parts_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(committing._Step, "_gone", lambda step, snapshot: None)


def _without_looking_for_prunes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(committing, "claimed_by_prune", lambda store, id_: False)


def _without_the_second_look(patch: pytest.MonkeyPatch) -> None:
    def remembered(store: Store, *, known: History | None = None, **more: Any) -> History:
        return read_history(store, **more) if known is None else known

    patch.setattr(retention, "read_history", remembered)


def _without_protecting_steps_in_the_making(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(plan._Clock, "old", lambda clock, entries: True)


@pytest.mark.parametrize(
    ("switch_off", "known"),
    [
        (_without_the_fence, 0),
        (_without_listing_parts_again, 979),
        (_without_looking_for_prunes, 2583),
        (_without_the_second_look, 6),
        (_without_protecting_steps_in_the_making, 1484),
    ],
    ids=lambda value: value.__name__.strip("_").replace("_", " ") if callable(value) else "",
)
def test_the_real_code_goes_wrong_without_a_rule(
    switch_off: Callable[[pytest.MonkeyPatch], None], known: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    switch_off(monkeypatch)
    assert violation(play_real, known), "the rule is not needed, or not watched"


@pytest.mark.parametrize(
    ("habits", "known"),
    [(Mutations(part_before_packs=True), 0), (Mutations(claims_ignored=True), 108)],
    ids=["the part before its packs", "claims that give way to nobody"],
)
def test_jobs_that_break_the_protocol_are_noticed(habits: Mutations, known: int) -> None:
    assert violation(lambda s: play_real(s, habits), known), "the rule is not needed, or not watched"
