"""Writing a snapshot anew: what compaction and retention share (PROTOCOL.md §5.5).

For each snapshot: its packs, then its parts, then a document of the next revision, which readers then take. Nothing is
removed here; what the new revision made superfluous goes with a prune. A crash
  before the document  leaves packs and parts nobody names, and the old revision, which is read; prune sweeps them;
  after it             leaves the new revision, which is read, and the old one, which prune removes.
A claim (a pin) holds off prunes while a snapshot is rewritten. One that a killed process left goes with the next that
rewrites: at once where that process is known to be dead, else when it is older than `grace`.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from ckpt.format.manifest import Holder, Part, PartRef, PinDoc, digest128, parse_snapshot, seal, unseal
from ckpt.format.names import (
    PINS,
    SNAPSHOTS,
    PackName,
    PartName,
    SnapshotId,
    SnapshotName,
    packs_prefix,
    parts_prefix,
    pin_key,
)
from ckpt.format.parts import encode_part
from ckpt.history.assemble import Breathe, build_snapshot
from ckpt.history.catalog import History
from ckpt.history.copies import read
from ckpt.history.pins import claim, still_there
from ckpt.history.runs import claimed_by_prune, dead, identity
from storage_backends.base import NotFound, StorageError, Store

CLAIM = "compacting-"
"""How the pins begin by which whoever rewrites claims what it reads."""

SWEPT = "what had been written was swept by a prune meanwhile; run it again"


@dataclass(frozen=True, slots=True)
class Claimed:
    """The snapshots that may be rewritten, and in words why others may not."""

    ids: tuple[SnapshotId, ...] = ()
    skipped: tuple[str, ...] = ()


@contextlib.contextmanager
def claiming(
    store: Store,
    history: History,
    wanted: Sequence[SnapshotId],
    *,
    grace: float,
    nonce: Callable[[], str] = lambda: secrets.token_hex(4),
) -> Iterator[Claimed]:
    """Claim snapshots, then look for who claims otherwise; all claims stay until the end, since a later snapshot may
    come to name packs of an earlier one, which nothing else protects until its document is there.

    Args:
        history: the look at the store in which they were chosen.
        grace: seconds by the store's own clock after which another one's claim counts as left by a dead process; 0
            takes all for dead.
        nonce: names the claims.
    """
    left = sorted(id_ for name, id_ in history.pins.items() if name.startswith(CLAIM))
    if not wanted and not left:
        yield Claimed()
        return
    stem = f"{CLAIM}{nonce()}"
    # With nothing to rewrite, one claim all the same: its time is the store's, by which the claims of the dead are old.
    own = {id_: f"{stem}-{n}" for n, id_ in enumerate(wanted or left[:1])}
    keys = [pin_key(name) for name in own.values()]
    try:
        for id_, name in own.items():
            claim(store, name, id_, _holder())
        yield _judged(store, history, wanted, set(keys), grace)
    except BaseException:
        with contextlib.suppress(StorageError):
            store.delete(keys)
        raise
    store.delete(keys)


def next_revision(store: Store, history: History, id_: SnapshotId) -> int:
    """Above whatever a killed process left: its objects may still be swept, and must not be named again."""
    parts = [n for e in store.list(parts_prefix(id_)) if (n := PartName.parse(e.key)) and n.id == id_]
    return 1 + max(history.snapshots[id_].revision, *(n.revision for n in parts), 0)


def put_revised(store: Store, part: Part, breathe: Breathe) -> PartRef:
    """Store the part of a revision."""
    data = encode_part(part, breathe)
    ref = PartRef(PartName(part.id, part.rank, part.revision).key, len(data), digest128(data))
    store.put(ref.key, data)
    return ref


def publish_revised(
    store: Store, made: Sequence[tuple[PartRef, Part]], packs: Collection[str], breathe: Breathe
) -> int | None:
    """Write the document of a revision whose parts, and `packs` of its own, are stored; its bytes. None: it was
    withdrawn, see `SWEPT`."""
    snapshot = build_snapshot(made, breathe)
    data = seal(snapshot)
    key = SnapshotName(snapshot.id, snapshot.revision).key
    store.put(key, data)
    # This process may have been stopped for hours, and a prune may have swept what no document named yet.
    prefixes = [parts_prefix(snapshot.id), *([packs_prefix(snapshot.id)] if packs else [])]
    there = {e.key for prefix in prefixes for e in store.list(prefix)}
    if not {ref.key for ref, _ in made}.union(packs) <= there:
        store.delete([key])
        return None
    return len(data)


def own_packs(store: Store, id_: SnapshotId) -> list[PackName]:
    """The packs there are of a step: new ones are numbered on from these."""
    return [pack for e in store.list(packs_prefix(id_)) if (pack := PackName.parse(e.key))]


def _judged(
    store: Store, history: History, wanted: Sequence[SnapshotId], own: Collection[str], grace: float
) -> Claimed:
    rivals = _rivals(store, own, grace)
    newer = {
        found.id
        for entry in store.list(SNAPSHOTS)
        if (found := SnapshotName.parse(entry.key)) and entry.key not in history.entries
    }
    ids: list[SnapshotId] = []
    skipped: list[str] = []
    for id_ in wanted:
        if id_ in rivals:
            skipped.append(f"{id_.short}: another compaction is at it")
        elif id_ in newer:
            skipped.append(f"{id_.short}: it has been compacted meanwhile")
        elif claimed_by_prune(store, id_) or not still_there(store, history, id_):
            skipped.append(f"{id_.short}: a prune removes it")
        else:
            ids.append(id_)
    return Claimed(tuple(ids), tuple(skipped))


def _rivals(store: Store, own: Collection[str], grace: float) -> set[SnapshotId]:
    """What others have claimed; claims that dead ones left are taken away."""
    pins = {e.key: e.mtime for e in store.list(PINS) if e.key.startswith(PINS + CLAIM)}
    now = max((mtime for key in own if (mtime := pins.get(key)) is not None), default=None)
    found: set[SnapshotId] = set()
    for key, mtime in pins.items():
        if key in own:
            continue
        with contextlib.suppress(NotFound):
            pin = read(store, key, lambda data: unseal(data, PinDoc, key=key))  # noqa: B023 - called at once
            old = grace <= 0 or (now is not None and mtime is not None and mtime < now - grace)
            if old or (pin.holder is not None and dead(pin.holder, identity(None))):
                store.delete([key])
                continue
            pinned = parse_snapshot(pin.snapshot)
            assert pinned is not None  # the field's pattern has been checked
            found.add(pinned)
    return found


def _holder() -> Holder:
    who = identity(None)
    return Holder(who.host, who.pid, who.pid_started, who.boot, who.pid_space)
