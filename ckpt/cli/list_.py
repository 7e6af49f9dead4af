"""``ckpt list``: which snapshots there are. Reads snapshots, runs and pins; never a part or a pack."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from ckpt.cli.screen import AsJson, StorageOptions, Url, age_text, bytes_text, open_url, print_json, print_table, warn
from ckpt.format.codec import KINDS
from ckpt.format.manifest import Snapshot
from ckpt.history.catalog import History, read_history


def command(
    url: Url,
    as_json: AsJson = False,
    problems: Annotated[bool, typer.Option("--problems", help="Show what could not be read, and leftovers.")] = False,
    storage_option: StorageOptions = None,
) -> None:
    """List the snapshots of a store, oldest first.

    Exit codes: 0 listed (also when there are none); 2 the store cannot be read.
    """
    store = open_url(url, storage_option)
    history = read_history(store)
    if as_json:
        print_json(_document(history))
        return
    pins: dict[Any, list[str]] = {}
    for name, pinned in history.pins.items():
        pins.setdefault(pinned, []).append(name)
    rows = []
    for id_, snapshot in sorted(history.snapshots.items()):
        notes = [f"pin {name}" for name in sorted(pins.get(id_, []))]
        if id_ in history.abandoned:
            notes.append("abandoned")
        rows.append(
            [
                str(id_.step),
                str(id_.run.generation),
                age_text(snapshot.time),
                bytes_text(snapshot.totals.stored),
                bytes_text(snapshot.totals.size),
                _kinds(snapshot),
                _metrics(snapshot.metrics),
                ", ".join(notes),
            ]
        )
    if rows:
        print_table(
            ["step", "gen", "age", "stored", "full size", "kinds", "metrics", ""],
            rows,
            right=frozenset({0, 1, 2, 3, 4}),
        )
    else:
        print(f"no snapshots on {store.url}")
    if history.problems and problems:
        for problem in history.problems:
            warn(f"{problem.key}: {problem.text}")
    elif history.problems:
        warn(f"{len(history.problems)} objects skipped; 'ckpt list --problems' names them, 'ckpt verify' checks all")


def _kinds(snapshot: Snapshot) -> str:
    total = snapshot.totals.stored
    if not total:
        return "-"
    shares = sorted(snapshot.totals.by_kind.items(), key=lambda item: -item[1])
    return " ".join(f"{kind_name(k)} {100 * n / total:.0f}%" for k, n in shares if n * 200 >= total)


def kind_name(number: str) -> str:
    """A codec kind's name; unknown numbers stay numbers (a newer version wrote them)."""
    return KINDS.get(int(number), number) if number.isdigit() else number


def _metrics(metrics: Mapping[str, Any] | None) -> str:
    return " ".join(
        f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in sorted((metrics or {}).items())
    )


def _document(history: History) -> dict[str, Any]:
    return {
        "snapshots": [
            {
                "id": str(id_),
                "step": id_.step,
                "generation": id_.run.generation,
                "run": str(id_.run),
                "time": snapshot.time,
                "world_size": snapshot.world_size,
                "stored": snapshot.totals.stored,
                "size": snapshot.totals.size,
                "by_kind": {kind_name(k): n for k, n in snapshot.totals.by_kind.items()},
                "metrics": snapshot.metrics or {},
                "pins": sorted(name for name, pinned in history.pins.items() if pinned == id_),
                "abandoned": id_ in history.abandoned,
            }
            for id_, snapshot in sorted(history.snapshots.items())
        ],
        "newest": None if history.newest is None else str(history.newest),
        "problems": [{"key": problem.key, "text": problem.text} for problem in history.problems],
    }
