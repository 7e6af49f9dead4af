"""Recording on the training thread: what each optimizer is about to consume, and what else a step changed (torch).

    optimizer pre-hook   its gradients are copied out at the instant of consumption: reduced, unscaled, clipped
    completed(step)      everything else that may have changed is copied out; checksums of the whole state are begun
    next pre-hook        waits for the checksums, which read the live tensors during forward and backward

Nothing here is collective. What cannot be recorded (a tensor that came or went, an optimizer that was exchanged) pauses
the journal until the next snapshot, from which it goes on; what would make it wrong ends it.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from ckpt.errors import CheckpointError, UnsupportedState
from ckpt.format.journal import HOST, SUM
from ckpt.format.layout import Layout
from ckpt.format.names import SnapshotId
from ckpt.format.shards import Shard
from ckpt.leaves import Flat, LiveShard
from ckpt.options import Journal
from ckpt.rolling import Groups, Rolled, Unlike, sum_of, sums_of
from ckpt.saving.breath import Breath
from ckpt.saving.consuming import (
    Members,
    check_tables,
    journaled_optimizers,
    local_gradient,
    members_of,
    options_of,
    same_groups,
    same_objects,
    scale_of,
    tracked,
    version_of,
)
from ckpt.saving.gradients import Lot, copy_out
from ckpt.saving.job import Bytes, JournalStats
from ckpt.saving.keeping import Begin, Committed, Consumed, Keeper, Mark, Moment, Pause
from ckpt.saving.threads import Crew, Pending

log = logging.getLogger("ckpt")

Look: TypeAlias = Callable[[], tuple[Flat, dict[str, Any]]]
"""The state as it is now: its leaves, and copies of every plain value, random states and data position among them."""

SMALL = 64 * 1024
"""Tensors outside the optimizers below so many bytes are copied at every step, whatever their version counters say."""

PATIENCE = 60.0
"""Seconds that `completed` waits for records to be durable before the journal pauses and says so."""


@dataclass(frozen=True, slots=True, eq=False)
class _Parts:
    """The leaves of a state, told apart. `paths`: id of an optimizer's parameter → path; `members`: name of an
    optimizer → its groups. `stepped`: those that only optimizers change; `watched`: all others, and whether a change
    of one is told by its version counter."""

    shards: tuple[LiveShard, ...]
    table: tuple[Shard, ...]
    sizes: tuple[tuple[int, ...], ...]
    paths: Mapping[int, str]
    members: Mapping[str, Sequence[Members]]
    stepped: Sequence[LiveShard]
    watched: Sequence[tuple[LiveShard, bool]]


class Journaling:
    """The journal of one rank. Every method belongs to the training thread, but `committed`."""

    def __init__(
        self,
        settings: Journal,
        state: Mapping[str, object],
        look: Look,
        names: Callable[[], Mapping[int, str]],
        keeper: Keeper,
    ) -> None:
        self._settings, self._state, self._look, self._names = settings, state, look, names
        self._keeper = keeper
        self._buffers = keeper.buffers
        self._optimizers = journaled_optimizers(state)
        self._hooks = [o.register_step_pre_hook(self._hook) for o in self._optimizers.values()]
        self._summing: Crew[Breath] = Crew("ckpt-sums", 1, Breath, yielding=False)  # training waits for it
        self._sums: Pending[bytes] | None = None
        self._parts: _Parts | None = None
        self._versions: dict[str, tuple[int, int]] = {}
        self._known: dict[str, bytes] = {}
        self._consumed: list[Consumed] = []
        self._used: list[Bytes] = []
        self._told: dict[str, Groups] = {}
        self._recent: deque[int] = deque(maxlen=settings.steps or 1)
        self._base: SnapshotId | None = None
        self._step = -1
        self._first = True
        self._again = False
        self._why: str | None = "no snapshot yet"
        self._seconds = 0.0

    @property
    def stats(self) -> JournalStats:
        counts = self._keeper.counts
        why = self._keeper.over or self._keeper.behind or self._why
        return JournalStats(counts.steps, counts.bytes, self._seconds, counts.cpu, counts.memory, why)

    @property
    def recording(self) -> bool:
        return self._base is not None and self._keeper.over is None and self._keeper.behind is None

    # --- the optimizers' hook --------------------------------------------------------------------------------------

    def _hook(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self.recording:
            return
        began = time.perf_counter()
        try:
            self._settle_sums()
            self._consume(optimizer, args, kwargs)
        except Exception as error:  # the step itself goes on, whatever happens to the journal
            self._fail(error)
        finally:
            self._seconds += time.perf_counter() - began

    def _consume(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name = next(n for n, o in self._optimizers.items() if o is optimizer)
        if len(args) > 1 or any(value is not None for value in kwargs.values()):
            raise Unlike(f"{name}: step() was given a closure; the gradients it computes cannot be recorded before it")
        parts = self._parts
        assert parts is not None, "recording began with a look at the state"
        gradients: list[tuple[str, torch.Tensor]] = []
        groups: list[tuple[tuple[str, ...], dict[str, Any]]] = []
        known = parts.members.get(name, ())
        for n, group in enumerate(optimizer.param_groups):
            members = known[n] if n < len(known) else None
            if members is None or not same_objects(group["params"], members.parameters):
                new = [p for p in group["params"] if id(p) not in parts.paths]
                if new:
                    raise Unlike(f"{name}: a parameter of shape {list(new[0].shape)} was added since the last step")
                members = members_of(group, parts.paths)
            gradients += [
                (path, local_gradient(path, parameter))
                for path, parameter in zip(members.paths, members.parameters, strict=True)
                if parameter.grad is not None
            ]
            groups.append((members.paths, options_of(group, foreach=members.foreach)))
        told = self._told.get(name)
        same = told is not None and same_groups(told, groups)
        if not same:
            self._told[name] = tuple(groups)
        lots = copy_out(gradients, self._buffers, self._used)
        kind = type(optimizer).__name__
        self._consumed.append(Consumed(name, kind, None if same else tuple(groups), lots, scale_of(optimizer)))

    # --- steps and snapshots ---------------------------------------------------------------------------------------

    def completed(self, step: int, *, saves: bool = False) -> None:
        """Steps up to `step` are complete. With ``flush="k steps"`` it returns when fewer than k of them are at risk.

        Args:
            saves: a save of this step follows, so it is recorded though it may not be one of `every`.
        """
        if not self.recording or (step % self._settings.every and not saves):
            return
        began = time.perf_counter()
        try:
            if step == self._step and not self._consumed:
                self._again = True  # it is recorded; should a save of it follow, that one looks at the state anew
                return
            if step <= self._step:
                self.pause(f"step {step} was completed again")
                return
            self._settle_sums()
            self._complete(step)
            self._wait_durable()
        except Exception as error:
            self._fail(error)
        finally:
            self._seconds += time.perf_counter() - began

    def captured(self, id_: SnapshotId, layout: Layout) -> None:
        """The state as it is now was captured as this snapshot: records extend it from here on."""
        if self._keeper.over is not None:
            return
        began = time.perf_counter()
        try:
            here = self._base is not None and self._base.run == id_.run and self._step == id_.step
            if not (self.recording and here) or self._again:
                self._begin(id_)
            self._keeper.put(Mark(id_, layout))
            self._base, self._first = id_, True
            self._told.clear()
        except Exception as error:
            self._fail(error)
        finally:
            self._seconds += time.perf_counter() - began

    def committed(self, id_: SnapshotId, digests: Sequence[str]) -> None:
        """The snapshot is there, with these chunk digests. On the writer's thread."""
        self._keeper.put(Committed(id_, digests))

    def pause(self, why: str) -> None:
        """Record nothing until the next snapshot."""
        if self._base is not None:
            log.warning("the journal pauses until the next snapshot: %s", why)
        self._base, self._why = None, why
        self._drop()
        self._keeper.put(Pause())

    def _fail(self, error: Exception) -> None:
        if not isinstance(error, UnsupportedState | Unlike | CheckpointError):
            log.error("the journal", exc_info=error)
        self.pause(str(error) or repr(error))

    def close(self, timeout: float | None, *, remove: bool) -> None:
        """Write down what was captured, and end. `remove`: nobody will come back for the ring."""
        for hook in self._hooks:
            hook.remove()
        with contextlib.suppress(Exception):
            self._settle_sums()
        self._keeper.stop(timeout)
        self._summing.stop()
        if self._keeper.ring is not None:
            self._keeper.ring.close(remove=remove)

    # --- inside ----------------------------------------------------------------------------------------------------

    def _begin(self, id_: SnapshotId) -> None:
        """Take a copy of the whole state, which the proof rolls forward."""
        self._drop()
        self._settle_sums()
        flat, trees = self._look()
        parts = self._parts = self._told_apart(flat, None)
        tensors = {live.shard.leaf.path: live.tensor.detach().cpu().clone() for live in flat.shards}
        devices = {live.tensor.device for live in parts.stepped if live.shard.leaf.cls == "parameter"}
        device = next((d for d in devices if d.type != "cpu"), torch.device("cpu"))
        rolled = Rolled(id_.step, parts.table, tensors, {}, dict(flat.aliases), device)
        self._versions = {live.shard.leaf.path: version_of(live.tensor) for live, _ in parts.watched}
        self._known = {}
        self._keeper.begin(Begin(id_, rolled, trees))
        self._step, self._why, self._again = id_.step, None, False

    def _complete(self, step: int) -> None:
        flat, trees = self._look()
        before = self._parts
        assert before is not None
        self._check_optimizers()
        parts = self._parts = self._told_apart(flat, before)
        if parts.table is not before.table:
            check_tables(before.table, parts.table, self._optimizers)
        copied: list[tuple[str, torch.Tensor]] = []
        for live, counted in parts.watched:
            path, tensor = live.shard.leaf.path, live.tensor
            version = version_of(tensor)
            if tensor.nbytes < SMALL or version[0] < 0 or (counted and version != self._versions.get(path)):
                copied.append((path, tensor))
            elif not counted:
                found = sum_of(tensor, live.shard)
                if found != self._known.get(path):
                    copied.append((path, tensor))
                self._known[path] = found
            self._versions[path] = version
        lots = copy_out(copied, self._buffers, self._used)
        self._sums = sums = self._begin_sums(parts, lots)
        moment = Moment(
            step=step,
            consumed=self._consumed,
            others=lots,
            trees=trees,
            table=parts.table,
            aliases=flat.aliases,
            sums=sums,
            first=self._first,
            threads=torch.get_num_threads(),
            buffers=self._used,
        )
        self._consumed, self._used, self._first, self._step, self._again = [], [], False, step, False
        self._recent.append(step)
        self._keeper.put(moment)

    def _begin_sums(self, parts: _Parts, lots: Sequence[Lot]) -> Pending[bytes]:
        """Checksums of the whole state, in the table's order: of what was copied from the copies, of the rest where it
        lives. The training thread goes on; the next step of an optimizer waits."""
        there: dict[str, Bytes] = {}
        for lot in lots:
            at = 0
            for path, nbytes in zip(lot.paths, lot.sizes, strict=True):
                there[path] = lot.data[at : at + nbytes]
                at += nbytes
        live = [(s.shard, s.tensor) for s in parts.shards if s.shard.leaf.path not in there]

        def work(breathe: Breath) -> bytes:
            found = iter(_cut(sums_of([shard for shard, _ in live], [tensor for _, tensor in live], breathe)))
            sums: list[bytes] = []
            for shard in parts.table:
                copy = there.get(shard.leaf.path)
                sums.append(next(found) if copy is None else sum_of(torch.from_numpy(copy), shard, HOST))
                breathe()
            return b"".join(sums)

        self._summing.start()
        return self._summing.submit(work)

    def _settle_sums(self) -> None:
        sums, self._sums = self._sums, None
        if sums is not None:
            sums.wait()

    def _wait_durable(self) -> None:
        if self._settings.steps is None or self._base is None:
            return
        if len(self._recent) < self._settings.steps:
            return
        why = self._keeper.wait_durable(self._base.run, self._recent[0], PATIENCE)
        if why is not None:
            self.pause(why)

    def _drop(self) -> None:
        self._buffers.give_back(self._used)
        self._consumed, self._used = [], []
        self._told.clear()
        self._recent.clear()

    def _told_apart(self, flat: Flat, before: _Parts | None) -> _Parts:
        sizes = tuple(tuple(len(g["params"]) for g in o.param_groups) for o in self._optimizers.values())
        if before is not None and before.shards is flat.shards and before.sizes == sizes:
            return before
        names = self._names()
        groups = [group for optimizer in self._optimizers.values() for group in optimizer.param_groups]
        paths = {id(p): names[id(p)] for group in groups for p in group["params"] if id(p) in names}
        members = {name: [members_of(group, paths) for group in o.param_groups] for name, o in self._optimizers.items()}
        owned = set(paths.values())
        prefixes = tuple(f"{name}.state." for name in self._optimizers)
        stepped: list[LiveShard] = []
        others: list[LiveShard] = []
        for live in flat.shards:
            leaf = live.shard.leaf
            inside = leaf.path in owned or (leaf.cls.startswith("slot:") and leaf.path.startswith(prefixes))
            (stepped if inside else others).append(live)
        trained = tuple(f"{name}." for name in self._state if any(path.startswith(f"{name}.") for path in owned))
        # Of what lies beside the parameters that train, the frozen ones are trusted to torch's version counter until
        # the proof says otherwise. Native kernels change statistics without a trace in it, and averages are often kept
        # through .data: these are looked at.
        watched = [
            (live, live.shard.leaf.cls == "parameter" and live.shard.leaf.path.startswith(trained)) for live in others
        ]
        table = tuple(live.shard for live in flat.shards)
        if before is not None and table == before.table:
            table = before.table
        return _Parts(flat.shards, table, sizes, paths, members, stepped, watched)

    def _check_optimizers(self) -> None:
        now = {name: value for name, value in tracked(self._state).items() if isinstance(value, torch.optim.Optimizer)}
        if now.keys() != self._optimizers.keys() or any(now[name] is not o for name, o in self._optimizers.items()):
            for hook in self._hooks:
                hook.remove()
            self._optimizers = journaled_optimizers(self._state)
            self._hooks = [o.register_step_pre_hook(self._hook) for o in self._optimizers.values()]
            raise Unlike("another optimizer is tracked now")


def _cut(sums: bytes, size: int = SUM) -> list[bytes]:
    return [sums[at : at + size] for at in range(0, len(sums), size)]
