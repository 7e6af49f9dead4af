"""The calls of the operating system that `LocalStore` makes, and no others: the seam where tests count and break them.

Names are single names inside an open folder (`folder`: its descriptor), never paths, except where it is None.
"""

from __future__ import annotations

import os
from collections.abc import Iterator


class System:
    """The real ones. A test subclasses it; patching `os` would change it for every thread of the process."""

    def open(self, name: str, flags: int, mode: int = 0o777, *, folder: int | None = None) -> int:
        return os.open(name, flags, mode, dir_fd=folder)

    def close(self, file: int) -> None:
        os.close(file)

    def write(self, file: int, data: memoryview) -> int:
        return os.write(file, data)

    def pread(self, file: int, size: int, at: int) -> bytes:
        return os.pread(file, size, at)

    def fsync(self, file: int) -> None:
        os.fsync(file)

    def rename(self, old: str, new: str, folder: int) -> None:
        os.replace(old, new, src_dir_fd=folder, dst_dir_fd=folder)

    def mkdir(self, name: str, folder: int | None) -> None:
        os.mkdir(name, dir_fd=folder)

    def rmdir(self, name: str, folder: int) -> None:
        os.rmdir(name, dir_fd=folder)

    def unlink(self, name: str, folder: int) -> None:
        os.unlink(name, dir_fd=folder)

    def stat(self, file: int) -> os.stat_result:
        return os.fstat(file)

    def lstat(self, name: str, folder: int) -> os.stat_result:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)

    def scan(self, folder: int) -> Iterator[os.DirEntry[str]]:
        with os.scandir(folder) as entries:
            yield from entries
