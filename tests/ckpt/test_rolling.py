"""A state rolled forward: on slices as on the whole, and only over what is its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ckpt.format.values import decode
from ckpt.leaves import Flat, Flattener
from ckpt.rolling import SUM, Call, Change, Rolled, Unlike, encode_options, plain_options, sum_of, sums_of


class Live:
    """A model and its optimizer, stepped live; and the changes that lead there."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(33, 17), nn.ReLU(), nn.Linear(17, 5))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **options)
        self.flattener = Flattener({"model": self.model, "optimizer": self.optimizer})

    def flat(self) -> Flat:
        return self.flattener.flatten()

    def rolled(self, **more: Any) -> Rolled:
        flat = self.flat()
        tensors = {live.shard.leaf.path: live.tensor.clone() for live in flat.shards}
        return Rolled(0, tuple(live.shard for live in flat.shards), tensors, {}, {}, **more)

    def step(self, n: int) -> Change:
        self.optimizer.zero_grad()
        self.model(torch.randn(8, 33)).square().mean().backward()
        gradients = {f"model.{name}": p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}
        options = decode(encode_options(plain_options(self.optimizer.param_groups[0])))
        assert isinstance(options, dict)
        self.optimizer.step()
        flat = self.flat()
        table = tuple(live.shard for live in flat.shards)
        sums = sums_of(table, [live.tensor for live in flat.shards])
        call = Call("optimizer", "AdamW", ((tuple(gradients), options),), gradients)
        return Change(n, [call], {}, {}, (), table, {}, sums)


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"amsgrad": True}, {"lr": torch.tensor(0.01)}])
def test_slices_that_are_moved_to_a_device_come_to_the_same_bits(options: dict[str, Any]) -> None:
    live = Live(**options)
    whole, sliced = live.rolled(), live.rolled(slice_bytes=100)
    for n in range(1, 5):
        change = live.step(n)
        for rolled in (whole, sliced):
            rolled.roll(change)
            assert rolled.differing(change.sums) == []


def test_what_does_not_fit_is_told() -> None:
    live = Live()
    rolled = live.rolled()
    change = live.step(1)
    call = change.calls[0]
    for wrong, text in (
        (Call("optimizer", "Muon", call.groups, call.gradients), "Muon is none of SGD"),
        (Call("optimizer", "AdamW", None, call.gradients), "were never recorded"),
        (Call("optimizer", "AdamW", ((("model.9.weight",), {}),), {}), "parameters that are not there"),
    ):
        with pytest.raises(Unlike, match=text):
            live.rolled().roll(Change(1, [wrong], {}, {}, (), None, None, b""))
    rolled.roll(change)
    with pytest.raises(Unlike, match="bytes of checksums"):
        rolled.differing(change.sums[:-SUM])
    rolled.tensors["model.0.bias"][0] += 1
    assert rolled.differing(change.sums) == ["model.0.bias"]


def test_hooks_on_every_optimizer_of_the_process_are_not_called_by_a_replay() -> None:
    live = Live()
    rolled, change = live.rolled(), live.step(1)
    called: list[object] = []
    handle = register_optimizer_step_pre_hook(lambda *_: called.append(_))
    try:
        rolled.roll(change)
    finally:
        handle.remove()
    assert not called


def test_a_checksum_of_either_kind_tells_dtype_order_and_bits() -> None:
    live = Live()
    shard = next(s for s in live.rolled().table if s.leaf.path == "model.0.weight")
    tensor = live.model[0].weight.detach().clone()
    for kind in (0, 1):
        before = sum_of(tensor, shard, kind)
        assert len(before) == SUM and before[0] == kind
        tensor.view(torch.int32)[3, 5] ^= 1
        assert sum_of(tensor, shard, kind) != before
        tensor.view(torch.int32)[3, 5] ^= 1
        assert sum_of(tensor, shard, kind) == before
