"""The ranks of a job, and the few things they say to each other: votes, gathers, broadcasts (torch).

A gloo group of our own, because a collective on a shared group pairs silently with somebody else's. Every call below
is collective: all ranks make the same calls in the same order, on the thread that trains; nothing here is called from
a background thread, where one dead rank would hang all others (PYTORCH.md §3). Bytes travel as uint8 tensors, numbers
as int64: nothing that arrives is executed. A job of one process has no group, and every call answers by itself.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from ckpt.errors import CheckpointError

GRACE = 5.0
"""Seconds that `close` waits for a vote still on its way: ranks that end together end within this."""

T = TypeVar("T")


class Pending:
    """A vote on its way (`Ranks.vote_async`)."""

    def __init__(self, ranks: Ranks, values: torch.Tensor, work: dist.Work | None) -> None:
        self._ranks = ranks
        self._values = values
        self._work = work

    def result(self) -> list[int]:
        """The maxima, as `Ranks.vote` returns them; waits until every rank has cast its vote.

        Raises:
            CheckpointError: a rank did not, or is gone.
        """
        work = self._work
        if work is not None:
            self._ranks._guarded(work.wait)
            self._work = None
        return _ints(self._values)

    def decided(self) -> bool:
        """Whether `result` would return, or raise, at once."""
        return self._work is None or self._work.is_completed()

    def settled(self, seconds: float) -> bool:
        """Whether nothing is on its way any more, waiting at most so long. Raises nothing."""
        work = self._work
        if work is not None and not work.is_completed():
            try:
                work.wait(timedelta(seconds=seconds))
            except RuntimeError:
                if not work.is_completed():
                    return False
        # Let go of here, so that what gloo keeps for it does not outlive the group, up to the end of the process.
        self._work = None
        return True


class Ranks:
    """This process among its peers. Made by `open_ranks`.

    Attributes: rank, world_size.
    """

    def __init__(self, rank: int = 0, world_size: int = 1, group: dist.ProcessGroup | None = None) -> None:
        self.rank = rank
        self.world_size = world_size
        self._group = group
        self._pending: Pending | None = None
        self._broken: str | None = None

    def vote(self, values: Sequence[int]) -> list[int]:
        """The maximum over all ranks of each value (int64). Every rank passes as many.

        Raises:
            CheckpointError: another rank did not call within the group's timeout, or is gone.
        """
        return self.vote_async(values).result()

    def vote_async(self, values: Sequence[int]) -> Pending:
        """Begin a vote, to be read later by every rank at the same place, before it begins another one."""
        tensor = torch.tensor(list(values), dtype=torch.int64)
        group = self._group
        if group is None:
            return Pending(self, tensor, None)
        work = self._guarded(lambda: dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group, async_op=True))
        self._pending = Pending(self, tensor, work)
        return self._pending

    def gather(self, data: bytes) -> list[bytes]:
        """What every rank passed, by rank."""
        group = self._group
        if group is None:
            return [data]
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        self._guarded(lambda: dist.all_gather(sizes, torch.tensor([len(data)]), group=group))
        lengths = [_ints(size)[0] for size in sizes]
        # gloo gathers equal lengths only: everyone pads to the longest.
        room = max(lengths)
        received = [torch.empty(room, dtype=torch.uint8) for _ in lengths]
        self._guarded(lambda: dist.all_gather(received, _tensor(data, room), group=group))
        return [tensor.numpy()[:length].tobytes() for tensor, length in zip(received, lengths, strict=True)]

    def broadcast(self, data: bytes | None, src: int = 0) -> bytes:
        """What rank `src` passed; the others pass None."""
        if (data is None) == (self.rank == src):
            raise ValueError(f"rank {self.rank}: broadcast from rank {src} takes data there and None elsewhere")
        group = self._group
        if group is None:
            assert data is not None
            return data
        size = torch.tensor([0 if data is None else len(data)])
        self._guarded(lambda: dist.broadcast(size, group_src=src, group=group))
        length = _ints(size)[0]
        tensor = torch.empty(length, dtype=torch.uint8) if data is None else _tensor(data, length)
        self._guarded(lambda: dist.broadcast(tensor, group_src=src, group=group))
        return tensor.numpy().tobytes() if data is None else data

    def exchange(self, out: Mapping[int, NDArray[np.uint8]], sizes: Mapping[int, int]) -> dict[int, NDArray[np.uint8]]:
        """Send bytes to some ranks and receive from some, all at once. Collective, though a rank may pass nothing.

        Args:
            out: rank → what it gets from this one.
            sizes: rank → how many bytes come from it. Both sides must know: no size travels. None is 0.
        """
        group = self._group
        if group is None:
            assert not out and not sizes, "a single process has no peers"
            return {}
        received = {src: torch.empty(size, dtype=torch.uint8) for src, size in sizes.items()}
        works = [self._guarded(partial(dist.irecv, data, group_src=src, group=group)) for src, data in received.items()]
        works += [
            self._guarded(partial(dist.isend, torch.from_numpy(data), group_dst=dst, group=group))
            for dst, data in out.items()
        ]
        for work in works:
            assert work is not None, "this rank is in the group"
            self._guarded(work.wait)
        return {src: data.numpy() for src, data in received.items()}

    def close(self, grace: float = GRACE) -> None:
        """Leave the group. Not collective; waits at most `grace` seconds for a vote still on its way."""
        group, self._group = self._group, None
        pending, self._pending = self._pending, None
        self._broken = "closed"
        if group is None:
            return
        if pending is not None and not pending.settled(grace):
            # A rank that leaves alone (its training raised). The destructor of a gloo group waits for what is on its
            # way, up to the timeout of half an hour: the process would not end, and its peers, who wait for it in
            # training, would not either. gloo's abort() cancels nothing (torch 2.13). So this group is never destroyed.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
            return
        if dist.is_initialized():
            dist.destroy_process_group(group)

    def _guarded(self, call: Callable[[], T]) -> T:
        """Run one step of a collective; after a failure this group is never used again.

        gloo closes its connections when a call fails, and a rank that came late would otherwise pair its call with
        the next one of the others.
        """
        if self._broken is not None:
            raise CheckpointError(f"{self._who}: cannot reach the other ranks any more: {self._broken}")
        try:
            return call()
        except (RuntimeError, ValueError) as error:  # ValueError: the group was destroyed under us
            self._broken = text = _explain(error)
            raise CheckpointError(f"{self._who}: {text}") from error

    @property
    def _who(self) -> str:
        return f"rank {self.rank} of {self.world_size}"


def open_ranks(timeout: float | None = None) -> Ranks:
    """This process among its peers: a group of our own over all ranks of torch.distributed. Collective.

    Args:
        timeout: seconds that a call waits for the slowest rank; None: the default group's. A short one fails healthy
            jobs while one rank evaluates or compiles.

    Raises:
        CheckpointError: the launcher started several ranks and torch.distributed is not initialised.
    """
    if not (dist.is_available() and dist.is_initialized()):
        world = os.environ.get("WORLD_SIZE", "1")
        if world.isdecimal() and int(world) > 1 and "RANK" in os.environ:
            # Each rank alone would take itself for the whole job, and all would write the same store.
            raise CheckpointError(
                f"rank {os.environ['RANK']} of {world}: the launcher started {world} ranks, and torch.distributed is "
                "not initialised; call torch.distributed.init_process_group() before making a Checkpointer"
            )
        return Ranks()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size == 1:
        return Ranks()
    limit = _default_timeout() if timeout is None else timedelta(seconds=timeout)
    return Ranks(rank, world_size, dist.new_group(backend="gloo", timeout=limit))


def torchrun_job() -> str | None:
    """The id torchrun gave this job (``--rdzv-id``); None without torchrun, or where it gave none of its own."""
    job = os.environ.get("TORCHELASTIC_RUN_ID")
    return None if job in (None, "", "none") else job


def _default_timeout() -> timedelta | None:
    """The default group's timeout, which torch shows nowhere public; None (torch's own default) if not found."""
    world: Any = dist.group.WORLD
    for device in getattr(world, "_device_types", ()):
        options = getattr(world._get_backend(device), "options", None)
        found = getattr(options, "_timeout", None)
        if isinstance(found, timedelta):
            return found
    return None


def _explain(error: Exception) -> str:
    # gloo has one exception type for everything; only its words tell a late rank from a dead one.
    text = str(error).split(". This is typically caused", 1)[0]
    lower = text.lower()
    if "timed out" in lower or "timeout" in lower:
        return (
            "expected every rank to make this call, and not all did in time: save()/restore() was not called on every "
            "rank, or a rank is stuck or slow (evaluation, compilation); call it on all ranks alike, or raise "
            f"Options(group_timeout=) ({text})"
        )
    if isinstance(error, ValueError):
        return f"the process group was destroyed before the Checkpointer was closed; close() it first ({text})"
    return (
        "another rank is gone, or gave up waiting for this one: save()/restore() was not called on every rank in "
        "time, or a process ended; look at the other ranks' messages and restart the job, which continues from the "
        f"newest committed step ({text})"
    )


def _tensor(data: bytes, length: int) -> torch.Tensor:
    """A uint8 tensor of `length`, data first. A copy: torch warns of read-only memory, and refuses length 0."""
    tensor = torch.zeros(length, dtype=torch.uint8)
    tensor.numpy()[: len(data)] = np.frombuffer(data, dtype=np.uint8)
    return tensor


def _ints(tensor: torch.Tensor) -> list[int]:
    return [int(value) for value in tensor.tolist()]
