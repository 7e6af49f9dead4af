"""A running server, seen from the tests: shared by all workers of this pytest, or one's own."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
from filelock import FileLock

from tests.support.procs import ROOT
from tests.support.servers.install import NotInstallable
from tests.support.servers.recipes import KINDS, Place, Recipe

_numbers = itertools.count()
_keepers: list[subprocess.Popen[str]] = []
"""Of shared servers. They outlive this process, which must not be told so by a warning of each."""


@dataclass(frozen=True)
class Server:
    """Its folder holds its data and logs; it listens on `port` of loopback, after a `kill` and a `start` too."""

    recipe: Recipe
    folder: Path
    port: int

    def place(self) -> Place:
        """A fresh, empty place for a store."""
        return self.recipe.place(self.folder, self.port, fresh_name())

    def kill(self) -> None:
        """SIGKILL for all its processes; its data stay. Never on a shared one."""
        self.tell("kill")

    def start(self) -> None:
        """Again, after `kill`; returns when it answers."""
        self.tell("start")

    def pause(self) -> None:
        """SIGSTOP: connections are accepted (by the kernel), and nothing ever answers, until `resume`."""
        self.tell("pause")

    def resume(self) -> None:
        self.tell("resume")

    def tell(self, command: str) -> None:
        with socket.socket(socket.AF_UNIX) as control:
            control.connect(str(self.folder / "control"))
            control.sendall(command.encode())
            answer = control.recv(10_000).decode()
        if answer != "done":
            raise RuntimeError(f"{command}: {answer or 'the keeper ended'}")


def fresh_name() -> str:
    """A name of a place that nobody else has; the process id alone would come again."""
    return f"{os.getpid()}-{next(_numbers)}-{secrets.token_hex(3)}"


def shared(kind: str) -> Server:
    """The one of this kind for this pytest and all its workers: the first to ask starts it, pytest's end ends it.

    Raises:
        NotInstallable: it cannot be had here.
    """
    recipe = _installed(kind)
    owner = psutil.Process(os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid())
    # The time of its start, because process ids come again.
    base = Path(tempfile.gettempdir(), f"ckpt-servers-{owner.pid}-{owner.create_time():.0f}")
    base.mkdir(mode=0o700, exist_ok=True)
    folder = base / kind
    with FileLock(base / f"{kind}.lock"):
        if not (folder / "port").exists():
            folder.mkdir()
            _keepers.append(launch(owner.pid, folder, {"kind": kind}))
    return Server(recipe, folder, int((folder / "port").read_text()))


@contextlib.contextmanager
def running(kind: str) -> Iterator[Server]:
    """A server of one's own, to be killed, paused and started again at will; ends with the block, or the process.

    Raises:
        NotInstallable: it cannot be had here.
    """
    recipe = _installed(kind)
    with launched({"kind": kind}) as (folder, port):
        yield Server(recipe, folder, port)


@contextlib.contextmanager
def launched(spec: dict[str, object]) -> Iterator[tuple[Path, int]]:
    """A keeper and its server for the time of a block: its folder and port."""
    folder = Path(tempfile.mkdtemp(prefix="ckpt-servers-"), str(spec["kind"]))
    folder.mkdir()
    keeper = launch(os.getpid(), folder, spec)
    try:
        yield folder, int((folder / "port").read_text())
    finally:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as control:
            control.connect(str(folder / "control"))
            control.sendall(b"stop")
        keeper.wait(60)


def launch(owner: int, folder: Path, spec: dict[str, object]) -> subprocess.Popen[str]:
    """Start a keeper; returns when its server answers."""
    keeper = subprocess.Popen(
        [sys.executable, "-m", "tests.support.servers.keeper", str(owner), str(folder), json.dumps(spec)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a Ctrl-C ends its owner, and that ends it
    )
    assert keeper.stdout is not None
    with keeper.stdout as said:
        answer = said.readline().strip()
    if answer != "ready":
        raise RuntimeError(f"{spec} did not start: {answer}")
    return keeper


def _installed(kind: str) -> Recipe:
    if not sys.platform.startswith("linux"):
        raise NotInstallable("the servers' keeper needs Linux (pidfd, subreaper)")
    recipe = KINDS[kind]()
    recipe.install()
    return recipe
