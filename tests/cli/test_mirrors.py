"""``ckpt mirrors``: what it shows, and that it sweeps only when told to."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from ckpt.mirror.folders import store_identity
from ckpt.mirror.mirror import open_mirror
from tests.ckpt.mirror.making import at, described, files, in_child, layout_of
from tests.cli.conftest import Ckpt

LAYOUT = layout_of()


def job(base: Path, url: str, rank: int) -> None:
    """A job that saves two steps and dies."""

    def run() -> None:
        mirror = open_mirror(base, url, rank=rank, world_size=4, wall=time.time)
        one = mirror.free(None, LAYOUT.nbytes)
        mirror.finish(one, at(100), described(LAYOUT))
        mirror.finish(mirror.free(one), at(200), described(LAYOUT))

    in_child(run)


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CKPT_MIRROR_DIR", str(tmp_path / "m"))
    job(tmp_path / "m", "s3://bucket/a", 2)
    job(tmp_path / "m", str(tmp_path / "store"), 3)
    return tmp_path / "m"


def test_it_shows_every_mirror(ckpt: Ckpt, base: Path) -> None:
    alive = open_mirror(base, "s3://bucket/a", rank=0, world_size=4)
    alive.free(None, 4096)
    said = ckpt("mirrors")
    assert said.code == 0 and said.err == ""
    header, *rows = said.lines
    assert header.split() == ["folder", "store", "run", "steps", "rank", "size", "age", "owner"]
    assert len(rows) == 3 and sum("dead" in row for row in rows) == 2 and sum("live" in row for row in rows) == 1
    (row,) = (row for row in rows if store_identity(str(base.parent / "store")) in row)
    assert str(base) in row and "000001-0badcafe" in row and "100 200" in row
    alive.close(remove=True)


def test_json(ckpt: Ckpt, base: Path) -> None:
    document = ckpt("mirrors", "--json").json
    assert document["problems"] == []
    one = next(m for m in document["mirrors"] if m["rank"] == 2)
    assert Path(one["path"]) in files(base) and one["owner"] == "dead" and one["swept"] is False
    assert [s["step"] for s in one["slots"]] == [100, 200] and one["slots"][0]["world_size"] == 4
    assert one["size"] >= 2 * LAYOUT.nbytes and one["pid"] != os.getpid() and -5 < one["age"] < 600


def test_it_sweeps_the_dead_only_when_told_to(ckpt: Ckpt, base: Path) -> None:
    alive = open_mirror(base, "s3://bucket/a", rank=0, world_size=4)
    alive.free(None, 4096)
    ckpt("mirrors")
    assert len(files(base)) == 3
    said = ckpt("mirrors", "--sweep")
    assert said.code == 0 and "removed 2 mirrors" in said.out and said.out.count("swept") == 2
    assert files(base) == [alive.path]
    assert "removed 0 mirrors" in ckpt("mirrors", "--sweep").out
    alive.close(remove=True)


def test_one_stores_mirrors_alone(ckpt: Ckpt, base: Path) -> None:
    store = base.parent / "store"
    assert [m["rank"] for m in ckpt("mirrors", "--json", "--store", store).json["mirrors"]] == [3]
    swept = ckpt("mirrors", "--json", "--store", store, "--sweep").json
    assert [m["swept"] for m in swept["mirrors"]] == [True] and len(files(base)) == 1


def test_folders_can_be_named(ckpt: Ckpt, base: Path, tmp_path: Path) -> None:
    job(tmp_path / "disk", "s3://bucket/a", 7)
    both = ckpt("mirrors", "--json", "--folder", tmp_path / "disk", "--folder", base).json["mirrors"]
    assert sorted(m["rank"] for m in both) == [2, 3, 7]


def test_no_mirrors(ckpt: Ckpt, tmp_path: Path) -> None:
    said = ckpt("mirrors", "--folder", tmp_path / "nowhere")
    assert said.code == 0 and said.out == f"no mirrors in {tmp_path / 'nowhere'}\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's files")
def test_another_users_file_is_said_and_left(ckpt: Ckpt, base: Path) -> None:
    theirs = files(base)[0]
    os.chown(theirs, 12345, 12345)
    said = ckpt("mirrors", "--sweep")
    assert said.code == 2 and "belongs to user 12345" in said.err and "removed 1 mirror," in said.out
    assert files(base) == [theirs]
