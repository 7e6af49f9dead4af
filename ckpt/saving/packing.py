"""Blobs into packs, and packs onto the store while encoding goes on.

A pack holds blobs of one expected lifetime and one leaf class, so that it dies as one and prune frees it. Packs that
would come out tiny are put together, across classes but never across lifetimes: a save's requests must not grow with
the classes of its leaves, and a keyframe that stays must not share a pack with ones that go at the next save.

All methods run on the writer's thread; only the puts run on the upload crew.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from ckpt.format.manifest import Blob
from ckpt.format.names import PackName, SnapshotId, pack_place
from ckpt.format.pack import TEXT_BOUND, PackBuilder
from ckpt.history.keyed import key_of
from ckpt.saving.policy import Lifetime
from ckpt.saving.threads import Crew, Pending
from storage_backends.base import Store

TINY = 1 << 20
"""A group of fewer bytes at the end of a save shares its pack."""

LEAST, MOST = 4 << 20, 16 << 20
"""Bytes of a pack at most, between these by the size of the state: small enough that uploads begin early and the last
ones are short, large enough that requests are few. From 32 MB on glibc maps fresh memory for each, whose first touch
costs several times the copy."""

Group: TypeAlias = tuple[Lifetime, str]


def pack_limit(nbytes: int) -> int:
    """Bytes of a pack, of the saves of a rank that captures so many: about a dozen where that is neither small nor
    large."""
    return min(max(nbytes // 12, LEAST), MOST)


@dataclass(frozen=True, slots=True, eq=False)
class Parcel:
    """A blob to be packed, and what its pack's header says of it (`PackBuilder.add`). `of`: whose it is, the index of a
    piece; or the blob that it is moved from."""

    of: int | Blob
    data: bytes
    kind: int
    digest: str
    chunk_digest: str
    dtype: str
    base_digest: str | None


@dataclass(slots=True)
class _Open:
    """A pack to be: blobs gathered, not yet joined."""

    blobs: list[Parcel] = field(default_factory=list)
    size: int = 0


@dataclass(frozen=True, slots=True)
class Packed:
    """What became of the blobs: where each lies (by `Parcel.of`), and the packs with their lengths."""

    blobs: dict[int | Blob, Blob]
    packs: dict[str, int]


class Outbox:
    """The packs of one save. Encoded bytes that are not on the store yet stay below `memory`, plus one pack while it
    is joined: `add` waits for uploads where they would not."""

    def __init__(
        self,
        store: Store,
        crew: Crew[None],
        id: SnapshotId,  # noqa: A002 - the word of the format
        rank: int,
        *,
        pack_limit: int,
        memory: int,
        breathe: Callable[[], None],
    ) -> None:
        self._store = store
        self._crew = crew
        self._id = id
        self._rank = rank
        self._pack_limit = pack_limit
        self._memory = memory
        self._breathe = breathe
        self._groups: dict[Group, _Open] = {}
        self._gathered = 0
        self._flying: deque[tuple[Pending[float], int]] = deque()
        self._in_flight = 0
        self._given_up = False
        self._packed = Packed({}, {})
        self.seconds = 0.0

    def add(self, blob: Parcel, group: Group) -> None:
        """Take a blob in. Raises what an upload raised, at the latest in `finish`."""
        while self._flying and self._flying[0][0].over:
            self._land()
        size = len(blob.data) + TEXT_BOUND
        pack = self._groups.setdefault(group, _Open())
        if pack.size + size > self._pack_limit:
            self._send(pack)
        self._make_room(size)
        pack.blobs.append(blob)
        pack.size += size
        self._gathered += size

    def finish(self) -> Packed:
        """Send what is left, wait for every upload, and say where all blobs lie."""
        for pack in self._together():
            self._send(pack)
        while self._flying:
            self._land()
        return self._packed

    def give_up(self) -> None:
        """Send nothing more; wait for the puts under way, which the store bounds in time. What landed stays behind
        unnamed, and prune removes it."""
        self._given_up = True
        for pending, _ in self._flying:
            pending.wait()
        self._flying.clear()
        self._groups.clear()

    def _make_room(self, size: int) -> None:
        # Half of the memory for packs that fill, half for packs that fly: else every group could be half full, none
        # of them flying, and the encoders would stand still.
        while self._gathered and self._gathered + size > self._memory // 2:
            self._send(max(self._groups.values(), key=lambda pack: pack.size))
        while self._flying and self._gathered + self._in_flight + size > self._memory:
            self._land()

    def _together(self) -> list[_Open]:
        """The packs that are left, tiny ones of a lifetime as one (or several, where one would be too long)."""
        packs: list[_Open] = []
        shared: dict[Lifetime, _Open] = {}
        for (lifetime, _), pack in sorted(self._groups.items()):
            together = shared.get(lifetime)
            if pack.size >= TINY:
                packs.append(pack)
            elif together is None or together.size + pack.size > self._pack_limit:
                shared[lifetime] = pack
                packs.append(pack)
            else:
                together.blobs.extend(pack.blobs)
                together.size += pack.size
                pack.blobs, pack.size = [], 0
        return packs

    def _send(self, pack: _Open) -> None:
        """Join a pack and have it uploaded; it is empty afterwards."""
        blobs, size = pack.blobs, pack.size
        pack.blobs, pack.size = [], 0
        self._gathered -= size
        if not blobs:
            return
        n = len(self._packed.packs)
        builder = PackBuilder(key_of(self._store), pack_place(self._id, self._rank, n))
        for b in blobs:
            builder.add(
                b.data,
                kind=b.kind,
                digest=b.digest,
                chunk_digest=b.chunk_digest,
                dtype=b.dtype,
                base_digest=b.base_digest,
            )
            self._breathe()
        done = builder.finish()
        del builder
        key = PackName(self._id, self._rank, n, done.digest).key
        self._packed.packs[key] = len(done.data)
        # Popped, because thousands of blobs freed at once would hold the GIL as long as a loop over them.
        for start, stop in reversed(done.ranges):
            b = blobs.pop()
            self._packed.blobs[b.of] = Blob(key, start, stop, b.kind, b.digest)
            self._breathe()
        self._flying.append((self._crew.submit(lambda _: self._put(key, done.data)), len(done.data)))
        self._in_flight += len(done.data)

    def _put(self, key: str, data: bytes) -> float:
        """On the upload crew."""
        if self._given_up:
            return 0.0
        started = time.perf_counter()
        self._store.put(key, data)
        return time.perf_counter() - started

    def _land(self) -> None:
        """Wait for the oldest upload; raises what it raised."""
        pending, size = self._flying.popleft()
        self._in_flight -= size
        self.seconds += pending.result()
