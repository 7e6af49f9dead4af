"""The front door on stores of several places: tiers and fan-outs, places that are gone, bad or away."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import ckpt
from ckpt.errors import SaveFailed
from ckpt.format.names import ALIVE
from ckpt.history.catalog import read_history
from recovery.verify import verify
from storage_backends.base import Refused, Store, Unavailable
from storage_backends.fanout import FanoutStore
from storage_backends.local import LocalStore
from storage_backends.memory import MemoryStore
from storage_backends.tiered import TieredStore
from tests.support.faulty import SwitchStore
from tests.support.training import Training

QUIET = ckpt.Options(commit_wait=20, heartbeat=0.05)


def train(url: str | Store, total: int, *, keep: ckpt.Keep | None = None, seed: int = 0) -> tuple[int, Training]:
    """Restore, train to `total` with a save at every second step, close; where it began, and how it ended."""
    training = Training(seed)
    with ckpt.Checkpointer(url, training.state, every=2, keep=keep, mirror="off", options=QUIET) as saver:
        start = saver.restore()
        for step in range(start, total):
            training.train(step)
            saver.step(step + 1)
    return start, training


@pytest.fixture(scope="module")
def unhurt() -> dict[int, dict[str, bytes]]:
    """The state after each step of a training that nothing ever happened to."""
    training = Training()
    found = {}
    for step in range(12):
        training.train(step)
        found[step + 1] = training.bytes()
    return found


def steps(store: Store) -> list[int]:
    return sorted(id_.step for id_ in read_history(store).snapshots)


def errors(store: Store) -> list[str]:
    return [finding.text for finding in verify(store, deep=True, threads=1) if finding.level == "error"]


def contents(store: Store) -> dict[str, bytes]:
    return {e.key: store.get(e.key) for e in store.list("") if not e.key.startswith(ALIVE)}


# --- tiers ---


def test_a_training_on_two_tiers_saves_near_and_ends_with_everything_on_the_durable_one(
    tmp_path: Path, unhurt: dict[int, dict[str, bytes]]
) -> None:
    fast, durable = LocalStore(tmp_path / "fast"), LocalStore(tmp_path / "durable")
    url = f"tiered::{tmp_path}/fast|{tmp_path}/durable"
    assert train(url, 6)[0] == 0
    assert steps(durable) == [2, 4, 6]
    assert steps(fast) == [4, 6]
    assert errors(fast) == errors(durable) == errors(ckpt.open_store(url)) == []
    assert [(s.step, s.places) for s in ckpt.History(url).list()] == [
        (2, ("durable",)), (4, ("fast", "durable")), (6, ("fast", "durable")),
    ]  # fmt: skip
    start, training = train(url, 10, seed=9)
    assert start == 6
    assert training.bytes() == unhurt[10]


def test_a_fast_tier_that_vanished_costs_nothing_but_time(tmp_path: Path, unhurt: dict[int, dict[str, bytes]]) -> None:
    url = f"tiered::{tmp_path}/fast|{tmp_path}/durable"
    train(url, 6)
    shutil.rmtree(tmp_path / "fast")
    start, training = train(url, 10, seed=9)
    assert start == 6
    assert training.bytes() == unhurt[10]
    assert steps(LocalStore(tmp_path / "fast")) == [8, 10]
    assert errors(ckpt.open_store(url)) == []


def test_any_damage_on_the_fast_tier_is_read_around_and_mended(unhurt: dict[int, dict[str, bytes]]) -> None:
    fast, durable = MemoryStore("fast"), MemoryStore("durable")
    train(TieredStore(fast, durable, keep_fast=None), 4)
    before = contents(fast)
    for key in [key for key in before if key.startswith(("packs/", "parts/", "snapshots/"))]:
        for bad in _bad(before[key]):
            store = TieredStore(fast, durable, keep_fast=None)
            fast.put(key, bad)
            training = Training(7)
            for step in (2, 4):
                ckpt.load_into(store, training.state, step)
                assert training.bytes() == unhurt[step], key
            assert fast.get(key) == before[key], key


def _bad(data: bytes) -> Iterator[bytes]:
    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 4
    yield bytes(flipped)
    yield data[: len(data) // 2]
    yield b""


def test_close_says_what_is_not_copied_and_the_next_start_copies_it() -> None:
    fast, durable = MemoryStore("fast"), SwitchStore(MemoryStore("durable"))
    store = TieredStore(fast, durable)
    training = Training()
    saver = ckpt.Checkpointer(store, training.state, mirror="off", options=QUIET)
    saver.restore()
    durable.fail(Unavailable, verb="put", key="packs/")
    training.train(0)
    saver.save(1).wait(60)
    with pytest.raises(
        SaveFailed, match=r"every save is committed, but its copies are behind.*failed on purpose"
    ) as caught:
        saver.close()
    assert caught.value.stage == "copy"
    assert [(s.step, s.places) for s in ckpt.History(store).list()] == [(1, ("fast",))]
    durable.heal()
    assert train(TieredStore(fast, durable), 2, seed=3)[0] == 1
    assert steps(durable) == [1, 2]
    assert errors(durable) == []


def test_retention_keeps_many_on_the_durable_tier_and_few_on_the_fast_one() -> None:
    fast, durable = MemoryStore("fast"), MemoryStore("durable")
    train(TieredStore(fast, durable, keep_fast=1), 12, keep=ckpt.Keep(last=3))
    assert steps(fast) == [12]
    assert set(steps(durable)) >= {8, 10, 12}
    assert 2 not in steps(durable)
    assert errors(fast) == errors(durable) == []


def test_retention_spares_what_is_not_copied_and_the_newest_that_is() -> None:
    """However far the copy is behind, the durable tier alone can restore, and nothing goes that is nowhere else."""
    fast, durable = MemoryStore("fast"), SwitchStore(MemoryStore("durable"))
    store = TieredStore(fast, durable, keep_fast=1)
    train(store, 4)
    durable.fail(Unavailable, verb="put", key="packs/")
    with pytest.raises(SaveFailed, match="behind"):
        train(store, 12, keep=ckpt.Keep(last=1))
    assert steps(durable)[-1] == 4
    assert set(steps(fast)) >= {6, 8, 10, 12}
    assert errors(fast) == errors(durable) == []
    durable.heal()
    assert train(store, 12, keep=ckpt.Keep(last=1))[0] == 12
    assert steps(durable)[-1] == 12


def test_the_command_that_saved_on_tiers_counts_no_request_of_the_durable_tier_in_its_commit() -> None:
    """A save is committed on the fast tier alone: with a durable tier that answers nothing, it still is."""
    fast, durable = MemoryStore("fast"), SwitchStore(MemoryStore("durable"))
    training = Training()
    saver = ckpt.Checkpointer(TieredStore(fast, durable), training.state, mirror="off", options=QUIET)
    saver.restore()
    for verb in ("list", "get", "get_range", "put"):
        durable.fail(Refused, verb=verb)
        training.train(0)
        step = 1 + ["list", "get", "get_range", "put"].index(verb)
        saver.save(step).wait(60)
        assert steps(fast)[-1] == step
    durable.heal()
    saver.close()
    assert steps(durable) == [1, 2, 3, 4]


# --- fan-outs ---


def test_a_training_on_a_fanout_leaves_whole_copies_everywhere(
    tmp_path: Path, unhurt: dict[int, dict[str, bytes]]
) -> None:
    url = f"fanout::{tmp_path}/a|{tmp_path}/b|{tmp_path}/c"
    train(url, 6)
    places = [LocalStore(tmp_path / name) for name in "abc"]
    assert contents(places[0]) == contents(places[1]) == contents(places[2])
    assert errors(places[2]) == []
    assert {s.places for s in ckpt.History(url).list()} == {("1", "2", "3")}
    shutil.rmtree(tmp_path / "a")
    start, training = train(url, 10, seed=9)
    assert start == 6
    assert training.bytes() == unhurt[10]
    # What the lost place held is given back to it, since it answers, and only lacks everything.
    assert contents(places[0]) == contents(places[1]) == contents(places[2])


@pytest.mark.parametrize("places", [2, 3])
def test_any_one_copy_of_any_object_damaged_or_gone_restores_bit_exactly_and_is_mended(
    places: int, unhurt: dict[int, dict[str, bytes]]
) -> None:
    """Every object in turn; each copy of it; a flipped bit, cut, empty, absent."""
    stores = [MemoryStore(name) for name in "abc"[:places]]
    train(FanoutStore(*stores), 4)
    before = contents(stores[0])
    assert {key.split("/")[0] for key in before} == {"store.json", "runs", "packs", "parts", "snapshots"}
    struck = 0
    for key, good in before.items():
        for place in stores:
            for bad in (None, *_bad(good)):
                if bad is None:
                    place.delete([key])
                else:
                    place.put(key, bad)
                store = FanoutStore(*stores)
                training = Training(7)
                for step in (2, 4):
                    ckpt.load_into(store, training.state, step)
                    assert training.bytes() == unhurt[step], key
                if place is stores[0] and key != "store.json":  # which reading a snapshot does not need
                    assert place.get(key) == good, key
                place.put(key, good)
                struck += 1
    assert struck == 4 * places * len(before)


@pytest.mark.parametrize("key", ["store.json", "runs/", "packs/", "parts/", "snapshots/"])
@pytest.mark.parametrize("which", [0, 1])
def test_a_start_of_the_job_mends_what_listings_show(key: str, which: int) -> None:
    """Absent and cut copies show in listings; flipped bits only where a copy is read (above), or by `verify --deep`."""
    stores = [MemoryStore("a"), MemoryStore("b")]
    train(FanoutStore(*stores), 4)
    for entry in [entry for entry in stores[0].list("") if entry.key.startswith(key)]:
        good = stores[0].get(entry.key)
        for bad in (None, good[: len(good) // 2]):
            stores[which].delete([entry.key])
            if bad is not None:
                stores[which].put(entry.key, bad)
            assert train(FanoutStore(*stores), 4)[0] == 4
            assert stores[which].get(entry.key) == good, (entry.key, bad)
    assert contents(stores[0]) == contents(stores[1])


@pytest.mark.parametrize("down", [0, 1])
def test_a_place_that_goes_down_stops_no_save_and_catches_up(down: int, unhurt: dict[int, dict[str, bytes]]) -> None:
    stores = [SwitchStore(MemoryStore(name)) for name in "ab"]
    training = Training()
    saver = ckpt.Checkpointer(FanoutStore(*stores), training.state, every=2, mirror="off", options=QUIET)
    saver.restore()
    for step in range(8):
        if step == 3:
            for verb in ("put", "get", "list"):
                stores[down].fail(Unavailable, verb=verb)
        if step == 7:
            stores[down].heal()
        training.train(step)
        if (ticket := saver.step(step + 1)) is not None:
            ticket.wait(60)
            assert steps(stores[1 - down])[-1] == step + 1
    saver.close()
    assert contents(stores[0]) == contents(stores[1])
    assert errors(stores[down]) == []
    assert steps(stores[down]) == [2, 4, 6, 8]


def test_close_says_which_place_is_still_away() -> None:
    stores = [SwitchStore(MemoryStore(name)) for name in "ab"]
    training = Training()
    saver = ckpt.Checkpointer(FanoutStore(*stores), training.state, mirror="off", options=QUIET)
    saver.restore()
    stores[1].fail(Unavailable, verb="put")
    saver.save(1).wait(60)
    with pytest.raises(SaveFailed, match=r"copies are behind: .*memory-store:b") as caught:
        saver.close()
    assert caught.value.stage == "copy"
    stores[1].heal()
    assert train(FanoutStore(*stores), 2)[0] == 1
    assert contents(stores[0]) == contents(stores[1])


def test_a_durable_tier_may_be_a_fanout(tmp_path: Path, unhurt: dict[int, dict[str, bytes]]) -> None:
    url = f"tiered::{tmp_path}/fast|fanout::{tmp_path}/a|{tmp_path}/b"
    train(url, 6)
    assert contents(LocalStore(tmp_path / "a")) == contents(LocalStore(tmp_path / "b"))
    shutil.rmtree(tmp_path / "fast")
    shutil.rmtree(tmp_path / "a")
    start, training = train(url, 8, seed=5)
    assert start == 6
    assert training.bytes() == unhurt[8]
    assert contents(LocalStore(tmp_path / "a")) == contents(LocalStore(tmp_path / "b"))
