"""Whether the journal's segments are what was written (no torch). Whether they lead to the states that were trained,
only a replay can tell, and every restore does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ckpt.errors import DamagedError
from ckpt.format.journal import read_record, read_segment
from ckpt.format.names import SegmentName
from recovery.findings import Finding
from recovery.parallel import in_threads
from storage_backends.base import NotFound, Store


def segment_findings(store: Store, keys: Mapping[str, int], threads: int) -> Iterator[Finding]:
    """Every record of every segment against its digest, and against the segment's name.

    Raises:
        StorageError: the store does not answer.
    """
    names = [name for key in sorted(keys) if (name := SegmentName.parse(key)) is not None]

    def one(name: SegmentName) -> Finding | None:
        try:
            return _problem(name, store.get(name.key))
        except NotFound:
            return None  # pruned since it was listed

    for finding in in_threads(names, one, threads=threads):
        if finding is not None:
            yield finding


def _problem(name: SegmentName, data: bytes) -> Finding | None:
    steps = tuple(range(name.previous + 1, name.step + 1))
    try:
        at = name.previous
        for piece in read_segment(data, name.key):
            head = read_record(piece, name.key).head
            found = (head.run, head.rank, head.previous)
            if found != (expected := (str(name.run), name.rank, at)):
                text = f"{name.key}: expected a record of (run, rank, previous step) {expected}, found {found}"
                return Finding("error", name.key, head.step, name.rank, None, text, steps)
            at = head.step
    except DamagedError as error:
        text = f"{error}; steps {steps[0]} to {name.step} cannot be replayed, snapshots are not touched by it"
        return Finding("error", name.key, steps[0], name.rank, None, text, steps)
    if at != name.step:
        text = f"{name.key}: its records end at step {at}"
        return Finding("error", name.key, at, name.rank, None, text, steps)
    return None
