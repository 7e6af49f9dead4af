"""The buffers as a save and a restart use them: handed out in turn, found again, and never in anybody's way."""

from __future__ import annotations

import logging
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ckpt.mirror.file import MirrorFile
from ckpt.mirror.folders import store_identity
from ckpt.mirror.mirror import Mirror, open_mirror
from tests.ckpt.mirror.making import (
    ELSEWHERE,
    ME,
    STORE,
    at,
    described,
    files,
    fill,
    in_child,
    layout_of,
    mirror,
    whole_slots,
)
from tests.support.procs import run_ranks, succeed

LAYOUT, WIDER, NARROW = layout_of(), layout_of(leaves=4), layout_of(leaves=1)
N = LAYOUT.nbytes


def address(data: np.ndarray) -> int:
    return int(data.__array_interface__["data"][0])


# --- as `Slots` --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["file", "private"])
def test_two_buffers_are_handed_out_in_turn(tmp_path: Path, where: str) -> None:
    made = mirror(tmp_path / "m" if where == "file" else None)
    one = made.free(None, 5000)
    two = made.free(one)
    assert not np.shares_memory(one, two) and one.nbytes == two.nbytes == 5000
    assert address(one) % 4096 == address(two) % 4096 == 0
    for _ in range(3):
        assert address(made.free(two)) == address(one) and address(made.free(one[:3000])) == address(two)
    assert made.path is None if where == "private" else made.path in files(tmp_path / "m")


def test_a_buffer_that_was_handed_out_is_never_written_by_the_toucher(tmp_path: Path) -> None:
    made = mirror(tmp_path / "m")
    made.prepare(70 << 20)
    one = made.free(None)
    one[:] = 7
    two = made.free(one)
    two[:] = 9
    assert made.wait_ready(60)
    assert (one == 7).all() and (two == 9).all()
    made.close(remove=True)


def test_arrays_outlive_the_mirror(tmp_path: Path) -> None:
    made = mirror(tmp_path / "m")
    one = fill(made, LAYOUT, 3)
    made.close(remove=True)
    del made
    assert (one == 3).all() and not files(tmp_path / "m")


def test_a_state_of_nothing_has_two_buffers_too(tmp_path: Path) -> None:
    made = mirror(tmp_path / "m")
    one = made.free(None, 0)
    two = made.free(one)
    assert one.nbytes == two.nbytes == 0 and address(one) != address(two)


def test_a_slightly_smaller_state_keeps_its_buffers_and_a_much_smaller_one_does_not(tmp_path: Path) -> None:
    made = mirror(tmp_path / "m")
    one = made.free(None, 1 << 20)
    assert address(made.free(None, 3 << 18)) == address(one)
    first = made.path
    assert made.free(None, 1 << 17).nbytes == 1 << 17 and made.path != first


# --- what a dead process leaves ------------------------------------------------------------------------------------


def test_a_buffer_is_dirty_from_the_moment_it_is_handed_out_until_it_is_finished(tmp_path: Path) -> None:
    made = mirror(tmp_path / "m")
    one = fill(made, LAYOUT, 5)
    path = made.path
    assert path is not None and whole_slots(path) == {0: 5}
    two = made.free(one)
    two[:] = 6
    assert whole_slots(path) == {0: 5}
    made.finish(two, at(6), described(LAYOUT))
    assert whole_slots(path) == {0: 5, 1: 6}
    made.free(two)
    assert whole_slots(path) == {1: 6}


def test_a_failed_save_leaves_the_reference_alone(tmp_path: Path) -> None:
    made = mirror(tmp_path / "m")
    one = fill(made, LAYOUT, 5)
    for step in (6, 7):
        fill(made, LAYOUT, step, one)
        assert made.path is not None and whole_slots(made.path) == {0: 5, 1: step}


def test_finishing_private_memory_is_nothing_to_do() -> None:
    made = mirror(None)
    fill(made, LAYOUT, 5)
    made.close(remove=True)


def test_a_larger_state_moves_to_another_file_and_the_old_one_goes_after_the_next_commit(tmp_path: Path) -> None:
    made = mirror(tmp_path / "m")
    first = fill(made, LAYOUT, 5)
    old = made.path
    second = fill(made, WIDER, 6, first)
    assert old is not None and made.path is not None and made.path != old
    assert (first == 5).all()
    assert whole_slots(old) == {0: 5} and whole_slots(made.path) == {0: 6}, "6 may not be committed yet: 5 must live"
    fill(made, WIDER, 7, first)  # 6 was not committed
    assert files(tmp_path / "m") == sorted([old, made.path])
    second = fill(made, WIDER, 8, first)
    third = fill(made, WIDER, 9, second)
    assert files(tmp_path / "m") == [made.path] and whole_slots(made.path) == {0: 8, 1: 9}
    assert (third == 9).all() and (first == 5).all()


def test_a_dead_ranks_mirror_is_gone_on_with(tmp_path: Path) -> None:
    in_child(lambda: fill_and_die(tmp_path / "m"))
    (left,) = files(tmp_path / "m")
    made = mirror(tmp_path / "m")
    assert whole_slots(left) == {0: 5, 1: 6}
    reference = made.adopt(left, 0, N)
    assert reference is not None and (reference == 5).all()
    assert whole_slots(left) == {0: 5, 1: 6}, "nothing changes before the next save"
    assert made.wait_ready(60)
    assert whole_slots(left) == {0: 5, 1: 6}
    fill(made, LAYOUT, 7, reference)
    assert made.path == left and files(tmp_path / "m") == [left] and whole_slots(left) == {0: 5, 1: 7}


def fill_and_die(base: Path, rank: int = 0) -> None:
    made = mirror(base, rank)
    fill(made, LAYOUT, 6, fill(made, LAYOUT, 5))


def test_survivors_stay_until_the_new_reference_is_in_a_file_of_its_own(tmp_path: Path) -> None:
    """Killed again, at whatever moment of a restore, the node still has what it had."""
    base = tmp_path / "m"
    for rank in (0, 1):
        in_child(lambda rank=rank: fill_and_die(base, rank))
    left = files(base)
    made = mirror(base)
    made.prepare(WIDER.nbytes)
    assert made.wait_ready(60)
    restored = fill(made, WIDER, 6)  # put together by a restore
    assert set(left) < set(files(base)) and all(whole_slots(path) == {0: 5, 1: 6} for path in left)
    fill(made, WIDER, 7, restored)
    assert files(base) == [made.path], "every rank has come back, or this save would not have begun"


def test_a_living_process_keeps_its_file(tmp_path: Path) -> None:
    other = mirror(tmp_path / "m")
    fill(other, LAYOUT, 5)
    path = other.path
    made = mirror(tmp_path / "m")
    assert path is not None and made.adopt(path, 0, N) is None, "the very process, but somebody writes there"
    fill(made, LAYOUT, 7, fill(made, LAYOUT, 6))
    assert path in files(tmp_path / "m") and whole_slots(path) == {0: 5}


def test_what_this_process_closed_it_may_take_up_again(tmp_path: Path) -> None:
    other = mirror(tmp_path / "m")
    fill(other, LAYOUT, 5)
    path = other.path
    other.close(remove=False)
    made = mirror(tmp_path / "m")
    assert path is not None and made.adopt(path, 0, N) is not None


def test_a_file_of_another_container_is_taken_over_only_once_nobody_has_it_open(tmp_path: Path) -> None:
    other = mirror(tmp_path / "m", me=ELSEWHERE)
    fill(other, LAYOUT, 5)
    path = other.path
    made = mirror(tmp_path / "m")
    assert path is not None and made.adopt(path, 0, N) is None
    other.close(remove=False)
    assert made.adopt(path, 0, N) is not None


@pytest.mark.parametrize("what", ["another rank's", "another store's", "another folder's", "too small", "cut", "gone"])
def test_what_does_not_fit_is_not_gone_on_with(tmp_path: Path, what: str) -> None:
    base = tmp_path / "m"
    in_child(lambda: fill_and_die(base))
    (left,) = files(base)
    match what:
        case "another rank's":
            made = mirror(base, 1)
        case "another store's":
            made = Mirror(base, store_identity("s3://other"), rank=0, world_size=1, me=ME)
            made.prepare(N)
            left = left.rename(base / made.store / left.name)
        case "another folder's":
            made = mirror(tmp_path / "n")
        case _:
            made = mirror(base)
    if what == "cut":
        os.truncate(left, 20_000)
    if what == "gone":
        left.unlink()
    assert made.adopt(left, 0, 1 << 20 if what == "too small" else N) is None
    data = fill(made, LAYOUT, 6)
    assert made.path is not None and made.path != left and (data == 6).all()


def test_two_processes_in_one_folder_do_not_meet(tmp_path: Path) -> None:
    base = tmp_path / "m"
    one = mirror(base)
    fill(one, LAYOUT, 8)
    in_child(lambda: fill_and_die(base))  # the same rank, by mistake or by a zombie
    in_child(lambda: fill(mirror(base, 1), LAYOUT, 9))
    assert sorted(sorted(whole_slots(path).values()) for path in files(base)) == [[5, 6], [8], [9]]


# --- the end -----------------------------------------------------------------------------------------------------


def test_a_clean_end_leaves_nothing(tmp_path: Path) -> None:
    base = tmp_path / "m"
    in_child(lambda: fill_and_die(base, 3))
    ranks = [mirror(base, rank) for rank in (0, 1)]
    for made in ranks:
        fill(made, LAYOUT, 5)
    ranks[0].close(remove=True)
    assert files(base) == [ranks[1].path], "the dead are swept, the living are not"
    ranks[1].close(remove=True)
    assert list(base.iterdir()) == []


def test_an_end_after_a_failure_leaves_everything(tmp_path: Path) -> None:
    made = mirror(tmp_path / "m")
    fill(made, LAYOUT, 5)
    path = made.path
    made.close(remove=False)
    assert path is not None and whole_slots(path) == {0: 5}
    made.close(remove=True)
    assert path.exists(), "it was closed before"


def test_a_forked_child_that_closes_its_copy_removes_nothing(tmp_path: Path) -> None:
    made = mirror(tmp_path / "m")
    fill(made, LAYOUT, 5)
    in_child(lambda: made.close(remove=True))
    assert made.path in files(tmp_path / "m")
    assert mirror(tmp_path / "m").adopt(made.path, 0, N) is None, "and the lock is still ours"


def test_forked_children_do_not_inherit_the_buffers() -> None:
    (out,) = succeed(run_ranks(fork_with_mirror, 1))
    assert "mapped in parent True, in child False" in out, out


def fork_with_mirror() -> None:
    base = Path("/dev/shm") / f"ckpt-test-{os.getpid()}"
    made = mirror(base)
    start = address(made.free(None, 1 << 20))
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, str(mapped(start)).encode())
        os._exit(0)
    os.waitpid(child, 0)
    print("mapped in parent", f"{mapped(start)}, in child {os.read(read, 10).decode()}")
    made.close(remove=True)
    base.rmdir()


def mapped(start: int) -> bool:
    with open("/proc/self/maps") as file:
        spans = [line.split()[0].split("-") for line in file]
    return any(int(low, 16) <= start < int(high, 16) for low, high in spans)


# --- no room, no trust ---------------------------------------------------------------------------------------------


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB, as /dev/shm is one of 64 MB in a default container."""
    base = tmp_path / "tiny"
    base.mkdir(0o700)
    command = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=0700", "tmpfs", str(base)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("may not mount a tmpfs here")
    yield base
    subprocess.run(["umount", "-l", str(base)], check=True)


def test_too_small_a_file_system_is_said_once_and_private_memory_used(
    tiny: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = open_mirror(tiny, "s3://b", rank=3, world_size=4, nbytes=1 << 20)
    one = made.free(None)
    one[:] = 1
    two = made.free(one)
    two[:] = 2
    made.free(two, 3 << 20)[:] = 3
    (said,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert "rank 3 has no mirror" in said and "bytes are free" in said and "--shm-size" in said, said
    assert made.path is None and made.why is not None and files(tiny) == []


def test_a_file_system_that_fills_up_meanwhile_is_never_a_signal(
    tiny: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks measure the same free room, and then take it."""
    monkeypatch.setattr("ckpt.mirror.mirror.Folder.room", lambda _: (1 << 40, 1 << 40))
    made = open_mirror(tiny, "s3://b", rank=0, world_size=1, nbytes=400 << 10)
    made.free(None)
    assert made.path is not None, "two of 400 kB fit"
    late = open_mirror(tiny, "s3://b", rank=1, world_size=1, nbytes=400 << 10)
    data = late.free(None)
    data[:] = 1
    assert late.path is None and "No space left" in caplog.text
    assert files(tiny) == [made.path]
    late.free(data)  # tries once more
    assert files(tiny) == [made.path] and len(caplog.records) == 1


def test_a_second_buffer_without_room_gives_up_the_mirror_and_keeps_the_reference(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckpt.mirror.mirror.Folder.room", lambda _: (1 << 40, 1 << 40))
    made = open_mirror(tiny, "s3://b", rank=0, world_size=1)
    small, large = layout_of(rows=16), layout_of(rows=1500)
    first = fill(made, small, 5)
    second = fill(made, large, 6, first)  # 576 kB: one of them fits
    assert made.path is not None and whole_slots(made.path) == {0: 6}
    kept = made.path
    third = fill(made, large, 7, second)
    assert made.path is None and (second == 6).all() and (third == 7).all()
    assert files(tiny) == [kept], "6 is the last commit: it lives until 7 is one"
    fill(made, large, 8, third)
    assert kept not in files(tiny)


def test_room_that_survivors_took_is_asked_for_again_after_a_commit(
    tiny: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    blocker = tiny / "blocker"
    blocker.write_bytes(bytes(600 << 10))
    made = open_mirror(tiny, "s3://b", rank=0, world_size=1, nbytes=N)
    made.prepare(400 << 10)
    layout = layout_of(rows=1000)
    first = fill(made, layout, 5)
    assert made.path is None
    blocker.unlink()
    second = fill(made, layout, 6, first)
    assert made.path is not None and made.why is None and whole_slots(made.path) == {0: 6}
    assert (first == 5).all() and (second == 6).all()


def test_an_unsafe_folder_is_said_and_private_memory_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m").chmod(0o777)
    made = open_mirror(tmp_path / "m", "s3://b", rank=0, world_size=1, nbytes=N)
    assert made.free(None).nbytes == N
    assert "others may write to it" in caplog.text and list((tmp_path / "m").iterdir()) == []


def test_off_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    made = open_mirror("off", "s3://b", rank=0, world_size=1, nbytes=N)
    made.free(made.free(None))
    made.close(remove=True)
    assert not caplog.records and made.why == "mirror='off'"


def test_a_layout_without_room_does_not_fail_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    made = mirror(tmp_path / "m")
    data = made.free(None, N)
    data[:] = 5
    monkeypatch.setattr(MirrorFile, "mark_whole", full)
    made.finish(data, at(5), described(LAYOUT))
    assert "No space left" in caplog.text and (data == 5).all() and made.path is None
    assert made.free(data).nbytes == N


def test_missing_memory_fails_one_call_and_the_next_one_works() -> None:
    """G2"""
    made = mirror(None)
    with pytest.raises(MemoryError, match="host buffer"):
        made.free(None, 1 << 60)
    assert made.free(None, 4096).nbytes == 4096


def test_an_adopted_slot_is_ready_without_losing_a_byte(tmp_path: Path) -> None:
    base = tmp_path / "m"

    def big() -> None:
        fill(mirror(base), layout_of(rows=50_000), 5)

    in_child(big)
    (left,) = files(base)
    made = mirror(base)
    reference = made.adopt(left, 0, layout_of(rows=50_000).nbytes)
    assert made.wait_ready(60) and reference is not None and (reference == 5).all()
    assert made.free(reference).nbytes == reference.nbytes


def test_the_store_is_known_by_its_identity_alone(tmp_path: Path) -> None:
    made = open_mirror(tmp_path / "m", "s3://bucket/very-secret-name", rank=0, world_size=1, nbytes=N, wall=time.time)
    made.finish(made.free(None), at(5), described(LAYOUT))
    assert made.path is not None and b"very-secret" not in made.path.read_bytes()
    assert made.path.parent.name == store_identity("s3://bucket/very-secret-name") != STORE
