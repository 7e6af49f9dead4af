"""The mirror files on this node: whose they are, what they hold, and the removal of those whose owner is no more.

Only what is surely dead is removed, and only our own user's: a file that cannot be judged stays, and is shown.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ckpt.history.runs import Identity
from ckpt.mirror import owners
from ckpt.mirror.folders import Folder, is_store, rank_of
from ckpt.mirror.owners import Owner, Verdict
from ckpt.mirror.records import SlotRecord, read_head, read_owner, read_slot

BORN = 60.0
"""Seconds a file without a readable owner is left alone: it may just be coming into the world."""


@dataclass(frozen=True, slots=True)
class Leftover:
    """One mirror file. `slots`: what its whole slots hold, oldest first; `size`: bytes it takes; `time`: POSIX seconds
    of its last change; `problem`: what is wrong with it, in words."""

    path: Path
    store: str
    rank: int
    slots: tuple[SlotRecord, ...]
    size: int
    time: float
    owner: Owner | None
    state: Verdict
    problem: str | None


@dataclass(frozen=True, slots=True)
class Trouble:
    """A folder or a file that was not looked into, and why."""

    path: Path
    text: str


def find_mirrors(bases: Iterable[Path], me: Identity, now: float) -> Iterator[Leftover | Trouble]:
    """Every mirror file below these folders. A folder that is not there holds none."""
    for base in bases:
        try:
            with Folder.open(base) as outer:
                for store in filter(is_store, outer.names()):
                    with outer.sub(store) as folder:
                        yield from _in_folder(folder, store, me, now)
        except FileNotFoundError:
            continue
        except OSError as error:
            yield Trouble(base, error.strerror or str(error))


def sweep(found: Iterable[Leftover], me: Identity, now: float) -> Iterator[Leftover]:
    """Remove those that are dead; yields each one removed. Looks again first: one may have been taken over since."""
    for mirror in found:
        if mirror.state != "dead":
            continue
        with suppress(OSError), Folder.open(mirror.path.parent.parent) as outer:
            with outer.sub(mirror.store) as folder:
                gone = _remove_if_dead(folder, mirror.path.name, me, now)
            outer.remove_sub(mirror.store)
            if gone:
                yield mirror


def sweep_store(folder: Folder, me: Identity, now: float) -> None:
    """Remove what dead processes left in the folder of one store."""
    for name in folder.names():
        if rank_of(name) is not None:
            with suppress(OSError):
                _remove_if_dead(folder, name, me, now)


def _in_folder(folder: Folder, store: str, me: Identity, now: float) -> Iterator[Leftover | Trouble]:
    for name in folder.names():
        rank = rank_of(name)
        if rank is None:
            continue
        try:
            fd = folder.open_file(name)
        except FileNotFoundError:
            continue
        except OSError as error:
            yield Trouble(folder.path / name, error.strerror or str(error))
            continue
        try:
            yield _look(fd, folder.path / name, store, rank, me, now)
        finally:
            os.close(fd)


def _look(fd: int, path: Path, store: str, rank: int, me: Identity, now: float) -> Leftover:
    stat = os.fstat(fd)
    owner, state = _judged(fd, me, now)
    slots: list[SlotRecord] = []
    problem = None
    try:
        head = read_head(fd)
        slots = [slot for number in (0, 1) if (slot := read_slot(fd, number, head)) is not None]
    except ValueError as error:
        problem = str(error)
    slots.sort(key=lambda slot: slot.id)
    return Leftover(path, store, rank, tuple(slots), stat.st_blocks * 512, stat.st_mtime, owner, state, problem)


def _judged(fd: int, me: Identity, now: float) -> tuple[Owner | None, Verdict]:
    owner = read_owner(fd)
    unlocked = owners.lock(fd)
    if unlocked:
        owners.unlock(fd)
    if owner is None:
        return None, "dead" if unlocked and now - os.fstat(fd).st_mtime > BORN else "unknown"
    if owners.is_me(owner, me) and unlocked:
        return owner, "dead"  # this very process closed it, and left it for a next one
    return owner, owners.judge(owner, me, unlocked=unlocked)


def _remove_if_dead(folder: Folder, name: str, me: Identity, now: float) -> bool:
    fd = folder.open_file(name)
    try:
        dead = _judged(fd, me, now)[1] == "dead"
        if dead:
            folder.unlink(name)
        return dead
    finally:
        os.close(fd)
