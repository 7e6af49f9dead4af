"""What lies about on a node, and that only the dead are swept, and only our own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckpt.mirror.folders import file_name, open_store_folder
from ckpt.mirror.leftovers import BORN, Leftover, Trouble, find_mirrors, sweep, sweep_store
from tests.ckpt.mirror.making import ELSEWHERE, ME, STORE, files, fill, in_child, layout_of, mirror

LAYOUT = layout_of()


def left_by_the_dead(base: Path, rank: int = 0) -> Path:
    before = set(files(base))
    in_child(lambda: fill(made := mirror(base, rank), LAYOUT, 6, fill(made, LAYOUT, 5)))
    (path,) = set(files(base)) - before
    return path


def found(base: Path, now: float = 0.0) -> dict[int, Leftover]:
    return {m.rank: m for m in find_mirrors([base], ME, now) if isinstance(m, Leftover)}


def test_the_dead_and_the_living_are_told_apart(tmp_path: Path) -> None:
    base = tmp_path / "m"
    path = left_by_the_dead(base, 1)
    made = mirror(base)
    fill(made, LAYOUT, 7)
    other = mirror(base, 2, me=ELSEWHERE)
    fill(other, LAYOUT, 8)
    mirrors = found(base)
    assert {rank: (m.state, [s.step for s in m.slots]) for rank, m in mirrors.items()} == {
        0: ("live", [7]),
        1: ("dead", [5, 6]),
        2: ("unknown", [8]),
    }
    assert mirrors[1].path == path and mirrors[1].store == STORE and mirrors[1].size >= 2 * LAYOUT.nbytes
    assert mirrors[1].problem is None and mirrors[1].owner is not None and mirrors[1].owner.pid != os.getpid()


def test_only_the_dead_are_swept(tmp_path: Path) -> None:
    base = tmp_path / "m"
    path = left_by_the_dead(base, 1)
    made = mirror(base)
    fill(made, LAYOUT, 7)
    assert [m.path for m in sweep(found(base).values(), ME, 0.0)] == [path]
    assert files(base) == [made.path]
    assert list(sweep(found(base).values(), ME, 0.0)) == []


def test_the_folder_of_a_store_goes_with_its_last_mirror(tmp_path: Path) -> None:
    base = tmp_path / "m"
    left_by_the_dead(base)
    assert len(list(sweep(found(base).values(), ME, 0.0))) == 1
    assert list(base.iterdir()) == []


def test_one_that_was_taken_over_since_is_not_swept(tmp_path: Path) -> None:
    base = tmp_path / "m"
    path = left_by_the_dead(base)
    listed = found(base)
    made = mirror(base)
    assert made.adopt(path, 0, LAYOUT.nbytes) is not None
    assert list(sweep(listed.values(), ME, 0.0)) == [] and files(base) == [path]


def test_a_file_that_just_comes_into_the_world_is_left_alone(tmp_path: Path) -> None:
    with open_store_folder(tmp_path / "m", STORE, create=True) as folder:
        name = file_name(3, "0badcafe")
        os.close(folder.create_file(name))
        born = (folder.path / name).stat().st_mtime
        young = found(tmp_path / "m", born + BORN / 2)[3]
        assert young.state == "unknown" and young.problem is not None and "no mirror" in young.problem
        sweep_store(folder, ME, born + BORN / 2)
        assert folder.names() == [name]
        assert found(tmp_path / "m", born + 2 * BORN)[3].state == "dead"
        sweep_store(folder, ME, born + 2 * BORN)
        assert folder.names() == []


def test_what_is_not_a_mirror_is_not_touched(tmp_path: Path) -> None:
    base = tmp_path / "m"
    left_by_the_dead(base)
    (base / "notes").mkdir()
    (base / "notes" / file_name(1, "0badcafe")).touch(0o600)
    (base / STORE / "notes.txt").touch()
    assert len(found(base)) == 1 and len(list(sweep(found(base).values(), ME, 0.0))) == 1
    assert (base / "notes" / file_name(1, "0badcafe")).exists() and (base / STORE / "notes.txt").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's files")
def test_another_users_mirrors_are_neither_read_nor_swept(tmp_path: Path) -> None:
    base = tmp_path / "m"
    path = left_by_the_dead(base)
    os.chown(path, 12345, 12345)
    (trouble,) = find_mirrors([base], ME, 0.0)
    assert isinstance(trouble, Trouble) and trouble.path == path and "belongs to user 12345" in trouble.text
    with open_store_folder(base, STORE) as folder:
        sweep_store(folder, ME, 1e12)
    assert files(base) == [path]
    os.chown(base, 12345, 12345)
    (trouble,) = find_mirrors([base], ME, 0.0)
    assert isinstance(trouble, Trouble) and trouble.path == base


def test_a_link_in_the_place_of_a_mirror_is_shown_and_left(tmp_path: Path) -> None:
    base = tmp_path / "m"
    path = left_by_the_dead(base)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    (trouble,) = find_mirrors([base], ME, 0.0)
    assert isinstance(trouble, Trouble) and "symbolic link" in trouble.text
    with open_store_folder(base, STORE) as folder:
        sweep_store(folder, ME, 1e12)
    assert (tmp_path / "elsewhere").exists() and path.is_symlink()


def test_a_damaged_slot_is_told_and_the_dead_swept_all_the_same(tmp_path: Path) -> None:
    base = tmp_path / "m"
    path = left_by_the_dead(base)
    os.truncate(path, 4 * 4096 + LAYOUT.nbytes)
    mirror_ = found(base)[0]
    assert mirror_.state == "dead" and mirror_.problem is not None and "cut" in mirror_.problem
    assert len(list(sweep([mirror_], ME, 0.0))) == 1


def test_a_folder_that_is_not_there_holds_none(tmp_path: Path) -> None:
    assert list(find_mirrors([tmp_path / "nowhere"], ME, 0.0)) == []
