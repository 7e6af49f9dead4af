"""A journaled step of four ranks: on three, two and one; under DDP; from rings, and from those of one node alone."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import ckpt
from tests.support.procs import Job, run_ranks, succeed
from tests.support.training import raw
from tests.support.worlds import PATIENT, Parallel, group, quiet, tensors

pytestmark = pytest.mark.e2e

STEPS = 8
"""Of which the fifth is a snapshot."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(7, 13)
        self.norm = nn.BatchNorm1d(13)
        self.drop = nn.Dropout(0.3)
        self.down = nn.Linear(13, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(self.drop(torch.tanh(self.norm(self.up(x)))))
        return result


class Sharded(nn.Module):
    """Two rows are 1, 1, 0, 0 on four ranks; the batch statistics are left out, which on_resize would have to judge."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(7, 13)
        self.drop = nn.Dropout(0.3)
        self.down = nn.Linear(13, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(self.drop(torch.tanh(self.up(x))))
        return result


def sharded(seed: int) -> Parallel:
    torch.manual_seed(seed)
    net = Sharded()
    fully_shard(net.up)
    fully_shard(net)
    return Parallel(net, 7)


def replicated(seed: int) -> Parallel:
    torch.manual_seed(seed)
    return Parallel(DistributedDataParallel(Net(), find_unused_parameters=True), 7)


def contents(training: Parallel) -> dict[str, bytes]:
    """Every tensor whole."""
    found = tensors(training.state)
    return {
        name: raw(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor) for name, tensor in found.items()
    }


def dies(url: str, make: str, out: Path, mirror: str, to: Any) -> None:
    """Train, write down what is there after the last step, and die without a word."""
    with group() as rank:
        training = {"sharded": sharded, "replicated": replicated}[make](0)
        folder = f"{mirror}-{rank // 2}" if mirror != "off" else mirror
        saver = ckpt.Checkpointer(
            url, training.state, every=5, journal=ckpt.Journal(flush="1 step", to=to), mirror=folder, options=quiet()
        )
        for step in range(saver.restore(), STEPS):
            training.train(step)
            saver.step(step + 1)
        saver.wait(PATIENT)
        found = contents(training)
        torch.save(found, out / f"after-{rank}")
        torch.save(torch.get_rng_state(), out / f"random-{rank}")
        print("trained", flush=True)
        input()


def comes_back(url: str, make: str, out: Path, mirror: str, step: int, to: Any) -> None:
    with group() as rank:
        training = {"sharded": sharded, "replicated": replicated}[make](5)
        folder = f"{mirror}-{rank // 2}" if mirror != "off" else mirror
        saver = ckpt.Checkpointer(
            url, training.state, every=5, journal=ckpt.Journal(flush="1 step", to=to), mirror=folder, options=quiet()
        )
        assert saver.restore() == step
        assert saver.restored is not None and saver.restored.id.step == 5
        print("lost", saver.restored.lost, flush=True)
        if step == STEPS:
            assert contents(training) == torch.load(out / f"after-{rank}")
        if dist.get_world_size() == 4 and step == STEPS:
            assert torch.equal(torch.get_rng_state(), torch.load(out / f"random-{rank}"))
        training.train(step)  # and it goes on
        saver.step(step + 1)
        stats = saver.stats.journal
        assert stats is not None and stats.off is None
        saver.close()


def die(url: Path, make: str, out: Path, mirror: str = "off", to: str = "store") -> None:
    with Job(dies, 4, [str(url), make, out, mirror, to]) as job:
        for rank in range(4):
            job.until(rank, "trained")
        job.kill_all()


@pytest.mark.parametrize("ranks", [3, 2, 1])
def test_a_journaled_step_of_four_sharded_ranks_comes_back_on_fewer(tmp_path: Path, ranks: int) -> None:
    die(tmp_path / "store", "sharded", tmp_path)
    succeed(run_ranks(comes_back, ranks, [str(tmp_path / "store"), "sharded", tmp_path, "off", STEPS, "store"]))


def test_replicas_with_statistics_of_their_own_come_back_on_every_rank(tmp_path: Path) -> None:
    """DDP: BatchNorm's statistics differ from rank to rank, and each rank gets its own."""
    die(tmp_path / "store", "replicated", tmp_path)
    succeed(run_ranks(comes_back, 4, [str(tmp_path / "store"), "replicated", tmp_path, "off", STEPS, "store"]))


def test_rings_alone_bring_back_every_step_while_their_nodes_stand(tmp_path: Path) -> None:
    """Records in mirrors' folders only."""
    base = str(tmp_path / "mirror")
    die(tmp_path / "store", "sharded", tmp_path, base, "mirror")
    arguments = ["sharded", tmp_path, base]
    out = succeed(run_ranks(comes_back, 4, [str(tmp_path / "store"), *arguments, STEPS, "mirror"]))
    assert all("lost 0" in text for text in out)


def test_a_lost_node_without_segments_loses_steps_and_says_how_many(tmp_path: Path) -> None:
    base = str(tmp_path / "mirror")
    die(tmp_path / "store", "sharded", tmp_path, base, "mirror")
    shutil.rmtree(f"{base}-1")
    out = succeed(run_ranks(comes_back, 4, [str(tmp_path / "store"), "sharded", tmp_path, base, 5, "mirror"]))
    assert all("lost 3" in text for text in out)
