"""`ckpt.History`: a history for programs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import ckpt
from storage_backends.memory import MemoryStore
from tests.cli.living import MADE, NEXT, pin, two_lines
from tests.support.faulty import FaultyStore
from tests.support.stores import DirectWriter, drifting, make_store


def test_it_lists_what_there_is(tmp_path: Path) -> None:
    store, ids = two_lines(tmp_path)
    pin(store, "good", ids[1])
    history = ckpt.History(tmp_path)
    found = history.list()
    assert [s.id for s in found] == sorted(ids)
    assert [(s.step, s.abandoned) for s in found] == [
        (500, False),
        (600, True),
        (700, True),
        (510, False),
        (600, False),
    ]
    assert found[1].pins == ("good",) and found[1].time == MADE and found[1].metrics == {"loss": 1.5}
    assert (found[-1].generation, found[-1].name) == (NEXT.generation, "2/600")
    assert history.newest() == found[-1] == history.find("latest")
    assert history.pins() == {"good": found[1]}
    with pytest.raises(ckpt.NoSnapshot, match="2 snapshots"):
        history.find(600)


def test_an_empty_store_has_nothing() -> None:
    history = ckpt.History(MemoryStore())
    assert (history.list(), history.newest(), history.pins(), history.du().steps) == ((), None, {}, ())


def test_it_stays_open_beside_a_live_job_and_reads_documents_once() -> None:
    store = FaultyStore(MemoryStore())
    writer = DirectWriter(store)
    writer.begin()
    writer.step(1, {"w": np.ones(3)})
    history = ckpt.History(store)
    assert len(history.list()) == 1
    writer.step(2, {"w": np.ones(3)})
    store.calls.clear()
    assert [s.step for s in history.list()] == [1, 2]
    read = [key for verb, key in store.calls if verb == "get"]
    assert len(read) == 1 and read[0].startswith("snapshots/")


def test_diff_and_du_are_what_the_command_line_shows() -> None:
    store = MemoryStore()
    make_store(store, drifting(2), ranks=2, chunk=4096)
    history = ckpt.History(store)
    found = history.diff(10, "latest", names="model.*")
    assert {leaf.path for leaf in found.leaves if leaf.verdict == "changed"} == {
        "model.moving", "model.sparse", "model.bias",
    }  # fmt: skip
    usage = history.du(10)
    assert [s.id.step for s in usage.steps] == [10, 20]
    assert {c.cls for c in usage.classes} == {"array"}
    assert sum(c.size for c in usage.classes) == usage.steps[0].size
