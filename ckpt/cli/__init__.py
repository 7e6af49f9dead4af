"""The command ``ckpt``: one file per verb. Nothing here loads torch unless a verb must."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

from ckpt.cli import list_, prune, show, verify
from ckpt.errors import CheckpointError, StorageError

app = typer.Typer(
    name="ckpt",
    help="Look after the checkpoints of a training run, on any fsspec store.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command("list")(list_.command)
app.command("show")(show.command)
app.command("verify")(verify.command)
app.command("prune")(prune.command)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns its exit code: 0 done, 1 damage found, 2 wrong usage, or a store that cannot be read."""
    try:
        app(args=None if argv is None else list(argv), prog_name="ckpt")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except (CheckpointError, StorageError, ValueError) as error:
        print(f"ckpt: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("ckpt: interrupted; what was done so far stays, and running it again goes on", file=sys.stderr)
        return 130
    return 0
