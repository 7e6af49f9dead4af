"""The training loop as a decorated function: tracked, restored, saved when due, left cleanly (torch).

    @ckpt.checkpointed("runs/gpt", every=100)
    def train(run: ckpt.Run) -> None:
        run.track(model=model, optimizer=optimizer)
        for step, batch in run.batches(loader, 10_000):
            run.log(loss=train_one(model, optimizer, batch))

A step is saved between its body and the drawing of the next batch: nothing is half done there, and the data position
is that of the step.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, Concatenate, Literal, ParamSpec, TypeAlias, TypeVar

import numpy as np
import torch

from ckpt.cadence import Adaptive
from ckpt.checkpointer import Checkpointer
from ckpt.errors import CheckpointError
from ckpt.history.retention import Keep
from ckpt.options import Journal, Options
from storage_backends.base import Store

log = logging.getLogger("ckpt")

_P = ParamSpec("_P")
_R = TypeVar("_R")
Where: TypeAlias = "str | os.PathLike[str] | Store"

_PATIENCE = 60.0
"""Seconds that the save in flight has left when the training function raises, to store its own rank's share: nobody
waits for other ranks then. Long enough for a usual upload; an unbounded wait would keep the failed rank of a job alive,
and with it all the others, when the store is what failed."""


class Run:
    """What a function decorated with `checkpointed` gets as its first argument. Belongs to the training thread."""

    def __init__(self, where: Where, make: Callable[[Where, Mapping[str, object]], Checkpointer]) -> None:
        self._where = where
        self._make = make
        self._saver: Checkpointer | None = None
        self._completed = 0  # steps
        self._without_data = False  # steps() was used
        self._in_body = False
        self._wanted = False  # save() was called in a body
        self._logged: dict[str, Any] = {}
        self._over = False

    def track(self, **state: object) -> int:
        """Say what the state is, and bring it back from the store if there is anything. Call it once, on every rank,
        after ``init_process_group``.

        Args:
            state: name → module, optimizer, scheduler, anything with ``state_dict``, tensor, numpy array, plain value.

        Returns:
            The number of steps completed, 0 on an empty store. The loops below start there by themselves.

        Raises:
            What `Checkpointer` and `Checkpointer.restore` raise.
        """
        self._check_not_over("track")
        if self._saver is not None:
            raise CheckpointError("run.track() was called twice; name all of the state in one call")
        saver = self._make(self._where, state)
        # Kept before restoring: what restore() raises must not leave an open run behind.
        self._saver = saver
        self._completed = saver.restore()
        return self._completed

    def batches(self, loader: Any, total: int) -> Iterator[tuple[int, Any]]:
        """``(step, batch)`` from where the restored state ends up to `total`, over as many epochs as it takes.

        After the body of a step, and before the next batch is drawn, the step is saved if it is due. When the job is
        asked to stop (SIGTERM), the step under way is finished and saved, and the loop ends.
        """
        saver = self._tracked("batches")
        if self._without_data:
            raise CheckpointError("run.batches() after run.steps(): the data would begin at another step; use one")
        return self._saved(saver, saver.batches(loader, total))

    def steps(self, total: int) -> Iterator[int]:
        """The same without data: the steps from where the restored state ends up to `total`."""
        saver = self._tracked("steps")
        self._without_data = True
        return (step for step, _ in self._saved(saver, self._counted(saver, total)))

    def log(self, **metrics: Any) -> None:
        """Numbers to show in ``ckpt list``. Each save carries the latest value of every name.

        A tensor with one element is copied where it lives; its value is fetched only when a save is due, so that
        logging at every step does not wait for the device.

        Raises:
            TypeError: a value is neither a number, nor text, nor a tensor with one element.
        """
        for name, value in metrics.items():
            if isinstance(value, torch.Tensor):
                if value.numel() != 1:
                    raise TypeError(f"run.log({name}=…) got a tensor of shape {tuple(value.shape)}; expected a number")
                # A copy, since a running sum would be another number by the time it is saved.
                value = value.detach().clone()
            elif value is not None and not isinstance(value, int | float | str | np.generic):
                raise TypeError(f"run.log({name}=…) got a {type(value).__name__}; expected a number or text")
            self._logged[name] = value

    def save(self) -> None:
        """Save although it is not due: in the body of a step when that body is over, elsewhere at once. On all ranks.

        Not in the middle of the body, since half a step (gradients applied or not yet) is no state to come back to.
        """
        saver = self._tracked("save")
        if self._in_body:
            self._wanted = True
        else:
            saver.save(self._completed, metrics=self._logged)

    @property
    def state(self) -> MutableMapping[str, object]:
        """The tracked state by name; assign to it to change plain values."""
        return self._tracked("state").state

    @property
    def stopping(self) -> bool:
        """Whether all ranks agreed to stop. The loops end by themselves; look at it in long bodies and evaluations."""
        return self._tracked("stopping").stopping

    def _saved(self, saver: Checkpointer, batches: Iterator[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
        for step, batch in batches:
            self._in_body = True
            try:
                yield step, batch
            finally:
                # A body that ends in `break` is over too: its batch is drawn and will not be drawn again.
                self._in_body = False
                self._completed = step + 1
            if self._wanted:
                self._wanted = False
                saver.save(step + 1, metrics=self._logged)
            else:
                saver.step(step + 1, metrics=self._logged)

    def _counted(self, saver: Checkpointer, total: int) -> Iterator[tuple[int, None]]:
        while self._completed < total and not saver.stopping:
            yield self._completed, None

    def _tracked(self, what: str) -> Checkpointer:
        self._check_not_over(what)
        if self._saver is None:
            raise CheckpointError(f"run.{what} before run.track(): say first what the state is, run.track(model=model)")
        return self._saver

    def _check_not_over(self, what: str) -> None:
        if self._over:
            raise CheckpointError(f"run.{what} after the decorated function has ended; a Run lives for one call")

    def _finish(self) -> None:
        """The function returned: wait for the save in flight, and raise what failed."""
        if self._saver is None:
            return
        try:
            if self._wanted:  # in a body that ended in `break`
                self._saver.save(self._completed, metrics=self._logged)
        finally:
            self._over = True
            self._saver.close()

    def _leave(self, error: BaseException) -> None:
        """The function raised: give the save in flight its chance, and let nothing hide `error`."""
        self._over = True
        if self._saver is None:
            return
        try:
            self._saver._leave(timeout=_PATIENCE)
        except Exception as second:
            log.warning("while leaving after %s: %s", type(error).__name__, second)
            error.add_note(f"ckpt, while leaving: {type(second).__name__}: {second}")


def checkpointed(
    url: Where | Callable[..., Where],
    *,
    every: int | Adaptive | None = None,
    keep: Keep | None = None,
    capture: Literal["copy", "overlap"] = "copy",
    when_busy: Literal["wait", "skip"] = "wait",
    mirror: str | os.PathLike[str] = "auto",
    journal: bool | Journal = False,
    fresh: bool = False,
    options: Options | None = None,
) -> Callable[[Callable[Concatenate[Run, _P], _R]], Callable[_P, _R]]:
    """Decorate a training function ``train(run, …)``, which is then called as ``train(…)``.

    The checkpointer is made in ``run.track(…)``. When the function returns, the last save is waited for and what failed
    is raised; when it raises, the save in flight gets a minute to finish and the exception goes on as it is.

    Args:
        url: where, or a function of the call's arguments that says where.
        every, keep, capture, when_busy, mirror, journal, fresh, options: as in `Checkpointer`.

    Raises:
        TypeError: the function takes no first argument, or is a generator or a coroutine function.
    """
    make = functools.partial(
        Checkpointer,
        every=every,
        keep=keep,
        capture=capture,
        when_busy=when_busy,
        mirror=mirror,
        journal=journal,
        fresh=fresh,
        options=options,
    )

    def decorate(function: Callable[Concatenate[Run, _P], _R]) -> Callable[_P, _R]:
        signature = _without_run(function)

        @functools.wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            run = Run(url if isinstance(url, str | os.PathLike | Store) else url(*args, **kwargs), make)
            try:
                result = function(run, *args, **kwargs)
            except BaseException as error:
                run._leave(error)
                raise
            run._finish()
            return result

        call.__signature__ = signature  # type: ignore[attr-defined]
        call.__annotations__ = {
            name: kind
            for name, kind in call.__annotations__.items()
            if name == "return" or name in signature.parameters
        }
        return call

    return decorate


def _without_run(function: Callable[..., Any]) -> inspect.Signature:
    """The signature that callers see."""
    name = getattr(function, "__qualname__", repr(function))
    if (
        inspect.isgeneratorfunction(function)
        or inspect.iscoroutinefunction(function)
        or inspect.isasyncgenfunction(function)
    ):
        raise TypeError(f"@checkpointed: {name} returns before its body runs; decorate a plain function")
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())
    if not parameters or parameters[0].kind not in (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    ):
        raise TypeError(f"@checkpointed: {name}{signature} takes no first argument; expected def {name}(run, …)")
    return signature.replace(parameters=parameters[1:])
