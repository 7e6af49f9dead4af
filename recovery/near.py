"""What a read gets from mirrors on this node, its own first: the cheapest sources, which no other rank need hear of."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ckpt.format.names import SnapshotId
from recovery.assemble import ChunkJob, Wanted
from recovery.boxes import Bytes
from recovery.mirrored import HeldChunk
from recovery.parallel import THREADS, in_threads
from recovery.reading import Delivered, Reading
from recovery.spans import Describer
from recovery.survey import Holdings

OWN, NODE = "own mirror", "node"
"""Names of the sources in `Restored.bytes`."""


def from_node(
    reading: Reading,
    describer: Describer,
    holdings: Holdings,
    id_: SnapshotId,
    *,
    threads: int = THREADS,
    count: Callable[[str, int], None],
) -> Iterator[tuple[Wanted, Bytes]]:
    """Fill in every lacking chunk that a mirror on this node holds, digests checked; yields the boxes this makes whole.

    Args:
        describer: of the parts that the reading's plan was made of.
        count: told source and bytes, on the caller's thread.
    """

    def one(job: ChunkJob) -> tuple[HeldChunk | None, Delivered]:
        chunk = describer.chunk(job)
        found: list[HeldChunk] = []

        def fill(out: Bytes) -> bool:
            held = holdings.take(chunk, id_, out)
            found.extend([held] if held is not None else [])
            return held is not None

        finished = reading.deliver(job, fill)
        return (found[0] if found else None), finished or []

    jobs = reading.lacking if any(slot.places is not None for slot in holdings.slots) else ()
    for held, finished in in_threads(jobs, one, threads=min(threads, max(len(jobs), 1))):
        if held is not None:
            own = all(slot.rank == holdings.prefer for slot in held.slots)
            count(OWN if own else NODE, held.chunk.nbytes)
        yield from finished
