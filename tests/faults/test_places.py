"""A fault at every single call that a job makes to one of several places: whatever is listed afterwards is whole, and a
place of a fan-out that fails costs no save."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import pytest

import ckpt
from recovery.verify import verify
from storage_backends.base import Refused, StorageError, Store
from storage_backends.fanout import FanoutStore
from storage_backends.memory import MemoryStore
from storage_backends.tiered import TieredStore
from tests.faults.living import Book, Process, check_goes_on, check_store, damage
from tests.support.faulty import WRITES, Crash, FaultyStore

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*step .* was not saved:RuntimeWarning"),
    pytest.mark.usefixtures("small_packs", "no_noise"),
]


Build = Callable[[Store, Store], Store]
TIERS: Build = partial(TieredStore, keep_fast=1)


def two_saves(store: Store, book: Book, keep: ckpt.Keep | None = None) -> None:
    with Process(store, book, keep=keep) as process:
        process.restore()
        process.save()
        process.save()


def at_every_call(
    build: Build, which: int, *, first: bool, at: str = "fail_at", story: Callable[[Store, Book], None] = two_saves,
    after: Callable[[Store, Store], None] = lambda one, other: None, **fault: Any,
) -> tuple[int, int, set[tuple[str, str]]]:  # fmt: skip
    """Play a story on two places, with the fault at each call to one of them in turn, and look at what is left.

    Args:
        which: 0 or 1: the place that fails.
        first: on empty places; else on two that hold two steps.
        after: looks at the two places as the story left them.

    Returns:
        how many calls were struck, how many stories told both their saves, and what was struck: (verb, folder).
    """
    told, struck = 0, set()
    for n in count(1):
        places, book = [MemoryStore("one"), MemoryStore("other")], Book()
        if not first:
            two_saves(build(*places), book)
        before = book.told
        named = {at: n, "where": lambda key: not key.startswith("alive/"), **fault}
        faulty = FaultyStore(places[which], **named)
        pair: list[Store] = [faulty if k == which else place for k, place in enumerate(places)]
        try:
            story(build(*pair), book)
        except (Crash, StorageError):
            assert faulty.fired
        after(*places)
        store = build(*places)
        if n % 2:  # else the next start of the job itself makes up for what a place lacks
            assert [f.text for f in verify(store, deep=True, repair=True, threads=1) if f.level == "error"] == []
            check_store(store, book)
        told += book.told == before + 2
        check_goes_on(store, book)
        check_store(store, book)
        check_store(places[1], book)
        if faulty.struck is None:
            return n - 1, told, struck
        struck.add((faulty.struck[0], faulty.struck[1].partition("/")[0]))
    raise AssertionError


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("fault", [{}, {"for_ever": True}, {"for_ever": True, "error": Refused}], ids=str)
def test_a_place_that_takes_no_write_from_any_call_on_costs_no_save(which: int, fault: dict[str, Any]) -> None:
    calls, told, struck = at_every_call(FanoutStore, which, first=False, verbs=WRITES, **fault)
    assert told == calls + 1
    assert struck >= {("put", folder) for folder in ("runs", "packs", "parts", "snapshots")}


@pytest.mark.parametrize("which", [0, 1])
def test_a_place_that_answers_nothing_from_any_call_on_costs_no_save_once_the_job_has_begun(which: int) -> None:
    """Only a job that begins needs both of two places: the silent one may hold the newest step."""

    def story(store: Store, book: Book) -> None:
        with Process(store, book) as process:
            process.restore()
            assert process.save()
            assert process.save()

    calls, told, struck = at_every_call(FanoutStore, which, first=False, story=story, for_ever=True)
    assert told >= calls // 2 > 10
    assert struck >= {("put", "packs"), ("put", "snapshots"), ("list", "runs"), ("list", "snapshots")}


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("lands", [False, True])
def test_a_crash_at_any_call_to_a_fanout_leaves_only_whole_snapshots(which: int, lands: bool) -> None:
    calls, _, struck = at_every_call(FanoutStore, which, first=True, at="crash_at", verbs=WRITES, lands=lands)
    assert calls > 8
    assert struck >= {("put", folder) for folder in ("runs", "packs", "parts", "snapshots")}


@pytest.mark.parametrize("which", [0, 1], ids=["fast", "durable"])
def test_a_crash_at_any_call_to_a_tier_leaves_only_whole_snapshots_on_the_durable_one(which: int) -> None:
    """The copier works beside the saves, so the n-th call is not always the same; every one is struck at some time."""

    def durable_is_whole(_: Store, durable: Store) -> None:
        assert damage(durable) == []

    calls, _, struck = at_every_call(
        TIERS, which, first=False, at="crash_at", verbs=WRITES, after=durable_is_whole,
        story=partial(two_saves, keep=ckpt.Keep(last=1)),
    )  # fmt: skip
    assert calls > 8
    assert struck >= {("put", folder) for folder in ("runs", "packs", "parts", "snapshots")}
