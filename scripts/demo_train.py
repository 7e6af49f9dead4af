"""One rank of the demo's job: a byte-level GPT under FSDP2 on the standard library's sources.

Started by torchrun from `scripts.demo_run`; a training script as a user would write it, that also notes down its
losses and, at its end, a digest of every parameter and moment, so that two jobs can be compared bit by bit.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import ckpt
from scripts.gpt import GPT, ByteWindows, GPTConfig, adamw, stdlib_bytes

CONFIG = GPTConfig(layers=4, heads=4, width=128, context=64, dropout=0.1)
"""About a million parameters."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", help="where to save; without it nothing is saved")
    parser.add_argument("--notes", type=Path, required=True, help="folder for losses, reports and digests")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--every", type=int, required=True)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7)
    model = GPT(CONFIG)
    for block in model.h:
        fully_shard(block)
    fully_shard(model)
    optimizer = adamw(model, lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    torch.manual_seed(1000 + rank)  # each rank its own dropout

    data = ByteWindows(stdlib_bytes(1 << 20), CONFIG.context)
    sampler: DistributedSampler[tuple[torch.Tensor, torch.Tensor]] = DistributedSampler(data, world_size, rank, seed=3)
    loader = DataLoader(data, batch_size=8, sampler=sampler)

    def train_one(batch: tuple[torch.Tensor, torch.Tensor]) -> float:
        _, loss = model(*batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        return float(loss.detach())

    args.notes.mkdir(parents=True, exist_ok=True)
    with (args.notes / f"losses-{rank}.jsonl").open("a") as losses:

        def note(step: int, loss: float) -> None:
            losses.write(json.dumps([step, loss.hex()]) + "\n")
            losses.flush()

        if args.url is None:
            for step, batch in enumerate_epochs(loader, sampler, args.steps):
                note(step, train_one(batch))
        else:
            saver = ckpt.Checkpointer(
                args.url,
                {"model": model, "optimizer": optimizer, "schedule": schedule},
                every=args.every,
                keep=ckpt.Keep(last=6),
                options=ckpt.Options(on_resize=deal_out),
            )
            start = saver.restore()
            if rank == 0:
                print(f"starting at step {start}", flush=True)
            note_restore(args.notes, rank, world_size, saver.restored)
            (args.notes / f"whole-at-start-{world_size}-{rank}.json").write_text(json.dumps(whole(model, optimizer)))
            tickets: list[tuple[ckpt.Ticket, float]] = []
            for step, batch in saver.batches(loader, args.steps):
                loss = train_one(batch)
                note(step, loss)
                began = time.perf_counter()
                if (ticket := saver.step(step + 1, metrics={"loss": loss})) is not None:
                    tickets.append((ticket, time.perf_counter() - began))
            saver.close()
            with (args.notes / f"saves-{rank}.jsonl").open("a") as saves:
                for ticket, blocked in tickets:
                    report = ticket.report
                    assert report is not None and ticket.error is None, ticket
                    line = [ticket.step, report.captured, report.changed, report.stored, blocked]
                    saves.write(json.dumps(line) + "\n")

    # The last collective first: gloo's thread lets go of its tensors a moment after it is over, and where that falls
    # into the interpreter's end, the process aborts. (torch keeps FSDP's group alive past `destroy_process_group`.)
    (args.notes / f"whole-at-end-{world_size}-{rank}.json").write_text(json.dumps(whole(model, optimizer)))
    (args.notes / f"final-{rank}.json").write_text(json.dumps(digests(model, optimizer), indent=1))
    dist.destroy_process_group()


def deal_out(name: str, values: Sequence[Any], rank: int, _world_size: int) -> Any:
    """What a rank takes of values that differed between ranks, when there are more or fewer of them than before: the
    data begins anew, since every rank's share of it is another one now."""
    return None if name == "$data" else values[rank % len(values)]


def note_restore(notes: Path, rank: int, world_size: int, restored: ckpt.Restored | None) -> None:
    """What this rank read, and from where, for the table at the end."""
    if restored is not None:
        line = {
            "rank": rank,
            "ranks": world_size,
            "node": os.environ.get("CKPT_MIRROR_DIR", ""),
            "step": restored.step,
            "bytes": dict(restored.bytes),
            "seconds": sum(restored.seconds.values()),
        }
        with (notes / "restores.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")


def whole(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Name → digest of the whole tensor, gathered from all ranks: the same however they share it."""
    found = {}
    for name, parameter in model.named_parameters():
        slots = {f"{name}.{slot}": value for slot, value in sorted(optimizer.state.get(parameter, {}).items())}
        for path, tensor in {name: parameter, **slots}.items():
            found[path] = digest(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)
    return found


def enumerate_epochs(
    loader: DataLoader[tuple[torch.Tensor, torch.Tensor]],
    sampler: DistributedSampler[tuple[torch.Tensor, torch.Tensor]],
    total: int,
) -> Iterator[tuple[int, tuple[torch.Tensor, torch.Tensor]]]:
    """What a loop without this library does: the run that the saved one must be bit-identical to."""
    step = epoch = 0
    while True:
        sampler.set_epoch(epoch)
        for batch in loader:
            if step == total:
                return
            yield step, batch
            step += 1
        epoch += 1


def digests(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Name → digest of this rank's bytes, for every parameter and every tensor of optimizer state."""
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = digest(parameter)
        for slot, value in optimizer.state[parameter].items():
            found[f"{name}.{slot}"] = digest(value)
    return found


def digest(tensor: torch.Tensor) -> str:
    local = getattr(tensor.detach(), "_local_tensor", tensor.detach())
    return xxhash.xxh3_128_hexdigest(local.contiguous().reshape(-1).view(torch.uint8).numpy())


if __name__ == "__main__":
    main()
