"""How long training stands still for a save, against a plain copy of the same tensors into ready memory.

    python scripts/bench_save.py [--repeat 15] [--threads 1] [--check]

Two states on the CPU, each with AdamW: one of 300 MB in a few large tensors, and one of 5,000 parameters (20,000
tensors). Saves and plain copies take turns in one process, and each save's writer is idle again before the next turn.
Beside the time that went by stands what the calling thread itself computed: on a machine that others use, too, the
first says how long one waits there, the second what it costs. `--check` exits with 1 when a bar is missed: 1.3 times
the plain copy, and 60 ms.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import ckpt
from ckpt.leaves import Flattener
from scripts.idle import busy_cores


@dataclass(frozen=True, slots=True)
class Took:
    """Milliseconds that went by, and that this thread computed."""

    wall: float
    cpu: float

    def __str__(self) -> str:
        return f"{self.wall:.1f} ms (computing {self.cpu:.1f})"


@dataclass(frozen=True, slots=True)
class Blocked:
    """Medians over the repetitions, and the first save (which agrees on the layout and makes buffers)."""

    tensors: int
    nbytes: int
    plain: Took
    save: Took
    capture: Took
    first: Took


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


def _capture(state: dict[str, object], repeat: int) -> Took:
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


def _timed(call: Callable[[], object]) -> Took:
    wall, cpu = time.perf_counter(), time.thread_time()
    call()
    return Took(1000 * (time.perf_counter() - wall), 1000 * (time.thread_time() - cpu))


def _median(turns: list[Took]) -> Took:
    return Took(statistics.median(t.wall for t in turns), statistics.median(t.cpu for t in turns))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default 1)")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a bar is missed")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if (others := busy_cores()) > 0.1:
        print(f"warning: other processes use {others:.2f} cores; look at what was computed")
    missed = []
    for name, make in (("300 MB in large tensors", large_state), ("5,000 parameters with AdamW", many_tensors)):
        found = measure(make(), options.repeat)
        ratio, computed = found.save.wall / found.plain.wall, found.save.cpu / found.plain.cpu
        print(
            f"{name}: {found.tensors:,} tensors, {found.nbytes / 1e6:.0f} MB: plain copy {found.plain}, "
            f"save() {found.save}: {ratio:.2f} times (computing {computed:.2f}), of which copying {found.capture}; "
            f"first save {found.first}"
        )
        if make is large_state and ratio > 1.3:
            missed.append(f"{name}: {ratio:.2f} times a plain copy, at most 1.3 wanted")
        if make is many_tensors and found.save.wall > 60:
            missed.append(f"{name}: {found.save.wall:.0f} ms, at most 60 wanted")
    for text in missed:
        print(f"missed: {text}")
    return 1 if missed and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
