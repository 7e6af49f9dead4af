"""Jobs that keep a journal, ended as a crash ends them; and recordings of live tensors to compare with."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

import ckpt
from storage_backends.base import Store
from storage_backends.memory import MemoryStore
from tests.support.training import Training

QUIET = ckpt.Options(commit_wait=20, heartbeat="1h")
EVERY_STEP = ckpt.Journal(flush="1 step", to="store")


class Killed(Exception):  # noqa: N818
    """The process ends here: nothing after it is saved."""


@contextlib.contextmanager
def killed() -> Iterator[None]:
    """Around a job that ends with `Killed`."""
    with contextlib.suppress(Killed):
        yield


def job(
    store: Store | str,
    training: Any,
    last: int,
    *,
    every: int | None = 5,
    journal: ckpt.Journal | bool = EVERY_STEP,
    mirror: str = "off",
    each: Callable[[int], None] = lambda _: None,
    **more: Any,
) -> ckpt.Checkpointer:
    """Restore, train up to `last` steps, and die. `each` is called after the body of every step, before `step()`."""
    saver = ckpt.Checkpointer(
        store, training.state, every=every, journal=journal, mirror=mirror, options=QUIET, **more
    )  # fmt: skip
    with killed(), saver:
        for step in range(saver.restore(), last):
            training.train(step)
            each(step + 1)
            saver.step(step + 1)
        raise Killed
    return saver


def unhurt(last: int, make: Callable[[], Any] = Training) -> Any:
    """The same training without a failure."""
    training = make()
    for step in range(last):
        training.train(step)
    return training


def recording(training: Any) -> dict[str, bytes]:
    """All bytes of a training, and what dropout would draw next."""
    return {**training.bytes(), "random": torch.get_rng_state().numpy().tobytes()}


def comes_back(make: Callable[[int], Any], died: int, last: int, *, every: int = 5) -> Any:
    """A training made with seed 0 dies after `died` steps, and one made with another seed takes over up to `last`: it
    stands on that very step, and ends as one that nothing happened to. Returns it."""
    store, expected = MemoryStore(), recording(unhurt(last, lambda: make(0)))
    saver = job(store, make(0), died, every=every)
    assert saver.stats.journal is not None and saver.stats.journal.off is None
    again = make(4)
    saver = job(store, again, last, every=every)
    assert saver.restored is not None and saver.restored.step == died
    assert recording(again) == expected
    return again
