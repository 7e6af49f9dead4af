"""Dicts and lists with tensors in them, schedulers, scalers and the user's own objects, out and back."""

from __future__ import annotations

import enum
import random
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as lrs
from torch.utils.data import DataLoader

from ckpt.errors import LayoutMismatch, UnsupportedState
from ckpt.format.values import Ref
from ckpt.leaves import Flattener
from tests.support.roundtrip import content, put, take


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)


SCHEDULERS: dict[str, Any] = {
    "lambda": lambda o: lrs.LambdaLR(o, lambda n: 0.9**n),
    "callable object": lambda o: lrs.LambdaLR(o, Warmup(3)),
    "multiplicative": lambda o: lrs.MultiplicativeLR(o, lambda n: 0.9),
    "step": lambda o: lrs.StepLR(o, 2),
    "multistep": lambda o: lrs.MultiStepLR(o, [2, 3, 3]),
    "constant": lrs.ConstantLR,
    "linear": lrs.LinearLR,
    "exponential": lambda o: lrs.ExponentialLR(o, 0.9),
    "cosine": lambda o: lrs.CosineAnnealingLR(o, 7),
    "polynomial": lambda o: lrs.PolynomialLR(o, 6),
    "plateau": lambda o: lrs.ReduceLROnPlateau(o, patience=1),
    "cyclic": lambda o: lrs.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "cyclic scale": lambda o: lrs.CyclicLR(o, 0.01, 0.1, step_size_up=3, scale_fn=lambda x: 0.5),
    "onecycle": lambda o: lrs.OneCycleLR(o, 0.2, 20),
    "restarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 3),
    "sequential": lambda o: lrs.SequentialLR(o, [lrs.ConstantLR(o), lrs.ExponentialLR(o, 0.8)], [2]),
    "chained": lambda o: lrs.ChainedScheduler([lrs.ConstantLR(o), lrs.ExponentialLR(o, 0.8)]),
    "swa": lambda o: torch.optim.swa_utils.SWALR(o, 0.05, anneal_epochs=3),
}


class Warmup:
    """A callable whose attributes are state (plain lambdas are not)."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __call__(self, n: int) -> float:
        return min(1.0, (n + 1) / self.steps)


def advance(opt: torch.optim.Optimizer, scheduler: Any, times: int) -> list[tuple[float, float]]:
    seen = []
    for i in range(times):
        opt.step()
        scheduler.step(*([1.0 + i % 2] if isinstance(scheduler, lrs.ReduceLROnPlateau) else []))
        seen.append((opt.param_groups[0]["lr"], opt.param_groups[0]["momentum"]))
    return seen


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_goes_on_where_it_was(name: str) -> None:
    """L1"""
    p, q = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    opt, other = (torch.optim.SGD([x], lr=0.1, momentum=0.9) for x in (p, q))
    scheduler, fresh = SCHEDULERS[name](opt), SCHEDULERS[name](other)
    advance(opt, scheduler, 4)
    put({"p": q, "opt": other, "sched": fresh}, take({"p": p, "opt": opt, "sched": scheduler}))
    assert advance(other, fresh, 5) == advance(opt, scheduler, 5)


def test_a_scheduler_of_a_tensor_learning_rate_is_restored_too() -> None:
    p, q = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    opt, other = (torch.optim.AdamW([x], lr=torch.tensor(0.1)) for x in (p, q))
    scheduler, fresh = lrs.CosineAnnealingLR(opt, 7), lrs.CosineAnnealingLR(other, 7)
    for _ in range(3):
        opt.step()
        scheduler.step()
    put({"p": q, "opt": other, "sched": fresh}, take({"p": p, "opt": opt, "sched": scheduler}))
    for o, s in ((opt, scheduler), (other, fresh)):
        o.step()
        s.step()
    assert torch.equal(other.param_groups[0]["lr"], opt.param_groups[0]["lr"])
    assert content({"sched": fresh}) == content({"sched": scheduler})


def test_the_state_of_another_kind_of_scheduler_is_a_mismatch() -> None:
    with pytest.raises(LayoutMismatch) as refused:
        put({"s": lrs.CosineAnnealingLR(optimizer(), 7)}, take({"s": lrs.StepLR(optimizer(), 2)}))
    assert "step_size" in refused.value.changed["s"]
    assert "T_max" in refused.value.changed["s"]


def test_a_grad_scaler_goes_on_and_a_disabled_one_does_not_fit_an_enabled_one() -> None:
    scaler, fresh = torch.amp.GradScaler("cpu", init_scale=64.0), torch.amp.GradScaler("cpu")
    put({"s": fresh}, take({"s": scaler}))
    assert fresh.get_scale() == 64.0
    off = torch.amp.GradScaler("cpu", enabled=False)
    with pytest.raises(LayoutMismatch, match="disabled"):
        put({"s": fresh}, take({"s": off}))
    with pytest.raises(LayoutMismatch, match="disabled"):
        put({"s": off}, take({"s": scaler}))
    put({"s": off}, take({"s": off}))


class Ema:
    """A user's object: tensors, an array, counters."""

    def __init__(self, seed: float) -> None:
        self.state: dict[str, Any] = {"w": torch.full((3,), seed), "a": np.full(2, seed), "n": int(seed), "h": []}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_anything_with_a_state_dict_gets_its_tree_back() -> None:
    """L1"""
    saved, other = Ema(3), Ema(0)
    saved.state["h"].append(torch.tensor(1.5))
    put({"ema": other}, take({"ema": saved}))
    assert torch.equal(other.state["w"], saved.state["w"])
    assert isinstance(other.state["a"], np.ndarray)
    assert other.state["a"].tolist() == [3, 3]
    assert other.state["n"] == 3
    assert other.state["h"] == [torch.tensor(1.5)]
    assert other.state["w"] is not saved.state["w"]


def test_values_are_copies_of_the_instant() -> None:
    """B1"""
    log: dict[str, Any] = {"losses": [1.0], "seen": {1}, "raw": bytearray(b"a"), "last": deque([1], 2)}
    flat = Flattener({"log": log}).flatten()
    log["losses"].append(2.0)
    log["seen"].add(2)
    log["raw"] += b"b"
    log["last"].append(3)
    assert flat.values["log"] == {"losses": [1.0], "seen": {1}, "raw": bytearray(b"a"), "last": deque([1], 2)}


def test_plain_values_of_every_kind_come_back_in_the_mapping() -> None:
    """J6"""
    numpy_state = np.random.RandomState(3).get_state()
    state: dict[str, object] = {
        "step": 7,
        "big": 2**80,
        "nan": float("nan"),
        "np": np.float32(2.5),
        "path": Path("runs/a"),
        "cut": slice(1, None, 2),
        "set": {1, 2},
        "raw": b"\0",
        "none": None,
        "python": random.Random(3).getstate(),
        "numpy": numpy_state,
        "dtype": torch.bfloat16,
        "device": torch.device("cpu", 0),
        "size": [torch.Size([2, 3]), torch.channels_last, torch.strided],
        "counts": Counter("hello"),
        "ordered": OrderedDict(b=1, a=torch.ones(2)),
        "default": defaultdict(list, x=[1]),
    }
    fresh: dict[str, object] = dict.fromkeys(state)
    put(fresh, take(state))
    assert content(fresh) == content(state)
    assert all(type(fresh[name]) is type(state[name]) for name in state)
    restored = random.Random()
    restored.setstate(fresh["python"])  # type: ignore[arg-type]
    assert restored.random() == random.Random(3).random()
    again = np.random.RandomState()
    again.set_state(fresh["numpy"])  # type: ignore[arg-type]
    assert again.rand() == np.random.RandomState(3).rand()


class Colour(enum.Enum):
    RED = 1


@dataclass
class Config:
    lr: float = 0.1


@pytest.mark.parametrize(
    "value",
    [Colour.RED, Config(), lambda: 0, torch.nn, {Config: 1}, defaultdict(lambda: 0), {frozenset([Colour.RED]): 1}],
)
def test_values_that_name_code_are_refused_with_their_path(value: Any) -> None:
    """J6"""
    with pytest.raises(UnsupportedState) as refused:
        take({"settings": {"a": [1, value]}})
    assert "settings.a[1]" in refused.value.leaf
    assert refused.value.leaf in str(refused.value)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (DataLoader([1, 2]), "batches"),
        (torch.Generator(), "get_state"),
        (nn.Linear, "class"),
        (Config(), "asdict"),
    ],
)
def test_objects_without_a_state_of_their_own_are_refused_with_a_remedy(value: Any, says: str) -> None:
    with pytest.raises(UnsupportedState, match=says) as refused:
        take({"thing": value})
    assert refused.value.leaf == "thing"


def test_a_loop_in_a_tree_is_refused_rather_than_walked_for_ever() -> None:
    loop: list[Any] = [torch.ones(1)]
    loop.append(loop)
    with pytest.raises(UnsupportedState, match="contains itself"):
        take({"loop": loop})


@pytest.mark.parametrize("name", ["", "$random", 3])
def test_names_of_tracked_objects_are_strings_that_are_not_the_librarys_own(name: Any) -> None:
    with pytest.raises(UnsupportedState, match="name of a tracked object"):
        take({name: 1})


def test_two_leaves_with_one_path_are_refused() -> None:
    with pytest.raises(UnsupportedState, match="two tensors") as refused:
        take({"x": {"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}})
    assert refused.value.leaf == "x.a.b"


def test_users_containers_and_tensors_are_refilled_in_place() -> None:
    weights, history, inner = torch.zeros(2), [0.0], {"n": 0, "old": 1}
    live: dict[str, Any] = {"w": weights, "h": history, "d": inner, "q": deque([1], 3)}
    queue = live["q"]
    state: dict[str, object] = {"x": live}
    saved = {"w": torch.ones(2), "h": [1.0, 2.0], "d": {"n": 5, "t": torch.tensor(3)}, "q": deque([7, 8], 3)}
    put(state, take({"x": saved}))
    assert state["x"] is live
    assert live["w"] is weights
    assert weights.tolist() == [1, 1]
    assert history == [1.0, 2.0]
    assert inner == {"n": 5, "t": torch.tensor(3)}
    assert queue == deque([7, 8])


def test_a_live_tensor_in_a_tree_must_fit_and_none_lets_one_be_made() -> None:
    snapshot = take({"x": {"w": torch.ones(3)}})
    with pytest.raises(LayoutMismatch) as refused:
        put({"x": {"w": torch.ones(4)}}, snapshot)
    assert list(refused.value.changed) == ["x.w"]
    state: dict[str, object] = {"x": {"w": None}}
    put(state, snapshot)
    assert state["x"] == {"w": pytest.approx(torch.ones(3))}


def test_a_read_only_array_in_a_tree_is_saved_and_replaced() -> None:
    frozen = np.frombuffer(b"\1\2\3", np.uint8)
    snapshot = take({"x": [frozen]})
    state: dict[str, object] = {"x": [np.frombuffer(b"\7\7\7", np.uint8)]}
    put(state, snapshot)
    assert state["x"][0].tolist() == [1, 2, 3]  # type: ignore[index]


def test_tensors_in_a_tree_are_leaves_and_the_tree_refers_to_them() -> None:
    flat = Flattener({"x": {"a": [torch.ones(1)], 3: np.ones(2), "n": (1,)}}).flatten()
    assert flat.values["x"] == {"a": [Ref("x.a[0]")], 3: Ref("x[3]"), "n": (1,)}
    assert [(s.shard.leaf.path, s.shard.leaf.cls) for s in flat.shards] == [("x.a[0]", "tensor"), ("x[3]", "array")]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_a_stateful_loader_goes_on_with_the_batches_that_were_left_and_its_tensors_are_each_ranks_own() -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    def loader() -> Any:
        return StatefulDataLoader(
            list(range(12)), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(3)
        )

    saved, fresh = loader(), loader()
    rest = iter(saved)
    next(rest), next(rest)
    snapshot = take({"loader": saved})
    assert all(shard.per_rank for shard in snapshot.data)
    put({"loader": fresh}, snapshot)
    assert [b.tolist() for b in fresh] == [b.tolist() for b in rest]
