"""``ckpt pin``: give a snapshot a name, under which no prune takes it."""

from __future__ import annotations

from typing import Annotated

import typer

from ckpt.cli.progress import bar, documents
from ckpt.cli.screen import AsJson, KeyName, StorageOptions, Url, open_url, print_json
from ckpt.history.catalog import find, read_history
from ckpt.history.pins import pin

Name = Annotated[
    str, typer.Argument(metavar="NAME", help="Letters, digits, '.', '_' and '-'; not a number.", show_default=False)
]


def command(
    url: Url,
    name: Name,
    step: Annotated[
        str, typer.Argument(metavar="[STEP]", help="A step, GENERATION/STEP, another pin, or latest.")
    ] = "latest",
    move: Annotated[bool, typer.Option("--move", help="Take the name from the snapshot that has it.")] = False,
    as_json: AsJson = False,
    storage_option: StorageOptions = None,
    key: KeyName = None,
) -> None:
    """Keep a snapshot from every prune, under a name.

    The name stands for the snapshot wherever one is asked for, as in `restore("NAME")` and in `ckpt show URL NAME`.

    Exit codes: 0 pinned; 2 no such snapshot, the name is taken, a prune is just removing it, or the store failed.
    """
    store = open_url(url, storage_option, key)
    with bar("reading snapshots", quiet=as_json) as shown:
        history = read_history(shown.reads(store, documents))
    id_ = find(history, step)
    pin(store, history, name, id_, move=move)
    if as_json:
        print_json({"name": name, "snapshot": str(id_)})
    else:
        print(f"{id_.short} is pinned as {name}")
