"""Small real trainings, deterministic to the bit, and comparison by bytes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Small(nn.Module):
    """A few hundred parameters: linear layers, dropout, BatchNorm with its buffers."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.inp = nn.Linear(8, width)
        self.norm = nn.BatchNorm1d(width)
        self.drop = nn.Dropout(0.2)
        self.out = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.out(self.drop(torch.relu(self.norm(self.inp(x)))))
        return result


class Training:
    """Model, AdamW, schedule and a plain counter: what a user hands to a `Checkpointer`."""

    def __init__(self, seed: int = 0, width: int = 16) -> None:
        torch.manual_seed(seed)
        self.model = Small(width)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.9)

    @property
    def state(self) -> dict[str, object]:
        return {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule}

    def train(self, step: int) -> float:
        """One step on data that depends on the step alone, with dropout from the global generator."""
        x = torch.randn(12, 8, generator=torch.Generator().manual_seed(step))
        loss = self.model(x).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        return loss.item()

    def bytes(self) -> dict[str, bytes]:
        """Every tensor of model and optimizer, by name, as bytes; and the schedule as text."""
        found = {name: raw(t) for name, t in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            for slot, value in self.optimizer.state.get(parameter, {}).items():
                found[f"{name}.{slot}"] = raw(value) if isinstance(value, torch.Tensor) else repr(value).encode()
        found["schedule"] = repr(sorted(self.schedule.state_dict().items(), key=lambda kv: kv[0])).encode()
        return found


def raw(tensor: torch.Tensor) -> bytes:
    """A tensor's logical bytes, row-major."""
    local: Any = getattr(tensor.detach(), "_local_tensor", tensor.detach())
    return bytes(local.contiguous().reshape(-1).view(torch.uint8).numpy())
