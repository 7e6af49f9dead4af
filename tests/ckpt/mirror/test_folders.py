"""Nothing that another user made, or could change, is followed, read or written."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from ckpt.mirror.folders import (
    Folder,
    Unsafe,
    default_folder,
    file_name,
    folder_of,
    open_store_folder,
    rank_of,
    store_identity,
)

NAME = file_name(3, "0badcafe")
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's files")


def test_where_mirrors_lie(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CKPT_MIRROR_DIR", raising=False)
    assert folder_of("auto") == default_folder() == Path(f"/dev/shm/ckpt-{os.geteuid()}")
    monkeypatch.setenv("CKPT_MIRROR_DIR", str(tmp_path))
    assert folder_of("auto") == tmp_path
    assert folder_of("off") is None
    assert folder_of(f"disk:{tmp_path}/m") == tmp_path / "m" == folder_of(tmp_path / "m")
    assert folder_of("disk:~/m") == Path.home() / "m"
    with pytest.raises(ValueError, match="expected"):
        folder_of("disk:")


def test_a_store_has_one_identity_by_whatever_path_it_is_reached(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "link").symlink_to("runs")
    assert store_identity(str(tmp_path / "link")) == store_identity(f"{tmp_path}/runs/")
    assert store_identity("s3://b/x/") == store_identity("s3://b/x") != store_identity("s3://b/y")
    assert len(store_identity("s3://b/x")) == 16


def test_names() -> None:
    assert rank_of(NAME) == 3 and rank_of(file_name(123456, "0badcafe")) == 123456
    assert rank_of("rank-00003-0badcafe.mirror.old") is rank_of("x") is None


def test_folders_and_files_are_the_owners_alone(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        with open_store_folder(tmp_path / "a" / "b", "0" * 16, create=True) as folder:
            os.close(folder.create_file(NAME))
            assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700
            assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
            assert stat.S_IMODE((folder.path / NAME).stat().st_mode) == 0o600
    finally:
        os.umask(old)


def test_a_folder_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(0o700)
    (tmp_path / "link").symlink_to("real")
    for create in (False, True):
        with pytest.raises(Unsafe, match="follow no links"):
            Folder.open(tmp_path / "link", create=create)
    (tmp_path / "real" / ("0" * 16)).symlink_to(tmp_path)
    with pytest.raises(Unsafe, match="follow no links"):
        open_store_folder(tmp_path / "real", "0" * 16, create=True)


def test_a_dangling_link_is_not_created_through(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "trap")
    with pytest.raises(OSError):
        Folder.open(tmp_path / "link", create=True)
    assert not (tmp_path / "trap").exists()


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o720])
def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(mode)
    with pytest.raises(Unsafe, match=f"mode {mode:04o}, so others may write"):
        Folder.open(tmp_path / "open")


@as_root
def test_another_users_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir(0o700)
    os.chown(tmp_path / "theirs", 12345, 12345)
    for create in (False, True):
        with pytest.raises(Unsafe, match="belongs to user 12345"):
            Folder.open(tmp_path / "theirs", create=create)


def trap(folder: Folder, kind: str) -> None:
    path = folder.path / NAME
    match kind:
        case "link":
            (folder.path / "target").touch(0o600)
            path.symlink_to("target")
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path, 0o600)
        case "readable":
            path.touch()
            path.chmod(0o604)
        case "theirs":
            path.touch(0o600)
            os.chown(path, 12345, 12345)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("link", "symbolic link"),
        ("pipe", "not a plain file"),
        ("readable", "mode 0604"),
        pytest.param("theirs", "belongs to user 12345", marks=as_root),
    ],
)
@pytest.mark.parametrize("write", [False, True])
def test_a_file_that_is_not_ours_alone_is_not_opened(tmp_path: Path, kind: str, text: str, write: bool) -> None:
    with open_store_folder(tmp_path / "m", "0" * 16, create=True) as folder:
        trap(folder, kind)
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(Unsafe, match=text):
            folder.open_file(NAME, write=write)
        assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("kind", ["link", "folder", "pipe", "readable"])
def test_a_file_is_never_created_over_what_is_there(tmp_path: Path, kind: str) -> None:
    with open_store_folder(tmp_path / "m", "0" * 16, create=True) as folder:
        trap(folder, kind)
        with pytest.raises(FileExistsError):
            folder.create_file(NAME)


def test_a_store_folder_that_somebody_removes_meanwhile_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, removed = os.mkdir, []

    def mkdir(name: object, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        real(name, mode, dir_fd=dir_fd)
        if dir_fd is not None and not removed:
            removed.append(name)
            os.rmdir(name, dir_fd=dir_fd)

    monkeypatch.setattr(os, "mkdir", mkdir)
    with open_store_folder(tmp_path / "m", "0" * 16, create=True) as folder:
        assert folder.path.is_dir() and removed


def test_a_name_that_was_given_to_another_file_is_told(tmp_path: Path) -> None:
    with open_store_folder(tmp_path / "m", "0" * 16, create=True) as folder:
        fd = folder.create_file(NAME)
        assert folder.is_named(NAME, fd)
        folder.unlink(NAME)
        assert not folder.is_named(NAME, fd)
        other = folder.create_file(NAME)
        assert not folder.is_named(NAME, fd) and folder.is_named(NAME, other)
        folder.unlink("gone")
        os.close(fd)
        os.close(other)
