"""Blobs that are still needed, out of packs that hardly anything else needs: as they are, with what is said of them.

A chunk that rarely changes keeps its small delta for hundreds of saves, and with it a pack of deltas long dead. To
store the chunk again would take a keyframe, which is larger than the pack; its delta is not. So the delta moves, byte
for byte: it is read from the store (nobody has it in memory), checked, and packed once more. Chains stay what they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ckpt.format.manifest import Blob, digest64
from ckpt.format.pack import describe_some
from ckpt.history.keyed import key_of
from ckpt.saving.packing import Parcel
from storage_backends.base import Store

HEAD = 256 << 10
"""Bytes of a pack that are read first: mostly all of it."""

HEADER = 2 << 20
"""A header that is longer is left alone: to read it takes longer than the training thread should wait for the GIL."""

GAP = 64 << 10
"""Bytes between two blobs that are read through rather than asked around."""

REQUEST = 4 << 20


def parcels(store: Store, pack: str, size: int, blobs: Sequence[Blob], breathe: Callable[[], None]) -> Iterator[Parcel]:
    """These blobs of one pack of `size` bytes, a request's worth at a time.

    Raises:
        ValueError: the pack is not what its parts say; or its header is too long.
        StorageError: the store failed.
    """
    head = store.get_range(pack, 0, min(size, HEAD))
    begin = 8 + int.from_bytes(head[:8], "little")
    if begin > min(size, HEADER):
        raise ValueError(f"a header of {begin} bytes in {size}")
    if begin > len(head):
        head += store.get_range(pack, len(head), begin)
    said = describe_some(head[:begin], blobs, breathe, key_of(store))
    for run in _runs(sorted(blobs, key=lambda blob: blob.start)):
        first, stop = run[0].start, run[-1].stop
        data = head[first:stop] if stop <= len(head) else store.get_range(pack, first, stop)
        for blob in run:
            raw = bytes(data[blob.start - first : blob.stop - first])
            if digest64(raw) != blob.digest:
                raise ValueError(f"bytes {blob.start}:{blob.stop}: expected digest {blob.digest}")
            about = said[blob]
            yield Parcel(blob, raw, blob.kind, blob.digest, about.chunk_digest, about.dtype, about.base_digest)
            breathe()


def _runs(blobs: Sequence[Blob]) -> Iterator[list[Blob]]:
    """Neighbours, as far as one request takes them."""
    run: list[Blob] = []
    for blob in blobs:
        if run and (blob.start - run[-1].stop > GAP or blob.stop - run[0].start > REQUEST):
            yield run
            run = []
        run.append(blob)
    if run:
        yield run
