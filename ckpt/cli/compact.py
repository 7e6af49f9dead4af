"""``ckpt compact``: rewrite packs that are mostly dead, and long chains. Plans, shows, does."""

from __future__ import annotations

from typing import Annotated

import typer

from ckpt.cli.progress import bar, parts_too
from ckpt.cli.prune import duration
from ckpt.cli.screen import (
    AsJson,
    KeyName,
    StorageOptions,
    Url,
    bytes_text,
    count,
    open_url,
    print_fates,
    print_json,
    printable,
    warn,
)
from ckpt.history.catalog import find, read_history
from ckpt.history.clock import SystemClock
from ckpt.history.copier import bring_over
from recovery.compact import Compacted, compact
from recovery.compaction import THRESHOLD, CompactPlan, plan_compact


def command(
    url: Url,
    step: Annotated[
        str | None,
        typer.Option("--step", metavar="STEP", help="Only this snapshot (a step, GENERATION/STEP, a pin, latest)."),
    ] = None,
    threshold: Annotated[
        float, typer.Option("--threshold", metavar="SHARE", help="Rewrite packs of which less than this is in use.")
    ] = THRESHOLD,
    grace: Annotated[
        str,
        typer.Option("--grace", metavar="TIME", help="After this, the claims of another compaction are a dead one's."),
    ] = "1h",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be rewritten.")] = False,
    as_json: AsJson = False,
    storage_option: StorageOptions = None,
    key: KeyName = None,
) -> None:
    """Rewrite packs that are mostly dead, and long chains of deltas.

    Snapshots get a new revision with the same content; it is what is read from then on. Nothing is removed: space
    comes free with the next prune (`ckpt prune URL --leftovers` does nothing else). Meanwhile, more space is used. Jobs
    may go on saving and restoring; what they may lean on is left alone. Killed half-way, running it again goes on.

    Exit codes: 0 done, or nothing to do; 1 a snapshot of the plan was passed over; 2 the store failed, or something on
    it cannot be read.
    """
    leave = duration("--grace", grace)
    store = open_url(url, storage_option, key)
    with bar("looking at what is in use", quiet=as_json) as shown:
        watched = shown.reads(store, parts_too)
        only = None if step is None else [find(read_history(watched), step)]
        plan = plan_compact(watched, threshold=threshold, only=only)
    if not as_json:
        _print_plan(plan, dry_run)
    done = Compacted()
    if not dry_run:
        with bar("rewriting", quiet=as_json) as shown:
            shown.expect(plan.moved + plan.keyframes)
            done = compact(plan, shown.writes(store), grace=leave)
    late = bring_over(store, SystemClock()) if done.snapshots else None
    if late is not None:
        warn(f"not yet on every tier: {late}")
    if as_json:
        print_json(_document(plan, done, dry_run))
    elif not dry_run and plan.rewrite:
        for text in done.skipped:
            print(printable(text))
        print(f"rewrote {count(len(done.snapshots), 'snapshot')}, wrote {bytes_text(done.written)}")
    if done.skipped:
        raise typer.Exit(1)


def _print_plan(plan: CompactPlan, dry_run: bool) -> None:
    rows = [(id_, "rewrite", "") for id_ in plan.rewrite] + [(id_, "leave", why) for id_, why in plan.left.items()]
    print_fates(rows)
    if not plan.rewrite:
        print("nothing to compact")
        return
    verb = "would rewrite" if dry_run else "rewriting"
    print(
        f"{verb} {count(len(plan.rewrite), 'snapshot')}: about {bytes_text(plan.moved + plan.keyframes)} to write, "
        f"{bytes_text(plan.freed)} come free with the next prune",
        flush=True,
    )


def _document(plan: CompactPlan, done: Compacted, dry_run: bool) -> dict[str, object]:
    return {
        "dry_run": dry_run,
        "threshold": plan.threshold,
        "rewrite": [str(id_) for id_ in plan.rewrite],
        "left": {str(id_): why for id_, why in plan.left.items()},
        "dying": sorted(plan.dying),
        "moved": plan.moved,
        "keyframes": plan.keyframes,
        "freed": plan.freed,
        "rewritten": [str(id_) for id_ in done.snapshots],
        "written": done.written,
        "skipped": done.skipped,
    }
