"""What is true of each fsspec backend, as one table: the code asks the table, never the name of a backend.

S3, Azure and SFTP are held to it on real servers (tests/storage_backends), GCS only by the sources of gcsfs; all with
fsspec 2026.9 and libraries of the same months. Every verb is one request for each object, and one for each page of a
listing. Not in the table, because `FsspecStore` treats all alike:
  ranges past the end   memory and SFTP answer short, S3 416 as EINVAL, Azure its own exception: the size is asked then;
  bulk deletes          s3fs drops the errors of single keys (``Quiet``), adlfs stops at the first absent one: objects
                        are removed one by one, `threads` at a time;
  listings caches       on by default, for ever, in all of them: switched off and emptied before each listing.
"""

from __future__ import annotations

import io
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

SFTP_SLICE = 4 << 20

CONNECTING = 10.0
"""Seconds for making a connection, at most."""
PATIENCE = 30.0
"""Seconds without an answer after which a request has failed, unless `FsspecStore` is told to be less patient; a put
gets more, by its size."""
SLOWEST = 512 << 10
"""Bytes per second at which a put may crawl and is still waited for."""
LARGE = 32 << 20
"""Bytes of the largest objects there usually are."""

# fsspec ships no types, and none of its classes may be imported where only some are installed.
FileSystem: TypeAlias = Any


def pipe_whole(fs: FileSystem, path: str, data: bytes, _patience: float) -> None:
    """One request for small objects, a multipart upload for large ones; nothing shows before its end."""
    fs.pipe_file(path, data)


def in_time(fs: FileSystem, call: Callable[[], Awaitable[Any]], limit: float, what: str) -> Any:
    """Run a coroutine of an asynchronous backend, cancelled after `limit` seconds."""
    import asyncio  # here, not above: local stores start without it

    from fsspec.asyn import sync

    async def limited() -> Any:
        return await asyncio.wait_for(call(), limit)

    try:
        return sync(fs.loop, limited)
    except TimeoutError as error:
        raise TimeoutError(f"timed out: {what} took more than {limit:.3g} s") from error


def pipe_in_time(fs: FileSystem, path: str, data: bytes, patience: float) -> None:
    """`pipe_whole`, cancelled when it takes too long. aiohttp's own timeouts begin once the body has been sent: with a
    server that took the connection and says nothing, not even "100 Continue", a put would wait for ever."""
    limit = patience + len(data) / SLOWEST
    in_time(fs, lambda: fs._pipe_file(path, data), limit, f"a put of {len(data)} bytes")


def remove(fs: FileSystem, path: str, _patience: float) -> None:
    fs.rm_file(path)


def remove_in_time(fs: FileSystem, path: str, patience: float) -> None:
    """adlfs passes its timeouts to uploads and downloads only, gcsfs to nothing."""
    in_time(fs, lambda: fs._rm_file(path), patience, "a delete")


def cat(fs: FileSystem, path: str, start: int | None, stop: int | None, _patience: float) -> bytes:
    """Bytes `start` to `stop`, or fewer if the object ends before; all of them if both are None."""
    data = fs.cat_file(path, start=start, end=stop)
    return data if isinstance(data, bytes) else bytes(data)


def cat_in_time(fs: FileSystem, path: str, start: int | None, stop: int | None, patience: float) -> bytes:
    """The same, cancelled when it takes as long as a put of so many bytes may, or of `LARGE`."""
    limit = patience + (LARGE if start is None or stop is None else stop - start) / SLOWEST
    return bytes(in_time(fs, lambda: fs._cat_file(path, start=start, end=stop), limit, "a read"))


def find(fs: FileSystem, root: str, prefix: str, _patience: float) -> Iterable[Mapping[str, Any]]:
    """Everything below ``root/prefix``; for backends that say "not found", or nothing, where there is nothing."""
    found = fs.find(f"{root}/{prefix}".rstrip("/"), detail=True)
    return list(found.values())


def s3_find(fs: FileSystem, root: str, prefix: str, _patience: float) -> Iterable[Mapping[str, Any]]:
    """From the bucket, with a prefix: given a path, s3fs asks two times more when nothing lies below it."""
    bucket, _, above = root.partition("/")
    found = fs.find(bucket, prefix=f"{above}/{prefix}".lstrip("/"), detail=True)
    return list(found.values())


def azure_find(fs: FileSystem, root: str, prefix: str, patience: float) -> Iterable[Mapping[str, Any]]:
    """Azure's own listing: that of adlfs takes a missing container for an empty one, and first asks for the prefix as
    an object. In accounts with real folders these are listed too, as empty objects that say so in their metadata."""
    from fsspec.asyn import sync

    container, _, above = root.partition("/")
    limits = azure_timeouts(patience)

    async def blobs() -> list[Mapping[str, Any]]:
        async with fs.service_client.get_container_client(container) as client:
            listed = client.list_blobs(name_starts_with=f"{above}/{prefix}".lstrip("/"), include=["metadata"], **limits)
            return [
                {
                    "name": f"{container}/{blob.name}",
                    "size": blob.size,
                    "type": "directory" if _is_folder(blob.metadata or {}) else "file",
                    "last_modified": blob.last_modified,
                }
                async for blob in listed
            ]

    return list(sync(fs.loop, blobs))


def _is_folder(metadata: Mapping[str, str]) -> bool:
    marks = {name.lower(): value for name, value in metadata.items()}
    return "true" in (marks.get("hdi_isfolder"), marks.get("is_directory"))


def as_made(_fs: FileSystem, _patience: float = 0.0) -> None:
    """Nothing to do for an instance."""


def s3_tries_once(fs: FileSystem, _patience: float) -> None:
    """Retries belong to RetryingStore: five of s3fs on top of botocore's turn a timeout of 2 s into one of 24 s."""
    fs.retries = 1


def azure_tries_once(fs: FileSystem, _patience: float) -> None:
    """The same: four tries of Azure's library, 15 s and more apart, turn a 503 into 80 s. adlfs passes no policy on."""
    fs.service_client._config.retry_policy.total_retries = 0


def sftp_waits_for_no_silence(fs: FileSystem, patience: float) -> None:
    """Its own timeouts are those of connecting; an answer would be waited for without end."""
    fs.ftp.get_channel().settimeout(patience)


def sftp_close(fs: FileSystem) -> None:
    """A thread of paramiko holds the connection, so nobody else would ever let go of it."""
    fs.client.close()


def sftp_write(fs: FileSystem, path: str, data: bytes, _patience: float) -> None:
    """Sends without awaiting each answer: 20 MB in 0.4 s, where pipe_file takes 19; `put_file` needs a local copy."""
    fs.ftp.putfo(io.BytesIO(data), path, file_size=len(data), confirm=True)


def sftp_read(fs: FileSystem, path: str, start: int | None, stop: int | None, _patience: float) -> bytes:
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


def no_options(_patience: float) -> Mapping[str, Any]:
    """A backend whose timeouts we do not know."""
    return {}


def s3_options(patience: float) -> Mapping[str, Any]:
    return {
        "config_kwargs": {
            "connect_timeout": min(CONNECTING, patience),
            "read_timeout": patience,
            "retries": {"total_max_attempts": 1},
        },
        # With more, s3fs asks for the size of every object before it reads it. Packs are read in ranges anyway, and
        # are too small for multipart uploads.
        "max_concurrency": 1,
    }


def azure_timeouts(patience: float) -> Mapping[str, Any]:
    return {"connection_timeout": min(CONNECTING, patience), "read_timeout": patience}


def sftp_timeouts(patience: float) -> Mapping[str, Any]:
    """The server's greeting, and its answer to a key, may take longer than a connection."""
    return {
        "timeout": min(CONNECTING, patience),
        "banner_timeout": min(1.5 * CONNECTING, patience),
        "auth_timeout": min(1.5 * CONNECTING, patience),
    }


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
        write, read: how bytes go in and out. The last argument of these and the next is the patience: after so many
            seconds without an answer they must raise, where the options do not see to it.
        remove: how one object goes.
        find: how all below a prefix is listed, if `flat`.
        options: storage options at a patience, unless the user gives others.
        prepare: changes each new instance, where its constructor does not take what must be different.
        close: for an instance that failed and will not be used again, if not `shared`.
    """

    extra: str | None = None
    whole: bool = False
    bucket: bool = False
    folders: bool = True
    flat: bool = False
    shared: bool = False
    threads: int = 4
    mtime: tuple[str, ...] = ("mtime", "last_modified", "LastModified", "updated", "modified", "created")
    write: Callable[[FileSystem, str, bytes, float], None] = pipe_whole
    read: Callable[[FileSystem, str, int | None, int | None, float], bytes] = cat
    remove: Callable[[FileSystem, str, float], None] = remove
    find: Callable[[FileSystem, str, str, float], Iterable[Mapping[str, Any]]] = find
    options: Callable[[float], Mapping[str, Any]] = no_options
    prepare: Callable[[FileSystem, float], None] = as_made
    close: Callable[[FileSystem], None] = as_made


# A backend that we know nothing about gets the careful way of everything.
UNKNOWN = Facts()

_OBJECTS = Facts(whole=True, bucket=True, folders=False, flat=True, shared=True, threads=16, write=pipe_in_time)
"""What the three object stores have in common."""

_S3 = replace(
    _OBJECTS,
    extra="s3",
    mtime=("LastModified",),
    find=s3_find,
    options=s3_options,
    prepare=s3_tries_once,
)
# gcsfs tries each request six times by itself, and has no switch for that: its tries end with ours.
_GCS = replace(
    _OBJECTS,
    extra="gcs",
    mtime=("mtime", "updated"),
    read=cat_in_time,
    remove=remove_in_time,
)
_AZURE = replace(
    _OBJECTS,
    extra="azure",
    mtime=("last_modified",),
    remove=remove_in_time,
    find=azure_find,
    options=azure_timeouts,
    prepare=azure_tries_once,
)
# One instance used by several threads hangs (3 of 3). Its rename replaces (posix-rename@openssh.com). No fsync: as
# durable as the server makes a closed file. sshd lets ten unauthenticated connections wait, and refuses the rest.
_SFTP = Facts(
    extra="sftp",
    threads=4,
    mtime=("mtime",),
    write=sftp_write,
    read=sftp_read,
    options=sftp_timeouts,
    prepare=sftp_waits_for_no_silence,
    close=sftp_close,
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
