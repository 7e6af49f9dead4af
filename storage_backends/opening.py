"""From what a user types to a store."""

from __future__ import annotations

import os
import re
from typing import Any

from storage_backends.base import Refused, Store
from storage_backends.retry import RetryingStore

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(?=://)")
_CHAIN = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(://[^:]*)?::")


def open_store(url: str | os.PathLike[str], **storage_options: Any) -> Store:
    """The store at a path or an fsspec URL; what fails in passing is retried for a minute.

    Nothing is asked of the store yet: a wrong password or a missing bucket shows at the first call.

    Args:
        url: ``runs/gpt``, ``~/runs``, ``file:///data``, ``s3://bucket/run7``, ``sftp://host/path``, …
        storage_options: passed to fsspec, such as ``endpoint_url="…"`` (fsspec's own configuration works too).

    Raises:
        Refused: the scheme is unknown, its library is not installed, or the URL or the options make no sense.
    """
    return RetryingStore(_bare(os.fspath(url), storage_options))


def _bare(url: str, options: dict[str, Any]) -> Store:
    if not url.strip():
        raise Refused("the store's URL is empty; expected a path or a URL such as s3://bucket/run7", store=url, key="")
    if chain := _CHAIN.match(url):
        first = chain[0].partition(":")[0]
        # fsspec would chain caches and archives: the one may answer in the store's place, the other cannot replace.
        message = f"{first}:: makes a chain of URLs, and a store is one place; give the URL of that place alone"
        raise Refused(message, store=first, key="")
    scheme = _SCHEME.match(url)
    if scheme is not None and scheme[0] not in ("file", "local"):
        from storage_backends.fsspec_store import FsspecStore

        return FsspecStore(url, options)
    path = url if scheme is None else url[len(scheme[0]) + len("://") :]
    if scheme is not None and not path.startswith("/"):
        raise Refused(f"{url}: expected file:///absolute/path, or the path alone", store=url, key="")
    if options:
        raise Refused(
            f"{url}: a folder takes no storage options, found {', '.join(sorted(options))}", store=url, key=""
        )
    from storage_backends.local import LocalStore

    return LocalStore(path)
