"""``ckpt prune``: remove old snapshots by a policy, or by name. Plans, shows, does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from ckpt.cli.progress import bar, documents
from ckpt.cli.screen import (
    AsJson,
    KeyName,
    StorageOptions,
    Url,
    bytes_text,
    count,
    find_any,
    open_url,
    print_fates,
    print_json,
    printable,
)
from ckpt.cli.thinning import thin
from ckpt.format.names import SnapshotId
from ckpt.history.catalog import read_history
from ckpt.history.clock import SystemClock
from ckpt.history.keep import Best, best_of
from ckpt.history.retention import Keep, Pruned, PrunePlan, execute, plan_prune
from ckpt.options import seconds
from storage_backends.base import Store


def command(
    url: Url,
    keep_last: Annotated[
        int | None, typer.Option("--keep-last", metavar="N", min=1, help="Keep the newest N of the live line.")
    ] = None,
    keep_every: Annotated[
        int | None, typer.Option("--keep-every", metavar="N", min=1, help="Keep steps of the live line that N divides.")
    ] = None,
    keep_best: Annotated[
        str | None,
        typer.Option("--keep-best", metavar="METRIC:min:N", help="Keep the N with the smallest (max: largest) metric."),
    ] = None,
    keep_within: Annotated[
        str | None,
        typer.Option("--keep-within", metavar="TIME", help="Keep what was saved so long (2d, 12h) before the newest."),
    ] = None,
    keep_hourly: Annotated[
        int | None,
        typer.Option("--keep-hourly", metavar="N", min=1, help="Keep the newest of each of the last N hours."),
    ] = None,
    keep_daily: Annotated[
        int | None, typer.Option("--keep-daily", metavar="N", min=1, help="Keep the newest of each of the last N days.")
    ] = None,
    moments_last: Annotated[
        int | None,
        typer.Option(
            "--moments-last",
            metavar="N",
            min=1,
            help="Of what stays, only the newest N keep their optimizers; older ones become weights only.",
        ),
    ] = None,
    remove: Annotated[
        list[str] | None,
        typer.Option(
            "--remove", metavar="STEP", help="Remove this snapshot (a step, GENERATION/STEP, latest); repeatable."
        ),
    ] = None,
    leftovers: Annotated[
        bool,
        typer.Option("--leftovers", help="Only what no snapshot needs: of crashed saves, and what compact replaced."),
    ] = False,
    fast: Annotated[
        bool,
        typer.Option("--fast", help="Only take it off the fast one of two tiers; it stays on the durable one."),
    ] = False,
    grace: Annotated[
        str,
        typer.Option(
            "--grace",
            metavar="TIME",
            help="Leave abandoned snapshots and leftovers of crashed saves that are younger. 0 takes all: only while "
            "no job writes here.",
        ),
    ] = "1h",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would go, object by object.")] = False,
    as_json: AsJson = False,
    storage_option: StorageOptions = None,
    key: KeyName = None,
) -> None:
    """Remove old snapshots, and what only they needed.

    What any --keep policy names stays, everything else goes; hours and days are told by the times that snapshots
    recorded (UTC), and hours and days without one are not counted. Pinned snapshots, the newest one, and what a job
    that goes on may still lean on always stay, whatever is asked, and keep their optimizers. Says first what goes, and
    how many bytes come free. Killed half-way, running it again finishes it. Of two tiers both are pruned, but for what
    the durable one lacks yet, and the newest that it has.

    Exit codes: 0 done; 1 a snapshot named by --remove stays; 2 nothing was selected, or the store failed.
    """
    keep = Keep(
        last=keep_last,
        every=keep_every,
        best=None if keep_best is None else _best(keep_best),
        within=None if keep_within is None else duration("--keep-within", keep_within),
        hourly=keep_hourly,
        daily=keep_daily,
        moments_last=moments_last,
    )
    if leftovers and (remove or keep != Keep()):
        raise ValueError("--leftovers removes no snapshot; leave out the --keep policies, --moments-last and --remove")
    if keep == Keep() and not remove and not leftovers:
        raise ValueError("say what to keep (--keep-last, --keep-every, …) or what to remove (--remove STEP)")
    leave = duration("--grace", grace)
    store = open_url(url, storage_option, key)
    if fast:
        if remove or keep.everything or keep.moments_last is not None:
            raise ValueError("--fast goes by the --keep policies; leave out --remove, --leftovers and --moments-last")
        thin(store, keep, dry_run, as_json)
        return
    with bar("reading snapshots", quiet=as_json) as shown:
        watched = shown.reads(store, documents)
        asked = _asked(watched, remove or ())
        plan = plan_prune(watched, keep, grace=leave, remove=asked)
    if not as_json:
        _print_plan(plan, dry_run)
    done = Pruned()
    if not dry_run:
        with bar("removing", quiet=as_json) as shown:
            shown.expect(plan.freed)
            done = execute(plan, shown.writes(store), clock=SystemClock())
    if as_json:
        print_json(_document(plan, done, dry_run))
    elif not dry_run:
        _print_done(plan, done)
    if any(id_ in plan.protected or (not dry_run and id_ not in done.snapshots) for id_ in asked):
        raise typer.Exit(1)


def duration(option: str, text: str) -> float:
    """The seconds that an option's value says; a plain number is seconds. Raises ValueError."""
    try:
        return seconds(float(text) if text.replace(".", "", 1).isdecimal() else text)
    except ValueError as error:
        raise ValueError(f"{option} {error}") from None


def _best(text: str) -> Best:
    try:
        return best_of(text)
    except ValueError as error:
        raise ValueError(f"--keep-best {error}") from None


def _asked(store: Store, names: Sequence[str]) -> list[SnapshotId]:
    """The snapshots that --remove names."""
    if not names:
        return []
    history = read_history(store)
    return [find_any(history, name) for name in names]


def _print_plan(plan: PrunePlan, dry_run: bool) -> None:
    rows = [(id_, "remove", "") for id_ in plan.snapshots]
    rows += [(id_, "remove", "leftovers of a step that was never committed") for id_ in plan.leftovers]
    rows += [(id_, plan.verb(id_), why) for id_, why in plan.protected.items()]
    print_fates(rows)
    for note in plan.notes:
        print(printable(note))
    if not plan.keys:
        print("nothing to remove")
        return
    verb = "would remove" if dry_run else "removing"
    stripped = f", and the optimizers of {len(plan.weights_only)} more" if plan.weights_only else ""
    print(
        f"{verb} {count(len(plan.snapshots), 'snapshot')}{stripped}, {count(len(plan.keys), 'object')}, "
        f"{bytes_text(plan.freed)}",
        flush=True,
    )
    if dry_run:
        for key in plan.keys:
            print(f"  {key}")


def _print_done(plan: PrunePlan, done: Pruned) -> None:
    if plan.keys:
        print(f"removed {count(len(done.keys), 'object')}, {bytes_text(done.freed)}")
    for text in done.stripped.skipped:
        print(printable(f"{text}: it keeps its optimizers"))
    if done.spared:
        print(f"{count(len(done.spared), 'object')} spared: claimed, pinned or committed meanwhile, or too young")


def _document(plan: PrunePlan, done: Pruned, dry_run: bool) -> dict[str, object]:
    return {
        "dry_run": dry_run,
        "snapshots": [str(id_) for id_ in plan.snapshots],
        "leftovers": [str(id_) for id_ in plan.leftovers],
        "weights_only": [str(id_) for id_ in plan.weights_only],
        "protected": {str(id_): why for id_, why in plan.protected.items()},
        "keys": plan.keys,
        "freed": plan.freed,
        "written": plan.written if dry_run else done.stripped.written,
        "removed": done.keys,
        "spared": done.spared,
        "unfinished": plan.unfinished,
        "notes": plan.notes,
    }
