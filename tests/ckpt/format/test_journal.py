"""Records and segments: what was written is read, and anything else is told."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import DamagedError, FormatTooNew
from ckpt.format.codec import Codec
from ckpt.format.documents import FORMAT
from ckpt.format.journal import (
    CHUNK,
    SUM,
    Coded,
    Event,
    Group,
    OpenRecord,
    decode_run,
    encode_run,
    read_record,
    read_segment,
    record_head,
    write_record,
    write_segment,
)
from ckpt.format.names import RunId, SegmentName, SnapshotId
from ckpt.format.probe import Learned
from ckpt.format.shards import Box, Leaf, Shard

RUN = RunId(3, "0123abcd")
TABLE = (
    Shard(Leaf("model.w", "parameter", "float32", (6, 4)), Box((2, 0), (4, 4))),
    Shard(Leaf("model.x", "buffer", "int64", ()), Box((), ()), per_rank=True),
)


def made(**more: Any) -> bytes:
    codec, learned = Codec(), Learned()
    gradient = np.arange(16, dtype=np.float32).view(np.uint8)
    rows, blobs = encode_run(codec, learned, "gradient", "float32", gradient, None, lambda: None)
    group = Group((0,), msgspec.Raw(b'{"dict":[]}'))
    fields: dict[str, Any] = {
        "id_": SnapshotId(RUN, 8),
        "previous": 7,
        "rank": 1,
        "world_size": 2,
        "extends": SnapshotId(RUN, 5),
        "threads": 1,
        "count": 2,
        "table": TABLE,
        "aliases": {"model.v": "model.w"},
        "events": [Event("optimizer", "SGD", (group,), (Coded("float32", (0,), rows),))],
        "tensors": [],
        "values": {"schedule": b"3"},
        "gone": ["old"],
    }
    return write_record(record_head(**(fields | more)), b"s" * SUM * 2, blobs)


def test_a_record_is_read_as_it_was_written() -> None:
    record = read_record(made(), "here")
    assert isinstance(record, OpenRecord)
    head = record.head
    assert (head.id, head.previous, head.rank, head.extends) == (SnapshotId(RUN, 8), 7, 1, str(SnapshotId(RUN, 5)))
    assert tuple(row.shard for row in head.rows or ()) == TABLE
    assert record.sums == b"s" * SUM * 2 and head.gone == ("old",) and bytes(head.values["schedule"]) == b"3"
    out = np.empty(64, np.uint8)
    decode_run(Codec(), head.events[0].gradients[0], record.blobs, None, out)
    assert out.view(np.float32).tolist() == list(range(16))


def test_any_flipped_bit_of_a_record_or_a_segment_is_damage() -> None:
    for data, read in ((made(), read_record), (write_segment([made(), made()]), read_segment)):
        for at in range(0, 8 * len(data), 37):
            wrong = bytearray(data)
            wrong[at // 8] ^= 1 << at % 8
            with pytest.raises(DamagedError):
                read(bytes(wrong), "here")  # type: ignore[operator]
        with pytest.raises(DamagedError):
            read(data[:-1], "here")  # type: ignore[operator]


def test_a_segment_gives_its_records_in_order() -> None:
    records = [made(), made(previous=6)]
    assert [bytes(record) for record in read_segment(write_segment(records), "here")] == records


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"rank": 2}, "rank 2 of world size 2"),
        ({"previous": 8}, "a step from 8 to 8"),
        ({"count": 1}, "2 rows where 1 are counted"),
        ({"tensors": [Coded("float32", (5,), ())]}, "rows up to 5 of 2"),
        ({"tensors": [Coded("float31", (0,), ())]}, "bytes of float31"),
    ],
)
def test_a_record_that_contradicts_itself_is_damage(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(DamagedError, match=text):
        read_record(made(**wrong), "here")


def test_a_newer_format_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from ckpt.format import journal

    monkeypatch.setattr(journal, "FORMAT", FORMAT + 1)
    with pytest.raises(FormatTooNew):
        read_record(made(), "here")


@given(
    st.integers(0, 3 * CHUNK // 4096).map(lambda n: 4096 * n + 4 * (n % 7)),
    st.sampled_from(["float32", "bfloat16", "int64", "bool"]),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
def test_any_bytes_are_coded_and_come_back(size: int, dtype: str, based: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    size -= size % 8
    base = rng.integers(0, 256, size, np.uint8)
    data = base.copy()
    data[rng.integers(0, max(size, 1), size // 50)] ^= 1 if size else 0
    rows, blobs = encode_run(Codec(), Learned(), "gradient", dtype, data, base if based else None, lambda: None)
    out = np.empty(size, np.uint8)
    coded = Coded(dtype, (0,), rows)
    decode_run(Codec(), coded, [memoryview(blob) for blob in blobs], base if based else None, out)
    assert out.tobytes() == data.tobytes()


def test_gradients_that_are_exactly_bf16_cost_less_than_half() -> None:
    exact = np.random.default_rng(0).standard_normal(1 << 18).astype(np.float32)
    words = exact.view(np.uint32) & np.uint32(0xFFFF0000)
    sizes = [
        sum(map(len, encode_run(Codec(), Learned(), "gradient", "float32", a.view(np.uint8), None, lambda: None)[1]))
        for a in (exact, words)
    ]
    assert sizes[1] < 0.5 * exact.nbytes and sizes[1] < 0.6 * sizes[0]


def test_segments_have_names_that_say_what_they_hold() -> None:
    name = SegmentName(RUN, 3, 1200, 1250)
    assert name.key == "journal/000003-0123abcd/00003/000000001200-000000001250.segment"
    assert SegmentName.parse(name.key) == name
