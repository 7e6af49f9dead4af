"""A store in a folder that somebody else can write to: links, fifos, devices and files that claim to be huge."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import ckpt
from ckpt.cli import main
from ckpt.errors import CheckpointError, StorageError
from ckpt.format.names import PARTS, PRUNES, SNAPSHOTS, PartName, SnapshotName
from ckpt.history.catalog import read_history
from recovery.verify import verify
from storage_backends.base import Refused
from storage_backends.local import LocalStore
from tests.hostile.forging import FIRST, MB, NEWEST, at_most, victim


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A store in a folder. Beside it lies what is nobody's business: a copy of the same store, and a secret."""
    victim(LocalStore(tmp_path / "store"))
    shutil.copytree(tmp_path / "store", tmp_path / "outside")
    (tmp_path / "outside" / "secret").write_bytes(b"secret")
    return tmp_path / "store"


def untouched(folder: Path) -> None:
    outside = folder.parent / "outside"
    assert (outside / "secret").read_bytes() == b"secret"
    assert len(read_history(LocalStore(outside)).snapshots) == 2


def newest_pack(folder: Path) -> Path:
    (pack,) = (folder / "packs").glob("*/000000000020/*.safetensors")
    return pack


PLACES = {
    "the newest snapshot": lambda folder: next((folder / SNAPSHOTS).glob("*-000000000020.json")),
    "its part": lambda folder: next((folder / PARTS).glob("*/000000000020/*.zst")),
    "its pack": newest_pack,
    "store.json": lambda folder: folder / "store.json",
    "a run": lambda folder: next((folder / "runs").iterdir()),
}


def linked(path: Path) -> None:
    """To the same file of the store outside: were it followed, all digests would hold."""
    root = next(above for above in path.parents if above.name == "store")
    target = root.parent / "outside" / path.relative_to(root)
    path.unlink()
    path.symlink_to(target)


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def listening(path: Path) -> None:
    path.unlink()
    here = Path.cwd()
    os.chdir(path.parent)  # the name of a socket has at most 108 bytes
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(path.name)
    finally:
        os.chdir(here)


def folded(path: Path) -> None:
    path.unlink()
    path.mkdir()


def endless(path: Path) -> None:
    """A sparse file: a terabyte that takes no room."""
    with path.open("r+b") as file:
        file.truncate(1 << 40)


@pytest.mark.parametrize("attack", [linked, fifo, device, listening, folded, endless])
@pytest.mark.parametrize("place", PLACES)
def test_what_is_no_plain_file_is_not_opened_nor_followed_and_is_told(
    folder: Path, place: str, attack: Callable[[Path], None]
) -> None:
    """Every verb ends, with its own kind of error where it needs what was replaced, and reads nothing outside."""
    path = PLACES[place](folder)
    attack(path)
    with at_most(48 * MB):
        try:
            found = ckpt.load(folder)
        except (StorageError, CheckpointError) as error:
            assert path.name in str(error) or str(folder) in str(error)
        else:
            # Of a pack that goes on for ever all that is needed is there.
            unread = place in ("store.json", "a run", "the newest snapshot") or (place, attack) == ("its pack", endless)
            assert unread or float(found["w"][0, 0]) != NEWEST
        for verb in (["list"], ["show"], ["verify", "--deep"], ["du"], ["prune", "--keep-last", "1"]):
            assert main([verb[0], str(folder), *verb[1:]]) in (0, 1, 2)
    untouched(folder)


@pytest.mark.parametrize("name", ["packs", "parts", "snapshots", "runs", "pins", "prunes"])
def test_a_linked_folder_is_refused_by_name(folder: Path, name: str) -> None:
    shutil.rmtree(folder / name, ignore_errors=True)
    (folder.parent / "outside" / name).mkdir(exist_ok=True)
    (folder / name).symlink_to(folder.parent / "outside" / name)
    with pytest.raises(Refused, match=f"{name}.* is a symbolic link; a store follows none"):
        list(LocalStore(folder).list(f"{name}/"))
    with pytest.raises((StorageError, CheckpointError)):
        ckpt.load(folder, step=20)
        list(verify(LocalStore(folder)))
    assert main(["verify", str(folder)]) == 2
    assert main(["prune", str(folder), "--keep-last", "1"]) == 2
    assert main(["list", str(folder)]) == (0 if name in ("packs", "prunes") else 2)
    untouched(folder)


def test_an_object_that_claims_a_terabyte_is_refused_by_its_length(folder: Path) -> None:
    store = LocalStore(folder)
    for key in ("store.json", f"{PRUNES}0a.json"):
        (folder / key).parent.mkdir(exist_ok=True)
        (folder / key).touch()
        endless(folder / key)
        with at_most(MB), pytest.raises(Refused, match=f"{key} has 1099511627776 bytes, and no object of ours"):
            store.get(key)
    ids = sorted(read_history(store).snapshots)
    endless(folder / PartName(ids[1], 0).key)
    with at_most(24 * MB), pytest.raises(Refused, match="it is not one of ours: look at it, and remove it"):
        ckpt.load(store, step=20)
    assert np.all(ckpt.load(store, step=10)["w"] == FIRST)


def test_names_that_are_none_of_ours_are_listed_by_nobody(folder: Path) -> None:
    """Line ends, escapes, leading dots, other alphabets: on disk they are possible, in a store they are not."""
    odd = ["a\nb.json", "\x1b[2J.json", ".hidden.json", "sn\u00f6.json", "x" * 250 + ".json", "a b.json", "*.json"]
    for name in odd:
        (folder / "snapshots" / name).write_text("x")
    history = read_history(LocalStore(folder))
    assert len(history.snapshots) == 2
    assert [p.key for p in history.problems] == ["snapshots/" + "x" * 250 + ".json"]
    assert SnapshotName.parse("snapshots/" + "x" * 250 + ".json") is None
