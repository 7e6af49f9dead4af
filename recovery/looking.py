"""A history for programs: what ``ckpt list``, ``diff`` and ``du`` show, as data. Reads only."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpt.errors import NoSnapshot
from ckpt.format.names import SnapshotId
from ckpt.history import catalog
from ckpt.history.keyed import store_at
from recovery.journaled import find_base
from storage_backends.base import Store

if TYPE_CHECKING:
    from recovery.compare import Difference
    from recovery.usage import Usage


@dataclass(frozen=True, slots=True)
class Listed:
    """One snapshot, as its document tells it.

    Attributes:
        name: what to call it by: ``GENERATION/STEP``, which every argument that names a snapshot understands.
        generation: which start of the job saved it.
        time: POSIX seconds by the clock of rank 0, None if it did not say.
        stored: bytes that this save put on the store, and `by_kind` of which codec kinds (by number).
        size: bytes of the whole state.
        metrics: what `save` was given.
        pins: the names that hold it.
        places: of a store of several places, the names of those that hold it; else nothing.
        abandoned: the job went back and took another way; it does not lead to the newest snapshot.
        without: names of the optimizers that were taken out (`Keep.moments_last`): it is weights only.
        cadence: seconds between saves that the job aimed at, where that was adaptive.
    """

    id: SnapshotId
    name: str
    step: int
    generation: int
    time: float | None
    world_size: int
    stored: int
    size: int
    by_kind: dict[str, int]
    metrics: dict[str, Any]
    pins: tuple[str, ...]
    abandoned: bool
    without: tuple[str, ...] = ()
    places: tuple[str, ...] = ()
    cadence: float | None = None


class History:
    """The snapshots on a store, for programs: what the command line shows. Opens no run and writes nothing.

        history = ckpt.History("runs/gpt")
        for snapshot in history.list():
            print(snapshot.step, snapshot.metrics, snapshot.stored)
        difference = history.diff(100, "latest", names="model.*")
        print(max(difference.leaves, key=lambda leaf: leaf.share))

    Every call looks at the store anew, so it may stay open beside a live job; documents, which never change, are read
    once. A snapshot is named by a step, ``"GENERATION/STEP"``, a pin or ``"latest"``, as everywhere.

    Args:
        url: a path, any fsspec URL, or a `Store` from `ckpt.open_store`.
        key: of an encrypted store, as in `Options`: a file, or ``env:NAME``.
    """

    def __init__(self, url: str | os.PathLike[str] | Store, *, key: str | os.PathLike[str] | None = None) -> None:
        self.store = store_at(url, key)
        self._seen: catalog.History | None = None

    def look(self, *, packs: bool = False) -> catalog.History:
        """Everything that documents and listings tell, what could not be read included. Raises StorageError,
        FormatTooNew."""
        self._seen = catalog.read_history(self.store, packs=packs, known=self._seen)
        return self._seen

    def list(self) -> tuple[Listed, ...]:
        """All snapshots that can be restored, oldest first: by generation, then by step."""
        seen = self.look()
        return tuple(listed(seen, id_) for id_ in sorted(seen.snapshots))

    def newest(self) -> Listed | None:
        """The one that `restore()` takes first; None on an empty store."""
        seen = self.look()
        return None if seen.newest is None else listed(seen, seen.newest)

    def find(self, name: int | str) -> Listed:
        """The snapshot of this name. Raises NoSnapshot, which lists what there is."""
        seen = self.look()
        return listed(seen, catalog.find(seen, name))

    def pins(self) -> dict[str, Listed]:
        """Name → snapshot, of pins whose snapshot is there."""
        seen = self.look()
        return {name: listed(seen, id_) for name, id_ in sorted(seen.pins.items()) if id_ in seen.snapshots}

    def diff(self, a: int | str, b: int | str, names: str | Sequence[str] | None = None) -> Difference:
        """How snapshot `b` differs from `a`, leaf by leaf and value by value. Only chunks that differ are read.

        Args:
            names: glob patterns of paths; only what they match is compared.

        Raises:
            NoSnapshot: one of them is not there.
            DamagedError: one of them cannot be read whole.
        """
        from recovery.compare import compare  # numpy, which listing does without

        patterns = [names] if isinstance(names, str) else names
        with with_journaled(self.store, self.look(), a, b) as (store, seen):
            return compare(store, catalog.find(seen, a), catalog.find(seen, b), patterns)

    def du(self, step: int | str | None = None) -> Usage:
        """What the history takes up: every step, and the classes of leaves of the snapshot `step` (the newest).

        Raises:
            NoSnapshot: it is not there.
            DamagedError: its parts cannot be read.
        """
        from recovery.followed import Followed
        from recovery.usage import whole_store

        seen = self.look(packs=True)
        id_ = seen.newest if step is None else catalog.find(seen, step)
        if id_ is None:
            return whole_store(seen, None, {})
        return whole_store(seen, id_, Followed(self.store, id_).parts)


@contextlib.contextmanager
def with_journaled(
    store: Store, seen: catalog.History, *names: int | str
) -> Iterator[tuple[Store, catalog.History]]:  # fmt: skip
    """The store, and a look at it, where each of these names is a snapshot: journaled steps among them are replayed,
    and laid over it for as long as this lasts.

    Raises:
        NoSnapshot: one is neither a snapshot nor a journaled step.
        DamagedError: it cannot be replayed.
    """
    steps = []
    for name in names:
        try:
            catalog.find(seen, name)
        except NoSnapshot:
            base = find_base(store, seen, name)
            if base is None:
                raise
            steps.append(base)
    if not steps:
        yield store, seen
        return
    from recovery.overlay import overlaid  # torch, which nothing else here needs

    with overlaid(store, steps) as over:
        yield over, catalog.read_history(over, known=seen)


def listed(history: catalog.History, id_: SnapshotId) -> Listed:
    """What one look at a store says of a snapshot."""
    snapshot = history.snapshots[id_]
    return Listed(
        id_,
        id_.short,
        id_.step,
        id_.run.generation,
        snapshot.time,
        snapshot.world_size,
        snapshot.totals.stored,
        snapshot.totals.size,
        snapshot.totals.by_kind,
        snapshot.metrics or {},
        tuple(sorted(name for name, pinned in history.pins.items() if pinned == id_)),
        id_ in history.abandoned,
        snapshot.without,
        history.entries[key].places if (key := history.keys[id_]) in history.entries else (),
        snapshot.cadence,
    )
