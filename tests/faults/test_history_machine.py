"""Any history, in any order: saves, crashes, steps back, pins, prunes, optimizers taken out, compactions; against a
plain dict of what was saved. 300 runs with --campaign, some in the suite."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

import ckpt
from ckpt import checkpointer
from ckpt.errors import CheckpointError, LayoutMismatch
from ckpt.format.manifest import PruneDoc, unseal
from ckpt.format.names import PRUNES, SnapshotId
from ckpt.history.catalog import read_history
from ckpt.history.clock import SystemClock
from ckpt.history.pins import pin, unpin
from ckpt.history.retention import execute, plan_prune
from ckpt.saving import packing
from ckpt.saving.writer import WriterSettings
from recovery.compact import compact
from recovery.compaction import plan_compact
from recovery.load import load_into
from storage_backends.base import Buffer, Entry, StorageError, Store
from storage_backends.memory import MemoryStore
from tests.faults.living import Book, Content, Process, Subject, damage
from tests.support.faulty import Crash
from tests.support.roundtrip import content

T = TypeVar("T")

OPTIMIZER = "optimizer"


class Mortal:
    """A store whose caller dies at the n-th call from `arm`, which does not happen, nor any after it."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self._left: int | None = None
        self._lock = threading.Lock()

    def arm(self, calls: int) -> None:
        self._left = calls

    @property
    def url(self) -> str:
        return self.inner.url

    def _call(self, do: Callable[[], T]) -> T:
        with self._lock:
            if self._left is not None:
                self._left -= 1
                if self._left < 0:
                    raise Crash("on purpose")
        return do()

    def put(self, key: str, data: Buffer) -> None:
        self._call(partial(self.inner.put, key, data))

    def get(self, key: str) -> bytes:
        return self._call(partial(self.inner.get, key))

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        return self._call(partial(self.inner.get_range, key, start, stop))

    def list(self, prefix: str) -> Sequence[Entry]:
        return self._call(partial(self.inner.list, prefix))

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._call(partial(self.inner.delete, [key]))


KEEPS = st.builds(
    ckpt.Keep,
    last=st.none() | st.integers(1, 3),
    every=st.none() | st.integers(1, 3),
    moments_last=st.none() | st.integers(1, 2),
)
DEATHS = st.none() | st.integers(0, 40)


class Histories(RuleBasedStateMachine):
    """`saved`: what the store must list, and the attempt that each is; `parents`: what each goes on from; `weights`:
    those without their optimizer."""

    happened: Counter[str] = Counter()  # noqa: RUF012 - of all runs together

    @initialize(data=st.data(), starts=st.lists(st.integers(1, 4), min_size=1, max_size=3))
    def begin(self, data: st.DataObject, starts: list[int]) -> None:
        self.store = MemoryStore()
        self.book = Book()
        self.saved: dict[SnapshotId, int] = {}
        self.parents: dict[SnapshotId, SnapshotId | None] = {}
        self.weights: set[SnapshotId] = set()
        self.pins: dict[str, SnapshotId] = {}
        self.process: Process | None = None
        self.mortal = Mortal(self.store)
        self.tip: SnapshotId | None = None
        for saves in starts:
            self.start(data)
            for _ in range(saves):
                self.save(None)
            self.end()

    # --- a job

    def whole(self) -> list[SnapshotId]:
        return sorted(self.saved.keys() - self.weights - self.announced)

    @property
    def announced(self) -> set[SnapshotId]:
        """What prunes that were killed meant to remove: nobody may claim it, and the next prune takes it."""
        docs = [unseal(self.store.get(e.key), PruneDoc, key=e.key) for e in self.store.list(PRUNES)]
        return {id_ for doc in docs for text in doc.snapshots if (id_ := SnapshotId.parse(text)) in self.saved}

    def line(self, tip: SnapshotId | None) -> set[SnapshotId]:
        found = set()
        while tip is not None:
            found.add(tip)
            tip = self.parents[tip]
        return found & self.saved.keys()

    @precondition(lambda self: self.process is None)
    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        self.mortal = Mortal(self.store)
        self.process = Process(self.mortal, self.book)
        self.go_back(data)

    @precondition(lambda self: self.process is not None)
    @rule(data=st.data())
    def go_back(self, data: st.DataObject) -> None:
        """Restore the newest, or any that is whole."""
        assert self.process is not None
        chosen = data.draw(st.none() | st.sampled_from(self.whole()) if self.whole() else st.none())
        self.happened["gone back"] += chosen is not None and chosen != max(self.saved)
        attempt = self.process.restore(None if chosen is None else str(chosen))  # type: ignore[arg-type]
        self.tip = chosen or max(self.saved, default=None)
        assert attempt == (0 if self.tip is None else self.saved[self.tip])

    @precondition(lambda self: self.process is not None and self.weights - self.announced)
    @rule(data=st.data())
    def ask_for_weights(self, data: st.DataObject) -> None:
        """A whole training state is never made of them, and stays as it was."""
        assert self.process is not None
        chosen = data.draw(st.sampled_from(sorted(self.weights - self.announced)))
        before = content(self.process.state)
        with pytest.raises(LayoutMismatch, match="weights only"):
            self.process.saver.restore(str(chosen))
        assert content(self.process.state) == before
        self.end()

    @precondition(lambda self: self.process is not None)
    @rule(dies=st.none() | st.integers(0, 9))
    def save(self, dies: int | None) -> None:
        assert self.process is not None
        if dies is not None:
            self.mortal.arm(dies)
        before = set(self.saved)
        known = False
        with contextlib.suppress(Crash):
            known = self.process.save()
        assert known or dies is not None
        self.happened["died saving"] += not known
        listed = read_history(self.store).snapshots.keys()
        new = listed - before
        assert before <= listed, "a save took something away"
        assert len(new) <= 1
        assert not known or new
        for id_ in new:
            self.saved[id_], self.parents[id_] = max(self.book.pages), self.tip
            assert id_.step == self.process.step
            self.happened["saved"] += 1
            self.tip = id_
        if dies is not None:
            self.book.told = max(self.saved.values(), default=0)
            self.end()

    @precondition(lambda self: self.process is not None)
    @rule()
    def end(self) -> None:
        assert self.process is not None
        with contextlib.suppress(Crash, CheckpointError, StorageError):
            self.process.saver.close(10)
        self.process = None

    # --- other people

    @precondition(lambda self: bool(self.saved))
    @rule(data=st.data(), name=st.sampled_from("ab"))
    def pin(self, data: st.DataObject, name: str) -> None:
        id_ = data.draw(st.sampled_from(sorted(self.saved.keys() - self.announced)))
        pin(self.store, read_history(self.store), name, id_, move=True)
        self.pins[name] = id_

    @precondition(lambda self: bool(self.pins))
    @rule()
    def unpin(self) -> None:
        name, id_ = self.pins.popitem()
        assert unpin(self.store, name) == id_

    @precondition(lambda self: bool(self.saved))
    @rule(keep=KEEPS, dies=DEATHS, data=st.data())
    def prune(self, keep: ckpt.Keep, dies: int | None, data: st.DataObject) -> None:
        newest, announced = max(self.saved), self.announced
        history = read_history(self.store)
        assert history.newest == newest
        assert history.live == self.line(newest)
        asked = data.draw(st.sets(st.sampled_from(sorted(self.saved)), max_size=1))
        plan = plan_prune(self.store, keep, grace=0, remove=asked, threads=1)
        before = {e.key: e.size for e in self.store.list("") if not e.key.startswith("alive/")}
        mortal = Mortal(self.store)
        if dies is not None:
            mortal.arm(dies)
        try:
            done = execute(plan, mortal, clock=SystemClock(), threads=1)
        except Crash:
            gone = self.saved.keys() - read_history(self.store).snapshots.keys()
            assert gone <= set(plan.snapshots)
            self.happened["died pruning"] += 1
        else:
            after = {e.key: e.size for e in self.store.list("") if not e.key.startswith("alive/")}
            lost = {key for key in before.keys() - after.keys() if not key.startswith((PRUNES, "pins/"))}
            assert lost == set(plan.keys) == set(done.keys), "a dry run said something else"
            assert sum(before[key] for key in lost) == plan.freed == done.freed
            assert sum(after[key] for key in after.keys() - before.keys()) == plan.written == done.stripped.written
            assert done.stripped.ids == plan.weights_only
            gone = set(plan.snapshots)
        kept = sorted(self.line(newest), reverse=True)[: keep.last or 0]
        # What was asked for goes whatever Keep says, and so does what an earlier prune that was killed had announced.
        assert not gone & (set(kept) - asked - announced)
        assert not gone & {newest, *self.pins.values()}
        assert not set(plan.weights_only) & {newest, *self.pins.values()}
        without = {id_ for id_, s in read_history(self.store).snapshots.items() if s.without}
        assert self.weights - gone <= without <= self.weights | set(plan.weights_only)
        self.happened.update(pruned=len(gone), stripped=len(without - self.weights))
        self.weights |= without
        for id_ in gone:
            del self.saved[id_]
            self.weights.discard(id_)
        self.check()

    @precondition(lambda self: bool(self.saved))
    @rule(dies=DEATHS, threshold=st.sampled_from([0.25, 1.0]))
    def compact(self, dies: int | None, threshold: float) -> None:
        mortal = Mortal(self.store)
        if dies is not None:
            mortal.arm(dies)
        try:
            done = compact(plan_compact(mortal, threshold=threshold, threads=1), mortal, grace=0, pack_limit=8192)
        except Crash:
            self.happened["died compacting"] += 1
        else:
            self.happened["compacted"] += len(done.snapshots)
        self.check()

    # --- what must hold

    def check(self) -> None:
        history = read_history(self.store)
        assert history.snapshots.keys() == self.saved.keys(), history.problems
        assert {id_ for id_, s in history.snapshots.items() if s.without} == self.weights
        assert history.newest == max(self.saved, default=None)
        assert history.live == self.line(history.newest)
        for id_, attempt in self.saved.items():
            page = self.book.pages[attempt].content
            state = Subject().state
            if id_ in self.weights:
                del state[OPTIMIZER]
                page = without_optimizer(page)
            load_into(self.store, state, str(id_))
            assert content(state) == page, f"{id_.short} is not what attempt {attempt} saved"

    def teardown(self) -> None:
        if self.process is not None:
            self.end()
        self.check()
        assert damage(self.store) == []


def without_optimizer(page: Content) -> Content:
    leaves, values = page
    kept = {at: data for at, data in leaves.items() if not at[0].startswith(f"{OPTIMIZER}.")}
    return kept, {name: value for name, value in values.items() if name != OPTIMIZER}


@pytest.fixture(autouse=True)
def many_small_packs(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Packs as a large state has them, by class of leaf; and no word of threads that died on purpose."""
    caplog.set_level(logging.CRITICAL)
    monkeypatch.setattr(checkpointer, "WriterSettings", partial(WriterSettings, pack_limit=8192, workers=1))
    monkeypatch.setattr(packing, "TINY", 512)
    told = threading.excepthook

    def hook(args: Any) -> None:
        if not issubclass(args.exc_type, Crash):
            told(args)

    monkeypatch.setattr(threading, "excepthook", hook)
    yield


@pytest.mark.filterwarnings("ignore:.*step .* was not saved:RuntimeWarning")
@pytest.mark.parametrize(
    "runs", [16, pytest.param(300, marks=[pytest.mark.campaign, pytest.mark.timeout(7200)])]
)  # fmt: skip
def test_any_history_equals_a_plain_dict(runs: int) -> None:
    """Every listed step loads bit for bit, the newest is right, and what a prune frees is what its dry run said."""
    Histories.happened.clear()
    run_state_machine_as_test(
        Histories,
        settings=settings(
            max_examples=runs, stateful_step_count=25, deadline=None, derandomize=runs < 100, print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )  # fmt: skip
    proof = ("saved", "gone back", "pruned", "stripped", "compacted", "died saving", "died pruning", "died compacting")
    assert all(Histories.happened[what] >= runs / 8 for what in proof), f"hardly anything: {Histories.happened}"
