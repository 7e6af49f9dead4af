"""Many small documents, read side by side: the one place in history that makes threads for reading."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from storage_backends.base import NotFound, Refused, Store

THREADS = 16
"""Documents in flight at once: enough to hide a store's latency, few enough not to be throttled."""


def read_many(store: Store, keys: Sequence[str], threads: int = THREADS) -> Iterator[tuple[str, bytes | None]]:
    """(key, its bytes) in the order of `keys`; None where the object is gone. One key, or one thread, starts none.

    At most `threads` objects are read ahead of the caller, so that memory stays bounded by what the caller takes.

    Raises:
        StorageError: a read failed otherwise. "Could not read" is never "not there".
    """
    if len(keys) < 2 or threads < 2:
        for key in keys:
            yield key, _read(store, key)
        return
    with ThreadPoolExecutor(min(threads, len(keys)), thread_name_prefix="ckpt-read") as pool:
        ahead = {i: pool.submit(_read, store, key) for i, key in enumerate(keys[:threads])}
        try:
            for i, key in enumerate(keys):
                data = ahead.pop(i).result()
                if i + threads < len(keys):
                    ahead[i + threads] = pool.submit(_read, store, keys[i + threads])
                yield key, data
        finally:
            for waiting in ahead.values():
                waiting.cancel()


def _read(store: Store, key: str) -> bytes | None:
    try:
        return store.get(key)
    except NotFound:
        return None


def there(store: Store, key: str) -> bool:
    """Whether an object is there though a listing lacks it: listings may lag, reads say it.

    Raises:
        Unavailable: that could not be found out.
    """
    try:
        store.get_range(key, 0, 1)
    except NotFound:
        return False
    except Refused:  # there, and empty
        return True
    return True
