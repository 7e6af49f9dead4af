"""Dtypes and codec kinds, written from §3 and §5 of FORMAT.md alone: plain and slow, to be read beside the page."""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import zstandard

Words = np.ndarray[Any, Any]


class Damaged(ValueError):  # noqa: N818 - as the page says it
    """The store says something that the page does not allow, or bytes that do not fit their digest."""


SIZES = {
    **dict.fromkeys(("float64", "int64", "uint64"), (8, 8)),
    **dict.fromkeys(("float32", "int32", "uint32"), (4, 4)),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), (2, 2)),
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"), (1, 1)),
    **dict.fromkeys(("float4_e2m1fn_x2", "int8", "uint8", "bool"), (1, 1)),
    "complex128": (16, 8),
    "complex64": (8, 4),
    "complex32": (4, 2),
}
"""dtype → (bytes of an element, bytes of a word)."""

NEED_BASE = (3, 4, 5)

UNORDERED = re.compile(r"u?int|bool|float8_e8m0fnu|float4_e2m1fn_x2")


class Cursor:
    """Takes bytes from the front of a blob; never more than there are."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, length: int) -> bytes:
        if length < 0 or self.at + length > len(self.data):
            raise Damaged(f"the blob ends at byte {len(self.data)}, {length} bytes wanted from byte {self.at}")
        self.at += length
        return self.data[self.at - length : self.at]

    def number(self, form: str) -> int:
        return int(struct.unpack("<" + form, self.take(struct.calcsize("<" + form)))[0])

    def end(self) -> None:
        if self.at != len(self.data):
            raise Damaged(f"{len(self.data) - self.at} bytes are left over in a blob")


def unzstd(frame: bytes, length: int | None) -> bytes:
    """One frame and nothing after it; its content size (`length`, where known) is checked before decompression."""
    try:
        declared = zstandard.get_frame_parameters(frame).content_size
        if declared in (zstandard.CONTENTSIZE_UNKNOWN, zstandard.CONTENTSIZE_ERROR) or length not in (None, declared):
            raise Damaged(f"a zstd frame declares {declared} bytes, expected {length}")
        stream = zstandard.ZstdDecompressor().decompressobj()
        data = stream.decompress(frame)
    except zstandard.ZstdError as error:
        raise Damaged(f"not a zstd frame: {error}") from error
    if len(data) != declared or not stream.eof or stream.unused_data:
        raise Damaged("a zstd frame is cut short, or is followed by more")
    return data


def read_streams(blob: Cursor, lengths: Sequence[int]) -> list[bytes]:
    mask = blob.number("H")
    if mask >> len(lengths):
        raise Damaged(f"mask {mask:#x} for {len(lengths)} streams")
    stored = {j: blob.number("I") for j in range(len(lengths)) if mask >> j & 1}
    result = []
    for j, length in enumerate(lengths):
        if j not in stored:
            result.append(blob.take(length))
        elif stored[j] < length:
            result.append(unzstd(blob.take(stored[j]), length))
        else:
            raise Damaged(f"stream {j} is stored in {stored[j]} bytes, raw it has {length}")
    return result


def join(planes: Sequence[bytes], count: int, word: int) -> Words:
    """`count` words from their byte planes, least significant first; planes that are not there are zero."""
    grid = np.zeros((count, word), np.uint8)
    for k, plane in enumerate(planes):
        grid[:, k] = np.frombuffer(plane, np.uint8)
    return grid.reshape(-1).view(f"<u{word}")


def order(x: Words, dtype: str) -> Words:
    """Its own inverse: the sign bit, which decides, stays as it is."""
    if UNORDERED.match(dtype):
        return x
    bits = x.dtype.itemsize * 8
    sign = x.view(f"<i{bits // 8}") >> (bits - 1)
    return x ^ (sign.view(x.dtype) >> x.dtype.type(1))


def unzigzag(z: Words) -> Words:
    return (z >> z.dtype.type(1)) ^ (~(z & z.dtype.type(1)) + z.dtype.type(1))


def positions(gaps: bytes, count: int, words: int) -> Words:
    stream = np.frombuffer(gaps, np.uint8).astype(np.int64)
    ends = np.flatnonzero(stream < 255)
    if len(ends) != count or (len(stream) and stream[-1] == 255):
        raise Damaged(f"{len(ends)} gaps for {count} words")
    result = np.cumsum(stream)[ends] + np.arange(count)
    if count and result[-1] >= words:
        raise Damaged(f"a position {result[-1]} outside of {words} words")
    return result


def sparse(blob: Cursor, base: Words, dtype: str) -> Words:
    count, gap_bytes, form = blob.number("I"), blob.number("I"), blob.number("B")
    word = base.dtype.itemsize
    if count > len(base):
        raise Damaged(f"{count} different words of {len(base)}")
    if form in (1, 2, 4):
        gaps, packed = read_streams(blob, [gap_bytes, (count * form + 7) // 8])
        bits = np.unpackbits(np.frombuffer(packed, np.uint8), bitorder="little")
        if bits[count * form :].any():
            raise Damaged("unused bits are not zero")
        v = bits[: count * form].reshape(count, form) @ (1 << np.arange(form, dtype=np.uint64))
        v = v.astype(base.dtype)
    elif form % 8 == 0 and 1 <= form // 8 <= word:
        gaps, *planes = read_streams(blob, [gap_bytes] + [count] * (form // 8))
        v = join(planes, count, word)
    else:
        raise Damaged(f"form {form} of values for words of {word} bytes")
    z = v + base.dtype.type(1)
    if not z.all():
        raise Damaged("a word said to differ does not")
    at = positions(gaps, count, len(base))
    new = base.copy()
    new[at] = order(order(base[at], dtype) + unzigzag(z), dtype)
    return new


def decode(kind: int, data: bytes, base: bytes | None, length: int, dtype: str) -> bytes:
    """The `length` raw bytes of a chunk from its blob."""
    blob, (_, word) = Cursor(data), SIZES[dtype]
    count, tail = divmod(length, word)
    if kind in NEED_BASE:
        if base is None or len(base) != length:
            raise Damaged(f"codec kind {kind} without a base of {length} bytes")
        old = np.frombuffer(base[: count * word], f"<u{word}")
    match kind:
        case 0:
            return whole(blob, blob.take(length))
        case 1:
            return unzstd(data, length)
        case 2:
            new = join(read_streams(blob, [count] * word), count, word)
        case 3:
            delta = unzigzag(join(read_streams(blob, [count] * word), count, word))
            new = order(order(old, dtype) + delta, dtype)
        case 4:
            new = old ^ join(read_streams(blob, [count] * word), count, word)
        case 5:
            new = sparse(blob, old, dtype)
        case _:
            raise Damaged(f"codec kind {kind} is not known")
    return whole(blob, new.tobytes() + blob.take(tail))


def whole(blob: Cursor, data: bytes) -> bytes:
    blob.end()
    return data
