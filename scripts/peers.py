"""Who takes part in `bench_peers`: this library and others, each behind the same few calls.

`save` returns when training may go on, `settle` when the state may be changed (that is later where the copy overlaps
with forward and backward), `durable` when the save is on the disk, synced. `load` reads the newest save into the
load's twin. All write into a folder of their own.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import torch

import ckpt
from scripts.peer_loads import Load


class Peer(Protocol):
    """One contestant, made for one load."""

    name: str

    def save(self, step: int) -> None: ...
    def settle(self) -> None: ...
    def durable(self) -> None: ...
    def load(self) -> None: ...
    def close(self) -> None: ...


class Ours:
    """`ckpt.Checkpointer`. `settle` is a step of the optimizer without gradients: what waits there is its hook."""

    def __init__(self, name: str, load: Load, folder: Path, **arguments: Any) -> None:
        self.name = name
        self._load = load
        self._url = folder
        self._saver = ckpt.Checkpointer(folder, load.state(), **arguments)

    def save(self, step: int) -> None:
        self._saver.save(step)

    def settle(self) -> None:
        self._load.optimizer.zero_grad(set_to_none=True)
        self._load.optimizer.step()

    def durable(self) -> None:
        self._saver.wait()

    def load(self) -> None:
        ckpt.load_into(self._url, self._load.state(twin=True))

    def close(self) -> None:
        self._saver.close()


class TorchSave:
    """`torch.save` into a file beside the last one, synced and renamed."""

    name = "torch.save"

    def __init__(self, load: Load, folder: Path) -> None:
        self._load = load
        self._folder = folder
        folder.mkdir()
        self._newest = folder / "none"

    def save(self, step: int) -> None:
        target, beside = self._folder / f"{step}.pt", self._folder / "new"
        with beside.open("wb") as file:
            torch.save(_dicts(self._load), file)
            file.flush()
            os.fsync(file.fileno())
        beside.rename(target)
        _sync(self._folder)
        self._newest = target

    def settle(self) -> None: ...
    def durable(self) -> None: ...

    def load(self) -> None:
        found = torch.load(self._newest, weights_only=True)
        model, optimizer = self._load.twin
        model.load_state_dict(found["model"])
        if "optimizer" in found:
            optimizer.load_state_dict(found["optimizer"])

    def close(self) -> None: ...


class Dcp:
    """`torch.distributed.checkpoint.async_save`, without collectives."""

    name = "DCP async_save"

    def __init__(self, load: Load, folder: Path) -> None:
        self._load = load
        self._folder = folder
        self._future: Any = None

    def save(self, step: int) -> None:
        import torch.distributed.checkpoint as dcp

        self.durable()  # or it would pile up what is in flight
        self._newest = self._folder / str(step)
        self._future = dcp.async_save(_dicts(self._load), checkpoint_id=self._newest, no_dist=True)

    def settle(self) -> None: ...

    def durable(self) -> None:
        if self._future is not None:
            self._future.result()
            self._future = None

    def load(self) -> None:
        import torch.distributed.checkpoint as dcp

        found = _dicts(self._load, twin=True)
        dcp.load(found, checkpoint_id=self._newest, no_dist=True)
        if "optimizer" in found:
            self._load.twin[1].load_state_dict(found["optimizer"])

    def close(self) -> None:
        self.durable()


class Moonclip:
    """`moonclip.CheckpointManager` as it comes."""

    name = "moonclip"

    def __init__(self, load: Load, folder: Path) -> None:
        from moonclip import CheckpointManager

        self._load = load
        self._manager = CheckpointManager(str(folder))

    def save(self, step: int) -> None:
        self._manager.save(step=step, **self._load.state())

    def settle(self) -> None: ...

    def durable(self) -> None:
        self._manager.flush()

    def load(self) -> None:
        self._manager.load_latest(**self._load.state(twin=True))

    def close(self) -> None:
        self._manager.flush()


class Meta:
    """`torch_checkpointing.CheckpointManager`, asynchronous. It syncs nothing, so `durable` does."""

    name = "torch_checkpointing"

    def __init__(self, load: Load, folder: Path) -> None:
        from torch_checkpointing.checkpoint_manager import CheckpointManager
        from torch_checkpointing.config import AsyncCheckpointSaverConfig
        from torch_checkpointing.staging import CheckpointStagerConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        self._load = load
        self._folder = folder
        folder.mkdir()
        staging = CheckpointStagerConfig(use_pinned_memory=False, use_non_blocking_copy=False)
        save = AsyncCheckpointSaverConfig(staging_config=staging)
        # Its O_DIRECT writes are not aligned, and fail (EINVAL) on the ext4 of the machine this was written on.
        storage = LocalFileSystemStorageConfig(use_direct_io=False)
        self._manager = CheckpointManager(CheckpointManager.Config(save=save, storage_config=storage))
        self._future: Future[Any] | None = None

    def save(self, step: int) -> None:
        self._newest = self._folder / str(step)
        self._future = self._manager.save(str(self._newest), _dicts(self._load))

    def settle(self) -> None:
        with self._manager.lock():
            pass

    def durable(self) -> None:
        if self._future is not None:
            self._future.result()
            self._future = None
            for path in self._newest.rglob("*"):
                _sync(path)

    def load(self) -> None:
        found = self._manager.load(str(self._newest), into=_dicts(self._load, twin=True))
        if "optimizer" in found:
            self._load.twin[1].load_state_dict(found["optimizer"])

    def close(self) -> None:
        self._manager.close()


def contestants(*, amplified: bool) -> dict[str, Callable[[Load, Path], Peer]]:
    """Name → how to make it. `amplified`: ours at other bounds on reads, too, which store differently."""
    found: dict[str, Callable[[Load, Path], Peer]] = {
        "ours": lambda load, folder: Ours("ours", load, folder),
        "ours, overlap": lambda load, folder: Ours("ours, overlap", load, folder, capture="overlap"),
    }
    if amplified:
        for bound in (2, 3):
            name, options = f"ours at {bound}", ckpt.Options(restore_amplification=bound)
            found[name] = lambda load, folder, n=name, o=options: Ours(n, load, folder, options=o)  # type: ignore[misc]
    found |= {TorchSave.name: TorchSave, Dcp.name: Dcp, Moonclip.name: Moonclip, Meta.name: Meta}
    return found


def missing() -> dict[str, str]:
    """Peers that cannot take part, and why."""
    modules = {Moonclip.name: "moonclip", Meta.name: "torch_checkpointing"}
    return {name: f"{module} is not installed" for name, module in modules.items() if not _there(module)}


def _there(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _dicts(load: Load, *, twin: bool = False) -> dict[str, Any]:
    return {name: tracked.state_dict() for name, tracked in load.state(twin=twin).items()}  # type: ignore[attr-defined]


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def clear(folder: Path) -> None:
    """Remove what a contestant wrote."""
    shutil.rmtree(folder, ignore_errors=True)
