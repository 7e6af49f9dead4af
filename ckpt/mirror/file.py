"""One mirror file, as its owner writes it.

A slot goes  dirty → bytes of the state → what they are → whole.  Killed anywhere in between, the slot is dirty, and the
other one, which nobody touches meanwhile, is as whole as it was. Nothing is synced: pages of a dead process are the
kernel's, and what a power cut takes is on the store.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import secrets
import threading
import weakref
from collections.abc import Callable

import numpy as np

from ckpt.format.names import SnapshotId
from ckpt.history.runs import Identity
from ckpt.mirror import owners
from ckpt.mirror.folders import Folder, file_name
from ckpt.mirror.records import (
    ALIGN,
    DATA,
    DIRTY,
    HEAD,
    MAGIC,
    OWNER,
    SLOT_PAGES,
    WHOLE,
    Described,
    Head,
    SlotRecord,
    read_head,
    read_owner,
    read_slot,
    sealed,
)
from ckpt.mirror.slots import PIECE, Bytes, same_memory


class MirrorFile:
    """A mapped file with two slots. One thread fills slots; another may make their pages ready.

    Attributes:
        name: in its folder; `capacity`: bytes a slot holds; `store`, `rank`: whose it is.
        ready: by slot, set once its pages are there, or `failed` is.
        failed: why the pages could not be had.
    """

    def __init__(self, folder: Folder, name: str, fd: int, head: Head) -> None:
        self.name = name
        self.capacity, self.store, self.rank = head.capacity, head.store, head.rank
        self.ready = (threading.Event(), threading.Event())
        self.failed: OSError | None = None
        self._folder, self._fd, self._head = folder, fd, head
        self._layouts: list[tuple[int, int, str] | None] = [None, None]
        end = head.slots[1] + max(head.capacity, 1)
        self._mapping = mmap.mmap(fd, end, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        # Not for memory, as with private buffers (shared pages are never copied): a forked DataLoader worker has no
        # business in here, and would keep the pages of a file that is removed.
        for advice in ("MADV_DONTFORK", "MADV_HUGEPAGE"):
            with contextlib.suppress(AttributeError, OSError):
                self._mapping.madvise(getattr(mmap, advice))
        whole: Bytes = np.frombuffer(self._mapping, dtype=np.uint8)
        self._pages = whole[:DATA]
        # A slice of nothing begins nowhere in particular: cut from one byte, it lies where its slot lies.
        spans = [whole[start : start + max(head.capacity, 1)] for start in head.slots]
        self.slots = (spans[0][: head.capacity], spans[1][: head.capacity])

    @classmethod
    def create(cls, folder: Folder, *, store: str, rank: int, capacity: int, who: Identity, now: float) -> MirrorFile:
        """A new file with two dirty slots, whose pages are not there yet (`reserve`)."""
        name = file_name(rank, secrets.token_hex(4))
        room = -(-max(capacity, 1) // ALIGN) * ALIGN  # slots of nothing lie apart too
        head = Head(store, rank, capacity, (DATA, DATA + room))
        fd = folder.create_file(name)
        try:
            owners.lock(fd, wait=True)
            os.ftruncate(fd, DATA + 2 * room)
            # A file that was only truncated promises pages that the file system may not have, and answers with a
            # signal that kills: every page written here was reserved first.
            os.posix_fallocate(fd, 0, DATA)
            os.pwrite(fd, MAGIC + sealed(head), HEAD)
            os.pwrite(fd, DIRTY + sealed(owners.owner_of(who, now)), OWNER)
            return cls(folder, name, fd, head)
        except BaseException:
            os.close(fd)
            folder.unlink(name)
            raise

    @classmethod
    def adopt(cls, folder: Folder, name: str, *, store: str, rank: int, who: Identity, now: float) -> MirrorFile:
        """Take over the file of a process that is no more, both slots as they are.

        Raises:
            ValueError: it is another rank's or store's, its owner may still write to it, or it is damaged.
            OSError: as usual.
        """
        fd = folder.open_file(name, write=True)
        try:
            head = read_head(fd)
            if (head.store, head.rank) != (store, rank):
                raise ValueError(f"{name} is rank {head.rank}'s of store {head.store}, not rank {rank}'s of {store}")
            unlocked, owner = owners.lock(fd), read_owner(fd)
            # Two who write to one file would store what neither of them captured: in doubt, a file of our own.
            if not (owners.is_me(owner, who) and unlocked):
                verdict = owners.judge(owner, who, unlocked=unlocked)
                if verdict != "dead":
                    raise ValueError(f"{name} belongs to a process that is {verdict}: {owner}")
            if os.fstat(fd).st_size < head.slots[1] + head.capacity:
                raise ValueError(f"{name} is cut: {os.fstat(fd).st_size} bytes")
            records = [read_slot(fd, number, head) for number in (0, 1)]
            os.pwrite(fd, DIRTY + sealed(owners.owner_of(who, now)), OWNER)
            if not folder.is_named(name, fd):
                raise ValueError(f"{name} was swept meanwhile")
            file = cls(folder, name, fd, head)
        except BaseException:
            os.close(fd)
            raise
        file._layouts = [None if record is None else record.layout for record in records]
        return file

    def holds(self, data: Bytes | None) -> int | None:
        """The number of the slot in which these bytes lie."""
        if data is None:
            return None
        return next((number for number, slot in enumerate(self.slots) if same_memory(slot, data)), None)

    @property
    def empty(self) -> bool:
        """Whether no slot is whole."""
        return self._layouts == [None, None]

    def reserve(self, number: int) -> None:
        """Have the file system set the slot's pages aside. What is in them stays.

        Raises:
            OSError: there is no room (ENOSPC).
        """
        os.posix_fallocate(self._fd, self._head.slots[number], max(self.capacity, 1))

    def touch(self, number: int, stopped: Callable[[], bool], *, keep: bool) -> None:
        """Have every page of a slot in memory and mapped, so that the next copy does not wait for it. With `keep`, what
        is in them stays; without, only pages nobody wrote to may be touched."""
        data = self.slots[number]
        for start in range(0, data.nbytes, PIECE):
            if stopped():
                return
            page = data[start : start + PIECE : mmap.PAGESIZE]
            if keep:
                page.max()
            else:
                page[:] = 0

    def make_ready(self, numbers: tuple[int, ...], stopped: Callable[[], bool], *, keep: bool) -> None:
        """Reserve, then touch, then say so; never raises. All slots are reserved before one is touched: half a mirror
        is none."""
        try:
            for number in numbers:
                self.reserve(number)
            for number in numbers:
                self.touch(number, stopped, keep=keep)
                self.ready[number].set()
        except OSError as error:
            self.failed = error
            for number in numbers:
                self.ready[number].set()

    def mark_dirty(self, number: int) -> None:
        """The slot is about to change."""
        self._word(number, DIRTY)
        self._layouts[number] = None

    def mark_whole(
        self, number: int, *, id_: SnapshotId, world_size: int, described: Described, now: float
    ) -> None:  # fmt: skip
        """The slot's bytes are all there, and this is what they are. It is dirty until the last store to memory here.

        Raises:
            OSError: no room for the layout; the slot stays dirty.
        """
        layout = self._put_layout(number, described)
        record = SlotRecord(str(id_.run), id_.step, self.rank, world_size, described.nbytes, layout, now)
        at, body = SLOT_PAGES[number], sealed(record)
        self._pages[at + 8 : at + 8 + len(body)] = np.frombuffer(body, np.uint8)
        self._layouts[number] = layout
        self._word(number, WHOLE)

    def give_back(self, number: int) -> None:
        """Return a slot's memory to the system; it reads as zeros after that."""
        self.mark_dirty(number)
        start, stop = self._head.slots[number], self._head.slots[number] + max(self.capacity, 1)
        with contextlib.suppress(AttributeError, OSError):  # a file system that cannot: it goes with the file
            self._mapping.madvise(mmap.MADV_REMOVE, start, -(-(stop - start) // ALIGN) * ALIGN)

    def remove(self) -> None:
        """Remove the file. Arrays keep their memory; it returns to the system with the last of them, also where a
        forked process holds the descriptor."""
        self._folder.unlink(self.name)
        if self._fd >= 0:
            weakref.finalize(self._mapping, _empty, os.dup(self._fd), os.getpid()).atexit = False

    def close(self) -> None:
        """Write no more; the file stays, for whoever comes next."""
        if self._fd >= 0:
            owners.unlock(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _word(self, number: int, word: bytes) -> None:
        at = SLOT_PAGES[number]
        self._pages[at : at + 8].view(np.uint64)[:] = np.frombuffer(word, np.uint64)  # one store, not eight

    def _put_layout(self, number: int, described: Described) -> tuple[int, int, str]:
        """Where the layout lies. Mostly both slots have the same one; a new one goes where the other slot's is not."""
        other = self._layouts[1 - number]
        if other is not None and other[2] == described.digest:
            return other
        start = self._head.slots[1] + -(-max(self.capacity, 1) // ALIGN) * ALIGN
        at, size = start, len(described.blob)
        if other is not None and other[0] < at + size:
            at = other[0] + other[1]
        view = memoryview(described.blob)
        while view:
            written = os.pwrite(self._fd, view, at + size - len(view))
            if not written:
                raise OSError(errno.ENOSPC, "nothing written")
            view = view[written:]
        return at, size, described.digest


def _empty(fd: int, pid: int) -> None:
    if os.getpid() == pid:  # a forked child may come by here too, and the file is not its
        with contextlib.suppress(OSError):
            os.ftruncate(fd, 0)
    os.close(fd)
