"""What can be told of an encrypted store without its key: whether each object is what was written, by itself.

Whoever looks after disks need not be able to read what is on them. Every document ends in a digest of its stored bytes
and says in the clear where it belongs; every pack has its digest in its name. What they say together is not looked at.
"""

from __future__ import annotations

from collections.abc import Iterator

from ckpt.errors import DamagedError
from ckpt.format.documents import check_digest
from ckpt.format.key import head_of
from ckpt.format.names import (
    ALIVE,
    JOURNAL,
    PACKS,
    PARTS,
    PINS,
    PRUNES,
    RUNS,
    SNAPSHOTS,
    PackName,
    PartName,
    SnapshotName,
)  # fmt: skip
from recovery.deep import pack_problem
from recovery.findings import Finding
from recovery.parallel import THREADS, in_threads
from storage_backends.base import Entry, NotFound, Refused, Store

DOCUMENTS = (RUNS, ALIVE, PARTS, SNAPSHOTS, PINS, PRUNES, JOURNAL)


def scrub(store: Store, *, deep: bool = False, threads: int = THREADS) -> Iterator[Finding]:
    """Check every object of an encrypted store by itself; `deep`: packs too. Writes nothing.

    Raises:
        StorageError: the store does not answer: nothing can be said.
    """

    def one(entry: Entry) -> Finding | None:
        problem = _pack(store, entry) if entry.key.startswith(PACKS) else _document(store, entry)
        return None if problem is None else _finding(entry.key, problem)

    todo = [e for e in store.list("") if e.key.startswith(DOCUMENTS) or (deep and e.key.startswith(PACKS))]
    for finding in in_threads(todo, one, threads=min(threads, max(len(todo), 1))):
        if finding is not None:
            yield finding


def _pack(store: Store, entry: Entry) -> str | None:
    return pack_problem(store, entry.key, entry.size, header=False)


def _document(store: Store, entry: Entry) -> str | None:
    try:
        data = store.get(entry.key)
    except NotFound:
        return None  # removed since it was listed
    except Refused as error:
        return str(error)
    try:
        check_digest(data, entry.key)
    except DamagedError as error:
        return f"expected {error.expected}, found {error.found}"
    head = head_of(data)
    if head is None:
        return "expected an encrypted document, found one in the clear: nobody with the key wrote it"
    if head.place != entry.key:
        return f"it is the document that belongs at {head.place}; was it renamed, copied or swapped?"
    return None


def _finding(key: str, problem: str) -> Finding:
    name = PackName.parse(key) or PartName.parse(key)
    snapshot = SnapshotName.parse(key)
    step = snapshot.id.step if snapshot else name.id.step if name else None
    return Finding("error", key, step, None if name is None else name.rank, None, f"{key}: {problem}")
