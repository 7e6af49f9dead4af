"""Copies that go on while forward and backward compute, and the optimizer step that waits for them (torch).

A thread of ours copies; whoever must wait for the end (a step of any optimizer, `restore`, `close`) copies too, so that
training never stands still for a thread that has no core. Only what tracked optimizers own is copied late, since only
their `step` changes it: all else was copied when `save()` returned.

What cannot be seen, and is the user's to avoid while a copy is under way: edits of such tensors outside of
`optimizer.step()` that do not count as edits for torch (through ``.data``, by fused kernels, by a replayed CUDA graph,
which calls no hook). Edits that torch counts fail the save, rather than store a state that never was.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ckpt.errors import SaveFailed
from ckpt.saving.capture import Begun, Later
from ckpt.saving.threads import Crew

STRIDE = 512 * 1024
"""Bytes per call of memcpy: training keeps 0.97 of its speed beside such pieces, 0.91 beside one long call."""


class Copying:
    """The copies of one save, done by whoever calls `work`. `then` is called once all are done, on our own thread."""

    def __init__(self, step: int, begun: Sequence[Begun], then: Callable[[], None]) -> None:
        self._step = step
        self._then = then
        self._todo: deque[Later] = deque(copy for one in begun for copy in one.copies)
        self._left = len(self._todo)
        self._events = [(device, event) for one in begun for device, event in one.events.items()]
        self._watched = [watched for one in begun for watched in one.watched]
        self._lock = threading.Lock()
        self._copied = threading.Event()
        """All copies on the host are done."""
        self._over = threading.Event()
        self._error: BaseException | None = None
        if not self._left:
            self._copied.set()

    def work(self) -> None:
        """Copy on the host until nothing is left that nobody has begun."""
        while True:
            try:
                copy = self._todo.popleft()
            except IndexError:
                return
            try:
                _carry_out(copy)
            except Exception as error:
                self._error = error
            except BaseException as error:  # Ctrl-C during an optimizer's step: the save fails, and the step is left
                self._error = error
                raise
            finally:  # whoever waits must be let go, whatever it is
                self._count_off()

    def _count_off(self) -> None:
        with self._lock:
            self._left -= 1
            if self._left:
                return
        self._check("cpu")
        self._copied.set()

    def run(self) -> None:
        """On our own thread: all of it, then `then`. Never raises; `wait` does."""
        try:
            self.work()
            self._copied.wait()
            for _, event in self._events:
                event.synchronize()
            self._check("cuda")
            if self._error is None:
                self._then()
        except BaseException as error:
            self._error = error
        finally:
            self._over.set()

    def hold_back(self) -> None:
        """Return when the state may change: copy what is left on the host, and have the devices' current streams wait
        for the copies out of them."""
        self._check("cuda")
        for device, event in self._events:
            torch.cuda.current_stream(device).wait_event(event)
        self.work()
        self._copied.wait()

    @property
    def over(self) -> bool:
        """Whether all copies are done, those of devices too."""
        return self._over.is_set() or (self._copied.is_set() and not self._events)

    def wait(self) -> None:
        """Until all is over. Raises what went wrong."""
        self._over.wait()
        if self._error is not None:
            raise self._error

    def _check(self, kind: str) -> None:
        """Whether tensors on this kind of device are still as they were at `save()`; the last moment to ask is before
        they may change rightly. Asked once: nobody watches them after."""
        with self._lock:
            mine = [watched for watched in self._watched if watched[1].device.type == kind]
            self._watched = [watched for watched in self._watched if watched[1].device.type != kind]
            changed = next((path for path, tensor, version in mine if tensor._version != version), None)
            if changed is not None and self._error is None:
                self._error = _changed(self._step, changed)


def _carry_out(copy: Later) -> None:
    # numpy, not torch: that would start a second pool of threads beside the one training computes with.
    target, source = copy.target.numpy(), copy.source.numpy()
    step = STRIDE // source.itemsize
    for start in range(copy.start, copy.stop, step):
        stop = min(start + step, copy.stop)
        np.copyto(target[start:stop], source[start:stop])


def _changed(step: int, path: str) -> SaveFailed:
    return SaveFailed(
        f"step {step}: {path} was changed outside of optimizer.step() while it was being copied, so what was copied is "
        "no state that ever was; make such edits before save() or right after optimizer.step(), or use capture='copy'",
        step=step,
        stage="capture",
    )


class Overlap:
    """One thread that copies, and the hook that holds every optimizer's step back while it does.

    `blocked` is called with the seconds that a step was held back.
    """

    def __init__(self, blocked: Callable[[float], None], *, crew: Crew[None] | None = None) -> None:
        self._blocked = blocked
        self._copying: Copying | None = None
        # Not at nice 19: a step may come to wait for it.
        self._crew: Crew[None] = crew or Crew("ckpt-capture", 1, lambda: None, yielding=False)
        self._hook: Any = register_optimizer_step_pre_hook(self._before_step)

    def begin(self, copying: Copying) -> None:
        """Have these copies done. Those before are over."""
        self._copying = copying
        self._crew.start()
        self._crew.submit(lambda _: copying.run())

    def wait_copied(self) -> None:
        """Until the state may change."""
        copying = self._copying
        if copying is None:
            return
        began = time.perf_counter()
        copying.hold_back()
        # Forgotten only now, and only once the devices are through too: a wait may be interrupted, and every optimizer
        # steps on a stream of its own, which must wait as well.
        if copying.over and self._copying is copying:
            self._copying = None
        self._blocked(time.perf_counter() - began)

    def close(self) -> None:
        """Let go of the hook, once nothing is under way."""
        self.wait_copied()
        self._hook.remove()
        self._crew.stop()

    def _before_step(self, *_: object) -> None:
        self.wait_copied()
