"""Three real ranks that come back together, draw their own data again, and end together, through the front door."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import ckpt
from ckpt.errors import DamagedError, LayoutMismatch, SaveFailed, UnsupportedState
from storage_backends import open_store
from storage_backends.local import LocalStore
from tests.support.faulty import GateStore, SwitchStore
from tests.support.procs import Job, run_ranks, succeed, torchrun
from tests.support.stores import flipped
from tests.support.worlds import PATIENT, group, quiet, stored_parts

pytestmark = pytest.mark.e2e


def on_three(function: Any, *args: Any) -> list[str]:
    return succeed(run_ranks(function, 3, args))


def all_equal(value: int) -> bool:
    """Whether every rank passed the same."""
    both = torch.tensor([value, -value])
    dist.all_reduce(both, op=dist.ReduceOp.MAX)
    return bool(both[0] == -both[1] == value)


# --- restoring


def saves_three(url: str) -> None:
    with group() as rank:
        state: dict[str, object] = {"own": ckpt.PerRank(torch.zeros(3000)), "shared": torch.zeros(3000)}
        with ckpt.Checkpointer(url, state, mirror="off", options=quiet()) as saver:
            saver.restore()
            for step in (1, 2, 3):
                generator = torch.Generator().manual_seed(10 * step + rank)
                state["own"].value.normal_(generator=generator)  # type: ignore[attr-defined]
                state["shared"].normal_(generator=torch.Generator().manual_seed(step))  # type: ignore[attr-defined]
                saver.save(step).wait(PATIENT)


def falls_back(url: str) -> None:
    with group() as rank:
        own, shared = torch.zeros(3000), torch.zeros(3000)
        state: dict[str, object] = {"own": ckpt.PerRank(own), "shared": shared}
        with ckpt.Checkpointer(url, state, mirror="off", options=quiet()) as saver:
            assert saver.restore() == 2
            assert saver.restored is not None
            ((skipped, reason),) = saver.restored.skipped
            assert skipped.step == 3 and "own" in reason and "rank 1" in reason, reason
            assert torch.equal(own, torch.randn(3000, generator=torch.Generator().manual_seed(20 + rank)))
            assert torch.equal(shared, torch.randn(3000, generator=torch.Generator().manual_seed(2)))
            before = own.clone()
            with pytest.raises(DamagedError) as told:  # exactly this one: no other stands in for it
                saver.restore("1/3")
            assert (told.value.step, told.value.rank, told.value.leaf) == (3, 1, "own"), told.value
            assert torch.equal(own, before)
            assert saver.restore("1/1") == 1
            saver.save(2).wait(PATIENT)


def test_a_pack_damaged_for_one_rank_alone_takes_all_ranks_to_the_step_before_and_says_why(tmp_path: Path) -> None:
    url = tmp_path / "store"
    on_three(saves_three, str(url))
    part = stored_parts(url)[1]
    row = next(row for row in part.shards if row.leaf == "own")
    blob = part.chunks(row)[0].blobs[-1]
    flipped(open_store(str(url)), blob.pack, 8 * blob.start + 3)
    on_three(falls_back, str(url))


def does_not_fit(url: str) -> None:
    with group() as rank:
        own = torch.zeros(3000 if rank != 2 else 2999)
        shared = torch.zeros(3000)
        state: dict[str, object] = {"own": ckpt.PerRank(own), "shared": shared}
        with ckpt.Checkpointer(url, state, mirror="off", options=quiet()) as saver:
            with pytest.raises(LayoutMismatch, match="own") as told:
                saver.restore()
            assert "own" in told.value.changed
            assert not own.any() and not shared.any(), "the live state is untouched, on the ranks where it fits too"
            saver.state["own"] = ckpt.PerRank(torch.zeros(3000))
            assert saver.restore() == 3
            assert shared.any()


def test_a_layout_that_does_not_fit_on_one_rank_is_refused_on_all_before_anything_is_written(tmp_path: Path) -> None:
    on_three(saves_three, str(tmp_path / "store"))
    on_three(does_not_fit, str(tmp_path / "store"))


def cannot_read(url: str) -> None:
    with group() as rank:
        shared = torch.zeros(3000)
        store = SwitchStore(LocalStore(url))
        state: dict[str, object] = {"own": ckpt.PerRank(torch.zeros(3000)), "shared": shared}
        with ckpt.Checkpointer(store, state, mirror="off", options=quiet()) as saver:
            for key in ("packs/", "parts/"):
                if rank == 1:
                    store.fail(ckpt.Refused, verb="get_range" if key == "packs/" else "get", key=key)
                with pytest.raises(ckpt.StorageError, match="on purpose"):
                    saver.restore()
                assert not shared.any()
                store.heal()
            assert saver.restore() == 3


def test_a_store_that_fails_for_one_rank_is_that_error_on_all_and_never_an_older_step(tmp_path: Path) -> None:
    """F5: reading."""
    on_three(saves_three, str(tmp_path / "store"))
    on_three(cannot_read, str(tmp_path / "store"))


def cannot_copy(url: str) -> None:
    with group() as rank:
        tensor = torch.zeros(3000)
        saver = ckpt.Checkpointer(url, {"t": tensor}, mirror="off", options=quiet(replica_check=2, commit_wait=600))
        saver.restore()
        saver.save(1).wait(PATIENT)  # compares replicas
        mirror: Any = saver._mirror
        free = mirror.free

        def out_of_memory(*_: object) -> None:
            raise MemoryError("no memory left on purpose")

        if rank == 1:
            mirror.free = out_of_memory
        second = saver.save(2)
        if rank == 1:
            with pytest.raises(SaveFailed, match="no memory left on purpose") as told:
                second.wait(PATIENT)
            assert told.value.stage == "capture"
            mirror.free = free
            tensor[7] = 1
        with pytest.warns(RuntimeWarning, match="step 2 was not saved"):
            third = saver.save(3)
        with pytest.raises(SaveFailed, match="rank 1 holds"):  # all ranks agree that this one compares again
            third.wait(PATIENT)
        tensor[7] = 1
        with pytest.warns(RuntimeWarning, match="step 3"):
            saver.save(4).wait(PATIENT)
        saver.close()


def test_a_copy_that_fails_on_one_rank_fails_that_save_on_all_and_replicas_are_compared_as_before(
    tmp_path: Path,
) -> None:
    """F5: staging."""
    on_three(cannot_copy, str(tmp_path / "store"))


# --- data


def loader_of(kind: str) -> DataLoader[Any]:
    data = TensorDataset(torch.arange(60))
    sampler: DistributedSampler[Any] = DistributedSampler(data, seed=3)
    make: Any = StatefulDataLoader if kind == "stateful" else DataLoader
    loader: DataLoader[Any] = make(data, batch_size=4, sampler=sampler)
    return loader


def draws_its_own(url: str, kind: str) -> None:
    """Five batches an epoch on each rank, and noise from the rank's own generator; stops at 3, 5 and 8 of 12."""
    with group() as rank:

        def run(url: str, last: int) -> list[tuple[int, list[int], float]]:
            torch.manual_seed(50 + rank)
            seen: list[Any] = []
            state: dict[str, object] = {"seen": seen, "t": torch.zeros(3)}
            with ckpt.Checkpointer(url, state, mirror="off", options=quiet()) as saver:
                saver.restore()
                for step, (x,) in saver.batches(loader_of(kind), last):
                    saver.state["seen"] = [*saver.state["seen"], (step, x.tolist(), torch.rand(1).item())]  # type: ignore[misc]
                    saver.save(step + 1)
                return list(saver.state["seen"])  # type: ignore[call-overload]

        unhurt = run(url + ".unhurt", 12)
        for last in (3, 5, 8):
            run(url, last)
        assert run(url, 12) == unhurt
        drawn = [number for _, batch, _ in unhurt[:5] for number in batch]
        assert len(set(drawn)) == 20
        assert not all_equal(sum(drawn)), "every rank drew the same: this test proves nothing"
        assert unhurt[5][1] != unhurt[0][1], "the second epoch is shuffled anew"


@pytest.mark.parametrize("kind", ["plain", "stateful"])
def test_every_rank_goes_on_in_its_own_data_with_its_own_noise(tmp_path: Path, kind: str) -> None:
    on_three(draws_its_own, str(tmp_path / "store"), kind)


# --- stopping


def is_terminated(url: str, how: str) -> None:
    with group() as rank:
        tensor = torch.zeros(300)
        done = 0

        def one(step: int) -> None:
            nonlocal done
            tensor.add_(1)
            done = step + 1
            if step == 3 and rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)

        if how == "step":
            with ckpt.Checkpointer(url, {"t": tensor}, every=1000, mirror="off", options=quiet()) as saver:
                for step in range(saver.restore(), 100):
                    one(step)
                    saver.step(step + 1)
                    if saver.stopping:
                        break
        else:

            @ckpt.checkpointed(url, every=1000, mirror="off", options=quiet())
            def train(run: ckpt.Run) -> None:
                run.track(t=tensor)
                for step, _ in run.batches(loader_of("plain"), 100):
                    one(step)
                assert run.stopping

            train()
        assert all_equal(done), "the ranks stopped at different steps"
        # Asked in step 4, told to all with its vote, which the next step reads: saved there.
        assert done == 5, done


@pytest.mark.parametrize("how", ["step", "batches"])
def test_sigterm_on_one_rank_makes_all_save_the_same_step_and_stop(tmp_path: Path, how: str) -> None:
    """F9 on several ranks."""
    on_three(is_terminated, str(tmp_path / "store"), how)
    assert float(ckpt.load(tmp_path / "store", 5)["t"][0]) == 5


def test_torchrun_that_is_terminated_ends_with_all_ranks_saved_and_goes_on_from_there(tmp_path: Path) -> None:
    """What a cluster does before it takes the machines away: SIGTERM for the agent, which passes it on."""
    source = f"""
        import torch
        import torch.distributed as dist
        import ckpt

        dist.init_process_group("gloo")

        @ckpt.checkpointed({str(tmp_path / "store")!r}, every=100_000, mirror="off")
        def train(run):
            tensor = torch.zeros(9)
            print("starts at", run.track(t=tensor), flush=True)
            for step in run.steps(10**9):
                tensor += 1
                dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
                if step == 20:
                    print("well under way", flush=True)
            assert run.stopping
            print("stops at", int(tensor[0]), flush=True)

        train()
        dist.destroy_process_group()
    """
    with torchrun(source, 2) as job:
        job.until(0, "well under way")
        job.signal_agent(signal.SIGTERM)
        (result,) = job.wait()
    ends = {line for line in result.out.splitlines() if line.startswith("stops at")}
    assert len(ends) == 1, result.out
    assert result.out.count("stops at") == 2, result.out
    stopped = int(ends.pop().split()[-1])
    assert float(ckpt.load(tmp_path / "store")["t"][0]) == stopped > 20


def loses_a_peer(url: str, how: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    store = GateStore(LocalStore(url), verbs=frozenset({"put"}), where=lambda key: key.startswith("parts/"))
    if rank == 0:
        store.gate.set()

    def die_or_fail() -> None:
        if rank == 1:
            assert store.arrived.wait(PATIENT)
            os.kill(os.getpid(), signal.SIGKILL)
        sys.stdin.readline()
        raise ZeroDivisionError("as training does when a peer is gone")

    if how == "decorated":

        @ckpt.checkpointed(store, every=1, mirror="off", options=quiet(commit_wait=600))
        def train(run: ckpt.Run) -> None:
            run.track(t=torch.zeros(9))
            for step in run.steps(9):
                if step == 1:
                    die_or_fail()

        train()
    elif how == "with":
        with ckpt.Checkpointer(store, {"t": torch.zeros(9)}, mirror="off", options=quiet(commit_wait=600)) as saver:
            saver.restore()
            saver.save(1)
            die_or_fail()


@pytest.mark.parametrize("how", ["decorated", "with"])
def test_a_rank_whose_peer_died_ends_without_waiting_for_its_part(tmp_path: Path, how: str) -> None:
    """Else every restart of the job would begin minutes late."""
    with Job(loses_a_peer, 2, [str(tmp_path / "store"), how]) as job:
        assert job.ended(1) == -signal.SIGKILL
        job.tell(0)
        began = time.monotonic()
        assert job.ended(0, PATIENT) == 1
        assert time.monotonic() - began < PATIENT
        survivor, _ = job.wait()
    assert "ZeroDivisionError" in survivor.out and "no part of rank 1" in survivor.out, survivor.out
    assert not open_store(str(tmp_path / "store")).list("snapshots/")


FALLS_OFF = """
    import os, signal, sys
    import torch
    import torch.distributed as dist
    import ckpt
    from storage_backends.local import LocalStore
    from tests.support.faulty import GateStore

    dist.init_process_group("gloo")
    store = GateStore(LocalStore(sys.argv[1]), verbs=frozenset({"put"}), where=lambda key: key.startswith("parts/"))
    saver = ckpt.Checkpointer(store, {"t": torch.zeros(9)}, mirror="off", options=ckpt.Options(commit_wait=600))
    saver.restore()
    if dist.get_rank() == 0:
        store.gate.set()
    saver.save(1)
    if dist.get_rank() == 1:
        assert store.arrived.wait(60)
        os.kill(os.getpid(), signal.SIGKILL)
    sys.stdin.readline()
    raise ZeroDivisionError("as training does when a peer is gone")
"""


def test_a_script_that_ends_with_an_error_and_without_close_does_not_wait_for_a_dead_peer(tmp_path: Path) -> None:
    with Job(FALLS_OFF, 2, [str(tmp_path / "store")]) as job:
        assert job.ended(1) == -signal.SIGKILL
        job.tell(0)
        assert job.ended(0, PATIENT) == 1
        survivor, _ = job.wait()
    assert "ZeroDivisionError" in survivor.out and "no part of rank 1" in survivor.out, survivor.out


# --- refused


def is_refused(url: str) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.optim import ZeroRedundancyOptimizer

    with group():
        flat = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
        net = nn.Linear(4, 4)
        zero = ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW)
        for state, leaf in (({"model": nn.Sequential(flat)}, "model.0"), ({"net": net, "zero": zero}, "zero")):
            with ckpt.Checkpointer(url, state, mirror="off", options=quiet()) as saver:
                saver.restore()
                with pytest.raises(UnsupportedState, match="fully_shard") as refused:
                    saver.save(1)
                assert refused.value.leaf == leaf


def test_fsdp1_and_the_zero_redundancy_optimizer_are_refused_with_the_remedy(tmp_path: Path) -> None:
    succeed(run_ranks(is_refused, 2, [str(tmp_path / "store")]))
    assert not open_store(str(tmp_path / "store")).list("snapshots/")
