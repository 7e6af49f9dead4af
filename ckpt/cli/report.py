"""``ckpt report``: a history as one page to look at. Reads documents and some parts, never a pack."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from ckpt.cli.list_ import kind_name
from ckpt.cli.page.whole import MARK, page
from ckpt.cli.progress import bar, documents
from ckpt.cli.screen import AsJson, KeyName, StorageOptions, Url, bytes_text, count, open_url, print_json
from recovery.chronicle import Chronicle, chronicle
from recovery.journaled import covered
from recovery.layers import Layers, choose, layers
from recovery.looking import History


def command(
    url: Url,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="The page to write; an older report is replaced.")
    ] = Path("report.html"),
    as_json: AsJson = False,
    storage_option: StorageOptions = None,
    key: KeyName = None,
) -> None:
    """Write a page that shows the history.

    One file that needs no network: a timeline of starts and steps, bytes and time of each save, which layers change and
    how much, metrics, chains of deltas, recoveries. Of a long history, snapshots are chosen evenly and some hundred
    parts are read at most. --json prints what the page shows, too.

    Exit codes: 0 written; 2 FILE is something else, or cannot be written, or the store cannot be read.
    """
    _check(output)
    store = open_url(url, storage_option, key)
    with bar("reading snapshots", quiet=as_json) as shown:
        seen = History(shown.reads(store, documents)).look()
    told = chronicle(seen, covered(store, seen))
    sample = choose([seen.snapshots[save.id] for save in told.saves])
    with bar("looking into snapshots", quiet=as_json) as shown:
        shown.expect(sample.nbytes)
        changes = layers(store, sample, each=shown.done)
    size = _write(output, page(told, changes, now=time.time()))
    if as_json:
        print_json({"file": str(output), "size": size, **_document(told, changes)})
        return
    print(
        f"{count(len(told.saves), 'snapshot')}, {count(sample.parts, 'part')} ({bytes_text(sample.nbytes)}) read: "
        f"{output}, {bytes_text(size)}"
    )


def _check(output: Path) -> None:
    """Raises ValueError if there is something at `output` that is no report."""
    if not output.exists():
        return
    with output.open("rb") if output.is_file() else open(os.devnull, "rb") as file:
        begins = file.read(len(MARK))
    if begins != MARK.encode():
        raise ValueError(f"{output} is there, and is not a report; nothing else is overwritten: give another name")


def _write(output: Path, text: str) -> int:
    """Whole or not at all. Raises ValueError."""
    data = text.encode()
    partial = output.with_name(f".{output.name}.partial-{os.getpid()}")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(data)
        partial.replace(output)
    except OSError as error:
        raise ValueError(f"{output} cannot be written: {error}") from error
    finally:
        partial.unlink(missing_ok=True)
    return len(data)


def _document(told: Chronicle, changes: Layers) -> dict[str, Any]:
    return {
        "newest": None if told.newest is None else str(told.newest),
        "held": told.held,
        "stored": told.stored,
        "full": told.full,
        "saves": [
            {
                "id": str(save.id),
                "stored": save.listed.stored,
                "by_kind": {kind_name(kind): n for kind, n in save.listed.by_kind.items()},
                "blocked": save.blocked,
                "durable": save.durable,
                "metrics": save.listed.metrics,
                "pins": save.listed.pins,
                "abandoned": save.listed.abandoned,
            }
            for save in told.saves
        ],
        "starts": [
            {
                "run": str(line.run),
                "started": line.started,
                "world_size": line.world_size,
                "resumed_from": None if line.resumed_from is None else str(line.resumed_from),
                "reached": line.reached,
                "live": line.live,
            }
            for line in told.lines
        ],
        "recoveries": [
            {
                "run": str(r.run),
                "at": r.at,
                "step": r.step,
                "journaled": r.journaled,
                "lost": r.lost,
                "usual": r.usual,
                "ranks_before": r.ranks_before,
                "ranks": r.ranks,
            }
            for r in told.recoveries
        ],
        "looked_into": [str(snapshot.id) for snapshot, _ in changes.sample.reads],
        "parts": changes.sample.parts,
        "groups": [
            {"name": group.name, "leaves": group.leaves, "size": group.nbytes, "shares": group.shares}
            for group in changes.groups
        ],
        "chains": [{"class": depth.cls, "mean": depth.mean, "most": depth.most} for depth in changes.depths],
    }
