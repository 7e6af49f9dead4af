"""A fault at every single call that a job makes to its store, once and for ever, landing and not: whatever is listed
afterwards is whole, the newest of it comes back, and the next save is right."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest

import ckpt
from ckpt.format.key import Key
from ckpt.history.clock import SystemClock
from ckpt.history.keyed import with_key
from ckpt.history.retention import execute, plan_prune
from storage_backends.base import Refused, StorageError, Store
from storage_backends.memory import MemoryStore
from storage_backends.retry import RetryingStore
from tests.faults.living import Book, Process, check_goes_on, check_store
from tests.support.faulty import WRITES, Crash, FaultyStore

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*step .* was not saved:RuntimeWarning"),
    pytest.mark.usefixtures("small_packs", "no_noise"),
]


class Start:
    """A store, and the book of what is on it."""

    def __init__(self) -> None:
        self.disk = MemoryStore()
        self.store: Store = self.disk
        self.book = Book()

    def copy(self) -> Start:
        other = type(self)()
        for entry in self.disk.list(""):
            other.disk.put(entry.key, self.disk.get(entry.key))
        other.book = Book(dict(self.book.pages), self.book.told)
        return other


Story = Callable[[Store, Book], None]


def first_start(store: Store, book: Book) -> None:
    """On an empty store: two saves, the second of deltas."""
    with Process(store, book) as process:
        process.restore()
        process.save()
        process.save()


def second_start(store: Store, book: Book) -> None:
    """Saves on what a restart brought back, and on what a restore without one did; then a prune by hand. (One beside
    the saves, as `keep` does it, would make their calls fall differently each time.)"""
    with Process(store, book) as process:
        process.restore()
        process.save()
        process.restore()
        process.save()
    plan = plan_prune(store, ckpt.Keep(last=2), grace=0, threads=1)
    execute(plan, store, clock=SystemClock(), threads=1)


@pytest.fixture(scope="module")
def begun(small_packs: None) -> Start:
    """A store on which a job has saved four times, in two starts."""
    start = Start()
    for _ in range(2):
        first_start(start.store, start.book)
    assert start.book.told == 4
    return start


def the_fault_alone(store: FaultyStore) -> Store:
    return store


def retried(store: FaultyStore) -> Store:
    """As a store that was opened by its URL is; nobody waits."""
    return RetryingStore(store, sleep=lambda seconds: None)


def at_every_call(
    start: Start, story: Story, *, at: str = "fail_at", through: Callable[[FaultyStore], Store] = the_fault_alone,
    all_told: bool = False, **fault: Any,
) -> tuple[int, set[tuple[str, str]]]:  # fmt: skip
    """Play a story of two saves with the fault at each of its calls in turn, and look at what is left each time.

    Args:
        at: "fail_at" or "crash_at".
        all_told: every save must succeed in spite of the fault.

    Returns:
        how many calls the fault struck, and which: (verb, folder).
    """
    struck: set[tuple[str, str]] = set()
    for n in count(1):
        now = start.copy()
        before = now.book.told
        # The heartbeat beats by the clock, beside the story; no save and no restore looks at it.
        named = {at: n, "where": lambda key: not key.startswith("alive/"), **fault}
        store = FaultyStore(now.disk, **named)
        try:
            story(through(store), now.book)
        except (Crash, StorageError):
            assert store.fired
        if all_told or not store.fired:
            assert now.book.told == before + 2
        check_store(now.store, now.book)
        check_goes_on(now.store, now.book)
        if store.struck is None:
            return n - 1, struck
        struck.add((store.struck[0], store.struck[1].partition("/")[0]))
    raise AssertionError


SAVING = {("put", folder) for folder in ("runs", "packs", "parts", "snapshots")}
PRUNING = {("put", "prunes")} | {("delete", folder) for folder in ("snapshots", "parts", "packs", "prunes")}
LOOKING = {("get", "snapshots"), ("get", "parts"), ("get", "runs"), ("get_range", "packs")} | {
    ("list", folder) for folder in ("runs", "parts", "packs", "snapshots", "pins", "prunes")
}

CRASH = pytest.param({"at": "crash_at"}, id="crash")
CRASH_LANDS = pytest.param({"at": "crash_at", "lands": True, "verbs": WRITES}, id="crash-lands")
ONCE = pytest.param({}, id="once")
REFUSED = pytest.param({"error": Refused, "verbs": WRITES}, id="refused")
RETRIED = pytest.param({"lands": True, "verbs": WRITES, "through": retried, "all_told": True}, id="retried-lands")
FOR_EVER = pytest.param({"for_ever": True}, id="for-ever")
WRITES_FOR_EVER = pytest.param({"for_ever": True, "error": Refused, "verbs": WRITES}, id="writes-for-ever")


@pytest.mark.parametrize("fault", [CRASH, CRASH_LANDS, ONCE, REFUSED, RETRIED, FOR_EVER, WRITES_FOR_EVER])
def test_a_fault_at_any_call_of_the_first_saves_leaves_only_whole_snapshots(fault: dict[str, Any]) -> None:
    """A1, C1."""
    calls, struck = at_every_call(Start(), first_start, **fault)
    assert calls >= (14 if "verbs" in fault else 30)
    assert struck >= SAVING


KEY = Key(bytes(range(32)))


class Locked(Start):
    """Whoever looks afterwards has the key; the fault strikes below it."""

    def __init__(self) -> None:
        super().__init__()
        self.store = with_key(self.disk, KEY)


@pytest.mark.parametrize("fault", [CRASH, CRASH_LANDS, ONCE])
def test_the_same_on_an_encrypted_store(fault: dict[str, Any]) -> None:
    """A1, C1: keys change what objects hold, and nothing about the order in which they come."""
    calls, struck = at_every_call(Locked(), first_start, through=lambda store: with_key(store, KEY), **fault)
    assert calls >= (14 if "verbs" in fault else 30)
    assert struck >= SAVING


@pytest.mark.parametrize("fault", [CRASH, CRASH_LANDS, ONCE, REFUSED, RETRIED, WRITES_FOR_EVER])
def test_a_fault_at_any_call_after_a_restart_leaves_only_whole_snapshots(begun: Start, fault: dict[str, Any]) -> None:
    """A1, B6, C1: restores, deltas on what was restored, prunes; and what was lost is saved again under its step."""
    calls, struck = at_every_call(begun, second_start, **fault)
    assert calls >= (35 if "verbs" in fault else 120)
    assert struck >= SAVING | PRUNING
    assert "verbs" in fault or struck >= LOOKING
