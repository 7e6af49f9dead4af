"""A whole job on stores in memory, ours and fsspec's: one process, whose store fails, and a new start."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import count

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

import ckpt
from ckpt.history.catalog import read_history
from ckpt.history.clock import SystemClock
from ckpt.history.retention import execute, plan_prune
from storage_backends import FsspecStore, MemoryStore, Refused, Store
from tests.servers.job import check_bits, findings
from tests.support.faulty import WRITES, FaultyStore
from tests.support.training import Training
from tests.support.worlds import quiet

places = count()


@pytest.fixture(params=["memory", "fsspec"])
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    if request.param == "memory":
        yield MemoryStore()
        return
    name = f"jobs{next(places)}"
    yield FsspecStore(f"memory://{name}/run")
    for path in [path for path in MemoryFileSystem.store if path.startswith(f"/{name}")]:
        del MemoryFileSystem.store[path]


def test_a_job_whose_store_fails_for_good_in_a_save_goes_on_in_a_new_start_and_ends_as_if_it_had_not(
    store: Store,
) -> None:
    """A process cannot be killed without its memory: deaths at every call are in tests/faults."""
    failures = 0
    for fail_at in (5, 9, None):
        training = Training()
        failing = FaultyStore(
            store, fail_at=fail_at, for_ever=True, error=Refused, verbs=WRITES, where=lambda key: key[:6] != "alive/"
        )
        saver = ckpt.Checkpointer(failing, training.state, keep=ckpt.Keep(last=2), mirror="off", options=quiet())
        with suppress(ckpt.SaveFailed):
            for step in range(saver.restore(), 6):
                training.train(step)
                saver.save(step + 1).wait(60)
        with suppress(ckpt.SaveFailed):
            saver.close()
        failures += failing.fired
    assert failures == 2
    check_bits(store, 6)
    assert findings(store) == []
    assert len(read_history(store).snapshots) <= 3
    execute(plan_prune(store, ckpt.Keep(last=1), grace=0.0), store, clock=SystemClock())
    check_bits(store, 6)
    assert torch.equal(ckpt.load(store, 6)["model.inp.weight"], training.model.inp.weight)
