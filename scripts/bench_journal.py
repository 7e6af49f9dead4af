"""What the journal costs and gives: bytes per step, time training is kept, steps per second, speed of a replay.

    python scripts/bench_journal.py [--params full|small] [--steps 40] [--seconds 4] [--check]

A GPT in fp32 with AdamW trains on one thread. Bytes: of the records of one step, over those of the state (12 bytes per
parameter); with fp32 gradients, and with gradients rounded to bf16, as mixed precision reduces them. Blocked: what the
optimizer's hook and `step()` keep the training thread, beside a plain copy of the same gradients into memory that is
there, taken at the same moment; by the thread's processor time, since others may use the cores, and by the clock; on
this model, and on one of 40M parameters, where what Python takes does not show. Replay: from the snapshot to the last
step, as a restore does it, beside training the same steps. Steps per second: stretches with and without the journal
take turns. `--check` exits with 1 below a bar.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import ckpt
from ckpt.history.catalog import read_history
from recovery.forward import replayed
from scripts.bench_codec import CONFIGS
from scripts.bench_training import Training as Small
from scripts.bench_training import stretch
from scripts.gpt import GPT, GPTConfig, adamw, random_batch
from scripts.idle import busy_cores
from storage_backends import open_store

LESS, LESS_HALF, BLOCKED, RATE, REPLAY = 3.5, 8.0, 1.15, 0.95, 20.0
"""The bars: state over record, the same with bf16 gradients, blocked over a plain copy, rate, replay over training."""

WIDE = GPTConfig(layers=8, width=640, context=128)
"""40 million parameters: what a step costs in Python no longer shows."""


class Training(Small):
    """With batches of 32 windows: 4,096 tokens a step, which is little still."""

    def step(self) -> None:
        _, loss = self.model(*random_batch(self.text, self.config.context, 32, self.generator))
        assert loss is not None
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


def clocks() -> tuple[float, float]:
    return time.thread_time(), time.perf_counter()


@dataclass
class Meter:
    """Two hooks, one on each side of the journal's own, and what lies between; `copy`: a plain copy of the gradients.
    Each is (processor time of the thread, time by the clock), one entry per step."""

    model: torch.nn.Module
    hook: list[tuple[float, float]] = field(default_factory=list)
    copy: list[tuple[float, float]] = field(default_factory=list)
    step: list[tuple[float, float]] = field(default_factory=list)
    _began: tuple[float, float] = (0.0, 0.0)

    def __post_init__(self) -> None:
        self._targets = [torch.zeros_like(p) for p in self.model.parameters()]

    def before(self, *_: Any) -> None:
        began = clocks()
        for target, parameter in zip(self._targets, self.model.parameters(), strict=True):
            assert parameter.grad is not None
            target.copy_(parameter.grad)
        self.copy.append(since(began))
        self._began = clocks()

    def after(self, *_: Any) -> None:
        self.hook.append(since(self._began))

    def timed(self, call: Callable[[], object]) -> None:
        began = clocks()
        call()
        self.step.append(since(began))

    def ratio(self, which: int) -> float:
        """Blocked over a plain copy, medians."""
        blocked = statistics.median(a[which] + b[which] for a, b in zip(self.hook, self.step, strict=True))
        return blocked / statistics.median(c[which] for c in self.copy)


def since(began: tuple[float, float]) -> tuple[float, float]:
    now = clocks()
    return now[0] - began[0], now[1] - began[1]


def half(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Gradients as a reduction in bf16 leaves them."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = parameter.grad.bfloat16().float()


def record_bytes(params: str, steps: int, rounded: bool, folder: Path) -> tuple[float, int]:
    """Bytes of records per step, and of the state."""
    training = Training(params)
    for _ in range(10):
        training.step()
    if rounded:
        training.optimizer.register_step_pre_hook(half)
    with ckpt.Checkpointer(folder / "bytes", training.state, journal=ckpt.Journal(to="store"), mirror="off") as saver:
        saver.restore()
        for step in range(steps):
            training.step()
            saver.step(step + 1)
    stats = saver.stats.journal
    assert stats is not None and stats.off is None, stats
    return stats.bytes / stats.steps, 12 * sum(p.numel() for p in training.model.parameters())


def blocked(config: GPTConfig, steps: int, folder: Path) -> Meter:
    """Steps of the optimizer alone, on gradients that are there: what the journal takes does not hang on where they
    come from."""
    model = GPT(config)
    optimizer = adamw(model)
    for parameter in model.parameters():
        parameter.grad = 1e-3 * torch.randn_like(parameter)
    optimizer.step()
    meter = Meter(model)
    optimizer.register_step_pre_hook(meter.before)
    with ckpt.Checkpointer(
        folder / "blocked", {"model": model, "optimizer": optimizer}, journal=ckpt.Journal(to="mirror", ring="2GB"),
        mirror=folder / "mirror",
    ) as saver:  # fmt: skip
        optimizer.register_step_pre_hook(meter.after)
        saver.restore()
        journal = saver._journal
        assert journal is not None
        for step in range(steps):
            optimizer.step()
            meter.timed(partial(saver.step, step + 1))
            while journal._keeper._waiting:  # where forward and backward would be, which give the journal its time
                time.sleep(0.01)
    stats = saver.stats.journal
    assert stats is not None and stats.off is None, stats
    count = sum(p.numel() for p in model.parameters()) / 1e6
    cpu, memory = 1000 * stats.cpu / stats.steps, stats.memory / 1e6
    print(f"{count:.1f}M parameters: {cpu:.0f} ms of the journal's threads a step, {memory:.0f} MB of memory")
    return meter


def rates(params: str, seconds: float, rounds: int, folder: Path) -> tuple[float, float, list[float]]:
    """Steps per second without and with, medians, and the ratios of neighbours without waiting for a core."""
    training = Training(params)
    training.step()
    plain, kept = [], []
    done = 0
    with ckpt.Checkpointer(
        folder / "rates", training.state, journal=ckpt.Journal(to="mirror"), mirror=folder / "mirror2"
    ) as saver:
        saver.restore()
        journal = saver._journal
        assert journal is not None

        def step() -> None:
            nonlocal done
            training.step()
            done += 1
            saver.step(done)

        for _ in range(rounds):
            journal.pause("a stretch without")
            plain.append(stretch(seconds, training.step))
            saver.save(done := done + 1).wait()
            kept.append(stretch(seconds, step))
    nets = [b.net / a.net for a, b in zip(plain, kept, strict=True)]
    return statistics.median(s.rate for s in plain), statistics.median(s.rate for s in kept), nets


def replay(params: str, steps: int, folder: Path) -> tuple[float, float]:
    """Seconds of processor time per step: replayed, and trained."""
    training = Training(params)
    training.step()
    with ckpt.Checkpointer(
        folder / "replay", training.state, journal=ckpt.Journal(to="store"), mirror="off"
    ) as saver:  # fmt: skip
        saver.restore()
        began = time.thread_time()
        for step in range(steps):
            training.step()
            saver.step(step + 1)
        trained = time.thread_time() - began
    store = open_store(str(folder / "replay"))
    base = min(read_history(store).snapshots)
    began = time.process_time()
    forward = replayed(store, base, steps)
    again = time.process_time() - began
    assert forward.parts
    return again / steps, trained / steps


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", choices=CONFIGS, default="full", help="size of the model (default full: 4.9M)")
    parser.add_argument("--steps", type=int, default=40, help="steps of each measurement (default 40)")
    parser.add_argument("--seconds", type=float, default=4.0, help="length of a stretch (default 4)")
    parser.add_argument("--rounds", type=int, default=5, help="pairs of stretches (default 5)")
    parser.add_argument("--check", action="store_true", help="exit with 1 below a bar")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    print(f"other processes use {busy_cores():.2f} cores")
    good = True

    def tell(what: str, value: float, bar: float, *, most: bool = False) -> None:
        nonlocal good
        met = value <= bar if most else value >= bar
        good &= met
        print(
            f"{what}: {value:.2f} (bar {'at most' if most else 'at least'} {bar}){'' if met else '  MISSED'}",
            flush=True,
        )

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        some = max(2, options.steps // 4)
        size, state = record_bytes(options.params, some, False, folder / "a")
        print(f"fp32 gradients: {size / 1e6:.2f} MB a step, state {state / 1e6:.1f} MB")
        tell("state over record, fp32 gradients", state / size, LESS)
        size, state = record_bytes(options.params, some, True, folder / "b")
        print(f"bf16-exact gradients: {size / 1e6:.2f} MB a step")
        tell("state over record, bf16-exact gradients", state / size, LESS_HALF)
        for config, bar in ((CONFIGS[options.params], None), (WIDE, BLOCKED)):
            meter = blocked(config, options.steps, folder / str(config.width))
            hook, step, copy = (
                1000 * statistics.median(x[0] for x in xs) for xs in (meter.hook, meter.step, meter.copy)
            )
            print(f"training thread, processor time: hook {hook:.2f}, step() {step:.2f}, plain copy {copy:.2f} ms")
            print(f"blocked over a plain copy: by the clock {meter.ratio(1):.2f}, processor time {meter.ratio(0):.2f}")
            if bar is not None:
                tell("blocked over a plain copy, processor time", meter.ratio(0), bar, most=True)
        again, trained = replay(options.params, some, folder)
        print(f"replay {1000 * again:.0f} ms a step, training {1000 * trained:.0f} ms a step (processor time)")
        tell("training over replay", trained / again, REPLAY)
        a, b, nets = rates(options.params, options.seconds, options.rounds, folder)
        print(f"steps per second: plain {a:.2f}, with the journal {b:.2f}")
        tell("rate with the journal over without, without waiting for a core", statistics.median(nets), RATE)
    return 1 if options.check and not good else 0


if __name__ == "__main__":
    sys.exit(main())
