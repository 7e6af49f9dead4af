"""How long training stands still for a save, against a plain copy of the same tensors into ready memory.

    python scripts/bench_save.py [--repeat 9] [--threads 1] [--check]

Two states on the CPU, each with AdamW: one of 300 MB in a few large tensors, and one of 5,000 parameters (20,000
tensors). Saves and plain copies take turns in one process, and each save's writer is idle again before the next turn.
`--check` exits with 1 when a bar is missed: 1.3 times the plain copy, and 60 ms.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

import ckpt
from ckpt.leaves import Flattener


@dataclass(frozen=True)
class Blocked:
    """Milliseconds: medians over the repetitions, and the first save (which agrees on the layout and makes buffers)."""

    tensors: int
    nbytes: int
    plain: float
    save: float
    capture: float
    first: float


def large_state() -> dict[str, object]:
    """About 300 MB: 25 million parameters in 24 matrices, and two moments of each."""
    return _with_adam(nn.ParameterList(nn.Parameter(torch.randn(1024, 1024)) for _ in range(24)))


def many_tensors() -> dict[str, object]:
    """5,000 parameters of 64 to 1,000 elements: 20,000 tensors with moments and step counters."""
    sizes = torch.randint(64, 1001, (5000,), generator=torch.Generator().manual_seed(0)).tolist()
    return _with_adam(nn.ParameterList(nn.Parameter(torch.randn(size)) for size in sizes))


def _with_adam(parameters: nn.ParameterList) -> dict[str, object]:
    optimizer = torch.optim.AdamW(parameters.parameters(), lr=1e-3)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return {"model": parameters, "optimizer": optimizer}


def measure(state: dict[str, object], repeat: int) -> Blocked:
    sources = [live.tensor for live in Flattener(dict(state)).flatten().shards]
    ready = [tensor.clone() for tensor in sources]

    def plain() -> None:
        for target, source in zip(ready, sources, strict=True):
            target.copy_(source)

    parameters = state["model"]
    assert isinstance(parameters, nn.ParameterList)
    with tempfile.TemporaryDirectory() as folder, ckpt.Checkpointer(Path(folder) / "store", state) as saver:
        first = _timed(lambda: saver.save(0))
        saver.wait()
        plains, saves = [], []
        for step in range(1, repeat + 2):
            with torch.no_grad():
                parameters[0].add_(1.0)  # so that there is something to store, and little
            plains.append(_timed(plain))
            saves.append(_timed(lambda step=step: saver.save(step)))
            saver.wait()
        # The second save fills the second buffer for the first time: not one of the many that follow.
        del plains[0], saves[0]
    nbytes = sum(tensor.nbytes for tensor in sources)
    return Blocked(len(sources), nbytes, _median(plains), _median(saves), _capture(state, repeat), first)


def _capture(state: dict[str, object], repeat: int) -> float:
    """The copy alone, without the walk through the state, the vote and the hand-over."""
    from ckpt.format.layout import lay_out
    from ckpt.mirror.slots import Slots
    from ckpt.saving.capture import Capturer

    flat = Flattener(dict(state)).flatten()
    layout = lay_out(live.shard for live in flat.shards)
    slots = Slots(layout.nbytes)
    slots.wait_ready()
    capturer, slot = Capturer(layout), slots.free(None)
    capturer.take(flat, slot)
    return _median([_timed(lambda: capturer.take(flat, slot)) for _ in range(repeat)])


def _timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return 1000 * (time.perf_counter() - began)


def _median(values: list[float]) -> float:
    return statistics.median(values)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default 1)")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a bar is missed")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    busy, cores = os.getloadavg()[0], os.cpu_count() or 1
    if busy > 0.5:
        print(f"warning: {busy:.1f} of {cores} cores were busy in the last minute; these figures say little")
    missed = []
    for name, make in (("300 MB in large tensors", large_state), ("5,000 parameters with AdamW", many_tensors)):
        found = measure(make(), options.repeat)
        ratio = found.save / found.plain
        print(
            f"{name}: {found.tensors:,} tensors, {found.nbytes / 1e6:.0f} MB: plain copy {found.plain:.1f} ms, "
            f"save() {found.save:.1f} ms ({ratio:.2f} x), of which copying {found.capture:.1f} ms; "
            f"first save {found.first:.0f} ms"
        )
        if make is large_state and ratio > 1.3:
            missed.append(f"{name}: {ratio:.2f} times a plain copy, at most 1.3 wanted")
        if make is many_tensors and found.save > 60:
            missed.append(f"{name}: {found.save:.0f} ms, at most 60 wanted")
    for text in missed:
        print(f"missed: {text}")
    return 1 if missed and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
