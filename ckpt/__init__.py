"""Fault-tolerant incremental checkpointing for PyTorch training.

This is a lobby: each public name is loaded on first use (PEP 562), so that ``ckpt list`` never waits for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckpt.cadence import Adaptive
    from ckpt.checkpointer import Checkpointer
    from ckpt.errors import (
        CheckpointError,
        DamagedError,
        FormatTooNew,
        HistoryExists,
        LayoutMismatch,
        NoSnapshot,
        NotFound,
        Refused,
        SaveFailed,
        StorageError,
        StoreInUse,
        Unavailable,
        UnsupportedState,
        WrongKey,
    )
    from ckpt.history.keep import Keep
    from ckpt.leaves import PerRank
    from ckpt.loop import Run, checkpointed
    from ckpt.options import Journal, Options
    from ckpt.outcomes import Stats
    from ckpt.saving.job import Report
    from ckpt.ticket import Ticket
    from recovery.load import load, load_into
    from recovery.looking import History
    from recovery.report import Restored
    from storage_backends import open_store
    from storage_backends.opening import fanout, tiered

_HOMES = {
    "Adaptive": "ckpt.cadence",
    "Checkpointer": "ckpt.checkpointer",
    "CheckpointError": "ckpt.errors",
    "DamagedError": "ckpt.errors",
    "FormatTooNew": "ckpt.errors",
    "History": "recovery.looking",
    "HistoryExists": "ckpt.errors",
    "Journal": "ckpt.options",
    "Keep": "ckpt.history.keep",
    "LayoutMismatch": "ckpt.errors",
    "NoSnapshot": "ckpt.errors",
    "NotFound": "ckpt.errors",
    "Options": "ckpt.options",
    "PerRank": "ckpt.leaves",
    "Refused": "ckpt.errors",
    "Report": "ckpt.saving.job",
    "Restored": "recovery.report",
    "Run": "ckpt.loop",
    "SaveFailed": "ckpt.errors",
    "Stats": "ckpt.outcomes",
    "StorageError": "ckpt.errors",
    "StoreInUse": "ckpt.errors",
    "Ticket": "ckpt.ticket",
    "Unavailable": "ckpt.errors",
    "UnsupportedState": "ckpt.errors",
    "WrongKey": "ckpt.errors",
    "checkpointed": "ckpt.loop",
    "fanout": "storage_backends.opening",
    "load": "recovery.load",
    "load_into": "recovery.load",
    "open_store": "storage_backends",
    "tiered": "storage_backends.opening",
}

__all__ = [
    "Adaptive",
    "CheckpointError",
    "Checkpointer",
    "DamagedError",
    "FormatTooNew",
    "History",
    "HistoryExists",
    "Journal",
    "Keep",
    "LayoutMismatch",
    "NoSnapshot",
    "NotFound",
    "Options",
    "PerRank",
    "Refused",
    "Report",
    "Restored",
    "Run",
    "SaveFailed",
    "Stats",
    "StorageError",
    "StoreInUse",
    "Ticket",
    "Unavailable",
    "UnsupportedState",
    "WrongKey",
    "checkpointed",
    "fanout",
    "load",
    "load_into",
    "open_store",
    "tiered",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'ckpt' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
