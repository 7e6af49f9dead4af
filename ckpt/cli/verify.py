"""``ckpt verify``: is everything on the store what was written?"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from ckpt.cli.screen import AsJson, StorageOptions, Url, open_url, print_json
from ckpt.history.catalog import find, read_history
from recovery.verify import verify


def command(
    url: Url,
    deep: Annotated[bool, typer.Option("--deep", help="Read every pack and rebuild every chunk.")] = False,
    step: Annotated[
        str | None, typer.Option("--step", help="Only this snapshot: a step, GENERATION/STEP, a pin, latest.")
    ] = None,
    as_json: AsJson = False,
    storage_option: StorageOptions = None,
) -> None:
    """Check documents, parts and pack lengths; with --deep every byte.

    Exit codes: 0 whole; 1 damage found; 2 the store cannot be read.
    """
    store = open_url(url, storage_option)
    only = None if step is None else find(read_history(store), step)
    findings = []
    for finding in verify(store, deep=deep, only=only):
        findings.append(finding)
        if not as_json:
            print(f"{finding.level}: {finding.text}", file=sys.stderr if finding.level == "note" else sys.stdout)
    errors = sum(finding.level == "error" for finding in findings)
    if as_json:
        print_json(
            {
                "whole": not errors,
                "findings": [
                    {
                        "level": f.level,
                        "key": f.key,
                        "step": f.step,
                        "rank": f.rank,
                        "leaf": f.leaf,
                        "text": f.text,
                    }
                    for f in findings
                ],
            }
        )
    elif errors:
        print(f"{errors} errors; restore falls back past the snapshots they concern")
    else:
        print("whole" if deep else "whole, as far as documents and lengths tell; --deep reads every byte")
    if errors:
        raise typer.Exit(1)
