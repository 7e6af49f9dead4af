"""A folder on a local, NFS or other mounted file system.

The write order of one put, and what a crash after each step leaves:
  temporary file beside its target   a hidden file that no listing shows and a later delete sweeps;
  its bytes, fsync                   the same;
  rename onto the target             the old object, or the whole new one;
  fsync of the folder                the new one, even if the power goes.
Folders made on the way are synced into their parents before anything is written into them.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator, MutableSequence, Sequence
from contextlib import contextmanager, suppress
from functools import partial

from storage_backends.base import (
    MAX_WHOLE,
    Buffer,
    Entry,
    NotFound,
    Refused,
    StorageError,
    Unavailable,
    check_key,
    check_prefix,
    check_range,
    delete_failed,
    is_key,
    past_the_end,
)
from storage_backends.causes import meaning
from storage_backends.folders import Folders
from storage_backends.parallel import each
from storage_backends.system import System

TEMPORARY = ".tmp-"
# No put takes this long, so a temporary file this old has no writer any more. Should it still have one, that writer
# loses one attempt: its rename fails, and the put is tried again.
SWEEP_AFTER = 3600.0
# A put races with whoever removes a folder that a delete has emptied, and with nobody else: two or three are plenty.
FOLDER_TRIES = 20
DELETE_THREADS = 8

# O_NONBLOCK: opening a fifo that somebody left here must not wait for its writer.
_OBJECT = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class LocalStore:
    """Objects as files below `path`, which is made at the first put. Safe from several threads and processes.

    Args:
        path: the root; ``~`` is expanded, a relative path starts at the working directory of now.
        system: the calls that touch the disk; tests count them and make them fail.
        wall: POSIX seconds, to tell how old a left-over temporary file is.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, system: System | None = None, wall: Callable[[], float] = time.time
    ) -> None:
        # Not resolve(): the user's own name for the store goes into messages, and the root may be a link.
        self._root = os.path.abspath(os.path.expanduser(os.fspath(path)))  # noqa: PTH100, PTH111
        self._system = system or System()
        self._folders = Folders(self._root, self._system)
        self._wall = wall
        self._swept: dict[str, float] = {}

    @property
    def url(self) -> str:
        return self._root

    def put(self, key: str, data: Buffer) -> None:
        check_key(key, store=self.url)
        with self._explaining("put", key), memoryview(data) as view, view.cast("B") as octets:
            for _ in range(FOLDER_TRIES - 1):
                with suppress(FileNotFoundError):  # a folder was empty, and a delete removed it under our feet
                    return self._write(key, octets)
            return self._write(key, octets)

    def get(self, key: str) -> bytes:
        check_key(key, store=self.url)
        with self._explaining("get", key), self._object(key) as (file, size):
            if size > MAX_WHOLE:
                message = f"{self.url}: {key} has {size} bytes, and no object of ours has more than {MAX_WHOLE}"
                raise Refused(f"{message}; it is not one of ours: look at it, and remove it", store=self.url, key=key)
            return self._read(file, key, 0, size)

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        check_range(key, start, stop, store=self.url)
        with self._explaining("get_range", key), self._object(key) as (file, size):
            if stop > size:
                raise past_the_end(key, start, stop, size, store=self.url)
            return self._read(file, key, start, stop)

    def list(self, prefix: str) -> Sequence[Entry]:
        check_prefix(prefix, store=self.url)
        found: list[Entry] = []
        todo = [prefix]
        with self._explaining("list", prefix):
            while todo:
                above = todo.pop()
                # Never made, or removed since its parent was listed; or an object, and nothing lies below it.
                with suppress(FileNotFoundError, NotADirectoryError), self._folders.opened(above[:-1]) as folder:
                    for entry in self._system.scan(folder):
                        self._take(entry, above, found, todo)
        return sorted(found, key=lambda entry: entry.key)

    def delete(self, keys: Sequence[str]) -> None:
        by_folder: dict[str, list[str]] = {}
        for key in keys:
            check_key(key, store=self.url)
            folder, _, _ = key.rpartition("/")
            by_folder.setdefault(folder, []).append(key)
        results = each(lambda item: self._delete_in(*item), list(by_folder.items()), threads=DELETE_THREADS)
        for top in sorted({folder.split("/")[0] for folder in by_folder}):
            self._sweep(top)
        failures = [failure for result in results for failure in result]
        if failures:
            raise delete_failed(failures, len(keys), store=self.url)

    # One object

    def _write(self, key: str, data: memoryview) -> None:
        above, _, name = key.rpartition("/")
        temporary = TEMPORARY + secrets.token_hex(8)
        with self._folders.opened(above, make=True) as folder:
            # 0o666: the mode follows the umask, as for any file the user makes (mkstemp would say 0o600).
            file = self._system.open(temporary, _NEW, 0o666, folder=folder)
            try:
                try:
                    self._write_all(file, data)
                    self._system.fsync(file)
                finally:
                    self._system.close(file)
                self._system.rename(temporary, name, folder)
                self._folders.sync(folder)
            except BaseException:
                with suppress(OSError):  # after the rename it is gone already
                    self._system.unlink(temporary, folder)
                raise

    def _write_all(self, file: int, data: memoryview) -> None:
        while data:
            written = self._system.write(file, data)
            if not written:
                raise OSError(errno.EIO, "the file system took none of the bytes")
            data = data[written:]

    @contextmanager
    def _object(self, key: str) -> Iterator[tuple[int, int]]:
        """An open object: (descriptor, size)."""
        above, _, name = key.rpartition("/")
        with self._folders.opened(above) as folder:
            file = self._system.open(name, _OBJECT, folder=folder)
        try:
            status = self._system.stat(file)
            if stat.S_ISDIR(status.st_mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            if not stat.S_ISREG(status.st_mode):
                raise Refused(f"{self.url}: {key} is not a plain file", store=self.url, key=key)
            yield file, status.st_size
        finally:
            self._folders.close(file)

    def _read(self, file: int, key: str, start: int, stop: int) -> bytes:
        pieces = []
        at = start
        while at < stop:
            piece = self._system.pread(file, stop - at, at)
            if not piece:
                message = f"{self.url}: {key} ended at byte {at} while bytes {start} to {stop} were read; it has shrunk"
                raise Unavailable(message, store=self.url, key=key)
            pieces.append(piece)
            at += len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    # Many objects

    def _take(
        self, entry: os.DirEntry[str], above: str, found: MutableSequence[Entry], todo: MutableSequence[str]
    ) -> None:
        """Put one name of a folder where it belongs: an object into `found`, a folder into `todo`."""
        if not is_key(entry.name):
            return  # a temporary file, or nothing that this store could have written
        key = above + entry.name
        if entry.is_symlink():
            if entry.is_dir():  # leaving it out would make "moved to another disk" look like "empty"
                raise self._folders.link(key)
        elif entry.is_dir(follow_symlinks=False):
            todo.append(f"{key}/")
        elif entry.is_file(follow_symlinks=False):
            with suppress(FileNotFoundError):  # removed since its name was read
                status = entry.stat(follow_symlinks=False)
                found.append(Entry(key, status.st_size, status.st_mtime))

    def _delete_in(self, above: str, keys: Sequence[str]) -> Sequence[tuple[str, StorageError]]:
        """Remove these objects of one folder; what could not be removed, and why."""
        failures: list[tuple[str, StorageError]] = []

        def attempt(key: str, do: Callable[[], None]) -> None:
            try:
                with self._explaining("delete", key):
                    do()
            except NotFound:
                pass
            except StorageError as error:
                failures.append((key, error))

        try:
            with self._explaining("delete", keys[0]), self._folders.opened(above) as folder:
                for key in keys:
                    attempt(key, partial(self._system.unlink, key.rpartition("/")[2], folder))
                # Removals are synced too: a snapshot goes before its packs, and must not come back without them.
                attempt(keys[0], partial(self._folders.sync, folder))
        except NotFound:
            return []
        except StorageError as error:
            return [(key, error) for key in keys]
        self._folders.remove_emptied(above)
        return failures

    def _sweep(self, top: str) -> None:
        """Remove what crashed puts left below `top`; at most once in `SWEEP_AFTER`, for it walks all of it.

        Nothing depends on it: what it cannot read or remove, it leaves. A real fault shows in the calls that matter.
        """
        now = self._wall()
        if not top or now - self._swept.get(top, float("-inf")) < SWEEP_AFTER:
            return
        self._swept[top] = now
        todo = [top]
        while todo:
            path = todo.pop()
            with suppress(OSError, Refused), self._folders.opened(path) as folder:
                for entry in self._system.scan(folder):
                    if entry.is_dir(follow_symlinks=False):
                        todo.append(f"{path}/{entry.name}")
                    elif entry.name.startswith(TEMPORARY) and entry.stat().st_mtime < now - SWEEP_AFTER:
                        self._system.unlink(entry.name, folder)

    @contextmanager
    def _explaining(self, verb: str, key: str) -> Iterator[None]:
        """Turn what the system says into an error that names store, key and deed."""
        try:
            yield
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise self._folders.link(key) from error
            kind = meaning(error)
            if verb == "put" and kind is NotFound:
                kind = Unavailable  # folders, or the temporary file, went away under our feet: a new attempt makes them
            elif verb in ("get", "get_range", "delete") and error.errno in (errno.ENOTDIR, errno.EISDIR):
                kind = NotFound  # a folder is no object, and below an object there is none
            what = "is not there" if kind is NotFound else f"{verb} failed"
            message = f"{self.url}: {key or 'the root'}: {what}: {error.strerror or error}"
            raise kind(message, store=self.url, key=key) from error
