"""DDP on three real ranks, through the front door: replicas stored once and compared, buffers and dropout per rank."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import ckpt
from ckpt.errors import SaveFailed
from storage_backends import open_store
from tests.support.procs import run_ranks, succeed, torchrun
from tests.support.training import Training, raw
from tests.support.worlds import (
    PATIENT,
    bytes_by_rank,
    check_whole,
    counted,
    group,
    note_whole,
    quiet,
    stored_parts,
)

pytestmark = pytest.mark.e2e

PER_RANK = {"model.norm.running_mean", "model.norm.running_var"}


class Replicated(Training):
    """`Training` under DDP: its BatchNorm sees other data on every rank, and its dropout draws differently."""

    def __init__(self, seed: int = 0, width: int = 16) -> None:
        super().__init__(seed, width)
        # DDP lays its buckets out anew after a process's first backward, and three ranks round their sum differently
        # in another layout: a restarted job would differ in last bits with no checkpoint at fault. So: no new layout.
        self.ddp = DistributedDataParallel(self.model, find_unused_parameters=True)
        torch.manual_seed(1000 * seed + dist.get_rank())

    @property
    def state(self) -> dict[str, object]:
        return {**super().state, "model": self.ddp}

    def train(self, step: int) -> float:
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        return self.fit(torch.randn(12, 8, generator=generator))

    def fit(self, x: torch.Tensor) -> float:
        loss = self.ddp(x).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        return float(loss.detach())


def resumes(url: str, whole: Path) -> None:
    with group():
        unhurt = Replicated()
        losses = [unhurt.train(step) for step in range(8)]

        first = Replicated()
        saver = ckpt.Checkpointer(url, first.state, mirror="off", options=quiet())
        saver.restore()
        calls = counted(saver)
        seen = []
        for step in range(5):
            assert first.train(step) == losses[step]
            saver.save(step + 1).wait(PATIENT)
            seen.append(dict(calls))
            calls.clear()
        saver.close()
        # The first save gathers layout and buffers at once; that BatchNorm differs is known from then on.
        assert seen == [{"vote": 1, "gather": 1}] + [{"vote": 1}] * 4, seen
        note_whole({"model": first.ddp}, whole)
        dist.barrier()

        second = Replicated(seed=7)
        saver = ckpt.Checkpointer(url, second.state, mirror="off", options=quiet())
        assert saver.restore() == 5
        assert second.bytes() == first.bytes()
        again = saver.save(6)
        again.wait(PATIENT)
        assert again.report is not None and again.report.changed == 0, again.report
        assert [second.train(step) for step in range(5, 8)] == losses[5:]
        assert second.bytes() == unhurt.bytes()
        saver.close()
        mean = second.model.norm.running_mean
        assert mean is not None
        means = [torch.zeros_like(mean) for _ in range(3)]
        dist.all_gather(means, mean)
        assert len(set(map(raw, means))) == 3, "BatchNorm was the same everywhere: this test proves nothing"


def test_a_resumed_job_is_bit_identical_to_one_never_hurt_buffers_and_dropout_of_each_rank_included(
    tmp_path: Path,
) -> None:
    url = tmp_path / "store"
    succeed(run_ranks(resumes, 3, [str(url), tmp_path / "whole"]))
    parts = stored_parts(url)
    per_rank = [{row.leaf for row in part.shards if row.per_rank} for part in parts.values()]
    assert per_rank == [PER_RANK] * 3
    held = [row.leaf for part in parts.values() for row in part.shards if not row.per_rank]
    assert held.count("model.norm.num_batches_tracked") == 1, "a buffer that is equal everywhere is stored once"
    loaded = {name: value for name, value in ckpt.load(url).items() if isinstance(value, torch.Tensor)}
    expected = json.loads((tmp_path / "whole").read_text())
    assert expected.keys() - loaded.keys() <= PER_RANK


class Embedded(nn.Module):
    """Nine tenths of it is one table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4001, 64)
        self.mix = nn.Sequential(*(nn.Linear(64, 64) for _ in range(5)))
        self.out = nn.Linear(64, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.out(self.mix(self.table(x)))
        return result


def embeds(url: str, whole: Path) -> None:
    with group():
        torch.manual_seed(0)
        model = DistributedDataParallel(Embedded())
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.arange(9)).sum().backward()
        optimizer.step()
        state: dict[str, object] = {"model": model, "optimizer": optimizer}
        saver = ckpt.Checkpointer(url, state, mirror="off", options=quiet(chunk="16KiB"))
        saver.restore()
        ticket = saver.save(1)
        ticket.wait(PATIENT)
        assert ticket.report is not None
        print("captured", ticket.report.captured)
        saver.close()
        note_whole(state, whole)


def test_replicas_are_stored_once_and_spread_evenly_though_one_table_is_nearly_all(tmp_path: Path) -> None:
    url = tmp_path / "store"
    outs = succeed(run_ranks(embeds, 3, [str(url), tmp_path / "whole"]))
    check_whole(url, tmp_path / "whole")
    parts = stored_parts(url)
    sizes = bytes_by_rank(parts)
    table, rest = 4001 * 64, 5 * (64 * 64 + 64) + 64 * 3 + 3
    scalars = 2 * 5 + 3  # the optimizer's step counters
    assert sum(sizes) == 4 * (3 * (table + rest) + scalars), "every byte once"
    assert max(sizes) - min(sizes) <= 3 * 16384, sizes
    tables = [row for part in parts.values() for row in part.shards if row.leaf == "model.table.weight"]
    assert len(tables) == 3, "the table lies on all three"
    captured = [int(out.split("captured ")[1].split()[0]) for out in outs]
    assert all(0 <= a - b < 1024 for a, b in zip(captured, sizes, strict=True)), "a rank copies only what it stores"


def job(url: str, out: str, fatal: int) -> None:
    """A whole training as a user writes it. Rank 1 dies in the body of step `fatal`, the first time."""
    with group() as rank:

        @ckpt.checkpointed(url, every=2, mirror="off", options=quiet())
        def train(run: ckpt.Run) -> None:
            training = Replicated()
            data = TensorDataset(torch.randn(60, 8, generator=torch.Generator().manual_seed(4)))
            sampler: DistributedSampler[Any] = DistributedSampler(data, seed=5)
            loader = DataLoader(data, batch_size=5, sampler=sampler)
            run.track(**training.state, losses=[])
            for step, (x,) in run.batches(loader, 17):  # 6 batches an epoch
                run.state["losses"].append(training.fit(x))  # type: ignore[attr-defined]
                if (step, rank) == (fatal, 1) and not Path(out).exists():
                    Path(out).write_text("killed")
                    os.kill(os.getpid(), signal.SIGKILL)
            ends = {name: data.hex() for name, data in training.bytes().items()}
            Path(f"{out}.{rank}").write_text(json.dumps([ends, [loss.hex() for loss in run.state["losses"]]]))  # type: ignore[attr-defined]

        train()


def test_torchrun_restarts_a_job_whose_rank_was_killed_and_it_ends_as_one_never_hurt(tmp_path: Path) -> None:
    """C1 and L1 on two ranks: data, dropout and buffers of every rank, and a loss list, in the third epoch."""
    succeed(run_ranks(job, 2, [str(tmp_path / "whole"), str(tmp_path / "unhurt"), -1]))
    source = f"""
        from tests.e2e.test_ddp import job
        job({str(tmp_path / "hurt.store")!r}, {str(tmp_path / "hurt")!r}, 13)
    """
    with torchrun(source, 2, max_restarts=1) as running:
        (result,) = running.wait(150)
    assert result.code == 0, result.out
    assert (tmp_path / "hurt").read_text() == "killed", "nobody was killed: this test proves nothing"
    for rank in range(2):
        expected = json.loads((tmp_path / f"unhurt.{rank}").read_text())
        assert json.loads((tmp_path / f"hurt.{rank}").read_text()) == expected
        assert len(expected[1]) == 17
    runs = open_store(str(tmp_path / "hurt.store")).list("runs/")
    assert len(runs) == 2


@contextmanager
def flipped(tensor: torch.Tensor, here: bool) -> Iterator[None]:
    """One bit of one element differs, on this rank only."""
    bits = tensor.detach().view(torch.int32).view(-1)
    if here:
        bits[-1] ^= 1
    yield
    if here:
        bits[-1] ^= 1


def corrupts(url: str) -> None:
    with group() as rank:
        training = Replicated()
        saver = ckpt.Checkpointer(url, training.state, mirror="off", options=quiet(replica_check=2, commit_wait=600))
        saver.restore()
        training.train(0)
        saver.save(1).wait(PATIENT)
        parameter = training.model.out.weight
        moment = training.optimizer.state[parameter]["exp_avg_sq"]
        for step, tensor, leaf in (
            (2, parameter, "model.out.weight"),
            (4, moment, "optimizer.state.model.out.weight.exp_avg_sq"),
        ):
            saver.save(step).wait(PATIENT)  # compares nothing
            with flipped(tensor, rank == 1):
                began = time.monotonic()
                with pytest.raises(SaveFailed) as told:
                    saver.save(step + 1).wait(PATIENT)
                assert time.monotonic() - began < PATIENT
                assert told.value.stage == "replicas", told.value
                text = str(told.value)
                assert f"leaf {leaf} " in text and "rank 1 holds" in text and "ranks 0, 2 hold" in text, text
            training.train(step)
            with pytest.warns(RuntimeWarning, match=f"step {step + 1} was not saved"):
                saver.save(step + 2).wait(PATIENT)
        saver.close()
        assert saver.stats.failed == 2


def test_a_replica_changed_by_one_bit_on_one_rank_is_reported_with_leaf_and_rank_and_training_goes_on(
    tmp_path: Path,
) -> None:
    """A parameter, then a moment. Nobody waits for a commit that cannot come."""
    succeed(run_ranks(corrupts, 3, [str(tmp_path / "store")]))
