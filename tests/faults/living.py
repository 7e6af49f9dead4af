"""A training job that is started again and again on one store, and a book of what it saved, kept outside the store.

Every state carries the number of the attempt that saved it. So whatever is read back says which page of the book it
must equal, bit for bit, and a snapshot that mixes two attempts equals none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

import ckpt
from ckpt.checkpointer import Checkpointer
from ckpt.errors import CheckpointError, StorageError
from ckpt.format.names import PACKS, PARTS, PRUNES, SNAPSHOTS, SnapshotName
from ckpt.history.catalog import read_history
from recovery.load import load_into
from recovery.verify import verify
from storage_backends.base import Store
from tests.support.roundtrip import content

Content = tuple[dict[Any, bytes], dict[str, Any]]

OPTIONS = ckpt.Options(chunk=4096, grace=0, heartbeat="1h", commit_wait=20)


class Subject:
    """A small state with something of everything: parameters, moments, buffers, a tied weight, leaves that change all
    over, here and there, and never, an empty one, a scalar, an array, plain values."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(32, 40), nn.BatchNorm1d(40), nn.Linear(32, 40, bias=False))
        self.model[2].weight = self.model[0].weight
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.state: dict[str, object] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "dense": torch.zeros(1500),
            "sparse": torch.zeros(1600, dtype=torch.int64),
            "still": torch.arange(3000, dtype=torch.float16),
            "empty": torch.empty(0, 3),
            "scalar": torch.zeros((), dtype=torch.bfloat16),
            "array": np.zeros(600),
            "attempt": 0,
            "values": {"best": float("inf"), "names": ("a", b"b")},
        }

    def change(self, attempt: int) -> None:
        """As one step of training does, by the number of the attempt alone."""
        noise = torch.Generator().manual_seed(attempt)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=noise)
            self.optimizer.step()
            for buffer in self.model.buffers():
                buffer.add_(1)
            _tensor(self.state["dense"]).normal_(generator=noise)
            _tensor(self.state["sparse"])[torch.randint(0, 1600, (3,), generator=noise)] += 1
            _tensor(self.state["scalar"]).fill_(attempt)
        array = self.state["array"]
        assert isinstance(array, np.ndarray)
        array[attempt % 600] = attempt
        self.state["values"] = {"best": 1 / attempt, "names": ("a", b"b" * (attempt % 3))}
        self.state["attempt"] = attempt


def _tensor(value: object) -> torch.Tensor:
    assert isinstance(value, torch.Tensor)
    return value


@dataclass(frozen=True)
class Page:
    """One attempt to save."""

    step: int
    content: Content


@dataclass
class Book:
    """What was saved, by attempt. `told`: the last attempt whose ticket said that it is committed."""

    pages: dict[int, Page] = field(default_factory=dict)
    told: int = 0

    def begin(self, step: int, state: dict[str, object]) -> None:
        """Before `save()`: a save that fails may have landed."""
        attempt = state["attempt"]
        assert isinstance(attempt, int)
        self.pages[attempt] = Page(step, content(state))

    def check(self, step: int, state: dict[str, object]) -> int:
        """That a state which was read back is what was saved as this step; its attempt."""
        attempt = state["attempt"]
        assert isinstance(attempt, int)
        page = self.pages[attempt]
        assert page.step == step, f"attempt {attempt} saved step {page.step}, and came back as {step}"
        assert content(state) == page.content, f"attempt {attempt}, step {step}: not the bytes that were saved"
        return attempt


class Process:
    """One start of the job. Use it as a context manager: at its end the checkpointer is closed, whatever happened."""

    def __init__(self, store: Store, book: Book, *, keep: ckpt.Keep | None = None) -> None:
        self.book = book
        self.subject = Subject()
        # No mirror: it is the store that must bring the state back.
        self.saver = Checkpointer(store, self.subject.state, keep=keep, mirror="off", options=OPTIONS)
        self.step = 0

    @property
    def state(self) -> dict[str, object]:
        return dict(self.saver.state)

    def restore(self, step: int | None = None) -> int:
        """Restore, and compare with the book. The attempt that came back, 0 if none."""
        self.step = patiently(lambda: self.saver.restore(step))
        self.subject.state.update(self.saver.state)
        if self.step == 0:
            assert self.book.told == 0, "an empty store, although a save was told to be committed"
            return 0
        attempt = self.book.check(self.step, self.state)
        assert step is not None or attempt >= self.book.told, f"{self.book.told} was committed, {attempt} came back"
        return attempt

    def begin_save(self) -> ckpt.Ticket:
        """Train a step, write it down, and begin to save it."""
        self.step += 1
        self.subject.change(1 + max(self.book.pages, default=0))
        self.saver.state.update(self.subject.state)
        self.book.begin(self.step, self.state)
        return self.saver.save(self.step)

    def save(self) -> bool:
        """Train a step and save it; whether that is known to be committed."""
        try:
            self.begin_save().wait(60)
        except (StorageError, CheckpointError):
            return False
        self.book.told = max(self.book.pages)
        return True

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(StorageError, CheckpointError):  # told by the ticket already
            self.saver.close()


def patiently(call: Callable[[], int]) -> int:
    """A second time, if the store fails the first time."""
    try:
        return call()
    except StorageError:
        return call()


def check_store(store: Store, book: Book) -> None:
    """That every listed snapshot is one attempt of the book, whole; and that verify finds no damage."""
    history = read_history(store)
    listed = {n.id for e in store.list(SNAPSHOTS) if (n := SnapshotName.parse(e.key)) is not None}
    assert listed == history.snapshots.keys(), history.problems
    for id_ in history.snapshots:
        state = Subject().state
        load_into(store, state, str(id_))
        book.check(id_.step, state)
    assert damage(store) == []


def check_goes_on(store: Store, book: Book, *, whole: bool = True) -> None:
    """That the next start of the job restores the newest snapshot, saves a step that is right, and sweeps the rest
    (but for a store that is not `whole`: there nothing is pruned)."""
    with Process(store, book, keep=ckpt.Keep(last=1)) as process:
        process.restore()
        assert process.save()
    state = Subject().state
    load_into(store, state)
    assert book.check(process.step, state) == book.told
    if not whole:
        return
    kept = read_history(store).snapshots.values()
    needed = {ref.key for s in kept for ref in s.parts} | {pack for s in kept for pack, _ in s.packs}
    assert {e.key for e in store.list("") if e.key.startswith((PARTS, PACKS))} == needed, "leftovers were not swept"
    assert not store.list(PRUNES), "a prune was not finished"
    assert damage(store) == []


def damage(store: Store) -> list[str]:
    """What `ckpt verify --deep` calls an error."""
    return [f.text for f in verify(store, deep=True, threads=1) if f.level == "error"]
