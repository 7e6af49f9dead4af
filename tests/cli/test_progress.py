"""Progress bars: on a terminal, about the right bytes, gone afterwards; and nowhere else."""

from __future__ import annotations

import io
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from ckpt.cli import VERBS, main, progress
from ckpt.cli.progress import DELETES, Bar, bar, documents, parts_too
from recovery.layers import choose, layers
from recovery.looking import History
from storage_backends.base import Entry, StorageError
from storage_backends.local import LocalStore
from storage_backends.memory import MemoryStore
from tests.cli.conftest import Ckpt
from tests.cli.living import chain
from tests.support.faulty import FaultyStore
from tests.support.stores import drifting, make_store

WORKING = {"list", "show", "diff", "du", "verify", "prune", "compact", "pin", "plan", "export", "import", "report"}
"""Verbs that may take longer than a second on a large or slow store."""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Bars are shown at once, on a screen of our own."""
    screen = Terminal()
    monkeypatch.setattr(progress, "AFTER", 0.0)
    monkeypatch.setattr(progress.threading, "Timer", _AtOnce)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=screen, stdout=Terminal()))
    return screen


class _AtOnce:
    """A timer that does not wait, so that nothing hangs on how fast a machine is."""

    def __init__(self, _seconds: float, do: object) -> None:
        self._do = do

    def start(self) -> None:
        self._do()  # type: ignore[operator]

    def cancel(self) -> None: ...


class Counted(Bar):
    """A bar that remembers."""

    made: list[Counted] = []  # noqa: RUF012 - one list for all

    def __init__(self, text: str, quiet: bool) -> None:
        super().__init__(text, quiet)
        self.text = text
        self.made.append(self)

    @property
    def numbers(self) -> tuple[int, int]:
        return self._expected, self._done


@pytest.fixture
def bars(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> list[Counted]:
    Counted.made.clear()
    monkeypatch.setattr(progress, "Bar", Counted)
    return Counted.made


def verb(name: str, folder: Path) -> list[str]:
    """Arguments with which a verb has something to do on `folder`/store."""
    store, out = str(folder / "store"), str(folder / "out")
    return {
        "list": ["list", store],
        "show": ["show", store, "20"],
        "diff": ["diff", store, "10", "30"],
        "du": ["du", store],
        "verify": ["verify", store, "--deep"],
        "prune": ["prune", store, "--remove", "10", "--grace", "0"],
        "compact": ["compact", store],
        "pin": ["pin", store, "good", "20"],
        "plan": ["plan", store, "--lost", "0"],
        "export": ["export", store, "30", out, "--to", "safetensors"],
        "import": ["import", str(folder / "new"), str(folder / "in.safetensors"), "--from", "safetensors"],
        "report": ["report", store, "-o", str(folder / "r.html")],
    }[name]


def prepared(folder: Path) -> LocalStore:
    store = LocalStore(folder / "store")
    make_store(store, drifting(4), ranks=2, chunk=4096)
    save_file({"w": torch.arange(5000.0)}, folder / "in.safetensors")
    return store


@pytest.mark.parametrize("name", sorted(WORKING))
def test_every_verb_that_works_shows_a_bar_and_leaves_nothing_of_it(
    name: str, bars: list[Counted], terminal: Terminal, tmp_path: Path
) -> None:
    prepared(tmp_path)
    assert main(verb(name, tmp_path)) == 0
    assert bars and all(one._over for one in bars)
    text = terminal.getvalue()
    for one in bars:
        assert one.text in text
    # The cursor is back, and the last line erased: nothing of a bar stays.
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == len(bars)
    assert text.endswith("\x1b[2K")


@pytest.mark.parametrize("name", sorted(WORKING))
def test_what_is_done_is_what_was_expected(name: str, bars: list[Counted], tmp_path: Path) -> None:
    """To the byte where it is known before; a prune and a compaction write documents besides."""
    prepared(tmp_path)
    assert main(verb(name, tmp_path)) == 0
    for expected, done in (one.numbers for one in bars):
        match name:
            case "verify":  # packs have headers, which rebuilding does not read again
                assert 0 < 0.4 * expected < done <= expected
            case "compact" | "du" | "plan" | "prune":  # on the way through, they read or write what no listing tells
                assert expected >= 0 and done >= 0
            case _:
                assert expected == done > 0, (name, expected, done)


@pytest.mark.parametrize("name", sorted(WORKING))
def test_with_json_there_is_no_bar(name: str, bars: list[Counted], terminal: Terminal, tmp_path: Path) -> None:
    prepared(tmp_path)
    assert main([*verb(name, tmp_path), "--json"]) == 0
    assert terminal.getvalue() == "" and all(one._progress is None for one in bars)


def test_piped_there_is_no_bar(ckpt: Ckpt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "AFTER", 0.0)
    prepared(tmp_path)
    for name in sorted(WORKING):
        assert ckpt(*verb(name, tmp_path)).err == "", name


def test_the_verbs_without_a_bar_have_nothing_to_wait_for() -> None:
    assert set(VERBS) - WORKING == {"mirrors", "unpin"}, "a new verb: does it take longer than a second?"


def test_a_bar_tells_bytes_rate_and_the_time_that_is_left(terminal: Terminal) -> None:
    with bar("moving <b>things", quiet=False) as shown:
        shown.expect(3_000_000)
        shown.done(1_500_000)
    text = terminal.getvalue()
    assert "moving <b>things" in text and re.search(r"1\.5/3\.0\s*MB", text)
    assert "MB/s" in text or "?" in text
    assert re.search(r"-:--:--|\d:\d\d:\d\d", text)


def test_what_is_over_before_its_time_shows_nothing(monkeypatch: pytest.MonkeyPatch, terminal: Terminal) -> None:
    class Never(_AtOnce):
        def start(self) -> None: ...

    monkeypatch.setattr(progress.threading, "Timer", Never)
    with bar("quick", quiet=False) as shown:
        shown.done(5)
    assert terminal.getvalue() == ""
    shown._show()  # a timer that fires too late
    assert terminal.getvalue() == ""


def test_a_bar_is_never_more_than_full_and_of_unknown_work_no_share(terminal: Terminal) -> None:
    with bar("reading", quiet=False) as shown:
        shown.done(4)
        assert shown._progress is not None
        [task] = shown._progress.tasks
        assert (task.completed, task.total) == (4, None)
        shown.expect(10)
        assert (task.completed, task.total) == (4, 10)
        shown.done(7)
        assert (task.completed, task.total) == (11, 11)


def test_a_watched_store_is_the_same_store_and_counts(terminal: Terminal) -> None:
    inner = FaultyStore(MemoryStore())
    ids = make_store(inner, drifting(2), ranks=2, chunk=4096)
    shown = Counted("reading", False)
    watched = shown.reads(inner, documents)
    History(watched).look()
    expected, done = shown.numbers
    assert expected == done > 0
    History(watched).look()
    assert shown.numbers == (expected, 2 * done), "what is listed twice is expected once"
    assert watched.url == inner.url and Counted("", True).reads(inner) is inner
    assert [watched.get(key) for key in ("store.json",)] == [inner.get("store.json")]
    seen = History(inner).look()
    sample = choose([seen.snapshots[id_] for id_ in ids])
    shown = Counted("parts", False)
    layers(shown.reads(inner, parts_too), sample, each=lambda _: None)
    assert shown.numbers == (0, sample.nbytes)


def test_removals_go_in_pieces_and_tell_what_came_free() -> None:
    inner = FaultyStore(MemoryStore(), fail_at=3, verbs=frozenset({"delete"}))
    count = 2 * DELETES + 10
    for n in range(count):
        inner.put(f"packs/{n:04}", b"12345")
    shown = Counted("removing", False)
    watched = shown.writes(inner)
    keys = [entry.key for entry in watched.list("packs/")]
    with pytest.raises(StorageError):
        watched.delete(keys)
    assert [entry.key for entry in inner.list("packs/")] == ["packs/0002"], "one failed, the others are removed"
    assert shown.numbers[1] == 5 * (count - DELETES), "of the piece that failed nothing is known"
    watched.put("packs/new", np.zeros(7, np.uint8).data)
    assert shown.numbers[1] == 5 * (count - DELETES) + 7
    shown.end()


def test_documents_are_what_a_look_at_the_history_reads() -> None:
    def entry(key: str) -> Entry:
        return Entry(key, 7, None)

    keys = ["runs/a", "snapshots/a", "pins/a", "parts/a", "packs/a", "alive/a"]
    assert [documents(entry(key)) for key in keys] == [7, 7, 7, 0, 0, 0]
    assert [parts_too(entry(key)) for key in keys] == [7, 7, 7, 7, 0, 0]


def test_an_error_ends_the_bar(terminal: Terminal, ckpt: Ckpt, tmp_path: Path) -> None:
    chain(tmp_path / "store", 2)
    assert main(["export", str(tmp_path / "store"), "99", str(tmp_path / "out"), "--to", "safetensors"]) == 2
    assert "\x1b[?25h" in terminal.getvalue()
