"""A chunk from its blobs: the base first, then delta on delta, then the digest of the result.

One `Rebuilder` per thread: it owns the codec (whose zstd objects are not thread-safe) and two scratch arrays between
which a chain goes back and forth, because a decoder's output may not alias its base.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ckpt.format.codec import Codec
from ckpt.format.kinds import KINDS, NEEDS_BASE
from ckpt.format.manifest import Blob
from ckpt.format.shards import DTYPES

MAX_BLOBS = 4096
"""Longest chain read. Writers stop at 32; a part that names thousands of blobs per chunk is not one of ours."""


def blob_limit(nbytes: int) -> int:
    """Most bytes an encoded chunk of `nbytes` raw bytes may have: no part makes us read or hold without bound."""
    return 2 * nbytes + 4096


def chain_problem(blobs: Sequence[Blob], nbytes: int) -> str | None:
    """What is impossible about a chain, before anything is read; None if nothing is."""
    if not 0 < len(blobs) <= MAX_BLOBS:
        return f"a chain of {len(blobs)} blobs"
    if blobs[0].kind in NEEDS_BASE:
        return f"a chain that begins with a delta ({KINDS[blobs[0].kind]})"
    for blob in blobs:
        if blob.kind not in KINDS:
            return f"codec kind {blob.kind}"
        if blob.size > blob_limit(nbytes):
            return f"a blob of {blob.size} bytes for a chunk of {nbytes}"
    return None


class Rebuilder:
    """Decodes chains; not thread-safe."""

    def __init__(self) -> None:
        self._codec = Codec()
        self._scratch = (np.empty(0, np.uint8), np.empty(0, np.uint8))

    def rebuild(
        self,
        blobs: Sequence[Blob],
        data: Mapping[Blob, memoryview],
        dtype: str,
        out: NDArray[np.uint8],
        each: Callable[[int, NDArray[np.uint8]], None] | None = None,
    ) -> None:
        """Decode a chain into `out`, whose length is that of the chunk in bytes.

        Args:
            blobs: base first; `chain_problem` has been asked.
            data: the encoded bytes of each, digests checked.
            dtype: of the chunk's elements.
            each: called with (number of blobs decoded so far, the bytes they give) after every blob; the bytes are
                scratch, good until it returns.

        Raises:
            ValueError: a blob does not decode to exactly ``len(out)`` bytes.
        """
        base: NDArray[np.uint8] | None = None
        last = len(blobs) - 1
        for n, blob in enumerate(blobs):
            target = out if n == last else self._take(n % 2, out.nbytes)
            self._codec.decode(
                blob.kind, data[blob], base if blob.kind in NEEDS_BASE else None, target, DTYPES[dtype]
            )  # fmt: skip
            if each is not None:
                each(n + 1, target)
            base = target

    def _take(self, which: int, nbytes: int) -> NDArray[np.uint8]:
        if self._scratch[which].nbytes < nbytes:
            grown = np.empty(nbytes, np.uint8)
            self._scratch = (grown, self._scratch[1]) if which == 0 else (self._scratch[0], grown)
        return self._scratch[which][:nbytes]
