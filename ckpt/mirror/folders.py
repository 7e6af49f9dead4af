"""Where mirror files lie, and whose they are: nothing is followed, read or written that another user made.

/dev/shm is open to everybody, so a folder of a foreseeable name there may be somebody's trap. A folder and a file are
opened without following links, then looked at through the open descriptor, and everything further goes through that
descriptor: what was checked is what is used.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from contextlib import suppress
from pathlib import Path

from ckpt.format.manifest import digest64

VARIABLE = "CKPT_MIRROR_DIR"
"""The one environment variable: two agents on one machine are started alike and must not share a folder."""

SHARED_MEMORY = Path("/dev/shm")

_FILE = re.compile(r"rank-(?P<rank>\d{5,})-[0-9a-f]{8}\.mirror")
_STORE = re.compile(r"[0-9a-f]{16}")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")

_TRIES = 3


class Unsafe(OSError):  # noqa: N818 - what it says of a folder
    """A folder or a file that is not ours alone; never used."""


def default_folder() -> Path:
    """What the environment says, else a folder of this user's own in shared memory."""
    given = os.environ.get(VARIABLE)
    return Path(given).absolute() if given else SHARED_MEMORY / f"ckpt-{os.geteuid()}"


def folder_of(where: str | os.PathLike[str]) -> Path | None:
    """The folder that ``mirror=`` names: "auto", "disk:PATH" or a path; None for "off".

    Raises:
        ValueError: a disk: without a path.
    """
    text = os.fspath(where)
    match text:
        case "auto":
            return default_folder()
        case "off":
            return None
        case _:
            path = text.removeprefix("disk:")
            if not path:
                raise ValueError(f'mirror={text!r}: expected "auto", "off", "disk:PATH" or a folder')
            return Path(path).expanduser().absolute()


def store_identity(url: str) -> str:
    """Which store a mirror belongs to: 16 hex digits of its address. `url` is ``store.url``, which bears no secrets.

    A local folder counts by its real path, so that a link to it is the same store.
    """
    if _SCHEME.match(url) is None:
        url = os.path.realpath(url)
    return digest64(url.rstrip("/").encode())


def file_name(rank: int, nonce: str) -> str:
    return f"rank-{rank:05d}-{nonce}.mirror"


def rank_of(name: str) -> int | None:
    """The rank in a mirror file's name; None for any other name."""
    found = _FILE.fullmatch(name)
    return int(found["rank"]) if found else None


def is_store(name: str) -> bool:
    """Whether a folder's name is that of a store."""
    return _STORE.fullmatch(name) is not None


class Folder:
    """An open folder of this user's own. A context manager."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd = fd

    @classmethod
    def open(cls, path: Path, *, create: bool = False) -> Folder:
        """Open a folder, made with mode 0700 if it is not there.

        Raises:
            Unsafe: it is a link, another user's, or others may write to it.
            OSError: it is not there, or cannot be made.
        """
        if create:
            path.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                path.mkdir(0o700)
        return cls(path, _opened(path, None))

    def sub(self, name: str, *, create: bool = False) -> Folder:
        """A folder in this one; same rules."""
        if create:
            with suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=self._fd)
        return Folder(self.path / name, _opened(Path(name), self._fd, shown=self.path / name))

    def names(self) -> list[str]:
        return sorted(os.listdir(self._fd))  # noqa: PTH208 - through the descriptor that was checked

    def create_file(self, name: str) -> int:
        """A new file for reading and writing, mode 0600. Raises FileExistsError."""
        return os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self._fd)

    def open_file(self, name: str, *, write: bool = False) -> int:
        """Open a file that is there.

        Raises:
            Unsafe: it is a link, not a plain file, another user's, or others may read or write it.
            OSError: as usual.
        """
        shown = self.path / name
        try:
            # Not to wait for a writer, should it be a pipe.
            flags = (os.O_RDWR if write else os.O_RDONLY) | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
            fd = os.open(name, flags, dir_fd=self._fd)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise Unsafe(error.errno, f"{shown} is a symbolic link; mirrors follow none") from error
            raise
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise Unsafe(errno.EINVAL, f"{shown} is not a plain file")
            _check_owner(shown, found)
            if found.st_mode & 0o077:
                text = f"{shown} has mode {stat.S_IMODE(found.st_mode):04o}, expected 0600: others could reach it"
                raise Unsafe(errno.EPERM, text)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def unlink(self, name: str) -> None:
        """Remove a file; not an error if it is gone."""
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._fd)

    def is_named(self, name: str, fd: int) -> bool:
        """Whether `name` still is the file open as `fd`."""
        try:
            there = os.stat(name, dir_fd=self._fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(there, os.fstat(fd))

    def remove_sub(self, name: str) -> None:
        """Remove a folder in this one if it is empty."""
        with suppress(OSError):
            os.rmdir(name, dir_fd=self._fd)

    def room(self) -> tuple[int, int]:
        """Bytes free for us, and bytes in all, of the file system."""
        found = os.fstatvfs(self._fd)
        return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_store_folder(base: Path, store: str, *, create: bool = False) -> Folder:
    """The folder of one store. Raises as `Folder.open`."""
    for tries_left in reversed(range(_TRIES)):
        with Folder.open(base, create=create) as outer:
            try:
                return outer.sub(store, create=create)
            except FileNotFoundError:
                # Whoever left last removed the empty folder between our making and our opening it.
                if not create or not tries_left:
                    raise
    raise AssertionError("the last try returns or raises")


def _opened(path: Path, dir_fd: int | None, *, shown: Path | None = None) -> int:
    shown = shown or path
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            text = f"{shown} is a symbolic link or no folder; mirrors follow no links: remove it or name another folder"
            raise Unsafe(error.errno, text) from error
        raise
    try:
        found = os.fstat(fd)
        _check_owner(shown, found)
        if found.st_mode & 0o022:
            raise Unsafe(
                errno.EPERM,
                f"{shown} has mode {stat.S_IMODE(found.st_mode):04o}, so others may write to it; give it mode 0700, or "
                f"name another folder ({VARIABLE}, or mirror='disk:PATH')",
            )
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check_owner(shown: Path, found: os.stat_result) -> None:
    if found.st_uid != os.geteuid():
        text = f"{shown} belongs to user {found.st_uid}, we are {os.geteuid()}: not ours, not touched"
        raise Unsafe(errno.EPERM, text)
