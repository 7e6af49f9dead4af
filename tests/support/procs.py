"""Ranks as real processes: scripts, functions and torchrun jobs, their output, and their death at a chosen moment.

    results = run_ranks(script, 3, [store])            # source text, a path, or a function of a test module
    job = Job(function, 2, [store]); job.until(1, "captured"); job.kill(1); job.wait()
    job = torchrun(path, 3, [store]); job.until(0, "step 40"); job.kill_all(); job.wait()

A rank finds RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment, so ``init_process_group("gloo")`` works.
Functions run in forks of a server that has torch loaded already (20 ms a rank where a script takes 2 s); their
arguments and nothing else reach the process. What a rank prints is waited for as an event; `tell` sends a line to its
standard input. A job that outlives its timeout dumps the stacks of all its threads before it is killed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 90.0
"""Seconds; generous, because two cores run many tests at once."""

PRELOAD = [
    "torch", "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch.optim.swa_utils", "torch.utils.data",
    "torchdata.stateful_dataloader", "pytest", "ckpt.checkpointer", "ckpt.loop", "recovery.load",
    "torch._dynamo",  # which fully_shard and DDP load when they are first used: five seconds in every rank
]  # fmt: skip
"""What every fork has loaded already. There is one server per test process: the first to use it says what it loads."""

Target = str | Path | Callable[..., None]


@dataclass(frozen=True)
class Result:
    """What became of one process: exit code (negative: the signal that ended it), and all it printed."""

    code: int
    out: str


class _Output:
    """Collects what a process prints, and wakes whoever waits for a word of it."""

    def __init__(self, fd: int) -> None:
        self._news = threading.Condition()
        self._data = b""
        self._ended = False
        self._reader = threading.Thread(target=self._read, args=(fd,), daemon=True)
        self._reader.start()

    def _read(self, fd: int) -> None:
        while True:
            try:
                data = os.read(fd, 65536)
            except OSError:
                data = b""
            with self._news:
                self._data += data
                self._ended = not data
                self._news.notify_all()
            if not data:
                return

    def until(self, text: str, timeout: float) -> bool:
        with self._news:
            self._news.wait_for(lambda: text.encode() in self._data or self._ended, timeout)
            return text.encode() in self._data

    def so_far(self) -> str:
        with self._news:
            return self._data.decode(errors="replace")

    def finish(self, timeout: float) -> str:
        self._reader.join(timeout)
        with self._news:
            return self._data.decode(errors="replace")


class _Script:
    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            command,
            env={**os.environ, **env},
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self.pid = self._process.pid
        self.output = _Output(self._process.stdout.fileno())

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()

    def wait(self, timeout: float) -> int | None:
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def close(self) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()


class _Function:
    def __init__(self, function: Callable[..., None], args: Sequence[Any], env: Mapping[str, str]) -> None:
        server = multiprocessing.get_context("forkserver")
        server.set_forkserver_preload(PRELOAD)
        self._out, out = server.Pipe(duplex=False)
        stdin, self._in = server.Pipe(duplex=False)
        self._process = server.Process(target=_child, args=(function, tuple(args), dict(env), stdin, out))
        self._process.start()
        out.close()
        stdin.close()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self.output = _Output(self._out.fileno())

    def tell(self, line: str) -> None:
        os.write(self._in.fileno(), line.encode() + b"\n")

    def wait(self, timeout: float) -> int | None:
        self._process.join(timeout)
        return self._process.exitcode

    def close(self) -> None:
        self._in.close()
        self._out.close()
        self._process.close()


def _child(
    function: Callable[..., None], args: tuple[Any, ...], env: dict[str, str], stdin: Connection, out: Connection
) -> None:
    os.dup2(stdin.fileno(), 0)
    os.dup2(out.fileno(), 1)
    os.dup2(out.fileno(), 2)
    stdin.close()
    out.close()
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(file=2)
    os.environ.update(env)
    import torch

    torch.set_num_threads(1)
    function(*args)


class Job:
    """Processes that run at once. Use as a context manager, or `wait`: nothing outlives either."""

    def __init__(
        self,
        target: Target,
        n: int,
        args: Sequence[Any] = (),
        *,
        env: Mapping[str, str] | None = None,
    ) -> None:
        shared = {**_BASE, **_rendezvous(), **(env or {})}
        own = [
            {**shared, "RANK": str(r), "LOCAL_RANK": str(r), "WORLD_SIZE": str(n), "LOCAL_WORLD_SIZE": str(n)}
            for r in range(n)
        ]
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._processes: list[_Script | _Function]
        if callable(target):
            self._processes = [_Function(target, args, one) for one in own]
            return
        self._folder = tempfile.TemporaryDirectory()
        command = [sys.executable, str(_script(target, self._folder.name)), *map(str, args)]
        self._processes = [_Script(command, one) for one in own]

    def until(self, rank: int, text: str, timeout: float = TIMEOUT) -> None:
        """Wait until this rank has printed `text`; AssertionError with all it printed if it ends without."""
        output = self._processes[rank].output
        if not output.until(text, timeout):
            self.kill_all()
            raise AssertionError(f"rank {rank} never printed {text!r}:\n{output.finish(5)}")

    def hears(self, rank: int, text: str, timeout: float) -> bool:
        """Whether this rank prints `text` before it ends, and within `timeout` seconds."""
        return self._processes[rank].output.until(text, timeout)

    def said(self, rank: int) -> str:
        """What this rank has printed so far."""
        return self._processes[rank].output.so_far()

    def tell(self, rank: int, line: str = "") -> None:
        """Send a line to the rank's standard input."""
        self._processes[rank].tell(line)

    def ended(self, rank: int, timeout: float = TIMEOUT) -> int:
        """Wait for one rank alone: its exit code. The others run on."""
        code = self._processes[rank].wait(timeout)
        assert code is not None, f"rank {rank} still runs after {timeout} s"
        return code

    def pid(self, rank: int) -> int:
        return self._processes[rank].pid

    def kill(self, rank: int, number: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.pid(rank), number)

    def kill_all(self) -> None:
        """SIGKILL for every process and all their children."""
        for process in self._processes:
            _kill_tree(process.pid)

    def wait(self, timeout: float = TIMEOUT) -> list[Result]:
        """Every rank's result. AssertionError with all stacks if the job outlives `timeout` seconds."""
        deadline = time.monotonic() + timeout
        codes = [process.wait(max(0.0, deadline - time.monotonic())) for process in self._processes]
        late = [rank for rank, code in enumerate(codes) if code is None]
        for rank in late:  # faulthandler prints the stacks of all threads
            self.kill(rank, signal.SIGABRT)
        for rank in late:
            self._processes[rank].wait(2.0)
        if late:
            self.kill_all()
        results = []
        for process in self._processes:
            code = process.wait(5.0)
            results.append(Result(-signal.SIGKILL if code is None else code, process.output.finish(5.0)))
            process.close()
        if self._folder is not None:
            self._folder.cleanup()
        self._processes = []
        if late:
            raise AssertionError(f"ranks {late} still ran after {timeout} s\n{show(results)}")
        return results

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        if self._processes:
            self.kill_all()
            self.wait()


class TorchrunJob(Job):
    """One torchrun agent and its workers. `kill(rank)` ends a worker; the agent is process 0 for all else."""

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], folder: tempfile.TemporaryDirectory[str]
    ) -> None:
        self._folder = folder
        self._processes = [_Script(command, {**_BASE, **env})]

    def until(self, rank: int, text: str, timeout: float = TIMEOUT) -> None:
        """Wait until any worker has printed `text`: the agent mixes their output."""
        super().until(0, text, timeout)

    def kill(self, rank: int, number: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.worker(rank), number)

    def worker(self, rank: int) -> int:
        """The process id of the worker with this rank."""
        for child in psutil.Process(self.pid(0)).children(recursive=True):
            try:
                if child.environ().get("RANK") == str(rank):
                    return child.pid
            except psutil.Error:
                continue
        raise AssertionError(f"no worker of rank {rank} runs")

    def signal_agent(self, number: signal.Signals) -> None:
        """What a cluster does: the agent passes it on to its workers."""
        os.kill(self.pid(0), number)


def torchrun(
    target: str | Path,
    n: int,
    args: Sequence[Any] = (),
    *,
    env: Mapping[str, str] | None = None,
    max_restarts: int = 0,
    run_id: str | None = None,
) -> TorchrunJob:
    """Start `n` workers under a real torchrun agent on this machine."""
    folder = tempfile.TemporaryDirectory()
    command = [
        sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={n}", f"--max-restarts={max_restarts}",
        "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--local-addr=127.0.0.1",
        *([] if run_id is None else [f"--rdzv-id={run_id}"]),
        str(_script(target, folder.name)), *map(str, args),
    ]  # fmt: skip
    return TorchrunJob(command, env or {}, folder)


def run_ranks(
    target: Target,
    n: int,
    args: Sequence[Any] = (),
    *,
    env: Mapping[str, str] | None = None,
    timeout: float = TIMEOUT,
) -> list[Result]:
    """Run `target` on `n` ranks to the end."""
    return Job(target, n, args, env=env).wait(timeout)


def succeed(results: Sequence[Result]) -> list[str]:
    """The outputs, if every rank ended with 0; else AssertionError that shows them all."""
    assert all(result.code == 0 for result in results), show(results)
    return [result.out for result in results]


def show(results: Sequence[Result]) -> str:
    return "\n".join(f"--- rank {rank}: exit {result.code}\n{result.out}" for rank, result in enumerate(results))


def free_port() -> int:
    """A port that nobody listens on (now)."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# gloo picks its network interface by the host's name, which containers often cannot resolve.
_BASE = {
    "OMP_NUM_THREADS": "1",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "PYTHONFAULTHANDLER": "1",
    "PYTHONUNBUFFERED": "1",
    "PYTHONPATH": str(ROOT),
}


def _rendezvous() -> dict[str, str]:
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}


def _script(target: str | Path, folder: str) -> Path:
    """The path of a script, written first if `target` is source text."""
    if isinstance(target, Path):
        return target
    path = Path(folder) / "script.py"
    path.write_text(textwrap.dedent(target))
    return path


def _kill_tree(pid: int) -> None:
    try:
        tree = [psutil.Process(pid)]
        tree += tree[0].children(recursive=True)
    except psutil.NoSuchProcess:
        return
    for process in tree:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
