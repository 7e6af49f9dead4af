"""The bytes of a mirror file: what is cut, torn or changed is noticed, and nothing a file claims is believed."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import zstandard

from ckpt.format.layout import lay_out
from ckpt.format.manifest import digest128
from ckpt.format.shards import Box, Leaf, Shard, whole
from ckpt.mirror import records
from ckpt.mirror.owners import owner_of
from ckpt.mirror.records import (
    ALIGN,
    DATA,
    DIRTY,
    MAGIC,
    SLOT_PAGES,
    WHOLE,
    Described,
    Head,
    SlotRecord,
    describe,
    read_head,
    read_layout,
    read_owner,
    read_slot,
    sealed,
)
from tests.ckpt.mirror.making import ME, RUN, STORE, described, layout_of

LAYOUT = layout_of()
HEAD = Head(STORE, 0, LAYOUT.nbytes, (DATA, DATA + -(-LAYOUT.nbytes // ALIGN) * ALIGN))
END = HEAD.slots[1] + LAYOUT.nbytes


def record(of: Described, **changed: object) -> SlotRecord:
    good = SlotRecord(str(RUN), 7, 0, 1, of.nbytes, (END, len(of.blob), of.digest), 1e9)
    return msgspec.structs.replace(good, **changed)


@contextmanager
def written(path: Path, parts: dict[int, bytes], size: int | None = None) -> Iterator[int]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        for at, data in parts.items():
            os.pwrite(fd, data, at)
        if size is not None:
            os.ftruncate(fd, size)
        yield fd
    finally:
        os.close(fd)


def test_places_come_back_as_they_were(tmp_path: Path) -> None:
    leaf = Leaf("ünï.weight", "slot:exp_avg", "bfloat16", (40, 3))
    shards = [Shard(leaf, Box((0, 0), (8, 3))), Shard(leaf, Box((16, 0), (24, 3))), Shard(leaf, whole((40, 3)), True)]
    shards.append(Shard(Leaf("step", "slot:step", "float32", ()), whole(())))
    layout = described(lay_out(shards))
    with written(tmp_path / "x", {END: layout.blob}, END + len(layout.blob)) as fd:
        places = read_layout(fd, record(layout))
    assert [(p.shard, p.start) for p in places] == [(r.shard, r.start) for r in lay_out(shards).regions]


def test_equal_layouts_have_equal_digests() -> None:
    assert described(layout_of()) == described(layout_of())
    assert described(layout_of()).digest != described(layout_of(rows=65)).digest


def test_twenty_thousand_leaves_are_a_small_layout(tmp_path: Path) -> None:
    shards = [
        Shard(Leaf(f"optimizer.state.h.{i // 4}.attn.weight.{('p', 'step', 'exp_avg', 'exp_avg_sq')[i % 4]}", "slot",
                   "float32", (8, 4)), whole((8, 4)))
        for i in range(20_000)
    ]  # fmt: skip
    layout = described(lay_out(shards))
    assert len(layout.blob) < 300_000
    with written(tmp_path / "x", {END: layout.blob}) as fd:
        places = read_layout(fd, record(layout))
    assert len(places) == 20_000


def test_a_flipped_bit_anywhere_in_a_record_is_noticed(tmp_path: Path) -> None:
    body = sealed(HEAD)
    with written(tmp_path / "x", {0: MAGIC + body}) as fd:
        assert read_head(fd) == HEAD
        for bit in range(8 * len(body)):
            data = bytearray(body)
            data[bit // 8] ^= 1 << bit % 8
            os.pwrite(fd, data, 8)
            with pytest.raises(ValueError):
                read_head(fd)


def test_a_state_word_that_is_torn_counts_as_dirty(tmp_path: Path) -> None:
    body = sealed(record(described(LAYOUT)))
    for cut in range(8):
        for word in (WHOLE[:cut] + DIRTY[cut:], DIRTY[:cut] + WHOLE[cut:]):
            with written(tmp_path / "x", {SLOT_PAGES[0]: word + body}, END + 999) as fd:
                assert (read_slot(fd, 0, HEAD) is None) == (word != WHOLE)


def test_an_owner_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    owner = owner_of(ME, 5.0)
    with written(tmp_path / "x", {records.OWNER: DIRTY + sealed(owner)}) as fd:
        assert read_owner(fd) == owner
        os.pwrite(fd, b"\xff", records.OWNER + 40)
        assert read_owner(fd) is None


@pytest.mark.parametrize(
    "head",
    [
        Head(STORE, 0, 10, (DATA, DATA + 1)),
        Head(STORE, 0, 2 * ALIGN, (DATA, DATA + ALIGN)),
        Head(STORE, 0, 10, (0, DATA)),
        Head(STORE, 0, 1 << 80, (DATA, DATA + ALIGN)),
    ],
)
def test_a_head_that_cannot_be_is_refused(tmp_path: Path, head: Head) -> None:
    with written(tmp_path / "x", {0: MAGIC + sealed(head)}) as fd, pytest.raises(ValueError, match="slots at"):
        read_head(fd)


def test_another_versions_file_is_refused(tmp_path: Path) -> None:
    with written(tmp_path / "x", {0: b"CKPTMIR2" + sealed(HEAD)}) as fd, pytest.raises(ValueError, match="another"):
        read_head(fd)


def test_a_slot_of_more_than_there_is_is_refused(tmp_path: Path) -> None:
    good, too_much = record(described(LAYOUT)), record(described(LAYOUT), nbytes=LAYOUT.nbytes + 1)
    parts = {SLOT_PAGES[0]: WHOLE + sealed(too_much), SLOT_PAGES[1]: WHOLE + sealed(good)}
    with written(tmp_path / "x", parts, END - 1) as fd:
        with pytest.raises(ValueError, match="in a slot of"):
            read_slot(fd, 0, HEAD)
        with pytest.raises(ValueError, match="cut"):
            read_slot(fd, 1, HEAD)


def blob(**changed: object) -> bytes:
    rows = {"nbytes": 512, "leaves": [["w", "parameter", "float32", [128]]], "places": [[0, [0], [128], 0, False]]}
    return zstandard.compress(msgspec.json.encode({**rows, **changed}))


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (blob(nbytes=511), "512"),
        (blob(places=[[1, [0], [128], 0, False]]), "names leaf 1"),
        (blob(places=[[0, [0], [129], 0, False]]), "w"),
        (blob(places=[[0, [0], [128], 1, False]]), "at byte 1"),
        (blob(places=[[0, [-1], [128], 0, False]]), "no layout"),
        (blob(leaves=[["w", "parameter", "float33", [128]]]), "dtype"),
        (b"junk", "no layout|claims"),
        (blob() + b"x", "no layout"),
        (zstandard.compress(b"[" * 100_000), "no layout"),
    ],
)  # fmt: skip
def test_a_layout_that_cannot_be_is_refused(tmp_path: Path, data: bytes, text: str) -> None:
    good = blob()
    with written(tmp_path / "x", {0: good + data}) as fd:
        slot = SlotRecord(str(RUN), 7, 0, 1, 512, (0, len(good), digest128(good)), 1e9)
        assert read_layout(fd, slot)[0].shard.nbytes == 512
        bad = msgspec.structs.replace(slot, layout=(len(good), len(data), digest128(data)))
        with pytest.raises(ValueError, match=text):
            read_layout(fd, bad)


def test_a_frame_that_claims_a_terabyte_is_not_decoded(tmp_path: Path) -> None:
    data = bytearray(zstandard.ZstdCompressor(write_content_size=True).compress(bytes(1 << 20)))
    at = 5 if data[4] & 0x20 else 6
    data[4] |= 0xC0  # an eight-byte length
    data[at : at + 4] = (1 << 40).to_bytes(8, "little")
    with written(tmp_path / "x", {0: bytes(data)}) as fd:
        slot = SlotRecord(str(RUN), 7, 0, 1, 512, (0, len(data), digest128(bytes(data))), 1e9)
        with pytest.raises(ValueError, match=r"claims|no layout"):
            read_layout(fd, slot)


@pytest.mark.parametrize("layout", [(0, 1 << 40), (1 << 70, 10), (END, 99)])
def test_a_layout_beyond_the_file_is_refused(tmp_path: Path, layout: tuple[int, int]) -> None:
    with written(tmp_path / "x", {0: b"x"}, END) as fd, pytest.raises(ValueError, match="in a file of"):
        read_layout(fd, record(described(LAYOUT), layout=(*layout, "0" * 32)))


def test_random_bytes_are_never_a_mirror(tmp_path: Path) -> None:
    dice = random.Random(5)
    for _ in range(50):
        with written(tmp_path / "x", {0: MAGIC + dice.randbytes(3 * DATA)}) as fd:
            with pytest.raises(ValueError):
                read_head(fd)
            assert read_owner(fd) is None and read_slot(fd, 0, HEAD) is None


def test_a_layout_of_nothing(tmp_path: Path) -> None:
    layout = describe((), 0)
    with written(tmp_path / "x", {END: layout.blob}) as fd:
        assert read_layout(fd, record(layout)) == ()
