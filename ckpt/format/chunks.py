"""Chunks as all floors pass them around: where their blobs lie, and what they decode to."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import Struct

from ckpt.format.shards import Box, Shard

# gc=False, here and for the rows of parts: there are hundreds of thousands of these, they hold only text and numbers
# and can form no cycle, and a collection that walks them holds the GIL for tens of milliseconds.


class Blob(Struct, frozen=True, gc=False):
    """Where one encoded chunk lies: bytes ``[start, stop)`` of the pack object `pack` (its key), codec `kind`
    (codec.KINDS), and the xxh3-64 of those bytes."""

    pack: str
    start: int
    stop: int
    kind: int
    digest: str

    @property
    def size(self) -> int:
        return self.stop - self.start


class Chunk(Struct, frozen=True, gc=False):
    """What a chunk needs to be rebuilt: every blob, base first; the digest of the result (`chunk_digest`); and `of`,
    the box the blobs decode to, where it is not the chunk's own (after a change of layout)."""

    digest: str
    blobs: tuple[Blob, ...]
    of: Box | None = None


@dataclass(frozen=True, slots=True, eq=False)
class OldBundle:
    """A bundle of an older layout, of `length` elements, that is listed whole for those of its elements which are still
    in use. `kept`: for each chunk, `chunk_digest` of this rank's own bytes in it, side by side."""

    length: int
    chunks: tuple[Chunk, ...]
    kept: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Loan:
    """One bundle of a layout of which nothing has changed since the layout did (loans.py). It is not listed; its
    `members`, in order, lie in old `bundles` instead: at `places`, each (number in `bundles`, first element)."""

    members: tuple[Shard, ...]
    places: tuple[tuple[int, int], ...]
    bundles: tuple[OldBundle, ...]

    @property
    def packs(self) -> frozenset[str]:
        """What the old bundles need."""
        return frozenset(blob.pack for bundle in self.bundles for chunk in bundle.chunks for blob in chunk.blobs)
