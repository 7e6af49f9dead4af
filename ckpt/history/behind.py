"""What a durable tier lacks, and how it comes there: the commit of PROTOCOL.md §4 once more, on the other tier.

Packs, then parts, then the snapshot that names them, oldest snapshot first. A crash
  before a part       leaves packs on the durable tier that nobody there names; the next pass goes on with them;
  before the snapshot leaves parts nobody names; there the step does not exist yet;
  after the snapshot  leaves a complete step on both tiers.
So the durable tier never shows a snapshot before everything it names, and a pass that is cut short anywhere is made up
for by the next one, of this process or of the job's next start.

The rules of a commit hold on the tier that is written to. The fence: a run that is not the newest there writes no
snapshot there (the job may have been taken over by one with another fast tier). And after the write one more look,
whether a prune has removed meanwhile what was copied.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from ckpt.errors import DamagedError
from ckpt.format.manifest import Snapshot, unseal
from ckpt.format.names import SNAPSHOTS, PackName, PartName, RunId, SnapshotName, packs_prefix, parts_prefix
from ckpt.history.copies import flaw_of
from ckpt.history.reading import read_many
from ckpt.history.runs import claimed_by_prune, in_use, newest_run
from storage_backends.base import NotFound
from storage_backends.parallel import each
from storage_backends.tiered import TieredStore

log = logging.getLogger("ckpt")

THREADS = 4
"""Objects copied at once: each is a pack of at most 32 MiB, so this bounds memory."""


class Pruned(Exception):  # noqa: N818
    """What was to be copied has been removed meanwhile: there is nothing left to do for this snapshot."""


@dataclass(frozen=True)
class Behind:
    """A snapshot that the durable tier lacks.

    `data`: its document. `packs`, `parts`: everything it names, and the digests of its parts.
    """

    name: SnapshotName
    data: bytes = field(repr=False)
    packs: tuple[str, ...]
    parts: dict[str, str]

    @property
    def needs(self) -> tuple[str, ...]:
        """In the order in which they are copied."""
        return (*self.packs, *self.parts)


class Durable:
    """The durable tier as far as it is known: what was once seen there is not asked for again, since objects are
    written once and only a prune removes them, which spares what a snapshot still names."""

    def __init__(self, store: TieredStore) -> None:
        self.store = store
        self._there: set[str] = set()

    def lacking(self, keys: Iterable[str]) -> list[str]:
        """Those of `keys` that are not there, in their order. Lists the folders of those not yet known."""
        unknown = [key for key in keys if key not in self._there]
        for folder in sorted({key.rpartition("/")[0] + "/" for key in unknown}):
            self._there.update(entry.key for entry in self.store.durable.list(folder))
        return [key for key in unknown if key not in self._there]

    def copy(self, keys: Sequence[str], digests: dict[str, str]) -> None:
        """Copy these from the fast tier, each checked against the digest that its name, or a snapshot, gives.

        Raises:
            Pruned: one is on neither tier any more.
            DamagedError: one is not what was written: the harm is not spread.
            StorageError: a tier failed.
        """
        each(partial(self._copy, digests), keys, threads=THREADS)

    def _copy(self, digests: dict[str, str], key: str) -> None:
        try:
            data = self.store.fast.get(key)
        except NotFound:
            if self.lacking([key]):
                raise Pruned(key) from None
            return
        if (found := flaw_of(key, data, digests.get(key))) is not None:
            raise DamagedError(f"{key} on {self.store.fast.url}: {found}; not copied", key=key, found=found)
        self.store.durable.put(key, data)
        self._there.add(key)

    def publish(self, one: Behind, run: RunId) -> None:
        """Write the snapshot, all of whose objects are there. `run`: that of this job.

        Raises:
            StoreInUse: a newer run than `run` writes to the durable tier.
            Pruned: a prune is removing the snapshot, which was therefore withdrawn.
            StorageError: the tier failed; the snapshot may have landed.
        """
        durable, id_ = self.store.durable, one.name.id
        newest = newest_run(durable)
        if newest is not None and newest > run:
            raise in_use(durable, newest, f"snapshot {id_.short} is not copied there, another job has taken over")
        durable.put(one.name.key, one.data)
        # In this order: an announcement that is not there any more has removed the parts before it went. The packs of
        # this step too, since a prune of the durable tier by itself may have taken them for leftovers of a crash.
        announced = claimed_by_prune(durable, id_)
        folders = (parts_prefix(id_), packs_prefix(id_))
        there = {entry.key for folder in folders for entry in durable.list(folder)}
        self._there -= {key for key in one.needs if key.startswith(folders)} - there
        if announced or any(key not in there for key in one.needs if key.startswith(folders)):
            durable.delete([one.name.key])
            raise Pruned(one.name.key)


def behind(store: TieredStore) -> list[Behind]:
    """The snapshots of the fast tier that the durable one lacks, oldest first.

    Raises:
        StorageError: a tier could not be listed or read.
    """
    there = {entry.key for entry in store.durable.list(SNAPSHOTS)}
    names = [name for entry in store.fast.list(SNAPSHOTS) if (name := SnapshotName.parse(entry.key)) is not None]
    todo = {name.key: name for name in sorted(names) if name.key not in there}
    found: list[Behind] = []
    for key, data in read_many(store.fast, list(todo)):
        if data is None:
            continue
        try:
            snapshot = unseal(data, Snapshot, key=key)
        except DamagedError as error:
            log.warning("%s; it is not copied to %s", error, store.durable.url)
            continue
        packs = tuple(pack for pack, _ in snapshot.packs)
        found.append(Behind(todo[key], data, packs, {ref.key: ref.digest for ref in snapshot.parts}))
    return found


def rank_of(key: str) -> int:
    """Which rank wrote a pack or a part; 0 for a name that tells none."""
    name = PackName.parse(key) or PartName.parse(key)
    return 0 if name is None else name.rank
