"""What moving a state of 1 GB in and out costs: seconds, and peak memory above an interpreter with everything loaded.

python -m scripts.bench_moves [--check]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from ckpt.format.shards import DTYPES, Box, Leaf, Shard, whole
from ckpt.history.clock import SystemClock
from ckpt.history.runs import identity
from ckpt.saving.inward import Bytes, store_snapshot
from storage_backends import open_store

LIMIT = 400e6
"""Bytes above the interpreter that no verb may need (issue 5)."""

_CHILD = """
import resource, sys, time
import torch, torch.distributed.checkpoint
from ckpt.cli import main
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
began = time.perf_counter()
code = main(sys.argv[1:])
seconds = time.perf_counter() - began
print(code, seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024, file=sys.stderr)
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit code 1 if a verb needs more memory than it may")
    check = parser.parse_args().check
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        at = Path(folder)
        large = Made("model.embedding.weight", "bfloat16", (16384, 16384))
        others = [Made(f"model.h.{n}.weight", "float32", (2048, 2048)) for n in range(32)]
        store_snapshot(
            open_store(str(at / "store")), SystemClock(), identity(None), 1, [large, *others], values={}, aliases={}
        )
        print(f"{'verb':<22}{'seconds':>9}{'peak above':>13}")
        verbs: list[tuple[str, ...]] = [("verify", str(at / "store"), "--deep")]
        for form in ("safetensors", "torch", "dcp"):
            verbs.append(("export", str(at / "store"), "1", str(at / form), "--to", form))
            verbs.append(("import", str(at / f"from-{form}"), str(at / form), "--from", form))
        for verb in verbs:
            seconds, peak = run(*verb)
            missed += peak > LIMIT
            print(f"{verb[0] + ' ' + verb[-1].lstrip('-'):<22}{seconds:>9.1f}{peak / 1e6:>10.0f} MB")
    return int(check and missed > 0)


if __name__ == "__main__":
    sys.exit(main())
