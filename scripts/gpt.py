"""A small byte-level GPT and real text to train it on: the Python standard library's own sources.

Shared by the demo, the benchmarks and the tests that want a state with the statistics of real training. Plain
nanoGPT bones: learned positions, pre-norm blocks, GELU, weight decay only on matrices.
"""

from __future__ import annotations

import math
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own idiom

VOCABULARY = 256
"""A token is a byte."""


@dataclass(frozen=True, slots=True)
class GPTConfig:
    """Sizes of a model. The defaults give 4.9 million parameters."""

    layers: int = 6
    heads: int = 8
    width: int = 256
    context: int = 128
    dropout: float = 0.0
    tied: bool = False
    """Whether the head is the token embedding (then one tensor has two names)."""


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = (
            t.view(batch, time, self.heads, width // self.heads).transpose(1, 2)
            for t in self.qkv(x).split(width, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0)
        out: Tensor = self.out(y.transpose(1, 2).reshape(batch, time, width))
        return out


class Block(nn.Module):
    """Attention, then a two-layer perceptron, each on a normalised residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.norm1(x)))
        out: Tensor = x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))
        return out


class GPT(nn.Module):
    """Predicts the next byte. ``forward(bytes)`` gives logits; with targets, ``(logits, mean loss)``."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(VOCABULARY, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.drop = nn.Dropout(config.dropout)
        self.h = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * config.layers) if residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)
        if config.tied:
            self.head.weight = self.tokens.weight

    def forward(self, x: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """`x`, `targets`: (batch, time) int64 in [0, 256). Logits: (batch, time, 256)."""
        y = self.drop(self.tokens(x) + self.positions.weight[: x.shape[1]])
        for block in self.h:
            y = block(y)
        logits = self.head(self.norm(y))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def adamw(model: nn.Module, lr: float = 3e-4) -> torch.optim.AdamW:
    """AdamW with betas (.9, .95) and weight decay on matrices alone."""
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))


def stdlib_bytes(limit: int = 8 << 20) -> bytes:
    """The first `limit` bytes of the Python standard library's sources (top folder, by name): real text that every
    machine with Python has."""
    out: list[bytes] = []
    size = 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        if size >= limit:
            break
        out.append(path.read_bytes())
        size += len(out[-1])
    return b"".join(out)[:limit]


class ByteWindows(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Disjoint windows of a text as (input, target) pairs of shape (context,), int64."""

    def __init__(self, text: bytes, context: int) -> None:
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.context = context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self.text[index * self.context : (index + 1) * self.context + 1].long()
        return window[:-1], window[1:]


def random_batch(text: Tensor, context: int, batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """`batch` random windows of a 1-D uint8 tensor, as (inputs, targets) of shape (batch, context), int64."""
    starts = torch.randint(len(text) - context - 1, (batch, 1), generator=generator)
    windows = text[starts + torch.arange(context + 1)].long()
    return windows[:, :-1], windows[:, 1:]
