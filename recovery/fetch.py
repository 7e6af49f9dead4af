"""Blobs from packs: nearby ranges merged into few requests, every blob's length and digest checked before use.

What is wrong with a blob is returned as a `Fault`, not raised: a restore stops at the first one and knows which leaf it
belongs to, `verify` wants them all. Errors of the store itself (`Unavailable`, `Refused` for rights) are raised: an
unreachable store is not damage.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from ckpt.format.key import Key
from ckpt.format.manifest import Blob, digest64
from ckpt.format.pack import LEAD, stray_place
from ckpt.history.keyed import key_of
from storage_backends.base import NotFound, Refused, StorageError, Store
from storage_backends.copies import Copied, each_copy

GAP = 64 * 1024
"""Most bytes between two blobs that are read and dropped rather than asked for separately: at 20 ms a request and
100 MB/s a request is worth 2 MB, but on a local disk only kilobytes."""

WASTE = 0.02
"""Most bytes of gaps that are read and dropped, as a share of the blobs asked for together (K2 has a bound). The
smallest gaps are read through first, because each saves one request whatever its size."""

REQUEST = 8 * 1024 * 1024
"""Bytes asked for at once, unless a single blob is larger."""


@dataclass(frozen=True, slots=True)
class Request:
    """One read: bytes ``[start, stop)`` of `pack`, which hold `blobs` (sorted by start)."""

    pack: str
    start: int
    stop: int
    blobs: tuple[Blob, ...]


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with one blob. `missing`: its pack is not there at all (pruned, perhaps)."""

    expected: str
    found: str
    missing: bool = False


@dataclass(slots=True)
class Tally:
    """What was read so far, by all threads together."""

    requests: int = 0
    bytes: int = 0
    blobs: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, *, requests: int = 0, read: int = 0, blobs: int = 0) -> None:
        with self._lock:
            self.requests += requests
            self.bytes += read
            self.blobs += blobs


@dataclass(frozen=True, slots=True)
class Fetched:
    """Encoded bytes of the good blobs, and what is wrong with the others."""

    data: dict[Blob, memoryview]
    faults: dict[Blob, Fault]


def merge(blobs: Iterable[Blob], *, gap: int = GAP, limit: int = REQUEST, waste: float = WASTE) -> Iterator[Request]:
    """The requests that read all these blobs (duplicates once), by pack and position.

    Blobs of a pack that lie at most `gap` bytes apart (or overlap: equal chunks share blobs) go into one request of at
    most `limit` bytes, while the gaps are at most `waste` of what is asked for; a blob is never split.
    """
    ordered = sorted(set(blobs), key=lambda b: (b.pack, b.start, b.stop))
    apart = _apart(ordered, gap, waste)
    run: list[Blob] = []
    stop = 0
    for n, blob in enumerate(ordered):
        if run and (n in apart or blob.stop - run[0].start > limit):
            yield Request(run[0].pack, run[0].start, stop, tuple(run))
            run = []
        stop = max(stop, blob.stop) if run else blob.stop
        run.append(blob)
    if run:
        yield Request(run[0].pack, run[0].start, stop, tuple(run))


def _apart(ordered: Sequence[Blob], gap: int, waste: float) -> set[int]:
    """Numbers of the blobs that are not read together with what lies before them."""
    apart: set[int] = set()
    gaps: list[tuple[int, int]] = []
    reach = 0
    for n, blob in enumerate(ordered):
        if n == 0 or blob.pack != ordered[n - 1].pack or blob.start - reach > gap:
            apart.add(n)
            reach = blob.stop
            continue
        if blob.start > reach:
            gaps.append((blob.start - reach, n))
        reach = max(reach, blob.stop)
    left = waste * sum(blob.size for blob in ordered)
    for size, n in sorted(gaps):
        left -= size
        if left < 0:
            apart.add(n)
    return apart


def fetch(
    store: Store, blobs: Iterable[Blob], tally: Tally | None = None, *, limit: int = REQUEST, opened: bool = True
) -> Fetched:
    """Read these blobs, request after request on this thread.

    Where the store holds copies, a blob that is wrong in one is taken from the next.

    What is held at most: the blobs asked for, a third more for gaps between them, and one request of `limit` bytes.
    """
    fetched = _fetch(store, blobs, tally, limit)
    if fetched.faults and isinstance(store, Copied):
        _from_other_copies(store, fetched, tally)
    if (key := key_of(store)) is not None:
        _explain(store, key, fetched)
        if opened:
            _open(key, fetched)
    return fetched


def _open(key: Key, fetched: Fetched) -> None:
    """Blob by blob, each freed as soon as it is open."""
    for blob, stored in list(fetched.data.items()):
        try:
            fetched.data[blob] = memoryview(key.open_blob(stored, blob.kind))
        except ValueError as error:
            del fetched.data[blob]
            fetched.faults[blob] = Fault(f"a blob that key {key.id} opens", str(error))


def _explain(store: Store, key: Key, fetched: Fetched) -> None:
    """Of an encrypted store it can be told what a blob with a wrong digest is: one that belongs elsewhere opens all the
    same, and a pack says where it belongs."""
    strays: dict[str, str | None] = {}
    for blob, fault in fetched.faults.items():
        if fault.missing:
            continue
        with contextlib.suppress(StorageError):
            if blob.pack not in strays:
                strays[blob.pack] = stray_place(store.get_range(blob.pack, 0, LEAD), blob.pack)
            if (place := strays[blob.pack]) is not None:
                found = f"{fault.found}: it is the pack that belongs at {place}; was it renamed, copied or swapped?"
                fetched.faults[blob] = replace(fault, found=found)
            elif _opens(key, store.get_range(blob.pack, blob.start, blob.stop), blob.kind):
                found = f"{fault.found}: it is a whole blob of this store that belongs elsewhere"
                fetched.faults[blob] = replace(fault, found=found)


def _opens(key: Key, stored: bytes, kind: int) -> bool:
    try:
        key.open_blob(stored, kind)
    except ValueError:
        return False
    return True


def _from_other_copies(store: Copied, fetched: Fetched, tally: Tally | None) -> None:
    """Blob by blob: two copies of a pack may each have lost something else."""
    for blob in list(fetched.faults):
        for keeper, place in each_copy(store, blob.pack):
            try:
                read = place.get_range(blob.pack, blob.start, blob.stop)
            except StorageError:
                continue
            if tally is not None:
                tally.add(requests=1, read=len(read), blobs=1)
            if digest64(read) == blob.digest:
                fetched.data[blob] = memoryview(read)
                del fetched.faults[blob]
                keeper.slips.note(blob.pack)
                break


def _fetch(store: Store, blobs: Iterable[Blob], tally: Tally | None, limit: int) -> Fetched:
    data: dict[Blob, memoryview] = {}
    faults: dict[Blob, Fault] = {}
    for request in merge(blobs, limit=limit):
        try:
            read = store.get_range(request.pack, request.start, request.stop)
        except NotFound:
            faults.update(dict.fromkeys(request.blobs, Fault("a pack", "none", missing=True)))
            continue
        except Refused:
            # Either the pack is shorter than its part says, or reading is not allowed: only the first is damage.
            if (length := _length(store, request.pack)) is None or length >= request.stop:
                raise
            faults.update(_cut(store, request.blobs, length, data, tally))
            continue
        if tally is not None:
            tally.add(requests=1, read=len(read), blobs=len(request.blobs))
        if len(read) != request.stop - request.start:
            found = f"{len(read)} of {request.stop - request.start} bytes"
            faults.update(dict.fromkeys(request.blobs, Fault(f"bytes {request.start}:{request.stop}", found)))
            continue
        _check(request, memoryview(read), data, faults)
    return Fetched(data, faults)


def _check(request: Request, read: memoryview, data: dict[Blob, memoryview], faults: dict[Blob, Fault]) -> None:
    useful = sum(blob.size for blob in request.blobs)
    sparse = 4 * useful < 3 * read.nbytes  # a slice keeps the whole request alive, gaps included
    for blob in request.blobs:
        part = read[blob.start - request.start : blob.stop - request.start]
        if (found := digest64(part)) == blob.digest:
            data[blob] = memoryview(bytes(part)) if sparse else part
        else:
            faults[blob] = Fault(f"digest {blob.digest} of bytes {blob.start}:{blob.stop}", f"digest {found}")


def _cut(
    store: Store,
    blobs: Sequence[Blob],
    length: int,
    data: dict[Blob, memoryview],
    tally: Tally | None,
) -> dict[Blob, Fault]:
    """Of a pack that ends early, what lies before the end is still good."""
    whole = [b for b in blobs if b.stop <= length]
    faults = {b: Fault(f"bytes {b.start}:{b.stop}", f"a pack of {length} bytes") for b in blobs if b.stop > length}
    if whole:
        rest = _fetch(store, whole, tally, REQUEST)
        data.update(rest.data)
        faults.update(rest.faults)
    return faults


def _length(store: Store, key: str) -> int | None:
    """Size of an object by its listing; None if it is not listed."""
    folder = key.rpartition("/")[0] + "/"
    return next((entry.size for entry in store.list(folder) if entry.key == key), None)
