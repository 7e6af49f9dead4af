"""Mirrors by hand: small layouts, known bytes, and processes that die while they write."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ckpt.format.layout import Layout, lay_out
from ckpt.format.names import RunId, SnapshotId
from ckpt.format.shards import Leaf, Shard, whole
from ckpt.history.runs import Identity, identity
from ckpt.mirror.folders import store_identity
from ckpt.mirror.mirror import Mirror
from ckpt.mirror.records import Described, describe, read_head, read_layout, read_slot

URL = "s3://bucket/run7"
STORE = store_identity(URL)
RUN = RunId(1, "0badcafe")
ME = identity(None)
ELSEWHERE = dataclasses.replace(ME, pid_space="pid:[1]")


def layout_of(rows: int = 64, leaves: int = 3) -> Layout:
    return lay_out(
        [Shard(Leaf(f"model.{i}.weight", "parameter", "float32", (rows, 32)), whole((rows, 32))) for i in range(leaves)]
    )


def described(layout: Layout) -> Described:
    return describe(((region.shard, region.start) for region in layout.regions), layout.nbytes)


def mirror(base: Path | None, rank: int = 0, *, world_size: int = 2, me: Identity | None = None) -> Mirror:
    return Mirror(base, STORE, rank=rank, world_size=world_size, me=me, wall=lambda: 1e9)


def at(step: int) -> SnapshotId:
    return SnapshotId(RUN, step)


def fill(into: Mirror, layout: Layout, step: int, reference: np.ndarray | None = None) -> np.ndarray:
    """One save's worth of a mirror: every byte is the step."""
    data = into.free(reference, layout.nbytes)
    data[:] = step
    into.finish(data, at(step), described(layout))
    return data


def files(base: Path) -> list[Path]:
    return sorted(base.glob("*/*.mirror"))


def whole_slots(path: Path) -> dict[int, int]:
    """What a reader that comes now finds: slot number → step of every whole slot, of `fill`. AssertionError if one is
    not what it says."""
    fd = os.open(path, os.O_RDONLY)
    try:
        head = read_head(fd)
        found = {}
        for number in (0, 1):
            record = read_slot(fd, number, head)
            if record is not None:
                data = np.frombuffer(os.pread(fd, record.nbytes, head.slots[number]), np.uint8)
                assert len(read_layout(fd, record)) and (data == record.step).all(), f"slot {number}: {record}"
                found[number] = record.step
        return found
    finally:
        os.close(fd)


def in_child(work: Callable[[], object]) -> None:
    """Run it in a forked process that then is no more: whose mirrors are dead. What fails there fails here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # it does nothing but this, whatever threads there are
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
