"""The command ``ckpt``: one file per verb. Nothing here loads torch unless a verb must."""

from __future__ import annotations

import functools
import importlib
import io
import os
import sys
from collections.abc import Callable, Iterable, Sequence

import typer

from ckpt.errors import CheckpointError, StorageError

VERBS = {
    "list": "ckpt.cli.list_",
    "show": "ckpt.cli.show",
    "diff": "ckpt.cli.diff",
    "du": "ckpt.cli.du",
    "verify": "ckpt.cli.verify",
    "prune": "ckpt.cli.prune",
    "compact": "ckpt.cli.compact",
    "pin": "ckpt.cli.pin",
    "unpin": "ckpt.cli.unpin",
    "mirrors": "ckpt.cli.mirrors",
    "plan": "ckpt.cli.plan",
    "report": "ckpt.cli.report",
    "export": "ckpt.cli.export",
    "import": "ckpt.cli.import_",
}
"""Verb → the module whose `command` does it."""

INTERRUPTED = 130
BROKEN_PIPE = 141
"""Exit codes as a shell gives them to whom SIGINT or SIGPIPE ended."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns its exit code: 0 done, 1 damage found, 2 wrong usage, or a store that cannot be read."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if argv is None and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # an ASCII terminal shows what it can
    # Only the verb that is asked for is loaded: `list` needs a fifth of what `verify` does.
    asked = [arguments[0]] if arguments and arguments[0] in VERBS else VERBS
    try:
        _app(asked)(args=arguments, prog_name="ckpt")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except (CheckpointError, StorageError, ValueError) as error:
        from ckpt.cli.screen import warn  # what went wrong may name what a store says

        warn(str(error))
        return 2
    except KeyboardInterrupt:  # while loading
        return INTERRUPTED
    return 0


def _app(verbs: Iterable[str]) -> typer.Typer:
    app = typer.Typer(
        name="ckpt",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )

    @app.callback()
    def about() -> None:
        """Look after the checkpoints of a training run, on any fsspec store."""

    for verb in verbs:
        app.command(verb)(_ended(importlib.import_module(VERBS[verb]).command))
    return app


def _ended(command: Callable[..., None]) -> Callable[..., None]:
    """The verb, with codes of its own for being ended from outside: typer's would be 1, which means damage."""

    @functools.wraps(command)
    def verb(*args: object, **options: object) -> None:
        try:
            command(*args, **options)
            sys.stdout.flush()
        except KeyboardInterrupt:
            print("ckpt: interrupted; nothing is left half done, and running it again does the rest", file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            # Nobody reads any more (`ckpt show … | head`). Python would flush once more at exit, and complain.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(BROKEN_PIPE) from None

    return verb
