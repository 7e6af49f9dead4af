"""A state is looked at anew at each save: whatever training code changed is noticed, the rest is recognised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ckpt.errors import UnsupportedState
from ckpt.leaves import Flat, Flattener
from tests.support.roundtrip import content, keep


def trained() -> dict[str, Any]:
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    optimizer = torch.optim.AdamW(net.parameters())
    step(net, optimizer)
    return {"model": net, "optimizer": optimizer, "ema": {"w": torch.ones(2)}, "a": np.ones(3), "step": 1}


def step(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    net(torch.rand(4, 3)).square().sum().backward()
    optimizer.step()


def test_nothing_new_gives_the_very_same_shards() -> None:
    state = trained()
    flattener = Flattener(state)
    first = flattener.flatten()
    step(state["model"], state["optimizer"])
    state["step"] = 2
    second = flattener.flatten()
    assert second.shards is first.shards
    assert second.values["step"] == 2


def replace_parameter(state: dict[str, Any]) -> None:
    state["model"][0].weight = nn.Parameter(torch.zeros(3, 3))
    state["optimizer"] = torch.optim.AdamW(state["model"].parameters())


def swap_data(state: dict[str, Any]) -> None:
    state["model"][0].weight.data = torch.full((3, 3), 7.0)


def swap_data_of_another_shape(state: dict[str, Any]) -> None:
    state["ema"]["w"].data = torch.zeros(5)


def transpose_in_place(state: dict[str, Any]) -> None:
    weight = state["model"][0].weight
    weight.data = weight.data.t()


def narrow_in_place(state: dict[str, Any]) -> None:
    state["ema"]["w"].data = state["ema"]["w"].data[:1]


def reinterpret(state: dict[str, Any]) -> None:
    state["ema"]["w"].data = state["ema"]["w"].data.view(torch.int32)


def to_half(state: dict[str, Any]) -> None:
    state["model"].half()


def assign_buffer(state: dict[str, Any]) -> None:
    state["model"][1].running_mean = torch.full((3,), 5.0)


def register_buffer(state: dict[str, Any]) -> None:
    state["model"][0].register_buffer("late", torch.ones(1))


def register_parameter(state: dict[str, Any]) -> None:
    state["model"][1].register_parameter("late", nn.Parameter(torch.ones(1)))


def add_module(state: dict[str, Any]) -> None:
    state["model"].append(nn.Linear(3, 1))


def drop_module(state: dict[str, Any]) -> None:
    del state["model"][1]
    state["optimizer"] = torch.optim.AdamW(state["model"].parameters())


def replace_a_moment(state: dict[str, Any]) -> None:
    state["optimizer"].state[state["model"][0].weight]["exp_avg"] = torch.full((3, 3), 9.0)


def swap_a_moments_data(state: dict[str, Any]) -> None:
    state["optimizer"].state[state["model"][0].weight]["exp_avg"].data = torch.full((3, 3), 9.0)


def clear_state(state: dict[str, Any]) -> None:
    state["optimizer"].state.clear()


def drop_one_state(state: dict[str, Any]) -> None:
    del state["optimizer"].state[state["model"][0].weight]


def swap_optimizer(state: dict[str, Any]) -> None:
    state["optimizer"] = torch.optim.SGD(state["model"].parameters(), lr=0.1)


def regroup(state: dict[str, Any]) -> None:
    optimizer = state["optimizer"]
    (group,) = optimizer.param_groups
    group["params"], late = group["params"][:1], group["params"][1:]
    optimizer.add_param_group({"params": late})


def add_to_state(state: dict[str, Any]) -> None:
    for slots in state["optimizer"].state.values():
        slots["count"] = 3


def grow_tree(state: dict[str, Any]) -> None:
    state["ema"]["v"] = torch.ones(1)


def replace_array(state: dict[str, Any]) -> None:
    state["a"] = np.zeros(4)


def resize_array(state: dict[str, Any]) -> None:
    state["a"].resize(5, refcheck=False)


def track_more(state: dict[str, Any]) -> None:
    state["more"] = torch.ones(1)


def track_less(state: dict[str, Any]) -> None:
    del state["ema"]


def tie(state: dict[str, Any]) -> None:
    state["model"][0].weight = state["model"][2].weight
    state["optimizer"] = torch.optim.AdamW(state["model"].parameters())


def freeze_and_thaw(state: dict[str, Any]) -> None:
    """A parameter that had no gradient so far gets one."""
    net = state["model"]
    state["optimizer"] = torch.optim.AdamW([net[0].weight])
    step(net, state["optimizer"])
    state["optimizer"].add_param_group({"params": [net[2].weight]})
    step(net, state["optimizer"])


CHANGES: list[Callable[[dict[str, Any]], None]] = [
    replace_parameter,
    swap_data,
    swap_data_of_another_shape,
    transpose_in_place,
    narrow_in_place,
    reinterpret,
    to_half,
    assign_buffer,
    register_buffer,
    register_parameter,
    add_module,
    drop_module,
    replace_a_moment,
    swap_a_moments_data,
    clear_state,
    drop_one_state,
    swap_optimizer,
    regroup,
    add_to_state,
    grow_tree,
    replace_array,
    resize_array,
    track_more,
    track_less,
    tie,
    freeze_and_thaw,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda c: c.__name__)
def test_every_change_of_training_code_is_noticed(change: Callable[[dict[str, Any]], None]) -> None:
    """J2"""
    state = trained()
    flattener = Flattener(state)
    before = signature(flattener.flatten())
    change(state)
    seen = signature(flattener.flatten())
    assert seen == signature(Flattener(state).flatten()), "a remembered look differs from a fresh one"
    assert seen != before, "the change changed nothing: this test proves nothing"


def signature(flat: Flat) -> object:
    snapshot = keep(flat)
    pointers = {s.shard: s.tensor.data_ptr() for s in flat.shards}
    return ({s: d.tolist() for s, d in snapshot.data.items()}, pointers, snapshot.stored.values, flat.aliases)


def test_state_appears_with_the_first_step_and_for_each_parameter_with_its_first_gradient() -> None:
    """J2"""
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(net.parameters())
    flattener = Flattener({"model": net, "optimizer": optimizer})

    def slots() -> set[str]:
        return {s.shard.leaf.path for s in flattener.flatten().shards if s.shard.leaf.cls.startswith("slot:")}

    assert slots() == set()
    assert len(optimizer.state) == 0, "looking must not create entries in the defaultdict"
    net[0](torch.rand(2, 2)).sum().backward()
    optimizer.step()
    assert len(slots()) == 6
    net[1](torch.rand(2, 2)).sum().backward()
    optimizer.step()
    assert len(slots()) == 12
    assert "optimizer.state.model.1.bias.exp_avg_sq" in slots()


def test_half_present_state_is_an_error_that_names_the_parameter_and_the_slot() -> None:
    """J2"""
    state = trained()
    flattener = Flattener(state)
    flattener.flatten()
    slots = state["optimizer"].state[state["model"][0].bias]
    del slots["exp_avg_sq"]
    with pytest.raises(UnsupportedState, match="exp_avg_sq") as refused:
        flattener.flatten()
    assert refused.value.leaf == "optimizer.state.model.0.bias"
    slots.clear()
    flattener.flatten()


def test_a_refusal_does_not_spoil_the_next_look() -> None:
    state = trained()
    flattener = Flattener(state)
    flattener.flatten()
    state["model"][0].register_buffer("late", torch.zeros(1, 3).expand(2, 3))
    for _ in range(2):
        with pytest.raises(UnsupportedState, match="share memory"):
            flattener.flatten()
    state["model"][0].late = torch.ones(2)
    assert signature(flattener.flatten()) == signature(Flattener(state).flatten())


def test_a_parameter_the_tracked_modules_do_not_have_is_refused_with_group_and_index() -> None:
    state = trained()
    stale = nn.Parameter(torch.ones(3))
    state["optimizer"].add_param_group({"params": [state["model"][0].weight.new_zeros(1).requires_grad_(), stale]})
    with pytest.raises(UnsupportedState, match="after fully_shard") as refused:
        Flattener(state).flatten()
    assert refused.value.leaf == "optimizer.param_groups[1].params[0]"


def test_state_of_a_parameter_that_left_all_groups_is_refused() -> None:
    state = trained()
    flattener = Flattener(state)
    flattener.flatten()
    state["optimizer"].param_groups[0]["params"].pop()
    with pytest.raises(UnsupportedState, match="in none of its groups"):
        flattener.flatten()


def test_an_optimizer_may_train_tensors_that_are_tracked_by_themselves() -> None:
    w, v = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([w, v], lr=0.1)
    flat = Flattener({"w": w, "rest": [v], "optimizer": optimizer}).flatten()
    assert flat.values["optimizer"]["param_groups"][0]["params"] == ("w", "rest[0]")


def test_an_optimizer_whose_state_dict_holds_more_than_torchs_is_refused() -> None:
    class Averaging(torch.optim.SGD):
        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "slow": [torch.ones(1)]}

    net = nn.Linear(1, 1)
    with pytest.raises(UnsupportedState, match="slow") as refused:
        Flattener({"model": net, "optimizer": Averaging(net.parameters(), lr=0.1)}).flatten()
    assert refused.value.leaf == "optimizer"


def test_shards_are_sorted_and_values_of_equal_states_are_equal() -> None:
    torch.manual_seed(0)
    state = trained()
    flat = Flattener(state).flatten()
    assert [s.shard for s in flat.shards] == sorted(s.shard for s in flat.shards)
    assert content(state) == content(state)
