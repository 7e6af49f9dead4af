"""A mirror folder that somebody else can write to: what lies there offers bytes with the right digest, or nothing.

Owners, modes, links and devices have tests of their own (tests/ckpt/mirror/test_folders.py), torn and flipped files
too (tests/recovery/test_survey.py). Here are files whose seals all hold, and which lie.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zstandard

from ckpt.format.documents import digest128
from ckpt.mirror.records import HEAD, SLOT_PAGES, Head, SlotRecord, read_head, read_slot, sealed
from recovery.survey import survey
from tests.ckpt.mirror.making import STORE, described, files, fill, in_child, layout_of, mirror
from tests.hostile.forging import MB, at_most, zstd_claiming

HUGE = 1 << 62
HUGE_LEAF = b'{"nbytes":24576,"leaves":[["w","p","uint8",[%d]]],"places":[[0,[0],[%d],0,false]]}' % (HUGE, HUGE)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The mirror of a rank that is no more."""
    base = tmp_path / "mirrors"

    def work() -> None:
        layout = layout_of()
        fill(mirror(base), layout, 10)
        assert described(layout).nbytes

    in_child(work)
    return files(base)[0]


def forge(path: Path, change: Callable[[Head, SlotRecord], tuple[Head, SlotRecord]], layout: bytes = b"") -> None:
    """Write head and slot anew, sealed; `layout` goes to the end of the file, where the record then says it is."""
    fd = os.open(path, os.O_RDWR)
    try:
        head = read_head(fd)
        record = read_slot(fd, 0, head)
        assert record is not None
        if layout:
            end = os.fstat(fd).st_size
            os.pwrite(fd, layout, end)
            record = msgspec.structs.replace(record, layout=(end, len(layout), digest128(layout)))
        head, record = change(head, record)
        os.pwrite(fd, sealed(head), HEAD + 8)
        os.pwrite(fd, sealed(record), SLOT_PAGES[0] + 8)
    finally:
        os.close(fd)


def replaced(**fields: Any) -> Callable[[Head, SlotRecord], tuple[Head, SlotRecord]]:
    def change(head: Head, record: SlotRecord) -> tuple[Head, SlotRecord]:
        of_head = {name: value for name, value in fields.items() if name in Head.__struct_fields__}
        of_slot = {name: value for name, value in fields.items() if name in SlotRecord.__struct_fields__}
        return msgspec.structs.replace(head, **of_head), msgspec.structs.replace(record, **of_slot)

    return change


FORGED = [
    replaced(nbytes=HUGE), replaced(capacity=HUGE), replaced(slots=(HUGE, 0)), replaced(slots=(0, 0)),
    replaced(layout=(0, HUGE, "0" * 32)), replaced(layout=(HUGE, 10, "0" * 32)),
    replaced(layout=(0, 1 << 27, "0" * 32)), replaced(store="../../../etc"), replaced(store="0" * 16),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(FORGED)))
def test_a_forged_record_offers_nothing_and_takes_no_memory(path: Path, number: int) -> None:
    forge(path, FORGED[number])
    with at_most(8 * MB), survey([path.parents[1]], STORE) as holdings:
        assert not [slot for slot in holdings.slots if slot.places]
        assert holdings.problems


@pytest.mark.parametrize(
    "layout",
    [
        zstd_claiming(1 << 20, repeat=256 * MB),
        zstd_claiming(1 << 40, repeat=256 * MB),
        zstd_claiming(None, repeat=256 * MB),
        zstandard.compress(b"[" * 100_000),
        zstandard.compress(HUGE_LEAF),
        zstandard.compress(b'{"nbytes":24576,"leaves":[],"places":[[7,[0],[1],0,false]]}'),
    ],
    ids=["claims a megabyte", "claims a terabyte", "claims nothing", "deep", "a huge leaf", "a leaf that is not there"],
)  # fmt: skip
def test_a_forged_layout_offers_nothing_and_takes_no_memory(path: Path, layout: bytes) -> None:
    forge(path, replaced(), layout)
    with at_most(8 * MB), survey([path.parents[1]], STORE) as holdings:
        assert not [slot for slot in holdings.slots if slot.places]
        assert holdings.problems
