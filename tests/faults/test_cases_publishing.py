"""CASES.md through the front door, in one process: what is published, what is not, and what a reader sees meanwhile."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ckpt
from ckpt.cli import main
from ckpt.errors import DamagedError, NoSnapshot, Refused, SaveFailed, StoreInUse
from ckpt.format import values
from ckpt.format.names import PACKS, PARTS, SNAPSHOTS, PartName, SnapshotId, SnapshotName
from ckpt.history.catalog import read_history
from ckpt.history.clock import SystemClock
from ckpt.history.retention import execute, plan_prune
from ckpt.saving.capture import Capturer
from recovery.read import read_parts
from storage_backends.base import Buffer, Store
from storage_backends.local import LocalStore
from storage_backends.memory import MemoryStore
from tests.faults.living import Book, Process, Subject, check_goes_on, check_store
from tests.faults.team import WAIT, Team, content, opened, saved
from tests.support.faulty import GateStore, LaggingStore, SwitchStore
from tests.support.roundtrip import content as content_of

pytestmark = pytest.mark.filterwarnings("ignore:.*step .* was not saved:RuntimeWarning")

WRITTEN = [PACKS, PARTS, SNAPSHOTS]


def gated(inner: Store, folder: str, *, verb: str = "put") -> GateStore:
    """A store with an open gate before the objects of one folder."""
    gate = GateStore(inner, verbs=frozenset({verb}), where=lambda key: key.startswith(folder))
    gate.gate.set()
    return gate


def listed(url: Path, capsys: pytest.CaptureFixture[str]) -> list[int]:
    """The steps that `ckpt list` shows."""
    assert main(["list", str(url), "--json"]) == 0
    return [snapshot["step"] for snapshot in json.loads(capsys.readouterr().out)["snapshots"]]


@pytest.mark.parametrize("folder", WRITTEN)
def test_right_after_save_everybody_sees_the_last_published_step(
    tmp_path: Path, folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """B4: in this process; wherever the save is held up. A restore by the job itself waits for its save."""
    gate = gated(LocalStore(tmp_path), folder)
    book = Book()
    with Process(gate, book) as process:
        process.restore()
        assert process.save()
        gate.gate.clear()
        ticket = process.begin_save()
        assert gate.arrived.wait(60)
        assert not ticket.done()
        assert listed(tmp_path, capsys) == [1]
        assert main(["verify", str(tmp_path), "--deep"]) == 0
        capsys.readouterr()
        assert ckpt.load(tmp_path)["attempt"] == 1
        check_store(LocalStore(tmp_path), book)
        opening = threading.Thread(target=gate.gate.set)
        opening.start()
        assert process.restore() == 2
        opening.join()
        assert ticket.done()
        assert listed(tmp_path, capsys) == [1, 2]


@pytest.mark.parametrize("folder", WRITTEN)
def test_a_save_left_in_flight_is_never_published_under_the_step_that_a_new_start_saves(folder: str) -> None:
    """B6: training raises, the same process makes another checkpointer, and then the old puts land."""
    store, book = MemoryStore(), Book()
    gate = gated(store, folder)
    first = Process(gate, book)
    first.restore()
    assert first.save()
    gate.gate.clear()
    ticket = first.begin_save()
    assert gate.arrived.wait(60)
    with pytest.raises(SaveFailed, match="step 2"):
        first.saver.close(timeout=0.01)
    with Process(store, book) as second:
        assert second.restore() == 1
        assert second.save()
        gate.gate.set()
        if folder == SNAPSHOTS:
            ticket.wait(60)  # it had passed the fence: it exists, on the line that is left
        else:
            with pytest.raises((SaveFailed, StoreInUse)):
                ticket.wait(60)
        assert second.save()
    check_store(store, book)
    history = read_history(store)
    assert [id_.short for id_ in sorted(history.live)] == ["1/1", "2/2", "2/3"]
    assert [id_.short for id_ in history.abandoned] == (["1/2"] if folder == SNAPSHOTS else [])
    check_goes_on(store, book)


def test_no_space_for_the_commit_document_is_no_crash_loop_and_loses_nothing() -> None:
    """C3: two restarts reach the same step again, and fail again; then there is space."""
    store, book = SwitchStore(MemoryStore()), Book()
    with Process(store, book) as process:
        process.restore()
        assert process.save()
    store.fail(Refused, verb="put", key=SNAPSHOTS)
    for _ in range(3):
        with Process(store, book) as process:
            assert process.restore() == 1
            assert not process.save()
            assert process.step == 2
        check_store(store, book)
    store.heal()
    check_goes_on(store, book)
    assert book.pages[book.told].step == 2


def test_listings_that_lag_behind_four_writers_that_finish_together_make_one_correct_commit() -> None:
    """C5: the real writers, twice, each with its deltas."""
    inner = MemoryStore()
    run = opened(inner, 4, None)
    team = Team([inner] * 4, run)
    store = LaggingStore(inner, lag=1.0, now=team.clock.monotonic)
    team = Team([store] * 4, run, team.clock)
    assert saved(team.save(10, attempt=1)) == [True] * 4
    assert saved(team.save(11, attempt=2)) == [True] * 4
    assert store.hidden, "no listing ever lagged"
    assert team.clock.monotonic() < 1e6 + WAIT
    team.stop()
    history = read_history(inner)
    assert [id_.step for id_ in sorted(history.snapshots)] == [10, 11]
    for attempt, id_ in enumerate(sorted(history.snapshots), start=1):
        assert content(read_parts(inner, history.snapshots[id_]), inner) == attempt


def test_debris_of_every_kind_is_passed_over_with_one_warning_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """C7: the newest complete step is used, and the job goes on from it."""
    store, book = LocalStore(tmp_path), Book()
    with Process(store, book) as process:
        process.restore()
        for _ in range(3):
            assert process.save()
    run = max(read_history(store).runs)
    part = PartName(SnapshotId(run, 3), 0).key
    store.put(part, store.get(part)[: len(store.get(part)) // 2])
    whole = store.get(SnapshotName(SnapshotId(run, 2)).key)
    cut, empty = (SnapshotName(SnapshotId(run, step)).key for step in (8, 9))
    store.put(cut, whole[:-30])
    store.put(empty, b"")
    foreign = ["snapshots/notes.txt", "parts/half", "packs/000001-00000000/x", "runs/lock", "README"]
    for folder in ("snapshots/empty", f"parts/{run}/000000000099", "packs/000001-00000000", "strange/empty"):
        (tmp_path / folder).mkdir(parents=True)
    for key in foreign:
        (tmp_path / key).write_bytes(b"mine")

    caplog.clear()
    with Process(store, Book(book.pages, told=2)) as process:
        assert process.restore() == 2
        warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        assert len(warnings) == 3
        for id_ in ("1/9", "1/8", "1/3"):
            assert sum(f"snapshot {id_} passed over" in text for text in warnings) == 1
        process.book = book
        assert process.save()

    assert main(["list", str(tmp_path), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [s["step"] for s in shown["snapshots"]] == [1, 2, 3, 3]
    problems = [problem["key"] for problem in shown["problems"]]
    assert sorted(problems) == sorted([cut, empty, *(key for key in foreign if "/" in key and "packs" not in key)])
    assert main(["verify", str(tmp_path), "--deep", "--json"]) == 1
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert {f["key"] for f in findings if f["level"] == "error"} == {part, cut, empty}
    assert {f["key"] for f in findings} >= set(foreign)
    assert len(findings) == len({f["key"] for f in findings})


class Raising:
    """A store that raises whatever it is told to, once, at a put into a folder."""

    def __init__(self, inner: Store) -> None:
        self._inner = inner
        self.get, self.get_range, self.list, self.delete = inner.get, inner.get_range, inner.list, inner.delete
        self.url = inner.url
        self.armed: tuple[str, BaseException] | None = None

    def put(self, key: str, data: Buffer) -> None:
        if self.armed is not None and key.startswith(self.armed[0]):
            error, self.armed = self.armed[1], None
            raise error
        self._inner.put(key, data)


@pytest.mark.parametrize("folder", WRITTEN)
@pytest.mark.parametrize(
    "error", [MemoryError(), KeyboardInterrupt(), SystemExit(1), RecursionError(), Exception("odd")]
)
def test_whatever_the_writers_threads_die_of_is_told_and_the_next_save_works(folder: str, error: BaseException) -> None:
    """F4, G2: `wait()` errs in bounded time."""
    store, book = Raising(MemoryStore()), Book()
    with Process(store, book) as process:
        process.restore()
        assert process.save()
        store.armed = (folder, error)
        assert not process.save()
        failed = process.saver._outcomes.last
        assert failed is not None
        with pytest.raises(SaveFailed, match="step 2") as caught:
            failed.wait(0)
        assert caught.value.__cause__ is error
        assert process.save()
        check_store(store, book)
        assert [s.step for s in read_history(store).snapshots] == [1, 3]


@pytest.mark.parametrize("where", [(values, "encode"), (Capturer, "take")])
def test_no_memory_while_the_state_is_captured_fails_that_save_only(
    monkeypatch: pytest.MonkeyPatch, where: tuple[Any, str]
) -> None:
    """G2: on the training thread."""
    store, book = MemoryStore(), Book()
    real: Callable[..., Any] = getattr(*where)
    errors: list[BaseException] = []

    def broken(*args: Any) -> Any:
        if errors:
            raise errors.pop()
        return real(*args)

    monkeypatch.setattr(*where, broken)
    with Process(store, book) as process:
        process.restore()
        assert process.save()
        errors.append(MemoryError())
        with pytest.raises((MemoryError, SaveFailed)):
            process.saver.save(2).wait(60)
        assert not errors
        assert process.save()
    check_store(store, book)
    assert [id_.step for id_ in read_history(store).snapshots] == [1, 2]


def test_a_store_that_has_become_read_only_is_an_error_and_never_old_content_told_as_new() -> None:
    """F6."""
    store, book = SwitchStore(MemoryStore()), Book()
    with Process(store, book) as process:
        process.restore()
        assert process.save()
        store.fail(Refused, verb="put")
        assert not process.save()
        with pytest.raises(SaveFailed, match="step 2"):
            process.saver.wait()
    with Process(store, book) as process:
        with pytest.raises(Refused):
            process.saver.restore()
        assert process.state["attempt"] == 0
    state = Subject().state
    assert ckpt.load_into(store, state).step == 1
    assert book.check(1, state) == 1
    store.heal()
    check_goes_on(store, book)


def test_a_prune_beside_a_save_and_a_reader_leaves_the_one_alone_and_tells_the_other(tmp_path: Path) -> None:
    """D4: the save hangs at its commit, the reader in the step that is pruned."""
    inner, book = MemoryStore(), Book()
    gate = gated(inner, SNAPSHOTS)
    reading = gated(inner, PACKS, verb="get_range")
    found: list[Exception | int] = []

    def read() -> None:
        state = Subject().state
        try:
            ckpt.load_into(reading, state, 3)
            found.append(book.check(3, state))
        except Exception as error:
            found.append(error)

    with Process(gate, book) as process:
        process.restore()
        for _ in range(5):
            assert process.save()
        gate.gate.clear()
        ticket = process.begin_save()
        assert gate.arrived.wait(60)
        reading.gate.clear()
        reader = threading.Thread(target=read)
        reader.start()
        assert reading.arrived.wait(60)
        plan = plan_prune(inner, ckpt.Keep(last=1), grace=0)
        removed = execute(plan, inner, clock=SystemClock())
        assert SnapshotId(max(read_history(inner).runs), 3) in removed.snapshots
        inner.delete(removed.keys)  # the absent
        reading.gate.set()
        reader.join(60)
        gate.gate.set()
        ticket.wait(60)
        check_store(inner, book)
    (told,) = found
    assert isinstance(told, NoSnapshot), told
    assert "pruned" in str(told)
    book.told = 6
    check_goes_on(inner, book)


class Lying(Raising):
    """A store that says yes to a put into a folder, from when it is armed on, and does something else."""

    def __init__(self, inner: Store, lie: str) -> None:
        super().__init__(inner)
        self.lie = lie
        self.folder: str | None = None
        self.told: list[str] = []

    def put(self, key: str, data: Buffer) -> None:
        if self.folder is None or not key.startswith(self.folder):
            return super().put(key, data)
        self.told.append(key)
        stored = bytearray(data)
        third = len(stored) // 3
        match self.lie:
            case "drops the middle":
                stored[third : 2 * third] = bytes(third)
            case "keeps half":
                del stored[third:]
            case "keeps the old object":
                return None
        return super().put(key, bytes(stored))


@pytest.mark.parametrize("folder", WRITTEN)
@pytest.mark.parametrize("lie", ["drops the middle", "keeps half", "keeps the old object"])
def test_what_a_store_only_claims_to_have_stored_is_noticed_and_named(
    tmp_path: Path, folder: str, lie: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """M2: a document at once, by the save itself; a pack by whoever reads it, and by `verify`."""
    store, book = Lying(LocalStore(tmp_path), lie), Book()
    with Process(store, book) as process:
        process.restore()
        assert process.save()
        store.folder = folder
        published = process.save()
        store.folder = None
    assert store.told
    assert published == (folder == PACKS)
    code = main(["verify", str(tmp_path), "--deep", "--json"])
    findings = json.loads(capsys.readouterr().out)["findings"]
    errors = {f["key"]: f for f in findings if f["level"] == "error"}
    if folder == PARTS:
        # Torn, and named by no snapshot: debris.
        assert (code, errors) == (0, {})
        assert lie == "keeps the old object" or {f["key"] for f in findings} >= set(store.told)
    elif folder == PACKS or lie != "keeps the old object":
        assert (code, set(errors)) == (1, set(store.told))
        assert {finding["step"] for finding in errors.values()} == {2}
    else:
        assert (code, errors) == (0, {}), "there is no trace of the step"
    if published:
        state = Subject().state
        before = content_of(state)
        with pytest.raises(DamagedError) as caught:
            ckpt.load_into(tmp_path, state, 2)
        assert caught.value.key in store.told
        assert (caught.value.step, caught.value.rank) == (2, 0)
        assert caught.value.leaf is not None
        assert lie == "keeps the old object" or "bytes" in str(caught.value), "where in the object"
        assert content_of(state) == before
        book.told = 1
    check_goes_on(LocalStore(tmp_path), book, whole=not errors)
