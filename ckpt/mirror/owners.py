"""Whose mirror file this is, and whether that process is still there."""

from __future__ import annotations

import fcntl
from typing import Literal, TypeAlias

from msgspec import Struct

from ckpt.history.runs import Identity, process_started

Verdict: TypeAlias = Literal["live", "dead", "unknown"]


class Owner(Struct, frozen=True):
    """The process that writes the file, as `ckpt.history.runs.Identity` names one; `since` in POSIX seconds."""

    host: str
    pid: int
    pid_started: str
    boot: str
    pid_space: str
    since: float


def owner_of(who: Identity, now: float) -> Owner:
    return Owner(who.host, who.pid, who.pid_started, who.boot, who.pid_space, now)


def is_me(owner: Owner | None, me: Identity) -> bool:
    return owner is not None and owner_of(me, owner.since) == owner


def judge(owner: Owner | None, me: Identity, *, unlocked: bool) -> Verdict:
    """Whether the owner still runs.

    Where its process id means something here, the process tells. Where it does not (another container that shares our
    /dev/shm), the lock on the file does: the kernel drops it with the last process that has the file mapped. The lock
    alone would not do: a DataLoader worker, forked from the owner, holds it on for a few seconds after the owner's end.

    Args:
        owner: None where it could not be read.
        unlocked: nobody holds the file's lock.
    """
    if owner is not None and owner.boot and owner.host == me.host and owner.boot != me.boot:
        return "dead"  # this machine has been started anew since
    if owner is not None and owner.boot and (owner.boot, owner.pid_space) == (me.boot, me.pid_space):
        return "live" if process_started(owner.pid) == owner.pid_started else "dead"
    if owner is not None and owner.boot == me.boot and unlocked:
        return "dead"
    return "unknown"


def lock(fd: int, *, wait: bool = False) -> bool:
    """Take the file's lock, for as long as the file is open or mapped; False if somebody has it. `wait` for who only
    tries it (`judge`), where nobody else can have it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        return False
    return True


def unlock(fd: int) -> None:
    fcntl.flock(fd, fcntl.LOCK_UN)
