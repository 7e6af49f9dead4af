"""Laws of the codec: what goes in comes out, bit for bit; what is not a blob is refused, cheaply."""

from __future__ import annotations

import tracemalloc

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ckpt.format.codec import KINDS, NEEDS_BASE, SPARSE, Codec
from ckpt.format.shards import DTYPES, DType
from ckpt.format.words import ordered, words_of

Bytes = NDArray[np.uint8]

CODEC = Codec()
"""One for all examples: what an earlier chunk leaves in its scratch arrays must not show in a later one."""

SPECIAL = {
    2: [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0xFFC1, 0x7F81, 0x0001, 0x8001, 0x7BFF, 0xFFFF],
    4: [0, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00001, 0x7F800001, 1, 0x80000001, 0xFFFFFFFF],
    8: [0, 1 << 63, 0x7FF << 52, 0xFFF << 52, 0x7FF8 << 48, (0x7FF << 52) + 1, 1, (1 << 63) + 1, (1 << 64) - 1],
    1: [0, 0x80, 0x7F, 0xFF, 1, 0x81, 0x78],
}
"""Zeros of both signs, infinities, quiet and signalling NaN, smallest and largest, per word size."""

dtypes = st.sampled_from(list(DTYPES.values()))


@st.composite
def chunks(draw: st.DrawFn, dtype: DType, length: int) -> Bytes:
    """Noise, constants, steps, special floats or text of `length` bytes."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    words = np.zeros(-(-length // dtype.word), dtype=f"<u{dtype.word}")
    match draw(st.sampled_from(["noise", "constant", "steps", "special", "smooth", "text"])):
        case "noise":
            words[:] = rng.integers(0, 1 << 8 * dtype.word, len(words), dtype=words.dtype, endpoint=False)
        case "constant":
            words[:] = draw(st.sampled_from(SPECIAL[dtype.word]))
        case "steps":
            words[:] = np.arange(len(words)).astype(words.dtype)
        case "special":
            words[:] = rng.choice(np.array(SPECIAL[dtype.word], dtype=words.dtype), len(words))
        case "smooth":
            words[:] = rng.integers(0, 4, len(words)).astype(words.dtype)
        case "text":
            text = np.frombuffer(b"the quick brown fox " * (words.nbytes // 20 + 1), dtype=np.uint8)
            words = text[: words.nbytes].copy().view(words.dtype)
    return words.view(np.uint8)[:length].copy()


@st.composite
def pairs(draw: st.DrawFn) -> tuple[DType, Bytes, Bytes]:
    """A dtype, a chunk and a base of the same length: unrelated, or differing in some words by little or by much."""
    dtype = draw(dtypes)
    length = draw(st.integers(0, 40) | st.integers(0, 6000))
    base = draw(chunks(dtype, length))
    relation = draw(st.sampled_from(["other", "equal", "near", "far", "one"]))
    if relation == "other":
        return dtype, draw(chunks(dtype, length)), base
    new = base.copy()
    words = words_of(new, dtype.word)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    hit = rng.random(len(words)) < draw(st.sampled_from([0.001, 0.02, 0.5, 1.0]))
    match relation:
        case "near":
            span = draw(st.sampled_from([1, 2, 7, 100]))
            words[hit] += rng.integers(-span, span + 1, int(hit.sum())).astype(words.dtype)
        case "far":
            words[hit] = rng.integers(0, 1 << 8 * dtype.word, int(hit.sum()), dtype=words.dtype, endpoint=False)
        case "one" if length:
            new[draw(st.integers(0, length - 1))] ^= 1 << draw(st.integers(0, 7))
    return dtype, new, base


@settings(max_examples=400, deadline=None)
@given(pairs(), st.sampled_from(list(KINDS)))
def test_decoding_what_was_encoded_gives_the_chunk_bit_for_bit(pair: tuple[DType, Bytes, Bytes], kind: int) -> None:
    dtype, new, base = pair
    before = new.tobytes(), base.tobytes()
    given_base = base if kind in NEEDS_BASE else None
    blob = CODEC.encode(kind, new, given_base, dtype)
    assert Codec().encode(kind, new, given_base, dtype) == blob, "a blob depends on what was encoded before"
    out = np.full(len(new), 0xA5, dtype=np.uint8)
    CODEC.decode(kind, blob, given_base, out, dtype)
    assert out.tobytes() == new.tobytes()
    assert (new.tobytes(), base.tobytes()) == before
    # The framing alone may add to a chunk, never more.
    assert len(blob) <= len(new) + 64 + (len(new) * 2 if kind == SPARSE else 0)


@settings(max_examples=100, deadline=None)
@given(pairs(), st.sampled_from(list(KINDS)), st.integers(1, 7))
def test_chunks_that_lie_across_word_boundaries_are_coded_alike(
    pair: tuple[DType, Bytes, Bytes], kind: int, shift: int
) -> None:
    dtype, new, base = pair

    def shifted(data: Bytes) -> Bytes:
        room = np.zeros(len(data) + 8, dtype=np.uint8)
        room[shift : shift + len(data)] = data
        return room[shift : shift + len(data)]

    blob = CODEC.encode(kind, new, base, dtype)
    assert CODEC.encode(kind, shifted(new), shifted(base), dtype) == blob
    out = shifted(np.zeros_like(new))
    CODEC.decode(kind, blob, shifted(base), out, dtype)
    assert out.tobytes() == new.tobytes()


@st.composite
def damaged(draw: st.DrawFn, blob: bytes) -> bytes:
    """A blob with bits flipped, bytes replaced, cut, repeated or added."""
    data = bytearray(blob)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, min(len(data), 40)) | st.integers(0, len(data)))
        match draw(st.sampled_from(["flip", "set", "cut", "insert", "word", "append"])):
            case "flip" if at < len(data):
                data[at] ^= 1 << draw(st.integers(0, 7))
            case "set" if at < len(data):
                data[at] = draw(st.sampled_from([0, 1, 0x7F, 0x80, 0xFF]))
            case "cut":
                del data[at:]
            case "insert":
                data[at:at] = draw(st.binary(min_size=1, max_size=9))
            case "word":
                data[at : at + 4] = draw(st.sampled_from([b"\xff\xff\xff\xff", b"\0\0\0\0", b"\0\0\0\x80"]))
            case "append":
                data += data[-draw(st.integers(1, 20)) :]
    return bytes(data)


def decodes(kind: int, blob: bytes, base: Bytes, out: Bytes, dtype: DType) -> bool:
    try:
        CODEC.decode(kind, blob, base, out, dtype)
    except ValueError:
        return False
    return True


@settings(max_examples=600, deadline=None)
@given(st.data(), pairs(), st.sampled_from(list(KINDS)))
def test_a_damaged_blob_is_refused_or_decodes_to_something_and_nothing_else_happens(
    data: st.DataObject, pair: tuple[DType, Bytes, Bytes], kind: int
) -> None:
    dtype, new, base = pair
    blob = data.draw(damaged(CODEC.encode(kind, new, base, dtype)))
    before = base.tobytes()
    decodes(kind, blob, base, np.empty_like(new), dtype)
    assert base.tobytes() == before


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=80), st.sampled_from(list(KINDS)), dtypes, st.integers(0, 300))
def test_any_bytes_at_all_are_refused_or_decode(blob: bytes, kind: int, dtype: DType, length: int) -> None:
    decodes(kind, blob, np.zeros(length, np.uint8), np.zeros(length, np.uint8), dtype)


@settings(max_examples=200, deadline=None)
@given(pairs(), st.sampled_from(list(KINDS)), st.data())
def test_a_blob_that_is_cut_or_lengthened_is_refused(
    pair: tuple[DType, Bytes, Bytes], kind: int, data: st.DataObject
) -> None:
    dtype, new, base = pair
    blob = CODEC.encode(kind, new, base, dtype)
    out = np.empty_like(new)
    assert not decodes(kind, blob + b"\0", base, out, dtype)
    assume(blob)
    assert not decodes(kind, blob[: data.draw(st.integers(0, len(blob) - 1))], base, out, dtype)


def test_no_blob_makes_the_decoder_allocate_more_than_some_chunks() -> None:
    rng = np.random.default_rng(7)
    length = 1 << 16
    out, base = np.zeros(length, np.uint8), np.zeros(length, np.uint8)
    new = (rng.random(length) < 0.3).astype(np.uint8)
    for dtype in (DTYPES["bool"], DTYPES["float32"]):
        for kind in KINDS:
            blob = CODEC.encode(kind, new, base, dtype)
            decodes(kind, blob, base, out, dtype)  # scratch arrays exist now
            for at in range(min(len(blob) - 4, 60)):
                for value in (b"\xff\xff\xff\xff", b"\xff\xff\xff\x7f", b"\0\0\0\x40", b"\xff"):
                    hostile = blob[:at] + value + blob[at + len(value) :]
                    tracemalloc.start()
                    decodes(kind, hostile, base, out, dtype)
                    peak = tracemalloc.get_traced_memory()[1]
                    tracemalloc.stop()
                    # Positions are 8 bytes for each changed word, and a word can be one byte: O(length) all the same.
                    assert peak < 48 * length, (kind, at, value)


@settings(max_examples=200, deadline=None)
@given(dtypes.filter(lambda d: d.kind in ("float", "complex")), st.integers(0, 2**32 - 1))
def test_the_order_of_floats_is_the_order_of_their_integers(dtype: DType, seed: int) -> None:
    width = dtype.word
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 1 << 8 * width, 64, dtype=f"<u{width}", endpoint=False)
    x[: len(SPECIAL[width])] = SPECIAL[width]
    y, back = np.empty_like(x), np.empty_like(x)
    ordered(x, y)
    ordered(y, back)
    assert back.tobytes() == x.tobytes()
    # Sign and magnitude, told without floats: numpy has none for bf16 and float8.
    top = 1 << (8 * width - 1)
    value = [(-1 - int(u & ~np.array(top, u.dtype)), 0) if u & np.array(top, u.dtype) else (int(u), 0) for u in x]
    keys = y.view(f"<i{width}").tolist()
    assert sorted(range(64), key=lambda i: keys[i]) == sorted(range(64), key=lambda i: (value[i], 0))
