"""Records of the journal in the mirror's folder: one file each, so that they outlive the process.

A file is written once and never mapped; a torn one is told by the record's own digest. The oldest go when the ring is
full, and those that a newer snapshot has made needless when that is committed.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ckpt.format.names import RunId
from ckpt.mirror.folders import Folder, open_store_folder

_FILE = re.compile(
    r"rank-(?P<rank>\d{5})-(?P<run>\d{6}-[0-9a-f]{8})-(?P<previous>\d{12})-(?P<step>\d{12})\.record"
)  # fmt: skip

SPARE = 16
"""One part in so many of the file system is left to others, as with mirrors."""


@dataclass(frozen=True, slots=True, order=True)
class RecordName:
    """One record in the folder: it leads `rank` of `run` from step `previous` to `step`."""

    run: RunId
    rank: int
    previous: int
    step: int

    def __str__(self) -> str:
        return f"rank-{self.rank:05d}-{self.run}-{self.previous:012d}-{self.step:012d}.record"

    @classmethod
    def parse(cls, name: str) -> RecordName | None:
        found = _FILE.fullmatch(name)
        run = RunId.parse(found["run"]) if found else None
        if found is None or run is None:
            return None
        return cls(run, int(found["rank"]), int(found["previous"]), int(found["step"]))


class Ring:
    """The records of one rank, written by one thread. `nbytes`: what they take up."""

    def __init__(self, base: Path, store: str, rank: int, limit: int) -> None:
        self._folder = open_store_folder(base, store, create=True)
        self._rank, self._limit = rank, limit
        self._held: dict[RecordName, int] = {}
        self.nbytes = 0

    def put(self, name: RecordName, data: bytes) -> tuple[RecordName, ...]:
        """Keep a record; older ones make room, and are returned.

        Raises:
            OSError: there is no room even so.
        """
        gone: list[RecordName] = []
        while self._held and self.nbytes + len(data) > self._limit:
            gone.append(next(iter(self._held)))
            self._drop(gone[-1])
        free, total = self._folder.room()
        while self._held and free - len(data) < total // SPARE:
            gone.append(next(iter(self._held)))
            self._drop(gone[-1])
            free, total = self._folder.room()
        if free - len(data) < total // SPARE:
            raise OSError(errno.ENOSPC, f"{free} of {total} bytes are free, {len(data)} needed, a {SPARE}th left free")
        self._folder.unlink(str(name))
        fd = self._folder.create_file(str(name))
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
        except BaseException:
            self._folder.unlink(str(name))
            raise
        finally:
            os.close(fd)
        self._held[name] = len(data)
        self.nbytes += len(data)
        return tuple(gone)

    def forget(self, run: RunId, step: int) -> None:
        """Records up to `step` of `run` have served."""
        for name in [name for name in self._held if name.run == run and name.step <= step]:
            self._drop(name)

    def forget_older(self, run: RunId) -> None:
        """Whatever any rank of an older run left has served: this one stands on a snapshot of its own."""
        for text in self._folder.names():
            name = RecordName.parse(text)
            if name is not None and name.run < run:
                self.nbytes -= self._held.pop(name, 0)
                self._folder.unlink(text)

    def close(self, *, remove: bool) -> None:
        """Write no more. `remove`: the job came to its end, and nobody will come back."""
        if remove:
            for name in list(self._held):
                self._drop(name)
            with suppress(OSError):
                for text in self._folder.names():
                    found = RecordName.parse(text)
                    if found is not None and found.rank == self._rank:
                        self._folder.unlink(text)
        self._folder.close()

    def _drop(self, name: RecordName) -> None:
        self._folder.unlink(str(name))
        self.nbytes -= self._held.pop(name)


def ring_records(base: Path, store: str) -> Iterator[tuple[RecordName, Path]]:
    """Every record in the folder of a store, by its name alone."""
    try:
        with Folder.open(base) as outer, outer.sub(store) as folder:
            for text in folder.names():
                if (name := RecordName.parse(text)) is not None:
                    yield name, base / store / text
    except OSError:
        return  # not there, or not ours: it holds nothing for us


def read_ring_record(path: Path) -> bytes:
    """The bytes of a record's file. Raises OSError: gone, or not this user's own."""
    with Folder.open(path.parent.parent) as outer, outer.sub(path.parent.name) as folder:
        fd = folder.open_file(path.name)
        with os.fdopen(fd, "rb") as file:
            return file.read()
