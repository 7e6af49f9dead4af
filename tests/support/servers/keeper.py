"""One process per server: starts it, does what it is told on a socket, and ends it when its owner is gone, however.

    python -m tests.support.servers.keeper OWNER FOLDER SPEC

Prints one line, ``ready`` or why not. It adopts what its children leave behind (sshd's sessions are in process groups
of their own), so all of them end: when told, when the owner (a process id) has ended, by SIGKILL too, and with the
keeper itself. Then the folder goes, and the one above it with the last that it holds.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from tests.support.servers.recipes import HOST, KINDS, HaProxy, Recipe

READY = 90.0
"""Seconds until a server must answer; two cores may start many things at once."""

# Below the range that the kernel takes ports of outgoing connections from: none of those may sit on the port of a
# server that is killed and started again.
PORTS = range(20_000, 32_000)

_CHILD_SUBREAPER, _PDEATHSIG = 36, 1
_prctl = ctypes.CDLL(None, use_errno=True).prctl


def recipe_of(spec: dict[str, object]) -> Recipe:
    """`spec`: {"kind": …, and what the recipe is made with}."""
    match spec:
        case {"kind": "haproxy", "upstream": int(upstream), "mode": str(mode), "seed": int(seed)}:
            return HaProxy(upstream, mode, seed)
        case {"kind": str(kind)}:
            return KINDS[kind]()
    raise ValueError(f"no such server: {spec}")


class Kept:
    def __init__(self, folder: Path, spec: dict[str, object]) -> None:
        self.folder = folder
        self.recipe = recipe_of(spec)
        self.ports = free_ports(self.recipe.ports)
        (folder / "log").mkdir()
        self.recipe.configure(folder, self.ports)
        self.start()

    def start(self) -> None:
        """Start all programs and wait until they answer."""
        commands = self.recipe.commands(self.folder, self.ports)
        running = {name: self._run(name, command) for name, command in commands.items()}
        deadline = time.monotonic() + READY
        while True:
            try:
                return self.recipe.probe(self.folder, self.ports[0])
            except Exception as error:
                for name, process in running.items():
                    if process.poll() is not None:
                        raise RuntimeError(f"{name} ended with {process.returncode}: {self.said(name)}") from error
                if time.monotonic() > deadline:
                    raise RuntimeError(f"not ready in {READY:g} s: {error!r}") from error
                time.sleep(0.05)

    def _run(self, name: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
        def end_with_the_keeper() -> None:
            _prctl(_PDEATHSIG, signal.SIGKILL)

        with open(self.folder / "log" / name, "ab") as log:
            return subprocess.Popen(
                command,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=end_with_the_keeper,  # noqa: PLW1509 - the keeper has one thread
            )

    def said(self, name: str) -> str:
        return "\n".join((self.folder / "log" / name).read_text(errors="replace").splitlines()[-10:])

    def obey(self, command: str) -> None:
        match command:
            case "kill":
                end_all()
            case "start":
                self.start()
            case "pause":
                signal_all(signal.SIGSTOP)
            case "resume":
                signal_all(signal.SIGCONT)
            case _:
                raise ValueError(f"no such command: {command}")


def signal_all(number: signal.Signals) -> None:
    """To every process below this one."""
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.send_signal(number)


def end_all() -> None:
    """SIGKILL for every process below this one, until there is none."""
    while True:
        signal_all(signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def free_ports(number: int) -> list[int]:
    ports: list[int] = []
    while len(ports) < number:
        port = random.choice(PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            if port not in ports:
                ports.append(port)
    return ports


def keep(owner: int, kept: Kept, control: socket.socket) -> None:
    """Until the owner has ended, or says stop."""
    with selectors.DefaultSelector() as waiting:
        waiting.register(os.pidfd_open(owner), selectors.EVENT_READ)
        waiting.register(control, selectors.EVENT_READ)
        while True:
            for key, _ in waiting.select():
                if key.fileobj is not control:
                    return
                with control.accept()[0] as caller:
                    command = caller.recv(100).decode()
                    if command == "stop":
                        return
                    try:
                        kept.obey(command)
                        answer = "done"
                    except Exception as error:
                        answer = f"{type(error).__name__}: {error}"
                    with contextlib.suppress(OSError):  # who asked may be gone
                        caller.sendall(answer.encode())


def main(arguments: Sequence[str]) -> None:
    owner, folder, spec = int(arguments[0]), Path(arguments[1]), json.loads(arguments[2])
    _prctl(_CHILD_SUBREAPER, 1)
    try:
        with socket.socket(socket.AF_UNIX) as control:
            control.bind(str(folder / "control"))
            control.listen()
            kept = Kept(folder, spec)
            (folder / "port").write_text(str(kept.ports[0]))
            print("ready", flush=True)
            keep(owner, kept, control)
    except Exception as error:
        print(f"{type(error).__name__}: {error}".replace("\n", " | "), flush=True)
    finally:
        end_all()
        shutil.rmtree(folder, ignore_errors=True)
        Path(f"{folder}.lock").unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # the last of those that share it
            folder.parent.rmdir()


if __name__ == "__main__":
    main(sys.argv[1:])
