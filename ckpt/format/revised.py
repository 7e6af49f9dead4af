"""A part as another revision describes it: other rows, or the same ones with their chunks in other places. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from msgspec.structs import replace

from ckpt.format.chunks import Chunk
from ckpt.format.parts import BlobRow, BundleRow, ChunkRow, Part, ShardRow


def described(
    part: Part,
    revision: int,
    bundles: Sequence[tuple[BundleRow, Sequence[Chunk]]],
    shards: Sequence[tuple[ShardRow, Sequence[Chunk]]],
    sizes: Mapping[str, int],
    breathe: Callable[[], None],
) -> Part:
    """`part` as another revision: of these rows, with these chunks. `sizes`: key → length of every pack they need."""
    names = sorted({blob.pack for _, table in (*bundles, *shards) for chunk in table for blob in chunk.blobs})
    number = {key: i for i, key in enumerate(names)}

    def rows(table: Sequence[Chunk]) -> tuple[ChunkRow, ...]:
        breathe()
        return tuple(
            ChunkRow(
                chunk.digest,
                tuple(BlobRow(number[b.pack], b.start, b.stop, b.kind, b.digest) for b in chunk.blobs),
                None if chunk.of is None else (chunk.of.offsets, chunk.of.lengths),
            )
            for chunk in table
        )

    return replace(
        part,
        revision=revision,
        packs=tuple((key, sizes[key]) for key in names),
        bundles=tuple(replace(row, chunks=rows(table)) for row, table in bundles),
        shards=tuple(replace(row, chunks=rows(table)) for row, table in shards),
    )
