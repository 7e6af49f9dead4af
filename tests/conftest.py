"""What all tests share: the switches for campaigns and servers, and one thread per process (two cores run many)."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.servers.fixture import Servers

os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell without job control starts what it puts in the background with SIGINT ignored, and children inherit that; the
# tests of Ctrl-C would wait for an interrupt that never comes.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

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


@pytest.fixture(scope="session")
def servers(request: pytest.FixtureRequest) -> Servers:
    """Real storage servers; a test that cannot have its server is skipped, or fails under --servers-required."""
    return Servers(required=request.config.getoption("--servers-required"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--campaign", action="store_true", help="run the long random campaigns too")
    parser.addoption("--servers", action="store_true", help="run what needs real storage servers too; installs them")
    parser.addoption("--servers-required", action="store_true", help="the same; one that cannot be had is an error")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    off = {}
    if not config.getoption("--campaign"):
        off["campaign"] = pytest.mark.skip(reason="a long campaign; run with --campaign")
    if not (config.getoption("--servers") or config.getoption("--servers-required")):
        off["servers"] = pytest.mark.skip(reason="needs real storage servers; run with --servers")
    for item in items:
        for name, skip in off.items():
            if item.get_closest_marker(name) is not None:  # not by keyword: a folder of this name is one too
                item.add_marker(skip)
