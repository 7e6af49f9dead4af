"""One mirror file as its owner writes it: whenever the owner dies, each slot is dirty, or whole."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import warnings
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from ckpt.mirror import file as file_module
from ckpt.mirror.file import MirrorFile
from ckpt.mirror.folders import Folder, open_store_folder
from ckpt.mirror.records import ALIGN
from tests.ckpt.mirror.making import ME, STORE, at, described, layout_of, whole_slots

LAYOUT, WIDER = layout_of(), layout_of(leaves=4)
CAPACITY = WIDER.nbytes


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return open_store_folder(tmp_path / "m", STORE, create=True)


def create(folder: Folder, capacity: int = CAPACITY, rank: int = 0) -> MirrorFile:
    made = MirrorFile.create(folder, store=STORE, rank=rank, capacity=capacity, who=ME, now=5.0)
    made.make_ready((0, 1), bool, keep=False)
    assert made.failed is None
    return made


def fill(file: MirrorFile, number: int, step: int, layout: Any = LAYOUT) -> None:
    file.mark_dirty(number)
    half = layout.nbytes // 2
    file.slots[number][:half] = step
    file.slots[number][half : layout.nbytes] = step
    file.mark_whole(number, id_=at(step), world_size=1, described=described(layout), now=5.0)


def test_slots_begin_at_pages_and_lie_apart(folder: Folder) -> None:
    file = create(folder)
    starts = [slot.__array_interface__["data"][0] for slot in file.slots]
    assert all(start % ALIGN == 0 for start in starts) and starts[1] - starts[0] >= CAPACITY
    assert [file.holds(slot[5:9]) for slot in file.slots] == [0, 1]
    assert file.holds(None) is file.holds(np.zeros(4, np.uint8)) is None


def test_slots_of_nothing_lie_apart_too(folder: Folder) -> None:
    file = create(folder, 0)
    assert [file.holds(slot) for slot in file.slots] == [0, 1]


def test_every_page_is_reserved_in_the_file_system(folder: Folder) -> None:
    """A file that was only truncated answers with SIGBUS when the file system is full."""
    file = create(folder, 1 << 20)
    assert (folder.path / file.name).stat().st_blocks * 512 >= 2 << 20


def test_a_kill_at_any_line_leaves_each_slot_dirty_or_whole(folder: Folder) -> None:
    """What a reader finds is looked at before every line that the owner runs, for layouts that change and return."""
    file = create(folder)
    path = folder.path / file.name
    seen: list[dict[int, int]] = []

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename not in (file_module.__file__, __file__) or frame.f_code.co_name == "whole_slots":
            return None
        sys.settrace(None)
        seen.append(whole_slots(path))
        sys.settrace(trace)
        return trace

    for step, layout in enumerate([LAYOUT, LAYOUT, WIDER, WIDER, LAYOUT, WIDER, LAYOUT, LAYOUT], 1):
        before = whole_slots(path)
        sys.settrace(trace)
        try:
            fill(file, step % 2, step, layout)
        finally:
            sys.settrace(None)
        assert whole_slots(path) == {**before, step % 2: step}
        assert all(found.get(1 - step % 2) == before.get(1 - step % 2) for found in seen), "the other slot was touched"
        assert {} in seen or {1 - step % 2: step - 1} in seen
        assert len(seen) > 20
        seen.clear()


def test_layouts_do_not_pile_up(folder: Folder) -> None:
    file = create(folder)
    sizes = []
    for step in range(40):
        fill(file, step % 2, step, (LAYOUT, WIDER, layout_of(rows=63))[step % 3])
        assert whole_slots(folder.path / file.name)[step % 2] == step
        sizes.append((folder.path / file.name).stat().st_size)
    assert max(sizes[10:]) == max(sizes[:10])


def endless(base: Path, tell: int) -> None:
    """Fill slots in turn, for ever, saying where we are."""
    file = MirrorFile.create(
        open_store_folder(base, STORE, create=True), store=STORE, rank=0, capacity=BIG.nbytes, who=ME, now=5.0
    )  # fmt: skip
    file.make_ready((0, 1), bool, keep=False)
    of = described(BIG)
    for step in range(250):
        number = step % 2
        os.write(tell, b".")
        file.mark_dirty(number)
        half = BIG.nbytes // 2
        file.slots[number][:half] = step
        os.write(tell, b".")
        file.slots[number][half:] = step
        os.write(tell, b".")
        file.mark_whole(number, id_=at(step), world_size=1, described=of, now=5.0)
    signal.pause()  # on a machine so busy that the test's own process has not come round to the kill yet


BIG = layout_of(rows=8192)


@pytest.mark.parametrize("seed", range(20))
def test_sigkill_at_any_moment_leaves_each_slot_dirty_or_whole(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    told, tell = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        try:
            endless(tmp_path / "m", tell)
        finally:
            os._exit(4)
    os.close(tell)
    for _ in range(dice.randrange(2, 30)):
        assert os.read(told, 1)
    os.kill(pid, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    os.close(told)
    (path,) = (tmp_path / "m").glob("*/*")
    found = whole_slots(path)
    assert len(found) < 2 or abs(found[0] - found[1]) == 1


def test_a_slot_that_is_given_back_frees_its_memory(tmp_path: Path) -> None:
    base = Path("/dev/shm") / f"ckpt-test-{os.getpid()}"
    try:
        with open_store_folder(base, STORE, create=True) as folder:
            file = create(folder, 8 << 20)
            fill(file, 1, 7)
            before = (folder.path / file.name).stat().st_blocks
            file.give_back(0)
            assert (folder.path / file.name).stat().st_blocks <= before - (8 << 20) // 512
            assert whole_slots(folder.path / file.name) == {1: 7}
            file.remove()
    finally:
        os.rmdir(base / STORE)
        os.rmdir(base)


def test_the_memory_of_a_removed_file_goes_with_its_last_array(folder: Folder) -> None:
    """A forked DataLoader worker holds the descriptor for as long as it lives."""
    file = create(folder)
    fill(file, 0, 7)
    other = os.dup(file._fd)  # what a forked child has
    data = file.slots[0]
    file.remove()
    file.close()
    assert not list(folder.path.iterdir())
    del file
    gc.collect()
    assert (data[: LAYOUT.nbytes] == 7).all() and os.fstat(other).st_size > 2 * CAPACITY
    del data
    gc.collect()
    assert os.fstat(other).st_size == 0
    os.close(other)


def test_a_forked_child_that_lets_go_of_a_removed_file_takes_nothing_from_its_parent(folder: Folder) -> None:
    file = create(folder)
    fill(file, 0, 7)
    file.remove()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        try:
            del file
            gc.collect()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert (file.slots[0][: LAYOUT.nbytes] == 7).all() and os.fstat(file._fd).st_size > 2 * CAPACITY


def test_no_room_is_told_and_never_a_signal(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, start: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space"):
        MirrorFile.create(folder, store=STORE, rank=0, capacity=CAPACITY, who=ME, now=5.0)
    assert not list(folder.path.iterdir())


def test_a_layout_without_room_leaves_the_slot_dirty(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    file = create(folder)
    fill(file, 0, 7)
    file.mark_dirty(1)
    monkeypatch.setattr(os, "pwrite", lambda *_: 0)
    with pytest.raises(OSError, match="nothing written"):
        file.mark_whole(1, id_=at(8), world_size=1, described=described(WIDER), now=5.0)
    assert whole_slots(folder.path / file.name) == {0: 7}
