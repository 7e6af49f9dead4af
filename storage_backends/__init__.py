"""Where objects live: the contract (`base`) and the stores that keep it. A lobby: each store loads on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from storage_backends.base import Buffer, Entry, NotFound, Refused, StorageError, Store, Unavailable

if TYPE_CHECKING:
    from storage_backends.fanout import FanoutStore
    from storage_backends.fsspec_store import FsspecStore
    from storage_backends.local import LocalStore
    from storage_backends.memory import MemoryStore
    from storage_backends.opening import open_store
    from storage_backends.retry import RetryingStore
    from storage_backends.tiered import TieredStore

__all__ = [
    "Buffer",
    "Entry",
    "FanoutStore",
    "FsspecStore",
    "LocalStore",
    "MemoryStore",
    "NotFound",
    "Refused",
    "RetryingStore",
    "StorageError",
    "Store",
    "TieredStore",
    "Unavailable",
    "open_store",
]

_ROOMS = {
    "FanoutStore": "fanout",
    "FsspecStore": "fsspec_store",
    "LocalStore": "local",
    "MemoryStore": "memory",
    "RetryingStore": "retry",
    "TieredStore": "tiered",
    "open_store": "opening",
}


def __getattr__(name: str) -> Any:
    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_ROOMS[name]}"), name)
