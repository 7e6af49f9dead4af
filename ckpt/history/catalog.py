"""What a store holds: runs, snapshots, pins, and which line of snapshots is the live one.

Everything is read in one order, runs/ → parts/ (→ packs/) → snapshots/ → pins/, because prune's safety hangs on it
(PROTOCOL.md §5.1):

* runs before parts: only a run that was the newest when its parts lay ready can still commit them. So if a newer run
  is in our list, all such parts are in our later list of parts.
* parts and packs before snapshots: whatever a snapshot that we did not see may name was written after our lists, so
  no list of candidates holds it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Literal

from ckpt.errors import DamagedError, NoSnapshot
from ckpt.format.key import head_of
from ckpt.format.manifest import MAX_DOCUMENT, PinDoc, RunDoc, Snapshot, parse_snapshot, unseal
from ckpt.format.names import (
    JOURNAL,
    PACKS,
    PARTS,
    PINS,
    RUNS,
    SNAPSHOTS,
    PackName,
    PartName,
    RunId,
    SegmentName,
    SnapshotId,
    SnapshotName,
    parse_run_key,
    run_key,
)
from ckpt.history.copies import checked
from ckpt.history.keyed import check_key, key_of
from ckpt.history.reading import THREADS, read_many, there
from storage_backends.base import Entry, Store


@dataclass(frozen=True, slots=True)
class Problem:
    """One object that is not what its place says.

    `kind`: "foreign" (not a name of this format), "unreadable" (a run, snapshot or pin whose bytes are wrong, or a run
    document that is not there), "incomplete" (a snapshot whose parts are gone: not listed).
    """

    key: str
    text: str
    kind: Literal["foreign", "unreadable", "incomplete"]


@dataclass(frozen=True)
class History:
    """One look at a store. Nothing in it changes.

    Attributes:
        runs: every readable run document.
        snapshots: every restorable snapshot, by its highest readable revision.
        keys: where each of them lies.
        pins: name → snapshot, whether that is still there or not.
        problems: what was skipped, one line each.
        documents: every readable snapshot document (all revisions, incomplete ones too) by key.
        entries: what was listed under runs/, parts/, snapshots/, pins/ (packs/ and journal/ where asked for), by key.
        url: of the store.
    """

    runs: dict[RunId, RunDoc]
    snapshots: dict[SnapshotId, Snapshot]
    keys: dict[SnapshotId, str]
    pins: dict[str, SnapshotId]
    problems: tuple[Problem, ...]
    documents: dict[str, Snapshot] = field(default_factory=dict, repr=False)
    entries: dict[str, Entry] = field(default_factory=dict, repr=False)
    url: str = ""

    @cached_property
    def newest(self) -> SnapshotId | None:
        """The newest snapshot: of the largest run, then of the largest step. Never by a clock."""
        return max(self.snapshots, default=None)

    @cached_property
    def live(self) -> frozenset[SnapshotId]:
        """The live line: the newest snapshot and back through `resumed_from` (PROTOCOL.md §3.5)."""
        return frozenset() if self.newest is None else self.line(self.newest)

    @cached_property
    def unknown(self) -> frozenset[RunId]:
        """Runs of which something is there, and whose document cannot be read: what they resumed from is unknown."""
        runs = (parse_run_key(problem.key) for problem in self.problems if problem.kind == "unreadable")
        return frozenset(run for run in runs if run is not None)

    @cached_property
    def abandoned(self) -> frozenset[SnapshotId]:
        """Every snapshot that does not lead to the newest one."""
        return frozenset(self.snapshots) - self.live

    def line(self, tip: SnapshotId) -> frozenset[SnapshotId]:
        """`tip` and the snapshots that lead to it. It goes through snapshots that have been removed: what a run
        resumed from is in its document, not in the snapshot. Where that cannot be read, any older snapshot may lead
        to it, and all are taken to."""
        mine: dict[RunId, list[SnapshotId]] = {}
        for id_ in self.snapshots:
            mine.setdefault(id_.run, []).append(id_)
        found: set[SnapshotId] = set()
        at: SnapshotId | None = tip
        while at is not None:
            found.update(id_ for id_ in mine.get(at.run, ()) if id_.step <= at.step)
            doc = self.runs.get(at.run)
            if doc is None:
                found.update(id_ for id_ in self.snapshots if id_.run < at.run)
                break
            before = parse_snapshot(doc.resumed_from)
            # A run can only have resumed from an older one; a document that says otherwise must not make a circle.
            at = before if before is not None and before.run < at.run else None
        return frozenset(found)


def read_history(store: Store, *, packs: bool = False, known: History | None = None, threads: int = THREADS) -> History:
    """Look at the store: four listings, and every run, snapshot and pin document.

    Args:
        store: where.
        packs: list packs/ and journal/ too (into `History.entries`); nothing but prune needs it.
        known: an earlier look; documents it holds are not read again, since they never change.
        threads: documents read at once.

    Raises:
        StorageError: the store could not be listed or read. Never taken for "empty".
        FormatTooNew: a newer version of this library writes here.
    """
    entries: dict[str, Entry] = {}
    for prefix in (RUNS, PARTS, *((PACKS, JOURNAL) if packs else ()), SNAPSHOTS, PINS):
        entries.update((e.key, e) for e in store.list(prefix))
    problems: list[Problem] = []
    names: dict[str, SnapshotName] = {}
    run_names: dict[str, RunId] = {}
    pin_keys: list[str] = []
    for key, entry in entries.items():
        if key.startswith(RUNS) and (run := parse_run_key(key)) is not None:
            run_names[key] = run
        elif key.startswith(SNAPSHOTS) and (name := SnapshotName.parse(key)) is not None:
            names[key] = name
        elif key.startswith(PINS) and re.fullmatch(r"pins/[^/]+\.json", key):
            pin_keys.append(key)
        elif not any(parse(key) for parse in (PartName.parse, PackName.parse, SegmentName.parse)):
            text = f"{key}: not an object of this format ({entry.size} bytes); ignored"
            problems.append(Problem(key, text, "foreign"))
    # A snapshot can be newer than our list of runs; its run document is older than itself, so it can be read directly.
    run_names.update((run_key(n.id.run), n.id.run) for n in names.values())

    documents: dict[str, Snapshot] = {}
    runs: dict[RunId, RunDoc] = {}
    pins: dict[str, SnapshotId] = {}
    if known is not None:
        documents.update((key, known.documents[key]) for key in names if key in known.documents)
        runs.update((run, known.runs[run]) for run in run_names.values() if run in known.runs)
    wanted: list[str] = []
    for key in (*run_names, *names, *pin_keys):
        if key in documents or run_names.get(key) in runs:
            continue
        if key in entries and entries[key].size > MAX_DOCUMENT:
            text = f"{key}: {entries[key].size} bytes, and no document has more than {MAX_DOCUMENT}; not read"
            problems.append(Problem(key, text, "unreadable"))
            continue
        wanted.append(key)
    for key, data in _read_all(store, wanted, names, run_names, entries, threads):
        if data is None:
            if key in run_names:
                text = f"{key}: the document of this run is not there, so what it resumed from is unknown"
                problems.append(Problem(key, text, "unreadable"))
            continue  # a snapshot or pin removed since it was listed
        try:
            match checked(store, key, data, partial(_document, key)):
                case RunDoc() as doc:
                    runs[run_names[key]] = doc
                case Snapshot() as snapshot:
                    documents[key] = snapshot
                case PinDoc() as pin:
                    pinned = parse_snapshot(pin.snapshot)
                    assert pinned is not None  # the field's pattern has been checked
                    pins[pin.name] = pinned
        except DamagedError as error:
            if head_of(data) is not None and key_of(store) is None:
                check_key(store, None)  # asked only now: whoever reads a store in the clear makes no request for it
            problems.append(Problem(key, str(error), "unreadable"))

    snapshots: dict[SnapshotId, Snapshot] = {}
    keys: dict[SnapshotId, str] = {}
    for key in sorted(documents, key=lambda k: names[k]):  # a higher revision comes later, and wins
        missing = _missing(store, documents[key], entries)
        if missing is None:
            snapshots[names[key].id], keys[names[key].id] = documents[key], key
        elif there(store, key):
            text = f"{key}: names {missing}, which is not there; not listed"
            problems.append(Problem(key, text, "incomplete"))
        else:  # pruned between our two listings
            del documents[key]
            entries.pop(key, None)
    return History(
        runs, snapshots, keys, pins, tuple(sorted(problems, key=lambda p: p.key)), documents, entries, store.url
    )


def _read_all(
    store: Store,
    keys: list[str],
    names: dict[str, SnapshotName],
    run_names: dict[str, RunId],
    entries: dict[str, Entry],
    threads: int,
) -> Iterator[tuple[str, bytes | None]]:
    """`read_many`; and where a snapshot has gone since it was listed, what has been written meanwhile, which is added
    to `names`, `run_names` and `entries`. Else a step that is compacted and pruned at this very moment would seem to be
    gone; and where all have gone because newer ones were committed, the store would seem to be empty."""
    while keys:
        went = False
        for key, data in read_many(store, keys, threads):
            went |= data is None and key in names
            yield key, data
        keys = []
        for entry in store.list(SNAPSHOTS) if went else ():
            name = SnapshotName.parse(entry.key)
            if name is None or entry.key in names or entry.size > MAX_DOCUMENT:
                continue
            names[entry.key], entries[entry.key] = name, entry
            keys.append(entry.key)
            if (run := run_key(name.id.run)) not in run_names:
                run_names[run] = name.id.run
                keys.append(run)


def find(history: History, name: int | str) -> SnapshotId:
    """The snapshot that a person means: a step, "latest", ``GENERATION/STEP``, a full id, or the name of a pin.

    Raises:
        NoSnapshot: there is none, or more than one; the message lists what there is.
    """
    text = str(name)
    found: Iterable[SnapshotId]
    if text == "latest":
        found = () if history.newest is None else (history.newest,)
    elif text.isascii() and text.isdigit():
        found = [id_ for id_ in history.snapshots if id_.step == int(text)]
    elif (short := re.fullmatch(r"([0-9]+)/([0-9]+)", text)) is not None:
        generation, step = int(short[1]), int(short[2])
        found = [id_ for id_ in history.snapshots if (id_.run.generation, id_.step) == (generation, step)]
    elif (id_ := SnapshotId.parse(text)) is not None:
        found = [id_] if id_ in history.snapshots else []
    else:
        pinned = history.pins.get(text)
        found = [pinned] if pinned in history.snapshots and pinned is not None else []
    choices = sorted(found)
    if len(choices) == 1:
        return choices[0]
    if choices:
        # The live one is not preferred in silence: both are "step 20", and a guess would be right until it is wrong.
        shorts = [id_.short for id_ in choices]
        shown = ", ".join(
            f"{id_.short if shorts.count(id_.short) == 1 else id_} ({'live' if id_ in history.live else 'abandoned'})"
            for id_ in choices
        )
        raise NoSnapshot(f"{history.url}: {text}: {len(choices)} snapshots have this name: {shown}; name one of them")
    raise NoSnapshot(f"{history.url}: {text}: no such snapshot; {_there_is(history)}")


def _there_is(history: History) -> str:
    if not history.snapshots:
        return "the store holds none"
    ids = sorted(history.snapshots)
    shown = ", ".join(id_.short for id_ in ids[-10:])
    pins = f"; pins: {', '.join(sorted(history.pins))}" if history.pins else ""
    return f"there {'is' if len(ids) == 1 else 'are'} {len(ids)}: {'… ' if len(ids) > 10 else ''}{shown}{pins}"


def _document(key: str, data: bytes) -> RunDoc | Snapshot | PinDoc:
    """What lies under a key of runs/, snapshots/ or pins/. Raises DamagedError."""
    if key.startswith(RUNS):
        doc = unseal(data, RunDoc, key=key)
        _same(key, f"{RUNS}{doc.run}.json")
        return doc
    if key.startswith(SNAPSHOTS):
        snapshot = unseal(data, Snapshot, key=key)
        _same(key, SnapshotName(snapshot.id, snapshot.revision).key)
        return snapshot
    pin = unseal(data, PinDoc, key=key)
    _same(key, f"{PINS}{pin.name}.json")
    return pin


def _same(key: str, found: str) -> None:
    if key != found:
        text = f"{key}: holds the document that belongs at {found}; was it renamed or copied by hand?"
        raise DamagedError(text, key=key, expected=key, found=found)


def _missing(store: Store, snapshot: Snapshot, entries: Mapping[str, Entry]) -> str | None:
    for part in snapshot.parts:
        if part.key not in entries and not there(store, part.key):
            return part.key
    return None
