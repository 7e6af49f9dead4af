"""What a stored chunk is made of, in terms that do not depend on who stored it: boxes of leaves.

A chunk of a big leaf is one box. A chunk of a bundle is many small leaves side by side, in the order of the rank that
stored it; whoever holds those leaves in another order can still put the chunk together, and its digest tells whether
it is the same. Of a chunk of an old bundle (after a change of layout), only what is its own leaves' counts.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

from ckpt.format.manifest import Part, ShardRow
from ckpt.format.shards import DTYPES, Box
from recovery.assemble import ChunkJob
from recovery.reading import chunk_nbytes


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes ``[start, stop)`` of the row-major bytes of `box` of a leaf; they begin at byte `at` of the chunk. `rank`:
    whose value, for a per-rank leaf."""

    leaf: str
    rank: int | None
    box: Box
    start: int
    stop: int
    at: int


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """`nbytes` bytes with `chunk_digest` `digest`; `spans` cover them in order."""

    digest: str
    dtype: str
    nbytes: int
    spans: tuple[Span, ...]


class Describer:
    """Tells the spans of the chunks of one snapshot's parts."""

    def __init__(self, parts: Mapping[int, Part]) -> None:
        self._rows: dict[tuple[int, str], ShardRow] = {}
        self._members: dict[tuple[int, int], tuple[list[int], list[ShardRow]]] = {}
        bundled: dict[tuple[int, int], list[tuple[int, Box, ShardRow]]] = {}
        for rank, part in parts.items():
            for row in part.shards:
                self._rows[rank, row.leaf] = row
                if row.bundle is not None and not row.as_box.empty:
                    bundled.setdefault((rank, row.bundle[0]), []).append((row.bundle[1], row.as_box, row))
        for key, rows in bundled.items():
            rows.sort(key=lambda r: r[0])
            self._members[key] = [first for first, _, _ in rows], [row for _, _, row in rows]

    def chunk(self, job: ChunkJob) -> StoredChunk:
        """The chunk that a job would rebuild."""
        rank, size = job.place.rank, DTYPES[job.dtype].size
        nbytes = chunk_nbytes(job)
        if job.bundle is None:
            row = self._rows[rank, job.place.leaf]
            whose = rank if row.per_rank else None
            return StoredChunk(job.digest, job.dtype, nbytes, (Span(row.leaf, whose, job.box, 0, nbytes, 0),))
        (first,), (length,) = job.box.offsets, job.box.lengths
        starts, rows = self._members[rank, job.bundle]
        spans: list[Span] = []
        at = 0
        for n in range(max(bisect_right(starts, first) - 1, 0), len(rows)):
            if starts[n] >= first + length:
                break
            member = rows[n]
            a = max(first, starts[n])
            b = min(first + length, starts[n] + member.as_box.numel)
            if a < b:
                whose = rank if member.per_rank else None
                spans.append(
                    Span(
                        member.leaf,
                        whose,
                        member.as_box,
                        (a - starts[n]) * size,
                        (b - starts[n]) * size,
                        at,
                    )
                )
                at += (b - a) * size
        return StoredChunk(job.digest if job.kept is None else job.kept.digest, job.dtype, nbytes, tuple(spans))
