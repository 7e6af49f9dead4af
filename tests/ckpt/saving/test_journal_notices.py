"""What would make a journal wrong is noticed, and named, before anything wrong can be restored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from storage_backends.memory import MemoryStore
from tests.support.journals import comes_back, job, recording, unhurt
from tests.support.training import Training

Meddle = Callable[[Training, int], None]


def clamp(training: Training, step: int) -> None:
    if step >= 7:
        with torch.no_grad():
            training.model.out.weight.clamp_(-0.05, 0.05)


def swap(training: Training, step: int) -> None:
    """An average put in the place of the weights, and left there."""
    if step == 7:
        with torch.no_grad():
            for parameter in training.model.parameters():
                parameter.mul_(0.5)


def edit(training: Training, step: int) -> None:
    if step == 7:
        training.model.inp.bias.data[0] += 1


def edit_frozen(training: Training, step: int) -> None:
    """Through .data, where no version counter sees it, of a tensor that no optimizer steps."""
    if step == 7:
        frozen = training.model.get_parameter("frozen")
        frozen.data[5] += 1


def noise(training: Training, step: int) -> None:
    def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for slots in optimizer.state.values():
            slots["exp_avg"].add_(torch.randn(()) * 1e-3)

    if step == 6:
        training.optimizer.register_step_post_hook(hook)


class Frozen(Training):
    """With a large parameter that no optimizer has."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.model.register_parameter("frozen", nn.Parameter(torch.zeros(40_000), requires_grad=False))


@pytest.mark.parametrize(
    ("make", "meddle", "leaf", "cause", "after"),
    [
        (Training, clamp, "model.out.weight", "changed outside the step: clamped, swapped for", 7),
        (Training, swap, "model.inp.bias and 5 more", "changed outside the step: clamped, swapped for an average", 7),
        (Training, edit, "model.inp.bias", "edited through .data", 7),
        (Frozen, edit_frozen, "model.frozen", "no optimizer stepped it", 7),
        (Training, noise, "model.inp.bias.exp_avg", "its step is not a function of its own shard and gradient", 7),
    ],
)  # fmt: skip
def test_a_change_that_no_record_holds_ends_the_journal_by_name(
    make: type[Training], meddle: Meddle, leaf: str, cause: str, after: int, caplog: pytest.LogCaptureFixture
) -> None:
    store, training = MemoryStore(), make()
    saver = job(store, training, 9, every=5, each=lambda step: meddle(training, step))
    stats = saver.stats.journal
    assert stats is not None and stats.off is not None
    assert leaf in stats.off and f"after step {after}" in stats.off and cause in stats.off, stats.off
    assert "the journal has switched itself off" in caplog.text and "Snapshots go on" in caplog.text

    expected = unhurt(after - 1, make)
    again = make(seed=8)
    saver = job(store, again, after - 1)
    assert saver.restored is not None and saver.restored.step == after - 1, "nothing that was not proven comes back"
    assert any(f"proven up to step {after - 1} of" in text for text in saver.restored.problems)
    assert recording(again) == recording(expected)


def test_snapshots_of_what_was_changed_go_on_after_the_journal_has_ended() -> None:
    store, training = MemoryStore(), Training()
    job(store, training, 12, every=5, each=lambda step: clamp(training, step))
    again = Training(seed=8)
    saver = job(store, again, 10)
    assert saver.restored is not None and saver.restored.step == 10
    assert again.model.out.weight.abs().max() <= 0.05


def test_weights_swapped_for_an_evaluation_and_back_do_not_end_it() -> None:
    store, training = MemoryStore(), Training()
    weight = training.model.out.weight
    saver = ckpt.Checkpointer(store, training.state, every=5, journal=ckpt.Journal(flush=0.0), mirror="off")
    for step in range(saver.restore(), 9):
        training.train(step)
        saver.step(step + 1)
        if step % 2:
            continue  # checksums may have been taken in the middle of one swap, and must not be of two in a row
        kept = weight.detach().clone()
        with torch.no_grad():
            weight.zero_()
            training.model.eval()(torch.zeros(2, 8))
            training.model.train()
            weight.copy_(kept)
    saver.close()
    stats = saver.stats.journal
    assert stats is not None and stats.off is None and stats.steps == 9


def test_a_hyperparameter_changed_by_hand_is_recorded_and_right() -> None:
    class Changed(Training):
        def train(self, step: int) -> float:
            if step == 6:
                self.optimizer.param_groups[0].update(lr=0.3, betas=(0.5, 0.7), weight_decay=0.2)
            return super().train(step)

    again = comes_back(Changed, 8, 9)
    assert again.optimizer.param_groups[0]["betas"] == (0.5, 0.7)


def test_a_parameter_that_is_added_pauses_the_journal_and_is_named(caplog: pytest.LogCaptureFixture) -> None:
    store, training = MemoryStore(), Training()

    def grow(step: int) -> None:
        if step == 7:
            added = nn.Parameter(torch.ones(3))
            training.model.register_parameter("added", added)
            training.optimizer.add_param_group({"params": [added]})

    job(store, training, 9, each=grow)
    assert "the journal pauses until the next snapshot: model.added: was added to the state" in caplog.text
    again = Training(seed=8)
    saver = job(store, again, 9)
    assert saver.restored is not None and saver.restored.step == 6
    assert recording(again) == recording(unhurt(9))


def test_a_parameter_that_was_added_is_journaled_from_the_next_snapshot_on() -> None:
    class Grown(Training):
        def __init__(self, seed: int = 0) -> None:
            super().__init__(seed)
            self.grow()

        def grow(self) -> None:
            added = nn.Parameter(torch.ones(3))
            self.model.register_parameter("added", added)
            self.optimizer.add_param_group({"params": [added], "lr": 0.5})

    class Growing(Grown):
        def __init__(self, seed: int = 0) -> None:
            self.ready = False
            super().__init__(seed)

        def grow(self) -> None:
            if self.ready:
                super().grow()

    store, training = MemoryStore(), Growing()

    def grow(step: int) -> None:
        if step == 7:
            training.ready = True
            training.grow()

    job(store, training, 13, each=grow)
    again = Grown(seed=8)
    saver = job(store, again, 13)
    assert saver.restored is not None and (saver.restored.id.step, saver.restored.step) == (10, 13)
    assert again.bytes() == training.bytes()


def test_another_optimizer_under_the_same_name_pauses_the_journal() -> None:
    store, training = MemoryStore(), Training()
    saver = ckpt.Checkpointer(store, training.state, every=5, journal=ckpt.Journal(flush="1 step"), mirror="off")
    for step in range(saver.restore(), 12):
        if step == 6:
            training.optimizer = torch.optim.AdamW(training.model.parameters(), lr=1e-3)
            training.schedule = torch.optim.lr_scheduler.StepLR(training.optimizer, 3, 0.9)
            saver.state.update(optimizer=training.optimizer, schedule=training.schedule)
        training.train(step)
        saver.step(step + 1)
        stats = saver.stats.journal
        assert stats is not None
        assert (stats.off is not None) == (step in (6, 7, 8)), (step, stats.off)
        assert step != 6 or "another optimizer is tracked now" in str(stats.off)
    saver.close()
