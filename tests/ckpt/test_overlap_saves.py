"""``capture="overlap"`` through the front door: every snapshot is the state as it was when `save()` was called."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from ckpt.errors import SaveFailed
from ckpt.saving.overlap import Copying
from storage_backends.memory import MemoryStore
from tests.support.training import raw


class Wide:
    """4 MB of weights and 8 MB of moments, and so little to compute that copies do not end before the step comes."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, 1000), nn.BatchNorm1d(1000), nn.Linear(1000, 1000))
        half = list(self.model[2].parameters())
        rest = [*self.model[0].parameters(), *self.model[1].parameters()]
        self.one, self.two = torch.optim.AdamW(half, lr=1e-2), torch.optim.SGD(rest, lr=1e-2, momentum=0.9)
        self.state: dict[str, object] = {"model": self.model, "one": self.one, "two": self.two, "count": 0}

    def train(self, accumulate: int = 1) -> None:
        for _ in range(accumulate):
            self.model(torch.randn(2, 4)).square().sum().backward()
        self.one.step()
        self.two.step()
        self.one.zero_grad()
        self.two.zero_grad()

    def bytes(self) -> dict[str, bytes]:
        found = {name: raw(tensor) for name, tensor in self.model.state_dict().items()}
        for name, optimizer in (("one", self.one), ("two", self.two)):
            for number, slots in optimizer.state_dict()["state"].items():
                found |= {f"{name}.{number}.{slot}": raw(value) for slot, value in slots.items()}
        return found


@pytest.mark.parametrize("mirror", ["auto", "off"])
def test_every_snapshot_is_the_state_at_its_save(mirror: str) -> None:
    store, training = MemoryStore(), Wide()
    states: dict[int, dict[str, bytes]] = {}
    with ckpt.Checkpointer(store, training.state, capture="overlap", mirror=mirror) as saver:
        for step in range(1, 9):
            training.train(accumulate=1 + step % 2)
            saver.state["count"] = step
            states[step] = training.bytes()
            saver.save(step)
        training.train()  # the last save is under way
    for step, expected in states.items():
        other = Wide(seed=9)
        other.train()
        ckpt.load_into(store, other.state, step)
        assert other.bytes() == expected and other.state["count"] == step


def test_a_save_in_the_last_step_is_whole() -> None:
    store, training = MemoryStore(), Wide()
    with ckpt.Checkpointer(store, training.state, capture="overlap") as saver:
        training.train()
        expected = training.bytes()
        saver.save(1)
    other = Wide(seed=9)
    other.train()
    ckpt.load_into(store, other.state)
    assert other.bytes() == expected


def test_a_restore_waits_for_the_copy_and_comes_back_to_it() -> None:
    store, training = MemoryStore(), Wide()
    with ckpt.Checkpointer(store, training.state, capture="overlap") as saver:
        for step in (1, 2):
            training.train()
            expected = training.bytes()
            saver.save(step)
        assert saver.restore() == 2
        assert training.bytes() == expected
        training.train()
        later = training.bytes()
        saver.save(3)
        assert saver.restore(2) == 2 and training.bytes() == expected
        assert saver.restore(3) == 3 and training.bytes() == later


def test_an_edit_while_it_is_copied_fails_that_save_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    store, training = MemoryStore(), Wide()
    begun: list[Copying] = []
    with ckpt.Checkpointer(store, training.state, capture="overlap") as saver:
        overlap: Any = saver._overlap
        training.train()
        saver.save(1).wait()
        with monkeypatch.context() as patch:
            patch.setattr(overlap._crew, "submit", lambda work: begun.append(overlap._copying))
            ticket = saver.save(2)
        with torch.no_grad():
            training.model[2].weight.add_(1.0)
        begun[0].run()
        with pytest.raises(SaveFailed, match=r"model\.2\.weight was changed outside of optimizer\.step"):
            ticket.wait()
        with pytest.warns(RuntimeWarning, match="step 2 was not saved"):
            saver.save(3).wait()
    assert [snapshot.step for snapshot in ckpt.History(store).list()] == [1, 3]


def test_seconds_that_a_step_waits_are_counted_as_blocked() -> None:
    training = Wide()
    with ckpt.Checkpointer(MemoryStore(), training.state, capture="overlap") as saver:
        training.train()
        saver.save(1)
        before = saver.stats.seconds
        training.train()
        assert saver.stats.seconds > before


def test_both_captures_store_the_same() -> None:
    stored = []
    for capture in ("copy", "overlap"):
        store, training = MemoryStore(), Wide()
        with ckpt.Checkpointer(store, training.state, capture=capture) as saver:  # type: ignore[arg-type]
            for step in (1, 2):
                training.train()
                saver.save(step)
        stored.append(copy.deepcopy(ckpt.load(store)))
    first, second = stored
    assert first.keys() == second.keys()
    for path, value in first.items():
        if isinstance(value, torch.Tensor):
            assert raw(value) == raw(second[path]), path
