"""What all tests share: the campaign switch, and one thread per process (two cores run many processes)."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

# Mirrors of tests lie in shared memory, as a user's do, but never among those of a real job.
_mirrors = tempfile.mkdtemp(prefix="ckpt-tests-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
os.environ["CKPT_MIRROR_DIR"] = _mirrors
_numbers = itertools.count()


@pytest.fixture(autouse=True)
def mirrors(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A mirror folder of each test's own: what one test leaves behind must not serve another one's restore."""
    folder = Path(_mirrors, str(next(_numbers)))
    monkeypatch.setenv("CKPT_MIRROR_DIR", str(folder))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def pytest_sessionfinish() -> None:
    shutil.rmtree(_mirrors, ignore_errors=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--campaign", action="store_true", help="run the long random campaigns too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--campaign"):
        return
    skip = pytest.mark.skip(reason="a long campaign; run with --campaign")
    for item in items:
        if "campaign" in item.keywords:
            item.add_marker(skip)
