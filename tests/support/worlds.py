"""Trainings on several ranks, and what every such test needs: the process group, the collectives counted, bytes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.tensor import DTensor

import ckpt
from ckpt.format.manifest import Part
from ckpt.format.shards import DTYPES
from recovery.read import open_snapshot, read_parts
from storage_backends import open_store
from tests.support.training import raw

PATIENT = 60.0
"""Seconds given to what is done at once, on a machine that does much else."""


@contextmanager
def group() -> Iterator[int]:
    """The gloo group of this job; this process's rank in it."""
    dist.init_process_group("gloo")
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()


def quiet(**more: Any) -> ckpt.Options:
    """Options under which nothing is waited for that does not come, unless the test says otherwise."""
    return ckpt.Options(**{"commit_wait": PATIENT, "heartbeat": 1, "group_timeout": PATIENT, **more})


def counted(saver: ckpt.Checkpointer) -> Counter[str]:
    """How many collectives of each kind this rank makes from now on; "later": votes begun by `step()`."""
    found: Counter[str] = Counter()
    ranks: Any = saver._ranks
    begin, gather, broadcast = ranks.vote_async, ranks.gather, ranks.broadcast

    def vote(values: list[int]) -> list[int]:
        found["vote"] += 1
        return list(begin(values).result())

    def counting(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted_call(*args: Any, **kwargs: Any) -> Any:
            found[name] += 1
            return call(*args, **kwargs)

        return counted_call

    ranks.vote, ranks.vote_async = vote, counting("later", begin)
    ranks.gather, ranks.broadcast = counting("gather", gather), counting("broadcast", broadcast)
    return found


class Parallel:
    """A model that was parallelised in some way, with AdamW. `share`: whose data this rank sees; None: its own."""

    def __init__(self, model: nn.Module, width: int, *, share: int | None = None) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self._width = width
        self._share = dist.get_rank() if share is None else share

    @property
    def state(self) -> dict[str, object]:
        return {"model": self.model, "optimizer": self.optimizer}

    def batch(self, step: int) -> torch.Tensor:
        return torch.randn(6, self._width, generator=torch.Generator().manual_seed(100 * step + self._share))

    def train(self, step: int) -> float:
        loss = self.model(self.batch(step)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())

    def evaluate(self) -> None:
        """A forward without a backward: it leaves the root of FSDP2 unsharded."""
        with torch.no_grad():
            self.model(self.batch(0))


def tensors(state: dict[str, object]) -> dict[str, torch.Tensor]:
    """Every parameter, buffer and moment of a state's modules and optimizers, by name."""
    found: dict[str, torch.Tensor] = {}
    names: dict[int, str] = {}
    for name, value in state.items():
        if isinstance(value, nn.Module):
            # A wrapper's own name is not the library's business to keep, nor this test's.
            inner = value.module if isinstance(value, nn.parallel.DistributedDataParallel) else value
            for key, parameter in inner.named_parameters():
                found[f"{name}.{key}"] = parameter
                names[id(parameter)] = f"{name}.{key}"
            found.update({f"{name}.{key}": buffer for key, buffer in inner.named_buffers()})
    for name, value in state.items():
        if isinstance(value, torch.optim.Optimizer):
            for parameter, slots in value.state.items():
                for slot, tensor in slots.items():
                    found[f"{name}.state.{names[id(parameter)]}.{slot}"] = tensor
    return found


def local_bytes(state: dict[str, object]) -> dict[str, bytes]:
    """This rank's own bytes of all of them."""
    return {name: raw(tensor) for name, tensor in tensors(state).items()}


def digest(tensor: torch.Tensor) -> str:
    return xxhash.xxh3_128_hexdigest(raw(tensor))


def note_whole(state: dict[str, object], path: Path) -> None:
    """Write the digest of every whole tensor to a file, for the test to compare with what `ckpt.load` finds."""
    found = {}
    for name, tensor in tensors(state).items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        found[name] = digest(whole)
    if dist.get_rank() == 0:
        path.write_text(json.dumps(found))


def check_whole(url: str | Path, path: Path, step: int | str | None = None) -> None:
    """What `note_whole` wrote is what a process without any ranks loads."""
    expected = json.loads(path.read_text())
    loaded = ckpt.load(str(url), step)
    found = {name: digest(value) for name, value in loaded.items() if isinstance(value, torch.Tensor)}
    assert found == expected
    assert len(found) > 3, "nothing was compared"


def goes_on_bit_for_bit(url: str, build: Callable[[int], Parallel], whole: Path, **options: Any) -> None:
    """Train, evaluate, save, save unchanged; restore into a model of another seed; both go on alike. On each rank.

    Leaves two snapshots of one state (steps 4 and 5), and one (9) that stored nothing of its own.
    """
    first = build(0)
    saver = ckpt.Checkpointer(url, first.state, mirror="off", options=quiet(**options))
    assert saver.restore() == 0
    calls = counted(saver)
    for step in range(4):
        first.train(step)
    first.evaluate()
    ticket = saver.save(4)
    ticket.wait(PATIENT)
    # The vote, the gather of the layout, and the broadcast of the run's name: of restore() above, so none here.
    assert calls == {"vote": 1, "gather": 1}, calls
    calls.clear()
    again = saver.save(5)
    again.wait(PATIENT)
    assert calls == {"vote": 1}, calls
    assert again.report is not None and (again.report.changed, again.report.stored) == (0, 0), again.report
    saver.close()
    random = torch.get_rng_state()
    saved = local_bytes(first.state)
    note_whole(first.state, whole)

    second = build(9)
    saver = ckpt.Checkpointer(url, second.state, mirror="off", options=quiet(**options))
    assert saver.restore() == 5
    assert local_bytes(second.state) == saved
    calls = counted(saver)
    unchanged = saver.save(9)
    unchanged.wait(PATIENT)
    assert unchanged.report is not None and (unchanged.report.changed, unchanged.report.stored) == (0, 0)
    assert calls == {"vote": 1}, calls
    loss = second.train(4)
    torch.set_rng_state(random)
    assert first.train(4) == loss
    now = local_bytes(second.state)
    assert now == local_bytes(first.state)
    assert now != saved, "training changed nothing: this test proves nothing"
    saver.close()


def stored_parts(url: str | Path, step: int | str | None = None) -> dict[int, Part]:
    """Every rank's part of a step (default: the newest)."""
    from ckpt.history.catalog import find, read_history

    store = open_store(str(url))
    id_ = find(read_history(store), "latest" if step is None else step)
    return read_parts(store, open_snapshot(store, id_).snapshot)


def bytes_by_rank(parts: dict[int, Part], *, per_rank: bool = False) -> list[int]:
    """Raw bytes that each rank's part holds, of shared (or of per-rank) leaves."""
    return [
        sum(row.as_box.numel * DTYPES[row.dtype].size for row in part.shards if row.per_rank == per_rank)
        for _, part in sorted(parts.items())
    ]
