"""Any fsspec backend as a `Store`: private instances, no listings cache, no transactions, exact ranges, our own errors.

What differs between backends is in the table of `facts`; nothing here asks for a backend's name.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any

from storage_backends.base import (
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
from storage_backends.causes import meaning, telling
from storage_backends.facts import PATIENCE, FileSystem, facts_of
from storage_backends.instances import Instances
from storage_backends.parallel import each

TEMPORARY = ".tmp-"

_USER = re.compile(r"(?<=://)([^/@:]*):([^/@]*)@")
_SECRET = re.compile(
    r"secret|passw|passphrase|token|sas|credential|connection_string|account_key|private", re.IGNORECASE
)


class FsspecStore:
    """Objects below an fsspec URL.

    Args:
        url: such as ``s3://bucket/run7`` or ``sftp://host/data/run7``.
        storage_options: for fsspec, such as ``endpoint_url``.
        patience: seconds without an answer after which an attempt has failed, where the backend is known and the
            options do not say otherwise.

    Raises:
        Refused: no such scheme, the URL names no place, or the library it needs is not installed.
    """

    def __init__(
        self, url: str, storage_options: Mapping[str, Any] | None = None, *, patience: float = PATIENCE
    ) -> None:
        given = dict(storage_options or {})
        self._url = public_url(url)
        self._secrets = _secrets_in(url, given)
        protocol, _, place = url.partition("://")
        self._facts = facts_of(protocol)
        self._patience = patience
        if self._facts.bucket and not place.partition("/")[0]:
            raise Refused(f"{self._url}: names no bucket; expected {protocol}://bucket/path", store=self._url, key="")
        cls = _class_of(protocol, store=self._url, extra=self._facts.extra)
        try:
            # fsspec's own order of precedence: what the caller says explicitly, then the URL. Ours come last.
            options = _merged(self._facts.options(patience), {**cls._get_kwargs_from_urls(url), **given})
            self._root = str(cls._strip_protocol(url)).rstrip("/")
        except Exception as error:
            raise self._explain(error, "open", "") from error

        def make() -> FileSystem:
            fs = cls(**options, skip_instance_cache=True)
            # By attribute, since not every constructor passes the option on (SFTP sends it to paramiko).
            fs.dircache.use_listings_cache = False
            self._facts.prepare(fs, patience)
            return fs

        self._instances = Instances(make, shared=self._facts.shared, close=self._facts.close)

    @property
    def url(self) -> str:
        return self._url

    def put(self, key: str, data: Buffer) -> None:
        check_key(key, store=self.url)
        whole = data if isinstance(data, bytes) else bytes(data)
        path = self._path(key)
        with self._asking("put", key) as fs:
            try:
                self._publish(fs, path, whole)
            except FileNotFoundError:
                if not self._facts.folders:
                    raise
                # Made only when missing: a put costs no request more where the folder is there, which is mostly.
                _make_folders(fs, path.rpartition("/")[0])
                self._publish(fs, path, whole)

    def get(self, key: str) -> bytes:
        check_key(key, store=self.url)
        with self._asking("get", key) as fs, self._not_a_folder(fs, key):
            return self._facts.read(fs, self._path(key), None, None, self._patience)

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        check_range(key, start, stop, store=self.url)
        path = self._path(key)
        with self._asking("get_range", key) as fs, self._not_a_folder(fs, key):
            data = b""
            if start < stop:  # an empty range cannot be written in HTTP; only its bounds are checked, below
                try:
                    data = self._facts.read(fs, path, start, stop, self._patience)
                except Exception as error:
                    if meaning(error) is Refused:  # 416 comes in a different exception from each backend
                        self._check_end(fs, key, start, stop)
                    raise
            if len(data) != stop - start or start == stop:
                self._check_end(fs, key, start, stop)
            if len(data) != stop - start:
                message = f"{self.url}: {key}: asked for bytes {start} to {stop}, got {len(data)} of {stop - start}"
                raise Unavailable(message, store=self.url, key=key)
            return data

    def list(self, prefix: str) -> Sequence[Entry]:
        check_prefix(prefix, store=self.url)
        found = []
        for info in self._find(prefix) if self._facts.flat else self._walk(prefix):
            key = self._key(info["name"])
            if info["type"] == "file" and is_key(key) and key.startswith(prefix):
                found.append(Entry(key, int(info["size"] or 0), _mtime(info, self._facts.mtime)))
        return sorted(found, key=lambda entry: entry.key)

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            check_key(key, store=self.url)

        def remove(key: str) -> StorageError | None:
            try:
                with self._asking("delete", key) as fs, self._not_a_folder(fs, key):
                    self._facts.remove(fs, self._path(key), self._patience)
            except NotFound:
                return None
            except StorageError as error:
                return error
            return None

        results = each(remove, keys, threads=self._facts.threads)
        failures = [(key, error) for key, error in zip(keys, results, strict=True) if error is not None]
        if failures:
            raise delete_failed(failures, len(keys), store=self.url)

    # Paths

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"

    def _key(self, name: str) -> str:
        """The key of a listed name; "" if it does not lie below the root."""
        # Some backends list names with a leading slash that their paths have not, some the other way round.
        root = f"{self._root}/".lstrip("/")
        name = name.lstrip("/")
        return name[len(root) :] if name.startswith(root) else ""

    # Requests

    def _publish(self, fs: FileSystem, path: str, data: bytes) -> None:
        if self._facts.whole:
            self._facts.write(fs, path, data, self._patience)
            return
        temporary = f"{path.rpartition('/')[0]}/{TEMPORARY}{secrets.token_hex(8)}"
        try:
            self._facts.write(fs, temporary, data, self._patience)
            fs.mv(temporary, path)
        except BaseException:
            with suppress(Exception):  # the first error is the one to tell; a left-over is hidden, and harmless
                fs.rm_file(temporary)
            raise

    def _check_end(self, fs: FileSystem, key: str, start: int, stop: int) -> None:
        """Refuse a range that the object is too short for; raises FileNotFoundError if there is no object."""
        info = fs.info(self._path(key))
        if info["type"] == "directory":
            raise FileNotFoundError(key)
        if stop > info["size"]:
            raise past_the_end(key, start, stop, info["size"], store=self.url)

    @contextmanager
    def _not_a_folder(self, fs: FileSystem, key: str) -> Iterator[None]:
        """A folder is no object. SFTP calls reading or removing one a mere "Failure": the name is looked at then."""
        try:
            yield
        except Exception as error:
            if self._facts.folders and meaning(error) is not NotFound and fs.isdir(self._path(key)):
                raise FileNotFoundError(f"{key} is a folder") from error
            raise

    def _find(self, prefix: str) -> Iterable[Mapping[str, Any]]:
        try:
            with self._asking("list", prefix) as fs:
                fs.invalidate_cache()
                return self._facts.find(fs, self._root, prefix, self._patience)
        except NotFound:
            return []

    def _walk(self, prefix: str) -> Iterator[Mapping[str, Any]]:
        todo = [self._path(prefix).rstrip("/") or "/"]
        while todo:
            folders: list[str] = []
            for infos in each(self._list_folder, todo, threads=self._facts.threads):
                for info in infos:
                    if info["type"] == "directory" and is_key(self._key(info["name"].rstrip("/"))):
                        folders.append(info["name"].rstrip("/"))
                    else:
                        yield info
            todo = folders

    def _list_folder(self, path: str) -> Sequence[Mapping[str, Any]]:
        """What lies directly in a folder; nothing if it has been removed, or is an object."""
        try:
            with self._asking("list", self._key(path)) as fs:
                fs.invalidate_cache()
                infos = [info for info in fs.ls(path, detail=True) if info["name"].strip("/") != path.strip("/")]
                for info in infos:
                    if info["type"] == "link" and fs.isdir(info["name"]):
                        # Left out, "moved to another disk" would look like "empty".
                        message = f"{self.url}: {info['name']} is a symbolic link to a folder; a store follows none"
                        raise Refused(message, store=self.url, key=self._key(path))
                return infos
        except NotFound:
            return []

    @contextmanager
    def _asking(self, verb: str, key: str) -> Iterator[FileSystem]:
        """An instance for one call; whatever goes wrong with it becomes a `StorageError` that names store and key."""
        try:
            with self._instances.borrowed() as fs:
                yield fs
        except StorageError:
            raise
        except Exception as error:
            raise self._explain(error, verb, key) from error

    def _explain(self, error: Exception, verb: str, key: str) -> StorageError:
        kind = meaning(error)
        if verb == "put" and kind is NotFound:
            # Where folders are real, one was removed under our feet; elsewhere only the bucket can be missing.
            kind = Unavailable if self._facts.folders else Refused
        elif verb != "put" and isinstance(error, NotADirectoryError):
            kind = NotFound  # below an object there is none
        told = telling(error)
        text = f"{type(told).__name__}: {told}"
        for secret in self._secrets:
            text = text.replace(secret, "***")
        what = "is not there" if kind is NotFound else f"{verb} failed"
        return kind(f"{self.url}: {key or 'the root'}: {what}: {text}", store=self.url, key=key)


def public_url(url: str) -> str:
    """The URL without what must not be shown: a password, and a query, which may hold a signature."""
    return _USER.sub(r"\1@", url.partition("?")[0]).rstrip("/")


def _make_folders(fs: FileSystem, path: str) -> None:
    """Make a folder and those above it, while others may be making them too.

    `makedirs` looks first and makes then; where another was faster, SFTP says no more than "Failure". Whoever fails at
    a folder that is there by now goes on with the next, so there are as many attempts as folders.
    """
    for level in reversed(range(path.count("/") + 1)):
        try:
            fs.makedirs(path, exist_ok=True)
            return
        except Exception:
            if fs.isdir(path):
                return
            if level == 0:
                raise


def _secrets_in(url: str, options: Mapping[str, Any]) -> frozenset[str]:
    """Texts that no message may show. Short ones are left: replacing "a" everywhere would hide nothing but sense."""
    found = {match[2] for match in _USER.finditer(url)} | {url.partition("?")[2]}

    def look(mapping: Mapping[str, Any]) -> None:
        for name, value in mapping.items():
            if isinstance(value, Mapping):
                look(value)
            elif isinstance(value, str) and (_SECRET.search(name) or name == "key"):
                found.add(value)

    look(options)
    return frozenset(text for text in found if len(text) >= 4)


def _class_of(protocol: str, *, store: str, extra: str | None) -> Any:
    from fsspec import get_filesystem_class  # here, not above: local stores start without it

    try:
        return get_filesystem_class(protocol)
    except ImportError as error:
        install = f"pip install 'incremental-ckpt[{extra}]'" if extra else "install what it names"
        raise Refused(
            f"{store}: {protocol}:// needs a library that is missing ({error}); {install}", store=store, key=""
        ) from error
    except ValueError as error:
        known = "a path, file://, memory://, s3://, gs://, abfs://, sftp://, or another scheme that fsspec knows"
        raise Refused(f"{store}: unknown scheme {protocol}://; expected {known}", store=store, key="") from error


def _merged(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """`theirs` over `ours`, one level into mappings, so that one setting of theirs does not drop all of ours."""
    merged = {**ours, **theirs}
    for name, value in ours.items():
        if isinstance(value, Mapping) and isinstance(theirs.get(name), Mapping):
            merged[name] = {**value, **theirs[name]}
    return merged


def _mtime(info: Mapping[str, Any], names: Sequence[str]) -> float | None:
    """The modification time of a listed object as POSIX seconds, in whatever form the backend gives it."""
    for name in names:
        match info.get(name):
            case datetime() as moment:
                return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
            case int() | float() as seconds:
                return float(seconds)
            case str() as text:
                with suppress(ValueError):
                    return _mtime({name: datetime.fromisoformat(text)}, [name])
    return None
