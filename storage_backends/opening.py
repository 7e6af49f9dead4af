"""From what a user types to a store."""

from __future__ import annotations

import os
import re
from typing import Any, TypeAlias

from storage_backends.base import Refused, Store
from storage_backends.facts import PATIENCE
from storage_backends.fanout import FanoutStore
from storage_backends.retry import RetryingStore
from storage_backends.tiered import KEEP_FAST, TieredStore

DEADLINE = 90.0
"""Seconds; `open_store` says of what."""

Place: TypeAlias = str | os.PathLike[str] | Store

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(?=://)")
_CHAIN = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(://[^:]*)?::")
_TIERED, _FANOUT = "tiered::", "fanout::"


def open_store(url: str | os.PathLike[str], *, deadline: float = DEADLINE, **storage_options: Any) -> Store:
    """The store at a path or an fsspec URL; what fails in passing is tried again, up to a deadline.

    Nothing is asked of the store yet: a wrong password or a missing bucket shows at the first call.

    Args:
        url: ``runs/gpt``, ``~/runs``, ``file:///data``, ``s3://bucket/run7``, ``sftp://host/path``, …; of several
            places ``tiered::/nvme/run7|s3://bucket/run7`` and ``fanout::s3://one/run7|s3://other/run7``.
        deadline: seconds within which a call has ended, one way or the other: for two thirds of them what fails in
            passing is tried again, with growing pauses, and after a third without an answer (30 s at most) an attempt
            has failed. A put may take longer where the line is slow, 2 s for each MB. No limit helps where a disk, or a
            backend unknown to us, falls silent.
        storage_options: passed to fsspec, such as ``endpoint_url="…"`` (fsspec's own configuration works too). Of
            several places all but folders get them; where they differ, open each alone: `tiered`, `fanout`.

    Raises:
        Refused: the scheme is unknown, its library is not installed, or the URL or the options make no sense.
    """
    text = os.fspath(url)
    if not isinstance(deadline, int | float) or not 0 < deadline < float("inf"):
        from storage_backends.fsspec_store import public_url

        raise Refused(f"deadline={deadline!r}: expected a number of seconds", store=public_url(text), key="")
    if text.startswith((_TIERED, _FANOUT)):
        return _several(text, storage_options, deadline)
    # The last attempt begins a third before the end at the latest, and is given up after a third.
    patience = min(PATIENCE, deadline / 3)
    return RetryingStore(_bare(text, storage_options, patience), deadline=deadline - patience)


def tiered(fast: Place, durable: Place, *, keep_fast: int | None = KEEP_FAST) -> TieredStore:
    """A store that commits on `fast` and copies to `durable` behind it; reads come from the nearest that has them.

    Args:
        fast: a path, a URL or a store: one place for all ranks of the job, such as a disk of its only node.
        durable: where the history lives; may be a `fanout`.
        keep_fast: how many of the newest snapshots stay on the fast tier once they are copied; None: all.

    Raises:
        Refused: a URL makes no sense, or both are one place.
    """
    return TieredStore(_opened(fast), _opened(durable), keep_fast=keep_fast)


def fanout(*places: Place, at_least: int | None = None) -> FanoutStore:
    """A store that keeps a copy of every object in each of `places` (paths, URLs or stores), the nearest first.

    Args:
        at_least: how many must hold an object for it to be stored; by default all but one, so that one may be down.

    Raises:
        Refused: a URL makes no sense, there are fewer than two places, or two are the same.
    """
    return FanoutStore(*map(_opened, places), at_least=at_least)


def _opened(place: Place) -> Store:
    return open_store(place) if isinstance(place, str | os.PathLike) else place


def _several(url: str, options: dict[str, Any], deadline: float) -> Store:
    fast, bar, durable = url.removeprefix(_TIERED).partition("|")
    # The durable tier may be a fan-out: what follows the first bar is its URL, bars and all.
    places = url.removeprefix(_FANOUT).split("|") if url.startswith(_FANOUT) else [fast, durable]
    if len(places) < 2 or (not bar and url.startswith(_TIERED)) or not all(map(str.strip, places)):
        raise Refused(f"{url}: expected {_TIERED}FAST|DURABLE or {_FANOUT}ONE|OTHER|…", store=url, key="")
    for place in places[: None if url.startswith(_FANOUT) else 1]:
        if place.startswith((_TIERED, _FANOUT)):
            message = f"{url}: only the durable tier may be several places, written last; or open each: ckpt.fanout(…)"
            raise Refused(message, store=url, key="")
    far = [_SCHEME.match(place) is not None and not place.startswith(("file:", "local:")) for place in places]
    if url.startswith(_TIERED) and durable.startswith(_FANOUT):
        far[1] = True
    if options and not any(far):
        raise Refused(f"{url}: folders take no storage options, found {', '.join(sorted(options))}", store=url, key="")
    given = [options if remote else {} for remote in far]
    opened = [open_store(place, deadline=deadline, **some) for place, some in zip(places, given, strict=True)]
    return TieredStore(*opened) if url.startswith(_TIERED) else FanoutStore(*opened)


def _bare(url: str, options: dict[str, Any], patience: float) -> Store:
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

        return FsspecStore(url, options, patience=patience)
    path = url if scheme is None else url[len(scheme[0]) + len("://") :]
    if scheme is not None and not path.startswith("/"):
        raise Refused(f"{url}: expected file:///absolute/path, or the path alone", store=url, key="")
    if options:
        raise Refused(
            f"{url}: a folder takes no storage options, found {', '.join(sorted(options))}", store=url, key=""
        )
    from storage_backends.local import LocalStore

    return LocalStore(path)
