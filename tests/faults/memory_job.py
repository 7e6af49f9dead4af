"""Run as ``memory_job.py STORE MEGABYTES MEMORY``: saves and restores a state of that size under a limit on the memory
of the process, and prints what it took. The limit leaves room for two buffers and a little (case G2)."""

from __future__ import annotations

import ctypes
import gc
import json
import resource
import sys
from pathlib import Path

import torch

import ckpt
import ckpt.checkpointer
import recovery.load  # noqa: F401 - what is imported belongs to the process, not to a save
from ckpt.errors import SaveFailed
from ckpt.options import size

LITTLE = 96 << 20
"""Bytes of address space beside buffers and `memory`: threads' stacks, arenas of the allocator, imports."""


def status(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{field}:"))
    return 1024 * int(line.split()[1])


def limited(to: int) -> None:
    """Private writable memory of this process at most so much; its hard limit stays."""
    resource.setrlimit(resource.RLIMIT_DATA, (to, resource.RLIM_INFINITY))


def peak(base: int) -> int:
    return status("VmHWM") - base


def forget_peak() -> int:
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def main() -> None:
    url, megabytes, memory = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    count = max(1, megabytes // 8)
    state = {f"w{n}": torch.randn(8 * 250_000, generator=generator) for n in range(count)}
    nbytes = sum(tensor.nbytes for tensor in state.values())
    options = ckpt.Options(memory=memory)
    room = size(memory) + LITTLE
    base = forget_peak()
    before = status("VmData")
    found: dict[str, object] = {"state": nbytes}
    with ckpt.Checkpointer(url, state, mirror="off", options=options) as saver:
        saver.restore()
        limited(status("VmData") + nbytes // 2)  # no room for a buffer: this save fails, and no other
        error = saver.save(1).error
        found["failed"] = isinstance(error, SaveFailed) and "memory" in str(error)
        limited(before + 2 * nbytes + room)
        for step in range(2, 5):
            for tensor in state.values():
                for part in tensor.split(100_000):
                    part.add_(torch.randn(len(part), generator=generator), alpha=1e-3)
            saver.save(step).wait()
        found["save"] = peak(base) - 2 * nbytes
    del saver
    sums = [float(tensor.double().sum()) for tensor in state.values()]
    base = forget_peak()
    limited(status("VmData") + nbytes + room)
    for tensor in state.values():
        tensor.zero_()
    ckpt.load_into(url, state)
    found["restore"] = peak(base) - nbytes
    assert sums == [float(tensor.double().sum()) for tensor in state.values()]
    found["steps"] = [snapshot.step for snapshot in ckpt.History(url).list()]
    print(json.dumps(found))


if __name__ == "__main__":
    import warnings

    warnings.simplefilter("ignore", RuntimeWarning)  # of step 1, at step 2
    main()
