"""One zstd frame from a store, decompressed into no more memory than is allowed."""

from __future__ import annotations

import zstandard


def expand(frame: bytes, limit: int) -> bytes:
    """What one zstd frame holds. It must say how much that is, and hold exactly that.

    In one call rather than piece by piece: a decompressor that is fed pieces gives out all that a frame decodes to, and
    only at its end compares that with what the frame claims.

    Raises:
        ValueError: no such frame, one that claims more than `limit` bytes or holds another number, or more after it.
    """
    try:
        size = zstandard.frame_content_size(frame)
        if not 0 <= size <= limit:
            raise ValueError(f"a zstd frame that claims {size} bytes, expected at most {limit}")
        data = zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ValueError(f"no whole zstd frame: {error}") from error
    if len(data) != size:
        raise ValueError(f"a zstd frame of {len(data)} bytes that claims {size}")
    return data
