"""A training on four ranks that is hurt again and again: FSDP2, dropout, clipping, weight decay, schedule, data order.

Two ranks make a node: a folder of mirrors that goes with them.
"""

from __future__ import annotations

import os
import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, TensorDataset

import ckpt
from ckpt.rolling import OPTIMIZERS
from tests.support.procs import Job
from tests.support.worlds import group, local_bytes, quiet

WORLD = 4


class Net(nn.Module):
    """13 rows on four ranks are 4, 4, 4, 1; one row is 1, 0, 0, 0. A buffer that each rank fills for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(7, 13)
        self.drop = nn.Dropout(0.3)
        self.down = nn.Linear(13, 2)
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert isinstance(self.seen, torch.Tensor)
        self.seen += x.detach().float().mean()
        result: torch.Tensor = self.down(self.drop(torch.tanh(self.up(x)))) * self.scale
        return result


class Sharded:
    """`kind`: a class of torch.optim and, after a colon, its implementation; `half`: bf16 mixed precision."""

    def __init__(self, kind: str, half: bool, seed: int) -> None:
        torch.manual_seed(seed)
        net = Net()
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16) if half else MixedPrecisionPolicy()
        fully_shard(net.up, mp_policy=policy)
        fully_shard(net, mp_policy=policy)
        self.model = net
        name, _, how = kind.partition(":")
        options: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.01}
        options |= {how: True} if how else {}
        options |= {"momentum": 0.9} if name == "SGD" else {}
        self.optimizer = OPTIMIZERS[name](net.parameters(), **options)  # type: ignore[arg-type]
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda n: 1 / (1 + 0.01 * n))
        torch.manual_seed(1000 * seed + dist.get_rank())
        data = torch.randn(40, 7, generator=torch.Generator().manual_seed(dist.get_rank()))
        self.loader = DataLoader(TensorDataset(data), batch_size=5, shuffle=True)

    @property
    def state(self) -> dict[str, object]:
        return {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule}

    def train(self, batch: Any) -> float:
        loss = self.model(batch[0]).float().square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()
        self.schedule.step()
        return float(loss.item())


def life(
    url: str,
    out: Path,
    kind: str,
    half: bool,
    total: int,
    nodes: list[str],
    journal: ckpt.Journal | bool,
    every: int,
    before: Callable[[int], None] = lambda completed: None,
) -> None:
    """One start of the job, up to its end or its death. What it prints: "resumed N lost K", "done N"; what it appends
    to ``out/losses-<rank>``: step and loss; what it leaves at its end: ``out/state-<rank>``. `before` is called before
    every step, with how many are completed."""
    with group():
        rank = dist.get_rank()
        training = Sharded(kind, half, seed=random.SystemRandom().randrange(1000) if list(out.iterdir()) else 0)
        mirror = nodes[rank * len(nodes) // dist.get_world_size()]
        saver = ckpt.Checkpointer(
            url, training.state, every=every, journal=journal, mirror=mirror, options=quiet(heartbeat=0.05)
        )  # fmt: skip
        start = saver.restore()
        found = saver.restored
        print(f"resumed {start} lost {None if found is None else found.lost} ", flush=True)
        with (out / f"losses-{rank}").open("a") as losses:
            for step, batch in saver.batches(training.loader, total):
                before(step)
                loss = training.train(batch)
                losses.write(f"{step} {loss.hex()}\n")
                losses.flush()
                saver.step(step + 1)
                print(f"done {step + 1} ", flush=True)
        stats = saver.stats.journal
        assert journal is False or (stats is not None and stats.off is None), stats
        saver.close()
        state = {**local_bytes(training.state), "random": torch.get_rng_state().numpy().tobytes()}
        (out / f"state-{rank}").write_text("\n".join(f"{k} {v.hex()}" for k, v in sorted(state.items())))


def last(text: str, word: str) -> int:
    """The number after the last `word` in what a rank printed; -1 if it printed none."""
    found = [line.split()[1] for line in text.splitlines() if line.startswith(word) and len(line.split()) > 1]
    return int(found[-1]) if found else -1


def hurt(url: str, out: Path, kind: str, half: bool, total: int, losses: int, every: int, rng: random.Random) -> None:
    """Train to the end through so many node losses; each time from the last step that was completed on all ranks."""
    nodes = [str(out.parent / "node-a"), str(out.parent / "node-b")]
    journal = ckpt.Journal(flush="1 step", to="both")
    moments = sorted(rng.sample(range(1, total), losses))
    completed = 0
    for moment in [*moments, None]:
        with Job(life, WORLD, [url, out, kind, half, total, nodes, journal, every]) as job:
            if moment is not None:
                job.until(0, f"done {max(moment, completed + 1)} ")
                threading.Event().wait(rng.uniform(0, 0.02))  # anywhere in a step
                lost = rng.randrange(2)
                for rank in (2 * lost, 2 * lost + 1):
                    job.kill(rank)
                shutil.rmtree(nodes[lost], ignore_errors=True)
                job.kill_all()
            results = job.wait()
            assert moment is not None or all(result.code == 0 for result in results), results
        resumed = [last(result.out, "resumed") for result in results]
        for result in results:
            assert last(result.out, "resumed") in (-1, *range(completed, completed + 2)), (
                completed,
                resumed,
                result.out,
            )
        completed = max(completed, min(last(result.out, "done") for result in results))
    assert completed == total


def unhurt(url: str, out: Path, kind: str, half: bool, total: int) -> None:
    """The same training without a failure, and without a journal."""
    os.makedirs(out, exist_ok=True)
    with Job(life, WORLD, [url, out, kind, half, total, ["off", "off"], False, total]) as job:
        results = job.wait()
    assert all(result.code == 0 for result in results), results


def outcome(out: Path) -> dict[str, Any]:
    """Final state of every rank, and every loss: a step that was trained twice must have had the same loss twice."""
    found: dict[str, Any] = {}
    for rank in range(WORLD):
        found[f"state-{rank}"] = (out / f"state-{rank}").read_text()
        lines = [line.split() for line in (out / f"losses-{rank}").read_text().splitlines()]
        by_step: dict[str, set[str]] = {}
        for parts in lines:
            by_step.setdefault(parts[0], set()).add(parts[1])
        assert all(len(values) == 1 for values in by_step.values()), by_step
        found[f"losses-{rank}"] = sorted(by_step.items())
    return found
