"""What the tests that crash processes at each of their calls share."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from functools import partial

import pytest

from ckpt import checkpointer
from ckpt.saving.writer import WriterSettings
from tests.support.faulty import Crash


@pytest.fixture(scope="module")
def small_packs() -> Iterator[None]:
    """Several packs per save of a few chunks, so that a save is many calls."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpointer, "WriterSettings", partial(WriterSettings, pack_limit=8192, workers=1))
        yield


@pytest.fixture
def no_noise(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The threads of a process that has crashed end as they may, and hundreds of warnings tell nobody anything."""
    caplog.set_level(logging.CRITICAL)
    told = threading.excepthook

    def hook(args: threading.ExceptHookArgs) -> None:
        if not issubclass(args.exc_type, Crash):
            told(args)

    monkeypatch.setattr(threading, "excepthook", hook)
