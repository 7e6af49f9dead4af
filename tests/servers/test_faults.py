"""Faults on the way to real servers, and of the servers themselves, as a training sees them."""

from __future__ import annotations

import time

import pytest
import torch

import ckpt
from ckpt.errors import SaveFailed, Unavailable
from storage_backends import RetryingStore
from tests.servers.job import findings
from tests.support.faulty import GateStore
from tests.support.servers import Place
from tests.support.servers.fixture import Servers

pytestmark = [pytest.mark.e2e, pytest.mark.servers]

MB = 1_000_000


def noise(size: int, seed: int) -> torch.Tensor:
    """Bytes that do not compress."""
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def check(place: Place, expected: torch.Tensor, step: int) -> None:
    """What came to lie there, read past the faults."""
    store = place.open()
    assert torch.equal(ckpt.load(store, step=step)["t"], expected)
    assert findings(store) == []


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        ("seaweedfs", 20 * MB),
        ("azurite", 20 * MB),
        pytest.param("seaweedfs", 200 * MB, marks=pytest.mark.campaign),
        pytest.param("swift", 200 * MB, marks=pytest.mark.campaign),
    ],
)
def test_a_save_through_latency_and_random_503s_completes_and_verifies(servers: Servers, kind: str, size: int) -> None:
    """100 ms before each request, and one in five is told to slow down."""
    state = noise(size, 1)
    with servers.proxied(servers(kind), latency=0.1, fail=0.2) as proxy:
        place = proxy.place()
        with ckpt.Checkpointer(place.open(), {"t": state}, mirror="off") as saver:
            saver.restore()
            before, began = len(proxy.requests()), time.monotonic()
            step, fates = 0, list[str]()
            while step < 10 and fates.count("fail") < 3:  # a save is a dozen requests: one may come by unhurt
                step += 1
                state += 1
                saver.save(step).wait(300)
                fates = [request.fate for request in proxy.requests()[before:]]
            seconds = time.monotonic() - began
        proxy.set()
        check(place, state, step)
    told = fates.count("fail")
    print(f"{kind}: {size / 1e6:.0f} MB, {step} times in {seconds:.1f} s, {len(fates)} requests, {told} of them 503")
    assert told >= 3, "the fault hardly fired"


def test_a_black_hole_fails_the_save_within_the_deadline_and_training_waits_for_nothing_but_copies(
    servers: Servers,
) -> None:
    deadline = 6.0
    state = noise(MB, 1)
    with servers.proxied(servers("seaweedfs")) as proxy:
        place = proxy.place()
        options = ckpt.Options(heartbeat=0.5)
        saver = ckpt.Checkpointer(place.open(deadline), {"t": state}, mirror="off", when_busy="skip", options=options)
        saver.restore()
        saver.save(1).wait(60)
        proxy.set(hole=True)
        began = time.monotonic()
        state.add_(1)
        lost = saver.save(2)
        skipped = [saver.save(step) for step in range(3, 20)]
        # Seen by order, not by clock: the hole still holds what these came back from.
        assert not lost.done()
        assert all(ticket.skipped for ticket in skipped)
        with pytest.raises(SaveFailed) as caught:
            lost.wait(60)
        seconds = time.monotonic() - began
        cause = caught.value.__cause__
        assert isinstance(cause, Unavailable)
        print(f"failed after {seconds:.1f} s: {caught.value}")
        assert cause.attempts >= 2 and cause.seconds <= deadline
        for part in (place.url, "packs/", "attempts in", "imed out"):
            assert part in str(caught.value)
        proxy.set()
        proxy.cut()
        state.add_(1)
        with pytest.warns(RuntimeWarning, match="step 2 was not saved"):
            ticket = saver.save(20)
        ticket.wait(60)
        saver.close()
        assert (saver.stats.saves, saver.stats.failed, saver.stats.skipped) == (2, 1, 17)
        check(place, state, 20)


# Not azurite: an emulator, which forgets under SIGKILL what it acknowledged in the seconds before.
@pytest.mark.parametrize("kind", ["seaweedfs", "sftp", pytest.param("swift", marks=pytest.mark.campaign)])
def test_a_server_killed_and_started_again_in_the_middle_of_a_save_costs_it_time_only(
    servers: Servers, kind: str
) -> None:
    """SIGKILL between two requests of the save; they are refused until the server is back, and repeated."""
    with servers.own(kind) as server:
        place = server.place()
        held = ""
        gate = GateStore(place.bare(), where=lambda key: key.startswith(held))
        gate.gate.set()
        state = noise(MB, 1)
        with ckpt.Checkpointer(RetryingStore(gate), {"t": state}, mirror="off") as saver:
            saver.restore()
            for step, held in enumerate(("packs/", "parts/", "snapshots/"), 1):  # noqa: B007 - the gate looks at it
                gate.arrived.clear()
                gate.gate.clear()
                state.add_(1)
                ticket = saver.save(step)
                assert gate.arrived.wait(60)
                server.kill()
                gate.gate.set()
                with pytest.raises(Unavailable):
                    place.bare().list("")
                server.start()
                ticket.wait(90)
        for step in (1, 2, 3):
            check(place, noise(MB, 1) + step, step)


@pytest.mark.parametrize("kind", ["seaweedfs", "sftp"])
def test_resets_are_repeated(servers: Servers, kind: str) -> None:
    """Every other request, or new connection, is reset; and between the saves each connection there is."""
    state = noise(4 * MB, 1)
    with servers.proxied(servers(kind), reset=0.5) as proxy:
        place = proxy.place()
        with ckpt.Checkpointer(place.open(), {"t": state}, mirror="off") as saver:
            for step in (1, 2):
                state.add_(1)
                saver.save(step).wait(90)
                proxy.cut()
        fates = [request.fate for request in proxy.requests()]
        proxy.set()
        check(place, state, 2)
    assert "reset" in fates, fates
