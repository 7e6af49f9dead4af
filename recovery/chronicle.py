"""What happened on a store, for a picture of it: saves, starts of the job, recoveries. Documents and listings alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median

from ckpt.format.manifest import parse_snapshot
from ckpt.format.names import PARTS, PartName, RunId, SnapshotId
from ckpt.history.catalog import History
from recovery.looking import Listed, listed


@dataclass(frozen=True, slots=True)
class Save:
    """One snapshot, and what its save cost.

    Attributes:
        blocked: seconds for which it kept the training thread of rank 0; None where nobody measured.
        durable: seconds from its call to its commit; the next save of its run tells them, so None for the last one.
        revision: above 0, `ckpt compact` has written it anew.
    """

    listed: Listed
    blocked: float | None
    durable: float | None
    revision: int

    @property
    def id(self) -> SnapshotId:
        return self.listed.id

    @property
    def step(self) -> int:
        return self.listed.step


@dataclass(frozen=True, slots=True)
class Line:
    """One start of the job, and how far it came.

    Attributes:
        started: POSIX seconds by its own clock, and `host` of rank 0; None if its document cannot be read.
        resumed_from: the snapshot it began with, perhaps pruned since; None if it began anew.
        steps: of its snapshots that are there, ascending.
        reached: the highest step of which there is any trace: a part of a save that was never committed, say.
        live: whether it leads to the newest snapshot.
    """

    run: RunId
    world_size: int
    started: float | None
    host: str | None
    resumed_from: SnapshotId | None
    steps: tuple[int, ...]
    reached: int | None
    live: bool

    @property
    def begins(self) -> int:
        """The step its first step follows on."""
        return 0 if self.resumed_from is None else self.resumed_from.step


@dataclass(frozen=True, slots=True)
class Recovery:
    """A start of the job that went on from a snapshot.

    Attributes:
        step: that it went on from, saved by the run `source`.
        journaled: the step to which the journal leads from there; `step` itself where there is none.
        reached: the highest step that the store shows any run since `source` to have reached before.
        usual: steps between two saves of the run before, as a rule: so many may have been lost beyond `reached`, which
            no store can tell. None where it saved once.
        ranks_before, ranks: how many wrote the snapshot, and how many went on from it.
    """

    run: RunId
    at: float | None
    source: RunId
    step: int
    journaled: int
    reached: int
    usual: int | None
    ranks_before: int | None
    ranks: int

    @property
    def lost(self) -> int:
        """Steps that were done again, at least."""
        return max(self.reached - self.journaled, 0)


@dataclass(frozen=True, slots=True)
class Chronicle:
    """One look at a store, told in the order of history.

    Attributes:
        saves: every snapshot, by run, then step.
        lines: every start of the job, by generation.
        held: bytes of packs that the snapshots name now; `stored`: what their saves put there, and `full`: what as many
            whole copies of the state would take.
        problems: objects that could not be read.
    """

    url: str
    newest: SnapshotId | None
    saves: tuple[Save, ...]
    lines: tuple[Line, ...]
    recoveries: tuple[Recovery, ...]
    held: int
    stored: int
    full: int
    problems: int


def chronicle(history: History, covered: Mapping[SnapshotId, int] | None = None) -> Chronicle:
    """What one look at a store tells.

    Args:
        covered: snapshot → the newest step to which the journal leads from it (`recovery.journaled.covered`).
    """
    covered = covered or {}
    took = {
        SnapshotId(snapshot.id.run, snapshot.durable[0]): snapshot.durable[1]
        for snapshot in history.snapshots.values()
        if snapshot.durable is not None
    }
    saves = tuple(
        Save(listed(history, id_), snapshot.blocked, took.get(id_), snapshot.revision)
        for id_, snapshot in sorted(history.snapshots.items())
    )
    lines = _lines(history, [SnapshotId(id_.run, step) for id_, step in covered.items()])
    return Chronicle(
        url=history.url,
        newest=history.newest,
        saves=saves,
        lines=lines,
        recoveries=tuple(_recoveries(history, lines, covered)),
        held=sum(dict(pack for snapshot in history.snapshots.values() for pack in snapshot.packs).values()),
        stored=sum(save.listed.stored for save in saves),
        full=sum(save.listed.size for save in saves),
        problems=len(history.problems),
    )


def _lines(history: History, journaled: Iterable[SnapshotId]) -> tuple[Line, ...]:
    steps: dict[RunId, list[int]] = {}
    for id_ in sorted(history.snapshots):
        steps.setdefault(id_.run, []).append(id_.step)
    begun = {run: parse_snapshot(document.resumed_from) for run, document in history.runs.items()}
    parts = (name.id for key in history.entries if key.startswith(PARTS) and (name := PartName.parse(key)))
    # Snapshots that were pruned since left a trace where a run was resumed from them.
    reached = _furthest(
        [*history.snapshots, *journaled, *parts, *(source for source in begun.values() if source is not None)]
    )
    live = _live(history, begun)
    found = []
    for run in sorted({*history.runs, *steps, *reached}):
        document = history.runs.get(run)
        mine = tuple(steps.get(run, ()))
        # Without its document only its snapshots tell how many ranks it had.
        last = None if not mine else history.snapshots[SnapshotId(run, mine[-1])]
        found.append(
            Line(
                run=run,
                world_size=document.world_size if document is not None else last.world_size if last is not None else 0,
                started=None if document is None else document.started,
                host=None if document is None else document.host,
                resumed_from=begun.get(run),
                steps=mine,
                reached=reached.get(run),
                live=run in live,
            )
        )
    return tuple(found)


def _live(history: History, begun: Mapping[RunId, SnapshotId | None]) -> set[RunId]:
    """The runs that lead to the newest snapshot, those without a snapshot left too."""
    found: set[RunId] = set()
    run = None if history.newest is None else history.newest.run
    while run is not None and run not in found:
        found.add(run)
        source = begun.get(run)
        run = None if source is None else source.run
    return found


def _furthest(ids: Iterable[SnapshotId]) -> Mapping[RunId, int]:
    found: dict[RunId, int] = {}
    for id_ in ids:
        found[id_.run] = max(found.get(id_.run, 0), id_.step)
    return found


def _recoveries(history: History, lines: tuple[Line, ...], covered: Mapping[SnapshotId, int]) -> Iterable[Recovery]:
    for n, line in enumerate(lines):
        source = line.resumed_from
        if source is None:
            continue
        since = [earlier for earlier in lines[:n] if earlier.run >= source.run]
        parent = next((earlier for earlier in since if earlier.run == source.run), None)
        gaps = [] if parent is None else [b - a for a, b in zip(parent.steps, parent.steps[1:], strict=False)]
        snapshot = history.snapshots.get(source)
        before = parent.world_size if parent is not None else None
        yield Recovery(
            run=line.run,
            at=line.started,
            source=source.run,
            step=source.step,
            journaled=covered.get(source, source.step),
            reached=max((earlier.reached for earlier in since if earlier.reached is not None), default=source.step),
            usual=round(median(gaps)) if gaps else None,
            ranks_before=snapshot.world_size if snapshot is not None else before,
            ranks=line.world_size,
        )
