"""A read under way: which chunks are still lacking, and where the bytes of one go, whoever gives them.

Mirrors, peers and the store take turns; each hands over what it has. A chunk is lacking until a source has filled it
with bytes that were checked, so a source that turns out bad simply leaves it to the next one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import numpy as np

from ckpt.format.shards import DTYPES
from recovery.assemble import ChunkJob, ReadPlan, Target, Wanted
from recovery.boxes import Bytes, Run, carry_out, copied

Fill: TypeAlias = Callable[[Bytes], bool]
"""Fills all of the buffer it is given with a chunk's bytes and says True, once it has checked them; or says False,
and then what is in the buffer is nothing."""

Delivered: TypeAlias = list[tuple[Wanted, Bytes]]
"""Boxes that are whole now."""


def chunk_nbytes(job: ChunkJob) -> int:
    """Bytes of the chunk itself, which may be cut out of what its blobs decode to; of what is kept of it."""
    return job.box.numel * DTYPES[job.dtype].size if job.kept is None else job.kept.nbytes


class Reading:
    """One `ReadPlan` being carried out. `deliver` may be called by many threads, once for each chunk at a time."""

    def __init__(self, plan: ReadPlan) -> None:
        self._lacking = dict.fromkeys(plan.jobs)
        self._empty = plan.empty
        self._lock = threading.Lock()

    @property
    def lacking(self) -> Sequence[ChunkJob]:
        """Chunks that nobody has given yet, in the order in which they lie on the store."""
        with self._lock:
            return tuple(self._lacking)

    def nothing(self) -> Iterator[tuple[Wanted, Bytes]]:
        """The boxes that need no bytes."""
        for want in self._empty:
            yield want, np.empty(0, np.uint8)

    def deliver(self, job: ChunkJob, fill: Fill) -> Delivered | None:
        """Put one chunk where it goes. Returns the wanted boxes that this makes whole; None if `fill` said False."""
        direct = self._direct(job)
        chunk = np.empty(chunk_nbytes(job), np.uint8) if direct is None else direct
        if not fill(chunk):
            return None
        with self._lock:
            del self._lacking[job]
        finished: list[Target] = []
        for target, copy in job.copies:
            if direct is None:
                carry_out(copy, chunk, self._buffer(target))
            self._settle(target, copied(copy), finished)
        return [(target.wanted, target.data) for target in finished if target.wanted is not None]

    def _direct(self, job: ChunkJob) -> Bytes | None:
        """Where the whole chunk goes, if that is one run of bytes and nowhere else: then it is filled in place."""
        if len(job.copies) != 1:
            return None
        target, copy = job.copies[0]
        if not isinstance(copy, Run) or copied(copy) != chunk_nbytes(job):
            return None
        return self._buffer(target)[copy.at : copy.at + chunk_nbytes(job)]

    def _buffer(self, target: Target) -> Bytes:
        with self._lock:
            return target.data

    def _settle(self, target: Target, arrived: int, finished: list[Target]) -> None:
        with self._lock:
            target.missing -= arrived
            if target.missing:
                return
        if target.wanted is not None:
            finished.append(target)
        for further, copy in target.onward:
            carry_out(copy, target.data, self._buffer(further))
            self._settle(further, copied(copy), finished)
