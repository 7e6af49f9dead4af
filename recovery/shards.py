"""Wanted boxes from the store: batches of chunks over threads, each fetched, rebuilt, checked, copied where it goes.

Every thread takes one batch at a time and does all of it, rather than one pool that fetches and one that decodes: then
a batch's bytes bound what a thread holds, and no queue of encoded chunks can grow between the two.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from ckpt.errors import DamagedError
from ckpt.format.manifest import Blob, Part, chunk_digest
from ckpt.format.shards import DTYPES
from recovery.assemble import ChunkJob, Place, Wanted, plan_chunks
from recovery.boxes import Bytes, carry_out, copies
from recovery.fetch import REQUEST, Fault, Tally, fetch
from recovery.parallel import THREADS, batched, in_threads
from recovery.read import Missing
from recovery.reading import Delivered, Reading
from recovery.rebuild import Rebuilder, chain_problem
from storage_backends.base import Store

MEMORY = 256 * 1024 * 1024
SMALLEST_BATCH = 1024 * 1024


def read_shards(
    store: Store,
    parts: Mapping[int, Part],
    wanted: Sequence[Wanted],
    *,
    memory: int = MEMORY,
    threads: int = THREADS,
    tally: Tally | None = None,
) -> Iterator[tuple[Wanted, Bytes]]:
    """Read every wanted box: yields each with its row-major bytes (uint8, 1-D, its own), in the order they are done.

    Args:
        parts: rank → part of one snapshot; only the ranks that hold something wanted must be there.
        memory: working memory of all threads: a quarter of it for encoded bytes in flight (one chunk's chain per thread
            is always allowed), the rest for what it takes to hold and decode them.
        tally: counts what is read.

    Raises:
        Missing: a pack is not there; see `read.verdict`.
        DamagedError: bytes are not what was written; names key, step, rank and leaf.
        LayoutMismatch: a leaf has another dtype or shape than is wanted.
        StorageError: the store does not answer.
    """
    reading = Reading(plan_chunks(parts, wanted))
    yield from reading.nothing()
    yield from from_store(store, reading, memory=memory, threads=threads, tally=tally)


def from_store(
    store: Store, reading: Reading, *, memory: int = MEMORY, threads: int = THREADS, tally: Tally | None = None
) -> Iterator[tuple[Wanted, Bytes]]:
    """What `read_shards` does, for the chunks that no other source has given: the store is the last one."""
    share = max(memory // threads, 1)
    jobs = reading.lacking
    # Small batches: the decoding of one hides behind the reading of the next.
    work = _Work(store, reading, tally or Tally(), request=max(min(REQUEST, share // 4), 1))
    batches = cut_batches(jobs, limit=max(share // 4, 1), threads=threads)
    for finished in in_threads(batches, work.batch, threads=min(threads, max(len(jobs), 1))):
        yield from finished


def cut_batches(jobs: Sequence[ChunkJob], *, limit: int, threads: int) -> Iterator[list[ChunkJob]]:
    """Consecutive jobs of at most `limit` encoded bytes together (one job may exceed it), small enough that every
    thread has some."""
    total = sum(job.cost for job in jobs)
    limit = min(limit, max(total // (2 * threads), SMALLEST_BATCH))
    return batched(jobs, lambda job: job.cost, limit)


class _Work:
    """What all threads of one read share."""

    def __init__(self, store: Store, reading: Reading, tally: Tally, request: int) -> None:
        self._store = store
        self._reading = reading
        self._tally = tally
        self._request = request
        self._own = threading.local()

    def batch(self, jobs: Sequence[ChunkJob]) -> Delivered:
        """Read and place the chunks of a batch; the wanted boxes that are complete now."""
        for job in jobs:
            if (problem := chain_problem(job.blobs, job.nbytes)) is not None:
                raise damaged(self._store, job.place, job.blobs[0].pack, "a chain of blobs", problem)
        fetched = fetch(self._store, (b for job in jobs for b in job.blobs), self._tally, limit=self._request)
        finished: Delivered = []
        for job in jobs:
            for blob in job.blobs:
                if (fault := fetched.faults.get(blob)) is not None:
                    raise faulty(self._store, job.place, blob, fault)
            finished.extend(self._reading.deliver(job, partial(self._fill, job, fetched.data)) or ())
        return finished

    def _fill(self, job: ChunkJob, data: Mapping[Blob, memoryview], out: Bytes) -> bool:
        rebuilder: Rebuilder | None = getattr(self._own, "rebuilder", None)
        if rebuilder is None:
            rebuilder = self._own.rebuilder = Rebuilder()
        rebuild_checked(self._store, rebuilder, job, data, out)
        return True


def rebuild_checked(
    store: Store, rebuilder: Rebuilder, job: ChunkJob, data: Mapping[Blob, memoryview], out: Bytes
) -> None:
    """Rebuild one chunk and compare its digest; into `out` comes what is kept of it. Raises DamagedError."""
    clipped = job.of != job.box  # after a change of layout its blobs decode to a larger box
    chunk = out if job.kept is None else np.empty(job.box.numel * DTYPES[job.dtype].size, np.uint8)
    decoded = np.empty(job.nbytes, np.uint8) if clipped else chunk
    try:
        rebuilder.rebuild(job.blobs, data, job.dtype, decoded)
    except ValueError as error:
        raise damaged(store, job.place, job.blobs[-1].pack, f"{job.nbytes} decoded bytes", str(error)) from error
    if clipped:
        copy = copies(job.of, job.box, DTYPES[job.dtype].size)
        assert copy is not None, "the plan has checked that the box lies in it"
        carry_out(copy, decoded, chunk)
    found = chunk_digest(job.dtype, chunk)
    if found != job.digest:
        raise damaged(store, job.place, job.blobs[-1].pack, f"digest {job.digest}", f"rebuilt to {found}")
    if job.kept is not None:
        np.concatenate([chunk[start:stop] for start, stop, _ in job.kept.ranges], out=out)


def damaged(store: Store, place: Place, key: str, expected: str, found: str, *, missing: bool = False) -> DamagedError:
    """The error for one chunk of one leaf."""
    kind = Missing if missing else DamagedError
    return kind(
        f"{place}: {key} on {store.url}: expected {expected}, found {found}; run 'ckpt verify --step {place.step} "
        f"--deep' to see what else is wrong",
        key=key,
        step=place.step,
        rank=place.rank,
        leaf=place.leaf,
        expected=expected,
        found=found,
    )


def faulty(store: Store, place: Place, blob: Blob, fault: Fault) -> DamagedError:
    return damaged(store, place, blob.pack, fault.expected, fault.found, missing=fault.missing)
