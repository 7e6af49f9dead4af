"""Prune: plan, announce, look again, act (PROTOCOL.md §5). The plan touches nothing; `execute` only follows it.

Snapshots go first, then parts, then packs, then segments of the journal, then the prune's own announcement. A crash
  before the announcement  leaves the store as it was, but for snapshots that are weights only by then (stripping.py);
  after it                 leaves an announcement: claims give way to it, and the next prune finishes what it names;
  among the removals       never leaves a snapshot that lacks something: its document went first.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from ckpt.errors import DamagedError
from ckpt.format.manifest import FORMAT, MAX_DOCUMENT, PruneDoc, seal, unseal
from ckpt.format.names import PACKS, PARTS, PRUNES, SnapshotId, SnapshotName, parts_prefix, prune_key
from ckpt.history.assemble import Breathe
from ckpt.history.catalog import History, read_history
from ckpt.history.clock import Clock, SystemClock
from ckpt.history.copies import checked
from ckpt.history.keep import Keep
from ckpt.history.plan import Decision, Order, blocking, decide, leaned_on, without_announced
from ckpt.history.reading import THREADS, read_many
from ckpt.history.revising import CLAIM
from ckpt.history.stripping import Stripped, Stripping, plan_stripping, strip, with_older_moments
from storage_backends.base import Entry, StorageError, Store

__all__ = ["Keep", "PrunePlan", "Pruned", "execute", "plan_prune"]

log = logging.getLogger(__name__)


def _hold() -> None:
    """No background thread, no need to give way."""


@dataclass(frozen=True)
class PrunePlan:
    """What a prune will remove, and why the rest stays. Data only.

    Attributes:
        order: what was asked for.
        snapshots: the snapshots that go.
        leftovers: steps that were never committed, of which something goes.
        documents, parts, packs, segments: the objects that go, in order of removal.
        freed: bytes of all these objects.
        weights_only: snapshots that stay, and lose their optimizers' state before anything goes; `written`: bytes of
            documents that this takes; `bare`: those that were looked into for it in vain.
        protected: every snapshot that stays, and why.
        unfinished: announcements of earlier prunes, which this one finishes.
        notes: what a person should know, one line each.
        history: the look at the store that this plan was made from.
    """

    order: Order
    snapshots: tuple[SnapshotId, ...]
    leftovers: tuple[SnapshotId, ...]
    documents: tuple[str, ...]
    parts: tuple[str, ...]
    packs: tuple[str, ...]
    segments: tuple[str, ...]
    freed: int
    protected: Mapping[SnapshotId, str]
    unfinished: tuple[str, ...]
    notes: tuple[str, ...]
    history: History = field(repr=False)
    weights_only: tuple[SnapshotId, ...] = ()
    written: int = 0
    bare: frozenset[SnapshotId] = frozenset()

    @property
    def keys(self) -> tuple[str, ...]:
        """Every object that goes, in order of removal."""
        return self.documents + self.parts + self.packs + self.segments

    def __str__(self) -> str:
        lines = [f"remove {id_.short}" for id_ in self.snapshots]
        lines += [f"remove leftovers of {id_.short}, never committed" for id_ in self.leftovers]
        lines += [f"{self.verb(id_)} {id_.short}: {why}" for id_, why in self.protected.items()]
        lines += self.notes
        lines.append(f"{len(self.keys)} objects, {self.freed} bytes")
        return "\n".join(lines)

    def verb(self, id_: SnapshotId) -> str:
        """What becomes of a snapshot that stays, in words."""
        return "keep weights of" if id_ in self.weights_only else "keep"


@dataclass(frozen=True, slots=True)
class Pruned:
    """What a prune removed. `keys`: in order of removal. `spared`: planned, but claimed, pinned or committed between
    the plan and the second look. `stripped`: what became weights only."""

    snapshots: tuple[SnapshotId, ...] = ()
    keys: tuple[str, ...] = ()
    freed: int = 0
    spared: tuple[str, ...] = ()
    stripped: Stripped = field(default_factory=Stripped)


def plan_prune(
    store: Store,
    keep: Keep,
    *,
    grace: float,
    remove: Collection[SnapshotId] = (),
    clock: Clock | None = None,
    threads: int = THREADS,
    bare: Collection[SnapshotId] = (),
    breathe: Breathe = _hold,
) -> PrunePlan:
    """Look at the store and say what would go; touches nothing.

    Args:
        store: where.
        keep: what stays of the live line.
        grace: seconds for which leftovers of crashed saves stay, longer than any put can take. 0 takes them whatever
            their age: only while no job writes here.
        remove: snapshots to remove whatever `keep` says. What a job may still lean on stays all the same.
        clock: an estimate of the store's own clock, for the age of leftovers; `execute` checks it against that.
        threads: documents read at once.
        bare: snapshots of which an earlier plan found that they have no optimizer state: `PrunePlan.bare`.
        breathe: called between rows of parts, to give way to a training thread.

    Raises:
        StorageError: something could not be listed or read. Never taken for "empty".
        FormatTooNew: a newer version of this library writes here.
    """
    order = Order(keep, grace, frozenset(remove))
    history = read_history(store, packs=True, threads=threads)
    announced, problems = _announcements(store, threads)
    # The store's clock can only be read by writing. Asking this machine's is no risk: `execute` spares whatever is too
    # young by the store's own.
    now = (clock or SystemClock()).wall() if _dated(history.entries) else None
    decision = decide(history, order, announced.values(), now)
    stripping = Stripping((), 0, frozenset(bare), history)
    if keep.moments_last is not None and not blocking(history, order.remove):
        leaned = leaned_on(history, announced.values(), grace, now)
        older = with_older_moments(history, decision.kept, leaned, keep.moments_last)
        stripping = plan_stripping(store, history, older, bare=bare, breathe=breathe)
        decision = decide(stripping.after, order, announced.values(), now)
    absent = sorted(id_ for id_ in order.remove if id_ not in decision.kept and id_ not in decision.snapshots)
    return PrunePlan(
        order=order,
        snapshots=decision.snapshots,
        leftovers=decision.leftovers,
        documents=decision.documents,
        parts=decision.parts,
        packs=decision.packs,
        segments=decision.segments,
        freed=_size(decision.keys, history.entries),
        protected={id_: why for id_, why in decision.kept.items() if id_ in history.snapshots},
        unfinished=tuple(announced),
        notes=(
            *decision.notes,
            *stripping.notes,
            *problems,
            *(f"{id_.short} ({id_}) is not there" for id_ in absent),
        ),
        history=history,
        weights_only=stripping.ids,
        written=stripping.written,
        bare=stripping.bare,
    )


def execute(
    plan: PrunePlan,
    store: Store,
    *,
    clock: Clock,
    listing_lag: float = 0.0,
    threads: int = THREADS,
    nonce: Callable[[], str] = lambda: secrets.token_hex(8),
    breathe: Breathe = _hold,
) -> Pruned:
    """Remove what `plan` names, but for what became protected since.

    Args:
        plan: from `plan_prune`, of the same store.
        store: where.
        clock: for waiting.
        listing_lag: seconds by which the store's listings may lag behind its writes.
        threads: documents read at once.
        nonce: names the announcement.
        breathe: as for `plan_prune`.

    Raises:
        StorageError: the store failed. Before the first removal nothing is removed; later, what is left is announced,
            and the next prune finishes it.
    """
    if not plan.keys and not plan.unfinished and not _claims(plan.history):
        return Pruned()
    stripped = _strip(plan, store, clock, listing_lag, breathe)
    own = prune_key(nonce())
    # Leftovers too: one may be committed late, and claimed at once. But not the snapshots, which stay, of which only
    # what a killed compaction left behind goes: nobody is to give way for these.
    going = (*plan.snapshots, *(id_ for id_ in plan.leftovers if id_ not in plan.history.snapshots))
    store.put(own, seal(PruneDoc(FORMAT, tuple(map(str, going)), plan.keys)))
    try:
        if listing_lag > 0:
            # Twice: a claim written just before our second look is listed only a lag later, and whoever wrote it looks
            # for our announcement at once, which must be listed by then.
            clock.sleep(2 * listing_lag)
        history = read_history(store, packs=True, known=plan.history, threads=threads)
        announced, _ = _announcements(store, threads, but=own)
        written = {e.key: e.mtime for e in store.list(PRUNES)}
        now = written.get(own)  # our own object tells the store's time
        again = decide(history, plan.order, announced.values(), now, only=plan.snapshots)
        if not _stands(store, without_announced(history, announced.values())):
            again = Decision()
        spared = _lost(store, history, again)
    except BaseException:
        with contextlib.suppress(StorageError):
            store.delete([own])  # nothing has been removed: take it back
        raise
    allowed = set(again.keys) - spared
    for keys in (plan.documents, plan.parts, plan.packs, plan.segments):
        if todo := [key for key in keys if key in allowed]:
            store.delete(todo)
    removed = tuple(key for key in plan.keys if key in allowed)
    left = history.entries.keys() - set(removed)
    over = [
        key
        for key, doc in announced.items()
        if not left.intersection(doc.keys) or _old(written.get(key), now, plan.order.grace)
    ]
    store.delete([*over, own])
    return Pruned(
        snapshots=tuple(id_ for id_ in plan.snapshots if id_ in set(again.snapshots)),
        keys=removed,
        freed=_size(removed, history.entries),
        spared=tuple(key for key in plan.keys if key not in allowed and key in history.entries),
        stripped=stripped,
    )


def _strip(plan: PrunePlan, store: Store, clock: Clock, listing_lag: float, breathe: Breathe) -> Stripped:
    """Before anything goes: the new revisions, so that what they replace can go with the rest. And the claims of dead
    processes are taken away, so that what they hold goes with the next prune."""
    if not plan.weights_only and not _claims(plan.history):
        return Stripped()
    grace = plan.order.grace

    def leaned(history: History) -> Mapping[SnapshotId, str]:
        return leaned_on(history, (), grace, clock.wall() if _dated(history.entries) else None)

    return strip(
        store, plan.history, plan.weights_only, leaned=leaned, grace=grace, clock=clock, listing_lag=listing_lag,
        breathe=breathe,
    )  # fmt: skip


def _claims(history: History) -> bool:
    """Whether something claims snapshots to rewrite them; it may be dead."""
    return any(name.startswith(CLAIM) for name in history.pins)


def _announcements(store: Store, threads: int, but: str | None = None) -> tuple[dict[str, PruneDoc], tuple[str, ...]]:
    """Announcements that earlier prunes left (or that of one at work), and notes on those that cannot be read."""
    found: dict[str, PruneDoc] = {}
    notes: list[str] = []
    listed = [e for e in store.list(PRUNES) if e.key != but]
    notes += [
        f"{e.key}: {e.size} bytes, and no document has more than {MAX_DOCUMENT}; what it announced is not finished"
        for e in listed
        if e.size > MAX_DOCUMENT
    ]
    for key, data in read_many(store, [e.key for e in listed if e.size <= MAX_DOCUMENT], threads):
        if data is None:
            continue
        try:
            found[key] = checked(store, key, data, lambda data: unseal(data, PruneDoc, key=key))  # noqa: B023 - called at once
        except DamagedError as error:
            notes.append(f"{error}; what it announced is not finished")
    return found, tuple(notes)


def _stands(store: Store, history: History) -> bool:
    """Whether the newest snapshot, the one that must outlive everything that goes, still has its parts.

    Another prune may have announced them as leftovers, missed a late commit, removed them and gone, all of it between
    our listings of parts and of announcements. Its packs stand as long as its parts: they go later."""
    if history.newest is None:
        return True
    there = {e.key for e in store.list(parts_prefix(history.newest))}
    return all(ref.key in there for ref in history.snapshots[history.newest].parts)


def _lost(store: Store, history: History, decision: Decision) -> set[str]:
    """What must stay after all, because the compacted revision that replaces it has lost something meanwhile: swept as
    a leftover by another prune that looked before it was committed, and has gone since."""
    going = [history.documents[key] for key in decision.documents if key in history.documents]
    replaced = [s for s in going if s.id in history.snapshots and s.id not in decision.snapshots]
    if not replaced:
        return set()
    there = {e.key for prefix in (PARTS, PACKS) for e in store.list(prefix)}
    spared: set[str] = set()
    for old in replaced:
        new = history.snapshots[old.id]
        if not {key for key, _ in new.packs} | {ref.key for ref in new.parts} <= there:
            spared |= {SnapshotName(old.id, old.revision).key} | {key for key, _ in old.packs}
            spared |= {ref.key for ref in old.parts}
    return spared


def _old(mtime: float | None, now: float | None, grace: float) -> bool:
    """Whether the prune behind an announcement is certainly dead. Until then, what it names and we spared (or could not
    list yet) may still be removed by it, so claims must go on finding it."""
    return grace <= 0 or (mtime is not None and now is not None and mtime < now - grace)


def _dated(entries: Mapping[str, Entry]) -> bool:
    return all(e.mtime is not None for e in entries.values())


def _size(keys: Collection[str], entries: Mapping[str, Entry]) -> int:
    return sum(entries[key].size for key in keys if key in entries)
