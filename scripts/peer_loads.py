"""The work loads of `bench_peers`: states that training steps change, and a twin of each to restore into.

dense        a GPT of 25 million parameters on real text, fp32 AdamW
lora         the same, of which one block's two largest matrices train
bf16         the same in bf16 at a fine-tuning rate, weights alone
bf16-adam    with its moments
rows         embeddings of which few rows are touched (SparseAdam)
tiny         5,000 parameters with AdamW: 20,000 tensors
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from scripts.gpt import GPT, GPTConfig, adamw, random_batch, stdlib_bytes

SIZES = {
    "full": GPTConfig(layers=8, heads=8, width=512),  # 25.6 million parameters, 307 MB with moments
    "small": GPTConfig(layers=6, heads=8, width=256),  # 4.9 million, 59 MB
}
ROWS = {"full": (200_000, 64, 200), "small": (40_000, 64, 40)}  # rows, width, touched per step
BATCH = 2


@dataclass(eq=False)
class Load:
    """One state under training. `twin` has the same structure and its own memory. `weights_only`: what is saved is the
    model alone. `grads` runs forward and backward, `step` the optimizer: after both, the state is another one."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    grads: Callable[[], None]
    weights_only: bool = False
    rows: bool = False

    def __post_init__(self) -> None:
        self.train(1)
        self.twin = copy.deepcopy((self.model, self.optimizer))

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad(set_to_none=True)
            self.grads()
            self.optimizer.step()

    def state(self, *, twin: bool = False) -> dict[str, object]:
        """What is tracked, by name."""
        model, optimizer = self.twin if twin else (self.model, self.optimizer)
        return {"model": model} if self.weights_only else {"model": model, "optimizer": optimizer}

    def tensors(self, *, twin: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """Every saved tensor with a name, in a fixed order."""
        model, optimizer = self.twin if twin else (self.model, self.optimizer)
        yield from model.state_dict().items()
        if not self.weights_only:
            for number, slots in optimizer.state_dict()["state"].items():
                for slot, value in slots.items():
                    if isinstance(value, torch.Tensor):
                        yield f"{number}.{slot}", value

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for _, tensor in self.tensors())


def make(name: str, size: str, warm: int, cache: Path | None) -> Load:
    """A load after `warm` training steps; those of the dense GPT are kept in `cache` from run to run."""
    torch.manual_seed(1)
    match name:
        case "dense":
            load = _gpt("dense", size, 3e-4)
            _warm(load, warm, None if cache is None else cache / f"gpt-{size}-{warm}.pt")
        case "lora":
            load = _gpt("lora", size, 3e-4, only=("up", "down"))
        case "bf16" | "bf16-adam":
            load = _gpt(name, size, 1e-6, dtype=torch.bfloat16, weights_only=name == "bf16")
        case "rows":
            load = _rows(*ROWS[size])
        case "tiny":
            load = _tiny(5000)
        case _:
            raise ValueError(f"{name!r} is no work load")
    return load


LOADS = ("dense", "lora", "bf16", "bf16-adam", "rows", "tiny")


def _gpt(
    name: str,
    size: str,
    lr: float,
    *,
    only: tuple[str, ...] | None = None,
    dtype: torch.dtype = torch.float32,
    weights_only: bool = False,
) -> Load:
    config = SIZES[size]
    model = GPT(config).to(dtype)
    if only is not None:
        model.requires_grad_(False)
        for part in only:
            getattr(model.h[-1], part).weight.requires_grad_(True)
    optimizer = adamw(model, lr) if only is None else torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=lr
    )  # fmt: skip
    text = torch.frombuffer(bytearray(stdlib_bytes()), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(2)

    def grads() -> None:
        _, loss = model(*random_batch(text, config.context, BATCH, generator))
        assert loss is not None
        loss.backward()

    return Load(name, model, optimizer, grads, weights_only=weights_only)


def _warm(load: Load, steps: int, kept: Path | None) -> None:
    if kept is not None and kept.exists():
        found = torch.load(kept, weights_only=True)
        load.model.load_state_dict(found["model"])
        load.optimizer.load_state_dict(found["optimizer"])
        return
    load.train(steps)
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"model": load.model.state_dict(), "optimizer": load.optimizer.state_dict()}, kept)


def _rows(rows: int, width: int, touched: int) -> Load:
    model = nn.Embedding(rows, width, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(2)
    goal = torch.randn(width, generator=generator)

    def grads() -> None:
        # Ids are as skewed as those of words or users: half of the touches fall on a few rows.
        ids = (rows * torch.rand(touched, generator=generator) ** 3).long()
        (model(ids) - goal).square().mean().backward()

    return Load("rows", model, optimizer, grads, rows=True)


def _tiny(count: int) -> Load:
    sizes = torch.randint(64, 1001, (count,), generator=torch.Generator().manual_seed(0)).tolist()
    model = nn.ParameterList(nn.Parameter(torch.randn(size)) for size in sizes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(2)

    def grads() -> None:
        for parameter in model:
            parameter.grad = torch.randn(parameter.shape, generator=generator)

    return Load("tiny", model, optimizer, grads)
