"""Ctrl-C: whatever a verb was at, nothing is half done, and running it again does the rest."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from ckpt.cli import INTERRUPTED, main, screen
from recovery.load import load
from recovery.looking import History
from recovery.verify import verify
from storage_backends.base import Buffer, Entry, Store
from storage_backends.local import LocalStore
from storage_backends.memory import MemoryStore
from tests.cli.living import NEXT, pin
from tests.support.stores import DirectWriter, State

T = TypeVar("T")


class Interrupting:
    """A store in whose n-th call (from 1) somebody presses Ctrl-C: before it is done, or right after. Heartbeats have a
    thread of their own, on which nobody is interrupted."""

    def __init__(self, inner: Store, at: int, *, after: bool) -> None:
        self._inner, self._left, self._after = inner, at, after
        self.fired = False

    @property
    def url(self) -> str:
        return self._inner.url

    def _do(self, call: Callable[[], T]) -> T:
        self._left -= 1
        pressed = self._left == 0
        self.fired |= pressed
        if pressed and not self._after:
            raise KeyboardInterrupt
        result = call()
        if pressed:
            raise KeyboardInterrupt
        return result

    def put(self, key: str, data: Buffer) -> None:
        if key.startswith("alive/"):
            self._inner.put(key, data)
        else:
            self._do(lambda: self._inner.put(key, data))

    def get(self, key: str) -> bytes:
        return self._do(lambda: self._inner.get(key))

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        return self._do(lambda: self._inner.get_range(key, start, stop))

    def list(self, prefix: str) -> Sequence[Entry]:
        return self._do(lambda: self._inner.list(prefix))

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:  # and in the middle of a removal of many
            self._delete(key)

    def _delete(self, key: str) -> None:
        self._do(lambda: self._inner.delete([key]))


def fill(store: Store) -> None:
    """Long chains of deltas, of which a prune leaves a little: there is something to prune, compact and export."""
    writer = DirectWriter(store, chunk=4096)
    writer.begin()
    rng = np.random.default_rng(0)
    states: list[State] = [{"w": rng.standard_normal(1024), "b": rng.standard_normal(8)} for _ in range(6)]
    ids = [writer.step(10 * n, state) for n, state in enumerate(states)]
    last = DirectWriter(store, run=NEXT)
    last.begin(resumed_from=ids[-1])
    last.step(500, {"w": np.zeros(3)})
    pin(store, "good", ids[-1])


def copied(store: Store) -> MemoryStore:
    copy = MemoryStore()
    for entry in store.list(""):
        copy.put(entry.key, store.get(entry.key))
    return copy


@pytest.fixture(scope="module")
def seed() -> MemoryStore:
    store = MemoryStore()
    fill(store)
    return store


Run = Callable[..., tuple[int, bool]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """One verb on this store, interrupted in its n-th call (0: never): its exit code, and whether it was."""

    def verb(store: Store, *line: object, at: int = 0, after: bool = False) -> tuple[int, bool]:
        watched = Interrupting(store, at, after=after)
        monkeypatch.setattr(screen, "open_store", lambda url, **options: watched)
        return main([str(word) for word in line]), watched.fired

    return verb


def bits(store: Store) -> dict[str, bytes]:
    """Every snapshot that is listed, and what it restores to."""
    return {
        f"{snapshot.name} {path}": np.asarray(value).tobytes()
        for snapshot in History(store).list()
        for path, value in load(store, snapshot.name).items()
    }


def errors(store: Store) -> list[str]:
    return [finding.text for finding in verify(store, deep=True) if finding.level == "error"]


PRUNE = ("prune", "URL", "--keep-last", "1", "--grace", "0")
COMPACT = ("compact", "URL", "--grace", "0")
SWEEP = ("prune", "URL", "--leftovers", "--grace", "0")


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("verb", [PRUNE, COMPACT], ids=["prune", "compact"])
def test_a_second_run_finishes_what_ctrl_c_ended(verb: Sequence[str], after: bool, seed: MemoryStore, run: Run) -> None:
    """At every call to the store: exit code 130, no snapshot that is listed is hurt, and once more does all of it."""
    start = copied(seed)
    if verb == COMPACT:  # it has something to do where a prune has been
        assert run(start, *PRUNE) == (0, False)
    whole = copied(start)
    assert run(whole, *verb) == (0, False)
    assert run(whole, *SWEEP) == (0, False)
    before, expected = bits(start), bits(whole)
    assert (before != expected) is (verb == PRUNE)
    for at in count(1):
        store = copied(start)
        code, fired = run(store, *verb, at=at, after=after)
        if not fired:
            assert code == 0
            break
        assert code == INTERRUPTED
        found = bits(store)
        assert expected.items() <= found.items() <= before.items()
        assert errors(store) == []
        assert run(store, *verb) == (0, False)
        assert run(store, *SWEEP) == (0, False)  # what a compaction replaced, or had not named yet, goes with a prune
        assert bits(store) == expected and errors(store) == []
        assert [entry.key for entry in store.list("prunes/")] == []
        assert [entry.key for entry in store.list("pins/")] == ["pins/good.json"]
        assert packs(store) == pytest.approx(packs(whole), rel=0.02)
    assert at > 8, "nothing was interrupted: this test proves nothing"


def packs(store: Store) -> int:
    return sum(entry.size for entry in store.list("packs/"))


@pytest.mark.parametrize("to", ["safetensors", "torch"])
def test_an_export_that_ctrl_c_ended_leaves_nothing(to: str, seed: MemoryStore, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "deep" / "out.safetensors"
    for at in count(1):
        code, fired = run(seed, "export", "URL", "good", out, "--to", to, at=at)
        if not fired:
            assert code == 0 and out.exists()
            break
        assert code == INTERRUPTED
        assert not out.parent.exists() or list(out.parent.iterdir()) == []
    assert at > 5


def test_an_import_that_ctrl_c_ended_takes_its_packs_back_and_can_be_run_again(tmp_path: Path, run: Run) -> None:
    tensors = {"w": torch.randn(20_000), "b": torch.randn(7)}
    save_file(tensors, tmp_path / "in.safetensors")
    line = ["import", "URL", tmp_path / "in.safetensors", "--from", "safetensors"]
    for at in count(1):
        store = MemoryStore()
        code, fired = run(store, *line, at=at)
        if not fired:
            assert code == 0
            break
        assert code == INTERRUPTED
        if not History(store).list():  # the snapshot may have been written already
            assert not store.list("packs/") or store.list("parts/")
            assert run(store, *line) == (0, False)
        assert np.array_equal(np.asarray(load(store, 0)["w"]), tensors["w"].numpy())
        assert errors(store) == []
    assert at > 8


def test_a_report_that_ctrl_c_ended_leaves_the_older_one(seed: MemoryStore, tmp_path: Path, run: Run) -> None:
    target = tmp_path / "r.html"
    assert run(seed, "report", "URL", "-o", target) == (0, False)
    older = target.read_bytes()
    assert run(seed, "report", "URL", "-o", target, at=12) == (INTERRUPTED, True)
    assert target.read_bytes() == older and [path.name for path in tmp_path.iterdir()] == ["r.html"]


SLOW = """
import sys
from ckpt.cli import main, screen
real = screen.open_store
class Slow:  # reads a pack only when told to, and says that it is about to
    def __init__(self, inner): self.inner = inner
    url = property(lambda self: self.inner.url)
    def __getattr__(self, name): return getattr(self.inner, name)
    def get_range(self, key, start, stop):
        if key.startswith("packs/"):
            print("reading", flush=True)
            sys.stdin.readline()
        return self.inner.get_range(key, start, stop)
screen.open_store = lambda url, **options: Slow(real(url, **options))
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.e2e
def test_a_real_sigint_in_the_middle_of_an_export_leaves_no_half_of_it(tmp_path: Path) -> None:
    """A process of its own, whose store is asked for a pack when the signal comes."""
    folder = tmp_path / "store"
    fill(LocalStore(folder))
    out = tmp_path / "out" / "model.safetensors"
    command = [sys.executable, "-c", SLOW, "export", str(folder), "good", str(out), "--to", "safetensors"]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    assert process.stdout is not None and process.stdin is not None
    assert process.stdout.readline() == "reading\n"
    process.send_signal(signal.SIGINT)
    _, said = process.communicate("\n" * 100, timeout=60)
    assert process.returncode == INTERRUPTED, said
    assert "interrupted" in said and "Traceback" not in said
    assert list(out.parent.iterdir()) == []
    assert main(["export", str(folder), "good", str(out), "--to", "safetensors"]) == 0
    assert load_file(out)["w"].numpy().tobytes() == np.asarray(load(LocalStore(folder), "good")["w"]).tobytes()
