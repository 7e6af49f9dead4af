"""What moving a state of 1 GB in and out costs, checking it, and compacting it: seconds, and peak memory above an
interpreter with everything loaded.

python -m scripts.bench_moves [--check]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from ckpt.format.names import PACKS, RunId
from ckpt.format.shards import DTYPES, Box, Leaf, Shard, whole
from ckpt.history.clock import SystemClock
from ckpt.history.keep import Keep
from ckpt.history.pins import claim
from ckpt.history.retention import execute, plan_prune
from ckpt.history.runs import identity
from ckpt.saving.inward import Bytes, store_snapshot
from storage_backends import open_store
from tests.support.stores import DirectWriter

FORMS = ("safetensors", "torch", "dcp")

LIMIT = 400e6
"""Bytes above the interpreter that no verb may need (issue 5)."""

_CHILD = """
import sys, time
from pathlib import Path
import torch, torch.distributed.checkpoint
from ckpt.cli import main

def kilobytes(what):
    return next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if what in line)

Path("/proc/self/clear_refs").write_text("5")  # else the peak of what was imported hides what comes now
before, began = kilobytes("VmRSS"), time.perf_counter()
code = main(sys.argv[1:])
print(code, time.perf_counter() - began, (kilobytes("VmHWM") - before) * 1024, file=sys.stderr)
"""


class Made:
    """A tensor of noise that is nowhere: every read makes its own piece of it."""

    def __init__(self, path: str, dtype: str, shape: tuple[int, ...], box: Box | None = None) -> None:
        self.shard = Shard(Leaf(path, "parameter", dtype, shape), box or whole(shape))

    def read(self, start: int, stop: int) -> Bytes:
        size = DTYPES[self.shard.leaf.dtype].size
        rng = np.random.default_rng([start, len(self.shard.leaf.path)])
        noise = rng.standard_normal((stop - start) // size, np.float32)
        if size == 2:  # bfloat16 is the upper half of a float32
            return np.ascontiguousarray(noise.view(np.uint16)[1::2]).view(np.uint8)
        return noise.view(np.uint8)


def run(*arguments: str) -> tuple[float, float]:
    """Seconds and peak bytes of one verb, in a process of its own."""
    result = subprocess.run([sys.executable, "-c", _CHILD, *arguments], capture_output=True, text=True, check=True)
    code, seconds, peak = result.stderr.splitlines()[-1].split()
    if code != "0":
        raise SystemExit(f"ckpt {' '.join(arguments)}: exit code {code}\n{result.stderr}")
    return float(seconds), float(peak)


def half_dead(url: str, mb: int) -> int:
    """A store with a snapshot of `mb` MB, of whose packs every second chunk belongs to a snapshot that has gone; bytes
    of it that a compaction moves."""
    store = open_store(url)
    chunk = 1 << 19
    noise = np.random.default_rng(0).integers(0, 256, (mb * 10**6 // chunk, chunk), np.uint8)
    writer = DirectWriter(store, chunk=chunk, deltas=False)
    writer.begin()
    writer.step(1, {"w": noise})
    noise[1::2] += 1
    kept = writer.step(2, {"w": noise})
    claim(store, "kept", kept)
    last = DirectWriter(store, run=RunId(2, "0ddba11e"))
    last.begin(resumed_from=kept)
    last.step(3, {"w": np.zeros(3)})
    execute(plan_prune(store, Keep(last=1), grace=0), store, clock=SystemClock())
    return len(noise[::2]) * chunk


def measure(
    at: Path, mb: int, forms: Sequence[str] = ("safetensors", "torch", "dcp")
) -> Iterator[tuple[str, float, float]]:
    """Each verb on a state of about `mb` MB below the folder `at`: its name, seconds, peak bytes."""
    large = Made("model.embedding.weight", "bfloat16", (mb * 250_000 // 16384, 16384))
    others = [Made(f"model.h.{n}.weight", "float32", (mb * 2, 2048)) for n in range(32)]
    store = str(at / "store")
    store_snapshot(open_store(store), SystemClock(), identity(None), 1, [large, *others], values={}, aliases={})
    verbs: list[tuple[str, ...]] = [("verify", store, "--deep")]
    for form in forms:
        verbs.append(("export", store, "1", str(at / form), "--to", form))
        verbs.append(("import", str(at / f"from-{form}"), str(at / form), "--from", form))
    for verb in verbs:
        yield f"{verb[0]} {verb[-1].lstrip('-')}", *run(*verb)
    half = str(at / "half")
    moved = half_dead(half, mb)
    before = sum(e.size for e in open_store(half).list(PACKS))
    yield "compact", *run("compact", half, "--threshold", "0.75")
    written = sum(e.size for e in open_store(half).list(PACKS)) - before
    if written < moved:
        raise SystemExit(f"compact moved {written} bytes, expected {moved}: this proves nothing")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit code 1 if a verb needs more memory than it may")
    check = parser.parse_args().check
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        print(f"{'verb':<22}{'seconds':>9}{'peak above':>13}")
        for verb, seconds, peak in measure(Path(folder), 1000):
            missed += peak > LIMIT
            print(f"{verb:<22}{seconds:>9.1f}{peak / 1e6:>10.0f} MB", flush=True)
    return int(check and missed > 0)


if __name__ == "__main__":
    sys.exit(main())
