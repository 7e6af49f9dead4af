"""Kinds of blobs: fixed vectors, sizes, refusals. The laws are in tests/properties/test_codec_laws.py."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import zstandard

from ckpt.format.codec import KINDS, NEEDS_BASE, PLANES, RAW, SPARSE, SUB, XOR, ZSTD, Codec
from ckpt.format.shards import DTYPES
from ckpt.format.words import Bytes

F32, BF16, U8, I64 = DTYPES["float32"], DTYPES["bfloat16"], DTYPES["uint8"], DTYPES["int64"]


def chunk(text: str) -> Bytes:
    return np.frombuffer(bytes.fromhex(text), dtype=np.uint8).copy()


def floats(*values: float) -> Bytes:
    return np.array(values, dtype="<f4").view(np.uint8)


NEW = floats(1.0, -0.0, 2.5, float("nan"), -1.5)
BASE = floats(1.0000001, 0.0, 2.5, float("inf"), -1.25)

STEPS = np.arange(600, dtype="<u2").view(np.uint8)


def stepped(*changes: int) -> Bytes:
    """`STEPS` with word 3 one higher, 4 one lower, and further (word, change) pairs."""
    words = STEPS.copy().view("<u2")
    for at, by in zip((3, 4, *changes[::2]), (1, -1, *changes[1::2]), strict=True):
        words[at] = (int(words[at]) + by) % 65536
    return words.view(np.uint8)


FIXED = [
    (RAW, "float32", NEW, BASE, "0000803f 00000080 00002040 0000c07f 0000c0bf"),
    (PLANES, "float32", NEW, BASE, "0000 0000000000 0000000000 800020c0c0 3f80407fbf"),
    (SUB, "float32", NEW, BASE, "0000 01010000ff 00000000ff 000000803f 0000000000"),
    (XOR, "float32", NEW, BASE, "0000 0100000000 0000000000 0000004060 0080000000"),
    (SPARSE, "float32", NEW, BASE, "04000000 04000000 18 0000 00000100 0000fffe 0000ffff 00007f3f"),
    # 600 steps of bf16: ±1 at 3, 4, 580 (after two escapes), 581: one bit each.
    (SPARSE, "bfloat16", stepped(580, 1, 581, -1), STEPS, "04000000 06000000 01 0000 0300ffff4100 05"),
    (SPARSE, "bfloat16", stepped(580, 1, 581, -8), STEPS, "04000000 06000000 04 0000 0300ffff4100 01e1"),
    (SPARSE, "bfloat16", STEPS, STEPS, "00000000 00000000 01 0000"),
    # Two words and a tail of three bytes.
    (PLANES, "int32", chunk("01020304 05060708 090a0b"), None, "0000 0105 0206 0307 0408 090a0b"),
    (
        SUB,
        "int32",
        chunk("01020304 05060708 090a0b"),
        chunk("02020304 04060708 000000"),
        "0000 0102 0000 0000 0000 090a0b",
    ),
    (XOR, "bool", chunk("0100"), chunk("0101"), "0000 0001"),
    (SPARSE, "complex32", chunk("003c00bc"), chunk("003c01bc"), "01000000 01000000 01 0000 01 01"),
]
"""Blobs without zstd frames, compared both ways: the format cannot drift."""

LUMP = np.zeros(100, dtype=np.uint8)
LUMP[50] = 7
ONES = np.ones(100, dtype=np.uint8)
WITH_FRAMES = [
    (ZSTD, None, "28b52ffd 206465000020000007000200810817012c"),
    (
        PLANES,
        None,
        "0f00 11000000 11000000 15000000 11000000 28b52ffd2019450000100000010035c002 28b52ffd2019450000100000010035c002"
        "28b52ffd201965000020000007000200c0e00d6001 28b52ffd2019450000100000010035c002",
    ),
    (
        SUB,
        ONES,
        "0f00 11000000 11000000 15000000 15000000 28b52ffd2019450000100101010035c002 28b52ffd2019450000100202010035c002"
        "28b52ffd2019650000200202f4020200c0e00d6001 28b52ffd201965000020020201020200c0e00d6001",
    ),
    (
        XOR,
        ONES,
        "0f00 11000000 11000000 15000000 11000000 28b52ffd2019450000100101010035c002 28b52ffd2019450000100101010035c002"
        "28b52ffd201965000020010106010200c0e00d6001 28b52ffd2019450000100101010035c002",
    ),
    (
        SPARSE,
        ONES,
        "19000000 19000000 20 1f00 11000000 11000000 11000000 15000000 15000000 28b52ffd2019450000100000010035c002"
        "28b52ffd2019450000100000010035c002 28b52ffd2019450000100202010035c002"
        "28b52ffd2019650000200202f4020200c0e00d6001 28b52ffd201965000020020201020200c0e00d6001",
    ),
]
"""Blobs of `LUMP` as float32 with zstd frames, only read: another zstd may choose other bytes."""


def test_every_kind_has_its_number_and_name_for_ever() -> None:
    assert KINDS == {0: "raw", 1: "zstd", 2: "planes", 3: "sub", 4: "xor", 5: "sparse"}
    assert {3, 4, 5} == NEEDS_BASE


@pytest.mark.parametrize(("kind", "dtype", "new", "base", "blob"), FIXED)
def test_known_chunks_have_known_blobs(kind: int, dtype: str, new: Bytes, base: Bytes | None, blob: str) -> None:
    codec, expected = Codec(), bytes.fromhex(blob.replace(" ", ""))
    assert codec.encode(kind, new, base, DTYPES[dtype]).hex() == expected.hex()
    out = np.empty_like(new)
    codec.decode(kind, expected, base, out, DTYPES[dtype])
    assert out.tobytes() == new.tobytes()


@pytest.mark.parametrize(("kind", "base", "blob"), WITH_FRAMES)
def test_known_blobs_with_zstd_frames_are_read(kind: int, base: Bytes | None, blob: str) -> None:
    out = np.empty_like(LUMP)
    Codec().decode(kind, bytes.fromhex(blob), base, out, F32)
    assert out.tobytes() == LUMP.tobytes()


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_dtype_survives_every_kind(kind: int, name: str) -> None:
    """I1: full and delta, on every dtype, with all byte values and their neighbours."""
    rng = np.random.default_rng(kind)
    base = np.concatenate([np.arange(256, dtype=np.uint8), rng.integers(0, 256, 16 * 200, dtype=np.uint8)])
    new = base.copy()
    new[::37] += 1
    codec = Codec()
    out = np.empty_like(new)
    codec.decode(kind, codec.encode(kind, new, base, DTYPES[name]), base, out, DTYPES[name])
    assert out.tobytes() == new.tobytes()


def test_minus_zero_and_nan_payloads_are_changes_like_any_other() -> None:
    """I3."""
    base, new = floats(0.0, float("nan")), floats(-0.0, float("nan"))
    new[4] ^= 1
    codec = Codec()
    for kind in KINDS:
        out = np.empty_like(new)
        codec.decode(kind, codec.encode(kind, new, base, F32), base, out, F32)
        assert out.tobytes() == new.tobytes()
    # From 0.0 to -0.0 is one step.
    assert codec.encode(SPARSE, floats(-0.0), floats(0.0), F32).hex() == "0100000001000000010000" + "0000"


def bf16_pair(share: float, words: int = 1 << 18) -> tuple[Bytes, Bytes]:
    """Weights as bf16, and the same with a share of them moved by one step up or down."""
    rng = np.random.default_rng(1)
    base = ((rng.standard_normal(words) * 0.02).astype("<f4").view("<u4") >> 16).astype("<u2")
    step = np.where(rng.random(words) < share, rng.choice([-1, 1], words), 0)
    return (base.astype(np.int64) + step).astype("<u2").view(np.uint8), base.view(np.uint8)


@pytest.mark.parametrize(
    ("share", "at_least"), [(0.3, 12.0), (0.05, 45.0), (0.02, 94.0), (0.01, 160.0), (0.002, 550.0)]
)
def test_few_steps_of_bf16_shrink_nearly_to_their_entropy(share: float, at_least: float) -> None:
    new, base = bf16_pair(share)
    assert len(new) / len(Codec().encode(SPARSE, new, base, BF16)) > at_least


def test_noise_costs_the_framing_alone() -> None:
    noise = np.random.default_rng(2).integers(0, 256, 1 << 19, dtype=np.uint8)
    for name in ("float32", "bfloat16", "float64", "uint8"):
        assert len(Codec().encode(PLANES, noise, None, DTYPES[name])) <= len(noise) + 2 + 4 * 8


def test_a_chunk_that_did_not_change_is_a_few_bytes() -> None:
    new, _ = bf16_pair(0.1)
    assert len(Codec().encode(SPARSE, new, new, BF16)) == 11
    assert len(Codec().encode(SUB, new, new, BF16)) < 70


def test_a_long_gap_costs_next_to_nothing() -> None:
    base = np.zeros(1 << 19, dtype=np.uint8)
    new = base.copy()
    new[-1] = 1
    assert len(Codec().encode(SPARSE, new, base, U8)) < 60


@pytest.mark.parametrize("kind", sorted(NEEDS_BASE))
def test_a_delta_without_its_base_is_refused(kind: int) -> None:
    codec = Codec()
    blob = codec.encode(kind, NEW, BASE, F32)
    for base in (None, BASE[:-4]):
        with pytest.raises(ValueError, match="needs a base of 20 bytes"):
            codec.encode(kind, NEW, base, F32)
        with pytest.raises(ValueError, match="needs a base of 20 bytes"):
            codec.decode(kind, blob, base, np.empty_like(NEW), F32)


def test_an_unknown_kind_is_refused() -> None:
    for kind in (-1, 6, 255):
        with pytest.raises(ValueError, match="not one of"):
            Codec().encode(kind, NEW, BASE, F32)
        with pytest.raises(ValueError, match="not one of"):
            Codec().decode(kind, b"", BASE, np.empty_like(NEW), F32)


@pytest.mark.parametrize(
    ("why", "kind", "blob"),
    [
        ("raw, too short", RAW, "00" * 19),
        ("raw, too long", RAW, "00" * 21),
        ("no frame", ZSTD, "00" * 20),
        ("frame of another size", ZSTD, zstandard.compress(bytes(21)).hex()),
        ("two frames", ZSTD, (zstandard.compress(bytes(20)) + zstandard.compress(b"")).hex()),
        ("frame without its size", ZSTD, zstandard.ZstdCompressor(write_content_size=False).compress(bytes(20)).hex()),
        ("nothing", PLANES, ""),
        ("no streams", PLANES, "0000"),
        ("a fifth stream", PLANES, "1000" + "00" * 20),
        ("lengths cut", PLANES, "0300 0100"),
        ("a frame longer than its plane", PLANES, "0100 05000000" + "00" * 20),
        ("a frame of 4 GiB", PLANES, "0100 ffffffff" + "00" * 20),
        ("no frame in a frame's place", PLANES, "0100 04000000" + "00" * 19),
        ("a byte too many", SUB, "0000" + "00" * 21),
        ("more changes than words", SPARSE, "06000000 06000000 01 0000 000000000000 00"),
        ("more gaps than the words allow", SPARSE, "01000000 03000000 01 0000 ffff00 00"),
        ("fewer gaps than changes", SPARSE, "02000000 01000000 01 0000 00 00"),
        ("no such form", SPARSE, "01000000 01000000 03 0000 00 00"),
        ("no form at all", SPARSE, "01000000 01000000 00 0000 00"),
        ("wider than a word", SPARSE, "01000000 01000000 28 0000 00 0000000000"),
        ("a position outside", SPARSE, "01000000 01000000 01 0000 05 00"),
        ("positions that lead outside", SPARSE, "02000000 02000000 01 0000 0203 00"),
        ("an escape at the end", SPARSE, "01000000 01000000 01 0000 ff 00"),
        ("its head cut", SPARSE, "01000000 010000"),
    ],
)
def test_a_blob_that_is_none_is_refused(why: str, kind: int, blob: str) -> None:
    with pytest.raises(ValueError):
        Codec().decode(kind, bytes.fromhex(blob), BASE, np.empty_like(NEW), F32)


def test_blobs_may_come_in_any_buffer_and_out_of_read_only_memory() -> None:
    codec = Codec()
    frozen_new, frozen_base = NEW.copy(), BASE.copy()
    frozen_new.flags.writeable = frozen_base.flags.writeable = False
    for kind in KINDS:
        blob = codec.encode(kind, frozen_new, frozen_base, F32)
        for buffer in (blob, bytearray(blob), memoryview(blob)):
            out = np.empty_like(NEW)
            codec.decode(kind, buffer, frozen_base, out, F32)
            assert out.tobytes() == NEW.tobytes()


def test_two_threads_with_a_codec_each_do_not_disturb_each_other() -> None:
    pairs = [bf16_pair(s, 1 << 14) for s in (0.02, 0.5)]
    wrong: list[str] = []

    def work(new: Bytes, base: Bytes) -> None:
        codec, out = Codec(), np.empty_like(new)
        for _ in range(10):
            for kind in KINDS:
                codec.decode(kind, codec.encode(kind, new, base, BF16), base, out, BF16)
                if out.tobytes() != new.tobytes():
                    wrong.append(KINDS[kind])

    threads = [threading.Thread(target=work, args=pair) for pair in pairs]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_counters_and_masks_are_small() -> None:
    codec = Codec()
    steps = np.arange(1 << 14, dtype="<i8").view(np.uint8)
    assert len(steps) / len(codec.encode(PLANES, steps, None, I64)) > 100
    mask = np.tril(np.ones((256, 256), dtype=np.uint8)).ravel()
    assert len(mask) / len(codec.encode(ZSTD, mask, None, DTYPES["bool"])) > 50
