"""Jobs on several nodes: ranks that mirror into folders of their own, die, and come back; what each read, counted.

A node is a mirror folder: two agents on one machine are told apart by nothing else. A rank says what the test compares
with `say`, one line of JSON that `facts` finds again in what it printed.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ckpt
from ckpt.format.manifest import Part
from ckpt.mirror.folders import rank_of
from recovery.report import Restored
from storage_backends import open_store
from storage_backends.base import Buffer, Entry, Store
from tests.support.procs import Job, Result, run_ranks, succeed
from tests.support.worlds import PATIENT, Parallel, local_bytes, quiet

SAID = "FACTS "


class CountingStore:
    """A store that notes what was read of it: (key, bytes), one entry per call. Counted here, so not inferred."""

    def __init__(self, inner: Store) -> None:
        self._inner = inner
        self._lock = threading.Lock()
        self.reads: list[tuple[str, int]] = []

    @property
    def url(self) -> str:
        return self._inner.url

    def put(self, key: str, data: Buffer) -> None:
        self._inner.put(key, data)

    def get(self, key: str) -> bytes:
        return self._noted(key, self._inner.get(key))

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        return self._noted(key, self._inner.get_range(key, start, stop))

    def list(self, prefix: str) -> Sequence[Entry]:
        return self._inner.list(prefix)

    def delete(self, keys: Sequence[str]) -> None:
        self._inner.delete(keys)

    def read(self, prefix: str) -> tuple[int, int]:
        """Calls and bytes of what was read below `prefix`."""
        with self._lock:
            sizes = [nbytes for key, nbytes in self.reads if key.startswith(prefix)]
        return len(sizes), sum(sizes)

    def _noted(self, key: str, data: bytes) -> bytes:
        with self._lock:
            self.reads.append((key, len(data)))
        return data


class Net(nn.Module):
    """130 rows, which four ranks share unevenly; dropout; leaves that are chunks, and leaves that are bundled."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(48, 130)
        self.drop = nn.Dropout(0.3)
        self.down = nn.Linear(130, 7)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(self.drop(torch.tanh(self.up(x)))) * self.scale
        return result


class Noisy(Parallel):
    """Data and dropout are each rank's own."""

    def __init__(self, model: nn.Module, seed: int) -> None:
        super().__init__(model, 48)
        torch.manual_seed(1000 * seed + dist.get_rank())


def fsdp(seed: int) -> Parallel:
    torch.manual_seed(seed)
    net = Net()
    fully_shard(net.up)
    fully_shard(net)
    return Noisy(net, seed)


def ddp(seed: int) -> Parallel:
    torch.manual_seed(seed)
    # Or DDP lays its buckets out anew after a process's first backward: see tests/e2e/test_ddp.py.
    return Noisy(DistributedDataParallel(Net(), find_unused_parameters=True), seed)


BUILD: dict[str, Callable[[int], Parallel]] = {"fsdp": fsdp, "ddp": ddp}


def saver_of(
    store: str | Store, state: Mapping[str, object], node: str | Path = "off", **options: Any
) -> ckpt.Checkpointer:
    """On a node; chunks are small, so that there are many."""
    return ckpt.Checkpointer(store, state, mirror=str(node), options=quiet(**{"chunk": "4KiB", **options}))


def train_and_save(saver: ckpt.Checkpointer, training: Parallel, steps: range) -> None:
    """Save after every step, and see each committed."""
    for step in steps:
        training.train(step)
        saver.save(step + 1).wait(PATIENT)


def say(**facts: object) -> None:
    print(SAID + json.dumps(facts), flush=True)


def facts(out: str) -> dict[str, Any]:
    """What a rank has said, all of it in one."""
    found: dict[str, Any] = {}
    for line in out.splitlines():
        if line.startswith(SAID):
            found |= json.loads(line.removeprefix(SAID))
    assert found, out
    return found


def heard(results: Sequence[Result]) -> list[dict[str, Any]]:
    """What the ranks of a job that went well have said."""
    return [facts(out) for out in succeed(results)]


def said_of(restored: Restored | None, store: CountingStore) -> dict[str, object]:
    """What came from where, by the report and by the store's own count."""
    assert restored is not None
    packs, pack_bytes = store.read("packs/")
    parts, _ = store.read("parts/")
    return {
        "step": restored.step,
        "bytes": dict(restored.bytes),
        "problems": list(restored.problems),
        "packs": packs,
        "pack_bytes": pack_bytes,
        "parts": parts,
    }


def counting(url: str | Path) -> CountingStore:
    return CountingStore(open_store(str(url)))


def wait_for_the_end() -> None:
    """To be killed here."""
    print("ready", flush=True)
    sys.stdin.readline()


def killed(function: Callable[..., None], n: int, args: Sequence[Any]) -> None:
    """Run a job until every rank waits for its end, and let it come."""
    with Job(function, n, args) as job:
        for rank in range(n):
            job.until(rank, "ready")
        job.kill_all()
        job.wait()


def run(function: Callable[..., None], n: int, args: Sequence[Any]) -> list[dict[str, Any]]:
    """Run a job to its end: what its ranks said."""
    return heard(run_ranks(function, n, args))


def note_local(state: dict[str, object], folder: str | Path, step: int) -> None:
    """Write down this rank's own bytes, for `is_as_noted` after a restart."""
    noted = {name: xxhash.xxh3_128_hexdigest(data) for name, data in local_bytes(state).items()}
    path = Path(folder, f"{step}-{dist.get_rank()}.json")
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(noted))


def is_as_noted(state: dict[str, object], folder: str | Path, step: int) -> bool:
    noted = json.loads(Path(folder, f"{step}-{dist.get_rank()}.json").read_text())
    assert len(noted) > 3, "nothing is compared"
    return bool(noted == {name: xxhash.xxh3_128_hexdigest(data) for name, data in local_bytes(state).items()})


def mirrors_in(node: str | Path) -> dict[int, Path]:
    """Rank → its mirror file on a node that has one store's."""
    found = {rank: path for path in Path(node).glob("*/*") if (rank := rank_of(path.name)) is not None}
    assert len(found) == len(list(Path(node).glob("*/*"))), "several of one rank"
    return found


def blob_bytes(part: Part) -> int:
    """What a rank's own shards take on the store, each blob once."""
    rows = [*(row for row in part.shards if row.bundle is None), *part.bundles]
    blobs = {(b.pack, b.start): b.size for row in rows for chunk in part.chunks(row) for b in chunk.blobs}
    return sum(blobs.values())


def same_state(one: Parallel, other: Parallel) -> bool:
    return local_bytes(one.state) == local_bytes(other.state)
