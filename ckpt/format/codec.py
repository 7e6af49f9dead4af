"""Chunks to blobs and back, bit-exact on any bytes. The kinds are for ever: numbers (kinds.py) are never reused.

Every integer in a blob is little-endian. A chunk of `len` bytes is ``n = len // word`` *words* of ``DType.word`` bytes
and a *tail* of ``len % word`` bytes (none in a chunk of whole elements). The chunk's length, dtype and kind, and the
base where one is needed, come from the document that names the blob; nothing in a blob repeats them.

====  ======  =====================================================================================================
kind  name    blob
====  ======  =====================================================================================================
0     raw     the chunk's bytes
1     zstd    one zstd frame of the chunk's bytes, its content size declared (of an empty chunk: nothing)
2     planes  streams(planes of the words), tail
3     sub     streams(planes of zigzag(order(new) - order(base)) per word, wrapping), tail of new
4     xor     streams(planes of new ^ base per word), tail of new
5     sparse  u32 count, u32 gap bytes, u8 form, streams(gaps, value streams), tail of new
====  ======  =====================================================================================================

*planes*: `word` streams of n bytes; stream k holds byte k of every word, k = 0 the least significant.

*streams(s0, s1, …)*: u16 mask, bit j set where stream j is one zstd frame (content size declared, shorter than the
stream) and clear where it is raw; higher bits are zero. Then a u32 length for each set bit, in order; then the streams
one after the other.

*order*, for kinds float and complex: ``x ^ (((x as signed) >> bits - 1) >>> 1)``, sign and magnitude to two's
complement; for all other kinds of dtype x itself. *zigzag(d)*: ``(d << 1) ^ ((d as signed) >> bits - 1)``.

*sparse*: `count` words differ from the base, in increasing order. *gaps*: for each one byte, the number of equal words
since the previous different one (or the start); each byte 255 before it adds 255 to that number. *values*: v =
zigzag(order(new) - order(base)) - 1 for each. *form* 1, 2 or 4: one stream, v in `form` bits, the first v in the
lowest bits of the first byte, unused bits zero; form 8·p, 1 ≤ p ≤ word: p planes of `count` bytes, plane k holding
byte k of v, higher bytes zero.

Whoever decodes MUST check: every declared length, that no byte is left over, the content size of a frame before it is
decompressed, that no position lies outside. The digest of the chunk is checked by the caller, after the last blob.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import zstandard

from ckpt.format import sparse
from ckpt.format.kinds import KINDS, NEEDS_BASE, PLANES, RAW, SPARSE, SUB, XOR, ZSTD
from ckpt.format.shards import DType
from ckpt.format.words import (
    NOISE,
    Bytes,
    Words,
    difference,
    entropies,
    histograms,
    merge,
    restored,
    sample,
    split,
    words_of,
)
from storage_backends.base import Buffer

LEVEL = 1
"""zstd's level for whole chunks. Higher ones cost several times the time and win one or two percent."""

PLANES_LEVEL = {"strategy": 1, "hash_log": 9, "chain_log": 6, "search_log": 1, "min_match": 7, "target_length": 0}
"""zstd's parameters for byte planes, gaps and packed values. They hold codes of one byte rather than phrases: a short
match costs more than the literals it replaces, and looking for it is most of the time. On exponent planes of fp32 this
is 1.6 times as fast as level 1 and 3 % smaller; runs and repeats of seven bytes and more are found as before."""

TRIED_ALWAYS = 64
"""Streams shorter than this are handed to zstd without a look at their entropy."""

_SPARSE_HEAD = struct.Struct("<IIB")
_MASK = struct.Struct("<H")
_LENGTH = struct.Struct("<I")


def orders(dtype: DType) -> bool:
    """Whether words of this dtype are floats, which `sub` and `sparse` subtract in numerical order."""
    return dtype.kind in ("float", "complex")


class Codec:
    """Encodes and decodes chunks. One per thread: it owns zstd objects and scratch arrays (about three times the
    longest chunk seen), which are reused and never shared."""

    def __init__(self) -> None:
        self._compress = zstandard.ZstdCompressor(level=LEVEL).compress
        self._planes_compress = _planes_compressor().compress
        self._decompress = zstandard.ZstdDecompressor().decompress
        self._scratch: list[Bytes] = []

    def encode(self, kind: int, new: Bytes, base: Bytes | None, dtype: DType) -> bytes:
        """The blob of `new`, both 1-D contiguous uint8; `base` (of equal length) is looked at by kinds of `NEEDS_BASE`
        alone. Equal arguments give equal bytes.

        A blob can be longer than the chunk where the kind does not suit it; whoever chooses compares.

        Raises:
            ValueError: an unknown kind, or a base that is missing or of another length.
        """
        if kind == RAW:
            return new.tobytes()
        if kind == ZSTD:
            return self._compress(new.data) if len(new) else b""
        words = words_of(new, dtype.word)
        if kind == PLANES:
            return self._encode_planes(words) + _tail(new, dtype)
        if kind not in NEEDS_BASE:
            raise ValueError(f"codec kind {kind} is not one of {KINDS}")
        base_words = words_of(_base(kind, base, len(new)), dtype.word)
        if kind == SPARSE:
            return self._encode_sparse(words, base_words, dtype) + _tail(new, dtype)
        _, delta, spare = self._scratch_words(words.dtype, len(words))
        if kind == SUB:
            difference(words, base_words, floats=orders(dtype), out=delta, spare=spare)
        else:
            np.bitwise_xor(words, base_words, out=delta)
        return self._encode_planes(delta) + _tail(new, dtype)

    def decode(self, kind: int, blob: Buffer, base: Bytes | None, out: Bytes, dtype: DType) -> None:
        """Fill `out` (1-D contiguous uint8, of the chunk's length, not overlapping `base`) with the chunk.

        Memory: O(len(out)), whatever the blob says. After an error `out` holds anything.

        Raises:
            ValueError: the blob is not one of this kind for a chunk of this length, or the base is missing.
        """
        view = memoryview(blob).cast("B")
        if kind == RAW:
            if len(view) != len(out):
                raise ValueError(f"raw: {len(view)} bytes where {len(out)} are expected")
            out[:] = np.frombuffer(view, dtype=np.uint8)
            return
        if kind == ZSTD:
            out[:] = np.frombuffer(self._expand(view, len(out)), dtype=np.uint8)
            return
        words = words_of(out, dtype.word)
        if kind == PLANES:
            self._decode_planes(view, out, words)
            return
        if kind not in NEEDS_BASE:
            raise ValueError(f"codec kind {kind} is not one of {KINDS}")
        base_words = words_of(_base(kind, base, len(out)), dtype.word)
        if kind == SPARSE:
            self._decode_sparse(view, base_words, out, words, dtype)
        elif kind == XOR:
            self._decode_planes(view, out, words)
            np.bitwise_xor(words, base_words, out=words)
        else:
            _, delta, spare = self._scratch_words(words.dtype, len(words))
            self._decode_planes(view, out, delta)
            restored(delta, base_words, floats=orders(dtype), out=words, spare=spare)

    # --- planes --------------------------------------------------------------------------------------------------

    def _encode_planes(self, words: Words) -> bytes:
        width = words.dtype.itemsize
        planes, _, spare = self._scratch_words(words.dtype, len(words))
        rows = planes.view(np.uint8).reshape(width, len(words))
        # One look at a sample of all planes costs 40 µs per chunk; zstd on a plane of noise costs more.
        noisy = entropies(histograms(sample(words))) > NOISE if len(words) > TRIED_ALWAYS else np.zeros(width, bool)
        for k in range(width):
            # A spare of its own is needed: `words` may be the second scratch array, and the planes fill the first.
            split(words, k, rows[k], spare)
        return self._join(b"", list(rows), noisy.tolist())

    def _decode_planes(self, blob: memoryview, out: Bytes, words: Words) -> None:
        """Fill `words` from the planes, and the tail of `out` with the chunk's tail."""
        n, width = len(words), words.dtype.itemsize
        planes, end = self._streams(blob, 0, [n] * width)
        _check_tail(blob, end, out, n * width)
        merge(planes, words)

    # --- sparse --------------------------------------------------------------------------------------------------

    def _encode_sparse(self, words: Words, base: Words, dtype: DType) -> bytes:
        _, _, spare = self._scratch_words(words.dtype, len(words))
        changed = np.not_equal(words, base, out=spare.view(np.bool_)[: len(words)])
        positions = np.flatnonzero(changed)
        values, old = words[positions], base[positions]
        z, spare = np.empty_like(values), np.empty_like(values)
        difference(values, old, floats=orders(dtype), out=z, spare=spare)
        z -= 1  # a changed word differs by at least one step, and 0 and 1 fit into one bit
        gaps, form = sparse.gaps_of(positions), sparse.form_of(z)
        streams = [gaps, *sparse.value_streams(z, form)]
        return self._join(_SPARSE_HEAD.pack(len(positions), len(gaps), form), streams, [_is_noise(s) for s in streams])

    def _decode_sparse(self, blob: memoryview, base: Words, out: Bytes, words: Words, dtype: DType) -> None:
        if len(blob) < _SPARSE_HEAD.size:
            raise ValueError(f"sparse: {len(blob)} bytes are shorter than its head")
        count, gap_bytes, form = _SPARSE_HEAD.unpack_from(blob)
        least, most = sparse.gap_bounds(count, len(words))
        if count > len(words) or not least <= gap_bytes <= most:
            raise ValueError(f"sparse: {count} changes in {gap_bytes} gap bytes, in a chunk of {len(words)} words")
        sizes = sparse.form_sizes(form, count, dtype.word)
        (gaps, *values), end = self._streams(blob, _SPARSE_HEAD.size, [gap_bytes, *sizes])
        _check_tail(blob, end, out, len(words) * dtype.word)
        positions = sparse.positions_of(gaps, count, len(words))
        z = sparse.values_of(values, form, count, dtype.word)
        z += 1
        words[:] = base
        old = words[positions]
        restored(z, old, floats=orders(dtype), out=old, spare=np.empty_like(old))
        words[positions] = old

    # --- streams -------------------------------------------------------------------------------------------------

    def _join(self, head: bytes, streams: Sequence[Bytes], noisy: Sequence[bool]) -> bytes:
        """`head` and the streams in their framing, each as a zstd frame where that is shorter."""
        mask, lengths, bodies = 0, [], []
        for j, (stream, skip) in enumerate(zip(streams, noisy, strict=True)):
            frame = b"" if skip or not len(stream) else self._planes_compress(stream.data)
            if frame and len(frame) < len(stream):
                mask |= 1 << j
                lengths.append(_LENGTH.pack(len(frame)))
                bodies.append(memoryview(frame))
            else:
                bodies.append(stream.data)
        return b"".join([head, _MASK.pack(mask), *lengths, *bodies])

    def _streams(self, blob: memoryview, at: int, sizes: Sequence[int]) -> tuple[list[Bytes], int]:
        """The streams that start at byte `at` of the blob, of these sizes, and where they end.

        Lengths are checked, all of them, before a single frame is decompressed.
        """
        if at + _MASK.size > len(blob):
            raise ValueError(f"cut after {len(blob)} bytes, before its streams")
        (mask,) = _MASK.unpack_from(blob, at)
        at += _MASK.size
        if mask >> len(sizes):
            raise ValueError(f"mask {mask:#x} names more than {len(sizes)} streams")
        stored = list(sizes)
        for j, size in enumerate(sizes):
            if mask >> j & 1:
                if at + _LENGTH.size > len(blob):
                    raise ValueError(f"cut after {len(blob)} bytes, among its lengths")
                (stored[j],) = _LENGTH.unpack_from(blob, at)
                at += _LENGTH.size
                if stored[j] >= size:
                    raise ValueError(f"stream {j} of {size} bytes has a frame of {stored[j]}")
        if at + sum(stored) > len(blob):
            raise ValueError(f"{len(blob)} bytes where its streams need {at + sum(stored)}")
        streams: list[Bytes] = []
        for j, (size, length) in enumerate(zip(sizes, stored, strict=True)):
            piece: Buffer = blob[at : at + length]
            streams.append(np.frombuffer(self._expand(piece, size) if mask >> j & 1 else piece, dtype=np.uint8))
            at += length
        return streams, at

    def _expand(self, frame: Buffer, size: int) -> bytes:
        """Decompress exactly one frame of exactly `size` bytes, or ValueError.

        The size is compared with the frame's claim first, because `decompress` allocates what the frame claims (and
        looks at nothing more of a frame that claims nothing).
        """
        if not size and len(frame):
            raise ValueError(f"{len(frame)} bytes where nothing is expected")
        if not size:
            return b""
        try:
            claimed = zstandard.frame_content_size(frame)
            if claimed != size:
                raise ValueError(f"a zstd frame that claims {claimed} bytes where {size} are expected")
            data = self._decompress(frame, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise ValueError(f"not a zstd frame of {size} bytes: {error}") from error
        if len(data) != size:
            raise ValueError(f"a zstd frame of {len(data)} bytes where {size} are expected")
        return data

    def _scratch_words(self, dtype: np.dtype[np.unsignedinteger], n: int) -> tuple[Words, Words, Words]:
        """Three scratch arrays of `n` words: planes are built in the first, deltas in the second, the third is for
        whatever is used up at once."""
        need = n * dtype.itemsize
        if not self._scratch or len(self._scratch[0]) < need:
            self._scratch = [np.empty(need, dtype=np.uint8) for _ in range(3)]
        first, second, third = (s[:need].view(dtype) for s in self._scratch)
        return first, second, third


def _planes_compressor() -> zstandard.ZstdCompressor:
    settings = zstandard.ZstdCompressionParameters.from_level(LEVEL, **PLANES_LEVEL)
    return zstandard.ZstdCompressor(compression_params=settings)


def _is_noise(stream: Bytes) -> bool:
    return len(stream) > TRIED_ALWAYS and bool(entropies(histograms(sample(stream)))[0] > NOISE)


def _base(kind: int, base: Bytes | None, length: int) -> Bytes:
    if base is None or len(base) != length:
        found = "none" if base is None else f"one of {len(base)}"
        raise ValueError(f"{KINDS[kind]} needs a base of {length} bytes, and there is {found}")
    return base


def _tail(data: Bytes, dtype: DType) -> bytes:
    return data[len(data) // dtype.word * dtype.word :].tobytes()


def _check_tail(blob: memoryview, end: int, out: Bytes, start: int) -> None:
    """Copy the tail, which is all that follows the streams."""
    if len(blob) - end != len(out) - start:
        raise ValueError(f"{len(blob) - end} bytes after its streams where {len(out) - start} are expected")
    out[start:] = np.frombuffer(blob[end:], dtype=np.uint8)
