"""Gradients, and whatever else a step changed, copied out at one instant into buffers that are used again (torch).

Tensors of one dtype lie one after the other, so that small neighbours are gathered by one call, as at a save.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ckpt.leaves.tensors import as_bits
from ckpt.saving.capture import DEVICE_RUN, RUN, SMALL
from ckpt.saving.job import Bytes


@dataclass(frozen=True, slots=True, eq=False)
class Lot:
    """Copied tensors of one dtype: `paths` in the order in which their bytes follow each other in `data`."""

    dtype: str
    paths: tuple[str, ...]
    sizes: tuple[int, ...]
    data: Bytes


SPARE = 16
"""Buffers that wait to be used again, at most: a few sizes, each as often as steps may be under way."""


class Buffers:
    """Host memory that goes out to a capture and comes back from the thread that has written it down. `nbytes`: of all
    that is out or waits."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[Bytes] = []
        self.nbytes = 0

    def take(self, nbytes: int) -> Bytes:
        """At least so many bytes. Fresh pages cost more than the copy, so what came back goes out again."""
        with self._lock:
            for i, data in enumerate(self._free):
                if nbytes <= len(data) <= 2 * nbytes + 4096:
                    return self._free.pop(i)
            self.nbytes += nbytes
        return np.empty(nbytes, np.uint8)

    def give_back(self, buffers: Iterable[Bytes]) -> None:
        with self._lock:
            self._free.extend(buffers)
            while len(self._free) > SPARE:  # the one that has waited longest is of a size that is no longer asked for
                self.nbytes -= len(self._free.pop(0))


def copy_out(
    named: Sequence[tuple[str, torch.Tensor]], buffers: Buffers, used: list[Bytes]
) -> list[Lot]:  # fmt: skip
    """Copy these tensors out, in lots by dtype. Nothing refers to them afterwards.

    Args:
        used: gets the buffers that the lots lie in.
    """
    by_dtype: dict[torch.dtype, list[tuple[str, torch.Tensor]]] = {}
    for path, tensor in named:
        by_dtype.setdefault(tensor.dtype, []).append((path, tensor))
    lots: list[Lot] = []
    waits: set[torch.device] = set()
    with torch.no_grad():
        for dtype, members in by_dtype.items():
            sizes = tuple(tensor.nbytes for _, tensor in members)
            total = sum(sizes)
            buffer = buffers.take(total)
            used.append(buffer)
            _fill([as_bits(tensor) for _, tensor in members], torch.from_numpy(buffer)[:total], waits)
            name = str(dtype).removeprefix("torch.")
            lots.append(Lot(name, tuple(path for path, _ in members), sizes, buffer[:total]))
        for event in [torch.cuda.current_stream(device).record_event() for device in waits]:
            event.synchronize()
    return lots


def _fill(sources: Sequence[torch.Tensor], out: torch.Tensor, waits: set[torch.device]) -> None:
    at = first = 0
    run: list[torch.Tensor] = []
    count = 0

    def gather() -> None:
        if not run:
            return
        place = out[first:at].view(run[0].dtype)
        if run[0].device.type == "cpu" and len(run) > 1:
            torch.cat(run, out=place)
        else:
            place.copy_(run[0] if len(run) == 1 else torch.cat(run), non_blocking=run[0].is_cuda)

    for source in sources:
        if not source.numel():
            continue
        if source.is_cuda:
            waits.add(source.device)
        small = source.dim() == 1 and source.nbytes < SMALL
        most = RUN if source.device.type == "cpu" else DEVICE_RUN
        if run and not (small and source.device == run[0].device and count + source.numel() <= most):
            gather()
            run, first, count = [], at, 0
        if small:
            run.append(source)
            count += source.numel()
        else:
            out[at : at + source.nbytes].view(source.dtype).view(source.shape).copy_(
                source, non_blocking=source.is_cuda
            )
            first = at + source.nbytes
        at += source.nbytes
    gather()
