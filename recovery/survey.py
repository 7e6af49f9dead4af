"""What this node still holds: the mirrors of its ranks, and for a stored chunk the place where its bytes lie.

A mirror is looked into, never believed. Its records say where a box of a leaf would be; what lies there is offered only
if it has the digest that the snapshot's part gives. So it does not matter how a mirror went wrong (a flipped bit, a cut
file, a step that was never committed, another run's bytes under the same name): it offers nothing, and is named in
`Holdings.problems`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from msgspec import Struct

from ckpt.format.names import SnapshotId
from ckpt.history.runs import identity
from ckpt.mirror.folders import Folder, rank_of
from ckpt.mirror.records import Head, Placed, read_head, read_layout, read_slot, was_used
from recovery.boxes import Bytes
from recovery.mirrored import HeldChunk, HeldSlot, cover
from recovery.parallel import in_threads
from recovery.spans import StoredChunk


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a mirror, or some of it, is not used."""

    path: Path
    text: str

    def __str__(self) -> str:
        return f"{self.path}: {self.text}"


class Held(Struct, frozen=True):
    """One whole slot, in few words, for peers. `rank`, `world_size`, `run`, `step`: of the save that filled it.
    `complete`: it says what lies where (its bytes are checked when they are used); equal layouts have
    equal `layout`."""

    rank: int
    world_size: int
    run: str
    step: int
    nbytes: int
    layout: str
    complete: bool


@dataclass(eq=False)
class Holdings:
    """All whole slots of a store's mirrors on this node. A context manager; `find` may be called by many threads."""

    slots: tuple[HeldSlot, ...]
    files: tuple[Path, ...]
    prefer: int | None
    _fds: list[int]
    _problems: list[Problem]
    _damage: dict[HeldSlot, tuple[int, str]] = field(default_factory=dict)
    _orders: dict[SnapshotId, tuple[tuple[HeldSlot, ...], ...]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _scratch: threading.local = field(default_factory=threading.local)

    @property
    def problems(self) -> tuple[Problem, ...]:
        """What was not used, and why; grows while chunks are looked for."""
        with self._lock:
            found = [
                Problem(
                    slot.path,
                    f"slot {slot.number} (rank {slot.rank}, step {slot.id.short}): {count} chunks are not "
                    f"what the store says they are, the first of them {text}",
                )
                for slot, (count, text) in self._damage.items()
            ]
            return (*self._problems, *found)

    @property
    def summary(self) -> tuple[Held, ...]:
        """One entry per whole slot, sorted."""
        held = [
            Held(h.rank, h.record.world_size, h.record.run, h.id.step, h.record.nbytes, h.layout, h.places is not None)
            for h in self.slots
        ]
        return tuple(sorted(held, key=lambda h: (h.rank, h.run, h.step)))

    def of(self, id_: SnapshotId, rank: int) -> HeldSlot | None:
        """The slot that one rank filled at one step."""
        return next((h for h in self.slots if h.id == id_ and h.rank == rank and h.places is not None), None)

    def find(self, chunk: StoredChunk, id_: SnapshotId) -> HeldChunk | None:
        """A place where this chunk lies, looked at and found to have its digest.

        Slots of the snapshot `id_` come first, that of rank `prefer` before the others; then the same slots together
        (a node's ranks share what they mirror of replicas); then slots of other steps, where what did not change since
        is the same.
        """
        return self.take(chunk, id_, self._buffer(chunk.nbytes))

    def take(self, chunk: StoredChunk, id_: SnapshotId, out: Bytes) -> HeldChunk | None:
        """`find`, and the bytes are in `out` (its ``nbytes`` bytes); if there is no such place, nothing is."""
        for slots in self._order(id_):
            pieces = cover(chunk, slots)
            if pieces is None:
                continue
            held = HeldChunk(chunk, pieces)
            if len(slots) > 1 and len(held.slots) == 1:
                continue  # looked at already, by itself
            try:
                good = held.read(out)
            except OSError as error:
                good, text = False, str(error)
            else:
                text = f"{chunk.spans[0].leaf} {chunk.spans[0].box}, expected digest {chunk.digest}"
            if good:
                return held
            if slots[0].id == id_:
                self._note_damage(held, text)
        return None

    def offers(self, chunk: StoredChunk, id_: SnapshotId) -> bool:
        """Whether slots of this very step have a place for it, by their records: no byte is read."""
        return any(slots[0].id == id_ and cover(chunk, slots) is not None for slots in self._order(id_))

    @property
    def identity(self) -> frozenset[str]:
        """Names the mirror files themselves: two surveys that share some look into the same folder."""
        boot = identity(None).boot
        found = (os.fstat(fd) for fd in self._fds)
        return frozenset(f"{boot} {stat.st_dev} {stat.st_ino}" for stat in found)

    def find_all(
        self, chunks: Iterable[StoredChunk], id_: SnapshotId, *, threads: int
    ) -> Iterator[tuple[StoredChunk, HeldChunk | None]]:
        """`find` for each, in parallel, in the order they finish."""
        return in_threads(chunks, lambda chunk: (chunk, self.find(chunk, id_)), threads=threads)

    def close(self) -> None:
        """Places that were found can no longer be read."""
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()

    def __enter__(self) -> Holdings:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _order(self, id_: SnapshotId) -> tuple[tuple[HeldSlot, ...], ...]:
        with self._lock:
            order = self._orders.get(id_)
            if order is not None:
                return order
            slots = sorted(
                (h for h in self.slots if h.places is not None), key=lambda h: (h.rank != self.prefer, h.rank)
            )  # fmt: skip
            these = tuple(h for h in slots if h.id == id_)
            order = (*((h,) for h in these), *((these,) if len(these) > 1 else ()))
            order += tuple((h,) for h in slots if h.id != id_)
            self._orders[id_] = order
            for path in self.files:
                steps = [h.id.short for h in slots if h.path == path]
                if steps and all(h.id != id_ for h in slots if h.path == path):
                    text = f"holds step {' and '.join(sorted(steps))}, not {id_.short}: only what is equal serves"
                    self._problems.append(Problem(path, text))
            return order

    def _note_damage(self, held: HeldChunk, text: str) -> None:
        with self._lock:
            count, first = self._damage.get(held.slot, (0, text))
            self._damage[held.slot] = count + 1, first

    def _buffer(self, nbytes: int) -> Bytes:
        mine: Bytes | None = getattr(self._scratch, "data", None)
        if mine is None or mine.nbytes < nbytes:
            mine = self._scratch.data = np.empty(nbytes, np.uint8)
        return mine[:nbytes]


def survey(bases: Iterable[Path], store: str, *, prefer: int | None = None) -> Holdings:
    """Look at every mirror of a store below these folders. Records only; no data is read yet.

    Args:
        bases: e.g. ``[folder_of("auto")]``; one that is not there holds nothing.
        store: `ckpt.mirror.folders.store_identity`.
        prefer: whose mirror comes first: the caller's own (former) rank.
    """
    looking = _Looking(store)
    try:
        for base in dict.fromkeys(bases):
            looking.folder(base)
    except BaseException:
        for fd in looking.fds:
            os.close(fd)
        raise
    return Holdings(tuple(looking.slots), tuple(looking.files), prefer, looking.fds, looking.problems)


@dataclass(eq=False)
class _Looking:
    """A survey under way."""

    store: str
    slots: list[HeldSlot] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)
    fds: list[int] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    # By digest and length: both slots of a file mostly have one layout, which may list 20,000 leaves.
    layouts: dict[tuple[str, int], Mapping[str, Sequence[Placed]]] = field(default_factory=dict)

    def folder(self, base: Path) -> None:
        try:
            with Folder.open(base) as outer, outer.sub(self.store) as folder:
                for name in folder.names():
                    if rank_of(name) is not None:
                        self.file(folder, name)
        except FileNotFoundError:
            return  # nobody has a mirror of this store here
        except OSError as error:
            self.problems.append(Problem(base, error.strerror or str(error)))

    def file(self, folder: Folder, name: str) -> None:
        path = folder.path / name
        try:
            fd = folder.open_file(name)
            self.fds.append(fd)
            head = read_head(fd)
            if head.store != self.store:
                raise ValueError(f"is of another store: {head.store}, expected {self.store}")
        except FileNotFoundError:
            return  # swept meanwhile
        except (OSError, ValueError) as error:
            self.problems.append(Problem(path, getattr(error, "strerror", None) or str(error)))
            return
        self.files.append(path)
        known = len(self.slots) + len(self.problems)
        for number in (0, 1):
            try:
                self.slot(path, fd, number, head)
            except (OSError, ValueError) as error:
                self.problems.append(Problem(path, f"slot {number}: {error}"))
        if len(self.slots) + len(self.problems) == known:
            self.problems.append(Problem(path, "holds nothing: its rank finished no save"))

    def slot(self, path: Path, fd: int, number: int, head: Head) -> None:
        record = read_slot(fd, number, head)
        if record is None:
            if was_used(fd, number):
                self.problems.append(Problem(path, f"slot {number} was being filled when its rank ended"))
            return
        key = record.layout[2], record.nbytes
        places = self.layouts.get(key)
        try:
            if places is None:
                places = self.layouts[key] = _by_leaf(read_layout(fd, record))
        finally:
            self.slots.append(HeldSlot(path, number, record, head.slots[number], fd, places))


def _by_leaf(layout: Iterable[Placed]) -> Mapping[str, Sequence[Placed]]:
    found: dict[str, list[Placed]] = {}
    for placed in layout:
        found.setdefault(placed.shard.leaf.path, []).append(placed)
    return found
