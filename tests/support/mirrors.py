"""Mirrors as a dead job leaves them, made from what it stored: `leave_mirror` needs no job."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from ckpt.format.layout import lay_out
from ckpt.format.names import SnapshotId
from ckpt.format.shards import Leaf, Shard
from ckpt.mirror.folders import store_identity
from ckpt.mirror.mirror import Mirror
from ckpt.mirror.records import describe
from recovery.assemble import Wanted
from recovery.read import open_snapshot, read_parts
from recovery.shards import read_shards
from recovery.survey import Holdings, survey
from storage_backends.base import Store


def leave_mirror(base: Path, store: Store, id_: SnapshotId, rank: int, *, also: Iterable[int] = ()) -> Path:
    """The mirror file of one rank below `base`, with what it stored at a step, and what the ranks `also` did, as a node
    mirrors replicas."""
    snapshot = open_snapshot(store, id_).snapshot
    parts = read_parts(store, snapshot)
    wanted: dict[Shard, Wanted] = {}
    for owner in dict.fromkeys((rank, *also)):
        for row in parts[owner].shards:
            shard = Shard(Leaf(row.leaf, row.cls, row.dtype, row.shape), row.as_box, row.per_rank)
            if owner == rank or not row.per_rank:
                wanted[shard] = Wanted(shard, owner if row.per_rank else None)
    read = dict(read_shards(store, parts, list(wanted.values()), threads=1))
    layout = lay_out(wanted, parts[rank].chunk)
    mirror = Mirror(base, store_identity(store.url), rank=rank, world_size=snapshot.world_size)
    data = mirror.free(None, layout.nbytes)
    data[:] = 0
    for region in layout.regions:
        data[region.start : region.start + region.nbytes] = read[wanted[region.shard]]
    mirror.finish(data, id_, describe(((r.shard, r.start) for r in layout.regions), layout.nbytes))
    path = mirror.path
    assert path is not None, mirror.why
    mirror.close(remove=False)
    return path


def look(base: Path, store: Store, rank: int) -> Holdings:
    """What rank `rank` of the next job finds there."""
    return survey([base], store_identity(store.url), prefer=rank)


def spoil(path: Path, sample: bytes) -> None:
    """Flip one bit in every place where these bytes lie in a mirror."""
    data = np.fromfile(path, np.uint8)
    raw, at, hits = data.tobytes(), 0, 0
    while (at := raw.find(sample, at)) >= 0:
        data[at] ^= 1
        at, hits = at + 1, hits + 1
    assert hits, "the sample is not there: nothing was damaged"
    data.tofile(path)
