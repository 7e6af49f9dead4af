"""`LocalStore`: the contract, and what a disk, a crash or an attacker can do to it."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from storage_backends.base import NotFound, Refused, StorageError, Store, Unavailable
from storage_backends.local import SWEEP_AFTER, TEMPORARY, LocalStore
from storage_backends.retry import RetryingStore
from storage_backends.system import System
from tests.storage_backends.contract import Opener, StoreContract
from tests.support.faulty import Crash

PASSING = [errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EINTR]
LASTING = [errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.ENAMETOOLONG]


class TestLocalStore(StoreContract):
    @pytest.fixture
    def opener(self, tmp_path: Path) -> Opener:
        return lambda: LocalStore(tmp_path / "a store" / "run")


class Watched(System):
    """Notes each call by the names it concerns, and breaks the n-th one: with an errno, or for good (`Crash`)."""

    def __init__(self, *, fail_at: int = 0, number: int = 0, crash_at: int = 0) -> None:
        self.done: list[str] = []
        self.fired = False
        self._fail_at, self._number, self._crash_at = fail_at, number, crash_at
        self._calls = 0
        self._names: dict[int, str] = {}

    def _note(self, what: str) -> None:
        self._calls += 1
        if self._crash_at and self._calls >= self._crash_at:
            self.fired = True
            raise Crash(what)
        if self._calls == self._fail_at:
            self.fired = True
            raise OSError(self._number, os.strerror(self._number))
        self.done.append(what)

    def _short(self, name: str) -> str:
        return "TMP" if name.startswith(TEMPORARY) else Path(name).name

    def open(self, name: str, flags: int, mode: int = 0o777, *, folder: int | None = None) -> int:
        self._note(f"open {self._short(name)}")
        file = super().open(name, flags, mode, folder=folder)
        self._names[file] = self._short(name)
        return file

    def close(self, file: int) -> None:
        super().close(file)  # first: the process of a crashed test goes on, and must not run out of descriptors
        self._note(f"close {self._names[file]}")

    def write(self, file: int, data: memoryview) -> int:
        self._note(f"write {self._names[file]}")
        return super().write(file, data)

    def pread(self, file: int, size: int, at: int) -> bytes:
        self._note(f"read {self._names[file]}")
        return super().pread(file, size, at)

    def fsync(self, file: int) -> None:
        self._note(f"sync {self._names[file]}")
        super().fsync(file)

    def rename(self, old: str, new: str, folder: int) -> None:
        self._note(f"rename {self._short(old)} {new} in {self._names[folder]}")
        super().rename(old, new, folder)

    def mkdir(self, name: str, folder: int | None) -> None:
        self._note(f"mkdir {self._short(name)}")
        super().mkdir(name, folder)

    def rmdir(self, name: str, folder: int) -> None:
        self._note(f"rmdir {name}")
        super().rmdir(name, folder)

    def unlink(self, name: str, folder: int) -> None:
        self._note(f"unlink {self._short(name)}")
        super().unlink(name, folder)

    def stat(self, file: int) -> os.stat_result:
        self._note(f"stat {self._names[file]}")
        return super().stat(file)

    def scan(self, folder: int) -> Iterator[os.DirEntry[str]]:
        self._note(f"scan {self._names[folder]}")
        return super().scan(folder)

    def deeds(self) -> list[str]:
        """What changes the disk, or makes a change last."""
        return [
            deed for deed in self.done if deed.split()[0] in ("mkdir", "write", "sync", "rename", "unlink", "rmdir")
        ]


def files_below(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir())


# The order of writes


def test_a_put_syncs_new_folders_then_the_file_and_after_the_rename_its_folder(tmp_path: Path) -> None:
    system = Watched()
    store = LocalStore(tmp_path / "root", system=system)
    store.put("packs/run/x", b"1")
    put = ["write TMP", "sync TMP", "rename TMP x in run", "sync run"]
    made = ["mkdir root", f"sync {tmp_path.name}", "mkdir packs", "sync root", "mkdir run", "sync packs"]
    assert system.deeds() == made + put

    system.done.clear()
    store.put("packs/run/x", b"2")
    assert system.deeds() == put


def test_folders_that_another_process_made_are_synced_once_too(tmp_path: Path) -> None:
    LocalStore(tmp_path / "root").put("packs/run/x", b"1")
    system = Watched()
    store = LocalStore(tmp_path / "root", system=system)
    for key in ("packs/run/y", "packs/run/z"):
        store.put(key, b"1")
    syncs = [deed for deed in system.deeds() if deed.startswith("sync")]
    assert syncs == ["sync root", "sync packs", "sync TMP", "sync run", "sync TMP", "sync run"]


def test_a_delete_syncs_its_folder_and_then_removes_the_emptied_ones(tmp_path: Path) -> None:
    system = Watched()
    store = LocalStore(tmp_path, system=system)
    store.put("packs/run/x", b"1")
    store.put("packs/run/y", b"1")
    system.done.clear()
    store.delete(["packs/run/x", "packs/run/y"])
    assert system.deeds() == ["unlink x", "unlink y", "sync run", "rmdir run", "rmdir packs"]
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_folder_syncs_is_no_error(tmp_path: Path) -> None:
    class NoFolderSync(System):
        def fsync(self, file: int) -> None:
            if stat.S_ISDIR(os.fstat(file).st_mode):
                raise OSError(errno.EINVAL, "no such thing here")
            super().fsync(file)

    store = LocalStore(tmp_path / "root", system=NoFolderSync())
    store.put("a/b", b"1")
    assert store.get("a/b") == b"1"


def test_a_crash_at_any_system_call_leaves_the_old_object_or_the_whole_new_one(tmp_path: Path) -> None:
    outcomes = set()
    for n in count(1):
        root = tmp_path / str(n)
        LocalStore(root).put("a/old", b"old" * 1000)
        system = Watched(crash_at=n)
        with suppress(Crash):
            LocalStore(root, system=system).put("a/old", b"new" * 2000)
        after = LocalStore(root)
        entries = after.list("")
        assert [e.key for e in entries] == ["a/old"]
        found = after.get("a/old")
        assert found in (b"old" * 1000, b"new" * 2000)
        assert entries[0].size == len(found)
        outcomes.add((found[:3], len(files_below(root))))
        if not system.fired:
            break
    assert n > 8
    # Before the temporary file, with a left-over beside the old object, and with the new one in place.
    assert outcomes == {(b"old", 1), (b"old", 2), (b"new", 1)}


# Faults of the system


@contextmanager
def no_descriptor_lost() -> Iterator[None]:
    before = len(list(Path("/proc/self/fd").iterdir()))
    yield
    # Fewer are no loss: what tests before this one have opened may be collected meanwhile.
    assert len(list(Path("/proc/self/fd").iterdir())) <= before


def try_every_verb(store: Store) -> None:
    store.put("a/b/one", b"1" * 100)
    store.put("a/two", b"22")
    assert store.get("a/b/one") == b"1" * 100
    assert store.get_range("a/two", 1, 2) == b"2"
    assert [e.key for e in store.list("")] == ["a/b/one", "a/two"]
    store.delete(["a/b/one"])
    assert [e.key for e in store.list("a/")] == ["a/two"]


@pytest.mark.parametrize("number", PASSING, ids=errno.errorcode.get)
def test_a_passing_fault_at_any_system_call_is_retried(tmp_path: Path, number: int) -> None:
    """M5: EIO, ESTALE, timeouts, once at each call."""
    with no_descriptor_lost():
        for n in count(1):
            system = Watched(fail_at=n, number=number)
            root = tmp_path / str(n)
            try_every_verb(RetryingStore(LocalStore(root, system=system), sleep=lambda seconds: None))
            assert files_below(root) == ["a/two"], "a temporary file was left"
            if not system.fired:
                break
    assert n > 40


@pytest.mark.parametrize("number", LASTING, ids=errno.errorcode.get)
def test_a_lasting_fault_at_any_system_call_of_a_put_is_refused_at_once(tmp_path: Path, number: int) -> None:
    """M5: EACCES, ENOSPC, EROFS are not retried; what is there stays, and no temporary file is left."""
    naps: list[float] = []
    refused = 0
    with no_descriptor_lost():
        for n in count(1):
            root = tmp_path / str(n)
            LocalStore(root).put("a/old", b"old")
            system = Watched(fail_at=n, number=number)
            try:
                RetryingStore(LocalStore(root, system=system), sleep=naps.append).put("a/old", b"new")
            except Refused as error:
                refused += 1
                assert error.attempts == 1
                for part in (str(root), "a/old", os.strerror(number)):
                    assert part in str(error)
            assert LocalStore(root).get("a/old") in (b"old", b"new")
            assert files_below(root) == ["a/old"]
            if not system.fired:
                break
    assert naps == []
    assert refused > 8


def test_a_listing_that_fails_is_an_error_and_never_an_empty_list(tmp_path: Path) -> None:
    LocalStore(tmp_path).put("a/b/c", b"1")
    for n in count(1):
        system = Watched(fail_at=n, number=errno.EIO)
        try:
            assert [e.key for e in LocalStore(tmp_path, system=system).list("")] == ["a/b/c"]
        except Unavailable as error:
            assert str(tmp_path) in str(error)
        if not system.fired:
            break
    assert n > 6


def test_a_delete_that_fails_for_one_key_removes_the_others_and_counts(tmp_path: Path) -> None:
    class Stuck(System):
        def unlink(self, name: str, folder: int) -> None:
            if name in ("3", "7"):
                raise PermissionError(errno.EPERM, "immutable")
            super().unlink(name, folder)

    store = LocalStore(tmp_path, system=Stuck())
    keys = [f"x{n % 2}/{n}" for n in range(10)]
    for key in keys:
        store.put(key, b"1")
    with pytest.raises(Refused, match=r"2 of 10 objects could not be removed, first x1/3: .*immutable"):
        store.delete(keys)
    assert [e.key for e in store.list("")] == ["x1/3", "x1/7"]


def test_short_writes_and_reads_are_continued(tmp_path: Path) -> None:
    """I6: a file system that takes and gives only a few bytes at a time."""

    class Sips(System):
        def write(self, file: int, data: memoryview) -> int:
            return super().write(file, data[:7])

        def pread(self, file: int, size: int, at: int) -> bytes:
            return super().pread(file, min(size, 5), at)

    data = bytes(range(256)) * 3
    store = LocalStore(tmp_path, system=Sips())
    store.put("o", data)
    assert store.get("o") == data == LocalStore(tmp_path).get("o")
    assert store.get_range("o", 100, 333) == data[100:333]


def test_a_write_that_takes_nothing_fails_instead_of_spinning(tmp_path: Path) -> None:
    class Stuffed(System):
        def write(self, file: int, data: memoryview) -> int:
            return 0

    with pytest.raises(Unavailable):
        LocalStore(tmp_path, system=Stuffed()).put("o", b"1")
    assert files_below(tmp_path) == []


def test_a_file_that_shrinks_while_it_is_read_is_an_error_that_says_where(tmp_path: Path) -> None:
    class Shrinking(System):
        def pread(self, file: int, size: int, at: int) -> bytes:
            return super().pread(file, 3, at) if at < 6 else b""

    store = LocalStore(tmp_path, system=Shrinking())
    store.put("o", b"0123456789")
    with pytest.raises(Unavailable, match=r"o ended at byte 8 while bytes 2 to 10"):
        store.get_range("o", 2, 10)


def test_an_offset_beyond_four_gigabytes_is_exact_in_a_sparse_file(tmp_path: Path) -> None:
    """I6: around 2**31 and 2**32."""
    store = LocalStore(tmp_path)
    store.put("o", b"")
    with open(tmp_path / "o", "r+b") as file:
        for at in (2**31, 2**32):
            file.seek(at - 2)
            file.write(b"abcd")
    for at in (2**31, 2**32):
        assert store.get_range("o", at - 3, at + 2) == b"\0abcd"
    with pytest.raises(Refused):
        store.get_range("o", 2**32, 2**32 + 3)


# Modes, places, people


def test_modes_follow_the_umask(tmp_path: Path) -> None:
    """M6."""
    old = os.umask(0o027)
    try:
        LocalStore(tmp_path / "root").put("a/b", b"1")
    finally:
        os.umask(old)
    modes = [stat.S_IMODE((tmp_path / "root" / part).stat().st_mode) for part in ("", "a", "a/b")]
    assert modes == [0o750, 0o750, 0o640]


def test_temporary_files_lie_beside_their_target_and_tmp_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """M6: a full /tmp does not matter."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "does-not-exist"))
    beside: list[list[str]] = []

    class Looking(System):
        def fsync(self, file: int) -> None:
            beside.append([name for name in os.listdir(tmp_path / "a/b") if name.startswith(TEMPORARY)])
            super().fsync(file)

    store = LocalStore(tmp_path, system=Looking())
    os.makedirs(tmp_path / "a/b")
    store.put("a/b/c", b"1")
    assert [len(names) for names in beside] == [0, 0, 1, 0]
    assert [e.key for e in store.list("")] == ["a/b/c"]


@contextmanager
def read_only_for_this_process(folder: Path) -> Iterator[None]:
    """Root may write anywhere, so as root this becomes another user for a while."""
    folder.chmod(0o555)
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_read_only_folder_is_refused_and_still_readable() -> None:
    """F6."""
    with TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        root = Path(name) / "root"
        LocalStore(root).put("old", b"1")
        with read_only_for_this_process(root):
            store = LocalStore(root)
            for key in ("new", "old", "folder/new"):
                with pytest.raises(Refused, match="Permission denied"):
                    store.put(key, b"2")
            with pytest.raises(Refused, match=r"1 of 1 objects .*Permission denied"):
                store.delete(["old"])
            assert store.get("old") == b"1"
        root.chmod(0o755)


def test_a_read_only_target_file_is_replaced_or_refused_but_never_reported_wrongly(tmp_path: Path) -> None:
    """F6: replacing is a right on the folder, so the new bytes are there."""
    store = LocalStore(tmp_path)
    store.put("o", b"old")
    (tmp_path / "o").chmod(0o444)
    store.put("o", b"new")
    assert store.get("o") == b"new"


def test_a_root_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for root in ("file", "file/below"):
        store = LocalStore(tmp_path / root)
        with pytest.raises(Refused, match="a store on disk is a folder"):
            store.put("a", b"")
        with pytest.raises(Refused, match="a store on disk is a folder"):
            store.list("")
        with pytest.raises(Refused, match="a store on disk is a folder"):
            store.get("a")


def test_an_object_where_a_folder_must_be_is_refused(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("a", b"1")
    store.put("f/x", b"1")
    for key in ("a/b", "f"):
        with pytest.raises(Refused):
            store.put(key, b"2")
    assert [e.key for e in store.list("")] == ["a", "f/x"]
    assert list(store.list("a/")) == []


# Links and other foreign things


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder outside the store ``tmp_path/root``, to which a link in the store leads."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    LocalStore(tmp_path / "root").put("real/x", b"1")
    return outside


def test_no_verb_follows_a_linked_folder_out_of_the_store(tmp_path: Path, outside: Path) -> None:
    (tmp_path / "root/link").symlink_to(outside)
    store = LocalStore(tmp_path / "root")
    for call in (
        lambda: store.put("link/new", b"1"),
        lambda: store.put("link/secret", b"1"),
        lambda: store.get("link/secret"),
        lambda: store.get_range("link/secret", 0, 1),
        lambda: store.list("link/"),
        lambda: store.list(""),
        lambda: store.delete(["link/secret"]),
    ):
        with pytest.raises(Refused, match="symbolic link"):
            call()
    assert files_below(outside) == ["secret"]
    assert (outside / "secret").read_bytes() == b"secret"


def test_no_verb_follows_a_linked_object_out_of_the_store(tmp_path: Path, outside: Path) -> None:
    (tmp_path / "root/o").symlink_to(outside / "secret")
    store = LocalStore(tmp_path / "root")
    for call in (lambda: store.get("o"), lambda: store.get_range("o", 0, 1)):
        with pytest.raises(Refused, match="symbolic link"):
            call()
    assert [e.key for e in store.list("")] == ["real/x"]
    store.put("o", b"mine")
    assert store.get("o") == b"mine"
    (tmp_path / "root/o2").symlink_to(outside / "secret")
    store.delete(["o2"])
    assert not (tmp_path / "root/o2").is_symlink()
    assert (outside / "secret").read_bytes() == b"secret"


def test_a_folder_swapped_for_a_link_in_the_middle_of_a_put_leads_nowhere(tmp_path: Path, outside: Path) -> None:
    class Swapping(System):
        def open(self, name: str, flags: int, mode: int = 0o777, *, folder: int | None = None) -> int:
            if name == "real":
                os.rename(tmp_path / "root/real", tmp_path / "root/moved")
                (tmp_path / "root/real").symlink_to(outside)
            return super().open(name, flags, mode, folder=folder)

    with pytest.raises(Refused, match="symbolic link"):
        LocalStore(tmp_path / "root", system=Swapping()).put("real/y", b"1")
    assert files_below(outside) == ["secret"]


def test_the_root_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "runs").symlink_to(tmp_path / "disk")
    store = LocalStore(tmp_path / "runs")
    store.put("a", b"1")
    assert [e.key for e in store.list("")] == ["a"]
    assert store.url == str(tmp_path / "runs")


def test_a_fifo_is_refused_without_waiting_for_a_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    store = LocalStore(tmp_path)
    with pytest.raises(Refused, match="not a plain file"):
        store.get("pipe")
    assert list(store.list("")) == []


def test_foreign_names_are_not_listed(tmp_path: Path) -> None:
    for name in (".hidden", "with space", "ümlaut", ".folder/x", "a folder/x", ".tmp-0123"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    LocalStore(tmp_path).put("ours", b"1")
    assert [e.key for e in LocalStore(tmp_path).list("")] == ["ours"]


def test_a_file_that_vanishes_during_a_listing_is_left_out(tmp_path: Path) -> None:
    class Racing(System):
        def scan(self, folder: int) -> Iterator[os.DirEntry[str]]:
            for entry in super().scan(folder):
                if entry.name == "goes":
                    os.unlink(tmp_path / "a/goes")
                if entry.name == "folder":
                    os.rmdir(tmp_path / "a/folder")
                yield entry

    store = LocalStore(tmp_path, system=Racing())
    store.put("a/goes", b"1")
    store.put("a/stays", b"1")
    (tmp_path / "a/folder").mkdir()
    assert [e.key for e in store.list("")] == ["a/stays"]


# Folders that come and go, and what crashes leave


def test_a_put_makes_its_folder_again_when_a_delete_removes_it_under_its_feet(tmp_path: Path) -> None:
    class Pulling(System):
        pulls = 3

        def open(self, name: str, flags: int, mode: int = 0o777, *, folder: int | None = None) -> int:
            if name.startswith(TEMPORARY) and self.pulls:
                self.pulls -= 1
                os.rmdir(tmp_path / "a/b")
                os.rmdir(tmp_path / "a")
            return super().open(name, flags, mode, folder=folder)

    system = Pulling()
    store = LocalStore(tmp_path, system=system)
    store.put("a/b/c", b"1")
    assert system.pulls == 0
    assert store.get("a/b/c") == b"1"


def test_puts_and_deletes_in_one_folder_from_two_stores_never_trip_each_other(tmp_path: Path) -> None:
    failures: list[StorageError] = []

    def work(me: int) -> None:
        store = LocalStore(tmp_path)
        try:
            for _ in range(60):
                store.put(f"a/b/{me}", b"1")
                store.delete([f"a/b/{me}"])
        except StorageError as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(me,)) for me in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert list(LocalStore(tmp_path).list("")) == []


def test_a_delete_sweeps_old_temporary_files_of_its_top_folder_and_no_young_ones(tmp_path: Path) -> None:
    now = 1_000_000.0
    store = LocalStore(tmp_path, wall=lambda: now)
    for key in ("packs/1/a", "packs/2/b", "parts/1/c"):
        store.put(key, b"1")
    left = {"packs/1/.tmp-old": 1.5, "packs/2/.tmp-old": 1.5, "packs/2/.tmp-young": 0.5, "parts/1/.tmp-old": 1.5}
    for name, age in left.items():
        (tmp_path / name).write_bytes(b"half")
        os.utime(tmp_path / name, (0, now - age * SWEEP_AFTER))
    store.delete(["packs/1/a"])
    assert files_below(tmp_path) == ["packs/2/.tmp-young", "packs/2/b", "parts/1/.tmp-old", "parts/1/c"]


def test_a_put_whose_temporary_file_is_swept_writes_it_again(tmp_path: Path) -> None:
    class Sweeping(System):
        sweeps = 1

        def rename(self, old: str, new: str, folder: int) -> None:
            if self.sweeps:
                self.sweeps -= 1
                os.unlink(tmp_path / "a" / old)
            super().rename(old, new, folder)

    store = LocalStore(tmp_path, system=Sweeping())
    store.put("a/o", b"1")
    assert store.get("a/o") == b"1"


def test_a_missing_object_says_store_and_key(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=f"{tmp_path}: a/b: is not there"):
        LocalStore(tmp_path).get("a/b")
