"""What goes out of a snapshot, and how a file or folder comes to be there."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest

from ckpt.errors import NoSnapshot
from ckpt.format.shards import Box
from ckpt.format.values import encode
from recovery import outward
from recovery.outward import landing, open_export
from storage_backends.memory import MemoryStore
from tests.support.stores import DirectWriter, Each


def test_per_rank_leaves_and_values_are_one_where_they_are_equal() -> None:
    store = MemoryStore()
    writer = DirectWriter(store, ranks=2)
    writer.begin()
    one, two = np.ones(2000), np.zeros(2000)
    state = {"m.w": one, "m.same": Each((one, one)), "m.each": Each((one, two)), "mm.other": one}
    values = [{"best": encode(1, "b"), "own": encode(rank, "o"), "$data": encode(1, "d")} for rank in (0, 1)]
    id_ = writer.step(10, state, values=values)
    everything = open_export(store, id_)
    assert [t.name for t in everything.tensors] == ["m.each@rank0", "m.each@rank1", "m.same", "m.w", "mm.other"]
    assert everything.values == {"best": 1, "own@rank0": 0, "own@rank1": 1}
    under = open_export(store, id_, "m")
    assert [t.name for t in under.tensors] == ["each@rank0", "each@rank1", "same", "w"]
    assert (under.values, under.rest) == ({}, None)
    with pytest.raises(NoSnapshot, match=r"nothing under the name 'model'; there is m, mm"):
        open_export(store, id_, "model")


def test_pieces_follow_each_other_and_end_where_chunks_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outward, "WINDOW", 5000)
    assert list(outward._runs((10, 256), 4, 2048)) == [
        Box((first, 0), (4 if first < 8 else 2, 256)) for first in (0, 4, 8)
    ]
    assert list(outward._runs((2, 3000), 4, 2048)) == [
        Box((row, first), (1, min(1024, 3000 - first))) for row in (0, 1) for first in (0, 1024, 2048)
    ]
    assert list(outward._runs((), 4, 2048)) == [Box((), ())]


def test_what_is_there_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(ValueError, match="nothing is overwritten"), landing(tmp_path / "out"):
        raise AssertionError("entered")
    assert (tmp_path / "out").read_text() == "mine"


def test_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), landing(tmp_path / "deep" / "out") as partial:
        partial.mkdir()
        (partial / "half").write_text("x")
        signal.raise_signal(signal.SIGINT)
    assert not list((tmp_path / "deep").iterdir())


def test_a_full_disk_is_an_error_of_the_place(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot be written: .*No space"), landing(tmp_path / "out") as partial:
        partial.write_text("half")
        raise OSError(28, "No space left on device")
    assert not list(tmp_path.iterdir())
