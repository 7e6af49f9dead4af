"""Four ranks come back: one lost rank, a full reload by the same code, and torch.distributed.checkpoint, side by side.

Every rank is a node of its own (a mirror folder each) and holds a quarter of an FSDP2 model with AdamW. A first set of
processes saves twice and leaves; rank 2's mirror is removed; a second set comes back, each way in turn. Timed between
barriers, on a store and checkpoint in local files that the page cache holds, so processors and memory are what is
compared: a store behind a network only widens the gap.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import shutil
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

RANKS, LOST = 4, 2
WIDTH = 1024

_Last: TypeAlias = tuple[dict[str, int], dict[str, float]]


@dataclass(frozen=True)
class Came:
    """One way of coming back: median seconds until all ranks stood, and by rank the bytes from each source (of
    torch.distributed.checkpoint: of its files) and the seconds of each stage, the last time."""

    seconds: float
    bytes: list[dict[str, int]]
    stages: list[dict[str, float]]


@dataclass(frozen=True)
class Measured:
    """`state`: bytes over all ranks; `lost_blobs`: encoded bytes of the lost rank's part."""

    state: int
    lost_blobs: int
    recovery: Came
    reload: Came
    dcp: Came


def measure(folder: Path, *, layers: int = 34, repeat: int = 3) -> Measured:
    """Run it all below `folder`, which must have room for four times the state; 12.6 MB a layer."""
    _processes(_save, folder, layers)
    shutil.rmtree(folder / f"node{LOST}")
    _processes(_come_back, folder, layers, repeat)
    found = json.loads((folder / "measured.json").read_text())
    ways = {name: Came(**found.pop(name)) for name in ("recovery", "reload", "dcp")}
    return Measured(**found, **ways)


def _processes(call: Callable[..., None], *args: Any) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    spawn = multiprocessing.get_context("spawn")
    ranks = [spawn.Process(target=_rank, args=(call, rank, port, args)) for rank in range(RANKS)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    if any(each.exitcode for each in ranks):
        raise RuntimeError(f"{call.__name__}: exit codes {[each.exitcode for each in ranks]}")


def _rank(call: Callable[..., None], rank: int, port: int, args: tuple[Any, ...]) -> None:
    import torch
    import torch.distributed as dist

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    call(*args)
    dist.destroy_process_group()


def _made(layers: int, seed: int) -> tuple[Any, Any]:
    import torch
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)


def _train(model: Any, optimizer: Any) -> None:
    import torch

    model(torch.randn(4, WIDTH)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _digest(model: Any, optimizer: Any) -> str:
    import xxhash

    told = xxhash.xxh3_64()
    for parameter in model.parameters():
        for tensor in (parameter, *(slot for _, slot in sorted(optimizer.state[parameter].items()))):
            local = tensor.detach()
            told.update((local.to_local() if hasattr(local, "to_local") else local).contiguous().numpy().tobytes())
    return told.hexdigest()


def _save(folder: Path, layers: int) -> None:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    import ckpt

    rank = dist.get_rank()
    model, optimizer = _made(layers, 1)
    saver = ckpt.Checkpointer(
        folder / "store", {"model": model, "optimizer": optimizer}, mirror=folder / f"node{rank}"
    )  # fmt: skip
    for step in (1, 2):
        _train(model, optimizer)
        saver.save(step)
        saver.wait()
    parts = get_state_dict(model, optimizer)
    dcp.save({"model": parts[0], "optimizer": parts[1]}, checkpoint_id=folder / "dcp")
    (folder / f"digest{rank}").write_text(_digest(model, optimizer))
    dist.barrier()
    os._exit(0)  # as a job ends that did not come to its end: its mirrors stay


def _come_back(folder: Path, layers: int, repeat: int) -> None:
    import torch.distributed as dist

    ways = {"recovery": _recover, "reload": _reload, "dcp": _dcp}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    last: dict[str, _Last] = {}
    rank = dist.get_rank()
    for turn in range(repeat + 1):
        for name, way in ways.items():
            model, optimizer = _made(layers, 100 + turn)
            dist.barrier()
            began = time.perf_counter()
            last[name] = way(folder, model, optimizer)
            dist.barrier()
            if turn:  # the first one loads modules and files
                seconds[name].append(time.perf_counter() - began)
            if _digest(model, optimizer) != (folder / f"digest{rank}").read_text():
                raise RuntimeError(f"rank {rank} came back otherwise than it was: {name}")
    told: list[Any] = [None] * RANKS
    dist.all_gather_object(told, last)
    if rank == 0:
        found: dict[str, Any] = {
            name: asdict(Came(statistics.median(seconds[name]), *map(list, zip(*(e[name] for e in told), strict=True))))
            for name in ways
        }
        (folder / "measured.json").write_text(json.dumps(found | _sizes(folder)))


def _sizes(folder: Path) -> dict[str, int]:
    from ckpt.history.catalog import find, read_history
    from recovery.read import open_snapshot, read_parts
    from recovery.tables import table
    from storage_backends import open_store

    store = open_store(str(folder / "store"))
    snapshot = open_snapshot(store, find(read_history(store), "latest")).snapshot
    return {"state": snapshot.totals.size, "lost_blobs": table(read_parts(store, snapshot, [LOST])[LOST]).blob_bytes}


def _recover(folder: Path, model: Any, optimizer: Any, *, mirrors: bool = True) -> _Last:
    from ckpt.mirror.folders import store_identity
    from ckpt.ranks import open_ranks
    from recovery.restore import restore
    from recovery.survey import survey
    from storage_backends import open_store

    store, ranks = open_store(str(folder / "store")), open_ranks()
    bases = [folder / f"node{ranks.rank}"] if mirrors else []
    state: dict[str, object] = {"model": model, "optimizer": optimizer}
    with survey(bases, store_identity(store.url), prefer=ranks.rank) as holdings:
        restored = restore(store, ranks, state, claim=lambda _: True, holdings=holdings)
    assert restored is not None
    ranks.close()
    return dict(restored.bytes), dict(restored.seconds)


def _reload(folder: Path, model: Any, optimizer: Any) -> _Last:
    return _recover(folder, model, optimizer, mirrors=False)


def _dcp(folder: Path, model: Any, optimizer: Any) -> _Last:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    parts = get_state_dict(model, optimizer)
    state = {"model": parts[0], "optimizer": parts[1]}
    dcp.load(state, checkpoint_id=folder / "dcp")
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    files = sorted((folder / "dcp").glob("*.distcp"))
    return {"files": sum(file.stat().st_size for file in files if file.name.startswith(f"__{dist.get_rank()}_"))}, {}
