"""A store that somebody else writes to: documents forged so that every digest holds, and memory that is measured.

What is forged here passes all checks of bytes; only checks of meaning are left to refuse it.
"""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import zstandard

from ckpt.format.manifest import digest128
from ckpt.format.names import PartName, SnapshotId, SnapshotName
from ckpt.format.values import encode
from storage_backends.base import Store
from tests.support.stores import make_store

MB = 1 << 20
Change = Callable[[Any], object]

FIRST, NEWEST = 1.0, 2.0
"""What the leaf ``w`` is full of at steps 10 and 20."""


def victim(store: Store) -> list[SnapshotId]:
    """Two whole steps, 10 and 20: a leaf of several chunks, a small one, and values."""
    states = [{"w": np.full((64, 32), fill, np.float32), "b": np.full(5, fill)} for fill in (FIRST, NEWEST)]
    values = [{"best": encode(0.5, "best")}]
    return make_store(store, states, values=values, chunk=4096, deltas=False)


def sealed(tree: Any) -> bytes:
    """The bytes of a document that says this, or of a text that is no JSON at all."""
    body = (tree if isinstance(tree, bytes) else json.dumps(tree).encode()) + b"\n"
    return body + digest128(body).encode() + b"\n"


def tree_of(store: Store, key: str) -> Any:
    return json.loads(store.get(key)[:-33])


def reseal(store: Store, key: str, change: Change) -> None:
    """Change a sealed document."""
    tree = tree_of(store, key)
    change(tree)
    store.put(key, sealed(tree))


def forge_snapshot(store: Store, id_: SnapshotId, change: Change) -> None:
    reseal(store, SnapshotName(id_).key, change)


def forge_part(store: Store, id_: SnapshotId, change: Change) -> None:
    """Change a rank's part, and let the snapshot name what it has become."""
    tree = json.loads(zstandard.decompress(store.get(PartName(id_, 0).key)))
    change(tree)
    replace_part(store, id_, zstandard.compress(json.dumps(tree).encode()))


def replace_part(store: Store, id_: SnapshotId, data: bytes) -> None:
    """Put these bytes in the place of a part, and let the snapshot name them."""
    key = PartName(id_, 0).key
    store.put(key, data)
    forge_snapshot(store, id_, lambda tree: tree["parts"].__setitem__(0, [key, len(data), digest128(data)]))


def zstd_claiming(claim: int | None, content: bytes = b"", repeat: int = 0) -> bytes:
    """A zstd frame of `content` (or of `repeat` zeros, compressed piece by piece) whose header claims `claim` bytes."""
    sink = zstandard.ZstdCompressor(level=1, write_content_size=False).compressobj()
    parts = [sink.compress(content)] if content else [sink.compress(bytes(MB)) for _ in range(repeat // MB)]
    body = b"".join([*parts, sink.flush()])
    if claim is None:
        return body
    # RFC 8878 §3.1.1: magic, descriptor, window; with an 8-byte content size the descriptor's upper bits are 11.
    descriptor, window = body[4], body[5:6]
    assert not descriptor & 0xE3, "a frame with a window, and no size, dictionary or single segment"
    return body[:4] + bytes([descriptor | 0xC0]) + window + claim.to_bytes(8, "little") + body[6:]


@contextmanager
def at_most(limit: int) -> Iterator[None]:
    """What happens inside allocates at most so many bytes at a time (Python's, numpy's and zstd's results)."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= limit, f"{peak / MB:.0f} MB where at most {limit / MB:.0f} MB are expected"
