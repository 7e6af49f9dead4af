"""Every error a user meets, grouped by what to do next.

A message has four parts: what, where, expected and found, next step.
"""

from __future__ import annotations

from storage_backends.base import NotFound, Refused, StorageError, Unavailable

__all__ = [
    "CheckpointError",
    "DamagedError",
    "FormatTooNew",
    "HistoryExists",
    "LayoutMismatch",
    "NoSnapshot",
    "NotFound",
    "Refused",
    "SaveFailed",
    "StorageError",
    "StoreInUse",
    "Unavailable",
    "UnsupportedState",
    "WrongKey",
]


class CheckpointError(Exception):
    """Base of everything this library raises about checkpoints (storage errors are `StorageError`)."""


class NoSnapshot(CheckpointError):  # noqa: N818 - names of the public surface
    """An explicitly named step, or a load, found nothing."""


class HistoryExists(CheckpointError):  # noqa: N818
    """The store is not empty, and the job neither restored from it nor said ``fresh=True``."""


class DamagedError(CheckpointError):
    """Bytes on the store are not what was written. An older snapshot may still be whole.

    Attributes: step, rank, leaf (None where it belongs to none), key (the object), expected, found.
    """

    def __init__(
        self,
        message: str,
        *,
        key: str,
        step: int | None = None,
        rank: int | None = None,
        leaf: str | None = None,
        expected: str = "",
        found: str = "",
    ) -> None:
        super().__init__(message)
        self.key = key
        self.step = step
        self.rank = rank
        self.leaf = leaf
        self.expected = expected
        self.found = found


class LayoutMismatch(CheckpointError):  # noqa: N818
    """The snapshot and the live state do not describe the same thing: change the model or the mapping.

    Attributes: missing (live, not stored), unexpected (stored, not live), changed (path → "stored X, live Y").
    """

    def __init__(
        self,
        message: str,
        *,
        missing: tuple[str, ...] = (),
        unexpected: tuple[str, ...] = (),
        changed: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.missing = missing
        self.unexpected = unexpected
        self.changed = dict(changed or {})


class UnsupportedState(CheckpointError):  # noqa: N818
    """A leaf cannot be saved exactly; refused at `save()`, on the caller's thread. Attribute: leaf (its path)."""

    def __init__(self, message: str, *, leaf: str) -> None:
        super().__init__(message)
        self.leaf = leaf


class FormatTooNew(CheckpointError):  # noqa: N818
    """Written by a newer version of this library: upgrade. Attributes: found, supported (format numbers)."""

    def __init__(self, message: str, *, found: int, supported: int) -> None:
        super().__init__(message)
        self.found = found
        self.supported = supported


class WrongKey(CheckpointError):  # noqa: N818
    """The store is encrypted and no key, or another one, was given; or a key was given for one that is not. Nothing has
    been read or written. Attributes: expected, found (key ids, None for none)."""

    def __init__(self, message: str, *, expected: str | None, found: str | None) -> None:
        super().__init__(message)
        self.expected = expected
        self.found = found


class StoreInUse(CheckpointError):  # noqa: N818
    """Another live job writes here. Attributes: run, host, pid, job, started (POSIX seconds)."""

    def __init__(self, message: str, *, run: str, host: str, pid: int, job: str | None, started: float) -> None:
        super().__init__(message)
        self.run = run
        self.host = host
        self.pid = pid
        self.job = job
        self.started = started


class SaveFailed(CheckpointError):  # noqa: N818
    """A save did not become a snapshot, or was not seen to. Training may go on; the next save stands by itself.

    Attributes: step, stage ("capture", "encode", "upload", "commit", "replicas", "writer", "copy").
    """

    def __init__(self, message: str, *, step: int, stage: str) -> None:
        super().__init__(message)
        self.step = step
        self.stage = stage
