"""A snapshot whose leaves have names that would be paths: an export makes the files that were asked for, and no other.

And the whole command line under a limit of memory that the kernel keeps.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from ckpt.cli import main
from ckpt.format.names import SnapshotName
from ckpt.history.catalog import read_history
from storage_backends.local import LocalStore
from tests.hostile.forging import MB, replace_part, victim, zstd_claiming
from tests.support.procs import ROOT
from tests.support.stores import make_store

NAMES = [
    "../../evil",
    "/tmp/evil",
    "a/../../evil",
    "..",
    "C:\\evil",
    "x\0y",
    "a\nb",
    "\u202e",
    "x" * 3000,
    "",
    ".metadata",
]


@pytest.mark.parametrize("to", ["safetensors", "torch", "dcp"])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_an_export_writes_nothing_but_what_was_asked_for(tmp_path: Path, to: str) -> None:
    (tmp_path / "work").mkdir()
    store = LocalStore(tmp_path / "store")
    make_store(store, [{name: np.full(2000, n, np.float32) for n, name in enumerate(NAMES)}])
    before = set(tmp_path.rglob("*"))
    out = tmp_path / "work" / "out"
    assert main(["export", store.url, "10", str(out), "--to", to]) == 0
    made = set(tmp_path.rglob("*")) - before
    assert made
    assert all(path == out or out in path.parents for path in made)
    assert not Path("/tmp/evil").exists()
    if to == "safetensors":
        found = load_file(out / "model.safetensors")
        assert {name: array[0] for name, array in found.items()} == {name: n for n, name in enumerate(NAMES)}


@pytest.mark.parametrize(
    "verb", [["list"], ["show", "20"], ["verify", "--deep"], ["du"], ["prune", "--keep-last", "1"]]
)
def test_no_bomb_takes_more_than_the_kernel_gives(tmp_path: Path, verb: list[str]) -> None:
    """A part of ten kilobytes that says it is small and decodes to a gigabyte, and documents of a terabyte; under an
    address space of 640 MB (of which the interpreter and its libraries take most)."""
    store = LocalStore(tmp_path)
    ids = victim(store)
    replace_part(store, ids[1], zstd_claiming(1 << 20, repeat=1024 * MB))
    for key in ("pins/x.json", "prunes/0a.json", SnapshotName(ids[0], 1).key):
        (tmp_path / key).parent.mkdir(exist_ok=True)
        with (tmp_path / key).open("wb") as file:
            file.truncate(1 << 40)
    limit = 640 * MB
    ended = subprocess.run(
        [sys.executable, "-m", "ckpt.cli", verb[0], str(tmp_path), *verb[1:]],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
        check=False,
    )
    assert ended.returncode == {"list": 0, "show": 2, "verify": 1}.get(verb[0], ended.returncode), ended.stderr
    assert ended.returncode in (0, 1, 2)
    assert "Traceback" not in ended.stderr
    assert "MemoryError" not in ended.stderr
    assert len(read_history(store).snapshots) == 2
