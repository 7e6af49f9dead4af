"""A restored optimizer takes the next step bit for bit as the saved one does, by the names of its parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ckpt.errors import LayoutMismatch, UnsupportedState
from tests.support.roundtrip import content, put, raw, take


class Net(nn.Module):
    """Matrices, vectors, a scalar, and a parameter that never gets a gradient."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.a = nn.Linear(6, 5)
        self.b = nn.Linear(5, 6)
        self.scale = nn.Parameter(torch.rand(()))
        self.unused = nn.Parameter(torch.rand(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x))) * self.scale


def train(net: nn.Module, optimizer: torch.optim.Optimizer, seed: int, steps: int = 3) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x, y = torch.randn(2, 4, 6, generator=generator)

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            optimizer.zero_grad()
            loss = ((net(x) - y) ** 2).mean()
            loss.backward()
            return loss

        optimizer.step(closure)


Make = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "adamw": torch.optim.AdamW,
    "adamw for-loop": lambda p: torch.optim.AdamW(p, foreach=False),
    "adamw foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, fused=True),
    "adamw amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "adamw tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2)),
    "adam": torch.optim.Adam,
    "adamax": torch.optim.Adamax,
    "adadelta": torch.optim.Adadelta,
    "adafactor": torch.optim.Adafactor,
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "asgd": lambda p: torch.optim.ASGD(p, t0=1),
    "lbfgs": lambda p: torch.optim.LBFGS(p, max_iter=3, history_size=2),
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "rprop": torch.optim.Rprop,
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_next_steps_of_a_restored_optimizer_are_bit_equal(name: str) -> None:
    make = OPTIMIZERS[name]
    net = Net(0)
    optimizer = make(net.parameters())
    train(net, optimizer, seed=1)
    snapshot = take({"model": net, "optimizer": optimizer})

    other = Net(5)
    fresh = make(other.parameters())
    state: dict[str, object] = {"model": other, "optimizer": fresh}
    put(state, snapshot)
    assert content(state) == content({"model": net, "optimizer": optimizer})

    train(net, optimizer, seed=2)
    train(other, fresh, seed=2)
    assert content(state) == content({"model": net, "optimizer": optimizer})


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_rollback_in_the_same_process_undoes_later_steps(name: str) -> None:
    net = Net(0)
    optimizer = OPTIMIZERS[name](net.parameters())
    state: dict[str, object] = {"model": net, "optimizer": optimizer}
    for _ in range(2):  # at step 0, where most optimizers have no state yet, and later
        before, snapshot = content(state), take(state)
        train(net, optimizer, seed=1)
        assert content(state) != before
        put(state, snapshot)
        assert content(state) == before
        train(net, optimizer, seed=2)


def test_moments_keep_their_stored_dtype_when_the_parameter_has_another() -> None:
    net = nn.Linear(3, 3).bfloat16()
    optimizer = torch.optim.AdamW(net.parameters())
    for p in net.parameters():
        optimizer.state[p] = {
            "step": torch.tensor(7.0),
            "exp_avg": torch.rand(p.shape),
            "exp_avg_sq": torch.rand(p.shape),
        }
    snapshot = take({"model": net, "optimizer": optimizer})
    other = nn.Linear(3, 3).bfloat16()
    fresh = torch.optim.AdamW(other.parameters())
    put({"model": other, "optimizer": fresh}, snapshot)
    assert fresh.state[other.weight]["exp_avg"].dtype == torch.float32
    assert torch.equal(fresh.state[other.weight]["exp_avg"], optimizer.state[net.weight]["exp_avg"])


def test_moments_of_a_parameter_with_other_strides_get_its_strides() -> None:
    net = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.rand(1, 2, 5, 5)).sum().backward()
    optimizer.step()
    other = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
    fresh = torch.optim.AdamW(other.parameters())
    put({"model": other, "optimizer": fresh}, take({"model": net, "optimizer": optimizer}))
    moments, saved = fresh.state[other.weight]["exp_avg"], optimizer.state[net.weight]["exp_avg"]
    assert moments.stride() == saved.stride() == other.weight.stride()
    assert torch.equal(moments, saved)


def test_an_optimizer_rebuilt_in_another_order_gets_its_state_by_name() -> None:
    """J1"""
    net, other = Net(0), Net(3)
    optimizer = torch.optim.AdamW(net.parameters())
    train(net, optimizer, seed=1)
    fresh = torch.optim.AdamW(reversed(list(other.parameters())))
    put({"model": other, "optimizer": fresh}, take({"model": net, "optimizer": optimizer}))
    for (name, p), q in zip(net.named_parameters(), other.parameters(), strict=True):
        if name != "unused":
            assert torch.equal(optimizer.state[p]["exp_avg"], fresh.state[q]["exp_avg"]), name


def test_a_parameter_added_in_the_middle_starts_without_state_and_the_others_keep_theirs() -> None:
    """J1"""
    net, other = Net(0), Net(3)
    some = [p for n, p in net.named_parameters() if n != "a.bias"]
    optimizer = torch.optim.AdamW(some)
    train(net, optimizer, seed=1)
    fresh = torch.optim.AdamW(other.parameters())
    put({"model": other, "optimizer": fresh}, take({"model": net, "optimizer": optimizer}))
    assert other.a.bias not in fresh.state
    assert torch.equal(fresh.state[other.b.weight]["exp_avg_sq"], optimizer.state[net.b.weight]["exp_avg_sq"])


def test_split_groups_take_options_and_state_from_the_group_their_parameters_were_in() -> None:
    """J1"""
    net, other = Net(0), Net(3)
    optimizer = torch.optim.SGD(
        [{"params": [net.a.weight, net.b.weight], "lr": 0.5}, {"params": [net.scale]}], lr=0.1, momentum=0.9
    )
    train(net, optimizer, seed=1)
    snapshot = take({"model": net, "optimizer": optimizer})
    groups = [
        {"params": [other.b.weight]},
        {"params": [other.scale]},
        {"params": [other.a.weight]},
        {"params": [other.a.bias]},
    ]
    fresh = torch.optim.SGD(groups, lr=9.0, momentum=0.9)
    put({"model": other, "optimizer": fresh}, snapshot)
    assert [g["lr"] for g in fresh.param_groups] == [0.5, 0.1, 0.5, 9.0]
    for p, q in ((net.a.weight, other.a.weight), (net.b.weight, other.b.weight), (net.scale, other.scale)):
        assert torch.equal(optimizer.state[p]["momentum_buffer"], fresh.state[q]["momentum_buffer"])


def test_merged_groups_must_have_had_the_same_options() -> None:
    """J1"""
    net, other = Net(0), Net(3)
    groups = [{"params": [net.a.weight], "lr": 0.5}, {"params": [net.b.weight], "lr": 0.5}]
    snapshot = take({"model": net, "optimizer": torch.optim.SGD(groups, momentum=0.9)})
    merged = torch.optim.SGD([other.a.weight, other.b.weight], lr=1.0, momentum=0.9)
    put({"model": other, "optimizer": merged}, snapshot)
    assert merged.param_groups[0]["lr"] == 0.5
    groups[1]["lr"] = 0.25
    snapshot = take({"model": net, "optimizer": torch.optim.SGD(groups, momentum=0.9)})
    with pytest.raises(LayoutMismatch) as refused:
        put({"model": other, "optimizer": merged}, snapshot)
    assert list(refused.value.changed) == ["optimizer.param_groups[0].lr"]


def test_state_of_a_parameter_that_left_the_optimizer_is_not_dropped_in_silence() -> None:
    net, other = Net(0), Net(3)
    optimizer = torch.optim.AdamW(net.parameters())
    train(net, optimizer, seed=1)
    fresh = torch.optim.AdamW([p for n, p in other.named_parameters() if n != "a.weight"])
    with pytest.raises(LayoutMismatch) as refused:
        put({"model": other, "optimizer": fresh}, take({"model": net, "optimizer": optimizer}))
    assert set(refused.value.unexpected) == {
        f"optimizer.state.model.a.weight.{s}" for s in ("step", "exp_avg", "exp_avg_sq")
    }


def test_how_this_process_computes_stays_its_own_choice() -> None:
    net, other = Net(0), Net(3)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.5, foreach=True)
    train(net, optimizer, seed=1)
    fresh = torch.optim.AdamW(other.parameters(), fused=True)
    put({"model": other, "optimizer": fresh}, take({"model": net, "optimizer": optimizer}))
    assert fresh.param_groups[0]["fused"] is True
    assert fresh.param_groups[0]["lr"] == 0.5
    train(other, fresh, seed=2)


def test_a_tensor_learning_rate_is_restored_in_place() -> None:
    net, other = Net(0), Net(3)
    optimizer = torch.optim.AdamW(net.parameters(), lr=torch.tensor(0.25))
    lr = torch.tensor(1.0)
    fresh = torch.optim.AdamW(other.parameters(), lr=lr)
    put({"model": other, "optimizer": fresh}, take({"model": net, "optimizer": optimizer}))
    assert fresh.param_groups[0]["lr"] is lr
    assert lr.item() == 0.25
    plain = torch.optim.AdamW(other.parameters(), lr=1.0)
    with pytest.raises(LayoutMismatch, match="stored a tensor, live"):
        put({"model": other, "optimizer": plain}, take({"model": net, "optimizer": optimizer}))


def test_stored_state_that_lacks_a_slot_is_a_mismatch_before_anything_is_written() -> None:
    """J2"""
    net, other = Net(0), Net(3)
    optimizer = torch.optim.AdamW(net.parameters())
    train(net, optimizer, seed=1)
    snapshot = take({"model": net, "optimizer": optimizer})
    del snapshot.stored.leaves["optimizer.state.model.a.weight.exp_avg"]
    before = raw(other.a.weight)
    with pytest.raises(LayoutMismatch) as refused:
        put({"model": other, "optimizer": torch.optim.AdamW(other.parameters())}, snapshot)
    assert refused.value.missing == ("optimizer.state.model.a.weight.exp_avg",)
    assert torch.equal(raw(other.a.weight), before)


def test_lbfgs_whose_flat_history_follows_the_order_of_parameters_refuses_another_order() -> None:
    net, other = Net(0), Net(3)
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=2)
    train(net, optimizer, seed=1)
    names = [p for n, p in other.named_parameters()]
    first, *rest = names
    fresh = torch.optim.LBFGS([first, *reversed(rest)], max_iter=2)
    with pytest.raises(LayoutMismatch, match="order"):
        put({"model": other, "optimizer": fresh}, take({"model": net, "optimizer": optimizer}))


def test_state_under_keys_that_are_no_parameters_is_saved_too() -> None:
    net, other = Net(0), Net(3)
    optimizer, fresh = torch.optim.AdamW(net.parameters()), torch.optim.AdamW(other.parameters())
    optimizer.state["rank"] = {"count": 3, "norm": torch.tensor(2.5)}  # type: ignore[index]
    put({"model": other, "optimizer": fresh}, take({"model": net, "optimizer": optimizer}))
    assert fresh.state["rank"] == {"count": 3, "norm": torch.tensor(2.5)}  # type: ignore[index]


def test_an_optimizer_is_not_restored_from_a_plain_value() -> None:
    net = Net(0)
    snapshot = take({"model": net, "optimizer": 3})
    with pytest.raises(LayoutMismatch, match="live an optimizer"):
        put({"model": net, "optimizer": torch.optim.AdamW(net.parameters())}, snapshot)


def test_the_optimizer_alone_cannot_be_tracked() -> None:
    with pytest.raises(UnsupportedState, match="no tensor of the"):
        take({"optimizer": torch.optim.AdamW(Net(0).parameters())})
