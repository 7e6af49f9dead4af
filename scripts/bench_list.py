"""How long `ckpt list` takes on a store of 200 snapshots, process start included.

    python scripts/bench_list.py [--snapshots 200] [--repeat 9] [--check]

The store is a local folder. Every run is a process of its own, the interpreter's files being in the system's cache
after the first one, which is not counted. `--check` exits with 1 above 0.6 s.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import ckpt
from scripts.idle import busy_cores

BAR = 0.6


def make_store(url: str, snapshots: int) -> None:
    weight = torch.zeros(1000)
    with ckpt.Checkpointer(url, {"w": weight}) as saver:
        for step in range(1, snapshots + 1):
            weight[0] = step
            saver.save(step, metrics={"loss": 1 / step}).wait()


def listed(url: str, snapshots: int) -> tuple[float, float]:
    """Seconds that went by, and that the process computed."""
    before = os.times()
    began = time.perf_counter()
    command = [sys.executable, "-m", "ckpt.cli", "list", url]
    ran = subprocess.run(command, check=True, capture_output=True, text=True)
    wall, after = time.perf_counter() - began, os.times()
    if len(ran.stdout.splitlines()) != snapshots + 1:
        raise AssertionError(ran.stdout)
    computed = after.children_user + after.children_system - before.children_user - before.children_system
    return wall, computed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--snapshots", type=int, default=200)
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--check", action="store_true", help="exit with 1 above the bar")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        url = str(Path(folder) / "store")
        make_store(url, options.snapshots)
        listed(url, options.snapshots)
        if (others := busy_cores()) > 0.1:
            print(f"warning: other processes use {others:.2f} cores; look at what was computed")
        runs = [listed(url, options.snapshots) for _ in range(options.repeat)]
    wall, computed = (statistics.median(values) for values in zip(*runs, strict=True))
    print(f"ckpt list of {options.snapshots} snapshots: {wall:.2f} s, computing {computed:.2f} s (bar {BAR})")
    return 1 if options.check and wall > BAR else 0


if __name__ == "__main__":
    sys.exit(main())
