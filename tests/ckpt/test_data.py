"""A restarted job draws the same batches and the same dropout as one that was never hurt.

Each resume happens as in a fresh process: a new loader object, other random states, and the position taken through the
codec that the part document uses.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from ckpt.data import Position
from ckpt.errors import LayoutMismatch
from ckpt.format import values
from ckpt.random_states import random_states, set_random_states

Trace = list[tuple[int, Any, Any]]
Make = Callable[[], Any]

# torchdata 0.11 still calls a function that torch 2.13 has retired.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")

TOTAL = 22
BATCHES = 8  # per epoch, so that 8 is an epoch's end and 19 lies in the third epoch


@pytest.fixture(autouse=True)
def states_put_back() -> Iterator[None]:
    before = random_states()
    yield
    set_random_states(before)


class Numbers(Dataset[torch.Tensor]):
    """0 … 2 · BATCHES - 1. `augment`: noise from all three random modules, as a transform would draw it."""

    def __init__(self, augment: bool = False, length: int = 2 * BATCHES) -> None:
        self.augment = augment
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> torch.Tensor:
        noise = torch.rand(1).item() + random.random() + np.random.rand() if self.augment else 0.0
        return torch.tensor([float(i), noise], dtype=torch.float64)


class Streamed(IterableDataset[torch.Tensor]):
    """The same numbers, in an order drawn at each start."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        for i in torch.randperm(2 * BATCHES).tolist():
            yield torch.tensor([float(i)])


class Counting(IterableDataset[torch.Tensor]):
    """A stream that can say where it stands, with a tensor in its state."""

    def __init__(self) -> None:
        self.seen = torch.zeros((), dtype=torch.int64)

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.seen < 2 * BATCHES:
            self.seen += 1
            yield self.seen.double()
        self.seen.zero_()

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen.clone(), "empty": torch.zeros(0, 3), "list": [torch.tensor([True, False]), None]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["empty"].shape == (0, 3)
        assert state["list"][0].tolist() == [True, False]
        assert state["list"][1] is None
        self.seen = state["seen"].clone()


class Shuffled:
    """No loader of anybody's: a plain object that can be iterated again."""

    def __iter__(self) -> Iterator[list[int]]:
        order = list(range(BATCHES))
        random.shuffle(order)
        return iter([[i] for i in order])


def seeded(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def body() -> Any:
    """What a step draws: dropout, and whatever else."""
    return [torch.rand(2).tolist(), np.random.rand(), random.random()]


def plain(batch: Any) -> Any:
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def through_the_codec(tree: Any) -> Any:
    return values.decode(values.encode(tree, "$data"))


def never() -> bool:
    return False


def run(position: Position, loader: Any, start: int, total: int) -> Trace:
    return [
        (step, plain(batch), body())
        for step, batch in position.batches(loader, start=start, total=total, stopping=never)
    ]


def straight(make: Make) -> Trace:
    seeded(1)
    return run(Position(), make(), 0, TOTAL)


def stopped(make: Make, stops: list[int]) -> Trace:
    """The same, saved at each stop, and gone on from there in what might be another process."""
    seeded(1)
    position, loader, trace = Position(), make(), []
    start = 0
    for stop in [*stops, TOTAL]:
        trace += run(position, loader, start, stop)
        tree, now = through_the_codec(position.record()), through_the_codec(random_states())
        position.close()
        seeded(1000 + stop)
        position, loader, start = Position(), make(), stop
        position.resume(tree, random=now)
    return trace


def sampled(sampler: Callable[[Any], Any], **more: Any) -> Any:
    numbers = Numbers()
    return DataLoader(numbers, batch_size=2, sampler=sampler(numbers), **more)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


LOADERS: dict[str, Make] = {
    "shuffled": lambda: DataLoader(Numbers(), batch_size=2, shuffle=True),
    "in order": lambda: DataLoader(Numbers(), batch_size=2),
    "augmented": lambda: DataLoader(Numbers(augment=True), batch_size=2, shuffle=True),
    "single samples": lambda: DataLoader(Numbers(length=BATCHES), batch_size=None, shuffle=True),
    "generator": lambda: DataLoader(Numbers(), batch_size=2, shuffle=True, generator=generator()),
    "last batch smaller": lambda: DataLoader(Numbers(length=2 * BATCHES - 1), batch_size=2, shuffle=True),
    "drop_last": lambda: DataLoader(Numbers(length=2 * BATCHES + 1), batch_size=2, shuffle=True, drop_last=True),
    "distributed": lambda: sampled(lambda data: DistributedSampler(data, num_replicas=1, rank=0, seed=3)),
    "sampler's own generator": lambda: sampled(lambda data: RandomSampler(data, generator=generator())),
    "weighted": lambda: sampled(lambda data: WeightedRandomSampler([1.0] * len(data), len(data))),
    "with replacement": lambda: sampled(lambda data: RandomSampler(data, replacement=True, generator=generator())),
    "batch sampler": lambda: DataLoader(
        Numbers(), batch_sampler=BatchSampler(RandomSampler(Numbers()), batch_size=2, drop_last=False)
    ),
    "streamed": lambda: DataLoader(Streamed(), batch_size=2),
    "list": lambda: [[i] for i in range(BATCHES)],
    "plain iterable": Shuffled,
    "stateful shuffled": lambda: StatefulDataLoader(Numbers(), batch_size=2, shuffle=True),
    "stateful augmented": lambda: StatefulDataLoader(Numbers(augment=True), batch_size=2, shuffle=True),
    "stateful single samples": lambda: StatefulDataLoader(Numbers(length=BATCHES), batch_size=None, shuffle=True),
    "stateful generator": lambda: StatefulDataLoader(Numbers(), batch_size=2, shuffle=True, generator=generator()),
    "stateful, torch's sampler": lambda: StatefulDataLoader(Numbers(), batch_size=2, sampler=RandomSampler(Numbers())),
    "stateful, torch's batch sampler": lambda: StatefulDataLoader(
        Numbers(), batch_sampler=BatchSampler(RandomSampler(Numbers()), batch_size=2, drop_last=False)
    ),
    "stateful distributed": lambda: StatefulDataLoader(
        Numbers(), batch_size=2, sampler=StatefulDistributedSampler(Numbers(), num_replicas=1, rank=0)
    ),
    "stateful stream": lambda: StatefulDataLoader(Counting(), batch_size=2),
    "stateful, streamed": lambda: StatefulDataLoader(Streamed(), batch_size=2),
}

WORKERS: dict[str, Make] = {
    "shuffled": lambda: DataLoader(Numbers(augment=True), batch_size=2, shuffle=True, num_workers=2),
    "generator": lambda: DataLoader(Numbers(), batch_size=2, shuffle=True, num_workers=2, generator=generator()),
    "stateful": lambda: StatefulDataLoader(Numbers(), batch_size=2, shuffle=True, num_workers=2, generator=generator()),
}


@pytest.mark.parametrize("name", LOADERS)
def test_stopped_anywhere_it_goes_on_as_if_it_had_not_been(name: str) -> None:
    """L1, at this floor: stops at 7, 8 (an epoch's end), 19, and at both in a row."""
    make = LOADERS[name]
    expected = straight(make)
    assert [step for step, _, _ in expected] == list(range(TOTAL))
    for stops in ([7], [8], [19], [7, 8, 19], [8, 16], [1, 2]):
        assert stopped(make, stops) == expected, stops


@pytest.mark.parametrize("name", WORKERS)
def test_with_two_workers_too(name: str) -> None:
    """L1, with workers that fetch ahead."""
    make = WORKERS[name]
    assert stopped(make, [7, 8, 19]) == straight(make)


def test_the_orders_under_test_are_not_all_the_same() -> None:
    """Otherwise the tests above would pass without restoring anything."""
    for name in ("shuffled", "generator", "distributed", "stateful shuffled", "plain iterable"):
        trace = straight(LOADERS[name])
        first, second = ([batch for _, batch, _ in trace[at : at + BATCHES]] for at in (0, BATCHES))
        assert first != second, name
        assert first != sorted(first), name


def test_set_epoch_is_called_before_each_epoch_wherever_it_exists() -> None:
    told: list[tuple[str, int]] = []

    class Told:
        def __init__(self, name: str) -> None:
            self.name = name

        def set_epoch(self, epoch: int) -> None:
            told.append((self.name, epoch))

    class Order(Told, Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(2 * BATCHES))

        def __len__(self) -> int:
            return 2 * BATCHES

    class Data(Told, Numbers):
        def __init__(self) -> None:
            Told.__init__(self, "dataset")
            Numbers.__init__(self)

    position = Position()
    run(position, DataLoader(Data(), batch_size=2, sampler=Order("sampler")), 0, 9)
    assert told == [("sampler", 0), ("dataset", 0), ("sampler", 1), ("dataset", 1)]

    tree = position.record()
    told.clear()
    again = Position()
    again.resume(tree, random=random_states())
    run(again, DataLoader(Data(), batch_size=2, sampler=Order("sampler")), 9, 17)
    assert [epoch for _, epoch in told] == [1, 1, 2, 2], "not epoch 0 again"


def test_total_reached_ends_without_drawing() -> None:
    drawn: list[int] = []

    class Watched(Numbers):
        def __getitem__(self, i: int) -> torch.Tensor:
            drawn.append(i)
            return super().__getitem__(i)

    loader = DataLoader(Watched(), batch_size=2)
    assert len(run(Position(), loader, 0, 3)) == 3
    assert len(drawn) == 6
    assert run(Position(), loader, 5, 5) == []
    assert run(Position(), loader, 6, 5) == []
    assert len(drawn) == 6


def test_it_ends_early_before_the_next_batch_is_drawn_when_asked_to_stop() -> None:
    asked = False
    steps = []
    position = Position()
    batches = position.batches([[0], [1], [2]], start=0, total=100, stopping=lambda: asked)
    for step, _ in batches:
        steps.append(step)
        asked = step == 4
    assert steps == [0, 1, 2, 3, 4]
    record = position.record()
    assert record is not None
    assert (record["epoch"], record["index"]) == (1, 2), "the batch after the last step was not drawn"


def test_nothing_is_recorded_before_a_batch_is_drawn() -> None:
    position = Position()
    assert position.record() is None
    batches = position.batches([[0]], start=0, total=1, stopping=never)
    assert position.record() is None
    next(batches)
    assert position.record() is not None


def test_a_restored_position_is_recorded_again_until_a_batch_is_drawn() -> None:
    """Restored and saved at once, with nothing done in between: the position must not get lost."""
    make = LOADERS["shuffled"]
    expected = straight(make)
    seeded(1)
    position = Position()
    trace = run(position, make(), 0, 11)
    tree, now = position.record(), random_states()
    position = Position()
    position.resume(tree, random=now)
    assert position.record() == tree
    again = Position()
    again.resume(position.record(), random=now)
    assert trace + run(again, make(), 11, TOTAL) == expected


def test_called_again_with_the_same_loader_it_goes_on_in_the_middle_of_the_epoch() -> None:
    make = LOADERS["shuffled"]
    expected = straight(make)
    seeded(1)
    position, loader = Position(), make()
    pieces = [run(position, loader, 0, total) for total in (5, 8, 8, TOTAL)]
    assert [len(piece) for piece in pieces] == [5, 3, 0, TOTAL - 8]
    assert [each for piece in pieces for each in piece] == expected


def in_phases(position: Position, start: int) -> Trace:
    """A script that trains on one loader, then on another of the same shape."""
    first, second = LOADERS["shuffled"](), LOADERS["shuffled"]()
    return run(position, first, start, 12) + run(position, second, start, TOTAL)


@pytest.mark.parametrize("stop", [5, 12, 15])
def test_two_loaders_one_after_the_other_are_told_apart(stop: int) -> None:
    seeded(1)
    expected = in_phases(Position(), 0)

    seeded(1)
    position, trace = Position(), []
    saved: tuple[Any, Any] | None = None
    first, second = LOADERS["shuffled"](), LOADERS["shuffled"]()
    for loader, total in ((first, 12), (second, TOTAL)):
        for step, batch in position.batches(loader, start=0, total=total, stopping=never):
            trace.append((step, plain(batch), body()))
            if step + 1 == stop:
                saved = position.record(), random_states()
    assert trace == expected
    assert saved is not None
    seeded(99)
    again = Position()
    again.resume(saved[0], random=saved[1])
    set_random_states(saved[1])  # as restore() does
    assert trace[:stop] + in_phases(again, stop) == expected


def test_a_position_in_a_later_loader_is_refused_by_an_earlier_one() -> None:
    position = Position()
    run(position, [[0]], 0, 1)
    run(position, [[0], [1]], 0, 2)
    again = Position()
    again.resume(position.record(), random=random_states())
    with pytest.raises(LayoutMismatch, match=r"loader 1 of the script.*this is loader 0"):
        run(again, [[0], [1]], 2, 4)


def test_going_back_in_the_same_process_begins_there_again() -> None:
    make = LOADERS["stateful shuffled"]
    expected = straight(make)
    seeded(1)
    position, loader = Position(), make()
    trace = run(position, loader, 0, 7)
    tree, now = position.record(), random_states()
    run(position, loader, 7, 13)
    position.resume(tree, random=now)
    assert trace + run(position, loader, 7, TOTAL) == expected
    position.resume(None)
    seeded(5)
    assert [step for step, _, _ in run(position, loader, 0, 3)] == [0, 1, 2]


@pytest.mark.parametrize(
    ("now", "what"),
    [
        (lambda: DataLoader(Numbers(length=20), batch_size=2, shuffle=True), "dataset length: stored 16, live 20"),
        (lambda: DataLoader(Numbers(), batch_size=4, shuffle=True), "batch size: stored 2, live 4"),
        (lambda: DataLoader(Numbers(), batch_size=2), "order: stored RandomSampler, live SequentialSampler"),
        (lambda: DataLoader(Numbers(), batch_size=2, shuffle=True, drop_last=True), "drop_last: stored False"),
        (lambda: StatefulDataLoader(Numbers(), batch_size=2, shuffle=True), "kind: stored DataLoader, live Stateful"),
        (lambda: [[0]] * BATCHES, "kind: stored DataLoader, live list"),
        (
            lambda: sampled(lambda data: RandomSampler(data, num_samples=8)),
            "samples per epoch: stored 16, live 8",
        ),
    ],
    ids=lambda value: value.split(":")[0] if isinstance(value, str) else "",
)
def test_another_loader_than_at_the_save_is_refused_by_name(now: Make, what: str) -> None:
    position = Position()
    run(position, LOADERS["shuffled"](), 0, 3)
    again = Position()
    again.resume(position.record(), random=random_states())
    with pytest.raises(LayoutMismatch, match=what) as caught:
        run(again, now(), 3, 4)
    assert caught.value.changed


def test_data_that_became_shorter_unseen_is_noticed_in_the_replay() -> None:
    class Shrinking:
        def __init__(self, length: int) -> None:
            self.length = length

        def __iter__(self) -> Iterator[int]:
            return iter(range(self.length))

    position = Position()
    run(position, Shrinking(9), 0, 8)
    again = Position()
    again.resume(position.record(), random=random_states())
    with pytest.raises(LayoutMismatch, match=r"ended after 5 batches.*after batch 8"):
        run(again, Shrinking(5), 8, 9)


def test_a_state_that_the_loader_refuses_is_a_layout_mismatch() -> None:
    position = Position()
    run(position, LOADERS["stateful shuffled"](), 0, 3)
    tree = position.record()
    assert tree is not None
    del tree["state"]["_num_yielded"]
    again = Position()
    again.resume(tree, random=random_states())
    with pytest.raises(LayoutMismatch, match="refused the state it saved at batch 3 of epoch 0: AssertionError"):
        run(again, LOADERS["stateful shuffled"](), 3, 4)


def test_other_generators_than_at_the_save_are_refused() -> None:
    position = Position()
    run(position, LOADERS["generator"](), 0, 3)
    again = Position()
    again.resume(position.record(), random=random_states())
    with pytest.raises(ValueError, match="had 1 generators of their own at the save and have 0 now"):
        run(again, LOADERS["shuffled"](), 3, 4)


@pytest.mark.parametrize("tree", [7, [], {"epoch": 1}, {"number": -1}])
def test_a_position_that_is_none_is_refused_at_once(tree: object) -> None:
    with pytest.raises(LayoutMismatch, match="data position"):
        Position().resume(tree)


def test_persistent_workers_are_refused_with_the_remedy() -> None:
    loader = DataLoader(Numbers(), num_workers=2, persistent_workers=True)
    with pytest.raises(ValueError, match="use persistent_workers=False"):
        Position().batches(loader, start=0, total=1, stopping=never)


def test_batches_out_of_order_are_refused_with_the_remedy() -> None:
    loader = DataLoader(Numbers(), num_workers=2, in_order=False)
    with pytest.raises(ValueError, match="use in_order=True"):
        Position().batches(loader, start=0, total=1, stopping=never)


@pytest.mark.parametrize("loader", [iter([1]), (i for i in range(3)), 7, None])
def test_what_cannot_be_iterated_again_is_refused(loader: object) -> None:
    with pytest.raises(TypeError, match=r"batches\(\) got a"):
        Position().batches(loader, start=0, total=1, stopping=never)


@pytest.mark.parametrize("loader", [[], DataLoader(Numbers(length=1), batch_size=2, drop_last=True)])
def test_an_empty_loader_is_an_error_and_no_endless_loop(loader: object) -> None:
    with pytest.raises(ValueError, match="gave no batch in epoch 0"):
        run(Position(), loader, 0, 1)


def test_a_loader_that_is_empty_the_second_time_is_an_error() -> None:
    class Once:
        def __init__(self) -> None:
            self.left = [1, 2]

        def __iter__(self) -> Iterator[int]:
            left, self.left = self.left, []
            return iter(left)

    position = Position()
    batches = position.batches(Once(), start=0, total=5, stopping=never)
    assert [next(batches), next(batches)] == [(0, 1), (1, 2)]
    with pytest.raises(ValueError, match="gave no batch in epoch 1"):
        next(batches)


def test_what_the_loader_raises_goes_through_and_the_position_stays() -> None:
    class Broken(Numbers):
        def __getitem__(self, i: int) -> torch.Tensor:
            if i == 4:
                raise OSError("disk gone")
            return super().__getitem__(i)

    position = Position()
    with pytest.raises(OSError, match="disk gone"):
        run(position, DataLoader(Broken(), batch_size=2), 0, 5)
    record = position.record()
    assert record is not None
    assert record["index"] == 2
