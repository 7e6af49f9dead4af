"""``ckpt du``: what the history takes up. Reads documents and listings, never a pack."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ckpt.cli.progress import bar, documents
from ckpt.cli.screen import AsJson, KeyName, StorageOptions, Url, bytes_text, count, open_url, print_json, print_table
from recovery.looking import History
from recovery.usage import Usage


def command(
    url: Url,
    step: Annotated[
        str | None,
        typer.Argument(
            help="Whose classes of leaves are shown: a step, GENERATION/STEP, a pin.",
            show_default="latest",
            metavar="STEP",
        ),
    ] = None,
    as_json: AsJson = False,
    storage_option: StorageOptions = None,
    key: KeyName = None,
) -> None:
    """Show what takes up how much.

    own: what this save put on the store and still needs. shared: what other snapshots need, too. freed: what removing
    this one alone would free; shared bytes come free with the last snapshot that needs them, so the lines do not add
    up to the store. Below, the leaves of one snapshot by class: their full size, and stored bytes that a restore reads.

    Exit codes: 0 shown; 2 no such snapshot, or the store cannot be read.
    """
    store = open_url(url, storage_option, key)
    with bar("reading snapshots", quiet=as_json) as shown:
        usage = History(shown.reads(store, documents)).du(step)
    if as_json:
        print_json(_document(usage))
        return
    if not usage.steps:
        print(f"no snapshots on {store.url}; {bytes_text(usage.packs + usage.documents)} of leftovers")
        return
    print_table(
        ["step", "gen", "full size", "own", "shared", "freed"],
        [
            [str(s.id.step), str(s.id.run.generation), *map(bytes_text, (s.size, s.own, s.shared, s.freed))]
            for s in usage.steps
        ],
        right=frozenset(range(6)),
    )
    print(
        f"\n{bytes_text(usage.packs)} in packs, {bytes_text(usage.documents)} in documents, for "
        f"{count(len(usage.steps), 'snapshot')}"
        + (f"; no snapshot names {bytes_text(usage.unnamed)} of it" if usage.unnamed else "")
    )
    if usage.of is not None and usage.classes:
        print(f"\nstep {usage.of.step}, generation {usage.of.run.generation}:")
        rows = [[c.cls, str(c.leaves), bytes_text(c.size), bytes_text(c.to_read)] for c in usage.classes]
        print_table(["class", "leaves", "full size", "to read"], rows, right=frozenset({1, 2, 3}))


def _document(usage: Usage) -> dict[str, Any]:
    return {
        "packs": usage.packs,
        "documents": usage.documents,
        "unnamed": usage.unnamed,
        "steps": [
            {
                "id": str(s.id),
                "step": s.id.step,
                "generation": s.id.run.generation,
                "size": s.size,
                "own": s.own,
                "shared": s.shared,
                "documents": s.documents,
                "freed": s.freed,
            }
            for s in usage.steps
        ],
        "of": None if usage.of is None else str(usage.of),
        "classes": [{"class": c.cls, "leaves": c.leaves, "size": c.size, "to_read": c.to_read} for c in usage.classes],
    }
