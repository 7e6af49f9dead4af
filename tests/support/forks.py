"""Python scripts as real processes that start in milliseconds: forked from a server that has torch loaded already."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import traceback
import warnings
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from tests.support.procs import PRELOAD

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(PRELOAD)


def start(script: Path, *arguments: str, log: Path | None = None) -> ForkServerProcess:
    """Run a script in a process of its own; kill it, or join it. Its output goes to `log`, if given."""
    process = _context.Process(target=_run, args=(str(script), [str(a) for a in arguments], log and str(log)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking is what this is for
        process.start()
    return process


def _run(script: str, arguments: list[str], log: str | None) -> None:
    if log is not None:
        target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(target, 1)
        os.dup2(target, 2)
    sys.argv = [script, *arguments]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit:
        raise
    except BaseException:
        traceback.print_exc()
        sys.exit(1)
