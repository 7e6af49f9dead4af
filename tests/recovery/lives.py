"""Live torch states onto a store by the direct writer, so that restoring is tested without saving."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ckpt.format import values
from ckpt.format.names import SnapshotId
from ckpt.leaves import Flattener
from storage_backends.base import Store
from tests.support.stores import DirectWriter, Raw, Split, State, by_rows
from tests.support.training import Training, raw


def stored(state: Mapping[str, object], **more: Any) -> tuple[State, dict[str, bytes], dict[str, str]]:
    """Leaves, values and aliases of a live state, as `DirectWriter.step` takes them; `more`: further values."""
    flat = Flattener(dict(state)).flatten()
    leaves = {
        live.shard.leaf.path: Raw(live.shard.leaf.dtype, live.shard.leaf.shape, raw(live.tensor))
        for live in flat.shards
    }
    encoded = {name: values.encode(value, name) for name, value in {**flat.values, **more}.items()}
    return leaves, encoded, flat.aliases


def classes(state: Mapping[str, object]) -> dict[str, str]:
    return {live.shard.leaf.path: live.shard.leaf.cls for live in Flattener(dict(state)).flatten().shards}


def train_and_store(
    store: Store,
    steps: Sequence[int],
    *,
    ranks: int = 1,
    own: Callable[[int], Mapping[str, object]] = lambda rank: {"$random": [rank]},
    split: Split = by_rows,
    blobs_per_pack: int = 64,
) -> tuple[dict[int, dict[str, bytes]], list[SnapshotId]]:
    """Train and store at these steps (ascending). Every rank has the same state, which all of them store together, and
    its own further values. Returns step → the bytes then, and the snapshots."""
    training = Training()
    training.train(0)
    writer = DirectWriter(
        store, ranks=ranks, chunk=4096, split=split, classes=classes(training.state), blobs_per_pack=blobs_per_pack
    )
    writer.begin()
    then, ids, at = {}, [], 1
    for step in steps:
        while at < step:
            training.train(at)
            at += 1
        each = [stored(training.state, **own(rank)) for rank in range(ranks)]
        leaves, _, aliases = each[0]
        ids.append(writer.step(step, leaves, values=[v for _, v, _ in each], aliases=aliases))
        then[step] = training.bytes()
    return then, ids
