"""Which snapshots may be read, newest first, and what was passed over; one rule for all who read."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt.errors import DamagedError, LayoutMismatch, NoSnapshot
from ckpt.format.names import SNAPSHOTS, SnapshotId, SnapshotName
from ckpt.history.catalog import History, find, read_history
from recovery.journaled import find_base
from storage_backends.base import Store

Skipped = tuple[SnapshotId, str]


@dataclass(frozen=True, slots=True)
class Choice:
    """Snapshots to try in this order. `named`: exactly one was asked for, and nothing may stand in for it.
    `unreadable`: newer ones whose document cannot be read, with the reason. `journaled`: the step that was asked for,
    where it is none of the snapshots but the journal after the one candidate leads to it."""

    candidates: tuple[SnapshotId, ...]
    named: bool = False
    unreadable: tuple[Skipped, ...] = ()
    journaled: int | None = None


def choose(store: Store, step: int | str | None) -> Choice:
    """Read the history and say what to try.

    Without a step these are the snapshots of the live line. Abandoned ones never stand in for it silently: a job that
    went back on purpose would find itself on the line it left.

    Raises:
        NoSnapshot: the one asked for does not exist.
        DamagedError: its document, or every document there is, cannot be read.
    """
    history = read_history(store)
    unreadable = _unreadable(history)
    if step is not None and step != "latest":
        try:
            return Choice((find(history, step),), named=True)
        except NoSnapshot:
            for id_, reason in unreadable:
                if step in (id_.step, str(id_.step), id_.short, str(id_)):
                    raise _all_unreadable(store, ((id_, reason),)) from None
            base = find_base(store, history, step)
            if base is None:
                raise
            return Choice((base[0],), named=True, journaled=base[1])
    live = tuple(sorted(history.live, reverse=True))
    if not live and unreadable:
        raise _all_unreadable(store, unreadable)
    return Choice(live, unreadable=tuple(s for s in unreadable if s[0] > live[0]) if live else ())


def _unreadable(history: History) -> tuple[Skipped, ...]:
    """Snapshots of which no revision can be read, newest first."""
    found: dict[SnapshotId, str] = {}
    for problem in history.problems:
        name = SnapshotName.parse(problem.key) if problem.key.startswith(SNAPSHOTS) else None
        if name is not None and name.id not in history.snapshots:
            found.setdefault(name.id, problem.text)
    return tuple(sorted(found.items(), reverse=True))


def _all_unreadable(store: Store, unreadable: tuple[Skipped, ...]) -> DamagedError:
    reasons = "; ".join(f"{id_.short}: {reason}" for id_, reason in unreadable)
    newest = unreadable[0][0]
    return DamagedError(
        f"no snapshot on {store.url} can be read, though there are some: {reasons}; run 'ckpt verify', and pass "
        "fresh=True to start anew beside them",
        key=SnapshotName(newest).key,
        step=newest.step,
        expected="a readable snapshot",
        found=reasons,
    )


def exhausted(store: Store, choice: Choice, skipped: tuple[Skipped, ...], last: Exception | None) -> Exception:
    """The error when none of the candidates could be used."""
    if choice.named and isinstance(last, DamagedError | LayoutMismatch):
        return last
    reasons = "; ".join(f"{id_.short}: {reason}" for id_, reason in skipped)
    if isinstance(last, DamagedError):
        return DamagedError(
            f"none of {len(skipped)} snapshots on {store.url} can be read whole: {reasons}; run 'ckpt verify --deep'",
            key=last.key,
            step=last.step,
            rank=last.rank,
            leaf=last.leaf,
            expected=last.expected,
            found=last.found,
        )
    return NoSnapshot(f"no snapshot is left on {store.url}: {reasons}; choose another one with 'ckpt list'")
