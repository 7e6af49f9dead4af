from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from ckpt.errors import NoSnapshot
from ckpt.format.manifest import PruneDoc, seal
from ckpt.format.names import SnapshotId, SnapshotName, pin_key, prune_key
from ckpt.history.catalog import History, find, read_history
from ckpt.history.keep import Keep
from ckpt.history.pins import pin, unpin
from ckpt.history.retention import execute, plan_prune
from storage_backends.base import Store, Unavailable
from storage_backends.memory import MemoryStore
from tests.ckpt.history.making import RUN, FakeClock, put_keyframes, put_run, whole
from tests.support.faulty import FaultyStore

TEN, TWENTY, THIRTY = (SnapshotId(RUN, step) for step in (10, 20, 30))


@pytest.fixture
def store() -> MemoryStore:
    store = MemoryStore()
    put_run(store, RUN)
    put_keyframes(store, RUN, [10, 20, 30])
    return store


def pins(store: Store) -> dict[str, SnapshotId]:
    return read_history(store).pins


def test_a_pinned_snapshot_outlives_prunes_and_is_found_by_its_name(store: MemoryStore) -> None:
    pin(store, read_history(store), "best", TEN)
    execute(plan_prune(store, Keep(last=1), grace=0), store, clock=FakeClock())
    history = read_history(store)
    assert sorted(history.snapshots) == [TEN, THIRTY]
    assert find(history, "best") == TEN
    assert unpin(store, "best") == TEN
    execute(plan_prune(store, Keep(last=1), grace=0), store, clock=FakeClock())
    assert sorted(read_history(store).snapshots) == [THIRTY]


def test_a_name_that_is_taken_is_moved_only_when_asked(store: MemoryStore) -> None:
    pin(store, read_history(store), "best", TEN)
    pin(store, read_history(store), "best", TEN)
    with pytest.raises(ValueError, match="pin best names 1/10"):
        pin(store, read_history(store), "best", TWENTY)
    assert pins(store) == {"best": TEN}
    pin(store, read_history(store), "best", TWENTY, move=True)
    assert pins(store) == {"best": TWENTY}


@pytest.mark.parametrize("name", ["latest", "10", "000001-aaaaaaaa-000000000010", "", "a/b", ".hidden", "x" * 101, "ü"])
def test_a_name_that_means_something_else_pins_nothing(store: MemoryStore, name: str) -> None:
    with pytest.raises(ValueError, match="pin name"):
        pin(store, read_history(store), name, TEN)
    assert pins(store) == {}


def test_a_pin_gives_way_to_a_prune_that_has_announced_itself(store: MemoryStore) -> None:
    store.put(prune_key("ab"), seal(PruneDoc(1, (str(TEN),), (SnapshotName(TEN).key,))))
    with pytest.raises(NoSnapshot, match="1/10: a prune is removing it"):
        pin(store, read_history(store), "best", TEN)
    assert pins(store) == {}
    pin(store, read_history(store), "good", TWENTY)
    assert pins(store) == {"good": TWENTY}


def test_a_pin_of_what_was_pruned_since_the_look_is_taken_back(store: MemoryStore) -> None:
    history = read_history(store)
    execute(plan_prune(store, Keep(last=1), grace=0), store, clock=FakeClock())
    with pytest.raises(NoSnapshot, match="1/10"):
        pin(store, history, "best", TEN)
    assert pins(store) == {}


class Between(FaultyStore):
    """Does something once, before its n-th call."""

    def __init__(self, inner: Store, n: int, do: Callable[[], object]) -> None:
        super().__init__(inner)
        self._n, self._do = n, do
        self.done = False

    def _fails(self, verb: str, key: str) -> bool:
        if len(self.calls) == self._n and not self.done:
            self.done = True
            self._do()
        return super()._fails(verb, key)


@pytest.mark.parametrize("outer", ["pin", "prune"])
def test_pin_and_prune_at_once_lose_nothing_wherever_one_falls_into_the_other(outer: str) -> None:
    """A pin that was said to be made is of a snapshot that stays, whole."""
    outcomes = set()
    for n in range(100):
        inner = MemoryStore()
        put_run(inner, RUN)
        put_keyframes(inner, RUN, [10, 20, 30])
        told: list[bool] = []
        calls = {"pin": partial(try_to_pin, read_history(inner), told), "prune": prune_to_one}
        store = Between(inner, n, partial(calls["prune" if outer == "pin" else "pin"], inner))
        calls[outer](store)
        if not store.done:
            break
        now = read_history(inner)
        assert all(whole(inner, s) for s in now.snapshots.values())
        assert THIRTY in now.snapshots
        assert TEN in now.snapshots or told == [False]
        outcomes.add(told[0])
    assert n >= 3, "nothing fell between"
    assert outcomes == {True, False}


def try_to_pin(history: History, told: list[bool], store: Store) -> None:
    try:
        pin(store, history, "best", TEN)
    except NoSnapshot:
        told.append(False)
    else:
        told.append(True)


def prune_to_one(store: Store) -> None:
    execute(plan_prune(store, Keep(last=1), grace=0, threads=1), store, clock=FakeClock(), threads=1)


def test_a_put_that_failed_is_told(store: MemoryStore) -> None:
    with pytest.raises(Unavailable):
        pin(FaultyStore(store, fail_at=1, verbs=frozenset({"put"})), read_history(store), "best", TEN)
    assert pins(store) == {}


def test_unpin_takes_away_a_damaged_pin_too_and_names_one_that_is_not_there(store: MemoryStore) -> None:
    with pytest.raises(NoSnapshot, match="best: no such pin"):
        unpin(store, "best")
    store.put(pin_key("best"), b"{}")
    assert unpin(store, "best") is None
    assert not store.list("pins/")
