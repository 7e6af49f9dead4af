"""Meshes on four real ranks, through the front door: HSDP, FSDP over tensor parallelism, tensor parallelism alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Partial, _StridedShard

import ckpt
from ckpt.errors import SaveFailed, UnsupportedState
from tests.support.procs import run_ranks, succeed
from tests.support.worlds import (
    PATIENT,
    Parallel,
    bytes_by_rank,
    check_whole,
    goes_on_bit_for_bit,
    group,
    quiet,
    stored_parts,
)

pytestmark = pytest.mark.e2e


class Block(nn.Module):
    """Two linear layers for a tensor-parallel plan, and a norm and a head of 5 rows outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.norm(self.down(torch.tanh(self.up(x)))))
        return result


PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def hybrid(seed: int) -> Parallel:
    """Two replicas of a model in two shards."""
    torch.manual_seed(seed)
    net = Block()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(net.up, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return Parallel(net, 8)


def both(seed: int) -> Parallel:
    """FSDP over tensor parallelism: rows of `up` are cut by both, which is a _StridedShard."""
    torch.manual_seed(seed)
    net = Block()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(net, mesh["tp"], PLAN)
    fully_shard(net, mesh=mesh["dp"])
    return Parallel(net, 8, share=mesh["dp"].get_local_rank())


def columns(seed: int) -> Parallel:
    """Tensor parallelism alone, over all four."""
    torch.manual_seed(seed)
    net = Block()
    parallelize_module(net, init_device_mesh("cpu", (4,), mesh_dim_names=("tp",)), PLAN)
    return Parallel(net, 8, share=0)


BUILD = {"hybrid": hybrid, "both": both, "columns": columns}


def goes_on(kind: str, url: str, whole: Path) -> None:
    with group():
        goes_on_bit_for_bit(url, BUILD[kind], whole)


@pytest.mark.parametrize("kind", BUILD)
def test_a_model_on_a_mesh_goes_on_bit_for_bit(kind: str, tmp_path: Path) -> None:
    url = tmp_path / "store"
    succeed(run_ranks(goes_on, 4, [kind, str(url), tmp_path / "whole"]))
    check_whole(url, tmp_path / "whole")
    parts = stored_parts(url)
    elements = sum(p.numel() for p in Block().parameters())
    slots = len(list(Block().parameters()))
    assert sum(bytes_by_rank(parts)) == 4 * (3 * elements + slots), "every byte once, replicas and all"
    assert min(bytes_by_rank(parts)) > 0
    boxes = {row.as_box for part in parts.values() for row in part.shards if row.leaf == "model.up.weight"}
    assert len(boxes) == {"hybrid": 2, "both": 4, "columns": 4}[kind]


def placed(url: str) -> None:
    with group():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        outer = DeviceMesh("cpu", [1, 3])
        whole = torch.arange(42.0).reshape(7, 6)

        def state(fill: float | None) -> dict[str, object]:
            source = whole if fill is None else torch.full_like(whole, fill)
            found: dict[str, object] = {
                "grid": distribute_tensor(source, mesh, [Shard(0), Shard(1)]),
                "rows": distribute_tensor(source, mesh, [Shard(0), Shard(0)]),
                "copies": distribute_tensor(source, mesh, [Replicate(), Replicate()]),
                "half": distribute_tensor(source, mesh, [Shard(1), Replicate()]),
            }
            # Two ranks are not in this mesh: they hold nothing of it.
            found["some"] = distribute_tensor(source, outer, [Shard(0)])
            return found

        first = state(None)
        saver = ckpt.Checkpointer(url, first, mirror="off", options=quiet())
        saver.restore()
        saver.save(1).wait(PATIENT)
        saver.close()
        second = state(-1.0)
        saver = ckpt.Checkpointer(url, second, mirror="off", options=quiet())
        assert saver.restore() == 1
        again = saver.save(2)
        again.wait(PATIENT)
        assert again.report is not None and again.report.changed == 0, again.report
        saver.close()
        for name, tensor in second.items():
            expected = first[name]
            assert isinstance(tensor, DTensor) and isinstance(expected, DTensor)
            assert torch.equal(tensor.to_local(), expected.to_local()), name


def test_dtensors_of_every_placement_come_back_also_where_some_ranks_are_outside_their_mesh(tmp_path: Path) -> None:
    url = tmp_path / "store"
    succeed(run_ranks(placed, 4, [str(url)]))
    whole = torch.arange(42.0).reshape(7, 6)
    loaded = ckpt.load(url)
    assert all(torch.equal(loaded[name], whole) for name in ("grid", "rows", "copies", "half", "some"))
    assert sum(bytes_by_rank(stored_parts(url))) == 5 * 42 * 4


def refuses(url: str) -> None:
    with group() as rank:
        mesh = init_device_mesh("cpu", (2, 2))
        state: dict[str, object] = {"fine": torch.ones(3)}
        saver = ckpt.Checkpointer(url, state, mirror="off", options=quiet())
        saver.restore()
        summand = DTensor.from_local(torch.ones(4), mesh, [Replicate(), Partial()], run_check=False)
        strided = DTensor.from_local(
            torch.ones(2), mesh, [_StridedShard(0, split_factor=4), Shard(0)], run_check=False, shape=torch.Size([8]),
            stride=(1,),
        )  # fmt: skip
        for step, (tensor, says) in enumerate([(summand, "redistribute"), (strided, "split factor")]):
            saver.state["x"] = tensor
            with pytest.raises(UnsupportedState, match=says) as refused:
                saver.save(step)
            assert refused.value.leaf == "x"
        # On one rank only: the others learn of it, and nobody hangs.
        fine = distribute_tensor(torch.ones(4), mesh, [Replicate(), Shard(0)])
        saver.state["x"] = summand if rank == 2 else fine
        error: Any = UnsupportedState if rank == 2 else SaveFailed
        with pytest.raises(error, match="x: placement" if rank == 2 else "rank 2 could not capture"):
            saver.save(3)
        saver.state["x"] = fine
        saver.save(4).wait(PATIENT)
        saver.close()


def test_a_partial_dtensor_and_a_strided_one_that_is_no_box_are_refused_with_their_leaf(tmp_path: Path) -> None:
    succeed(run_ranks(refuses, 4, [str(tmp_path / "store")]))
    assert torch.equal(ckpt.load(tmp_path / "store")["x"], torch.ones(4))
