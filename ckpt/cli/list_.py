"""``ckpt list``: which snapshots there are. Reads snapshots, runs and pins; never a part or a pack."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ckpt.cli.progress import bar, documents
from ckpt.cli.screen import (
    AsJson,
    KeyName,
    StorageOptions,
    Url,
    age_text,
    bytes_text,
    count,
    cut,
    metrics_text,
    open_url,
    print_json,
    print_table,
    warn,
)
from ckpt.format.kinds import KINDS
from ckpt.history.catalog import History as Look
from recovery.journaled import covered
from recovery.looking import History, Listed, listed
from recovery.quantities import seconds_text
from storage_backends.copies import Copied

METRICS_WIDTH = 80
"""Characters of metrics in a line; --json has all of them."""


def command(
    url: Url,
    as_json: AsJson = False,
    problems: Annotated[bool, typer.Option("--problems", help="Name what could not be read, and debris.")] = False,
    storage_option: StorageOptions = None,
    key: KeyName = None,
) -> None:
    """List the snapshots, oldest first.

    gen: which start of the job saved it. stored: bytes that this save put on the store, in which kinds of encoding.
    full size: bytes of the whole state. abandoned: the job went back and took another way; it does not lead to the
    newest snapshot. weights only: its optimizers were taken out (ckpt prune --moments-last). a save every …: what an
    adaptive cadence aims at. on: of a store of several places, which of them hold it. journal to step N: every step
    from the snapshot to N can be replayed from records on the store (ckpt diff, ckpt export, ckpt.load). Where two have
    the same step, call one by GENERATION/STEP.

    Exit codes: 0 listed (also when there are none); 2 the store cannot be read.
    """
    store = open_url(url, storage_option, key)
    with bar("reading snapshots", quiet=as_json) as shown:
        history = History(shown.reads(store, documents)).look()
        journal = covered(store, history)
    places = {name: place.url for name, place in store.places.items()} if isinstance(store, Copied) else {}
    if as_json:
        more: dict[str, Any] = {"journal": {str(id_): step for id_, step in sorted(journal.items())}}
        print_json(_document(history) | more | ({"places": places} if places else {}))
        return
    rows = []
    for snapshot in (listed(history, id_) for id_ in sorted(history.snapshots)):
        notes = [f"pin {name}" for name in snapshot.pins]
        if snapshot.abandoned:
            notes.append("abandoned")
        if snapshot.without:
            notes.append("weights only")
        if snapshot.cadence is not None:
            notes.append(f"a save every {seconds_text(snapshot.cadence)}")
        if snapshot.id in journal:
            notes.append(f"journal to step {journal[snapshot.id]}")
        rows.append(
            [
                str(snapshot.step),
                str(snapshot.generation),
                age_text(snapshot.time),
                bytes_text(snapshot.stored),
                bytes_text(snapshot.size),
                _kinds(snapshot),
                cut(metrics_text(snapshot.metrics), METRICS_WIDTH),
                ", ".join(notes),
            ]
        )
        if places:
            rows[-1].insert(5, ", ".join(snapshot.places))
    if rows:
        header = ["step", "gen", "age", "stored", "full size", *(["on"] if places else []), "kinds", "metrics", "notes"]
        print_table(
            header,
            rows,
            right=frozenset({0, 1, 2, 3, 4}),
            fold=frozenset(range(header.index("kinds"), len(header))),
        )
        if places:
            print(", ".join(f"{name} = {url}" for name, url in places.items()))
    else:
        print(f"no snapshots on {store.url}")
    if history.problems and problems:
        for problem in history.problems:
            warn(problem.text)
    elif history.problems:
        skipped = count(len(history.problems), "object")
        warn(f"{skipped} skipped; 'ckpt list --problems' says which and why, 'ckpt verify' checks everything")


def _kinds(snapshot: Listed) -> str:
    total = snapshot.stored
    if not total:
        return "-"
    shares = sorted(snapshot.by_kind.items(), key=lambda item: -item[1])
    return " ".join(f"{kind_name(k)} {100 * n / total:.0f}%" for k, n in shares if n * 200 >= total)


def kind_name(number: str) -> str:
    """A codec kind's name; unknown numbers stay numbers (a newer version wrote them)."""
    return KINDS.get(int(number), number) if number.isdigit() else number


def _document(history: Look) -> dict[str, Any]:
    return {
        "snapshots": [
            {
                "id": str(snapshot.id),
                "step": snapshot.step,
                "generation": snapshot.generation,
                "run": str(snapshot.id.run),
                "time": snapshot.time,
                "world_size": snapshot.world_size,
                "stored": snapshot.stored,
                "size": snapshot.size,
                "by_kind": {kind_name(k): n for k, n in snapshot.by_kind.items()},
                "metrics": snapshot.metrics,
                "cadence": snapshot.cadence,
                "pins": snapshot.pins,
                "abandoned": snapshot.abandoned,
                "without": snapshot.without,
                **({"places": snapshot.places} if snapshot.places else {}),
            }
            for snapshot in (listed(history, id_) for id_ in sorted(history.snapshots))
        ],
        "newest": None if history.newest is None else str(history.newest),
        "problems": [{"key": problem.key, "text": problem.text} for problem in history.problems],
    }
