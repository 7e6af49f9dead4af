"""What the state of the storm's job must be, bit for bit, after every step: a function of who trained which steps.

Every start of the job has a number, its mark. A state carries its `path`, the (first step, mark) of all starts on its
line, so whatever is read back says what it must equal; a snapshot that mixes two starts at the same step equals none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import ckpt

Path: TypeAlias = tuple[tuple[int, int], ...]
Words: TypeAlias = NDArray[np.uint64]

DENSE, SPARSE, STILL, OWN, ROWS, TOUCHED = 30_000, 20_000, 5_000, 2_000, (96, 50), 5
PLAIN = ("step", "best", "name")
_INDEX: Words = np.arange(max(DENSE, STILL, OWN, ROWS[0] * ROWS[1]), dtype=np.uint64)


def mixed(*words: int | Words) -> Words:
    """Splitmix64's last steps over all `words`, broadcast: as good as random, and the same for ever."""
    found = np.zeros(1, np.uint64)
    with np.errstate(over="ignore"):
        for word in words:
            found = (found ^ np.asarray(word, np.uint64)) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(1)
            found = (found ^ (found >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            found = (found ^ (found >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            found = found ^ (found >> np.uint64(31))
    return found


def lawful(path: Path, step: int, world: int) -> dict[str, Any]:
    """The whole state after `step`, saved by `world` ranks: arrays and plain values by name. Raises ValueError if the
    path makes no sense.

    Dense bits change in their low half at every step (NaNs among them), a few sparse words per step, `still` never.
    """
    firsts, marks = [first for first, _ in path], [mark for _, mark in path]
    if not path or firsts != sorted(firsts) or marks != sorted(set(marks)) or firsts[0] != 0 or step < firsts[-1]:
        raise ValueError(f"no job has gone the way {path} to step {step}")
    return {**_of_step(path, step, world), "sparse": _sparse(path, step)}


def _of_step(path: Path, step: int, world: int) -> dict[str, Any]:
    """All but the sparse leaf, which is the sum of all steps."""
    mark = path[-1][1]
    return {
        "dense": _moving(1, mark, step, DENSE),
        "still": mixed(3, _INDEX[:STILL]).astype(np.uint16).view(np.float16),
        "rows": _moving(4, mark, step, ROWS[0] * ROWS[1]).reshape(ROWS),
        "tiny": {
            "scale": mixed(5, mark, step).view(np.float64).reshape(()),
            "three": mixed(6, mark, step, _INDEX[:3]).astype(np.int8),
            "flag": np.asarray(step % 2 == 1),
        },
        **{f"own@rank{rank}": own(rank, mark, step) for rank in range(world)},
        "path": [list(part) for part in path],
        "world": world,
        "step": step,
        "best": float(step) / 3,
        "name": "s" * (step % 7),
    }


def own(rank: int, mark: int, step: int) -> NDArray[np.float32]:
    """What one rank alone holds."""
    return _moving(16 + rank, mark, step, OWN)


def _moving(leaf: int, mark: int, step: int, size: int) -> NDArray[np.float32]:
    index = _INDEX[:size]
    high = mixed(leaf, index) & np.uint64(0xFFFF0000)
    return (high | (mixed(leaf, mark, step, index) & np.uint64(0xFFFF))).astype(np.uint32).view(np.float32)


def _sparse(path: Path, step: int) -> NDArray[np.int64]:
    found = np.zeros(SPARSE, np.int64)
    stops = [first for first, _ in path[1:]] + [step]
    for (first, mark), stop in zip(path, stops, strict=True):
        _touch(found, mark, np.arange(first + 1, stop + 1, dtype=np.uint64))
    return found


def _touch(sparse: NDArray[np.int64], mark: int, steps: Words) -> None:
    for k in range(TOUCHED):
        drawn = mixed(2, mark, steps, k)
        np.add.at(sparse, (drawn % np.uint64(SPARSE)).astype(np.int64), (drawn >> np.uint64(40)).astype(np.int64))


class Subject:
    """The live state of one rank, its leaves those of `lawful`. `rows` is sharded over the ranks, `own` per rank, all
    else replicated."""

    def __init__(self, rank: int, world: int, mesh: DeviceMesh | None) -> None:
        self.rank, self.world = rank, world
        share = ROWS[0] // world
        rows = torch.zeros(share, ROWS[1])
        self.mine = slice(rank * share, (rank + 1) * share)
        self.tensors: dict[str, torch.Tensor] = {
            "dense": torch.zeros(DENSE),
            "sparse": torch.zeros(SPARSE, dtype=torch.int64),
            "still": torch.zeros(STILL, dtype=torch.float16),
            "rows": rows,
            "scale": torch.zeros((), dtype=torch.float64),
            "three": torch.zeros(3, dtype=torch.int8),
            "flag": torch.zeros((), dtype=torch.bool),
            "own": torch.zeros(OWN),
        }
        whole = rows if mesh is None else DTensor.from_local(rows, mesh, [Shard(0)])
        self.state: dict[str, object] = {
            **{name: self.tensors[name] for name in ("dense", "sparse", "still")},
            "rows": whole,
            "tiny": {name: self.tensors[name] for name in ("scale", "three", "flag")},
            "own": ckpt.PerRank(self.tensors["own"]),
            "path": [],
            "world": world,
            "step": 0,
            "best": 0.0,
            "name": "",
        }

    def begin(self, live: Any, start: int, mark: int) -> None:
        """From here on steps are of `mark`'s training. `live`: the checkpointer's mapping."""
        self.path = (*_path(live), (start, mark))
        live["path"] = [list(part) for part in self.path]
        live["world"] = self.world
        self._show(_of_step(self.path, start, self.world), live)

    def train(self, step: int, live: Any) -> None:
        """One step, in place, as training does: the sparse leaf is added to, so that what a restore brought matters."""
        _touch(self.tensors["sparse"].numpy(), self.path[-1][1], np.array([step], np.uint64))
        self._show(_of_step(self.path, step, self.world), live)

    def _show(self, law: Mapping[str, Any], live: Any) -> None:
        """Write these leaves into the live tensors, and the values into `live`."""
        for name, tensor in self.tensors.items():
            value = law["tiny"].get(name, law.get(f"own@rank{self.rank}" if name == "own" else name))
            if value is not None:
                value = value[self.mine] if name == "rows" else value
                raw(tensor)[:] = np.frombuffer(np.ascontiguousarray(value).tobytes(), np.uint8)
        live.update({name: law[name] for name in PLAIN})

    def wrong(self, live: Any, step: int) -> list[str]:
        """Leaves and values of a restored state that are not what the law says; after a change of the number of ranks
        the per-rank leaf is that of the rank which `dealt` says."""
        path, world = _path(live), int(live["world"])
        law = lawful(path, step, world)
        law["own"] = law[f"own@rank{dealt(self.rank, world)}"]
        found = [name for name in PLAIN if live[name] != law[name]]
        for name, tensor in self.tensors.items():
            value = law["tiny"].get(name, law.get(name))
            value = value[self.mine] if name == "rows" else value
            if raw(tensor).tobytes() != np.ascontiguousarray(value).tobytes():
                found.append(name)
        return found


def dealt(rank: int, world: int) -> int:
    """The stored rank whose own part a rank gets where another number of ranks comes back."""
    return rank % world


def deal(name: str, values: Sequence[Any], rank: int, world: int) -> Any:
    """`dealt` as `Options(on_resize=…)` wants it; the number of ranks that now come back does not matter."""
    del name, world
    return values[dealt(rank, len(values))]


def wrong_loaded(loaded: Mapping[str, Any], step: int) -> list[str]:
    """The same for what `ckpt.load` gave: whole tensors by path."""
    world = int(loaded["world"])
    law = lawful(_path(loaded), step, world)
    expected = {**law, **{f"tiny.{name}": value for name, value in law.pop("tiny").items()}}
    expected = {name: value for name, value in expected.items() if isinstance(value, np.ndarray)}
    if world == 1:
        expected["own"] = expected.pop("own@rank0")
    found = [name for name in PLAIN if loaded[name] != law[name]]
    for name, value in expected.items():
        tensor = loaded.get(name)
        if tensor is None or raw(tensor).tobytes() != np.ascontiguousarray(value).tobytes():
            found.append(name)
    return found


def _path(values: Mapping[str, Any]) -> Path:
    return tuple((int(first), int(mark)) for first, mark in values["path"])


def raw(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """A contiguous CPU tensor's own bytes."""
    return tensor.reshape(-1).view(torch.uint8).numpy() if tensor.dim() else tensor.view(1).view(torch.uint8).numpy()
