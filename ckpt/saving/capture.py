"""The one thing training waits for: a copy of every owned tensor into a host buffer, all at one instant (torch).

Small tensors are most of the calls and few of the bytes: 20,000 of them cost 30 ms one by one. Neighbours in the
layout are therefore gathered by one `torch.cat` into the buffer, over flat views that are made once and kept. Copies
are made on integer views of the bits, so that no conversion can touch a NaN's payload or a dtype that copies badly.

With ``capture="overlap"`` the large tensors that only `optimizer.step()` changes are left for later: `begin` says which
copies those are, and `overlap` carries them out while training computes. On a device all copies are queued on a stream
of their own, behind what has been computed so far; the training's stream waits for those that anybody may change.
"""

from __future__ import annotations

import logging
import operator
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from ckpt.errors import LayoutMismatch, UnsupportedState
from ckpt.format.layout import Layout, Region
from ckpt.format.shards import DTYPES, Shard
from ckpt.leaves.tensors import as_bits

if TYPE_CHECKING:
    from ckpt.leaves import Flat, LiveShard

log = logging.getLogger("ckpt")

SMALL = 64 * 1024
"""Tensors below this many bytes are gathered; larger ones are copied one by one."""

RUN = 32_767
"""Elements per gather on the CPU: from 32,768 on torch.cat goes parallel, copying input by input: twice as slow."""

DEVICE_RUN = 8 << 20
"""Elements per gather on a device, where each gather takes that much scratch."""

PIECE = 4 << 20
"""Bytes of a copy that is left for later: what the optimizer's thread waits for at most, when it comes to help."""


@dataclass(frozen=True, slots=True)
class _Run:
    """Regions `first` to `last` (exclusive, in buffer order) that one call copies into bytes ``[start, stop)``."""

    first: int
    last: int
    start: int
    stop: int


@dataclass(eq=False)
class _Target:
    """What was made for one buffer: one view per run. Not slots=True: a finalizer watches it."""

    array: NDArray[np.uint8]
    views: list[torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Later:
    """One copy that may wait: elements ``[start, stop)`` of two flat host tensors of one dtype."""

    target: torch.Tensor
    source: torch.Tensor
    start: int
    stop: int


@dataclass(frozen=True, slots=True, eq=False)
class Begun:
    """What `Capturer.begin` has left. `copies`: on the host, nobody does them yet. `events`: device → all copies out of
    it are queued before this. `watched`: (path, tensor, its version counter): each must stay at that version until all
    is copied."""

    copies: list[Later]
    events: dict[torch.device, torch.cuda.Event]
    watched: list[tuple[str, torch.Tensor, int]]


class Capturer:
    """Copies the state into buffers of one layout. Views of live tensors and of the two buffers are kept from save to
    save, and checked at each one."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        # Buffer order: neighbours can be gathered.
        self._regions = sorted((r for r in layout.regions if r.nbytes), key=operator.attrgetter("start"))
        self._nbytes = sum(r.nbytes for r in self._regions)
        self._shards: Sequence[LiveShard] | None = None
        self._sources: list[int] = []  # per region, the number of its shard in the state
        self._tensors: list[torch.Tensor] = []
        self._pointers: list[int] = []
        self._views: list[torch.Tensor] = []
        self._runs: list[_Run] = []
        self._inputs: list[list[torch.Tensor]] = []  # per run
        self._targets: dict[int, _Target] = {}  # by address of the buffer
        self._stepped: frozenset[str] | None = None
        self._may_wait: list[bool] = []  # per run
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def take(self, flat: Flat, slot: NDArray[np.uint8]) -> int:
        """Copy every region of the layout into `slot`; nothing refers to live tensors in it afterwards.

        Args:
            flat: the state; each region is one of its shards, or rows of one.
            slot: at least ``layout.nbytes`` contiguous bytes.

        Returns:
            Bytes copied.

        Raises:
            LayoutMismatch: the state has no shard for a region.
            UnsupportedState: a tensor's memory was freed.
        """
        self._look_at(flat)
        views = self._target(slot).views
        waits: set[torch.device] = set()
        for view, inputs in zip(views, self._inputs, strict=True):
            if inputs[0].is_cuda:
                waits.add(inputs[0].device)
                _copy(view, inputs, non_blocking=True)
            else:
                _copy(view, inputs)
        for event in [torch.cuda.current_stream(device).record_event() for device in waits]:
            event.synchronize()
        return self._nbytes

    def begin(self, flat: Flat, slot: NDArray[np.uint8]) -> Begun:
        """Copy what training code may change at any time, and hand over what only `optimizer.step()` changes (the paths
        in ``flat.stepped``, where they are large): until that is copied, no such step may begin. Raises as `take`."""
        self._look_at(flat)
        self._look_who_steps(flat.stepped)
        begun = Begun([], {}, [])
        early: dict[torch.device, list[tuple[torch.Tensor, list[torch.Tensor]]]] = {}
        late: dict[torch.device, list[tuple[torch.Tensor, list[torch.Tensor]]]] = {}
        views = self._target(slot).views
        for view, inputs, run, may_wait in zip(views, self._inputs, self._runs, self._may_wait, strict=True):
            source = inputs[0]
            if source.is_cuda:
                (late if may_wait else early).setdefault(source.device, []).append((view, inputs))
            elif may_wait:
                step = PIECE // source.element_size()
                begun.copies.extend(
                    Later(view, source, at, min(at + step, len(view))) for at in range(0, len(view), step)
                )
            else:
                _copy(view, inputs)
                continue
            if may_wait:
                begun.watched.extend(
                    (region.shard.leaf.path, tensor, tensor._version)
                    for region, tensor in zip(self._regions[run.first : run.last], inputs, strict=True)
                )
        for device in early.keys() | late.keys():
            begun.events[device] = self._queue(device, early.get(device, []), late.get(device, []))
        return begun

    def _queue(
        self,
        device: torch.device,
        early: list[tuple[torch.Tensor, list[torch.Tensor]]],
        late: list[tuple[torch.Tensor, list[torch.Tensor]]],
    ) -> torch.cuda.Event:
        """Queue copies out of a device, behind all that was queued on its current stream so far."""
        side = self._streams.get(device)
        if side is None:
            side = self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        current = torch.cuda.current_stream(device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for view, inputs in early:
                _copy(view, inputs, non_blocking=True)
            copied = side.record_event()
            for view, inputs in late:
                _copy(view, inputs, non_blocking=True)
            end: torch.cuda.Event = side.record_event()
        if early:
            current.wait_event(copied)  # the device waits, not the host
        return end

    def _look_who_steps(self, stepped: frozenset[str]) -> None:
        """Which runs may wait: on the host single large contiguous tensors, on a device whatever is stepped."""
        if stepped is self._stepped and self._may_wait:
            return
        owned = [region.shard.leaf.path in stepped for region in self._regions]
        self._may_wait = []
        for run in self._runs:
            view = self._views[run.first]
            large = run.last == run.first + 1 and view.is_contiguous() and view.nbytes >= SMALL
            self._may_wait.append(all(owned[run.first : run.last]) and (large or view.is_cuda))
        self._stepped = stepped

    # --- sources ---

    def _look_at(self, flat: Flat) -> None:
        """Take up the state's tensors: views are made anew for those that are others than at the last save."""
        shards, sources, tensors = flat.shards, self._sources, self._tensors
        if shards is not self._shards:
            if self._shards is None or not _same_shards(self._shards, shards):
                sources = list(self._find(shards))
            tensors = [shards[i].tensor for i in sources]
        pointers = list(map(torch.Tensor.data_ptr, tensors))
        if sources is not self._sources:
            views = [self._view(region, shards[i]) for region, i in zip(self._regions, sources, strict=True)]
        elif pointers == self._pointers and all(map(operator.is_, tensors, self._tensors)):
            self._shards = shards
            return
        else:
            kept = map(operator.is_, tensors, self._tensors)
            still = map(operator.eq, pointers, self._pointers)
            views = [
                view if same and unmoved else self._view(region, shards[i])
                for view, same, unmoved, region, i in zip(self._views, kept, still, self._regions, sources, strict=True)
            ]
        regroup = list(map(_flavour, views)) != list(map(_flavour, self._views))
        self._shards, self._sources = shards, sources
        self._tensors, self._pointers, self._views = tensors, pointers, views
        if regroup:
            self._group()
        self._inputs = [views[run.first : run.last] for run in self._runs]

    def _find(self, shards: Sequence[LiveShard]) -> Iterator[int]:
        numbers: dict[str, list[int]] = {}
        for i, live in enumerate(shards):
            numbers.setdefault(live.shard.leaf.path, []).append(i)
        for region in self._regions:
            for i in numbers.get(region.shard.leaf.path, ()):
                if _inside(region.shard, shards[i].shard):
                    yield i
                    break
            else:
                raise LayoutMismatch(
                    f"{region.shard.leaf.path}: the layout stores box {region.shard.box} as {_describe(region.shard)}, "
                    "and the state holds no such box; the state changed without all ranks agreeing on it anew",
                    changed={region.shard.leaf.path: f"stored {_describe(region.shard)}, live: absent"},
                )

    def _view(self, region: Region, live: LiveShard) -> torch.Tensor:
        tensor, box, outer = live.tensor, region.shard.box, live.shard.box
        path = live.shard.leaf.path
        if tuple(tensor.shape) != outer.lengths or tensor.dtype.itemsize != DTYPES[live.shard.leaf.dtype].size:
            raise LayoutMismatch(
                f"{path}: expected {outer} of {_describe(live.shard)}, found {tensor.dtype} {list(tensor.shape)}",
                changed={path: f"expected {list(outer.lengths)}, found {list(tensor.shape)}"},
            )
        if tensor.data_ptr() == 0:  # its storage was resized to nothing: reading it would be a crash
            raise UnsupportedState(
                f"{path}: its memory was freed (storage of size 0); save while the tensor is there", leaf=path
            )
        if box != outer:
            tensor = tensor[
                tuple(slice(a - b, a - b + n) for a, b, n in zip(box.offsets, outer.offsets, box.lengths, strict=True))
            ]
        return as_bits(tensor)

    def _group(self) -> None:
        """Plan the calls: runs of small neighbours of one element width and device, each other region by itself."""
        runs: list[_Run] = []
        room = 0  # elements the last run still takes
        kind: object = None
        for i, (region, view) in enumerate(zip(self._regions, self._views, strict=True)):
            count, size = view.numel(), view.nbytes
            small = view.dim() == 1 and view.is_contiguous() and size < SMALL
            this = (view.dtype, view.device)
            if small and kind == this and count <= room and region.start == runs[-1].stop:
                runs[-1] = _Run(runs[-1].first, i + 1, runs[-1].start, region.start + size)
                room -= count
                continue
            runs.append(_Run(i, i + 1, region.start, region.start + size))
            kind = this if small else None
            room = (RUN if view.device.type == "cpu" else DEVICE_RUN) - count
        self._runs = runs
        self._targets.clear()
        self._may_wait = []

    # --- targets ---

    def _target(self, slot: NDArray[np.uint8]) -> _Target:
        address = int(slot.__array_interface__["data"][0])
        found = self._targets.get(address)
        if found is not None and found.array.nbytes == slot.nbytes:
            return found
        if slot.dtype != np.uint8 or slot.ndim != 1 or not slot.flags.c_contiguous or slot.nbytes < self._layout.nbytes:
            raise ValueError(f"a buffer of {slot.nbytes} bytes; expected {self._layout.nbytes} contiguous bytes")
        base = torch.from_numpy(slot)
        target = _Target(slot, [self._place(base, run) for run in self._runs])
        if any(view.is_cuda for view in self._views):
            _pin(target)
        # Two buffers take turns; a third address means that they were replaced.
        while len(self._targets) >= 2:
            del self._targets[next(iter(self._targets))]
        self._targets[address] = target
        return target

    def _place(self, base: torch.Tensor, run: _Run) -> torch.Tensor:
        source = self._views[run.first]
        place = base[run.start : run.stop].view(source.dtype)
        return place if source.is_contiguous() else place.view(source.shape)


def _copy(view: torch.Tensor, inputs: list[torch.Tensor], *, non_blocking: bool = False) -> None:
    """One call for one run."""
    if len(inputs) == 1:
        view.copy_(inputs[0], non_blocking=non_blocking)
    elif inputs[0].device.type == "cpu":
        torch.cat(inputs, out=view)
    else:
        view.copy_(torch.cat(inputs), non_blocking=non_blocking)


def _same_shards(old: Sequence[LiveShard], new: Sequence[LiveShard]) -> bool:
    return [live.shard for live in old] == [live.shard for live in new]


def _flavour(view: torch.Tensor) -> tuple[bool, torch.dtype, torch.device]:
    """What decides how a view is grouped; its size is given by its region."""
    return view.is_contiguous(), view.dtype, view.device


def _inside(part: Shard, live: Shard) -> bool:
    if part is live:
        return True
    if part.leaf != live.leaf or part.per_rank != live.per_rank:
        return False
    return part.box == live.box or live.box.intersect(part.box) == part.box


def _describe(shard: Shard) -> str:
    return f"{shard.leaf.cls} {shard.leaf.dtype} {list(shard.leaf.shape)}{' per rank' if shard.per_rank else ''}"


def _pin(target: _Target) -> None:
    """Lock a buffer's pages, so that device copies run at full speed and at once. Where refused, they are slower."""
    cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = int(target.array.__array_interface__["data"][0])
    code = cudart.cudaHostRegister(address, target.array.nbytes, 0)
    if code == cudart.cudaError.success:
        # Holds the array: its pages must be unlocked before they are unmapped. Not at exit, when CUDA may be gone.
        weakref.finalize(target, _unpin, address, target.array).atexit = False
        return
    log.warning("cannot lock %d bytes of host memory (%s): device copies will be slower", target.array.nbytes, code)
    _clear_error()


def _clear_error() -> None:
    """Take the last error off CUDA's record: the next kernel of the training would report it as its own."""
    try:
        torch.zeros(1, device="cuda")
    except RuntimeError:
        log.debug("took the error of cudaHostRegister off the record", exc_info=True)


def _unpin(address: int, array: NDArray[np.uint8]) -> None:
    cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = cudart.cudaHostUnregister(address)
    if code != cudart.cudaError.success:
        log.warning("cannot unlock %d bytes of host memory: %s", array.nbytes, code)
