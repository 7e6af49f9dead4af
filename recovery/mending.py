"""`verify` where a store holds copies: each copy by itself, before the store as a whole (no torch).

A copy that is bad while another is whole loses nothing, and is found by nobody who reads only the first whole one. So
every place is looked at: what it lacks, every document and part, the length of every pack; deep, every byte. What is
bad everywhere is left to the check of the whole store, which tells what it costs; it reads around the copies that were
found bad here (`Around`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from ckpt.errors import CheckpointError
from ckpt.format.names import ALIVE, PRUNES, SNAPSHOTS, PackName, PartName, SnapshotId, SnapshotName
from ckpt.history.behind import behind
from ckpt.history.clock import SystemClock
from ckpt.history.copier import bring_over
from ckpt.history.copies import flaw_of, mend_one, read
from ckpt.history.levelling import announced_keys, writing_order
from ckpt.history.reading import there
from recovery.deep import pack_problem
from recovery.findings import Finding, Level
from recovery.parallel import in_threads
from recovery.read import check_snapshot
from storage_backends.base import Buffer, Entry, NotFound, StorageError, Store
from storage_backends.copies import Copied, Slips
from storage_backends.tiered import TieredStore


@dataclass(slots=True)
class CopyCheck:
    """One look at all places. `bad`: key → names of the places whose copy is bad, once `findings` is through."""

    store: Copied
    packs: bool
    only: SnapshotId | None
    piece: int
    threads: int
    bad: dict[str, set[str]] = field(default_factory=dict)
    sizes: dict[str, dict[str, int]] = field(default_factory=dict)

    def findings(self, *, repair: bool) -> Iterator[Finding]:
        """What is wrong with single copies, of which another is whole; with `repair` it is mended.

        Raises:
            StorageError: a place could be listed, and then not read.
        """
        for name, place in self.store.places.items():
            try:
                self.sizes[name] = {entry.key: entry.size for entry in place.list("")}
            except StorageError as error:
                text = f"{place.url}: it does not answer, so the copies there were not looked at: {error}"
                yield Finding("error", "", None, None, None, text)
        digests, lengths, needed = self._named()
        keys = needed if self.only is not None else {key for held in self.sizes.values() for key in held}
        doomed = announced_keys(self.store)
        todo = sorted((k for k in keys - doomed if not k.startswith((ALIVE, PRUNES))), key=writing_order)

        def one(key: str) -> tuple[str, dict[str, str]]:
            return key, self._flaws(key, digests.get(key), lengths.get(key))

        flaws = {key: found for key, found in in_threads(todo, one, threads=self.threads) if found}
        for key in sorted(flaws, key=writing_order):  # a snapshot is mended after everything it names
            yield from self._judged(key, flaws[key], digests.get(key), repair)
        yield from self._behind(repair)

    def _named(self) -> tuple[dict[str, str], dict[str, int], set[str]]:
        """What snapshots say: digests of parts, lengths of packs; and every key that belongs to those looked at."""
        digests: dict[str, str] = {}
        lengths: dict[str, int] = {}
        needed: set[str] = set()
        for key in sorted({key for held in self.sizes.values() for key in held if key.startswith(SNAPSHOTS)}):
            name = SnapshotName.parse(key)
            if name is None or (self.only is not None and name.id != self.only):
                continue
            needed.add(key)
            try:
                snapshot = read(self.store, key, partial(check_snapshot, key=key)).snapshot
            except (NotFound, CheckpointError):
                continue  # the check of the whole store tells
            digests |= {ref.key: ref.digest for ref in snapshot.parts}
            lengths |= dict(snapshot.packs)
            needed |= digests.keys() | lengths.keys()
        return digests, lengths, needed

    def _flaws(self, key: str, digest: str | None, length: int | None) -> dict[str, str]:
        """Name of place → what is wrong with its copy; nothing if the object is gone from all of them."""
        found: dict[str, str] = {}
        gone = 0
        for name, sizes in self.sizes.items():
            place, size = self.store.places[name], sizes.get(key)
            if size is None:
                if there(place, key):
                    continue  # written since it was listed
                gone += 1
                if self.store.everywhere:
                    found[name] = "it is not there"
            elif (flaw := self._flaw(place, key, size, digest, length)) is not None:
                found[name] = flaw
        return {} if gone == len(self.sizes) else found

    def _flaw(self, place: Store, key: str, size: int, digest: str | None, length: int | None) -> str | None:
        if PackName.parse(key) is None:
            try:
                return flaw_of(key, place.get(key), digest)
            except NotFound:
                return None  # removed since it was listed
        if length is not None and size != length:
            return f"expected {length} bytes, found {size}"
        return pack_problem(place, key, size, self.piece) if self.packs else None

    def _judged(self, key: str, flaws: Mapping[str, str], digest: str | None, repair: bool) -> Iterator[Finding]:
        whole = [name for name in self.sizes if name not in flaws and there(self.store.places[name], key)]
        mended: set[str] = set()
        how = "'ckpt verify --repair' mends it"
        if repair and whole:
            how = "no copy is known to be the right one"
            try:
                mended = {one.place for one in mend_one(self.store, key, digest)}
            except StorageError as error:
                how = f"mending it failed: {error}"
        for name, flaw in flaws.items():
            url = self.store.places[name].url
            if name in mended:
                yield _about("mended", key, f"{key}: mended on {url}, where {flaw}")
                continue
            self.bad.setdefault(key, set()).add(name)
            if whole:
                yield _about("error", key, f"{key}: the copy on {url} is bad ({flaw}); elsewhere it is not; {how}")

    def _behind(self, repair: bool) -> Iterator[Finding]:
        """Of two tiers: what the durable one lacks is no damage, but can be mended."""
        if not isinstance(self.store, TieredStore) or len(self.sizes) < len(self.store.places):
            return
        late = [one for one in behind(self.store) if self.only is None or one.name.id == self.only]
        why = bring_over(self.store, SystemClock()) if repair and late else None
        still = {one.name.key for one in behind(self.store)} if repair else {one.name.key for one in late}
        for one in late:
            if one.name.key not in still:
                text = f"{one.name.key}: copied to {self.store.durable.url}"
                yield _about("mended", one.name.key, text)
            elif not repair:
                text = f"{one.name.key}: not yet on {self.store.durable.url}; the job, or --repair, copies it"
                yield _about("note", one.name.key, text)
        if why is not None:
            yield Finding("error", "", None, None, None, f"{self.store.durable.url} is behind: {why}")

    def around(self) -> Store:
        """The store without the copies that are bad."""
        return Around(self.store, self.bad, self.sizes)


@dataclass(slots=True)
class Around:
    """A store of copies, read around some of them. What all places have bad is read as the store itself reads it."""

    inner: Copied
    bad: Mapping[str, set[str]]
    sizes: Mapping[str, Mapping[str, int]]
    slips: Slips = field(default_factory=Slips)

    @property
    def url(self) -> str:
        return self.inner.url

    @property
    def places(self) -> Mapping[str, Store]:
        return self.inner.places

    @property
    def everywhere(self) -> bool:
        return self.inner.everywhere

    def copies(self, key: str) -> Mapping[str, Store]:
        return self.inner.copies(key)

    def over(self, wrap: Callable[[Store], Store]) -> Store:
        return self.inner.over(wrap)

    def put(self, key: str, data: Buffer) -> None:
        self.inner.put(key, data)

    def get(self, key: str) -> bytes:
        return self._place(key).get(key)

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        return self._place(key).get_range(key, start, stop)

    def list(self, prefix: str) -> Sequence[Entry]:
        return [self._sized(entry) for entry in self.inner.list(prefix)]

    def delete(self, keys: Sequence[str]) -> None:
        self.inner.delete(keys)

    def _good(self, key: str) -> str | None:
        """The name of the first place with a good copy, of an object that has bad ones; None: of any other."""
        bad = self.bad.get(key)
        if bad is None:
            return None
        return next((n for n in self.copies(key) if n not in bad and key in self.sizes.get(n, ())), None)

    def _place(self, key: str) -> Store:
        name = self._good(key)
        return self.inner if name is None else self.places[name]

    def _sized(self, entry: Entry) -> Entry:
        name = self._good(entry.key)
        return entry if name is None else replace(entry, size=self.sizes[name][entry.key])


def _about(level: Level, key: str, text: str) -> Finding:
    name = PackName.parse(key) or PartName.parse(key)
    snapshot = SnapshotName.parse(key)
    id_ = name.id if name is not None else None if snapshot is None else snapshot.id
    return Finding(level, key, None if id_ is None else id_.step, None if name is None else name.rank, None, text)
