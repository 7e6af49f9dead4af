"""Limits of a checkpointer's background traffic: training never waits for them, and nothing else is held back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch

import ckpt
from ckpt.errors import SaveFailed
from storage_backends.memory import MemoryStore
from storage_backends.throttle import BURST, Limits, Pace, ThrottledStore
from tests.support.faulty import FaultyStore

STATE = 1_000_000


def state() -> dict[str, object]:
    generator = torch.Generator().manual_seed(5)
    return {"t": torch.randint(0, 256, (STATE,), dtype=torch.uint8, generator=generator)}


class Held:
    """A clock's `sleep` that holds whoever would sleep longer than a second, until `go`."""

    def __init__(self) -> None:
        self.came, self.go = threading.Event(), threading.Event()

    def sleep(self, seconds: float) -> None:
        if seconds > 1:
            self.came.set()
            assert self.go.wait(timeout=60)


def test_save_returns_while_the_limit_holds_uploads_back_and_what_was_saved_is_what_loads() -> None:
    inner, held = MemoryStore(), Held()
    store = ThrottledStore(inner, Pace(Limits(bandwidth=10_000), sleep=held.sleep))
    mine = state()
    tensor = mine["t"]
    assert isinstance(tensor, torch.Tensor)
    before = tensor.clone()
    with ckpt.Checkpointer(store, mine, mirror="off", when_busy="skip") as saver:
        saver.restore()
        ticket = saver.save(1)  # returned, and
        assert held.came.wait(timeout=60)  # the upload is held,
        assert not ticket.done()
        assert inner.list("packs/") == []
        tensor.zero_()  # while training goes on
        assert saver.save(2).skipped
        held.go.set()
        ticket.wait(timeout=60)
    assert torch.equal(ckpt.load(inner, step=1)["t"], before)


def test_options_hold_back_saves_and_neither_restores_nor_heartbeats() -> None:
    """At a byte per second a save would take a week."""
    store = FaultyStore(MemoryStore())
    with ckpt.Checkpointer(store, state(), mirror="off") as saver:
        saver.restore()
        saver.save(1).wait(timeout=60)
    options = ckpt.Options(bandwidth="1B/s", requests="1/s", heartbeat=0.05)
    saver = ckpt.Checkpointer(store, {"t": torch.zeros(STATE, dtype=torch.uint8)}, mirror="off", options=options)
    assert saver.restore() == 1
    saver.state["t"].add_(1)  # type: ignore[attr-defined]
    before = store.count("put")
    ticket = saver.save(2)
    until(lambda: sum(key.startswith("alive/") for verb, key in store.calls[before:] if verb == "put") > 3)
    assert not ticket.done()
    with pytest.raises(SaveFailed, match="not seen committed within"):
        saver.close(timeout=0.1)
    second = {key for verb, key in store.calls if verb == "put" and "000002-" in key}
    assert second and all(key.startswith(("runs/", "alive/")) for key in second), second


# Lower bounds of times only: at full speed these take a hundredth.


def test_a_save_sends_no_more_bytes_per_second_than_it_may() -> None:
    store, options = MemoryStore(), ckpt.Options(bandwidth="4MB/s")
    with ckpt.Checkpointer(store, state(), mirror="off", options=options) as saver:
        saver.restore()
        began = time.monotonic()
        saver.save(1).wait(timeout=60)
        seconds = time.monotonic() - began
    sent = sum(entry.size for entry in store.list("packs/"))
    assert sent > 0.9 * STATE  # it does not compress
    assert seconds > 0.9 * (sent / 4e6 - BURST)


def test_a_save_and_its_prune_make_no_more_requests_per_second_than_they_may() -> None:
    store, options = FaultyStore(MemoryStore()), ckpt.Options(requests="100/s")
    with ckpt.Checkpointer(
        store, {"t": torch.zeros(1000)}, mirror="off", keep=ckpt.Keep(last=1), options=options
    ) as saver:
        saver.restore()
        began, before = time.monotonic(), len(store.calls)
        for step in range(1, 6):
            saver.state["t"].add_(1)  # type: ignore[attr-defined]
            saver.save(step).wait(timeout=60)
    seconds = time.monotonic() - began
    verbs = [verb for verb, key in store.calls[before:] if not key.startswith(("alive/", "runs/", "store.json"))]
    assert verbs.count("delete") >= 8 and verbs.count("list") >= 20, verbs
    assert seconds > 0.8 * (len(verbs) / 100 - BURST)


def until(true: Callable[[], bool]) -> None:
    """Looked at until it holds."""
    turn = threading.Event()
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        turn.wait(0.01)
