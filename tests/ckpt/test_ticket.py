from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ckpt.errors import SaveFailed
from ckpt.saving.job import Failed, Report, Saved
from ckpt.ticket import Ticket


def saved() -> Saved:
    return Saved(cast(Any, SimpleNamespace()), Report(stored=3))


def test_a_ticket_in_flight_knows_nothing_yet() -> None:
    ticket = Ticket(4)
    assert (ticket.done(), ticket.error, ticket.report) == (False, None, None)
    with pytest.raises(TimeoutError, match="step 4"):
        ticket.wait(0)


def test_whoever_waits_is_woken_by_the_outcome() -> None:
    ticket = Ticket(4)
    waiter = threading.Thread(target=ticket.wait)
    waiter.start()
    ticket.settle(saved())
    waiter.join(30)
    assert not waiter.is_alive() and ticket.done() and ticket.error is None
    assert ticket.report is not None and ticket.report.stored == 3
    assert "saved" in repr(ticket)


def test_a_failed_save_raises_where_it_is_waited_for() -> None:
    ticket = Ticket(4)
    ticket.settle(Failed(SaveFailed("no space", step=4, stage="upload"), Report()))
    with pytest.raises(SaveFailed, match="no space"):
        ticket.wait()
    assert isinstance(ticket.error, SaveFailed) and "no space" in repr(ticket)


def test_a_skipped_save_is_done_and_no_error() -> None:
    ticket = Ticket(4, skipped=True)
    ticket.wait(0)
    assert ticket.done() and ticket.skipped and ticket.error is None and "skipped" in repr(ticket)
