"""`FanoutStore`: the promises of a store, with any one place failing."""

from __future__ import annotations

import pytest

from storage_backends.base import Buffer, NotFound, Refused, Store, Unavailable
from storage_backends.fanout import FanoutStore
from storage_backends.local import LocalStore
from storage_backends.memory import MemoryStore
from storage_backends.retry import RetryingStore
from tests.storage_backends.contract import Opener, StoreContract
from tests.support.faulty import SwitchStore


class TestFanoutOfTwo(StoreContract):
    @pytest.fixture
    def opener(self) -> Opener:
        one, other = MemoryStore("one"), MemoryStore("other")
        return lambda: FanoutStore(one, other)


class TestFanoutOfThreeFolders(StoreContract):
    @pytest.fixture
    def opener(self, tmp_path_factory: pytest.TempPathFactory) -> Opener:
        paths = [tmp_path_factory.mktemp(name) for name in "abc"]
        return lambda: FanoutStore(*(RetryingStore(LocalStore(path)) for path in paths))


class Forgetful(MemoryStore):
    """Says yes to everything and holds nothing."""

    def put(self, key: str, data: Buffer) -> None: ...


@pytest.mark.parametrize("forgets", [0, 1])
class TestFanoutOverAPlaceThatForgets(StoreContract):
    """All copies in one place are gone, in the first or in the last: no promise depends on them."""

    @pytest.fixture
    def opener(self, forgets: int) -> Opener:
        places: list[Store] = [MemoryStore("one"), MemoryStore("other")]
        places.insert(forgets, Forgetful("forgets"))
        return lambda: FanoutStore(*places)


def three(at_least: int | None = None) -> tuple[list[SwitchStore], FanoutStore]:
    places = [SwitchStore(MemoryStore(name)) for name in "abc"]
    return places, FanoutStore(*places, at_least=at_least)


def test_every_place_gets_a_copy_and_names_itself_in_listings() -> None:
    places, store = three()
    store.put("a", b"1")
    assert [place.get("a") for place in places] == [b"1"] * 3
    places[1].delete(["a"])
    assert [(entry.key, entry.places) for entry in store.list("")] == [("a", ("1", "3"))]
    assert store.url == "fanout::memory-store:a|memory-store:b|memory-store:c"


@pytest.mark.parametrize("error", [Unavailable, Refused])
@pytest.mark.parametrize("down", [0, 1, 2])
def test_a_put_works_while_enough_places_take_it_and_says_what_the_others_lack(
    down: int, error: type[Unavailable] | type[Refused]
) -> None:
    places, store = three()
    store.put("before", b"0")
    places[down].fail(error, verb="put")
    store.put("x", b"1")
    assert store.get("x") == b"1"
    assert {e.key for e in store.list("")} == {"before", "x"}
    assert store.missed() == {"x": (str(down + 1),)}
    places[(down + 1) % 3].fail(error, verb="put")
    with pytest.raises(error, match=r"could not put 'y': 1 of 3 places answered, needed are 2 \(at_least=2\)"):
        store.put("y", b"2")


def test_a_place_that_does_not_answer_is_asked_once_and_again_when_it_is_needed() -> None:
    places, store = three()
    places[0].fail(Unavailable, verb="put")
    for n in range(5):
        store.put(f"k{n}", b"1")
    assert len(places[0].calls) == 1
    assert store.away() == ("1",)
    places[0].heal()
    places[1].fail(Unavailable, verb="put")
    store.put("more", b"2")
    assert places[0].get("more") == b"2"
    assert store.away() == ("2",)


def test_what_a_place_has_caught_up_with_is_no_longer_missed() -> None:
    places, store = three()
    places[0].fail(Unavailable, verb="put")
    store.put("a", b"1")
    store.put("b", b"1")
    store.put("a", b"2")
    assert list(store.missed()) == ["b", "a"]
    store.caught_up("b", ["1"])
    store.answers("1")
    assert list(store.missed()) == ["a"]
    assert store.away() == ()


def test_reads_go_on_with_the_next_copy_and_note_the_bad_one() -> None:
    places, store = three()
    store.put("x", b"0123456789")
    places[0].delete(["x"])
    assert store.get("x") == b"0123456789"
    assert store.slips.take() == {"x": None}
    places[0].put("x", b"01234")
    assert store.get_range("x", 2, 8) == b"234567"
    assert store.slips.take() == {"x": None}
    places[0].fail(Unavailable, verb="get")
    assert store.get("x") == b"0123456789"
    assert store.slips.take() == {}


def test_absent_is_only_what_enough_places_say_is_absent() -> None:
    """On two places with at_least=1 the silent one may hold what the other lacks, until this process has seen both."""
    one, other = SwitchStore(MemoryStore("one")), SwitchStore(MemoryStore("other"))
    other.put("x", b"1")
    for verb in ("get", "list"):
        other.fail(Unavailable, verb=verb)
        store = FanoutStore(one, other)
        with pytest.raises(Unavailable, match=r"needed are 2 \(at_least=1\).*go on with that alone"):
            store.get("x") if verb == "get" else store.list("")
    other.heal()
    store = FanoutStore(one, other)
    assert [entry.key for entry in store.list("")] == ["x"]
    other.fail(Unavailable, verb="list")
    assert list(store.list("")) == []  # what it lists alone; it has missed nothing of what this process wrote
    with pytest.raises(NotFound):
        store.get("y")


def test_a_place_that_missed_something_never_speaks_alone() -> None:
    one, other = SwitchStore(MemoryStore("one")), SwitchStore(MemoryStore("other"))
    store = FanoutStore(one, other)
    store.list("")
    one.fail(Unavailable, verb="put")
    store.put("x", b"1")
    one.heal()
    other.fail(Unavailable, verb="list")
    with pytest.raises(Unavailable, match="could not list"):
        store.list("")


def test_nothing_is_removed_while_a_place_is_away() -> None:
    places, store = three()
    store.put("x", b"1")
    places[2].fail(Unavailable, verb="put")
    store.put("y", b"1")
    with pytest.raises(Unavailable, match="nothing is removed while memory-store:c is away"):
        store.delete(["x"])
    assert [place.get("x") for place in places] == [b"1"] * 3
    store.answers("3")
    store.delete(["x", "y"])
    assert store.missed() == {}
    assert [e.key for place in places for e in place.list("")] == []


def test_a_deletion_that_fails_in_one_place_says_so() -> None:
    places, store = three()
    store.put("x", b"1")
    places[1].fail(Refused, verb="delete")
    with pytest.raises(Refused, match="failed on purpose"):
        store.delete(["x"])
    assert [entry.places for entry in store.list("")] == [("2",)]


def test_what_makes_no_fanout_is_refused() -> None:
    one, other = MemoryStore("one"), MemoryStore("other")
    for at_least in (0, 3):
        with pytest.raises(Refused, match="expected 1 to 2"):
            FanoutStore(one, other, at_least=at_least)
    with pytest.raises(Refused, match="two or more"):
        FanoutStore(one)
    with pytest.raises(Refused, match="beside itself"):
        FanoutStore(one, other, MemoryStore("one"))


def test_wrappers_go_under_the_copies() -> None:
    store = FanoutStore(MemoryStore("one"), MemoryStore("other"), at_least=2)
    wrapped = store.over(SwitchStore)
    assert isinstance(wrapped, FanoutStore)
    assert all(isinstance(place, SwitchStore) for place in wrapped.places.values())
    wrapped.put("x", b"1")
    assert store.get("x") == b"1"
