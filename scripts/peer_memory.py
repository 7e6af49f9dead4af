"""Peak memory of one contestant of `bench_peers`, in a process of its own: run by it as ``peer_memory NAME MB``."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.peer_loads import Load
from scripts.peers import Ours, contestants

BUFFERS = 2
"""Of the state's own size: what this library says that it needs."""


class Peak:
    """Watches the resident memory of this process and its children from a thread. Shared pages count once: those of a
    child only as far as they are its own."""

    def __init__(self) -> None:
        self.base = self.most = _resident()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def over(self, do: Callable[[], object]) -> float:
        """MB above the base at the highest point of `do`."""
        self.most = _resident()
        _forget_peak()
        do()
        return (max(self.most, _own_peak()) - self.base) / 1e6

    def _watch(self) -> None:
        while not self._stopped.wait(0.005):
            self.most = max(self.most, _resident())


def _field(path: Path, *names: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.split(":")[0] in names)


def _resident() -> int:
    total = _field(Path("/proc/self/status"), "VmRSS")
    for child in _children():
        total += _field(child / "status", "RssAnon")
    return total


def _own_peak() -> int:
    return _field(Path("/proc/self/status"), "VmHWM") + sum(_field(c / "status", "RssAnon") for c in _children())


def _children() -> list[Path]:
    listed = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [Path("/proc") / pid for pid in listed]


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def build(megabytes: int) -> Load:
    """A stack of linear layers with AdamW, whose state has about that size."""
    torch.manual_seed(0)
    width = 1024
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(max(1, megabytes * 10**6 // (12 * width * width)))))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def grads() -> None:
        model(torch.randn(4, width)).square().mean().backward()

    return Load("memory", model, optimizer, grads)


def main() -> int:
    name, megabytes = sys.argv[1], int(sys.argv[2])
    load = build(megabytes)
    trim = ctypes.CDLL("libc.so.6").malloc_trim
    with tempfile.TemporaryDirectory(dir=os.environ.get("PEERS_FOLDER")) as folder:
        gc.collect()
        trim(0)
        load.optimizer.zero_grad(set_to_none=True)
        peak = Peak()
        peer = contestants(amplified=False)[name](load, Path(folder) / "store")

        def saves() -> None:
            for step in range(3):
                load.train(1)
                load.optimizer.zero_grad(set_to_none=True)
                peer.save(step)
                peer.settle()
                peer.durable()

        found = {"save": peak.over(saves)}
        if isinstance(peer, Ours):  # a job that restores has no buffers yet; the others' load goes by their open object
            peer.close()
            time.sleep(0.1)
            peak = Peak()
        found["load"] = peak.over(peer.load)
        found["buffers"] = BUFFERS * load.nbytes / 1e6
        found["state"] = load.nbytes / 1e6
        if not isinstance(peer, Ours):
            peer.close()
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
