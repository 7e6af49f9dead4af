"""What a writer that is busy all the time takes from training: steps per second without and with it.

    python scripts/bench_training.py [--params full|small] [--rounds 9] [--seconds 4] [--check]

A GPT in fp32 with AdamW trains on one thread, so every byte of its state changes at every step. Stretches of plain
training and of training with a save begun as soon as the one before is stored (`every=1, when_busy="skip"`) take turns
in one process; a stretch during which other processes used the cores is taken again. The medians are compared; copies
out of the training process are included. The second figure leaves out the time in which the training thread was ready
and had no core, which is others' doing on a busy machine. `--check` exits with 1 where the first is below 0.9.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import ckpt
from ckpt.ticket import Ticket
from scripts.bench_codec import CONFIGS
from scripts.gpt import GPT, adamw, random_batch, stdlib_bytes
from scripts.idle import Watch, busy_cores, waited

BAR = 0.9
CALM = 0.1
"""Cores that others may use during a stretch that counts."""

TRIES = 10
"""Stretches begun, for each that counts, before a noisy one is taken as it is."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Steps per second, the same without waiting for a core, cores that others used, and the share of the time in
    which a save was in flight."""

    rate: float
    net: float
    others: float
    busy: float = 0.0


class Training:
    """A model, its optimizer and its batches; `state` is what is saved."""

    def __init__(self, params: str) -> None:
        torch.manual_seed(1)
        self.config = CONFIGS[params]
        self.model = GPT(self.config)
        self.optimizer = adamw(self.model)
        self.text = torch.frombuffer(bytearray(stdlib_bytes()), dtype=torch.uint8)
        self.generator = torch.Generator().manual_seed(2)
        self.state: dict[str, object] = {"model": self.model, "optimizer": self.optimizer}

    def step(self) -> None:
        _, loss = self.model(*random_batch(self.text, self.config.context, 8, self.generator))
        assert loss is not None
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


def stretch(seconds: float, step: Callable[[], object]) -> Stretch:
    """Call `step` for at least `seconds`."""
    watch, queued, steps = Watch.start(), waited(), 0
    while (elapsed := time.perf_counter() - watch.wall) < seconds:
        step()
        steps += 1
    return Stretch(steps / elapsed, steps / (elapsed - (waited() - queued)), watch.others())


def measure(training: Training, rounds: int, seconds: float) -> tuple[list[Stretch], list[Stretch], int]:
    """Stretches without and with the writer, and the raw bytes of the state."""
    plain: list[Stretch] = []
    saving: list[Stretch] = []
    done = 0
    tickets: list[Ticket] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        ckpt.Checkpointer(
            Path(folder) / "store", training.state, every=1, when_busy="skip", keep=ckpt.Keep(last=1)
        ) as saver,
    ):

        def step_and_save() -> None:
            nonlocal done
            training.step()
            done += 1
            ticket = saver.step(done)
            if ticket is not None and not ticket.skipped:
                tickets.append(ticket)

        for _ in range(2):  # both buffers are filled once, and the optimizer's state is there
            step_and_save()
            saver.wait()
        while len(saving) < rounds:
            for found, step in ((plain, training.step), (saving, step_and_save)):
                tickets.clear()
                for left in reversed(range(TRIES)):
                    taken = stretch(seconds, step)
                    if taken.others <= CALM or not left:
                        break
                saver.wait()
                stored = sum(t.report.seconds["total"] for t in tickets if t.report is not None)
                found.append(replace(taken, busy=min(1.0, stored / seconds)))
            print(f"  plain {plain[-1].rate:6.2f}/s, saving {saving[-1].rate:6.2f}/s", flush=True)
        size = max(t.report.captured for t in tickets if t.report is not None)
    return plain, saving, size


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", choices=CONFIGS, default="full", help="size of the model (default full: 4.9M)")
    parser.add_argument("--rounds", type=int, default=9, help="pairs of stretches (default 9)")
    parser.add_argument("--seconds", type=float, default=4.0, help="length of a stretch (default 4)")
    parser.add_argument("--check", action="store_true", help="exit with 1 below the bar")
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # "skipped" at nearly every step is what is wanted here
    torch.set_num_threads(1)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    others = busy_cores()
    print(f"{cores} cores, of which other processes use {others:.2f}")
    if others > CALM:
        print("warning: the cores are not idle; noisy stretches are taken again, and what is left says less")
    plain, saving, size = measure(Training(options.params), options.rounds, options.seconds)
    a, b = (statistics.median(s.rate for s in found) for found in (plain, saving))
    c, d = (statistics.median(s.net for s in found) for found in (plain, saving))
    noisy = sum(s.others > CALM for s in (*plain, *saving))
    print(
        f"state {size / 1e6:.0f} MB; steps per second: plain {a:.2f}, with the writer busy "
        f"{100 * statistics.median(s.busy for s in saving):.0f} % of the time {b:.2f}; "
        f"ratio {b / a:.3f} (bar {BAR}), without waiting for a core {d / c:.3f}"
    )
    if noisy:
        print(f"warning: during {noisy} of {2 * len(saving)} stretches other processes used more than {CALM} cores")
    return 1 if options.check and b / a < BAR else 0


if __name__ == "__main__":
    sys.exit(main())
