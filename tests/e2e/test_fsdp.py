"""FSDP2 on real ranks, through the front door: uneven and empty shards, columns, evaluation before a save."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import ckpt
from tests.support.procs import run_ranks, succeed
from tests.support.worlds import (
    PATIENT,
    Parallel,
    bytes_by_rank,
    check_whole,
    goes_on_bit_for_bit,
    group,
    local_bytes,
    quiet,
    stored_parts,
)

pytestmark = pytest.mark.e2e


class Net(nn.Module):
    """13 rows on three ranks are 5, 5, 3; two rows are 1, 1, 0; one row is 1, 0, 0."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(7, 13)
        self.drop = nn.Dropout(0.3)
        self.down = nn.Linear(13, 2)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(self.drop(torch.tanh(self.up(x)))) * self.scale
        return result


def by_rows(seed: int) -> Parallel:
    torch.manual_seed(seed)
    net = Net()
    fully_shard(net.up)
    fully_shard(net)
    return Parallel(net, 7)


def by_columns(seed: int) -> Parallel:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(9, 12), nn.Tanh(), nn.Linear(12, 3))
    fully_shard(net, shard_placement_fn=lambda p: Shard(1) if p.dim() == 2 else Shard(0))
    return Parallel(net, 9)


def uneven(url: str, whole: Path) -> None:
    with group():
        goes_on_bit_for_bit(url, by_rows, whole)


def test_uneven_and_empty_shards_go_on_bit_for_bit_and_unchanged_saves_store_documents_only(tmp_path: Path) -> None:
    """With an evaluation forward before the save, which leaves the root of the model unsharded."""
    url = tmp_path / "store"
    succeed(run_ranks(uneven, 3, [str(url), tmp_path / "whole"]))
    check_whole(url, tmp_path / "whole")
    rows = {
        (row.leaf, rank): row.as_box.lengths[0]
        for rank, part in stored_parts(url).items()
        for row in part.shards
        if row.shape
    }
    for name in ("model.up.weight", "optimizer.state.model.up.weight.exp_avg"):
        assert [rows[name, rank] for rank in range(3)] == [5, 5, 3]
    for name in ("model.down.weight", "optimizer.state.model.down.bias.exp_avg_sq"):
        assert [rows[name, rank] for rank in range(3)] == [1, 1, 0]
    assert [rows["model.scale", rank] for rank in range(3)] == [1, 0, 0]


def columns(url: str, whole: Path) -> None:
    with group():
        goes_on_bit_for_bit(url, by_columns, whole)


def test_shards_along_dimension_1_go_on_bit_for_bit(tmp_path: Path) -> None:
    url = tmp_path / "store"
    succeed(run_ranks(columns, 3, [str(url), tmp_path / "whole"]))
    check_whole(url, tmp_path / "whole")
    boxes = [
        row.as_box
        for _, part in sorted(stored_parts(url).items())
        for row in part.shards
        if row.leaf == "model.0.weight"
    ]
    assert [box.lengths for box in boxes] == [(12, 3)] * 3
    assert [box.offsets for box in boxes] == [(0, 0), (0, 3), (0, 6)]


def trains_between_saves(url: str) -> None:
    with group():
        training = by_rows(0)
        saver = ckpt.Checkpointer(url, training.state, mirror="off", options=quiet())
        saver.restore()
        for step in range(3):  # the optimizer's state appears with the first step
            saver.save(step).wait(PATIENT)
            training.train(step)
        trained = local_bytes(training.state)
        training.evaluate()
        saver.save(3).wait(PATIENT)
        loss = training.train(3)
        saver.close()

        other = by_rows(5)
        saver = ckpt.Checkpointer(url, other.state, mirror="off", options=quiet())
        assert saver.restore(0) == 0
        assert not other.optimizer.state, "before its first step an optimizer has no state"
        assert saver.restore("1/3") == 3
        assert local_bytes(other.state) == trained
        assert other.train(3) == loss
        saver.close()


def test_moments_that_appear_between_saves_are_saved_from_then_on(tmp_path: Path) -> None:
    """J2 on several ranks: the layout changes after the first step, and going back to before it drops the state."""
    succeed(run_ranks(trains_between_saves, 3, [str(tmp_path / "store")]))


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(3000, 16)
        self.norm = nn.LayerNorm(16)
        self.register_buffer("table", torch.arange(5000.0))  # plain, and equal on all ranks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.norm(self.embed(x.abs().long())).mean(-1) + self.table.mean()  # type: ignore[operator]
        return result


def mixed(url: str) -> None:
    with group():
        torch.manual_seed(0)
        net = Wide()
        fully_shard(net)
        training = Parallel(net, 8)
        saver = ckpt.Checkpointer(url, training.state, mirror="off", options=quiet(chunk="4KiB"))
        saver.restore()
        training.train(0)
        saver.save(1).wait(PATIENT)
        saver.close()


def test_what_is_replicated_beside_shards_is_stored_once_and_levels_the_ranks(tmp_path: Path) -> None:
    succeed(run_ranks(mixed, 3, [str(tmp_path / "store")]))
    parts = stored_parts(tmp_path / "store")
    sizes = bytes_by_rank(parts)
    moments = 3 * 4 * (3000 * 16 + 2 * 16) + 3 * 4
    assert sum(sizes) == moments + 5000 * 4, "every byte once"
    assert max(sizes) - min(sizes) <= 3 * 4096, sizes
