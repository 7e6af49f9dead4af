"""The two buffers of a rank, in a file that outlives the process: what a save copies into, and a restart finds again.

A mirror is an aid, never a condition: where shared memory is too small, unsafe or switched off, the buffers are private
memory, one log line says why, and everything else goes on. What is found after a restart stays where it is until the
new process has a committed state in a file of its own (`Mirror.free` tells by the reference it is handed).
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from ckpt.format.names import SnapshotId
from ckpt.history.runs import Identity, identity
from ckpt.mirror.file import MirrorFile
from ckpt.mirror.folders import VARIABLE, Folder, folder_of, open_store_folder, store_identity
from ckpt.mirror.leftovers import sweep_store
from ckpt.mirror.records import ALIGN, DATA, Described
from ckpt.mirror.slots import Bytes, Slots

log = logging.getLogger(__name__)

SPARE = 16
"""One part in so many of the file system is left to others: NCCL and DataLoader workers live in /dev/shm too, and die
of a bus error when it is full."""


def open_mirror(
    where: str | os.PathLike[str],
    store_url: str,
    *,
    rank: int,
    world_size: int,
    nbytes: int | None = None,
    wall: Callable[[], float] = time.time,
) -> Mirror:
    """The buffers of one rank. Files of earlier processes are left alone until `Mirror.adopt` or a commit.

    Args:
        where: "auto" (``CKPT_MIRROR_DIR`` if set, else shared memory), "off" (private memory), "disk:PATH", a folder.
        store_url: ``store.url``.
        nbytes: of the state, if known: both buffers are made ready now, on a thread.
        wall: POSIX seconds.

    Raises:
        ValueError: `where` says nothing.
    """
    mirror = Mirror(folder_of(where), store_identity(store_url), rank=rank, world_size=world_size, wall=wall)
    if nbytes is not None:
        mirror.prepare(nbytes)
    return mirror


class Mirror:
    """Two buffers. `free`, `finish`, `adopt` and `close` are called one at a time: by the thread that trains, `finish`
    also by the one that copies.

    Attributes:
        store: identity of the store.
        why: why the buffers are private memory; None while they are in a file.
    """

    def __init__(
        self,
        base: Path | None,
        store: str,
        *,
        rank: int,
        world_size: int,
        wall: Callable[[], float] = time.time,
        me: Identity | None = None,
    ) -> None:
        self.store = store
        self.why: str | None = None if base is not None else "mirror='off'"
        self._base, self._rank, self._world_size, self._wall = base, rank, world_size, wall
        self._me = me or identity(None)
        self._folder: Folder | None = None
        self._file: MirrorFile | None = None
        self._private: Slots | None = None
        self._nbytes = 0
        # Files that may hold what the job would come back with, until a later commit lies in the current one.
        self._older: list[MirrorFile] = []
        self._swept = self._said = False
        self._may_retry = True
        self._pid = os.getpid()
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    @property
    def path(self) -> Path | None:
        """The current file; None while there is none."""
        if self._file is None or self._folder is None:
            return None
        return self._folder.path / self._file.name

    @property
    def node(self) -> str:
        """What ranks that share these mirrors call themselves alike: the machine and the folder; "" where nothing is
        mirrored. Two agents on one machine with folders of their own are two nodes."""
        return "" if self._base is None else f"{self._me.host} {self._me.boot} {self._base}"

    @property
    def base(self) -> Path | None:
        """The folder of all mirrors of this node; None where nothing is mirrored."""
        return self._base

    def prepare(self, nbytes: int) -> None:
        """Make buffers for so many bytes, and their pages ready on a thread, before anybody waits for them."""
        if self._file is None and self._private is None:
            self._nbytes = nbytes
            self._renew(nbytes, None)

    def free(self, not_this: Bytes | None, nbytes: int | None = None) -> Bytes:
        """A buffer of `nbytes` bytes (default: as before) that is not the one `not_this` lies in. It counts as dirty
        from here on, until `finish`.

        `not_this` must be the committed reference, or None if there is none: once that lies in the current file, older
        files of this job have nothing that anybody would come back to, and are removed.

        Raises:
            MemoryError: there is no memory, shared or private. Later calls try again.
        """
        size = self._nbytes = self._nbytes if nbytes is None else nbytes
        self._let_go_of_older(not_this)
        if self._private is None or self._worth_a_retry(not_this):
            data = self._shared(size, not_this)
            if data is not None:
                return data
        assert self._private is not None, "without a file there is private memory"
        return self._private.free(not_this, size)[:size]

    def finish(self, data: Bytes, id_: SnapshotId, described: Described) -> None:
        """Every byte of `data`, which `free` gave, is in place, and is what `described` says of the step `id_`. Whether
        that step is ever committed need not be known."""
        file = self._file
        number = None if file is None else file.holds(data)
        if file is None or number is None:
            return
        try:
            file.mark_whole(
                number, id_=id_, world_size=self._world_size, described=described, now=self._wall()
            )  # fmt: skip
        except OSError as error:
            self._give_up(f"{self.path}: {error.strerror or error}", self._nbytes)

    def adopt(self, path: Path, number: int, nbytes: int) -> Bytes | None:
        """Go on with the file of this rank's dead predecessor: the `nbytes` bytes of its slot `number`, to be used as
        the reference; the other slot takes the next save. Nothing in it is changed.

        Returns None, and logs why, if the file is not ours to go on with (another rank's, its owner may still live).
        """
        if self._base is None or path.parent != self._base / self.store:
            return None
        try:
            folder = self._open_folder()
            file = MirrorFile.adopt(
                folder, path.name, store=self.store, rank=self._rank, who=self._me, now=self._wall()
            )  # fmt: skip
        except (OSError, ValueError) as error:
            log.info("%s is not gone on with: %s", path, error)
            return None
        if file.capacity < nbytes:
            log.info("%s is not gone on with: a slot has %d bytes, not %d", path, file.capacity, nbytes)
            file.close()
            return None
        self._stop_thread()
        if self._file is not None:
            self._file.remove()
            self._file.close()
        self._file, self._private, self.why, self._nbytes = file, None, None, nbytes
        self._ready_on_a_thread(file, (number, 1 - number), keep=True)
        return file.slots[number][:nbytes]

    def wait_ready(self, timeout: float | None = None) -> bool:
        """Whether every page of both buffers is in memory, waiting for it at most `timeout` seconds."""
        if self._private is not None:
            return self._private.wait_ready(timeout)
        if self._thread is not None:
            self._thread.join(timeout)
        file = self._file
        return file is not None and file.failed is None and all(ready.is_set() for ready in file.ready)

    def close(self, *, remove: bool) -> None:
        """Let go of the buffers (arrays handed out keep their memory).

        Args:
            remove: the job came to its end, and nobody will come back: the file goes, and so does what dead processes
                left of this store. False after a failure.
        """
        if os.getpid() != self._pid:
            return  # a forked child was handed a copy of this object; file and lock are its parent's
        self._stop_thread()
        if self._private is not None:
            self._private.close()
        for file in [*self._older, *([self._file] if self._file is not None else [])]:
            if remove:
                file.remove()
            file.close()
        self._file, self._older = None, []
        if self._folder is not None:
            if remove:
                sweep_store(self._folder, self._me, self._wall())
                self._remove_empty_folder()
            self._folder.close()
            self._folder = None

    def _shared(self, size: int, not_this: Bytes | None) -> Bytes | None:
        """A free slot of the file; None once it had to be given up for private memory."""
        file = self._file
        if file is None or not _fits(size, file.capacity):
            self._renew(size, not_this)
            file = self._file
            if file is None:
                return None
        number = 1 if file.holds(not_this) == 0 else 0
        if not file.ready[number].is_set() and (self._thread is None or not self._thread.is_alive()):
            # The second slot after a change of size: by now the buffers of the old size are gone, or soon will be.
            file.make_ready((number,), bool, keep=False)
        file.ready[number].wait()
        if file.failed is not None:
            self._give_up(_no_room(self._where(), size, file.failed), size)
            return None
        file.mark_dirty(number)
        return file.slots[number][:size]

    def _renew(self, size: int, not_this: Bytes | None) -> None:
        """Another file, for slots of this size, or private memory."""
        old = self._file
        self._stop_thread()
        if old is not None:
            # The reference must live, and be found if we die now; the other slot has nothing that anybody needs.
            kept = old.holds(not_this)
            for number in (0, 1):
                if number != kept:
                    old.give_back(number)
            self._older.append(old)
            self._file = None
        try:
            if self._base is None:
                raise OSError(errno.ENOTSUP, "mirror='off'")
            folder = self._open_folder()
            free, total = folder.room()
            need = DATA + (2 if old is None else 1) * (-(-size // ALIGN) * ALIGN)
            if free - need < total // SPARE:
                raise OSError(
                    errno.ENOSPC, f"{free} of {total} bytes are free, {need} needed, a {SPARE}th is left free"
                )
            file = MirrorFile.create(
                folder, store=self.store, rank=self._rank, capacity=size, who=self._me, now=self._wall()
            )  # fmt: skip
        except OSError as error:
            self._give_up(_no_room(self._where(), size, error), size)
            return
        self._file, self._private, self.why = file, None, None
        self._ready_on_a_thread(file, (0, 1) if old is None else (0,), keep=False)

    def _give_up(self, why: str, size: int) -> None:
        if self._base is not None and not self._said:
            self._said = True
            log.warning(
                "rank %d has no mirror: %s. Its buffers are private memory, so after a failure its state comes from "
                "other nodes or the store. Remedies: a larger /dev/shm (docker run --shm-size), another folder (%s or "
                "mirror='disk:PATH'), or mirror='off' if this is as it should be",
                self._rank,
                why,
                VARIABLE,
            )
        if self._base is not None:
            self.why = why
        file, self._file = self._file, None
        if file is not None and file.empty:
            file.remove()
            file.close()
        elif file is not None:
            self._older.append(file)
        if self._private is None:
            self._private = Slots(size)

    def _let_go_of_older(self, reference: Bytes | None) -> None:
        if reference is None or any(file.holds(reference) is not None for file in self._older):
            return
        for file in self._older:
            file.remove()
            file.close()
        self._older = []
        if not self._swept and self._file is not None and self._file.holds(reference) is not None:
            # Every rank has come back, or this save would not have begun: what their predecessors left has served.
            self._swept = True
            if self._folder is not None:
                sweep_store(self._folder, self._me, self._wall())

    def _worth_a_retry(self, reference: Bytes | None) -> bool:
        """Once, after the first commit in private memory: survivors that took the room may be gone by now."""
        if reference is None or self._base is None or not self._may_retry:
            return False
        self._may_retry = False
        return True

    def _ready_on_a_thread(self, file: MirrorFile, numbers: tuple[int, ...], *, keep: bool) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=file.make_ready,
            args=(numbers, self._stop.is_set),
            kwargs={"keep": keep},
            name="ckpt-touch",
            daemon=True,
        )
        self._thread.start()

    def _stop_thread(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _open_folder(self) -> Folder:
        assert self._base is not None
        if self._folder is None:
            self._folder = open_store_folder(self._base, self.store, create=True)
        return self._folder

    def _remove_empty_folder(self) -> None:
        assert self._base is not None
        try:
            with Folder.open(self._base) as outer:
                outer.remove_sub(self.store)
        except OSError as error:
            log.debug("%s: %s", self._base, error)

    def _where(self) -> str:
        return str(self._base) if self._base is not None else "private memory"


def _fits(size: int, capacity: int) -> bool:
    # A state that shrank to less than half gives its memory back.
    return size <= capacity < 2 * size + ALIGN


def _no_room(where: str, size: int, error: OSError) -> str:
    return f"{where}: no two buffers of {size} bytes there ({error.strerror or error})"
