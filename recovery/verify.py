"""Is everything on the store what was written? (no torch)

Shallow: every document read and its digest checked, every part that a snapshot names, whether the parts make that
snapshot (coverage, ownership, totals), every pack there and of the right length. Deep: every byte of every pack
against the digest in its name, every chunk of every snapshot rebuilt against its digest, every record of the journal.

One thing that is wrong gives one finding, which names everything that depends on it. A single flipped bit in any
object but a heartbeat is found by the deep check: each object is digested by itself, by its name, or by whoever names
it; packs and parts that nobody names too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import zstandard

from ckpt.errors import DamagedError
from ckpt.format.manifest import (
    MAX_DOCUMENT,
    Blob,
    Part,
    PartRef,
    PinDoc,
    PruneDoc,
    RunDoc,
    Snapshot,
    StoreDoc,
    parse_snapshot,
    read_part,
    unseal,
)
from ckpt.format.names import (
    ALIVE,
    JOURNAL,
    PACKS,
    PARTS,
    PINS,
    PRUNES,
    RUNS,
    SNAPSHOTS,
    STORE_KEY,
    PackName,
    PartName,
    SegmentName,
    SnapshotId,
    SnapshotName,
    parse_run_key,
    run_key,
)
from ckpt.history.assemble import build_snapshot
from recovery.deep import chains, check_chains, pack_problem, pieces
from recovery.fetch import fetch
from recovery.findings import Finding, Trouble, of_error
from recovery.mending import CopyCheck
from recovery.parallel import THREADS, in_threads
from recovery.read import (
    Missing,
    OpenSnapshot,
    Pruned,
    check_part,
    check_snapshot,
    open_snapshot,
    read_part_bytes,
    stored_value,
)
from recovery.segments import segment_findings
from recovery.shards import MEMORY
from storage_backends.base import NotFound, Store
from storage_backends.copies import Copied

__all__ = ["Finding", "verify"]


def verify(
    store: Store,
    *,
    packs: bool = False,
    deep: bool = False,
    only: SnapshotId | None = None,
    repair: bool = False,
    memory: int = MEMORY,
    threads: int = THREADS,
) -> Iterator[Finding]:
    """Check the store, or one snapshot and what it needs; yields what is found as it is found. Writes nothing, unless
    it is to `repair`: then bad copies are mended from whole ones, where the store holds copies.

    Three depths: every document, and that packs are there and of the right length; `packs`: the digests of all their
    bytes too; `deep`: every chunk is rebuilt besides, and every record of a journal is read.

    Beside a live job, what vanishes while it is being checked is taken for pruned if its snapshot vanished too; where a
    compacted revision has taken its place, that one is checked instead.

    Raises:
        StorageError: the store does not answer: nothing can be said.
        FormatTooNew: a newer version wrote here.
    """
    packs |= deep
    if isinstance(store, Copied):
        piece = max(memory // threads, 1)
        for place in store.places.values():  # a durable tier of several places: its copies first
            if isinstance(place, Copied):
                yield from CopyCheck(place, packs, only, piece, threads).findings(repair=repair)
        copies = CopyCheck(store, packs, only, piece, threads)
        yield from copies.findings(repair=repair)
        store = copies.around()
    check = _Check(store, only, memory, threads, {entry.key: entry.size for entry in store.list("")})
    yield from check.documents()
    if packs:
        check.packs()
    yield from check.snapshots_and_parts()
    if only is None:
        yield from check.leftovers()
    if deep:
        yield from check.chunks()
        if only is None:
            yield from segment_findings(store, check.sizes, threads)
    for key, trouble in sorted(check.trouble.items()):
        yield trouble.finding(key)


@dataclass(eq=False, slots=True)
class _Check:
    """One run over a store; the methods are its stages, in order."""

    store: Store
    only: SnapshotId | None
    memory: int
    threads: int
    sizes: Mapping[str, int]
    opened: dict[str, OpenSnapshot] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)
    trouble: dict[str, Trouble] = field(default_factory=dict)
    bad_blobs: set[Blob] = field(default_factory=set)

    # --- documents ---

    def documents(self) -> Iterator[Finding]:
        """Every sealed document by its own digest, and against its own name."""
        keys = [key for key in self.sizes if self._is_document(key)]
        for key in [key for key in keys if self.sizes[key] > MAX_DOCUMENT]:
            keys.remove(key)
            text = f"{key}: {self.sizes[key]} bytes, and no document has more than {MAX_DOCUMENT}; not read"
            yield Finding("error", key, None, None, None, text)
        pins: dict[str, str] = {}
        for key, data in self._read_all(keys):
            if data is None:
                continue  # removed since it was listed
            try:
                self._document(key, data, pins)
            except DamagedError as error:
                name = SnapshotName.parse(key)
                yield of_error(error, key, name.id if name else None)
        if self.only is not None:
            if all(opened.id != self.only for opened in self.opened.values()):
                key = SnapshotName(self.only).key
                if key not in self.sizes:
                    yield Finding(
                        "error", key, self.only.step, None, None, f"{key}: it is not there", (self.only.step,)
                    )
            return
        yield from self._cross_checks(pins)

    def _is_document(self, key: str) -> bool:
        name = SnapshotName.parse(key)
        if self.only is not None:
            return name is not None and name.id == self.only
        return key == STORE_KEY or name is not None or (key.startswith((RUNS, PINS, PRUNES)) and not self._foreign(key))

    def _document(self, key: str, data: bytes, pins: dict[str, str]) -> None:
        if key == STORE_KEY:
            unseal(data, StoreDoc, key=key)
        elif key.startswith(RUNS):
            _named(key, f"{RUNS}{unseal(data, RunDoc, key=key).run}.json")
        elif key.startswith(PINS):
            pin = unseal(data, PinDoc, key=key)
            pins[_named(key, f"{PINS}{pin.name}.json")] = pin.snapshot
        elif key.startswith(PRUNES):
            unseal(data, PruneDoc, key=key)
        else:
            self.opened[key] = check_snapshot(data, key)

    def _cross_checks(self, pins: dict[str, str]) -> Iterator[Finding]:
        ids = {opened.id for opened in self.opened.values()}
        if STORE_KEY not in self.sizes and ids:
            yield Finding("error", STORE_KEY, None, None, None, f"{STORE_KEY}: it is not there; every store has one")
        for key in sorted({run_key(id_.run) for id_ in ids}):
            if key not in self.sizes:
                text = f"{key}: it is not there, though this run has snapshots: what it resumed from is unknown"
                yield Finding("error", key, None, None, None, text)
        for key, target in sorted(pins.items()):
            if parse_snapshot(target) not in ids:
                yield Finding("warning", key, None, None, None, f"{key}: the snapshot it pins, {target}, is not there")
        for key, size in self.sizes.items():
            if self._foreign(key):
                yield Finding("note", key, None, None, None, f"{key}: not an object of this format ({size} bytes)")
            elif key.startswith(PRUNES):
                yield Finding("note", key, None, None, None, f"{key}: a prune that has not finished; the next one will")

    def _foreign(self, key: str) -> bool:
        """Whether this is not the name of anything we write."""
        parsed: object
        if key.startswith(RUNS):
            parsed = parse_run_key(key)
        elif key.startswith(ALIVE):
            parsed = parse_run_key(RUNS + key.removeprefix(ALIVE))
        elif key.startswith(PACKS):
            parsed = PackName.parse(key)
        elif key.startswith(PARTS):
            parsed = PartName.parse(key)
        elif key.startswith(SNAPSHOTS):
            parsed = SnapshotName.parse(key)
        elif key.startswith(JOURNAL):
            parsed = SegmentName.parse(key)
        elif key.startswith((PINS, PRUNES)):
            parsed = (key.count("/") == 1 and key.endswith(".json")) or None
        else:
            parsed = key == STORE_KEY or None
        return parsed is None

    def _read_all(self, keys: list[str]) -> Iterator[tuple[str, bytes | None]]:
        def one(key: str) -> tuple[str, bytes | None]:
            try:
                return key, self.store.get(key)
            except NotFound:
                return key, None

        yield from in_threads(sorted(keys), one, threads=self.threads)

    # --- snapshots, their parts, and whether their packs are there ---

    def snapshots_and_parts(self) -> Iterator[Finding]:
        for _, opened in sorted(self.opened.items(), key=lambda item: (item[1].id, item[1].snapshot.revision)):
            yield from self._snapshot(opened)

    def _snapshot(self, opened: OpenSnapshot) -> Iterator[Finding]:
        snapshot, found = opened.snapshot, []
        self._look_for_packs(opened)
        parts: list[tuple[PartRef, Part]] = []
        for part in in_threads(range(snapshot.world_size), lambda rank: self._part(opened, rank), threads=self.threads):
            if isinstance(part, Finding):
                found.append(part)
            else:
                parts.append((snapshot.parts[part.rank], part))
                self._who_needs(part)
        if found and self._pruned(opened):
            self._forget(opened)
            yield self._went(opened)
            for newer in self._replaced([opened]):
                yield from self._snapshot(newer)
            return
        if found:
            self.broken.add(opened.key)
            yield from sorted(found, key=lambda finding: finding.key)
            return
        try:
            made = build_snapshot(parts)
        except DamagedError as error:
            yield of_error(error, error.key, opened.id)
            return
        if made != snapshot:
            field_ = next(f for f in Snapshot.__struct_fields__ if getattr(made, f) != getattr(snapshot, f))
            text = f"{opened.key}: its parts make another snapshot: {field_} is {getattr(made, field_)!r}, not "
            text += f"{getattr(snapshot, field_)!r}"
            yield Finding("error", opened.key, opened.id.step, None, None, text, (opened.id.step,))

    def _part(self, opened: OpenSnapshot, rank: int) -> Part | Finding:
        ref = opened.snapshot.parts[rank]
        try:
            part = check_part(read_part_bytes(self.store, opened.snapshot, rank), opened.snapshot, rank)
            for name in part.values:
                stored_value(part, name)
            return part
        except Missing as error:
            text = f"{opened.key} is debris: {error}"
            return Finding("error", ref.key, opened.id.step, rank, None, text, (opened.id.step,))
        except DamagedError as error:
            return of_error(error, ref.key, opened.id, rank)

    def _look_for_packs(self, opened: OpenSnapshot) -> None:
        for key, length in opened.snapshot.packs:
            size = self.sizes.get(key)
            if size is None:  # newer than our listing, perhaps
                folder = key.rpartition("/")[0] + "/"
                size = next((entry.size for entry in self.store.list(folder) if entry.key == key), None)
            if size is None:
                self.trouble.setdefault(key, Trouble("it is not there", missing=True))
            elif size != length:
                self.trouble.setdefault(key, Trouble(f"expected {length} bytes, found {size}"))
            if key in self.trouble:
                self.trouble[key].named_by.add(opened.id)

    def _who_needs(self, part: Part) -> None:
        """Which chunks of a part need bytes that are bad, of packs with something wrong."""
        if not any(key in self.trouble for key, _ in part.packs):
            return
        uses: dict[Blob, set[str]] = {}
        for _, leaf, blobs, _, _ in pieces(part):
            for blob in blobs:
                if blob.pack in self.trouble:
                    uses.setdefault(blob, set()).add(leaf)
        unknown = [blob for blob in uses if blob not in self.bad_blobs and not self.trouble[blob.pack].missing]
        bad = fetch(self.store, unknown).faults.keys() | {b for b in uses if self.trouble[b.pack].missing}
        self.bad_blobs |= bad
        for blob in uses.keys() & self.bad_blobs:
            for leaf in uses[blob]:
                self.trouble[blob.pack].dependents.add((part.id, part.rank, leaf))

    def _pruned(self, opened: OpenSnapshot) -> bool:
        return not self._there(opened.key)

    def _there(self, key: str) -> bool:
        try:
            self.store.get(key)
        except NotFound:
            return False
        return True

    def _forget(self, opened: OpenSnapshot) -> None:
        """The packs that a snapshot which is gone named may be gone rightly."""
        for key, _ in opened.snapshot.packs:
            if (trouble := self.trouble.get(key)) is not None:
                trouble.named_by.discard(opened.id)
                if trouble.missing and not trouble.named_by:
                    del self.trouble[key]

    @staticmethod
    def _went(opened: OpenSnapshot) -> Finding:
        text = f"{opened.key}: pruned while it was being checked"
        return Finding("note", opened.key, opened.id.step, None, None, text)

    def _replaced(self, gone: Iterable[OpenSnapshot]) -> list[OpenSnapshot]:
        """The revisions, not looked at yet, that have taken the place of these."""
        found: list[OpenSnapshot] = []
        for opened in gone:
            with contextlib.suppress(Pruned, DamagedError):  # gone for good; damaged: the next look will say so
                newer = open_snapshot(self.store, opened.id)
                if newer.key not in self.opened:
                    self.opened[newer.key] = newer
                    found.append(newer)
        return found

    # --- what nobody names ---

    def leftovers(self) -> Iterator[Finding]:
        """Parts and packs that no readable snapshot names: crashed or unfinished saves. Parts are checked here, packs
        by `packs`, since even a leftover is either what was written or damaged."""
        named = {ref.key for opened in self.opened.values() for ref in opened.snapshot.parts}
        needed = {key for opened in self.opened.values() for key, _ in opened.snapshot.packs}
        parts = [key for key in self.sizes if PartName.parse(key) is not None and key not in named]
        for key, data in self._read_all(parts):
            if data is not None:
                yield _leftover_part(key, data)
        for key in sorted(self.sizes):
            name = PackName.parse(key)
            if name is not None and key not in needed and key not in self.trouble:
                text = f"{key}: no snapshot needs it; a save that has not finished, or a leftover that prune removes"
                yield Finding("note", key, name.id.step, name.rank, None, text)

    # --- deep ---

    def packs(self) -> None:
        """Every byte of every pack; what is wrong goes to `trouble`, whose dependents the parts will tell."""
        if self.only is None:
            keys = [key for key in self.sizes if PackName.parse(key) is not None]
        else:
            keys = [key for opened in self.opened.values() for key, _ in opened.snapshot.packs if key in self.sizes]

        def one(key: str) -> tuple[str, str | None]:
            return key, pack_problem(self.store, key, self.sizes[key], piece=max(self.memory // self.threads, 1))

        for key, problem in in_threads(sorted(set(keys)), one, threads=self.threads):
            if problem is not None and (self.only is not None or not self._gone_too(key)):
                self.trouble[key] = Trouble(problem)

    def _gone_too(self, key: str) -> bool:
        """Whether a pack that could not be read has been removed since it was listed, and nobody names it any more."""
        folder = key.rpartition("/")[0] + "/"
        return all(entry.key != key for entry in self.store.list(folder))

    def chunks(self) -> Iterator[Finding]:
        """Every chunk of every snapshot whose documents are whole, rebuilt."""
        whole = [opened for opened in self.opened.values() if opened.key not in self.broken]
        while whole:
            gone: dict[str, OpenSnapshot] = {}
            for rank in range(max(opened.snapshot.world_size for opened in whole)):
                todo = chains(self._parts_of(whole, rank), frozenset(self.bad_blobs))
                for finding in check_chains(self.store, todo, memory=self.memory, threads=self.threads):
                    # A prune takes snapshots before their packs: what nobody names any more may be gone rightly.
                    needing = [opened for opened in whole if opened.id.step in finding.steps]
                    pruned = [opened for opened in needing if self._pruned(opened)]
                    gone.update((opened.key, opened) for opened in pruned)
                    if len(pruned) < len(needing):
                        yield finding
            yield from map(self._went, gone.values())
            whole = self._replaced(gone.values())
            for newer in whole:
                yield from self._snapshot(newer)

    def _parts_of(self, opened: list[OpenSnapshot], rank: int) -> Iterator[Part]:
        having = [one for one in opened if rank < one.snapshot.world_size]
        for part in in_threads(having, lambda one: self._part(one, rank), threads=self.threads):
            if isinstance(part, Part):  # else it went since the first look, which has spoken of it
                yield part


def _leftover_part(key: str, data: bytes) -> Finding:
    name = PartName.parse(key)
    assert name is not None
    step, rank = name.id.step, name.rank
    try:
        part = read_part(data, key=key)
        if (part.id, part.rank) != (name.id, rank):
            raise DamagedError(f"{key}: holds the part of {part.id}, rank {part.rank}", key=key)
    except DamagedError as error:
        told = f"{error} (debris: no snapshot names it, so nothing is lost by it)"
        return Finding("warning", key, step, rank, None, told)
    # Some bits of a zstd frame mean nothing: a flip there leaves the content whole, and only writing it again shows it.
    text = zstandard.ZstdDecompressor().decompress(data)
    if zstandard.ZstdCompressor(level=3, write_checksum=True).compress(text) != data:
        told = f"{key}: no snapshot names it; its content is whole, but not in the bytes this version would write"
        return Finding("warning", key, step, rank, None, told)
    told = f"{key}: no snapshot names it; a save that has not finished, or a leftover that prune removes"
    return Finding("note", key, step, rank, None, told)


def _named(key: str, found: str) -> str:
    if key != found:
        text = f"{key}: holds the document that belongs at {found}; was it renamed or copied by hand?"
        raise DamagedError(text, key=key, expected=key, found=found)
    return key
