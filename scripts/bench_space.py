"""What a job's checkpoints take on disk, over what is live: kinds of state, 500 saves, three snapshots kept.

    python scripts/bench_space.py [--saves 500] [--keep 3] [--every 5] [--only dense] [--check]

Live are the bytes of the blobs that the kept snapshots need, each counted once; on disk are all packs, parts and
snapshots. Between the two lie blobs that died beside living ones in a pack, headers and documents. Looked at after
every fifth save, once retention has run; the worst look counts. `--check` exits with 1 from 2 upwards.

Chunks and packs have an eighth of their usual size, so that a small state has as many of both as one of eight times
its size.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import ckpt
from ckpt.format.manifest import Blob
from ckpt.format.names import PACKS, PARTS, SNAPSHOTS
from ckpt.format.shards import DEFAULT_CHUNK
from ckpt.history.catalog import read_history
from ckpt.history.clock import SystemClock
from ckpt.history.retention import execute, plan_prune
from ckpt.saving import packing
from recovery.compact import compact
from recovery.compaction import chunks_of, parts_of, plan_compact
from storage_backends import Store, open_store

BAR = 2.0
SMALLER = 8
CHUNK = DEFAULT_CHUNK // SMALLER

Step = Callable[[int], None]
State = dict[str, object]


def adam(parameters: torch.Tensor, noise: torch.Generator, rate: float) -> tuple[State, Callable[[], None]]:
    """Moments for some parameters, and a step that changes all of the three as training does."""
    first, second = torch.zeros_like(parameters), torch.zeros_like(parameters)
    scale = torch.rand(parameters.shape, generator=noise) + 0.1  # some weights have large gradients, some small

    def step() -> None:
        gradient = torch.randn(parameters.shape, generator=noise) * scale
        first.lerp_(gradient, 0.1)
        second.lerp_(gradient.square(), 0.001)
        parameters.sub_(rate * first / (second.sqrt() + 1e-8))

    return {"first": first, "second": second}, step


def dense(noise: torch.Generator) -> tuple[State, Step]:
    """Every weight and moment changes at every step."""
    weight = torch.randn(384, 512, generator=noise) * 0.02
    moments, train = adam(weight, noise, 1e-5)
    return {"weight": weight, **moments}, lambda _: train()


def sparse(noise: torch.Generator) -> tuple[State, Step]:
    """Weights in bfloat16 of which each step moves two in a hundred, anywhere, by one step of their format."""
    weight = (torch.randn(2048, 1024, generator=noise) * 0.02).to(torch.bfloat16)

    def train(_: int) -> None:
        moved = torch.rand(weight.shape, generator=noise) < 0.02
        weight.view(torch.int16).add_(moved.to(torch.int16))

    return {"weight": weight}, train


def rows(noise: torch.Generator) -> tuple[State, Step]:
    """An embedding of which each step touches a few rows, some of them over and over, with moments that follow."""
    count = 16384
    table = torch.randn(count, 32, generator=noise) * 0.02
    moment = torch.zeros(count, 32)

    def train(_: int) -> None:
        touched = (torch.rand(24, generator=noise) ** 4 * count).long()
        gradient = torch.randn(24, 32, generator=noise)
        moment[touched] = moment[touched] * 0.9 + gradient * 0.1
        table[touched] -= 1e-3 * moment[touched]

    return {"table": table, "moment": moment}, train


def lora(noise: torch.Generator) -> tuple[State, Step]:
    """A frozen base, and adapters a fortieth of its size that are trained."""
    base = torch.randn(1024, 512, generator=noise).to(torch.bfloat16)
    adapter = torch.randn(8, 1536, generator=noise) * 0.02
    moments, train = adam(adapter, noise, 1e-4)
    return {"base": base, "adapter": adapter, **moments}, lambda _: train()


def mixed(noise: torch.Generator) -> tuple[State, Step]:
    """All of them in one state; and layers of which one, then another, is frozen for a hundred steps."""
    parts = {kind.__name__: kind(noise) for kind in (dense, sparse, lora)}
    layers = [torch.randn(64, 256, generator=noise) for _ in range(4)]

    def train(step: int) -> None:
        for _, change in parts.values():
            change(step)
        for n, layer in enumerate(layers):
            if (step // 100) % len(layers) != n:
                layer.add_(torch.randn(layer.shape, generator=noise), alpha=1e-4)

    state: State = {f"{name}.{leaf}": value for name, (leaves, _) in parts.items() for leaf, value in leaves.items()}
    return {**state, **{f"layer{n}": layer for n, layer in enumerate(layers)}}, train


KINDS: dict[str, Callable[[torch.Generator], tuple[State, Step]]] = {
    "dense": dense, "sparse": sparse, "lora": lora, "mixed": mixed, "rows": rows,
}  # fmt: skip


@dataclass
class Use:
    """Disk over live bytes, look by look; and of the last look, both in bytes, before and after a compaction."""

    ratios: list[float] = field(default_factory=list)
    disk: int = 0
    live: int = 0
    compacted: float = 0.0

    @property
    def worst(self) -> float:
        return max(self.ratios)


def look(store: Store) -> tuple[int, int]:
    """(bytes on disk, bytes of live blobs)."""
    history = read_history(store)
    blobs: set[Blob] = set()
    for part in parts_of(store, history, history.snapshots):
        for _, _, _, chunk in chunks_of(part):
            blobs.update(chunk.blobs)
    disk = sum(entry.size for prefix in (PACKS, PARTS, SNAPSHOTS) for entry in store.list(prefix))
    return disk, sum(blob.size for blob in blobs)


def prune(store: Store, keep: ckpt.Keep) -> None:
    execute(plan_prune(store, keep, grace=0), store, clock=SystemClock())


@contextmanager
def small_packs() -> Iterator[None]:
    """While this is open, packs are smaller by `SMALLER`."""
    usual = packing.LEAST, packing.MOST
    packing.LEAST, packing.MOST = (size // SMALLER for size in usual)
    try:
        yield
    finally:
        packing.LEAST, packing.MOST = usual


def measure(kind: str, *, saves: int, keep: int, every: int = 1, url: str) -> Use:
    """Train and save, with retention after each save; look after every so-manieth. Then compact what the ended job
    left, prune, and look once more."""
    state, train = KINDS[kind](torch.Generator().manual_seed(0))
    store, use = open_store(url), Use()
    options = ckpt.Options(chunk=CHUNK)
    with small_packs(), ckpt.Checkpointer(url, state, mirror="off", options=options) as saver:
        for step in range(1, saves + 1):
            train(step)
            saver.save(step).wait()
            prune(store, ckpt.Keep(last=keep))
            if step % every == 0:
                use.disk, use.live = look(store)
                use.ratios.append(use.disk / use.live)
    compact(plan_compact(store), store)
    prune(store, ckpt.Keep())
    disk, live = look(store)
    use.compacted = disk / live
    return use


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--saves", type=int, default=500)
    parser.add_argument("--keep", type=int, default=3)
    parser.add_argument("--every", type=int, default=5, help="look after every so-manieth save")
    parser.add_argument("--only", choices=sorted(KINDS))
    parser.add_argument("--check", action="store_true", help="exit with 1 from the bar upwards")
    options = parser.parse_args()
    worst = 0.0
    for kind in KINDS if options.only is None else [options.only]:
        with tempfile.TemporaryDirectory() as folder:
            use = measure(
                kind, saves=options.saves, keep=options.keep, every=options.every, url=str(Path(folder) / "store")
            )
        worst = max(worst, use.worst)
        print(
            f"{kind:7} {use.disk / 1e6:7.2f} MB on disk, {use.live / 1e6:7.2f} MB live: {use.ratios[-1]:.2f} at the "
            f"end, {use.worst:.2f} at worst (bar {BAR:g}), {use.compacted:.2f} compacted",
            flush=True,
        )
    return 1 if options.check and worst >= BAR else 0


if __name__ == "__main__":
    sys.exit(main())
