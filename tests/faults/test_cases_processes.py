"""CASES.md through the front door, in real processes: four ranks, the end of an interpreter, signals."""

from __future__ import annotations

import os
import signal
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ckpt
from ckpt.errors import NoSnapshot, Refused, SaveFailed
from ckpt.history.catalog import read_history
from recovery.verify import verify
from storage_backends.local import LocalStore
from tests.support.faulty import GateStore, SwitchStore
from tests.support.procs import Job, run_ranks, succeed

pytestmark = pytest.mark.e2e


def steps(url: Path) -> list[int]:
    """The published steps of a store without damage."""
    store = LocalStore(url)
    assert [f.text for f in verify(store, deep=True, only=None) if f.level == "error"] == []
    return [id_.step for id_ in sorted(read_history(store).snapshots)]


# --- readers ---------------------------------------------------------------------------------------------------------


def reads(url: str, expected: int) -> None:
    found = ckpt.load(url)
    assert set(found["t"].tolist()) == {expected}, found
    assert steps(Path(url))[-1] == expected
    live = torch.zeros(5000)
    assert ckpt.load_into(url, {"t": live}).step == expected
    assert set(live.tolist()) == {expected}


def gated(inner: LocalStore, folder: str) -> GateStore:
    """An open gate before the puts into one folder."""
    gate = GateStore(inner, where=lambda key: key.startswith(folder))
    gate.gate.set()
    return gate


def test_another_process_sees_the_last_published_step_and_never_a_part_of_the_next(tmp_path: Path) -> None:
    """B4: list, verify and load while a save hangs at its packs, its part, its commit; and right after."""
    inner = LocalStore(tmp_path)
    tensor = torch.ones(5000)
    for step, folder in enumerate(["packs/", "parts/", "snapshots/"], start=1):
        gate = gated(inner, folder)
        with ckpt.Checkpointer(gate, {"t": tensor}) as saver:
            saver.restore()
            if step == 1:
                saver.save(1).wait(60)
            tensor.fill_(step + 1)
            gate.gate.clear()
            ticket = saver.save(step + 1)
            assert gate.arrived.wait(60)
            succeed(run_ranks(reads, 1, [str(tmp_path), step]))
            gate.gate.set()
            ticket.wait(60)
            succeed(run_ranks(reads, 1, [str(tmp_path), step + 1]))


# --- four ranks ------------------------------------------------------------------------------------------------------


def one_of_four_fails(url: str) -> None:
    dist.init_process_group("gloo")
    inner = LocalStore(url)
    store = SwitchStore(inner)
    tensor = torch.arange(40_000.0)
    saver = ckpt.Checkpointer(store, {"t": tensor}, options=ckpt.Options(chunk=4096, commit_wait=600))
    saver.restore()
    saver.save(1).wait(60)
    tensor += 1
    if dist.get_rank() == 2:
        store.fail(Refused, verb="put", key="packs/")
    second = saver.save(2)
    if dist.get_rank() == 2:
        try:
            second.wait(60)
        except SaveFailed as error:
            assert error.step == 2
    dist.barrier()
    newest = read_history(inner).newest
    assert newest is not None and newest.step == 1
    store.heal()
    tensor += 1
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        third = saver.save(3)
    assert ["step 2 was not saved" in str(warning.message) for warning in told] == [True]
    assert isinstance(second.error, SaveFailed), "nobody waits ten minutes for a commit that cannot come"
    third.wait(60)
    saver.close()
    assert (saver.stats.saves, saver.stats.failed) == (2, 1)
    dist.destroy_process_group()


def test_four_ranks_of_which_one_cannot_write_publish_nothing_and_all_learn_of_it(tmp_path: Path) -> None:
    """C2: the step before is still the newest, and the next save works."""
    succeed(run_ranks(one_of_four_fails, 4, [str(tmp_path)]))
    assert steps(tmp_path) == [1, 3]
    assert torch.equal(ckpt.load(tmp_path)["t"], torch.arange(40_000.0) + 2)
    with pytest.raises(NoSnapshot):
        ckpt.load(tmp_path, 2)


# --- the end of a script ---------------------------------------------------------------------------------------------

SCRIPT = """
    import sys, threading
    import torch, ckpt
    from storage_backends.local import LocalStore
    from tests.support.faulty import GateStore

    gate = GateStore(LocalStore(sys.argv[1]), where=lambda key: key.startswith(("packs/", "alive/")))
    saver = ckpt.Checkpointer(gate, {"t": torch.arange(5000.0)})
    saver.restore()
    saver.save(1)
    assert gate.arrived.wait(60)
    print("the main thread ends", flush=True)
    if sys.argv[2] == "falls off":
        # Runs when the main thread has ended, before the checkpointer's own: hooks run in reverse order.
        threading._register_atexit(gate.gate.set)
    else:
        saver.close(timeout=1)
"""


def test_a_script_that_falls_off_its_end_makes_its_last_save_durable(tmp_path: Path) -> None:
    """F3: the store begins to work only after the main thread has ended."""
    succeed(run_ranks(SCRIPT, 1, [tmp_path, "falls off"]))
    assert steps(tmp_path) == [1]
    assert torch.equal(ckpt.load(tmp_path)["t"], torch.arange(5000.0))


def test_a_script_whose_store_never_returns_ends_in_time_and_says_so(tmp_path: Path) -> None:
    """F3: with `close(timeout=1)`; neither a put of the save nor one of the heartbeat ever returns."""
    [result] = run_ranks(SCRIPT, 1, [tmp_path, "never"])
    assert result.code == 1
    assert "SaveFailed: step 1: not seen committed within 1 s" in result.out
    assert steps(tmp_path) == []


# --- SIGTERM ---------------------------------------------------------------------------------------------------------


def training(url: str, handler: str) -> None:
    """Steps that each wait for a "go"; saves every second step, of which "close" holds up the commit until "open"."""
    gate = gated(LocalStore(url), "snapshots/")
    turns = threading.Semaphore(0)
    orders = {"go": turns.release, "open": gate.gate.set, "close": gate.gate.clear}

    def listen() -> None:
        for line in sys.stdin:
            orders[line.strip()]()

    def watch() -> None:
        gate.arrived.wait()
        print("a commit is held up")

    for work in (listen, watch):
        threading.Thread(target=work, daemon=True).start()
    if handler == "prints":  # not by print(), which may have been interrupted
        signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"the user's handler\n"))
    if handler == "exits":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    tensor = torch.zeros(5000)

    @ckpt.checkpointed(gate, every=2)
    def train(run: ckpt.Run) -> None:
        run.track(t=tensor)
        for step in run.steps(100):
            tensor.add_(1)
            print(f"in step {step}.")
            turns.acquire()

    train()
    print("left")


def in_step(job: Job, step: int) -> None:
    """Wait until it is in the body of this step."""
    job.until(0, f"in step {step}.")


def go(job: Job, order: str = "go") -> None:
    job.tell(0, order)


def left(tmp_path: Path, job: Job, last: int) -> str:
    """It has left by itself, and its last step is there."""
    [result] = job.wait()
    assert result.code == 0, result.out
    assert result.out.endswith("left\n")
    assert steps(tmp_path)[-1] == last
    assert set(ckpt.load(tmp_path)["t"].tolist()) == {last}
    return result.out


@pytest.mark.parametrize("handler", ["none", "prints"])
def test_sigterm_with_nothing_in_flight_saves_the_step_under_way_and_leaves(tmp_path: Path, handler: str) -> None:
    """F9: while idle; a user's handler runs too."""
    with Job(training, 1, [str(tmp_path), handler]) as job:
        for step in range(4):
            in_step(job, step)
            go(job)
        in_step(job, 4)
        job.kill(0, signal.SIGTERM)
        go(job)
        out = left(tmp_path, job, 5)
    assert out.count("the user's handler") == (handler == "prints")
    assert steps(tmp_path) == [2, 4, 5]


def test_sigterm_twice_while_a_save_is_in_flight_finishes_it_and_the_step_under_way(tmp_path: Path) -> None:
    """F9: while saving, twice, with a user's handler: no deadlock, and both steps are there."""
    with Job(training, 1, [str(tmp_path), "prints"]) as job:
        in_step(job, 0)
        go(job, "close")
        go(job)
        in_step(job, 1)
        go(job)
        in_step(job, 2)
        job.until(0, "a commit is held up")
        job.kill(0, signal.SIGTERM)
        job.until(0, "the user's handler\n")
        job.kill(0, signal.SIGTERM)
        job.until(0, "the user's handler\nthe user's handler\n")
        go(job)  # its save waits for the one that is held up
        job.kill(0, signal.SIGTERM)
        go(job, "open")
        left(tmp_path, job, 3)
    assert steps(tmp_path) == [2, 3]


def test_a_handler_that_exits_lets_the_save_in_flight_finish(tmp_path: Path) -> None:
    """F9: the user's handler has its way, exit code included; the next start goes on from the save."""
    with Job(training, 1, [str(tmp_path), "exits"]) as job:
        in_step(job, 0)
        go(job, "close")
        go(job)
        in_step(job, 1)
        go(job)
        job.until(0, "a commit is held up")
        in_step(job, 2)
        job.kill(0, signal.SIGTERM)
        go(job, "open")
        [result] = job.wait()
    assert result.code == 7, result.out
    assert "left" not in result.out
    assert steps(tmp_path) == [2]
    with Job(training, 1, [str(tmp_path), "none"]) as job:
        in_step(job, 2)
        job.kill(0, signal.SIGTERM)
        go(job)
        left(tmp_path, job, 3)
