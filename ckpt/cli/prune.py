"""``ckpt prune``: remove old snapshots by a policy, or by name. Plans, shows, does."""

from __future__ import annotations

from typing import Annotated

import typer

from ckpt.cli.screen import AsJson, StorageOptions, Url, bytes_text, open_url, print_json, print_table
from ckpt.history.catalog import find, read_history
from ckpt.history.clock import SystemClock
from ckpt.history.retention import Keep, execute, plan_prune
from ckpt.options import seconds


def command(
    url: Url,
    keep_last: Annotated[
        int | None, typer.Option("--keep-last", min=1, help="Keep the newest N of the live line.")
    ] = None,
    keep_every: Annotated[int | None, typer.Option("--keep-every", min=1, help="Keep steps that N divides.")] = None,
    remove: Annotated[
        list[str] | None, typer.Option("--remove", metavar="STEP", help="Remove this snapshot; repeatable.")
    ] = None,
    grace: Annotated[str, typer.Option("--grace", help="Leave leftovers of crashed saves that are younger.")] = "1h",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would go.")] = False,
    as_json: AsJson = False,
    storage_option: StorageOptions = None,
) -> None:
    """Remove snapshots that the policy does not keep, and what only they needed.

    Pinned snapshots, what a job may still lean on, and the newest one always stay. Says first what goes, and how many
    bytes come free. Killed half-way, running it again finishes it.

    Exit codes: 0 done; 2 nothing was selected, or the store cannot be read (then nothing was removed).
    """
    if keep_last is None and keep_every is None and not remove:
        raise ValueError("say what to keep (--keep-last, --keep-every) or what to remove (--remove STEP)")
    store = open_url(url, storage_option)
    named = [find(read_history(store), name) for name in remove or ()]
    keep = Keep(last=keep_last, every=keep_every)
    plan = plan_prune(store, keep, grace=seconds(grace), remove=named)
    if not as_json:
        rows = [[str(id_.step), str(id_.run.generation), "removed"] for id_ in plan.snapshots]
        rows += [
            [str(id_.step), str(id_.run.generation), f"kept: {why}"] for id_, why in sorted(plan.protected.items())
        ]
        if rows:
            print_table(
                ["step", "gen", ""], sorted(rows, key=lambda row: (int(row[1]), int(row[0]))), right=frozenset({0, 1})
            )
        for note in plan.notes:
            print(note)
        print(
            f"{'would remove' if dry_run else 'removing'} {len(plan.snapshots)} snapshots, {len(plan.keys)} objects, "
            f"{bytes_text(plan.freed)}"
        )
    removed: list[str] = []
    if not dry_run:
        removed = list(execute(plan, store, clock=SystemClock()).keys)
        if not as_json:
            print(f"removed {len(removed)} objects")
    if as_json:
        print_json(
            {
                "dry_run": dry_run,
                "snapshots": [str(id_) for id_ in plan.snapshots],
                "protected": {str(id_): why for id_, why in plan.protected.items()},
                "keys": list(plan.keys),
                "freed": plan.freed,
                "removed": removed,
                "notes": list(plan.notes),
            }
        )
