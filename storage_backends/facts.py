"""What is true of each fsspec backend, as one table: the code asks the table, never the name of a backend.

Measured or read in the sources of fsspec 2026.9, s3fs, gcsfs, adlfs and paramiko of the same months. Not in the table,
because `FsspecStore` treats all alike:
  ranges past the end   memory and SFTP answer short, S3 416 as EINVAL, Azure its own exception: the size is asked then;
  bulk deletes          s3fs drops the errors of single keys (``Quiet``), adlfs stops at the first absent one: objects
                        are removed one by one, `threads` at a time;
  listings caches       on by default, for ever, in all of them: switched off and emptied before each listing.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

SFTP_SLICE = 4 << 20

# fsspec ships no types, and none of its classes may be imported where only some are installed.
FileSystem: TypeAlias = Any


def pipe_whole(fs: FileSystem, path: str, data: bytes) -> None:
    """One request for small objects, a multipart upload for large ones; nothing shows before its end."""
    fs.pipe_file(path, data)


def cat(fs: FileSystem, path: str, start: int | None, stop: int | None) -> bytes:
    """Bytes `start` to `stop`, or fewer if the object ends before; all of them if both are None."""
    data = fs.cat_file(path, start=start, end=stop)
    return data if isinstance(data, bytes) else bytes(data)


def sftp_write(fs: FileSystem, path: str, data: bytes) -> None:
    """Sends without awaiting each answer: 20 MB in 0.4 s, where pipe_file takes 19; `put_file` needs a local copy."""
    fs.ftp.putfo(io.BytesIO(data), path, file_size=len(data), confirm=True)


def sftp_read(fs: FileSystem, path: str, start: int | None, stop: int | None) -> bytes:
    """Asks for all of a slice at once, instead of for one 32 KiB piece after the other.

    In slices, because paramiko looks through all outstanding pieces at each arrival: 20 MB take 12 s in one, 0.8 s in
    slices of 4 MiB (with every size from 1 to 8 MiB close to that).
    """
    with fs.ftp.open(path, "rb") as file:
        first, last = start or 0, file.stat().st_size
        if stop is not None:
            last = min(stop, last)
        slices = range(first, last, SFTP_SLICE)
        return b"".join(piece for at in slices for piece in file.readv([(at, min(SFTP_SLICE, last - at))]))


@dataclass(frozen=True, slots=True)
class Facts:
    """One backend.

    Attributes:
        extra: what to ``pip install 'incremental-ckpt[…]'`` for it; None: comes with fsspec, or unknown to us.
        whole: an object appears whole or not at all. If not, it is written under a temporary name and renamed.
        bucket: paths begin with the name of a bucket (or container), which exists beforehand.
        folders: folders are real and must be made before a put. If not, "not found" during a put means the bucket.
        flat: `find` asks for all keys below a prefix in one go, and raises when it cannot. If not, folders are listed
            one by one (the default `find` takes a folder that it could not list for an empty one).
        shared: one instance may serve several threads. If not, each call borrows one of its own.
        threads: requests at a time within one delete or listing.
        mtime: names that the modification time may have in a listing.
        write, read: how bytes go in and out.
        options: storage options, unless the user gives others.
        attributes: set on each instance, for what its constructor does not take.
    """

    extra: str | None = None
    whole: bool = False
    bucket: bool = False
    folders: bool = True
    flat: bool = False
    shared: bool = False
    threads: int = 4
    mtime: tuple[str, ...] = ("mtime", "last_modified", "LastModified", "updated", "modified", "created")
    write: Callable[[FileSystem, str, bytes], None] = pipe_whole
    read: Callable[[FileSystem, str, int | None, int | None], bytes] = cat
    options: Mapping[str, Any] = field(default_factory=dict)
    attributes: Mapping[str, Any] = field(default_factory=dict)


# A backend that we know nothing about gets the careful way of everything.
UNKNOWN = Facts()

_S3 = Facts(
    extra="s3",
    whole=True,
    bucket=True,
    folders=False,
    flat=True,
    shared=True,
    threads=16,
    mtime=("LastModified",),
    # Retries belong to RetryingStore: five of s3fs on top of botocore's turn a timeout of 2 s into one of 24 s.
    options={"config_kwargs": {"connect_timeout": 10, "read_timeout": 30, "retries": {"total_max_attempts": 1}}},
    attributes={"retries": 1},
)
_GCS = Facts(
    extra="gcs", whole=True, bucket=True, folders=False, flat=True, shared=True, threads=16, mtime=("mtime", "updated")
)
_AZURE = Facts(
    extra="azure", whole=True, bucket=True, folders=False, flat=True, shared=True, threads=16, mtime=("last_modified",)
)
# One instance used by several threads hangs (3 of 3). Its rename replaces (posix-rename@openssh.com). No fsync: as
# durable as the server makes a closed file. sshd lets ten unauthenticated connections wait, and refuses the rest.
_SFTP = Facts(
    extra="sftp",
    threads=4,
    mtime=("mtime",),
    write=sftp_write,
    read=sftp_read,
    options={"timeout": 10, "banner_timeout": 15, "auth_timeout": 15},
)

FACTS: Mapping[str, Facts] = {
    "s3": _S3,
    "s3a": _S3,
    "gs": _GCS,
    "gcs": _GCS,
    "az": _AZURE,
    "abfs": _AZURE,
    "abfss": _AZURE,
    "sftp": _SFTP,
    "ssh": _SFTP,
    # Shared by everything in the process. `pipe_file` hands the whole value over at once (`open` would not).
    "memory": Facts(whole=True, folders=False, flat=True, shared=True, mtime=("created",)),
    # Only reached by FsspecStore("file://…"): open_store takes LocalStore, which syncs.
    "file": Facts(shared=True, mtime=("mtime",)),
}


def facts_of(protocol: str) -> Facts:
    """The row of this protocol."""
    return FACTS.get(protocol, UNKNOWN)
