"""DTensors: the box each rank holds, shards restored in place, and placements that are no boxes refused.

Ranks are played one after the other in this process, on torch's fake process group, whose collectives do nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Partial, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from ckpt.errors import LayoutMismatch, UnsupportedState
from ckpt.format.shards import Box, uncovered
from ckpt.leaves import Flattener, PerRank, plan_restore
from tests.support.roundtrip import content, put, raw, take


@contextmanager
def rank(index: int, of: int) -> Iterator[None]:
    _clear_sharding_prop_cache()  # it remembers meshes, which are equal on all ranks, but know their own coordinate
    dist.init_process_group("fake", rank=index, world_size=of, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def cut(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[tuple(slice(a, a + n) for a, n in zip(box.offsets, box.lengths, strict=True))]


@pytest.mark.parametrize(
    ("mesh", "placements"),
    [
        ((3,), [Shard(0)]),
        ((3,), [Shard(1)]),
        ((3,), [Replicate()]),
        ((8,), [Shard(0)]),
        ((2, 3), [Replicate(), Shard(0)]),
        ((2, 2), [Shard(0), Shard(1)]),
        ((2, 2), [Shard(0), Shard(0)]),
        ((2, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
        ((2, 3), [_StridedShard(1, split_factor=3), Shard(1)]),
    ],
    ids=str,
)
def test_the_box_of_every_rank_holds_its_own_elements_and_together_they_cover_the_tensor(
    mesh: tuple[int, ...], placements: list[Any]
) -> None:
    full = (
        torch.arange(7 * 9.0).reshape(7, 9)
        if not isinstance(placements[0], _StridedShard)
        else torch.arange(96.0).reshape(8, 12)
    )
    boxes: set[Box] = set()
    ranks = torch.Size(mesh).numel()
    for r in range(ranks):
        with rank(r, ranks):
            sharded = distribute_tensor(full, init_device_mesh("cpu", mesh), placements, src_data_rank=None)
            (live,) = Flattener({"x": sharded}).flatten().shards
            assert live.shard.leaf.shape == tuple(full.shape)
            assert live.tensor.data_ptr() == sharded._local_tensor.data_ptr()
            assert torch.equal(live.tensor, cut(full, live.shard.box))
            boxes.add(live.shard.box)
    assert uncovered(full.shape, boxes) is None


class Net(nn.Module):
    """13 rows on three ranks are 5, 5, 3; two rows are 1, 1, 0."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up = nn.Linear(4, 13)
        self.down = nn.Linear(13, 2)


def sharded(seed: int) -> tuple[Net, torch.optim.Optimizer]:
    net = Net(seed)
    fully_shard(net.up)
    fully_shard(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    return net, optimizer


def train(net: Net, optimizer: torch.optim.Optimizer, seed: int) -> None:
    torch.manual_seed(seed)
    for p in net.parameters():
        assert isinstance(p, DTensor)
        p.grad = DTensor.from_local(
            torch.randn(p._local_tensor.shape),
            p.device_mesh,
            p.placements,
            run_check=False,
            shape=p.shape,
            stride=p.stride(),
        )
    optimizer.step()


@pytest.mark.parametrize("r", [0, 1, 2])
def test_fsdp2_with_uneven_and_empty_shards_goes_on_bit_for_bit(r: int) -> None:
    with rank(r, 3):
        net, optimizer = sharded(0)
        train(net, optimizer, seed=1)
        snapshot = take({"model": net, "optimizer": optimizer})
        rows = {s.leaf.path: s.box.lengths[0] for s in snapshot.data if s.leaf.shape}
        assert rows["model.up.weight"] == rows["optimizer.state.model.up.weight.exp_avg"] == (5, 5, 3)[r]
        assert rows["model.down.weight"] == rows["optimizer.state.model.down.weight.exp_avg"] == (1, 1, 0)[r]

        other, fresh = sharded(9)
        state: dict[str, object] = {"model": other, "optimizer": fresh}
        put(state, snapshot)
        assert content(state) == content({"model": net, "optimizer": optimizer})
        moment = fresh.state[other.down.weight]["exp_avg"]
        assert isinstance(moment, DTensor)
        assert moment.placements == other.down.weight.placements  # type: ignore[attr-defined]
        train(net, optimizer, seed=2)
        train(other, fresh, seed=2)
        assert content(state) == content({"model": net, "optimizer": optimizer})


def test_after_an_evaluation_forward_the_root_is_sharded_again_before_it_is_looked_at() -> None:
    with rank(1, 3):
        net, optimizer = sharded(0)
        flattener = Flattener({"model": net, "optimizer": optimizer})
        before = flattener.flatten()
        net.unshard()  # as an evaluation forward leaves the root
        assert not isinstance(net.down.weight, DTensor), "nothing was unsharded: this test proves nothing"
        assert flattener.flatten().shards is before.shards
        net.unshard()
        assert [s.shard for s in Flattener({"model": net, "optimizer": optimizer}).flatten().shards] == [
            s.shard for s in before.shards
        ]


def test_an_optimizer_built_before_fully_shard_is_refused_with_the_remedy() -> None:
    with rank(0, 2):
        net = Net(0)
        optimizer = torch.optim.AdamW(net.parameters())
        fully_shard(net)
        with pytest.raises(UnsupportedState, match="after fully_shard"):
            take({"model": net, "optimizer": optimizer})


def test_fsdp_over_tensor_parallel_holds_boxes_that_cover_each_parameter() -> None:
    boxes: dict[str, set[Box]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for r in range(4):
        with rank(r, 4):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
            parallelize_module(net, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
            fully_shard(net, mesh=mesh["dp"])
            for live in Flattener({"model": net}).flatten().shards:
                assert tuple(live.tensor.shape) == live.shard.box.lengths
                boxes.setdefault(live.shard.leaf.path, set()).add(live.shard.box)
                shapes[live.shard.leaf.path] = live.shard.leaf.shape
    assert shapes["model.0.weight"] == (8, 4)
    for path, found in boxes.items():
        assert uncovered(shapes[path], found) is None, path


def local(mesh: DeviceMesh, placements: list[Any], shape: tuple[int, ...], rows: int) -> DTensor:
    return DTensor.from_local(
        torch.ones(rows, *shape[1:]),
        mesh,
        placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=(1,) * len(shape),
    )


@pytest.mark.parametrize(
    ("placements", "says"),
    [
        ([_StridedShard(0, split_factor=4), Shard(0)], "split factor 4"),
        ([_StridedShard(0, split_factor=2), Replicate()], "split factor 2"),
        ([Shard(0), _StridedShard(0, split_factor=2)], "split factor 2"),
        ([Replicate(), Partial()], "summand"),
    ],
)
def test_placements_whose_box_would_be_silently_wrong_are_refused(placements: list[Any], says: str) -> None:
    with rank(0, 4):
        mesh = init_device_mesh("cpu", (2, 2))
        with pytest.raises(UnsupportedState, match=says) as refused:
            take({"x": local(mesh, placements, (8,), 2)})
        assert refused.value.leaf == "x"


def test_a_rank_outside_the_mesh_holds_nothing_and_wants_nothing() -> None:
    full = take({"x": torch.ones(4, 2), "y": torch.ones(1)}).stored
    for r, held in ((0, ["x", "y"]), (2, ["y"])):
        with rank(r, 3):
            mesh = DeviceMesh("cpu", [0, 1])
            sharded = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)], src_data_rank=None)
            state: dict[str, object] = {"x": sharded, "y": torch.ones(1)}
            assert [s.shard.leaf.path for s in Flattener(state).flatten().shards] == held
            restoration = plan_restore(state, full)
            assert sorted(s.leaf.path for s in restoration.wanted) == held


def test_a_local_tensor_of_another_kind_is_refused() -> None:
    class Quantised(torch.Tensor):
        pass

    with rank(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        tensor = DTensor.from_local(torch.ones(2).as_subclass(Quantised), mesh, [Shard(0)], run_check=False)
        with pytest.raises(UnsupportedState, match="Quantised"):
            take({"x": tensor})


def test_a_local_tensor_that_is_not_the_size_its_placements_say_is_refused() -> None:
    with rank(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        with pytest.raises(UnsupportedState, match="placements"):
            take({"x": local(mesh, [Shard(0)], (8,), 3)})


def test_a_dtensor_cannot_be_declared_per_rank() -> None:
    with rank(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        with pytest.raises(UnsupportedState, match="PerRank"):
            take({"x": PerRank(local(mesh, [Shard(0)], (4,), 2))})


def test_dtensors_in_the_users_own_objects_come_back_as_dtensors() -> None:
    class Ema:
        def __init__(self, value: float) -> None:
            self.shadow = {"w": local(init_device_mesh("cpu", (2,)), [Shard(0)], (4, 2), 2) * value}

        def state_dict(self) -> dict[str, Any]:
            return self.shadow

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.shadow = state

    with rank(1, 2):
        saved, other = Ema(3.0), Ema(1.0)
        snapshot = take({"ema": saved})
        assert [s.box for s in snapshot.data] == [Box((2, 0), (2, 2))]
        put({"ema": other}, snapshot)
        restored = other.shadow["w"]
        assert isinstance(restored, DTensor)
        assert restored.placements == (Shard(0),)
        assert torch.equal(raw(restored._local_tensor), raw(saved.shadow["w"]._local_tensor))


def test_state_of_another_shape_than_its_sharded_parameter_is_a_mismatch_not_a_guess() -> None:
    with rank(0, 2):
        net = Net(0)
        fully_shard(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        optimizer.state[net.up.weight]["row"] = torch.ones(13)
        snapshot = take({"model": net, "optimizer": optimizer})
        fresh = torch.optim.SGD(net.parameters(), lr=0.1)
        with pytest.raises(LayoutMismatch) as refused:
            put({"model": net, "optimizer": fresh}, snapshot)
        assert list(refused.value.changed) == ["optimizer.state.model.up.weight.row"]


def test_a_replicated_snapshot_is_asked_for_in_the_boxes_of_the_live_mesh() -> None:
    snapshot = take({"x": torch.arange(12.0).reshape(6, 2)})
    with rank(1, 2):
        state: dict[str, object] = {"x": local(init_device_mesh("cpu", (2,)), [Shard(0)], (6, 2), 3)}
        (wanted,) = plan_restore(state, snapshot.stored).wanted
        assert wanted.box == Box((3, 0), (3, 2))
