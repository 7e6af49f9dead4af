"""The fast tier keeps few: what it gives up is on the durable tier, so no snapshot of the store goes by it.

That makes it simpler than a prune. Nobody's claim, reference or pin can be harmed, since whoever reads what has gone
here finds it there; so nothing is announced. Snapshots go first, then parts, then packs, so that the fast tier, read by
itself, never lists a snapshot that lacks something. A crash among the removals leaves parts and packs that no snapshot
of the fast tier names: the first look of the next start finds them (`orphans`).

What stays, whatever is asked: a snapshot that the durable tier lacks, with everything it names; and each single object
that the durable tier does not list with the same size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ckpt.errors import DamagedError
from ckpt.format.manifest import Snapshot, unseal
from ckpt.format.names import PACKS, PARTS, SNAPSHOTS, SnapshotId, SnapshotName
from ckpt.history.keep import Keep, reasons
from ckpt.history.reading import read_many
from storage_backends.tiered import TieredStore


@dataclass(frozen=True, slots=True)
class ThinPlan:
    """What leaves the fast tier. `keys`: in order of removal; `freed`: their bytes; `kept`: snapshot → why."""

    snapshots: tuple[SnapshotId, ...]
    keys: tuple[str, ...]
    freed: int
    kept: Mapping[SnapshotId, str]


def plan_thinning(store: TieredStore, keep: Keep, *, orphans: bool = False) -> ThinPlan:
    """Look at both tiers and say what the fast one may give up; touches nothing.

    Args:
        keep: what stays on the fast tier, of the snapshots there.
        orphans: also look for what a thinning that was killed left behind: needs a listing for each step that has
            objects no snapshot of the fast tier names, those being written now among them.

    Raises:
        StorageError: a tier could not be listed or read.
    """
    # Durable before fast: what the fast tier lists later and the durable one did not is taken for not copied.
    there = {entry.key for entry in store.durable.list(SNAPSHOTS)}
    on_fast = {entry.key: entry.size for prefix in (PARTS, PACKS, SNAPSHOTS) for entry in store.fast.list(prefix)}
    names = {key: name for key in on_fast if (name := SnapshotName.parse(key)) is not None}
    documents: dict[str, Snapshot] = {}
    for key, data in read_many(store.fast, sorted(names)):
        if data is None:
            continue
        try:
            documents[key] = unseal(data, Snapshot, key=key)
        except DamagedError:
            # What it names is unknown, so nothing but whole snapshots could go: let a reader mend it first.
            return ThinPlan((), (), 0, {})
    newest_first = {names[key].id: document for key, document in sorted(documents.items())}
    kept = reasons(keep, newest_first)
    if newest_first:
        kept.setdefault(max(newest_first), "the newest on the fast tier")
    kept |= {names[key].id: "not yet on the durable tier" for key in documents if key not in there}
    gone = {key for key in documents if names[key].id not in kept}
    named = {need for key in documents.keys() - gone for need in _needs(documents[key])}
    released = {need for key in gone for need in _needs(documents[key])}
    if orphans:
        everything = {need for document in documents.values() for need in _needs(document)}
        released |= on_fast.keys() - names.keys() - everything
    safe = _also_durable(store, {key: size for key, size in on_fast.items() if key in released - named})
    if orphans and {entry.key for entry in store.fast.list(SNAPSHOTS)} - names.keys():
        # Committed and copied since our listings: what it names looks like an orphan, and is none.
        return plan_thinning(store, keep)
    keys = (*sorted(gone), *sorted(k for k in safe if k.startswith(PARTS)), *sorted(k for k in safe if k[:6] == PACKS))
    return ThinPlan(
        snapshots=tuple(sorted({names[key].id for key in gone})),
        keys=keys,
        freed=sum(on_fast[key] for key in keys),
        kept=kept,
    )


def execute_thinning(plan: ThinPlan, store: TieredStore) -> None:
    """Remove what `plan` names from the fast tier, a kind at a time. Raises StorageError; the next one goes on."""
    for prefix in (SNAPSHOTS, PARTS, PACKS):
        if todo := [key for key in plan.keys if key.startswith(prefix)]:
            store.fast.delete(todo)


def _needs(document: Snapshot) -> Iterable[str]:
    return (*(pack for pack, _ in document.packs), *(ref.key for ref in document.parts))


def _also_durable(store: TieredStore, keys: Mapping[str, int]) -> set[str]:
    """Those of these objects that the durable tier lists with the same size."""
    folders = sorted({key.rpartition("/")[0] + "/" for key in keys})
    there = {entry.key: entry.size for folder in folders for entry in store.durable.list(folder)}
    return {key for key, size in keys.items() if there.get(key) == size}
