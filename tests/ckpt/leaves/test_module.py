"""A module's leaves under their clean names, tied ones under each, wrappers left out where they are wrappers."""

from __future__ import annotations

import copy
import unicodedata
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.swa_utils import AveragedModel

from ckpt.errors import LayoutMismatch, UnsupportedState
from ckpt.leaves import Flattener, PerRank, plan_restore
from tests.support.roundtrip import content, put, raw, take


def paths(state: dict[str, object]) -> list[str]:
    return [live.shard.leaf.path for live in Flattener(state).flatten().shards]


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Tied(nn.Module):
    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def test_parameters_and_persistent_buffers_are_leaves_and_others_are_not() -> None:
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2))
    net.register_buffer("cache", torch.zeros(2), persistent=False)
    flat = Flattener({"model": net}).flatten()
    assert {s.shard.leaf.path: s.shard.leaf.cls for s in flat.shards} == {
        "model.0.weight": "parameter",
        "model.1.weight": "parameter",
        "model.1.bias": "parameter",
        "model.1.running_mean": "buffer",
        "model.1.running_var": "buffer",
        "model.1.num_batches_tracked": "buffer",
    }


def test_names_are_the_same_whatever_wraps_the_modules(group: None) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    want = paths({"model": build()})
    inner = build()
    inner[1] = checkpoint_wrapper(inner[1])  # type: ignore[operator]
    inner[0] = torch.compile(inner[0], backend="eager")  # type: ignore[operator]
    for net in (
        torch.compile(build(), backend="eager"),
        nn.DataParallel(build()),
        nn.parallel.DistributedDataParallel(build()),
        torch.compile(nn.parallel.DistributedDataParallel(build()), backend="eager"),
        inner,
    ):
        assert paths({"model": net}) == want, type(net)
        put({"model": build()}, take({"model": net}))


def test_a_real_submodule_may_be_called_like_a_wrappers() -> None:
    net = nn.Module()
    for name in ("module", "_orig_mod", "_checkpoint_wrapped_module"):
        net.add_module(name, nn.Linear(1, 1, bias=False))
    assert paths({"m": net}) == ["m._checkpoint_wrapped_module.weight", "m._orig_mod.weight", "m.module.weight"]


def test_an_averaged_model_keeps_its_count() -> None:
    """L1"""
    net = nn.Linear(2, 2)
    ema = AveragedModel(net)
    ema.update_parameters(net)
    other = AveragedModel(nn.Linear(2, 2))
    put({"ema": other}, take({"ema": ema}))
    assert other.n_averaged.item() == 1
    assert content({"ema": other}) == content({"ema": ema})


class Counting(nn.Linear):
    def __init__(self) -> None:
        super().__init__(1, 1)
        self.calls: Any = {"n": 0, "t": torch.zeros(2)}

    def get_extra_state(self) -> Any:
        return self.calls

    def set_extra_state(self, state: Any) -> None:
        self.calls = state


def test_extra_state_is_saved_as_it_is_at_that_moment_and_given_back() -> None:
    net, other = nn.Sequential(Counting()), nn.Sequential(Counting())
    flattener = Flattener({"model": net})
    flattener.flatten()
    net[0].calls = {"n": 3, "t": torch.ones(2)}
    snapshot = take({"model": net}, flattener)
    net[0].calls["n"] = 4
    put({"model": other}, snapshot)
    assert other[0].calls == {"n": 3, "t": pytest.approx(torch.ones(2))}
    with pytest.raises(LayoutMismatch) as refused:
        put({"model": nn.Sequential(nn.Linear(1, 1))}, snapshot)
    assert refused.value.unexpected == ("model.0._extra_state", "model.0._extra_state.t")
    with pytest.raises(LayoutMismatch) as refused:
        put({"model": other}, take({"model": nn.Sequential(nn.Linear(1, 1))}))
    assert refused.value.missing == ("model.0._extra_state",)


def test_what_a_state_dict_hook_makes_up_is_refused() -> None:
    net = nn.Linear(2, 2)
    net.register_state_dict_post_hook(lambda m, d, p, _: d.__setitem__(p + "merged", torch.ones(1)))
    with pytest.raises(UnsupportedState, match="neither parameter nor buffer") as refused:
        take({"model": net})
    assert refused.value.leaf == "model.merged"


def test_what_a_state_dict_hook_leaves_out_is_left_out() -> None:
    net = nn.Linear(2, 2)
    net.register_state_dict_post_hook(lambda m, d, p, _: d.__delitem__(p + "weight"))
    assert paths({"model": net}) == ["model.bias"]


def test_fsdp1_is_refused_before_it_would_gather(group: None) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    class Old(FullyShardedDataParallel):
        def __init__(self) -> None:
            nn.Module.__init__(self)

        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError("this gathers")

        def named_modules(self, *args: Any, **kwargs: Any) -> Any:
            return nn.Module.named_modules(self, *args, **kwargs)

    net = nn.Module()
    net.add_module("block", Old())
    with pytest.raises(UnsupportedState, match="fully_shard") as refused:
        take({"model": net})
    assert refused.value.leaf == "model.block"


# --- ties --------------------------------------------------------------------------------------------------------


def test_a_tied_tensor_is_stored_once_and_every_name_is_listed() -> None:
    """H5"""
    flat = Flattener({"model": Tied()}).flatten()
    assert [s.shard.leaf.path for s in flat.shards] == ["model.embed.weight"]
    assert flat.aliases == {"model.head.weight": "model.embed.weight"}


def test_a_tensor_tracked_under_two_names_is_stored_once() -> None:
    """H5"""
    net = nn.Linear(1, 1, bias=False)
    state: dict[str, object] = {"model": net, "again": net, "w": net.weight}
    flat = Flattener(state).flatten()
    assert [s.shard.leaf.path for s in flat.shards] == ["model.weight"]
    assert flat.aliases == {"again.weight": "model.weight", "w": "model.weight"}
    before = raw(net.weight)
    snapshot = take(state)
    with torch.no_grad():
        net.weight.zero_()
    put(state, snapshot)
    assert torch.equal(raw(net.weight), before)


def trained(net: Tied, steps: int = 2) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    for i in range(steps):
        net.head(net.embed(torch.tensor([i, 2]))).square().sum().backward()
        optimizer.step()
    return optimizer


def test_an_untied_model_gets_a_tied_snapshot_under_both_names_moments_too() -> None:
    """H5"""
    net, other = Tied(), Tied(tied=False)
    optimizer = trained(net)
    fresh = torch.optim.AdamW(other.parameters())
    put({"model": other, "optimizer": fresh}, take({"model": net, "optimizer": optimizer}))
    moments = optimizer.state[net.embed.weight]["exp_avg"]
    for p in (other.embed.weight, other.head.weight):
        assert torch.equal(p, net.embed.weight)
        assert torch.equal(fresh.state[p]["exp_avg"], moments)
    assert fresh.state[other.embed.weight]["exp_avg"] is not fresh.state[other.head.weight]["exp_avg"]


def test_pairs_that_diverged_come_back_each_with_its_own_bytes_and_tying_again_is_fine() -> None:
    """H5"""
    net = Tied(tied=False)
    optimizer = trained(net)
    snapshot = take({"model": net, "optimizer": optimizer})
    other = Tied(tied=False)
    state: dict[str, object] = {"model": other, "optimizer": torch.optim.AdamW(other.parameters())}
    put(state, snapshot)
    assert content(state) == content({"model": net, "optimizer": optimizer})
    net.head.weight = net.embed.weight
    again = take({"model": net})
    put({"model": Tied()}, again)
    assert list(again.data) == [next(iter(again.data))]


def test_a_tied_model_takes_an_untied_snapshot_only_if_both_names_have_the_same_bytes() -> None:
    """H5"""
    net, other = Tied(tied=False), Tied()
    with torch.no_grad():
        net.head.weight.copy_(net.embed.weight)
    put({"model": other}, take({"model": net}))
    assert torch.equal(other.embed.weight, net.embed.weight)
    with torch.no_grad():
        net.head.weight[2, 1] = torch.nextafter(net.head.weight[2, 1], torch.tensor(9.0))
    with pytest.raises(LayoutMismatch, match="one tensor here") as refused:
        put({"model": other}, take({"model": net}))
    assert set(refused.value.changed) <= {"model.embed.weight", "model.head.weight"}


def test_comparisons_of_tied_names_come_first_in_what_is_wanted() -> None:
    """H5"""

    class Late(nn.Module):
        def __init__(self, tied: bool) -> None:
            super().__init__()
            self.a = nn.Linear(2, 2)
            self.z = Tied(tied)

    wanted = plan_restore({"m": Late(True)}, take({"m": Late(False)}).stored).wanted
    assert [s.leaf.path for s in wanted][:2] == ["m.z.embed.weight", "m.z.head.weight"]


# --- names and mismatches ----------------------------------------------------------------------------------------


def test_odd_names_are_fine() -> None:
    """J5"""
    odd = [
        "x" * 300,
        "Weight",
        "weight",
        "wEIGHT",
        "\u00e9",
        unicodedata.normalize("NFD", "\u00e9"),
        "a b",
        "\U0001f600",
    ]

    def build(seed: int) -> nn.ParameterDict:
        torch.manual_seed(seed)
        return nn.ParameterDict({name: nn.Parameter(torch.rand(2)) for name in odd})

    saved, other = build(0), build(1)
    snapshot = take({"model": saved})
    assert len(snapshot.data) == len(odd)
    put({"model": other}, snapshot)
    assert all(torch.equal(saved[name], other[name]) for name in odd)


def test_every_difference_is_listed_and_nothing_is_written() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3))
    other = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 4), nn.Linear(4, 1))
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(LayoutMismatch) as refused:
        put({"model": other, "new": 1}, take({"model": net, "step": 3, "old": torch.ones(1)}))
    error = refused.value
    assert error.missing == ("model.2.bias", "model.2.weight", "new")
    assert error.unexpected == ("old", "step")
    assert error.changed == {
        "model.1.bias": "stored float32 [3], live float32 [4]",
        "model.1.weight": "stored float32 [3, 2], live float32 [4, 2]",
    }
    assert "Nothing was written" in str(error)
    for name, tensor in other.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_only_some_of_the_tracked_names_can_be_restored() -> None:
    net = Tied()
    snapshot = take({"model": net, "optimizer": trained(net), "step": 3, "model2": torch.ones(1)})
    other = Tied()
    restoration = plan_restore({"model": other}, snapshot.stored.only(["model"]))
    for shard in restoration.wanted:
        restoration.install(shard, snapshot.data[shard])
    restoration.finish()
    assert torch.equal(other.embed.weight, net.embed.weight)


def test_a_per_rank_buffer_of_the_snapshot_is_asked_for_as_this_ranks_own() -> None:
    net = nn.BatchNorm1d(2)
    stored = replace(take({"model": net}).stored, per_rank=frozenset({"model.running_mean"}))
    wanted = {s.leaf.path: s.per_rank for s in plan_restore({"model": net}, stored).wanted}
    assert wanted["model.running_mean"] is True
    assert wanted["model.running_var"] is False


def test_a_whole_module_may_be_per_rank() -> None:
    flat = Flattener({"model": PerRank(nn.Linear(1, 1))}).flatten()
    assert all(s.shard.per_rank for s in flat.shards)


def test_restoring_keeps_parameters_and_their_memory() -> None:
    net, other = nn.Linear(2, 2), nn.Linear(2, 2)
    weight, pointer = other.weight, other.weight.data_ptr()
    put({"model": other}, take({"model": net}))
    assert other.weight is weight
    assert other.weight.data_ptr() == pointer
    assert weight.requires_grad
    assert torch.equal(raw(weight), raw(net.weight))
