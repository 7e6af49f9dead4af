from __future__ import annotations

import os
import resource
import sys

import numpy as np
import pytest

from ckpt.mirror.slots import Slots, _allocate
from tests.support.procs import run_ranks, succeed

MB = 1 << 20


def address(data: np.ndarray) -> int:
    return int(data.__array_interface__["data"][0])


def test_two_buffers_are_handed_out_in_turn() -> None:
    slots = Slots(3 * MB)
    one = slots.free(None)
    two = slots.free(one)
    assert not np.shares_memory(one, two)
    for _ in range(3):
        assert address(slots.free(two)) == address(one)
        assert address(slots.free(one[: 2 * MB])) == address(two)
    assert address(one) % 4096 == address(two) % 4096 == 0
    assert one.nbytes == 3 * MB and one.dtype == np.uint8


def test_a_buffer_that_was_handed_out_is_never_written_by_the_toucher() -> None:
    slots = Slots(70 * MB)
    one = slots.free(None)
    one[:] = 7
    two = slots.free(one)
    two[:] = 9
    assert slots.wait_ready(60)
    assert (one == 7).all() and (two == 9).all()


def test_all_pages_are_in_memory_once_ready() -> None:
    slots = Slots(32 * MB)
    assert slots.wait_ready(60)
    one = slots.free(None)
    two = slots.free(one)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    one[::4096] = 1
    two[::4096] = 1
    after = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    untouched = _allocate(32 * MB)
    untouched[::4096] = 1
    assert after - before < 10 <= resource.getrusage(resource.RUSAGE_SELF).ru_minflt - after


def test_a_larger_state_gets_new_buffers_and_the_reference_stays_whole() -> None:
    slots = Slots(MB)
    reference = slots.free(None)
    reference[:] = 5
    larger = slots.free(reference, 2 * MB)
    assert larger.nbytes == 2 * MB and not np.shares_memory(larger, reference)
    larger[:] = 6
    assert (reference == 5).all()
    other = slots.free(larger, 2 * MB)
    assert not np.shares_memory(other, larger) and not np.shares_memory(other, reference)


def test_a_slightly_smaller_state_keeps_its_buffers_and_a_much_smaller_one_does_not() -> None:
    slots = Slots(8 * MB)
    one = slots.free(None)
    assert address(slots.free(None, 5 * MB)) == address(one)
    assert slots.free(None, MB).nbytes == MB


def test_missing_memory_fails_one_call_and_the_next_one_works() -> None:
    """G2"""
    slots = Slots(1 << 60)
    with pytest.raises(MemoryError, match=f"host buffer of {1 << 60} bytes"):
        slots.free(None)
    with pytest.raises(MemoryError, match="use more ranks or hosts"):
        slots.free(None)
    assert not slots.wait_ready(60)
    assert slots.free(None, 4096).nbytes == 4096


def limited() -> None:
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * 4096
    resource.setrlimit(resource.RLIMIT_AS, (size + 160 * MB, resource.RLIM_INFINITY))
    slots = Slots(100 * MB)  # room for one of two
    one = slots.free(None)
    one[:] = 1
    for _ in range(2):
        try:
            slots.free(one)
        except MemoryError as error:
            print("refused", error)
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    slots.free(one)[:] = 2
    assert (one == 1).all()
    print("recovered")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_at_its_limit_saves_again_once_there_is_memory() -> None:
    """G2"""
    (out,) = succeed(run_ranks(limited, 1))
    assert out.count("refused no memory") == 2 and "recovered" in out, out


def test_a_state_of_nothing_has_two_buffers_too() -> None:
    slots = Slots(0)
    one = slots.free(None)
    two = slots.free(one)
    assert one.nbytes == two.nbytes == 0 and address(one) != address(two)


def test_arrays_outlive_the_slots() -> None:
    slots = Slots(MB)
    one = slots.free(None)
    one[:] = 3
    slots.close()
    del slots
    assert (one == 3).all()


@pytest.mark.skipif(sys.platform != "linux", reason="MADV_DONTFORK")
def test_forked_children_do_not_inherit_the_buffers() -> None:
    """A DataLoader worker would make the next capture copy every page once more."""
    (out,) = succeed(run_ranks(fork_with_slots, 1))
    assert "mapped in parent True, in child False" in out, out


def fork_with_slots() -> None:
    slots = Slots(MB)
    start = address(slots.free(None))
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, str(mapped(start)).encode())
        os._exit(0)
    os.waitpid(child, 0)
    print("mapped in parent", f"{mapped(start)}, in child {os.read(read, 10).decode()}")


def mapped(start: int) -> bool:
    with open("/proc/self/maps") as file:
        spans = [line.split()[0].split("-") for line in file]
    return any(int(low, 16) <= start < int(high, 16) for low, high in spans)
