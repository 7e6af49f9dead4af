"""How much memory saves and restores take beside the state and its buffers, in a process of its own under a limit."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.e2e


def run(folder: Path, megabytes: int, memory: str) -> dict[str, Any]:
    def small_stacks() -> None:  # which the system counts in full, and nobody uses
        resource.setrlimit(resource.RLIMIT_STACK, (1 << 20, resource.RLIM_INFINITY))

    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.memory_job", str(folder / "store"), str(megabytes), memory],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "MALLOC_ARENA_MAX": "2", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        preexec_fn=small_stacks,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(found)
    return found


@pytest.mark.parametrize(
    ("megabytes", "memory"), [(96, "64MiB"), pytest.param(1000, "256MB", marks=pytest.mark.campaign)]
)
def test_memory_beyond_two_buffers_is_bounded_and_its_lack_fails_one_save_only(
    tmp_path: Path, megabytes: int, memory: str
) -> None:
    """G2"""
    found = run(tmp_path, megabytes, memory)
    bound = 64 << 20 if memory == "64MiB" else 256 * 10**6
    assert found["save"] <= bound and found["restore"] <= bound, found
    assert found["failed"], "step 1 had no room for its buffer"
    assert found["steps"] == [2, 3, 4]
