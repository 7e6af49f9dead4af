"""A rank's state as plain local tensors, rolled forward by a fresh optimizer of the recorded class (torch).

Between two snapshots the parameters and moments of a rank are a function of the last snapshot and of the gradients its
optimizers consumed. The same kernels on the same slices give the same bits, so whoever has the records has the state.
Both who proves a journal while it is written and who restores from it use this room; whether it went right is told by
checksums of the live tensors, never assumed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ckpt.checksums import checksums
from ckpt.format.documents import chunk_digest
from ckpt.format.journal import DEVICE, HOST, SUM
from ckpt.format.shards import DTYPES, Shard
from ckpt.format.values import encode
from ckpt.leaves.tensors import as_bits

Bytes = NDArray[np.uint8]

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    kind.__name__: kind
    for kind in (
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.Adamax,
        torch.optim.Adagrad,
        torch.optim.RMSprop,
    )
}
"""Optimizers whose step is a function of each element's own state and gradient. Exactly these classes: a subclass may
do anything. What looks across shards (Muon, Adafactor) or calls a closure (LBFGS) has no place here."""

SLICE = 64 << 20
"""Bytes of state that are moved to a device at a time, to be stepped there."""

_TENSOR = "$tensor"

Groups = tuple[tuple[tuple[str, ...], Mapping[str, Any]], ...]
"""Parameters by path, and options, group by group."""


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One call of an optimizer. `groups` None: as at its call before. `gradients`: path → local gradient."""

    optimizer: str
    kind: str
    groups: Groups | None
    gradients: Mapping[str, torch.Tensor]
    scale: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """All that one step did, in plain words. `table` None: as before. `sums`: of the tensors after it, by table."""

    step: int
    calls: Sequence[Call]
    tensors: Mapping[str, Bytes]
    values: Mapping[str, bytes]
    gone: Sequence[str]
    table: tuple[Shard, ...] | None
    aliases: Mapping[str, str] | None
    sums: bytes


class Unlike(ValueError):  # noqa: N818 - what it says of a record
    """A record does not fit the state it is applied to."""


@dataclass(eq=False)
class Rolled:
    """The state of one rank after `step`.

    Attributes:
        table: its shards, sorted by path; `tensors`: path → local tensor of the shard's box, in host memory.
        values: tracked name → tagged JSON; `aliases`: other names of tied tensors → path.
        device: where optimizers step. The tensors are moved there by slices, and back.
        breathe: called between tensors, for who works beside a training thread.
    """

    step: int
    table: tuple[Shard, ...]
    tensors: dict[str, torch.Tensor]
    values: dict[str, bytes]
    aliases: dict[str, str]
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    breathe: Callable[[], None] = lambda: None
    slice_bytes: int = SLICE
    _groups: dict[str, Groups] = field(default_factory=dict)
    _optimizers: dict[str, tuple[str, tuple[tuple[str, ...], ...], torch.optim.Optimizer]] = field(default_factory=dict)
    _slot_names: dict[str, tuple[tuple[Shard, ...], dict[str, list[str]]]] = field(default_factory=dict)

    def roll(self, change: Change) -> None:
        """Become the state after one more step.

        Raises:
            Unlike: the change is not one of this state.
        """
        for call in change.calls:
            self._step(call)
        for path, data in change.tensors.items():
            self._put(path, data, change.table)
        for name in change.gone:
            self.values.pop(name, None)
        self.values.update(change.values)
        if change.table is not None:
            self._take_table(change.table)
            self.aliases = dict(change.aliases or {})
        self.step = change.step

    def differing(self, sums: bytes) -> list[str]:
        """Paths of the tensors that are not what these checksums, in the table's order, say."""
        if len(sums) != SUM * len(self.table):
            raise Unlike(f"{len(sums)} bytes of checksums for {len(self.table)} tensors")
        found = []
        for n, shard in enumerate(self.table):
            given = sums[n * SUM : (n + 1) * SUM]
            if sum_of(self.tensors[shard.leaf.path], shard, given[0]) != given:
                found.append(shard.leaf.path)
            self.breathe()
        return found

    def bytes_of(self, path: str) -> Bytes:
        """The row-major bytes of a tensor; not a copy where they lie so."""
        return raw_bytes(self.tensors[path])

    # --- one call --------------------------------------------------------------------------------------------------

    def _step(self, call: Call) -> None:
        if call.kind not in OPTIMIZERS:
            raise Unlike(f"{call.optimizer}: {call.kind} is none of {', '.join(OPTIMIZERS)}")
        groups = call.groups if call.groups is not None else self._groups.get(call.optimizer)
        if groups is None:
            raise Unlike(f"{call.optimizer}: its parameter groups were never recorded")
        self._groups[call.optimizer] = groups
        unknown = [path for paths, _ in groups for path in paths if path not in self.tensors]
        if unknown or call.gradients.keys() - {path for paths, _ in groups for path in paths}:
            raise Unlike(f"{call.optimizer}: steps parameters that are not there ({', '.join(unknown[:3])})")
        with torch.no_grad():
            if self.device.type == "cpu" and self.slice_bytes >= SLICE:
                self._step_here(call, groups)
            else:
                for some in self._slices(groups, call):
                    self._step_there(call, some)

    def _step_here(self, call: Call, groups: Groups) -> None:
        paths = tuple(members for members, _ in groups)
        known = self._optimizers.get(call.optimizer)
        if known is None or known[:2] != (call.kind, paths):
            made = make_optimizer(call.kind, [([self.tensors[p] for p in ps], options) for ps, options in groups])
            for path, tensor in self._parameters(groups):
                if slots := self._slots(call.optimizer, path):
                    made.state[tensor] = slots
            known = self._optimizers[call.optimizer] = (call.kind, paths, made)
        optimizer = known[2]
        for group, (_, options) in zip(optimizer.param_groups, groups, strict=True):
            set_options(group, options, self.device)
        for path, tensor in self._parameters(groups):
            tensor.grad = call.gradients.get(path)
            self.breathe()
        take_step(optimizer, call.scale, self.device)
        for path, tensor in self._parameters(groups):
            tensor.grad = None
            self._take_slots(call.optimizer, path, optimizer.state.get(tensor, {}))
            self.breathe()

    def _step_there(self, call: Call, groups: Groups) -> None:
        """Some of the parameters, moved to the device and back."""
        there = {path: tensor.to(self.device, copy=True) for path, tensor in self._parameters(groups)}
        optimizer = make_optimizer(call.kind, [([there[p] for p in ps], options) for ps, options in groups])
        for group, (paths, options) in zip(optimizer.param_groups, groups, strict=True):
            set_options(group, options, self.device)
            # A scalar is where its implementation looks for it: only capturable and fused ones keep it on the device.
            host = not (options.get("capturable") or options.get("fused"))
            for path in paths:
                slots = self._slots(call.optimizer, path)
                moved = {
                    slot: t.clone() if host and t.dim() == 0 else t.to(self.device, copy=True)
                    for slot, t in slots.items()
                }
                if moved:
                    optimizer.state[there[path]] = moved
                gradient = call.gradients.get(path)
                there[path].grad = None if gradient is None else gradient.to(self.device)
        take_step(optimizer, call.scale, self.device)
        for path, tensor in there.items():
            self.tensors[path].copy_(tensor)
            back = {slot: value.cpu() for slot, value in optimizer.state.get(tensor, {}).items()}
            self._take_slots(call.optimizer, path, back)

    def _slices(self, groups: Groups, call: Call) -> Iterator[Groups]:
        """The groups, cut so that what is moved at a time is bounded. Parameters without a gradient are not moved:
        no step looks at them."""
        some: list[tuple[tuple[str, ...], Mapping[str, Any]]] = []
        size = 0
        for paths, options in groups:
            members: list[str] = []
            for path in paths:
                if path not in call.gradients:
                    continue
                if size >= self.slice_bytes:
                    yield (*some, (tuple(members), options))
                    some, members, size = [], [], 0
                members.append(path)
                size += self.tensors[path].nbytes
            some.append((tuple(members), options))
        yield tuple(some)

    def _parameters(self, groups: Groups) -> Iterator[tuple[str, torch.Tensor]]:
        for paths, _ in groups:
            for path in paths:
                yield path, self.tensors[path]

    def _slots(self, optimizer: str, path: str) -> dict[str, torch.Tensor]:
        known = self._slot_names.get(optimizer)
        if known is None or known[0] is not self.table:
            known = self._slot_names[optimizer] = (self.table, slot_names(optimizer, self.table))
        prefix = f"{optimizer}.state.{path}."
        return {slot: self.tensors[prefix + slot] for slot in known[1].get(path, ()) if prefix + slot in self.tensors}

    def _take_slots(self, optimizer: str, path: str, slots: Mapping[str, Any]) -> None:
        for slot, value in slots.items():
            if isinstance(value, torch.Tensor):
                self.tensors[f"{optimizer}.state.{path}.{slot}"] = value

    # --- everything else -------------------------------------------------------------------------------------------

    def _put(self, path: str, data: Bytes, table: tuple[Shard, ...] | None) -> None:
        there = self.tensors.get(path)
        if there is None or there.nbytes != len(data):
            shard = next((s for s in table or self.table if s.leaf.path == path), None)
            if shard is None:
                raise Unlike(f"{path}: changed, and in no table")
            self.tensors[path] = as_tensor(data.copy(), shard)
        else:
            there.copy_(torch.from_numpy(data).view(there.dtype).view(there.shape))

    def _take_table(self, table: tuple[Shard, ...]) -> None:
        paths = {shard.leaf.path for shard in table}
        for shard in table:
            tensor = self.tensors.get(shard.leaf.path)
            if tensor is None or tuple(tensor.shape) != shard.box.lengths or _name(tensor) != shard.leaf.dtype:
                found = "nothing" if tensor is None else f"{_name(tensor)} {list(tensor.shape)}"
                raise Unlike(f"{shard.leaf.path}: expected {shard.leaf.dtype} {list(shard.box.lengths)}, found {found}")
        for path in self.tensors.keys() - paths:
            del self.tensors[path]
        self.table = table


def slot_names(optimizer: str, table: Sequence[Shard]) -> dict[str, list[str]]:
    """Path of a parameter → its slots, of those in a table."""
    prefix = f"{optimizer}.state."
    found: dict[str, list[str]] = {}
    for shard in table:
        path, slot = shard.leaf.path, shard.leaf.cls.removeprefix("slot:")
        if slot != shard.leaf.cls and path.startswith(prefix) and path.endswith(f".{slot}"):
            found.setdefault(path[len(prefix) : -len(slot) - 1], []).append(slot)
    return found


# --- optimizers ----------------------------------------------------------------------------------------------------


def make_optimizer(
    kind: str, groups: Sequence[tuple[Sequence[torch.Tensor], Mapping[str, Any]]]
) -> torch.optim.Optimizer:
    """A fresh optimizer of a recorded class, stateless, on plain tensors."""
    make: Callable[..., torch.optim.Optimizer] = OPTIMIZERS[kind]
    return make([{"params": list(tensors), **live_options(options, None)} for tensors, options in groups])


def set_options(group: dict[str, Any], options: Mapping[str, Any], device: torch.device) -> None:
    """Exactly the recorded options: those the class fills in by itself are among them."""
    params = group["params"]
    group.clear()
    group.update(params=params, **live_options(options, device))


def take_step(optimizer: torch.optim.Optimizer, scale: tuple[float, float] | None, device: torch.device) -> None:
    """The class's own step, without what others have hooked on to every optimizer of the process."""
    live: Any = optimizer
    if scale is not None:
        live.grad_scale, live.found_inf = (torch.tensor(value, dtype=torch.float32, device=device) for value in scale)
    inspect.unwrap(type(optimizer).step)(optimizer)
    if scale is not None:
        del live.grad_scale, live.found_inf


def plain_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """A live group's options as plain data; a tensor among them (a learning rate) by dtype and bytes.

    Raises UnsupportedValue, or Unlike for a tensor with several elements.
    """
    options: dict[str, Any] = {}
    for name, value in group.items():
        if name in ("params", "param_names"):
            continue
        if isinstance(value, torch.Tensor):
            if value.dim():
                raise Unlike(f"option {name} is a tensor of shape {list(value.shape)}")
            options[name] = (_TENSOR, _name(value), value.device.type, raw_bytes(value.detach().cpu()).tobytes())
        else:
            options[name] = value
    return options


def encode_options(options: Mapping[str, Any]) -> bytes:
    return encode(dict(options), "param_groups")


def live_options(options: Mapping[str, Any], device: torch.device | None) -> dict[str, Any]:
    """Options for a live group, from plain data."""
    return {name: _live_option(value, device) for name, value in options.items()}


def _live_option(value: Any, device: torch.device | None) -> Any:
    match value:
        case (str(mark), str(dtype), str(place), bytes(data)) if mark == _TENSOR and dtype in DTYPES:
            tensor = torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype)).reshape(())
            return tensor if device is None or place == "cpu" else tensor.to(device)
        case _:
            return value


# --- bytes and checksums -------------------------------------------------------------------------------------------


def as_tensor(data: Bytes, shard: Shard) -> torch.Tensor:
    """A tensor of the shard's box on these bytes."""
    dtype: torch.dtype = getattr(torch, shard.leaf.dtype)  # a key of DTYPES: the row was checked
    if not len(data):
        return torch.empty(shard.box.lengths, dtype=dtype)
    return torch.from_numpy(data).view(dtype).view(shard.box.lengths)


def raw_bytes(tensor: torch.Tensor) -> Bytes:
    """The row-major bytes of a host tensor; a view of its memory where they lie so."""
    if not tensor.numel():
        return np.empty(0, np.uint8)
    flat: Bytes = as_bits(tensor.detach()).contiguous().view(-1).numpy().view(np.uint8)
    return flat


def sum_of(tensor: torch.Tensor, shard: Shard, kind: int | None = None) -> bytes:
    """The checksum of a local tensor, taken where it lives; or of a given kind, wherever it is."""
    if kind is None:
        kind = HOST if tensor.device.type == "cpu" else DEVICE
    if kind == HOST:
        return bytes([HOST]) + bytes.fromhex(chunk_digest(shard.leaf.dtype, raw_bytes(tensor.detach().cpu())))
    return bytes([DEVICE]) + bytes.fromhex(checksums([tensor])[0])


def sums_of(
    shards: Sequence[Shard], tensors: Sequence[torch.Tensor], breathe: Callable[[], None] = lambda: None
) -> bytes:
    """The checksums of many, each where it lives; those on devices together. `breathe` is called between them."""
    far = [n for n, tensor in enumerate(tensors) if tensor.device.type != "cpu"]
    found = dict(zip(far, checksums([tensors[n] for n in far]), strict=True)) if far else {}
    sums: list[bytes] = []
    for n, (shard, tensor) in enumerate(zip(shards, tensors, strict=True)):
        sums.append(bytes([DEVICE]) + bytes.fromhex(found[n]) if n in found else sum_of(tensor, shard, HOST))
        breathe()
    return b"".join(sums)


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
