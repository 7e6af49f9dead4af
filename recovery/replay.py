"""Saved ranks rolled forward from their snapshot, record by record, and checked at every step (torch).

A state counts only where every checksum that its record holds is that of the replayed tensors: a journal that went
wrong (a weight changed outside the optimizer, another kernel on this machine) leads to no step from there on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch

from ckpt.errors import DamagedError, FormatTooNew, StorageError
from ckpt.format.codec import Codec
from ckpt.format.journal import DEVICE, SUM, OpenRecord, read_record, read_segment
from ckpt.format.manifest import Part
from ckpt.format.names import RunId
from ckpt.format.shards import Shard
from ckpt.mirror.ring import read_ring_record
from ckpt.records import opened
from ckpt.rolling import Bytes, Rolled, Unlike, as_tensor
from recovery.journaled import Records
from storage_backends.base import NotFound, Store

log = logging.getLogger("ckpt")


@dataclass(frozen=True, slots=True)
class Stopped:
    """How far a replay got: `step` is the last one proven, `why` it ended there; None where that is the target."""

    step: int
    why: str | None


Count: TypeAlias = Callable[[int], None]
"""Told of bytes read."""


def first_record(store: Store, records: Records, run: RunId, rank: int, base: int) -> OpenRecord:
    """The record that follows the snapshot. It holds the table of all that the rank held.

    Raises:
        DamagedError: there is none that can be read.
    """
    for record in _following(store, records, run, rank, base):
        if record.head.rows is None:
            raise _unusable(run, rank, base + 1, "the first record after a snapshot holds no table")
        return record
    raise _unusable(run, rank, base + 1, "no record")


def begin(part: Part, table: tuple[Shard, ...], data: Mapping[Shard, Bytes], device: torch.device) -> Rolled:
    """The state of one saved rank as its snapshot has it. `table`: what is there of what it held; `data`: its bytes,
    which become the state's own."""
    tensors = {shard.leaf.path: as_tensor(data[shard], shard) for shard in table}
    values = {name: bytes(raw) for name, raw in part.values.items()}
    return Rolled(part.step, table, tensors, values, dict(part.aliases), device)


def roll_to(
    store: Store, records: Records, run: RunId, rank: int, rolled: Rolled, target: int, count: Count
) -> Stopped:
    """Roll one saved rank forward, up to `target`, and say how far its state is proven. Where that is not `target`,
    the state is of no use."""
    base = proven = rolled.step
    why: str | None = None
    codec = Codec()
    while rolled.step < target:
        at = rolled.step
        try:
            for record in _following(store, records, run, rank, at, count):
                if record.head.step > target:
                    break
                with _threads(record.head.threads):
                    rolled.roll(opened(record, rolled, codec))
                differing = rolled.differing(record.sums)
                if not differing:
                    proven, why = rolled.step, None
                elif why is None:
                    why = f"{differing[0]} after step {rolled.step} is not what was trained"
        except (StorageError, FormatTooNew, MemoryError):
            raise
        except Exception as error:  # another torch, another machine, damage: whatever it is, no proof, and so no step
            known = isinstance(error, DamagedError | Unlike | ValueError | RuntimeError)
            return Stopped(proven, why or (str(error) if known else f"{type(error).__name__}: {error}"))
        if rolled.step == at:
            return Stopped(proven, why or f"no record leads on from step {at}")
    if proven < target:
        log.info("rank %d: the journal since step %d is proven up to step %d: %s", rank, base, proven, why)
    return Stopped(proven, why if proven < target else None)


def device_of(record: OpenRecord) -> torch.device:
    """The kind of device the rank's optimizers stepped on: checksums say where its tensors lived."""
    rows = record.head.rows or ()
    far = any(row.cls == "parameter" and record.sums[n * SUM] == DEVICE for n, row in enumerate(rows))
    if far and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _following(
    store: Store, records: Records, run: RunId, rank: int, at: int, count: Count = lambda _: None
) -> Iterator[OpenRecord]:
    """Records that follow step `at`, in an unbroken row: those of the first place that gives any. A place that is
    damaged or gone is passed over if there is another.

    Raises DamagedError: all are damaged.
    """
    last: DamagedError | None = None
    for place in records.places(rank, at):
        step = at
        try:
            if isinstance(place, Path):
                data = read_ring_record(place)
                count(len(data))
                pieces = [memoryview(data)]
            else:
                data = store.get(place)
                count(len(data))
                pieces = read_segment(data, place)
        except (DamagedError, OSError, NotFound) as error:
            last = _as_damage(error, run, rank, at + 1, str(place))
            continue
        for piece in pieces:
            try:
                record = read_record(piece, str(place))
            except DamagedError as error:
                last = error
                break
            head = record.head
            if (head.run, head.rank) != (str(run), rank):
                last = _unusable(run, rank, at + 1, f"{place} holds a record of rank {head.rank} of run {head.run}")
                break
            if head.previous == step:
                step = head.step
                yield record
        if step > at:
            return
    if last is not None:
        raise last


def _as_damage(error: Exception, run: RunId, rank: int, step: int, place: str) -> DamagedError:
    return error if isinstance(error, DamagedError) else _unusable(run, rank, step, f"{place}: {error}")


def _unusable(run: RunId, rank: int, step: int, found: str) -> DamagedError:
    return DamagedError(
        f"journal of run {run}, rank {rank}: expected a record of step {step}, found: {found}; earlier steps and "
        "snapshots are not touched by it",
        key=f"journal/{run}/{rank:05d}",
        step=step,
        rank=rank,
        expected="a record",
        found=found,
    )


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """As many threads of torch as trained: fused kernels come out otherwise where their work is cut elsewhere."""
    before = torch.get_num_threads()
    if before == count:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
