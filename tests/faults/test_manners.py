"""A checkpointer among other things in one process: forks, spawned workers, signals, the end, the user's own fsspec.

Each case is played many times over, because what could go wrong (a lock held at the moment of a fork, a signal between
two stores) goes wrong rarely; `--campaign` plays fifty rounds of each, the suite a few.
"""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

import ckpt
from tests.faults.test_cases_processes import steps
from tests.support.procs import Job, run_ranks, succeed

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1600)]


@pytest.fixture
def rounds(request: pytest.FixtureRequest) -> int:
    return 50 if request.config.getoption("--campaign") else 6


def run_script(text: str, folder: Path, *arguments: object) -> str:
    """A script of one process: it must end well, and in time."""
    path = folder / "script.py"
    path.write_text(text)
    [out] = succeed(run_ranks(path, 1, [folder / "store", *arguments], timeout=1500))
    return out


# --- forks -----------------------------------------------------------------------------------------------------------

FORKS = """
import os, sys, warnings
import torch
import ckpt
from ckpt.errors import CheckpointError
from storage_backends.local import LocalStore
from tests.support.faulty import GateStore

warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads about is what this is for
url, rounds = sys.argv[1], int(sys.argv[2])
gate = GateStore(LocalStore(url), where=lambda key: key.startswith("snapshots/"))
gate.gate.set()
tensor = torch.zeros(50_000)
saver = ckpt.Checkpointer(gate, {"t": tensor})
saver.restore()
print(f"parent {os.getpid()}", flush=True)


def refused(call, *arguments):
    try:
        call(*arguments)
    except CheckpointError as error:
        assert "forked from" in str(error), error
    else:
        raise AssertionError(f"{call} worked in a forked child")


for step in range(1, rounds + 1):
    tensor += 1
    gate.arrived.clear()
    gate.gate.clear()
    ticket = saver.save(step)
    if step % 2:  # else somewhere on its way
        gate.arrived.wait()
    child = os.fork()
    if child == 0:
        # In turn: falls off its end, raises, leaves through a `with`, asks for things that are its parent's.
        match step % 4:
            case 0:
                sys.exit(0)
            case 1:
                with saver:
                    sys.exit(0)
            case 2:
                for call in (saver.save, saver.step):
                    refused(call, step + 1)
                for call in (saver.restore, saver.wait):
                    refused(call)
                if not ticket.done():
                    refused(ticket.wait)
                saver.close()
                sys.exit(0)
            case 3:
                # A child may keep checkpoints of its own elsewhere, and read those of its parent.
                before = torch.zeros(50_000)
                assert ckpt.load_into(url, {"t": before}).step == step - 1 if step > 1 else True
                with ckpt.Checkpointer(f"{url}-child-{step}", {"t": tensor}, mirror="off") as own:
                    own.restore()
                    own.save(step)
                sys.exit(0)
    _, status = os.waitpid(child, 0)  # with the parent's save still held up: a child that waited for it would hang
    assert os.waitstatus_to_exitcode(status) == 0, (step, status)
    gate.gate.set()
    ticket.wait(60)
saver.close()
print("well")
"""


def test_a_forked_child_never_touches_the_writer_and_leaves_at_once(tmp_path: Path, rounds: int) -> None:
    out = run_script(FORKS, tmp_path, rounds)
    assert out.endswith("well\n")
    assert steps(tmp_path / "store") == list(range(1, rounds + 1))
    for step in range(3, rounds + 1, 4):
        assert set(ckpt.load(tmp_path / f"store-child-{step}")["t"].tolist()) == {step}


WORKERS = """
import multiprocessing, sys
import torch
import ckpt
from torch.utils.data import DataLoader, TensorDataset


def work(url, step, queue):
    queue.put((step, float(ckpt.load(url, step=step)["t"][0])))


if __name__ == "__main__":
    url, rounds, method = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    context = multiprocessing.get_context(method)
    tensor = torch.zeros(50_000)
    data = TensorDataset(torch.arange(64.0))
    with ckpt.Checkpointer(url, {"t": tensor}) as saver:
        saver.restore()
        queue = context.Queue()
        for step in range(1, 2 * rounds, 2):
            tensor += 1
            saver.save(step).wait(60)
            saver.save(step + 1)  # in flight while processes come and go
            worker = context.Process(target=work, args=(url, step, queue))
            worker.start()
            assert queue.get(timeout=60) == (step, (step + 1) // 2)
            worker.join(60)
            assert worker.exitcode == 0
            loader = DataLoader(data, batch_size=16, num_workers=2, multiprocessing_context=method)
            assert sum(float(batch[0].sum()) for batch in loader) == 64 * 63 / 2
        if method == "spawn":
            try:
                context.Process(target=print, args=(saver,)).start()
            except TypeError as error:
                assert "cannot be sent to another process" in str(error), error
            else:
                raise AssertionError("a Checkpointer was sent to another process")
    print("well")
"""


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_workers_come_and_go_while_saves_are_in_flight(tmp_path: Path, rounds: int, method: str) -> None:
    some = rounds if rounds == 50 else 1  # three processes a round; a spawned one takes seconds to load torch
    out = run_script(WORKERS, tmp_path, some, method)
    assert out.endswith("well\n")
    assert steps(tmp_path / "store") == list(range(1, 2 * some + 1))


# --- signals ---------------------------------------------------------------------------------------------------------


def saves_without_a_pause(url: str, interrupts: int) -> None:
    """Ctrl-C falls anywhere: between two saves, into the copy, into the wait for the save before."""
    tensor = torch.zeros(300_000)
    saver = ckpt.Checkpointer(url, {"t": tensor})
    saver.restore()
    step = 0
    for number in range(1, interrupts + 1):
        try:
            print(f"round {number}.")
            while True:
                step += 1
                tensor += 1
                saver.save(step)
        except KeyboardInterrupt:
            pass
    tensor.fill_(-1)
    saver.save(step + 1).wait(60)
    saver.close()
    print("last", step + 1)


@pytest.mark.filterwarnings("ignore:.*step .* was not saved")
def test_ctrl_c_anywhere_in_a_save_leaves_a_checkpointer_that_works(tmp_path: Path, rounds: int) -> None:
    with Job(saves_without_a_pause, 1, [str(tmp_path), rounds]) as job:
        for number in range(1, rounds + 1):
            job.until(0, f"round {number}.")
            job.kill(0, signal.SIGINT)
        [result] = job.wait()
    assert result.code == 0, result.out
    last = int(result.out.split()[-1])
    assert steps(tmp_path)[-1] == last
    assert set(ckpt.load(tmp_path)["t"].tolist()) == {-1}


def trains(url: str) -> None:
    """Says when it has begun; then takes steps until it is told to stop."""
    tensor = torch.zeros(50_000)

    @ckpt.checkpointed(url, every=3)
    def train(run: ckpt.Run) -> None:
        run.track(t=tensor)
        print("begun.")
        for _ in run.steps(10**9):
            tensor.add_(1)
        print("stopped at", int(tensor[0]))

    train()


def test_sigterm_at_any_moment_saves_the_step_under_way_and_the_next_start_goes_on_from_it(
    tmp_path: Path, rounds: int
) -> None:
    """F9"""
    last = 0
    for _ in range(rounds):
        with Job(trains, 1, [str(tmp_path)]) as job:
            job.until(0, "begun.")
            job.kill(0, signal.SIGTERM)
            [result] = job.wait()
        assert result.code == 0, result.out
        stopped = int(result.out.split()[-1])
        assert stopped >= last
        assert set(ckpt.load(tmp_path)["t"].tolist()) == {stopped}
        last = stopped
    assert steps(tmp_path)[-1] == last


# --- the end ---------------------------------------------------------------------------------------------------------


def falls_off_its_end(url: str, number: int) -> None:
    """Two checkpointers, neither closed, each with a save in flight, on stores that are in no hurry."""
    tensors = [torch.zeros(200_000) for _ in "ab"]
    savers = [ckpt.Checkpointer(f"{url}/{name}", {"t": t}) for name, t in zip("ab", tensors, strict=True)]
    for saver, tensor in zip(savers, tensors, strict=True):
        saver.restore()
        tensor.fill_(number)
        saver.save(number)
    if number % 2:
        raise ValueError("and one that raises")


@pytest.mark.parametrize("ends", ["falls off", "raises"])
def test_a_process_that_ends_with_saves_of_two_checkpointers_in_flight_makes_both_durable(
    tmp_path: Path, rounds: int, ends: str
) -> None:
    """F3"""
    script = (
        "import sys, torch\nfrom tests.faults.test_manners import falls_off_its_end\n"
        "falls_off_its_end(sys.argv[1], int(sys.argv[2]))\n"
    )
    (tmp_path / "script.py").write_text(script)
    some = rounds if rounds == 50 else 2
    for number in range(2 + (ends == "raises"), 2 * some + 2, 2):
        [result] = run_ranks(tmp_path / "script.py", 1, [tmp_path, number])
        assert result.code == (ends == "raises"), result.out
        for name in "ab":
            assert steps(tmp_path / name)[-1] == number
            assert set(ckpt.load(tmp_path / name)["t"].tolist()) == {number}


# --- the user's own fsspec -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_a_users_open_transaction_and_caches_do_not_hold_back_or_hide_what_is_saved(
    tmp_path: Path, scheme: str
) -> None:
    url = f"{scheme}://{tmp_path}"
    theirs: Any = fsspec.filesystem(scheme)
    tensor = torch.arange(5000.0)
    with theirs.transaction:
        with theirs.open(f"{url}-notes", "wb") as notes:
            notes.write(b"theirs")
        with ckpt.Checkpointer(url, {"t": tensor}) as saver:
            saver.restore()
            theirs.ls(url)  # what it found is in their cache now
            saver.save(1).wait(60)
            assert torch.equal(ckpt.load(url)["t"], tensor)  # seen before their transaction ends
        assert not theirs.exists(f"{url}-notes")
    assert theirs.cat(f"{url}-notes") == b"theirs"
    theirs.invalidate_cache()
    assert theirs.exists(f"{url}/store.json")


def test_a_checkpointer_made_and_used_on_a_thread_works_beside_one_of_the_main_thread(tmp_path: Path) -> None:
    failures: list[BaseException] = []

    def train(name: str) -> None:
        try:
            tensor = torch.zeros(5000)
            with ckpt.Checkpointer(tmp_path / name, {"t": tensor}) as saver:
                saver.restore()
                for step in range(1, 20):
                    tensor += 1
                    saver.save(step)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=train, args=(name,)) for name in ("b", "c")]
    for thread in threads:
        thread.start()
    train("a")
    for thread in threads:
        thread.join()
    assert not failures
    for name in "abc":
        assert steps(tmp_path / name) == list(range(1, 20))
        assert set(ckpt.load(tmp_path / name)["t"].tolist()) == {19}
