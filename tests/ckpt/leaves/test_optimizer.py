"""Which optimizers can be taken apart by the names of their parameters, and what their values say."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ckpt.errors import UnsupportedState
from ckpt.format.values import Ref
from ckpt.leaves import Flattener
from ckpt.leaves.optimizer import half_present


def test_zero_redundancy_optimizer_is_refused_with_what_to_use_instead(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own use of torch.jit.script
        from torch.distributed.optim import ZeroRedundancyOptimizer

    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    try:
        net = nn.Linear(2, 2)
        optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)
        with pytest.raises(UnsupportedState, match="fully_shard") as refused:
            Flattener({"model": net, "optimizer": optimizer}).flatten()
        assert refused.value.leaf == "optimizer"
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "home", ["deepspeed.runtime.zero.stage3", "megatron.core.optimizer", "apex.contrib.optimizers"]
)
def test_optimizers_with_flat_copies_of_their_own_are_refused(home: str) -> None:
    class Distributed(torch.optim.SGD):
        pass

    Distributed.__module__ = home
    net = nn.Linear(2, 2)
    with pytest.raises(UnsupportedState, match="flat copies") as refused:
        Flattener({"model": net, "optimizer": Distributed(net.parameters(), lr=0.1)}).flatten()
    assert refused.value.leaf == "optimizer"


def test_a_deepspeed_engine_is_refused_though_it_is_a_module() -> None:
    class Engine(nn.Module):
        pass

    Engine.__module__ = "deepspeed.runtime.engine"
    with pytest.raises(UnsupportedState, match="flat copies"):
        Flattener({"engine": Engine()}).flatten()


def test_values_name_parameters_and_hold_what_is_not_a_tensor() -> None:
    torch.manual_seed(0)
    net = nn.Linear(2, 2)
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=3, history_size=3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = net(torch.ones(1, 2)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    flat = Flattener({"model": net, "optimizer": optimizer}).flatten()
    value: Any = flat.values["optimizer"]
    (group,) = value["param_groups"]
    assert group["params"] == ("model.weight", "model.bias")
    assert group["history_size"] == 3
    slots = value["state"]["model.weight"]
    assert slots["n_iter"] == optimizer.state[net.weight]["n_iter"] > 0
    assert slots["old_dirs"][0] == Ref("optimizer.state.model.weight.old_dirs[0]")
    classes = {s.shard.leaf.path: s.shard.leaf.cls for s in flat.shards}
    assert classes["optimizer.state.model.weight.old_dirs[0]"] == "slot:old_dirs"
    assert classes["optimizer.state.model.weight.d"] == "slot:d"


def test_tensors_directly_in_the_state_take_no_room_in_the_values() -> None:
    net = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert Flattener({"model": net, "optimizer": optimizer}).flatten().values["optimizer"]["state"] == {}


def test_half_a_state_is_told_from_another_kind_of_state() -> None:
    whole = frozenset({"step", "exp_avg", "exp_avg_sq"})
    assert half_present({"a": whole, "b": whole}) == {}
    assert half_present({"a": whole, "b": whole - {"step"}}) == {"b": ["step"]}
    factored, plain = frozenset({"step", "row_var", "col_var"}), frozenset({"step", "variance"})
    assert half_present({"matrix": factored, "vector": plain}) == {}
