"""`FsspecStore`: the contract on three kinds of backend, and what libraries do behind a store's back."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import threading
import weakref
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from storage_backends import facts
from storage_backends import fsspec_store as module
from storage_backends.base import NotFound, Refused, Unavailable
from storage_backends.facts import FACTS, UNKNOWN, Facts
from storage_backends.fsspec_store import FsspecStore, public_url
from storage_backends.retry import RetryingStore
from tests.storage_backends.contract import Opener, StoreContract

places = count(1)


@pytest.fixture
def place() -> Iterator[str]:
    """A folder of fsspec's process-wide memory that is nobody else's."""
    name = f"place{next(places)}"
    yield name
    for path in [path for path in MemoryFileSystem.store if path.startswith(f"/{name}")]:
        del MemoryFileSystem.store[path]


class TestFsspecMemory(StoreContract):
    @pytest.fixture
    def opener(self, place: str) -> Opener:
        return lambda: FsspecStore(f"memory://{place}/run")


class TestFsspecLocal(StoreContract):
    """Real folders, a rename to publish, folders listed one by one."""

    @pytest.fixture
    def opener(self, tmp_path: Path) -> Opener:
        return lambda: FsspecStore(f"file://{tmp_path}/a/run")


class Elsewhere(MemoryFileSystem):
    """fsspec's memory under another scheme."""

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return MemoryFileSystem._strip_protocol(re.sub(r"^\w+://", "", str(path)))


class Taken:
    def __init__(self, lock: threading.Lock) -> None:
        self.lock = lock

    def __enter__(self) -> None:
        assert self.lock.acquire(blocking=False), "two threads in one instance"

    def __exit__(self, *failure: object) -> None:
        self.lock.release()


class Careful(Elsewhere):
    """A backend of which the table knows nothing, whose instances must not be used by two threads at once."""

    protocol = "careful"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.busy = threading.Lock()

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        with Taken(self.busy):
            return super()._open(path, mode, **options)

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        with Taken(self.busy):
            return super().ls(path, detail, **options)


@pytest.fixture(autouse=True)
def careful() -> None:
    fsspec.register_implementation("careful", Careful, clobber=True)


class TestFsspecUnknownBackend(StoreContract):
    @pytest.fixture
    def opener(self, place: str) -> Opener:
        return lambda: FsspecStore(f"careful://{place}/run")


def faulty(monkeypatch: pytest.MonkeyPatch, name: str, cls: type, facts: Facts = UNKNOWN) -> None:
    """Make `name`:// a scheme of fsspec, with its row in the table."""
    fsspec.register_implementation(name, cls, clobber=True)
    monkeypatch.setattr(module, "facts_of", {**FACTS, name: facts}.get)


# Instances and caches


def test_an_instance_is_private(place: str) -> None:
    """An instance that others use may have been given a cache, or be inside a transaction."""
    shared = fsspec.filesystem("memory")
    store = FsspecStore(f"memory://{place}")
    with shared.transaction:
        store.put("a", b"1")
        assert store.get("a") == b"1"
        assert [e.key for e in store.list("")] == ["a"]


def test_listings_are_not_cached_even_by_a_backend_that_caches_for_ever(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """M4."""

    class Caching(Careful):
        protocol = "caching"
        own: dict[str, Any]

        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.own = {}

        def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
            for cache in (self.own, self.dircache):  # one of its own, and fsspec's
                if path in cache:
                    return cache[path]
            infos = super().ls(path, detail, **options)
            self.own[path] = self.dircache[path] = infos
            return infos

        def invalidate_cache(self, path: str | None = None) -> None:
            self.own.clear()

    faulty(monkeypatch, "caching", Caching)
    one, other = FsspecStore(f"caching://{place}"), FsspecStore(f"caching://{place}")
    one.put("runs/a", b"1")
    assert [e.key for e in one.list("runs/")] == ["runs/a"]
    other.put("runs/b", b"1")
    assert [e.key for e in one.list("runs/")] == ["runs/a", "runs/b"]


def test_a_broken_connection_is_not_used_again(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Careful] = []

    class Breaking(Careful):
        protocol = "breaking"
        broken = False

        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            made.append(self)

        def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
            if self.broken:
                raise EOFError("socket closed")
            return bytes(super().cat_file(path, start, end, **options))

    faulty(monkeypatch, "breaking", Breaking)
    bare = FsspecStore(f"breaking://{place}")
    bare.put("a", b"1")
    with pytest.raises(NotFound):  # an answer, not a fault: the instance stays
        bare.get("b")
    bare.get("a")
    assert len(made) == 1
    made[0].broken = True
    assert RetryingStore(bare, sleep=lambda seconds: None).get("a") == b"1"
    assert len(made) == 2


@pytest.mark.parametrize("scheme", ["memory", "careful"])
def test_a_forked_child_makes_instances_of_its_own(place: str, scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FsspecStore(f"{scheme}://{place}")
    store.put("a", b"1")
    with store._instances.borrowed() as fs:
        before = weakref.ref(fs)
    del fs
    here = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: here + 1)
    with store._instances.borrowed() as fs:
        assert fs is not before()
    assert before() is not None, "collected, it would close its parent's connection"


# Publishing


class Tearing(Careful):
    """Publishes what was written so far when a write fails, as fsspec's open() does."""

    protocol = "tearing"
    torn = 0

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        if type(self).torn:
            type(self).torn -= 1
            super().pipe_file(path, value[: len(value) // 2])
            raise OSError(errno.EIO, "connection lost")
        super().pipe_file(path, value)


def test_a_half_written_object_is_never_seen(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    faulty(monkeypatch, "tearing", Tearing)
    store = FsspecStore(f"tearing://{place}")
    store.put("a/o", b"old" * 10)
    monkeypatch.setattr(Tearing, "torn", 1)
    with pytest.raises(Unavailable):
        store.put("a/o", b"new" * 20)
    assert store.get("a/o") == b"old" * 10
    assert [path for path in MemoryFileSystem.store if place in path] == [f"/{place}/a/o"]
    monkeypatch.setattr(Tearing, "torn", 2)
    RetryingStore(store, sleep=lambda seconds: None).put("a/o", b"new" * 20)
    assert store.get("a/o") == b"new" * 20


class Foldered(Careful):
    """Folders are real, and somebody else is always faster at making the next one."""

    protocol = "foldered"
    made: set[str]
    attempts = 0

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.made = set()

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        type(self).attempts += 1
        parts = path.split("/")
        for n in range(2, len(parts) + 1):
            folder = "/".join(parts[:n])
            if folder not in self.made:
                self.made.add(folder)
                raise OSError("Failure")

    def isdir(self, path: str) -> bool:
        return path in self.made

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        if path.rpartition("/")[0] not in self.made:
            raise FileNotFoundError(path)
        super().pipe_file(path, value)

    def mv(self, old: str, new: str, **options: Any) -> None:
        MemoryFileSystem.mv(self, old, new)


def test_folders_that_others_make_at_the_same_time_are_no_error(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """SFTP: two threads put into a new folder, both find it missing, and one is told "Failure" for making it."""
    faulty(monkeypatch, "foldered", Foldered)
    monkeypatch.setattr(Foldered, "attempts", 0)
    store = FsspecStore(f"foldered://{place}")
    store.put("a/b/c/o", b"1")
    assert store.get("a/b/c/o") == b"1"
    assert Foldered.attempts == 4


def test_a_folder_that_cannot_be_made_is_an_error(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Foldered, path: str, exist_ok: bool = False) -> None:
        raise PermissionError(path)

    faulty(monkeypatch, "foldered", Foldered)
    monkeypatch.setattr(Foldered, "makedirs", fail)
    with pytest.raises(Refused, match="put failed"):
        FsspecStore(f"foldered://{place}").put("a/b/o", b"1")


def test_left_over_temporary_objects_are_not_listed(place: str) -> None:
    store = FsspecStore(f"careful://{place}")
    store.put("a/o", b"1")
    fsspec.filesystem("memory").pipe_file(f"/{place}/a/.tmp-0123", b"half")
    fsspec.filesystem("memory").pipe_file(f"/{place}/a/with space", b"foreign")
    assert [e.key for e in store.list("")] == ["a/o"]


# Reading


class Odd(Elsewhere):
    """Answers a range as it is told."""

    protocol = "odd"
    answer: bytes | Exception | None = None

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer if self.answer is not None else bytes(super().cat_file(path, start, end))


class HttpResponseError(Exception):
    status_code = 416


@pytest.mark.parametrize(
    "answer",
    [b"", b"6789", OSError(errno.EINVAL, "InvalidRange"), HttpResponseError()],
    ids=["none", "short", "s3", "az"],
)
def test_a_range_past_the_end_is_refused_whatever_the_backend_makes_of_it(
    place: str, monkeypatch: pytest.MonkeyPatch, answer: bytes | Exception
) -> None:
    faulty(monkeypatch, "odd", Odd, FACTS["memory"])
    store = FsspecStore(f"odd://{place}")
    store.put("o", b"0123456789")
    monkeypatch.setattr(Odd, "answer", answer)
    with pytest.raises(Refused, match="bytes 6 to 12 and holds only 10"):
        store.get_range("o", 6, 12)


@pytest.mark.parametrize("answer", [b"", b"01", b"0123456789"], ids=["none", "short", "the whole object"])
def test_an_answer_of_another_length_is_an_error_that_names_object_and_offsets(
    place: str, monkeypatch: pytest.MonkeyPatch, answer: bytes
) -> None:
    """M2: a short body inside the object may be better next time."""
    faulty(monkeypatch, "odd", Odd, FACTS["memory"])
    store = FsspecStore(f"odd://{place}")
    store.put("o", b"0123456789")
    monkeypatch.setattr(Odd, "answer", answer)
    with pytest.raises(Unavailable, match=rf"o: asked for bytes 2 to 7, got {len(answer)} of 5"):
        store.get_range("o", 2, 7)


# Listing and deleting


class Unlisted(Careful):
    protocol = "unlisted"
    failure: Exception = OSError(errno.EIO, "throttled")
    where = "nowhere"

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        if path.endswith(self.where):
            raise self.failure
        return super().ls(path, detail, **options)


@pytest.mark.parametrize("where", ["a", "b", "c"])
@pytest.mark.parametrize(
    ("failure", "kind"), [(OSError(errno.EIO, "x"), Unavailable), (PermissionError("x"), Refused)], ids=["EIO", "perm"]
)
def test_a_folder_that_cannot_be_listed_is_an_error_and_never_empty(
    place: str, monkeypatch: pytest.MonkeyPatch, where: str, failure: Exception, kind: type[Unavailable]
) -> None:
    """M3: fsspec's own find() leaves out what it could not list."""
    faulty(monkeypatch, "unlisted", Unlisted)
    store = FsspecStore(f"unlisted://{place}")
    store.put("a/b/c/d", b"1")
    assert [e.key for e in store.list("a/")] == ["a/b/c/d"]
    monkeypatch.setattr(Unlisted, "where", where)
    monkeypatch.setattr(Unlisted, "failure", failure)
    with pytest.raises(kind, match="list failed"):
        store.list("a/")


def test_a_delete_reports_what_could_not_be_removed_and_removes_the_rest(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Sticky(Careful):
        protocol = "sticky"

        def rm_file(self, path: str) -> None:
            if path.endswith(("/3", "/7")):
                raise PermissionError(path)
            super().rm_file(path)

    faulty(monkeypatch, "sticky", Sticky)
    store = FsspecStore(f"sticky://{place}")
    for n in range(10):
        store.put(f"a/{n}", b"1")
    with pytest.raises(Refused, match=r"2 of 12 objects could not be removed, first a/3"):
        store.delete([f"a/{n}" for n in range(12)])
    assert [e.key for e in store.list("")] == ["a/3", "a/7"]


class NoSuchBucketError(Exception):
    response = {"Error": {"Code": "NoSuchBucket"}}  # noqa: RUF012 - as botocore has it


def test_a_missing_bucket_is_an_error_and_not_an_empty_store(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Bucketless(Elsewhere):
        protocol = "bucketless"

        def _gone(self, *args: Any, **options: Any) -> Any:
            raise FileNotFoundError("The specified bucket does not exist") from NoSuchBucketError()

        find = cat_file = pipe_file = _gone

    faulty(monkeypatch, "bucketless", Bucketless, FACTS["memory"])
    store = FsspecStore(f"bucketless://{place}")
    for call in (lambda: store.list(""), lambda: store.get("a"), lambda: store.put("a", b"")):
        with pytest.raises(Refused, match="bucket does not exist"):
            call()


class Silent(AsyncFileSystem):
    """Asynchronous, and without timeouts of its own, as gcsfs is: takes requests and never answers."""

    protocol = "silent"

    async def _pipe_file(self, path: str, value: bytes, **options: Any) -> None:
        await asyncio.Event().wait()

    async def _cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        await asyncio.Event().wait()
        return b""

    async def _rm_file(self, path: str, **options: Any) -> None:
        await asyncio.Event().wait()


@pytest.mark.parametrize("verb", ["put", "get", "get_range", "delete"])
def test_a_backend_without_timeouts_of_its_own_is_given_up(monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    monkeypatch.setattr(facts, "SLOWEST", 1 << 40)  # what a put, and a read of unknown length, get on top
    faulty(monkeypatch, "silent", Silent, FACTS["gs"])
    store = FsspecStore("silent://bucket/run", patience=0.1)
    call = {
        "put": lambda: store.put("a", b"123"),
        "get": lambda: store.get("a"),
        "get_range": lambda: store.get_range("a", 0, 10),
        "delete": lambda: store.delete(["a"]),
    }[verb]
    with pytest.raises(Unavailable, match=r"TimeoutError: timed out: a .* took more than 0\.1 s"):
        call()


# What is shown, and the table


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://bucket/run", "s3://bucket/run"),
        ("s3://bucket/run/", "s3://bucket/run"),
        ("sftp://me:hush-hush@host:22/data", "sftp://me@host:22/data"),
        ("abfs://box@account.dfs.core.windows.net/run", "abfs://box@account.dfs.core.windows.net/run"),
        ("https://host/path?sig=hush-hush", "https://host/path"),
    ],
)
def test_a_shown_url_holds_no_secrets(url: str, shown: str) -> None:
    assert public_url(url) == shown


def test_no_message_holds_a_secret(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Talking(Elsewhere):
        protocol = "talking"

        def __init__(self, **options: Any) -> None:
            super().__init__()
            self.options = options

        @staticmethod
        def _get_kwargs_from_urls(url: str) -> dict[str, Any]:
            return {"host": "h"}

        def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
            raise PermissionError(f"{self.options} and hush-url")

    faulty(monkeypatch, "talking", Talking, FACTS["memory"])
    options = {"secret": "hush-secret", "client_kwargs": {"aws_session_token": "hush-token"}, "key": "hush-key"}
    store = FsspecStore(f"talking://me:hush-url@{place}/run", {**options, "endpoint": "visible"})
    with pytest.raises(Refused) as caught:
        store.get("a")
    assert "hush" not in str(caught.value)
    assert "visible" in str(caught.value)
    assert "hush" not in store.url


def test_options_of_the_user_go_before_those_of_the_table_one_setting_at_a_time(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Optional(Elsewhere):
        protocol = "optional"

        def __init__(self, **options: Any) -> None:
            super().__init__()
            self.options = options

    def prepare(fs: Optional, patience: float) -> None:
        fs.retries = patience  # type: ignore[attr-defined]

    facts = Facts(shared=True, options=lambda s: {"timeout": s, "config": {"a": 1, "b": 1}}, prepare=prepare)
    faulty(monkeypatch, "optional", Optional, facts)
    store = FsspecStore(f"optional://{place}", {"config": {"b": 2}, "more": 3}, patience=7)
    with store._instances.borrowed() as fs:
        assert fs.options == {"timeout": 7, "config": {"a": 1, "b": 2}, "more": 3}
        assert fs.retries == 7


@pytest.mark.parametrize("extra", sorted({facts.extra for facts in FACTS.values() if facts.extra}))
def test_the_extras_that_messages_name_exist(extra: str) -> None:
    from importlib.metadata import metadata

    assert extra in metadata("incremental-ckpt").get_all("Provides-Extra")
