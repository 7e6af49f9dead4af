"""Copies beside forward and backward, with a crew that never runs: whatever is copied, the waiting thread copied."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import nn

from ckpt.errors import SaveFailed
from ckpt.leaves import Flattener
from ckpt.saving import overlap
from ckpt.saving.capture import PIECE, Capturer
from ckpt.saving.overlap import Copying, Overlap
from ckpt.saving.threads import Crew, Pending
from tests.ckpt.saving.test_capture import Bytes, check, layout_of, slot_for


class NeverRuns(Crew[None]):
    """Takes work and leaves it: the machine has no core for it."""

    def __init__(self) -> None:
        super().__init__("stalled", 0, lambda: None)
        self.given = 0

    def submit(self, work: Callable[[None], object]) -> Pending[object]:  # type: ignore[override]
        self.given += 1
        return Pending()


class State:
    """Two large matrices with an optimizer each, small ones, a buffer, and a tensor that nobody steps."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(300, 300), nn.Linear(300, 300)
        self.norm = nn.BatchNorm1d(40_000)
        self.average = torch.randn(50_000)
        self.one = torch.optim.AdamW(self.first.parameters())
        self.two = torch.optim.SGD([*self.second.parameters(), *self.norm.parameters()], lr=0.1, momentum=0.9)
        for optimizer in (self.one, self.two):
            self.backward()
            optimizer.step()
        tracked = {name: getattr(self, name) for name in ("first", "second", "norm", "average", "one", "two")}
        self.flattener = Flattener(tracked)
        self.flat = self.flattener.flatten()
        self.layout = layout_of(self.flat)
        self.slot = slot_for(self.layout)
        self.capturer = Capturer(self.layout)

    def backward(self) -> None:
        (self.second(self.first(torch.randn(2, 300))).square().sum() + self.norm.weight.square().sum()).backward()

    def expected(self) -> Bytes:
        """What the state is now, copied the plain way."""
        slot = slot_for(self.layout)
        Capturer(self.layout).take(self.flat, slot)
        return slot

    def copying(self, then: Callable[[], None] = lambda: None) -> Copying:
        return Copying(7, [self.capturer.begin(self.flat, self.slot)], then)

    def found(self, path: str) -> Bytes:
        region = next(r for r in self.layout.regions if r.shard.leaf.path == path)
        return self.slot[region.start : region.start + region.nbytes]


@contextmanager
def stalled() -> Iterator[tuple[Overlap, NeverRuns, list[float]]]:
    crew, blocked = NeverRuns(), list[float]()
    held = Overlap(blocked.append, crew=crew)
    try:
        yield held, crew, blocked
    finally:
        held.close()


def test_nothing_is_lost_between_what_is_copied_at_once_and_later() -> None:
    state = State()
    for _ in range(3):
        state.slot[:] = 0xEE
        copying = state.copying()
        copying.run()
        copying.wait()
        check(state.layout, state.flat, state.slot)
        state.backward()
        state.one.step()
        state.flat = state.flattener.flatten()


def test_what_only_a_step_changes_is_left_and_all_else_is_copied_at_once() -> None:
    state = State()
    copying = state.copying()
    left = {"first.weight", "second.weight", "norm.weight", "norm.bias"}
    left |= {f"one.state.first.weight.{slot}" for slot in ("exp_avg", "exp_avg_sq")}
    left |= {f"two.state.{name}.momentum_buffer" for name in ("second.weight", "norm.weight", "norm.bias")}
    for region in state.layout.regions:
        path = region.shard.leaf.path
        assert bool((state.found(path) == 0xEE).all()) == (path in left), path
    copying.run()
    copying.wait()


@pytest.mark.parametrize("which", ["one", "two"])
def test_the_step_of_any_optimizer_waits_for_all_copies_and_copies_itself(which: str) -> None:
    state = State()
    with stalled() as (held, crew, blocked):
        expected = state.expected()
        copying = state.copying()
        held.begin(copying)
        for _ in range(3):  # gradient accumulation
            state.backward()
        assert (state.found("first.weight") == 0xEE).all() and crew.given == 1 and not blocked
        getattr(state, which).step()
        assert state.slot.tobytes() == expected.tobytes()
        assert len(blocked) == 1
        getattr(state, which).step()
        assert len(blocked) == 1, "there is nothing to wait for"
        copying.run()
        copying.wait()
        assert state.slot.tobytes() == expected.tobytes()


def test_an_optimizer_that_is_not_tracked_waits_too() -> None:
    state = State()
    untracked = torch.optim.SGD(state.first.parameters(), lr=1.0)
    with stalled() as (held, _, _):
        expected = state.expected()
        held.begin(state.copying())
        state.backward()
        untracked.step()
    assert state.slot.tobytes() == expected.tobytes()


def test_a_large_tensor_is_shared_between_those_who_copy() -> None:
    model = nn.Linear(2048, 3 * PIECE // 4 // 2048 + 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    flat = Flattener({"model": model, "optimizer": optimizer}).flatten()
    layout = layout_of(flat)
    slot = slot_for(layout)
    begun = Capturer(layout).begin(flat, slot)
    assert [(copy.stop - copy.start) * 4 for copy in begun.copies][:3] == [PIECE] * 3 and len(begun.copies) == 4
    copying = Copying(1, [begun], lambda: None)
    copying.run()
    copying.wait()
    check(layout, flat, slot)


def test_an_edit_outside_of_a_step_fails_the_save_and_names_the_leaf() -> None:
    state = State()
    called: list[bool] = []
    copying = state.copying(lambda: called.append(True))
    with torch.no_grad():
        state.second.weight.mul_(2)
    copying.hold_back()
    copying.run()
    with pytest.raises(SaveFailed, match=r"step 7: second\.weight was changed outside of optimizer\.step\(\)"):
        copying.wait()
    assert not called, "a state that never was must not be called whole"


def test_changes_after_the_copies_are_anybody_s_right() -> None:
    state = State()
    copying = state.copying()
    copying.hold_back()
    with torch.no_grad():
        state.second.weight.mul_(2)
    copying.run()
    copying.wait()


def test_a_copy_that_fails_lets_the_step_go_on_and_fails_the_save(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(copy: object) -> None:
        raise MemoryError("no pages")

    state = State()
    copying = state.copying()
    with monkeypatch.context() as patch:
        patch.setattr(overlap, "_carry_out", broken)
        copying.hold_back()
    copying.run()
    with pytest.raises(MemoryError, match="no pages"):
        copying.wait()


def test_ctrl_c_while_a_step_copies_is_not_swallowed_and_fails_the_save(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(copy: object) -> None:
        raise KeyboardInterrupt

    copying = State().copying()
    with monkeypatch.context() as patch:
        patch.setattr(overlap, "_carry_out", interrupted)
        with pytest.raises(KeyboardInterrupt):
            copying.hold_back()
    copying.run()  # copies what is left, and holds nobody up
    with pytest.raises(KeyboardInterrupt):
        copying.wait()


def test_a_failure_at_the_end_reaches_whoever_waits() -> None:
    def then() -> None:
        raise OSError("the mirror is full")

    copying = State().copying(then)
    copying.run()
    with pytest.raises(OSError, match="the mirror is full"):
        copying.wait()


def test_after_close_no_step_waits_any_more() -> None:
    state = State()
    with stalled() as (held, _, blocked):
        held.begin(state.copying())
    blocked.clear()
    held.begin(state.copying())
    state.backward()
    state.one.step()
    assert not blocked


def test_tensors_replaced_after_the_save_are_saved_as_they_were() -> None:
    state = State()
    expected = state.expected()
    copying = state.copying()
    state.first.weight.data = torch.zeros(300, 300)  # where it was stays as it was
    copying.hold_back()
    assert np.array_equal(state.slot, expected)
