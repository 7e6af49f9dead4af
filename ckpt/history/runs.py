"""Runs and the fence: who may write here, and how a second job notices (PROTOCOL.md §3).

A run's document is written before its first pack is read or written. A crash
  before the document  leaves nothing;
  after it             leaves a run without a commit, which changes nothing: it only takes a generation.

Nothing here locks. Every object carries its run's id, so two jobs that both believe in themselves never mix; the older
one finds the newer one's document before its next snapshot, and stops.
"""

from __future__ import annotations

import functools
import logging
import os
import platform
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from ckpt.errors import DamagedError, StoreInUse
from ckpt.format.manifest import (
    ENCRYPTED_FORMAT,
    FORMAT,
    MAX_DOCUMENT,
    Alive,
    Holder,
    PruneDoc,
    RunDoc,
    StoreDoc,
    seal,
    unseal,
)
from ckpt.format.names import (
    PACKS,
    PARTS,
    PRUNES,
    RUNS,
    SNAPSHOTS,
    STORE_KEY,
    RunId,
    SnapshotId,
    SnapshotName,
    alive_key,
    parse_run_key,
    run_key,
)
from ckpt.history.clock import Clock
from ckpt.history.copies import read
from ckpt.history.keyed import check_mark, key_of
from storage_backends.base import Entry, NotFound, Store

log = logging.getLogger(__name__)

INTERVAL = 10.0
"""Seconds between two heartbeats."""

SILENT = 3
"""A run that does not beat for so many intervals is taken over."""

MAX_GENERATION = 999_999
"""What six digits hold. A job that restarts every minute gets there after two years."""

_KIND = StoreDoc(FORMAT).kind

_NO_PROC = secrets.token_hex(8)  # names this very process where /proc cannot


@dataclass(frozen=True, slots=True)
class Identity:
    """One process, for ever: `pid_started` tells it from a later process with its pid, `boot` and `pid_space` (of the
    pid namespace) say whose pids these are. `job`: torchrun's run id, or None."""

    host: str
    pid: int
    pid_started: str
    boot: str
    pid_space: str
    job: str | None


def identity(job: str | None) -> Identity:
    """Who this process is. `job` None or "none" (torchrun's default) names no job."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        space = os.readlink("/proc/self/ns/pid")  # noqa: PTH115 - "pid:[4026531836]" is not a path
    except OSError:
        boot = space = ""
    started = process_started(os.getpid()) or _NO_PROC
    return Identity(socket.gethostname(), os.getpid(), started, boot, space, None if job == "none" else job)


def process_started(pid: int) -> str | None:
    """When a process started, in ticks since boot; None if there is none, or it only waits to be reaped."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def ensure_store(store: Store) -> None:
    """Write store.json if it is not there. Constant bytes: whoever writes it twice, or at once, changes nothing.

    Raises:
        DamagedError: it is there and is something else.
        WrongKey: the store is behind another key, or none.
        FormatTooNew: a newer version of this library made the store.
    """
    key = key_of(store)
    try:
        doc = read(store, STORE_KEY, lambda data: unseal(data, StoreDoc, key=STORE_KEY))
    except NotFound:
        store.put(STORE_KEY, seal(StoreDoc(FORMAT) if key is None else StoreDoc(ENCRYPTED_FORMAT, key_id=key.id)))
        return
    if doc.kind != _KIND:
        text = f"{store.url}: {STORE_KEY} says {doc.kind!r}, expected {_KIND!r}; give another URL"
        raise DamagedError(text, key=STORE_KEY, expected=_KIND, found=doc.kind)
    check_mark(doc, store.url, key)


def history_exists(store: Store) -> bool:
    """Whether there is a snapshot, readable or not: something a job that starts at step 0 would leave behind."""
    return any(SnapshotName.parse(e.key) for e in store.list(SNAPSHOTS))


def newest_run(store: Store) -> RunId | None:
    """The newest run that has a document; by its name, so a damaged document counts too."""
    return _newest(store.list(RUNS))


def _newest(entries: Sequence[Entry]) -> RunId | None:
    return max((run for e in entries if (run := parse_run_key(e.key))), default=None)


def open_run(
    store: Store,
    clock: Clock,
    *,
    world_size: int,
    resumed_from: SnapshotId | None,
    who: Identity,
    interval: float = INTERVAL,
    nonce: Callable[[], str] = lambda: secrets.token_hex(4),
) -> RunId:
    """Open the run of this start of the job: called by rank 0, and broadcast.

    Whoever resumes must then ask `claimed_by_prune` before it reads: the document is its claim.

    Args:
        store: where.
        clock: for waiting on another run's heartbeat.
        world_size: number of ranks.
        resumed_from: the snapshot this run restores, if any.
        who: this process.
        interval: seconds between heartbeats, this run's and (unless its own says so) the other's.
        nonce: eight random hex digits.

    Raises:
        StoreInUse: another job is writing here: its heartbeat advances.
        StorageError: the store failed; the document may have landed, and then only takes a generation.
    """
    settled: RunId | None = None
    while (newest := _newest(runs := store.list(RUNS))) is not None and newest != settled:
        waited = _take_over(store, clock, newest, who, interval)
        settled = newest
        if not waited:
            break
    run = RunId(1 + _largest_generation(store, runs), nonce())
    if run.generation > MAX_GENERATION:
        raise DamagedError(
            f"{store.url}: expected generations up to {MAX_GENERATION}, found names of generation "
            f"{run.generation - 1}: no run can follow it; remove these objects, or give another URL",
            key=RUNS,
            expected=f"at most {MAX_GENERATION}",
            found=str(run.generation - 1),
        )
    doc = RunDoc(
        format=FORMAT,
        run=str(run),
        world_size=world_size,
        host=who.host,
        pid=who.pid,
        pid_started=who.pid_started,
        boot=who.boot,
        pid_space=who.pid_space,
        job=who.job,
        started=clock.wall(),
        resumed_from=None if resumed_from is None else str(resumed_from),
        versions=_versions(),
    )
    store.put(run_key(run), seal(doc))
    return run


def in_use(store: Store, run: RunId, why: str) -> StoreInUse:
    """The error that names the job behind `run`."""
    doc = _run_doc(store, run)
    if doc is None:
        text = f"{store.url}: {why}: run {run}, whose document cannot be read; give this job a URL of its own"
        return StoreInUse(text, run=str(run), host="?", pid=0, job=None, started=0.0)
    job = f"job {doc.job}" if doc.job else "no job id"
    try:
        started = datetime.fromtimestamp(doc.started, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError, OSError):
        started = f"at {doc.started!r}, which is no time"
    text = (
        f"{store.url}: {why}: run {run} of host {doc.host}, pid {doc.pid}, {job}, started {started}; "
        "stop one of the two jobs, or give this one a URL of its own"
    )
    return StoreInUse(text, run=str(run), host=doc.host, pid=doc.pid, job=doc.job, started=doc.started)


def claimed_by_prune(store: Store, id_: SnapshotId) -> bool:
    """Whether a prune has announced that this snapshot goes.

    Whoever resumes from or pins a snapshot writes that down first, then asks this, and gives way to a prune: that one
    announces first and looks for claims then, so it may not have seen this one.
    """
    for entry in store.list(PRUNES):
        if entry.size > MAX_DOCUMENT:
            log.warning("%s: %d bytes, and no document has more than %d; ignored", entry.key, entry.size, MAX_DOCUMENT)
            continue
        try:
            doc = read(store, entry.key, lambda data: unseal(data, PruneDoc, key=entry.key))  # noqa: B023 - called at once
        except NotFound:
            continue  # done, and everything it named is gone
        except DamagedError as error:
            # Not taken as a claim on everything: one rotten announcement would forbid every restore for ever, and
            # the harm it may do while its prune still runs is a clear NotFound.
            log.warning("%s; its claims are ignored", error)
            continue
        if str(id_) in doc.snapshots:
            return True
    return False


def put_alive(store: Store, run: RunId, beat: int, *, ended: bool, interval: float = INTERVAL) -> None:
    """Say that `run` lives: the one object that is rewritten."""
    store.put(alive_key(run), seal(Alive(FORMAT, str(run), beat, ended, interval)))


class Heartbeat:
    """Beats for a run on a thread of its own: a put may block the writer for longer than three intervals.

    A beat that fails is tried again at the next interval; what a dead heartbeat costs is that another job may take
    over, which the fence makes harmless.
    """

    def __init__(self, store: Store, run: RunId, interval: float = INTERVAL) -> None:
        self._store, self._run, self._interval = store, run, interval
        self._stop = threading.Event()
        self._ended = False
        self._thread = threading.Thread(target=self._beat, name=f"ckpt-heartbeat-{run}", daemon=True)

    def start(self) -> None:
        """The first beat is put at once, from the thread."""
        self._thread.start()

    def stop(self, ended: bool, timeout: float = 5.0) -> None:
        """Stop beating; `ended`: say that this run is over, so that the next one need not wait. Returns after at most
        `timeout` seconds, whatever the store does; a run not marked as ended is merely taken over later."""
        self._ended = ended
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout)

    def _beat(self) -> None:
        beat = 0
        while True:
            stopping = self._stop.is_set()
            # The last beat is put here too, not by stop(): one writer, so an earlier put cannot overtake it.
            if not stopping or self._ended:
                try:
                    put_alive(self._store, self._run, beat, ended=stopping and self._ended, interval=self._interval)
                except Exception as error:  # whatever it is, MemoryError too: the job lives, and should say so again
                    log.warning("heartbeat of run %s: %r", self._run, error)
            if stopping:
                return
            beat += 1
            self._stop.wait(self._interval)


def _take_over(store: Store, clock: Clock, run: RunId, who: Identity, interval: float) -> bool:
    """Return once `run` may be taken over; whether that took a wait. Raises StoreInUse if it lives."""
    doc = _run_doc(store, run)
    if doc is not None and (_same_process(doc, who) or _same_job(doc, who) or dead(doc, who)):
        return False
    first = _alive(store, run)
    if first is not None and first.ended:
        return False
    period = interval if first is None else min(max(first.interval, 0.0), 6 * interval)
    deadline = clock.monotonic() + SILENT * period
    while (left := deadline - clock.monotonic()) > 0:
        clock.sleep(min(period / 4, left))
        now = _alive(store, run)
        if now is not None and now.ended:
            break
        if now is not None and (first is None or now.beat != first.beat):
            raise in_use(store, run, "another job writes here, its heartbeat advances")
    return True


def _same_process(doc: RunDoc, who: Identity) -> bool:
    return (doc.host, doc.pid, doc.pid_started, doc.boot, doc.pid_space) == (
        who.host, who.pid, who.pid_started, who.boot, who.pid_space,
    )  # fmt: skip


def _same_job(doc: RunDoc, who: Identity) -> bool:
    return who.job not in (None, "none") and doc.job == who.job


def dead(doc: RunDoc | Holder, who: Identity) -> bool:
    """Whether it is a process of this host that is no more. Another boot or pid namespace proves nothing: two machines
    may share a name, and a container cannot see its neighbour's processes; those must fall silent."""
    mine = (doc.host, doc.boot, doc.pid_space) == (who.host, who.boot, who.pid_space)
    return bool(who.boot) and mine and process_started(doc.pid) != doc.pid_started


def _run_doc(store: Store, run: RunId) -> RunDoc | None:
    try:
        doc = read(store, run_key(run), lambda data: unseal(data, RunDoc, key=run_key(run)))
    except (NotFound, DamagedError):
        return None
    return doc if doc.run == str(run) else None  # another run's under this name says nothing of this one


def _alive(store: Store, run: RunId) -> Alive | None:
    try:
        doc = read(store, alive_key(run), lambda data: unseal(data, Alive, key=alive_key(run)))
    except (NotFound, DamagedError):
        return None
    return doc if doc.run == str(run) else None


def _largest_generation(store: Store, runs: Sequence[Entry]) -> int:
    """The largest generation that any name tells of, whether or not its run's document is (still) there. `runs`: what
    lies under runs/."""
    largest = 0
    for prefix in (RUNS, SNAPSHOTS, PARTS, PACKS):
        for entry in runs if prefix == RUNS else store.list(prefix):
            run = RunId.parse(entry.key[len(prefix) :][:15])
            if run is not None:
                largest = max(largest, run.generation)
    return largest


@functools.cache  # finding them out is slower than all the rest of opening a run
def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("incremental-ckpt", "torch"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
