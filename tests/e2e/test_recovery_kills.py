"""Ranks that die or fail in the middle of coming back: the next restart finds the store and the mirrors as good."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import ckpt
from ckpt.cli import main
from ckpt.mirror.mirror import Mirror
from recovery.meter import Meter
from recovery.survey import Holdings
from recovery.verify import verify
from storage_backends import open_store
from storage_backends.local import LocalStore
from tests.support.faulty import FaultyStore, SwitchStore
from tests.support.nodes import (
    BUILD,
    blob_bytes,
    counting,
    is_as_noted,
    killed,
    mirrors_in,
    note_local,
    run,
    said_of,
    same_state,
    saver_of,
    say,
    train_and_save,
    wait_for_the_end,
)
from tests.support.procs import run_ranks, show, succeed
from tests.support.worlds import PATIENT, group, stored_parts

pytestmark = pytest.mark.e2e

STEPS = 2
KIND = "fsdp"


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def lives(url: str, nodes: list[str], notes: str) -> None:
    with group() as rank:
        training = BUILD[KIND](0)
        saver = saver_of(url, training.state, nodes[rank])
        saver.restore()
        train_and_save(saver, training, range(STEPS))
        note_local(training.state, notes, STEPS)
        wait_for_the_end()


def comes_back(url: str, nodes: list[str], notes: str) -> None:
    with group() as rank:
        store, training = counting(url), BUILD[KIND](7)
        with saver_of(store, training.state, nodes[rank]) as saver:
            assert saver.restore() == STEPS
            say(**said_of(saver.restored, store))
            assert is_as_noted(training.state, notes, STEPS)
            training.train(STEPS)
            saver.save(STEPS + 1).wait(PATIENT)


# --- killed in the middle ---------------------------------------------------------------------------------------------


def dies(url: str, nodes: list[str], notes: str, victim: int, moment: str) -> None:
    """Come back, and die at a moment: "stage begin", "stage end", a call of the store, or a step with the mirror."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    training = BUILD[KIND](7)
    store = FaultyStore(LocalStore(url))
    if rank == victim:
        _arm(store, moment)
    with saver_of(store, training.state, nodes[rank]) as saver:
        saver.restore()
        if not moment.startswith("call"):
            training.train(STEPS)
            saver.save(STEPS + 1)
        dist.barrier()
        raise AssertionError("nobody died")


def _arm(store: FaultyStore, moment: str) -> None:
    where, _, when = moment.partition(" ")
    if where == "call":
        calls = iter(range(1, 10_000))
        call = store._call

        def counted(verb: str, key: str, do: Callable[[], Any]) -> Any:
            # The heartbeat goes by the clock; everything else comes in an order of its own.
            if not key.startswith("alive/") and next(calls) == int(when):
                die()
            return call(verb, key, do)

        store._call = counted  # type: ignore[method-assign]
    elif where in ("adopt", "free", "finish"):
        inner = getattr(Mirror, where)

        def around(self: Mirror, *args: Any, **kwargs: Any) -> Any:
            if when == "begin":
                die()
            result = inner(self, *args, **kwargs)
            if where == "free":
                result[: result.nbytes // 2] = 255  # half of a state is there
            die()
            return result

        setattr(Mirror, where, around)
    else:
        stage = Meter.stage

        @contextmanager
        def staged(self: Meter, name: str) -> Iterator[None]:
            if (name, when) == (where, "begin"):
                die()
            with stage(self, name):
                yield
            if (name, when) == (where, "end"):
                die()

        Meter.stage = staged  # type: ignore[method-assign, assignment]


class Hurt:
    """Two nodes of one rank each, killed at step 2; node B may be lost with its mirror. Comes back as often as told."""

    def __init__(self, tmp_path: Path, *, lost: bool) -> None:
        self.url, self.notes = tmp_path / "store", tmp_path / "notes"
        self.nodes = [str(tmp_path / "A"), str(tmp_path / "B")]
        self._args = [str(self.url), self.nodes, str(self.notes)]
        killed(lives, 2, self._args)
        self.own = {rank: blob_bytes(part) for rank, part in stored_parts(self.url).items()}
        self._lost, self._folder, self._kept = lost, tmp_path, tmp_path.with_name(f"{tmp_path.name}-kept")
        if lost:
            shutil.rmtree(self.nodes[1])
        shutil.copytree(tmp_path, self._kept)

    def again(self) -> None:
        """As it was after the first death of all: restarts leave runs behind, which the next ones look at."""
        shutil.rmtree(self._folder)
        shutil.copytree(self._kept, self._folder)

    def die(self, victim: int, moment: str) -> bool:
        """Whether anybody did: there may be no such moment."""
        results = run_ranks(dies, 2, [*self._args, victim, moment])
        if all("nobody died" in result.out for result in results):
            return False
        assert results[victim].code == -signal.SIGKILL, f"{moment}\n{show(results)}"
        assert results[1 - victim].code == 1, f"{moment}\n{show(results)}"
        return True

    def check(self, moments: object) -> None:
        first, second = run(comes_back, 2, self._args)
        assert first["packs"] == 0, (moments, first)
        assert second["pack_bytes"] <= (1.05 * self.own[1] if self._lost else 0), (moments, second, self.own)
        findings = [f for f in verify(open_store(str(self.url)), deep=True) if f.level != "note"]
        assert not findings, (moments, findings)


STAGES = ["choose", "documents", "mirrors", "peers", "store", "install"]


@pytest.mark.parametrize(
    ("victim", "moments"),
    [
        *((n % 2, [f"{stage} begin", f"{stage} end"]) for n, stage in enumerate(STAGES)),
        (0, ["adopt begin", "adopt end", "free end"]),
        (1, ["free end", "free begin", "free end", "adopt end"]),
    ],
)
def test_a_rank_killed_at_any_stage_of_coming_back_twice_in_a_row_leaves_store_and_mirrors_usable(
    tmp_path: Path, victim: int, moments: list[str]
) -> None:
    hurt = Hurt(tmp_path, lost=False)
    for moment in moments:
        assert hurt.die(victim, moment), moment
    hurt.check(moments)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_in_any_call_to_the_store_while_it_comes_back_leaves_store_and_mirrors_usable(
    tmp_path: Path, victim: int
) -> None:
    """Rank 1's node is lost, so that packs are read too. After each death all come back, from where that one left."""
    hurt = Hurt(tmp_path, lost=True)
    call = 1
    while hurt.die(victim, f"call {call}"):
        hurt.check(call)
        hurt.again()
        call += 1
    assert call > 2, "the store was hardly asked anything"


# --- one fails, all hear of it ----------------------------------------------------------------------------------------


def cannot_come_back(url: str, nodes: list[str], notes: str, where: str) -> None:
    """Rank 1 fails once at some place; all ranks raise the same, and the next try goes well with what it needs."""
    with group() as rank:
        store, training = SwitchStore(LocalStore(url)), BUILD[KIND](7)
        untouched = BUILD[KIND](7)
        saver = saver_of(store, training.state, nodes[rank])
        find, take = Holdings.find, Holdings.take

        def broken(*_: Any) -> Any:
            raise MemoryError("no memory left on purpose")

        if rank == 1:
            match where:
                case "documents":
                    store.fail(ckpt.Refused, verb="get", key="parts/")
                case "packs":
                    store.fail(ckpt.Refused, verb="get_range", key="packs/")
                case "mirrors":
                    Holdings.take = broken  # type: ignore[method-assign]
        error = MemoryError if where == "mirrors" and rank == 1 else Exception
        with pytest.raises(error, match="on purpose") as told:
            saver.restore()
        say(error=str(told.value).split("rank 1: ")[-1].removeprefix("MemoryError: "))
        assert same_state(training, untouched), "the live state is as it was"
        store.heal()
        Holdings.find, Holdings.take = find, take  # type: ignore[method-assign]
        assert saver.restore() == STEPS
        assert is_as_noted(training.state, notes, STEPS)
        saver.close()


@pytest.mark.parametrize("where", ["documents", "mirrors", "packs"])
def test_a_rank_that_fails_while_it_comes_back_is_the_same_error_on_all_and_nobody_waits(
    tmp_path: Path, where: str
) -> None:
    """F5: reading, from each source; staging and writing are in test_ranks_restore.py and below."""
    url, notes, nodes = str(tmp_path / "store"), str(tmp_path / "notes"), [str(tmp_path / name) for name in "ABC"]
    killed(lives, 3, [url, nodes, notes])
    if where == "packs":
        shutil.rmtree(nodes[1])
    found = run(cannot_come_back, 3, [url, nodes, notes, where])
    assert len({each["error"] for each in found}) == 1, found


def cannot_write(url: str, nodes: list[str]) -> None:
    with group() as rank:
        store, training = SwitchStore(LocalStore(url)), BUILD[KIND](0)
        saver = saver_of(store, training.state, nodes[rank], commit_wait=600, on_error="raise")
        saver.restore()
        train_and_save(saver, training, range(1))
        training.train(1)
        if rank == 1:
            store.fail(ckpt.Refused, verb="put", key="packs/")
        ticket = saver.save(2)
        if rank == 1:
            with pytest.raises(ckpt.SaveFailed, match="on purpose"):
                ticket.wait(PATIENT)
        store.heal()
        training.train(2)
        with pytest.raises(ckpt.SaveFailed, match="step 2") as told:
            saver.save(3)
        assert told.value.step == 2
        training.train(3)
        saver.save(4).wait(PATIENT)
        saver.close()


def test_a_rank_that_cannot_write_fails_that_save_on_all_and_nobody_waits_for_its_part(tmp_path: Path) -> None:
    """F5: writing."""
    succeed(run_ranks(cannot_write, 3, [str(tmp_path / "store"), [str(tmp_path / "A")] * 3]))


# --- what is left behind ----------------------------------------------------------------------------------------------


def ends(url: str, node: str, how: str) -> None:
    with group() as rank:
        training = BUILD[KIND](0)
        with saver_of(url, training.state, node) as saver:
            saver.restore()
            for step in range(STEPS):
                training.train(step)
                saver.step(step + 1)
                saver.save(step + 1).wait(PATIENT)
            assert len(mirrors_in(node)) == 2
            dist.barrier()
            match how:
                case "well":
                    pass
                case "SIGTERM":
                    if rank == 1:
                        os.kill(os.getpid(), signal.SIGTERM)
                    step = STEPS
                    while not saver.stopping:
                        training.train(step)
                        step += 1
                        saver.step(step)
                case "raises":
                    raise ZeroDivisionError("as training may")


@pytest.mark.parametrize("how", ["well", "SIGTERM", "raises"])
def test_mirrors_go_with_a_clean_end_and_stay_for_the_restart_after_any_other(
    tmp_path: Path, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    url, node = tmp_path / "store", tmp_path / "node"
    results = run_ranks(ends, 2, [str(url), str(node), how])
    assert [result.code for result in results] == [int(how == "raises")] * 2, show(results)
    capsys.readouterr()
    assert main(["mirrors", "--folder", str(node), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["mirrors"]
    assert [(mirror["rank"], mirror["owner"]) for mirror in listed] == (
        [] if how == "well" else [(0, "dead"), (1, "dead")]
    )
    if how != "well":
        step = max(stored_parts(url)[0].step, STEPS)
        assert all(step in [slot["step"] for slot in mirror["slots"]] for mirror in listed), listed
