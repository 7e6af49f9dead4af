"""The decorated training function: what is saved when, and how it is left.

Most of it against a recording double in the place of the `Checkpointer`, which has its own tests; a whole training
with the real one at the end.
"""

from __future__ import annotations

import inspect
import signal
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from ckpt import loop
from ckpt.errors import CheckpointError, SaveFailed
from ckpt.history.retention import Keep
from ckpt.loop import Run, checkpointed
from ckpt.options import Options
from ckpt.random_states import random_states, set_random_states
from storage_backends.base import Refused, Store
from storage_backends.memory import MemoryStore
from tests.support.faulty import FaultyStore
from tests.support.training import Small, raw

REAL = loop.Checkpointer


class Double:
    """A `Checkpointer` that remembers what it was asked."""

    made: typing.ClassVar[list[Double]] = []
    restores: typing.ClassVar[int] = 0  # what restore() returns
    close_error: typing.ClassVar[Exception | None] = None

    def __init__(self, url: Any, state: Mapping[str, object], **settings: Any) -> None:
        self.url = url
        self.state = dict(state)
        self.settings = settings
        self.calls: list[tuple[Any, ...]] = []
        self.drawn = 0
        self.stopping = False
        self.stop_after: int | None = None
        self.start = 0
        self.made.append(self)

    def restore(self) -> int:
        self.calls.append(("restore",))
        self.start = self.restores
        return self.start

    def batches(self, loader: list[Any], total: int) -> Iterator[tuple[int, Any]]:
        for step in range(self.start, total):
            if self.stopping:
                return
            self.drawn += 1
            yield step, loader[step % len(loader)]

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.calls.append(("step", step, dict(metrics), self.drawn))
        self.stopping = step == self.stop_after

    def save(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.calls.append(("save", step, dict(metrics), self.drawn))

    def close(self, timeout: float | None = None) -> None:
        self.calls.append(("close", timeout))
        if self.close_error is not None:
            raise self.close_error

    def _leave(self, timeout: float | None = None) -> None:
        self.calls.append(("leave", timeout))
        if self.close_error is not None:
            raise self.close_error

    @property
    def verbs(self) -> list[Any]:
        """The calls without metrics and counts."""
        return [call[:2] for call in self.calls]


@pytest.fixture(autouse=True)
def double(monkeypatch: pytest.MonkeyPatch) -> type[Double]:
    monkeypatch.setattr(loop, "Checkpointer", Double)
    monkeypatch.setattr(Double, "made", [])
    return Double


def only() -> Double:
    (saver,) = Double.made
    return saver


def test_a_step_is_told_after_its_body_and_before_the_next_batch_is_drawn() -> None:
    @checkpointed("somewhere", every=2)
    def train(run: Run) -> list[tuple[int, str]]:
        assert run.track(model="the model") == 0
        seen = []
        for step, batch in run.batches(["a", "b"], 3):
            run.log(loss=10.0 * step)
            seen.append((step, batch))
        return seen

    assert train() == [(0, "a"), (1, "b"), (2, "a")]
    saver = only()
    assert saver.url == "somewhere"
    assert saver.state == {"model": "the model"}
    assert saver.calls == [
        ("restore",),
        ("step", 1, {"loss": 0.0}, 1),
        ("step", 2, {"loss": 10.0}, 2),
        ("step", 3, {"loss": 20.0}, 3),
        ("close", None),
    ]


def test_it_goes_on_where_the_restored_state_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Double, "restores", 4)

    @checkpointed("somewhere")
    def train(run: Run) -> tuple[int, list[int]]:
        return run.track(), list(run.steps(6))

    assert train() == (4, [4, 5])
    assert only().verbs == [("restore",), ("step", 5), ("step", 6), ("close", None)]


def test_steps_called_again_goes_on() -> None:
    @checkpointed("somewhere")
    def train(run: Run) -> list[list[int]]:
        run.track()
        return [list(run.steps(2)), list(run.steps(2)), list(run.steps(5))]

    assert train() == [[0, 1], [], [2, 3, 4]]


@pytest.mark.parametrize("with_data", [True, False])
def test_asked_to_stop_it_ends_after_the_step_that_was_told(with_data: bool) -> None:
    """F9: the step is finished, told to the checkpointer (which saves it), and no other begins."""

    @checkpointed("somewhere")
    def train(run: Run) -> list[int]:
        run.track()
        only().stop_after = 3
        steps = [step for step, _ in run.batches(["a"], 100)] if with_data else list(run.steps(100))
        assert run.stopping
        return steps

    assert train() == [0, 1, 2]
    assert only().verbs[-2:] == [("step", 3), ("close", None)]


def test_save_in_a_body_waits_for_its_end() -> None:
    @checkpointed("somewhere")
    def train(run: Run) -> None:
        run.track()
        for step, _ in run.batches(["a"], 3):
            if step == 1:
                run.save()
            run.log(late=step)

    train()
    assert only().calls[1:4] == [
        ("step", 1, {"late": 0}, 1),
        ("save", 2, {"late": 1}, 2),
        ("step", 3, {"late": 2}, 3),
    ]


def test_save_in_a_body_that_breaks_off_is_not_lost() -> None:
    @checkpointed("somewhere")
    def train(run: Run) -> None:
        run.track()
        for step, _ in run.batches(["a"], 100):
            if step == 2:
                run.save()
                break

    train()
    assert only().verbs == [("restore",), ("step", 1), ("step", 2), ("save", 3), ("close", None)]


def test_save_outside_of_the_loop_saves_at_once() -> None:
    @checkpointed("somewhere")
    def train(run: Run) -> None:
        run.track()
        run.save()
        list(run.steps(2))
        run.save()
        assert only().verbs[-1] == ("save", 2)

    train()
    assert only().verbs == [("restore",), ("save", 0), ("step", 1), ("step", 2), ("save", 2), ("close", None)]


def test_logged_tensors_are_copied_and_not_read() -> None:
    """Reading one would wait for the device at every step; keeping it would show what became of it later."""
    total = torch.zeros((), requires_grad=True)

    @checkpointed("somewhere")
    def train(run: Run) -> None:
        run.track()
        for step in run.steps(1):
            run.log(total=total, step=step, rate=np.float32(0.5), note="warm", none=None, one=torch.ones(1, 1))
            with torch.no_grad():
                total.add_(7)

    train()
    ((_, _, metrics, _),) = [call for call in only().calls if call[0] == "step"]
    assert isinstance(metrics["total"], torch.Tensor)
    assert not metrics["total"].requires_grad
    assert metrics["total"].item() == 0
    assert {name: value for name, value in metrics.items() if not isinstance(value, torch.Tensor)} == {
        "step": 0,
        "rate": np.float32(0.5),
        "note": "warm",
        "none": None,
    }


def test_a_value_logged_earlier_is_carried_on() -> None:
    @checkpointed("somewhere")
    def train(run: Run) -> None:
        run.track()
        for step in run.steps(3):
            run.log(step=step)
            if step == 0:
                run.log(accuracy=0.9)

    train()
    assert [call[2] for call in only().calls if call[0] == "step"][-1] == {"step": 2, "accuracy": 0.9}


@pytest.mark.parametrize("value", [torch.zeros(2), [1.0], {"a": 1}, object(), np.zeros(1)])
def test_what_is_no_number_is_refused_where_it_is_logged(value: object) -> None:
    @checkpointed("somewhere")
    def train(run: Run) -> None:
        run.track()
        run.log(loss=value)

    with pytest.raises(TypeError, match=r"run\.log\(loss=…\)"):
        train()


@pytest.mark.parametrize(
    "use",
    [
        lambda run: run.batches(["a"], 1),
        lambda run: run.steps(1),
        lambda run: run.save(),
        lambda run: run.state,
        lambda run: run.stopping,
    ],
)
def test_anything_before_track_is_a_clear_error(use: Callable[[Run], Any]) -> None:
    @checkpointed("somewhere")
    def train(run: Run) -> None:
        use(run)

    with pytest.raises(CheckpointError, match=r"before run\.track\(\)"):
        train()


def test_track_twice_is_a_clear_error() -> None:
    @checkpointed("somewhere")
    def train(run: Run) -> None:
        run.track()
        run.track()

    with pytest.raises(CheckpointError, match="twice"):
        train()
    assert only().verbs == [("restore",), ("leave", loop._PATIENCE)]


def test_data_after_steps_without_data_is_a_clear_error() -> None:
    @checkpointed("somewhere")
    def train(run: Run) -> None:
        run.track()
        list(run.steps(1))
        run.batches(["a"], 2)

    with pytest.raises(CheckpointError, match=r"run\.batches\(\) after run\.steps\(\)"):
        train()


def test_a_run_that_is_over_says_so() -> None:
    @checkpointed("somewhere")
    def train(run: Run) -> Run:
        run.track()
        return run

    run = train()
    with pytest.raises(CheckpointError, match="after the decorated function has ended"):
        run.save()
    with pytest.raises(CheckpointError, match="after the decorated function has ended"):
        run.track()


def test_state_is_the_tracked_one() -> None:
    @checkpointed("somewhere")
    def train(run: Run) -> None:
        run.track(best=1.0)
        run.state["best"] = 2.0

    train()
    assert only().state == {"best": 2.0}


def test_arguments_and_the_result_pass_through_and_name_the_place() -> None:
    @checkpointed(lambda name, *, seed=0: f"runs/{name}-{seed}", every=5)
    def train(run: Run, name: str, *, seed: int = 0) -> tuple[str, int]:
        run.track()
        return name, seed

    assert train("gpt", seed=3) == ("gpt", 3)
    assert only().url == "runs/gpt-3"


def test_all_keywords_reach_the_checkpointer() -> None:
    settings: dict[str, Any] = {
        "every": 5,
        "keep": Keep(last=2),
        "capture": "copy",
        "when_busy": "skip",
        "mirror": "off",
        "journal": True,
        "fresh": True,
        "options": Options(replica_check=0),
    }

    @checkpointed("somewhere", **settings)
    def train(run: Run) -> None:
        run.track()

    train()
    assert only().settings == settings


def test_the_keywords_are_those_of_the_checkpointer() -> None:
    from ckpt.checkpointer import Checkpointer

    def keywords(function: Any) -> dict[str, Any]:
        parameters = inspect.signature(function).parameters.values()
        return {p.name: (p.default, p.annotation) for p in parameters if p.kind is p.KEYWORD_ONLY}

    assert keywords(checkpointed) == keywords(Checkpointer)


def test_each_call_is_a_run_of_its_own() -> None:
    @checkpointed("somewhere")
    def train(run: Run) -> Run:
        run.track()
        return run

    assert train() is not train()
    assert len(Double.made) == 2


def test_callers_see_the_signature_without_run() -> None:
    @checkpointed("somewhere")
    def train(run: Run, width: int, *, depth: int = 2) -> float:
        """Trains."""
        return 0.0

    assert str(inspect.signature(train)) == "(width: 'int', *, depth: 'int' = 2) -> 'float'"
    assert typing.get_type_hints(train) == {"width": int, "depth": int, "return": float}
    assert train.__name__ == "train"
    assert train.__doc__ == "Trains."


def test_functions_that_return_before_they_run_are_refused() -> None:
    def generates(run: Run) -> Iterator[int]:
        yield 1

    async def waits(run: Run) -> None: ...

    async def both(run: Run) -> typing.AsyncIterator[int]:
        yield 1

    for function in (generates, waits, both):
        with pytest.raises(TypeError, match="decorate a plain function"):
            checkpointed("somewhere")(function)


def test_functions_without_a_first_argument_are_refused() -> None:
    def nothing() -> None: ...

    def by_keyword(*, run: Run) -> None: ...

    for function in (nothing, by_keyword):
        with pytest.raises(TypeError, match="takes no first argument"):
            checkpointed("somewhere")(function)  # type: ignore[arg-type]


@pytest.mark.parametrize("error", [ValueError("broken batch"), KeyboardInterrupt(), SystemExit(3)])
def test_what_the_function_raises_goes_on_as_it_is_and_the_wait_is_bounded(error: BaseException) -> None:
    """B6: the save in flight is given its chance before anything else can use the store."""

    @checkpointed("somewhere")
    def train(run: Run) -> None:
        run.track()
        for step, _ in run.batches(["a"], 5):
            if step == 2:
                raise error

    with pytest.raises(type(error)) as caught:
        train()
    assert caught.value is error
    assert only().verbs == [("restore",), ("step", 1), ("step", 2), ("leave", loop._PATIENCE)]


def test_a_failing_close_does_not_hide_what_the_function_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Double, "close_error", SaveFailed("step 2: disk full", step=2, stage="upload"))

    @checkpointed("somewhere")
    def train(run: Run) -> None:
        run.track()
        raise ValueError("broken batch")

    with pytest.raises(ValueError, match="broken batch") as caught:
        train()
    assert caught.value.__notes__ == ["ckpt, while leaving: SaveFailed: step 2: disk full"]


def test_a_failing_close_after_a_normal_return_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Double, "close_error", SaveFailed("step 2: disk full", step=2, stage="upload"))

    @checkpointed("somewhere")
    def train(run: Run) -> None:
        run.track()

    with pytest.raises(SaveFailed, match="disk full"):
        train()


def test_what_restore_raises_leaves_no_open_checkpointer_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def restore(self: Double) -> int:
        raise CheckpointError("damaged")

    monkeypatch.setattr(Double, "restore", restore)

    @checkpointed("somewhere")
    def train(run: Run) -> None:
        run.track()

    with pytest.raises(CheckpointError, match="damaged"):
        train()
    assert only().verbs == [("leave", loop._PATIENCE)]


def test_a_function_that_never_tracks_opens_nothing() -> None:
    @checkpointed("somewhere")
    def train(run: Run) -> str:
        return "dry"

    assert train() == "dry"
    assert Double.made == []


# --- with the real Checkpointer ---

STEPS = 30
BATCHES = 8  # per epoch


class Killed(BaseException):
    """The process is gone in the middle of a step."""


def whole_training(
    store: Store, *, seed: int, every: int = 1, watch: Callable[[int], None] = lambda step: None
) -> dict[str, Any]:
    """Dropout, BatchNorm, AdamW, LambdaLR, an average of the weights, shuffled data, losses; as bytes at the end."""

    @checkpointed(store, every=every, options=Options(heartbeat=0.05))
    def train(run: Run) -> dict[str, Any]:
        torch.manual_seed(seed)
        inputs = torch.randn(2 * BATCHES, 8, generator=torch.Generator().manual_seed(5))
        loader = DataLoader(TensorDataset(inputs), batch_size=2, shuffle=True)
        model = Small()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        average = torch.optim.swa_utils.AveragedModel(model)
        run.track(model=model, optimizer=optimizer, schedule=schedule, average=average, losses=[])
        for step, (batch,) in run.batches(loader, STEPS):
            watch(step)
            loss = model(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            average.update_parameters(model)
            run.state["losses"] += [loss.item()]  # type: ignore[operator]
            run.log(loss=loss)
        moments = [dict(sorted(optimizer.state[parameter].items())) for parameter in model.parameters()]
        return {
            "model": [raw(tensor) for tensor in model.state_dict().values()],
            "average": [raw(tensor) for tensor in average.state_dict().values()],
            "moments": [{name: raw(tensor) for name, tensor in slots.items()} for slots in moments],
            "rates": schedule.get_last_lr(),
            "losses": run.state["losses"],
            "random": random_states(),
        }

    return train()


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(loop, "Checkpointer", REAL)
    before = random_states()
    yield
    set_random_states(before)


def test_a_training_stopped_three_times_ends_with_the_bits_of_one_that_was_not(real: None) -> None:
    """L1: stops at 7, at 8 (an epoch's end) and at 19, right after a save that failed; each start draws from other
    random states until it is restored."""
    unhurt = whole_training(MemoryStore(), seed=0, every=STEPS)
    assert len(set(unhurt["losses"])) == STEPS

    store = FaultyStore(
        MemoryStore(), fail_at=1, error=Refused, where=lambda key: key.startswith("packs/") and "/000000000018/" in key
    )

    def kill_at(stop: int) -> Callable[[int], None]:
        def watch(step: int) -> None:
            if step == stop:
                raise Killed

        return watch

    for seed, stop in ((0, 7), (101, 8)):
        with pytest.raises(Killed):
            whole_training(store, seed=seed, watch=kill_at(stop))
    with pytest.raises(Killed), pytest.warns(RuntimeWarning, match="step 18 was not saved"):
        whole_training(store, seed=102, watch=kill_at(19))
    assert store.fired
    assert whole_training(store, seed=103) == unhurt


def test_sigterm_saves_the_step_under_way_and_the_next_start_goes_on_from_it(real: None) -> None:
    """F9, while training: nothing else was due."""
    unhurt = whole_training(MemoryStore(), seed=0, every=STEPS)
    store = MemoryStore()
    begun: list[int] = []

    def terminate(step: int) -> None:
        begun.append(step)
        if step == 11:
            signal.raise_signal(signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    whole_training(store, seed=0, every=1000, watch=terminate)
    assert begun == list(range(12))
    assert signal.getsignal(signal.SIGTERM) == before
    assert whole_training(store, seed=7, every=1000, watch=begun.append) == unhurt
    assert begun == list(range(STEPS))
