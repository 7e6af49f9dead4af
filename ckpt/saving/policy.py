"""When a delta is worth its reads, how long a blob will live, and which packs are hardly worth keeping. Pure.

A chunk's chain is a keyframe and deltas; whoever restores it reads all of them. So a delta is used only while the
chain, this delta included, stays within `amplification` times what one keyframe would cost, and within `MAX_BLOBS`
(every blob is a row in every part that names it).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import xxhash

from ckpt.format.manifest import Blob, Chunk
from ckpt.format.names import PackName, SnapshotId, packs_prefix
from ckpt.format.pack import TEXT

MAX_BLOBS = 32
"""Blobs of one chunk, the keyframe included."""

LEAST_SCALE = 0.1
"""The smallest scale of a first chain's limits. Not 0: the first saves after a full one would then already hold
keyframes, which dwarf the deltas of a state that changes little. Not 0.5: all keyframes would then fall into one half
of a cycle, and documents and saves would swell and shrink with it."""

ALIVE = 0.25
"""A pack is nearly dead when storing again what still leans on it costs less than this share of its length."""

NEEDED = 1 / 3
"""Blobs that still need a pack are moved out of it, as they are, when they take less than this share of its length:
measured, with rarely touched rows, 2.2 times the live bytes on disk at worst became 1.5; half of it would write more
than it frees."""

MOVED = 0.05
"""Of the captured bytes, how many may be stored again in one save to let nearly dead packs go, whether as keyframes or
as they are."""

_GOLDEN = 0.6180339887498949


@dataclass(frozen=True, slots=True)
class Rule:
    """The bound on reads: stored bytes of a whole chain over those of a keyframe, and blobs per chain."""

    amplification: float
    blobs: int = MAX_BLOBS

    def admits(self, chain: Sequence[Blob], delta: float, keyframe: float) -> bool:
        """Whether a delta of `delta` stored bytes may be added to `chain`, when a keyframe would take `keyframe`."""
        if not chain or len(chain) >= self.blobs:
            return False
        spent = sum(blob.size for blob in chain)
        return spent + delta <= self.amplification * min(chain[0].size, keyframe)

    def most(self, chain: Sequence[Blob]) -> float:
        """Stored bytes that a delta on `chain` may have at most, were a keyframe as large as the chain's."""
        return self.amplification * chain[0].size - sum(blob.size for blob in chain) if chain else 0.0

    def scaled(self, scale: float) -> Rule:
        """Both limits, as far as they exceed a bare keyframe, times `scale`."""
        return replace(
            self,
            amplification=1 + (self.amplification - 1) * scale,
            blobs=1 + int((self.blobs - 1) * scale),
        )


def first_scale(name: str, index: int) -> float:
    """By how much a chunk's first chain is shortened, in (LEAST_SCALE, 1]: all chunks begin with the first save, and
    without this all would also end together. A hash of the leaf plus golden-ratio steps, rather than a hash of both:
    the chunks of one leaf are then spread evenly even when they are few."""
    at = (xxhash.xxh3_64_intdigest(name.encode()) / 2**64 + index * _GOLDEN) % 1.0
    return 1.0 - at * (1.0 - LEAST_SCALE)


class Lifetime(IntEnum):
    """How long a blob is expected to be named; packs hold blobs of one lifetime, so that they die as one."""

    DELTA = 0
    BRIEF = 1
    """A keyframe of a chunk whose last keyframe lived for one save only."""
    LASTING = 2
    MOVED = 3
    """Has outlived its pack once. Not with keyframes: those of rows that are touched now and then still go before."""


def lifetime(chain: Sequence[Blob], delta: bool, reference: SnapshotId | None) -> Lifetime:
    """Of a blob about to be stored for a chunk whose blobs in the reference are `chain` (empty: it is new there)."""
    if delta:
        return Lifetime.DELTA
    if chain and reference is not None and chain[0].pack.startswith(packs_prefix(reference)):
        return Lifetime.BRIEF
    return Lifetime.LASTING


def nearly_dead(
    table: Collection[Chunk], packs: Mapping[str, int], rank: int, breathe: Callable[[], None]
) -> frozenset[str]:
    """The packs of this rank, of those in `packs`, that `table` keeps alive for little: every chunk that leans on one
    costs a keyframe to move away, and all of them together cost less than ALIVE of the pack's length.

    Counted in keyframes rather than in live bytes of the pack: the last chains that lean on a pack of deltas hold few
    bytes of it, but to move them means as many keyframes, far more than the pack. Packs of other ranks, and those a
    clipped chunk leans on, are left alone: they are of another layout, and their other readers are not known here.
    """
    cost: dict[str, int] = {}
    shared: set[str] = set()
    seen: set[str] = set()
    for chunk in table:
        if chunk.digest in seen:
            continue
        seen.add(chunk.digest)
        for pack in {blob.pack for blob in chunk.blobs}:
            cost[pack] = cost.get(pack, 0) + chunk.blobs[0].size
            if chunk.of is not None:
                shared.add(pack)
        breathe()
    found = set()
    for pack, size in cost.items():
        name = PackName.parse(pack)
        if name is not None and name.rank == rank and pack not in shared and size < ALIVE * packs.get(pack, 0):
            found.add(pack)
        breathe()
    return frozenset(found)


def hardly_alive(
    chains: Iterable[Chunk | None], packs: Mapping[str, int], rank: int, breathe: Callable[[], None]
) -> list[tuple[str, list[Blob]]]:
    """The packs of this rank, of those in `packs`, of which so few bytes are needed that to move them costs less than
    NEEDED of the pack's length, with those blobs; the emptiest first. As in `nearly_dead`, packs that a clipped chunk
    leans on are left alone.
    """
    live: dict[str, dict[Blob, None]] = {}
    shared: set[str] = set()
    for chunk in chains:
        if chunk is not None:
            for blob in chunk.blobs:
                live.setdefault(blob.pack, {})[blob] = None
                if chunk.of is not None:
                    shared.add(blob.pack)
        breathe()
    found: list[tuple[float, str]] = []
    for pack, blobs in live.items():
        name, size = PackName.parse(pack), packs.get(pack, 0)
        cost = sum(blob.size + TEXT for blob in blobs)
        if name is not None and name.rank == rank and pack not in shared and cost < NEEDED * size:
            found.append((cost / size, pack))
        breathe()
    return [(pack, list(live[pack])) for _, pack in sorted(found)]
