"""Packs are plain safetensors files, and their headers are believed only when every field fits."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.format.codec import KINDS, NEEDS_BASE, SPARSE
from ckpt.format.manifest import chunk_digest, digest64, digest128
from ckpt.format.pack import PACK_LIMIT, TEXT_BOUND, FinishedPack, PackBuilder, read_header
from ckpt.format.shards import DTYPES


def add(pack: PackBuilder, blob: bytes, kind: int = 2, dtype: str = "float32", seed: bytes = b"") -> int:
    return pack.add(
        blob,
        kind=kind,
        digest=digest64(blob),
        chunk_digest=digest128(blob + seed),
        dtype=dtype,
        base_digest=digest128(b"base" + seed) if kind in NEEDS_BASE else None,
    )


def a_pack() -> FinishedPack:
    pack = PackBuilder()
    for i, (kind, dtype) in enumerate([(0, "float32"), (5, "bfloat16"), (2, "float32"), (3, "complex64")]):
        assert add(pack, bytes([i]) * (5 * i + 3), kind, dtype) == i
    return pack.finish()


blobs = st.lists(
    st.tuples(st.binary(min_size=1, max_size=60), st.sampled_from(list(KINDS)), st.sampled_from(list(DTYPES))),
    max_size=12,
)


@settings(max_examples=100, deadline=None)
@given(blobs)
def test_a_pack_opens_with_any_safetensors_reader_and_says_of_each_blob_what_was_added(
    added: list[tuple[bytes, int, str]],
) -> None:
    pack = PackBuilder()
    for i, (blob, kind, dtype) in enumerate(added):
        assert pack.count == i
        add(pack, blob, kind, dtype)
    bound = pack.size
    done = pack.finish()
    assert bound - (len(added) + 1 + len({d for _, _, d in added})) * TEXT_BOUND <= len(done.data) <= bound
    assert done.digest == digest64(done.data)
    assert [done.data[a:b] for a, b in done.ranges] == [blob for blob, _, _ in added]
    tensors = safetensors.numpy.load(done.data)
    assert len(tensors) == len(added)
    found = read_header(done.data)
    assert [(b.start, b.stop) for b in found] == list(done.ranges)
    for b, (blob, kind, dtype) in zip(found, added, strict=True):
        assert tensors[f"{b.n}-{b.digest}-{b.kind}"].tobytes() == blob
        assert (b.kind, b.dtype, b.element_size) == (kind, dtype, DTYPES[dtype].size)
        assert (b.digest, b.chunk_digest) == (digest64(blob), digest128(blob))
        assert (b.base_digest is not None) == (kind in NEEDS_BASE)


def test_equal_blobs_make_equal_packs() -> None:
    assert a_pack() == a_pack()


def test_the_header_can_be_read_without_the_blobs() -> None:
    done = a_pack()
    head = done.data[: done.ranges[0][0]]
    assert read_header(head, len(done.data)) == read_header(done.data)
    with pytest.raises(ValueError):
        read_header(head)
    with pytest.raises(ValueError):
        read_header(head[:-8], len(done.data))


def test_a_pack_of_a_leaf_with_two_percent_changed_is_85_times_smaller_than_raw() -> None:
    """The header counts. (scripts/bench_codec.py does it with 16M elements of encoded chunks.)"""
    pack = PackBuilder()
    sparse = 5495  # bytes of such a chunk of 512 KiB (test_codec.py)
    for i in range(61):
        add(pack, bytes([i]) * sparse, SPARSE, "bfloat16")
    assert 61 * (1 << 19) / len(pack.finish().data) > 85
    assert PACK_LIMIT == 32 << 20


def rebuilt(header: dict[str, Any], body: bytes, dump: Any = json.dumps) -> bytes:
    text = dump(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + body


def taken_apart() -> tuple[dict[str, Any], bytes]:
    data = a_pack().data
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


FIRST = f"0-{digest64(bytes(3))}-0"


def changed(change: Any) -> bytes:
    header, body = taken_apart()
    assert read_header(rebuilt(header, body)) == read_header(rebuilt(*taken_apart()))
    change(header)
    return rebuilt(header, body)


def rename(header: dict[str, Any], new: str) -> None:
    entries = list(header.items())
    header.clear()
    header.update((new if k == FIRST else k, v) for k, v in entries)


def rows(header: dict[str, Any], change: Any) -> None:
    text = header["__metadata__"]["blobs"].split(",")
    change(text)
    header["__metadata__"]["blobs"] = ",".join(text)


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("no metadata", lambda h: h.pop("__metadata__")),
        ("metadata that is no object", lambda h: h.update(__metadata__=3)),
        ("a newer format", lambda h: h["__metadata__"].update(format="2")),
        ("an unknown dtype", lambda h: h["__metadata__"].update(dtypes="float31:4,bfloat16:2,complex64:8")),
        ("a dtype of another size", lambda h: h["__metadata__"].update(dtypes="float32:8,bfloat16:2,complex64:8")),
        ("too few dtypes", lambda h: h["__metadata__"].update(dtypes="float32:4")),
        ("a row missing", lambda h: rows(h, lambda r: r.pop())),
        ("a row too many", lambda h: rows(h, lambda r: r.append(r[0]))),
        ("a keyframe with a base", lambda h: rows(h, lambda r: r.__setitem__(0, r[1]))),
        ("a delta without one", lambda h: rows(h, lambda r: r.__setitem__(1, r[0]))),
        ("a row of nonsense", lambda h: rows(h, lambda r: r.__setitem__(0, "nonsense"))),
        ("a name of nonsense", lambda h: rename(h, "weights")),
        ("a wrong number", lambda h: rename(h, "7" + FIRST[1:])),
        ("an unknown kind", lambda h: rename(h, FIRST[:-1] + "9")),
        ("another element type", lambda h: h[FIRST].update(dtype="F32")),
        ("another shape", lambda h: h[FIRST].update(shape=[1, 3])),
        ("a length that does not fit", lambda h: h[FIRST].update(shape=[4])),
        ("a gap", lambda h: h[FIRST].update(data_offsets=[1, 4])),
        ("an overlap", lambda h: h[FIRST].update(data_offsets=[0, 4], shape=[4])),
        ("a negative offset", lambda h: h[FIRST].update(data_offsets=[-3, 0])),
        ("an offset beyond belief", lambda h: h[FIRST].update(data_offsets=[0, 1 << 70], shape=[1 << 70])),
        ("an entry that is no object", lambda h: h.update({FIRST: [1, 2]})),
    ],
)
def test_a_header_that_does_not_fit_is_refused(what: str, change: Any) -> None:
    data = changed(change)
    with pytest.raises(ValueError):
        read_header(data)


def test_names_that_repeat_are_refused() -> None:
    header, body = taken_apart()
    text = json.dumps(header)
    twice = text.replace(FIRST, list(header)[3], 1)
    with pytest.raises(ValueError, match="twice"):
        read_header(rebuilt({}, body, lambda _: twice))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 7,
        b"\xff" * 8 + b"{}",
        (1 << 40).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (2).to_bytes(8, "little") + b"\xff\xff",
        (200_000).to_bytes(8, "little") + b"[" * 200_000,
        (600_000).to_bytes(8, "little") + b'{"a":' * 120_000,
        (6000).to_bytes(8, "little") + b'{"a":' + b"9" * 5994 + b"}",
    ],
)
def test_bytes_that_are_no_pack_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        read_header(data)


def test_a_cut_or_lengthened_pack_is_refused() -> None:
    data = a_pack().data
    for wrong in (data[:-1], data + b"\0", data[1:]):
        with pytest.raises(ValueError):
            read_header(wrong)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_damaged_header_is_refused_or_read_and_never_another_error(data: st.DataObject) -> None:
    pack = bytearray(a_pack().data)
    for _ in range(data.draw(st.integers(1, 3))):
        pack[data.draw(st.integers(0, len(pack) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = read_header(bytes(pack))
    except ValueError:
        return
    assert all(0 <= b.start <= b.stop <= len(pack) for b in found)


def test_text_does_not_outgrow_its_bound() -> None:
    """The longest dtype name, the largest kind number and offsets of a full pack."""
    pack = PackBuilder()
    blob = np.zeros(30 << 20, dtype=np.uint8).tobytes()
    add(pack, blob, SPARSE, "float8_e4m3fnuz")
    for i in range(2000):
        add(pack, b"x", SPARSE, "float4_e2m1fn_x2", b"%d" % i)
    bound = pack.size
    assert len(pack.finish().data) <= bound
    assert chunk_digest("uint8", blob) != digest128(blob)
