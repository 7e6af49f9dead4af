"""Two jobs, one store (E5), on a real server: the second is refused while the first lives, and nothing ever mixes."""

from __future__ import annotations

import signal
import sys

import pytest
import torch

import ckpt
from ckpt.errors import SaveFailed, StoreInUse
from ckpt.history.catalog import read_history
from tests.servers.job import findings
from tests.support.procs import Job, succeed
from tests.support.servers import Place
from tests.support.servers.fixture import Servers
from tests.support.worlds import PATIENT, quiet

pytestmark = [pytest.mark.e2e, pytest.mark.servers]

SAVES = 50


def saves(place: Place, base: float) -> None:
    """Steps 1 to 50 of a line of its own. Tries again after each line on stdin while it is refused."""
    tensor = torch.zeros(5000)
    store = place.open()
    while True:
        tensor.fill_(base + 1)
        saver = ckpt.Checkpointer(store, {"t": tensor}, fresh=True, mirror="off", options=quiet(heartbeat=3))
        try:
            saver.save(1)
            break
        except StoreInUse as error:
            print(f"refused by {error.host} {error.pid} {error.run}.")
            saver.close()
            sys.stdin.readline()
    for step in range(1, SAVES + 1):
        tensor.fill_(base + step)
        saver.save(step).wait(PATIENT)
        if step == 3:
            print("three saved.")
    print("all saved.")
    sys.stdin.readline()
    saver.close()


def test_of_two_jobs_on_one_store_the_second_waits_and_their_steps_never_mix(servers: Servers) -> None:
    """E5: the same 50 steps twice."""
    place = servers("seaweedfs").place()
    with Job(saves, 1, [place, 1000.0]) as first:
        first.until(0, "three saved.")
        with Job(saves, 1, [place, 2000.0]) as second:
            second.until(0, f" {first.pid(0)} ")
            first.until(0, "all saved.")
            first.tell(0)
            succeed(first.wait())
            second.tell(0)  # try again
            second.tell(0)  # end
            succeed(second.wait())
    store = place.open()
    history = read_history(store)
    assert len(history.runs) == 2
    assert findings(store) == []
    for generation, base in ((1, 1000.0), (2, 2000.0)):
        mine = sorted(id_ for id_ in history.snapshots if id_.run.generation == generation)
        assert [id_.step for id_ in mine] == list(range(1, SAVES + 1))
        for id_ in (mine[0], mine[24], mine[-1]):
            assert set(ckpt.load(store, id_.short)["t"].tolist()) == {base + id_.step}


def sleeps_and_wakes(place: Place) -> None:
    tensor = torch.zeros(5000)
    saver = ckpt.Checkpointer(place.open(), {"t": tensor}, mirror="off", options=quiet())
    saver.restore()
    saver.save(1).wait(PATIENT)
    print("saved.")
    sys.stdin.readline()
    tensor.fill_(-1)
    with pytest.raises((StoreInUse, SaveFailed)) as told:
        saver.save(2).wait(PATIENT)
    print(f"woke: {told.value}")


def takes_over(place: Place) -> None:
    tensor = torch.zeros(5000)
    with ckpt.Checkpointer(place.open(), {"t": tensor}, mirror="off", options=quiet()) as saver:
        assert saver.restore() == 1
        tensor.fill_(2)
        saver.save(2).wait(PATIENT)


def test_a_job_that_was_stopped_for_long_and_wakes_up_harms_nothing_of_the_one_that_took_over(
    servers: Servers,
) -> None:
    place = servers("seaweedfs").place()
    with Job(sleeps_and_wakes, 1, [place]) as zombie:
        zombie.until(0, "saved.")
        zombie.kill(0, signal.SIGSTOP)
        with Job(takes_over, 1, [place]) as heir:
            succeed(heir.wait())
        zombie.kill(0, signal.SIGCONT)
        zombie.tell(0)
        (output,) = succeed(zombie.wait())
    assert "woke:" in output and "newer" in output, output
    store = place.open()
    assert set(ckpt.load(store)["t"].tolist()) == {2.0}
    assert findings(store) == []
