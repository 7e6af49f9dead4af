"""The way from a store's root to a folder: name by name, no link followed, each new folder synced into its parent.

Opening by descriptor instead of by path: whoever swaps a folder for a link between a check and its use could lead a
path out of the store, but not a descriptor.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from storage_backends.base import Refused
from storage_backends.system import System

KNOWN_FOLDERS = 4096

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NO_FOLDER_SYNC = frozenset({errno.EINVAL, errno.ENOTSUP, errno.ENOSYS})


class Folders:
    """The folders of one store on disk. Safe from several threads.

    Args:
        root: absolute path; may itself be a link.
        system: the calls that touch the disk.
    """

    def __init__(self, root: str, system: System) -> None:
        self._root = root
        self._system = system
        # Folders whose entry in their parent is known to be durable, each with the identity it had. A folder that
        # another process removed and made again may get the same inode number, and is then synced by that process.
        self._durable: dict[str, tuple[int, int]] = {}

    @contextmanager
    def opened(self, path: str, *, make: bool = False) -> Iterator[int]:
        """Descriptor of the folder `path` ("" is the root), closed at the end of the block.

        Raises:
            FileNotFoundError: it is not there; with `make`, somebody removed it while it was made.
            NotADirectoryError: an object is where a folder should be.
            Refused: a link is, or the root is no folder.
        """
        folder = self._open(path.split("/") if path else [], make=make)
        try:
            yield folder
        finally:
            self.close(folder)

    def close(self, file: int) -> None:
        """Close what was only read. Nothing was written through it, so a failure tells nothing, and nothing is lost."""
        with suppress(OSError):
            self._system.close(file)

    def sync(self, folder: int) -> None:
        """Make the names in this folder durable."""
        try:
            self._system.fsync(folder)
        except OSError as error:
            if error.errno not in _NO_FOLDER_SYNC:  # some network file systems have no such thing: nothing to wait for
                raise

    def remove_emptied(self, path: str) -> None:
        """Remove this folder and those above it as long as they are empty: prune empties thousands, and lists all."""
        while path:
            above, _, name = path.rpartition("/")
            try:
                with self.opened(above) as folder:
                    self._system.rmdir(name, folder)
            except (OSError, Refused):  # not empty, mostly; nothing depends on it
                return
            self._durable.pop(path, None)
            path = above

    def link(self, name: str) -> Refused:
        """The error for a symbolic link inside the store."""
        message = f"{self._root}: {name} is a symbolic link; a store follows none, since it could lead out of it"
        return Refused(message, store=self._root, key=name)

    def _open(self, names: Sequence[str], *, make: bool) -> int:
        here = self._open_root(make=make)
        for depth, name in enumerate(names, 1):
            try:
                below = self._enter(here, name, make=make)
                try:
                    if make:
                        self._settle("/".join(names[:depth]), here, below)
                except BaseException:
                    self.close(below)
                    raise
            finally:
                self.close(here)
            here = below
        return here

    def _open_root(self, *, make: bool) -> int:
        try:
            try:
                return self._system.open(self._root, _FOLDER)
            except FileNotFoundError:
                if not make:
                    raise
            self._make_root()
            return self._system.open(self._root, _FOLDER)
        except NotADirectoryError as error:
            message = f"{self._root}: {error.strerror}; a store on disk is a folder"
            raise Refused(message, store=self._root, key="") from error

    def _make_root(self) -> None:
        missing = []
        path = Path(self._root)
        while not path.is_dir():
            missing.append(path)
            path = path.parent
        for path in reversed(missing):
            with suppress(FileExistsError):
                self._system.mkdir(str(path), None)
            above = self._system.open(str(path.parent), _FOLDER)
            try:
                self.sync(above)
            finally:
                self.close(above)

    def _enter(self, here: int, name: str, *, make: bool) -> int:
        try:
            try:
                return self._system.open(name, _FOLDER | os.O_NOFOLLOW, folder=here)
            except FileNotFoundError:
                if not make:
                    raise
            with suppress(FileExistsError):
                self._system.mkdir(name, here)
            return self._system.open(name, _FOLDER | os.O_NOFOLLOW, folder=here)
        except NotADirectoryError:
            # Linux answers the same for a file and for a link; only the link is worth an error of its own.
            if stat.S_ISLNK(self._system.lstat(name, here).st_mode):
                raise self.link(name) from None
            raise

    def _settle(self, path: str, above: int, folder: int) -> None:
        """Sync a folder's entry in its parent, once: whoever made it may not have come to that."""
        status = self._system.stat(folder)
        identity = (status.st_dev, status.st_ino)
        if self._durable.get(path) == identity:
            return
        self.sync(above)
        if len(self._durable) >= KNOWN_FOLDERS:  # a long job makes folders for ever; forgetting costs one sync each
            self._durable.clear()
        self._durable[path] = identity
