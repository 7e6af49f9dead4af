"""Bring a live state back to a committed step: every rank, in place, all or nothing (torch).

    choose      rank 0 reads the history; all ranks try the same snapshots, newest first
    claim       a run is opened that names the snapshot, before its first part is read (PROTOCOL.md §3, §5.2)
    documents   each rank reads its own part, and gets the others' from its peers only where it needs them
    read        every wanted box into host memory, every byte checked: from mirrors, then peers, then the store
    install     only now, after every rank has everything, are live tensors written

Until the last stage nothing live has changed: a damaged snapshot, a layout that does not fit or a store that fails
leaves the state as it was. The price is host memory for one copy of the rank's own state, freed at the end.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import TypeAlias

from ckpt.errors import NoSnapshot
from ckpt.format.manifest import Part
from ckpt.format.names import SnapshotId
from ckpt.history.copies import mending
from recovery.agree import Peers, Skip
from recovery.attempt import Attempt, Documents
from recovery.choose import Choice, Skipped, exhausted
from recovery.choose_together import choose_together
from recovery.forward import Forward
from recovery.journaled_together import Journals, Ring
from recovery.meter import Meter
from recovery.parallel import THREADS
from recovery.place import Resize, Seat
from recovery.report import Restored
from recovery.shards import MEMORY
from recovery.survey import Holdings
from storage_backends.base import Store

log = logging.getLogger("ckpt")

TRIES = 3
"""Restores in a row, of which each finds at its end that there is a newer snapshot. Once is rare."""


def restore(
    store: Store,
    ranks: Peers,
    state: MutableMapping[str, object],
    *,
    step: int | str | None = None,
    claim: Callable[[SnapshotId], bool],
    settled: Callable[[SnapshotId | None], bool] = lambda newest: True,  # noqa: ARG005
    on_resize: Resize | None = None,
    holdings: Holdings | None = None,
    ring: Ring | None = None,
    memory: int = MEMORY,
    threads: int = THREADS,
) -> Restored | None:
    """Restore `state` in place. Collective: every rank calls it, and all end on one snapshot or raise alike.

    Args:
        step: None or "latest": the newest of the live line, falling back past damaged ones; else exactly that one.
        claim: collective; makes the snapshot safe from a prune that begins now. False: one has announced its end.
        settled: collective; whether nothing newer than this snapshot was committed before the claim: else the newest
            is looked for once more. None: there was none to claim. Not asked where a step was.
        on_resize: the rule for what differed between ranks, where the snapshot has another number of them.
        holdings: what mirrors on this node still hold; this rank's own are those of `holdings.prefer`.
        ring: records of the journal on this node; with them (none is an empty list) the newest step that all records
            cover is restored, None: snapshots only, but where `step` names a journaled one.
        memory: most encoded bytes in flight, and so about what is needed beside one copy of the rank's state.

    Returns:
        What was done, or None if the store holds no snapshot and none was asked for.

    Raises:
        NoSnapshot: the one asked for does not exist (any more).
        DamagedError: it is damaged; or all are.
        LayoutMismatch, UnsupportedState, FormatTooNew: it cannot become this state.
        StorageError: the store does not answer: that is neither damage nor emptiness.
    """
    seat = Seat(ranks.rank, ranks.world_size, rule=on_resize)
    newest: SnapshotId | None = None
    for _ in range(TRIES):
        restored = restore_seat(
            store, ranks, seat, state,
            step=step, claim=claim, holdings=holdings, ring=ring, memory=memory, threads=threads,
        )  # fmt: skip
        newest = None if restored is None else max([restored.id, *(id_ for id_, _ in restored.skipped)])
        if step not in (None, "latest") or settled(newest):
            return restored
        log.info("a newer snapshot than %s was committed meanwhile; restoring that", newest)
    raise NoSnapshot(
        f"{store.url}: snapshots newer than {newest} are listed, and {TRIES} times were not found; does another job "
        "write here? 'ckpt list' shows what there is"
    )


def restore_seat(
    store: Store,
    peers: Peers,
    seat: Seat,
    state: MutableMapping[str, object],
    *,
    step: int | str | None,
    claim: Callable[[SnapshotId], bool],
    memory: int,
    threads: int,
    holdings: Holdings | None = None,
    ring: Ring | None = None,
) -> Restored | None:
    """`restore` for the state of any seat: `load_into` restores rank 2 of 4 and asks nobody."""
    meter = Meter()
    with meter.stage("choose"):
        choice = choose_together(store, peers, step)
    skipped: list[Skipped] = list(choice.unreadable)
    for id_, reason in choice.unreadable:
        _say(peers, id_, reason)
    last: Exception | None = None
    journals = Journals(store, peers, ring or ()) if ring is not None or choice.journaled is not None else None
    for id_ in choice.candidates:
        if not claim(id_):
            reason = "a prune has announced its removal"
            last = NoSnapshot(f"snapshot {id_.short}: {reason}")
        else:
            place = store, peers, seat, state, id_, holdings, meter, memory, threads
            with mending(store):
                found = _with_journal(place, journals, choice)
            if not isinstance(found, Skip):
                return _restored(found, seat, meter, tuple(skipped), holdings)
            last, reason = found.error, str(found.error)
        skipped.append((id_, reason))
        _say(peers, id_, reason)
    if not choice.candidates:
        return None
    raise exhausted(store, choice, tuple(skipped), last)


_Place: TypeAlias = tuple[
    Store, Peers, Seat, MutableMapping[str, object], SnapshotId, Holdings | None, Meter, int, int
]  # fmt: skip


def _with_journal(place: _Place, journals: Journals | None, choice: Choice) -> _Found | Skip:
    """The newest step that the journal after a snapshot is proven to lead to; the snapshot itself where it leads
    nowhere. A step that was asked for by name is that one, or an error."""
    id_, wanted = place[4], choice.journaled
    limit = wanted
    newest: int | None = None
    notes: list[str] = []
    why = ""
    while journals is not None and (not choice.named or wanted is not None):
        plan = journals.plan(id_, limit)
        if plan is not None:
            newest = plan.newest
        if plan is None or plan.target == id_.step or (wanted is not None and plan.target != wanted):
            break
        attempt = Forward(*place, records=journals.records(id_.run), replay=plan)
        found = attempt.follow_on()
        if isinstance(found, Documents):
            return _Found(found, attempt.snapshot_parts, plan.target, newest, tuple(notes))
        if isinstance(found, Skip):
            return found
        why = found.why
        notes.append(f"journal after {id_.short}: proven up to step {found.step} of {plan.target}: {why}")
        log.log(logging.WARNING if place[1].rank == 0 else logging.INFO, "%s", notes[-1])
        limit = found.step
        if limit <= id_.step or wanted is not None:
            break
    if wanted is not None:
        raise NoSnapshot(
            f"step {wanted} cannot be replayed from snapshot {id_.short}: {why or 'its records are not all there'}; "
            "'ckpt list' shows what there is"
        )
    alone = Attempt(*place).follow()
    return alone if isinstance(alone, Skip) else _Found(alone, alone.parts, None, newest, tuple(notes))


@dataclass(frozen=True, slots=True)
class _Found:
    """What became the state: documents of it, the snapshot's own parts, and the step to which it was replayed.
    `newest`: the newest step that any rank is known to have completed."""

    documents: Documents
    parts: Mapping[int, Part]
    replayed: int | None
    newest: int | None
    notes: tuple[str, ...] = ()


def _say(peers: Peers, id_: SnapshotId, reason: str) -> None:
    """All ranks know; one speaks."""
    log.log(logging.WARNING if peers.rank == 0 else logging.INFO, "snapshot %s passed over: %s", id_.short, reason)


def _restored(
    found: _Found, seat: Seat, meter: Meter, skipped: tuple[Skipped, ...], holdings: Holdings | None
) -> Restored:
    documents = found.documents
    own = seat.own(documents.opened.snapshot.world_size)
    return Restored(
        documents.opened.id,
        meter.bytes,
        meter.seconds,
        skipped,
        {name: value for name, value in documents.values.items() if name.startswith("$")},
        documents.opened.snapshot,
        found.parts,
        own,
        (*found.notes, *(() if holdings is None else map(str, holdings.problems))),
        found.replayed,
        None if found.newest is None else max(0, found.newest - (found.replayed or documents.opened.id.step)),
    )
