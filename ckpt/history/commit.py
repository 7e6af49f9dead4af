"""The one moment a step begins to exist (PROTOCOL.md §4).

Packs first, then each rank's part, then the snapshot. A crash
  before a part       leaves packs nobody names; prune removes them after `grace`;
  before the snapshot leaves parts nobody names; the step never existed;
  after the snapshot  leaves a complete step.

Whoever is last writes the snapshot, rather than rank 0 after a barrier: a barrier here would be a collective on a
background thread, and would hang every rank when one dies. Two ranks that both believe to be last write the same bytes.
A put that raised may have landed, or land later; so what counts is only what is read back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ckpt.errors import DamagedError, FormatTooNew, SaveFailed
from ckpt.format.manifest import Part, PartRef, Snapshot, digest128, read_part, seal, unseal
from ckpt.format.names import PartName, SnapshotId, SnapshotName, parts_prefix
from ckpt.history.assemble import Breathe, build_snapshot, check_replicas
from ckpt.history.clock import Clock
from ckpt.history.copies import checked, read
from ckpt.history.reading import read_many
from ckpt.history.runs import claimed_by_prune, in_use, newest_run
from storage_backends.base import NotFound, Refused, StorageError, Store

STAGGER = 0.2
"""Seconds between the turns of two neighbouring ranks to list parts: about one commit on an object store, so that the
next one mostly finds the snapshot instead of listing too."""

FIRST_PAUSE, LAST_PAUSE = 0.05, 2.0
"""Seconds between two looks, growing by half each time."""

AT_FIRST, EARLY = 0.1, 0.8
"""The shares of the usual time after which the rank whose turn it is first looks for parts (the others are not done in
the very same instant), and the others for the commit: below 1, or nobody would ever see that it has become faster."""


def put_part(store: Store, id_: SnapshotId, rank: int, data: bytes) -> PartRef:
    """Store a rank's part, whose packs are all stored. Raises StorageError; the part may have landed all the same."""
    key = PartName(id_, rank).key
    store.put(key, data)
    return PartRef(key, len(data), digest128(data))


def look(store: Store, id_: SnapshotId, own: PartRef) -> Snapshot | None:
    """The commit of `id_` as this rank sees it: read, its digest holds, and it names this rank's own part by digest.

    Raises:
        StorageError: the store could not say.
    """
    key = SnapshotName(id_).key
    try:
        snapshot = read(store, key, lambda data: unseal(data, Snapshot, key=key))
    except (NotFound, DamagedError, FormatTooNew):
        return None  # damaged is not seen; writing it again writes the bytes that belong there
    return snapshot if snapshot.id == id_ and own in snapshot.parts else None


def publish(
    store: Store,
    clock: Clock,
    *,
    id: SnapshotId,  # noqa: A002 - the word every caller has for it
    rank: int,
    world_size: int,
    own: PartRef,
    wait: float,
    stopped: Callable[[], bool],
    breathe: Breathe,
    usual: float = 0.0,
    threads: int = 8,
) -> Snapshot:
    """Return once the commit of `id` is seen; write it if this rank finds all parts first.

    Rank ``step % world_size`` looks for parts at once, the others first for the snapshot, and for parts only after a
    delay that grows with their distance: a thousand ranks that finish together would else list a thousand times.
    They know when to look from the commits before: each look is a request, and most of those made earlier are wasted.
    In the good case (it takes about as long as usual) two looks are enough for each rank, and two listings for the one
    that commits: with `n` ranks, ``n + 7`` requests in all.

    Args:
        store: where all parts of this step go.
        clock: for waiting.
        id: the step.
        rank: this rank.
        world_size: number of ranks, hence of parts.
        own: this rank's part, already stored.
        wait: seconds to wait for the other ranks.
        stopped: asked before each look; True makes it the last one.
        breathe: called between parts and rows, to give way to the training thread.
        usual: seconds from a rank's part to the commit seen, of late; 0: not known, so look at once and often.
        threads: parts read at once.

    Raises:
        SaveFailed: stage "commit": not seen committed (it may still become so); stage "replicas": replicas differ.
        StoreInUse: a newer run exists, so this one must not commit.
    """
    step = _Step(store, id, rank, world_size, own, breathe, threads)
    began = clock.monotonic()
    distance = (rank - id.step) % world_size
    stagger = max(STAGGER, min(usual, LAST_PAUSE))
    turn = began + (min(2 * usual + distance * stagger, wait / 2) if distance else 0.0)
    # Before that nobody but the rank whose turn it is had a reason to commit, so it need not look for a commit first.
    alone = began + 2 * usual + stagger
    pause = min(max(FIRST_PAUSE, usual / 2), LAST_PAUSE)
    if usual and not stopped():
        clock.sleep(min((EARLY if distance else AT_FIRST) * usual, LAST_PAUSE, wait))
    while True:
        missing = "the parts of other ranks were not looked for"
        # Asked before the look: whoever gives up has looked once more since, and commits if it was the last one in.
        last = stopped()
        try:
            if distance and (seen := look(store, id, own)) is not None:
                return seen
            if last or clock.monotonic() >= turn:
                refs = step.listed()
                if isinstance(refs, str):
                    missing = refs
                elif not distance and clock.monotonic() >= alone and (seen := look(store, id, own)) is not None:
                    return seen
                else:
                    parts = step.read(refs)
                    if not isinstance(parts, str):
                        return step.commit(parts)
                    missing = parts
                    if world_size == 1:  # its put was said to have worked, and there is nobody to wait for
                        raise step.failed(missing)
        except StorageError as error:
            # The store has been asked more than once by now (retry.py). Alone, nobody else will commit; refused will
            # stay refused; else another rank may have more luck, and a look is cheap.
            if world_size == 1 or isinstance(error, Refused):
                raise step.failed(str(error)) from error
            missing = f"the last look failed: {error}"
        if last:
            raise step.failed(f"gave up waiting; {missing}")
        left = began + wait - clock.monotonic()
        if left <= 0:
            raise step.failed(f"waited {wait:g} s; {missing}")
        until_turn = turn - clock.monotonic()
        clock.sleep(min(pause, left, until_turn if until_turn > 0 else pause))
        pause = min(pause * 1.5, LAST_PAUSE)


@dataclass(frozen=True, slots=True)
class _Step:
    """The step that one rank tries to commit."""

    store: Store
    id: SnapshotId
    rank: int
    world_size: int
    own: PartRef
    breathe: Breathe
    threads: int

    def failed(self, why: str) -> SaveFailed:
        text = f"step {self.id.step}, rank {self.rank}: {SnapshotName(self.id).key} not seen committed: {why}"
        return SaveFailed(
            f"{text}; training may go on, the next save stands by itself", step=self.id.step, stage="commit"
        )

    def listed(self) -> list[str] | str:
        """The keys of all parts in order of rank; or, in words, whose are missing."""
        if self.world_size == 1:
            return [self.own.key]  # what a listing would tell is known
        names = (PartName.parse(e.key) for e in self.store.list(parts_prefix(self.id)))
        there = {n.rank for n in names if n is not None and n.revision == 0}
        if absent := [r for r in range(self.world_size) if r not in there]:
            shown = ", ".join(map(str, absent[:8])) + (" …" if len(absent) > 8 else "")
            return f"no part of rank{'s' * (len(absent) > 1)} {shown}"
        return [PartName(self.id, r).key for r in range(self.world_size)]

    def read(self, keys: list[str]) -> list[tuple[PartRef, Part]] | str:
        """All parts, decoded; or, in words, which is gone. Raises SaveFailed if one is damaged."""
        parts: list[tuple[PartRef, Part]] = []
        try:
            for key, data in read_many(self.store, keys, self.threads):
                if data is None:
                    return f"{key} is gone"
                # This rank's own bytes are compared with what it meant to store: a store may say yes and keep others.
                known = self.own if key == self.own.key else None
                parts.append(checked(self.store, key, data, partial(self._part, key, known)))
                self.breathe()
        except (DamagedError, FormatTooNew) as error:
            raise self.failed(str(error)) from error
        return parts

    def _part(self, key: str, known: PartRef | None, data: bytes) -> tuple[PartRef, Part]:
        part = read_part(data, key=key, name=known, breathe=self.breathe)
        return PartRef(key, len(data), digest128(data)), part

    def commit(self, parts: list[tuple[PartRef, Part]]) -> Snapshot:
        """Check, fence, write, look at the parts once more, read back."""
        check_replicas(parts, self.breathe)
        try:
            snapshot = build_snapshot(parts, self.breathe)
        except DamagedError as error:
            raise self.failed(str(error)) from error
        if snapshot.id != self.id or snapshot.world_size != self.world_size:
            found = f"{snapshot.id} of {snapshot.world_size} ranks"
            raise self.failed(f"expected parts of {self.id} of {self.world_size} ranks, found {found}")
        newest = newest_run(self.store)
        if newest is not None and newest > self.id.run:
            raise in_use(
                self.store, newest, f"step {self.id.step} of run {self.id.run} is not committed, a newer one is"
            )
        problem: StorageError | None = None
        try:
            self.store.put(SnapshotName(self.id).key, seal(snapshot))
        except StorageError as error:
            problem = error  # it may have landed; what follows finds out
        # Between reading the parts and writing the snapshot this process may have been stopped for hours, and a prune
        # may have taken the parts for leftovers. One that looks from now on sees the snapshot; of one that had looked
        # before, either the announcement is still there, or, when that has gone, its parts are gone, too.
        why: str | None = "a prune has announced that it goes as a leftover"
        if not claimed_by_prune(self.store, self.id):
            why = self._gone(snapshot)
        if why is not None:
            self.store.delete([SnapshotName(self.id).key])
            raise self.failed(f"{why}, and so the snapshot was withdrawn")
        seen = look(self.store, self.id, self.own)
        if seen is None:
            raise self.failed(str(problem or "written, but not there to read")) from problem
        return seen

    def _gone(self, snapshot: Snapshot) -> str | None:
        """In words, which part is not there any more."""
        listed = {e.key for e in self.store.list(parts_prefix(self.id))}
        for ref in snapshot.parts:
            if ref.key in listed:
                continue
            try:  # a listing may lag behind; only a read says that an object is gone
                self.store.get_range(ref.key, 0, 1)
            except NotFound:
                return f"{ref.key} has been removed meanwhile"
        return None
