"""How verbs read their arguments and print: the same options, numbers and tables everywhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import msgspec
import typer

from storage_backends import open_store
from storage_backends.base import Store

Url = Annotated[str, typer.Argument(help="A path or any fsspec URL, as given to the Checkpointer.", show_default=False)]
StorageOptions = Annotated[
    list[str] | None,
    typer.Option("--storage-option", metavar="KEY=VALUE", help="Passed to the store's fsspec file system; repeatable."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]


def open_url(url: str, options: Sequence[str] | None) -> Store:
    """The store a user named.

    Raises:
        ValueError: an option is not KEY=VALUE.
        StorageError: no such store.
    """
    parsed: dict[str, Any] = {}
    for option in options or ():
        name, equals, text = option.partition("=")
        if not equals or not name:
            raise ValueError(f"--storage-option {option!r}: expected KEY=VALUE")
        try:
            parsed[name] = msgspec.json.decode(text)
        except msgspec.DecodeError:
            parsed[name] = text
    return open_store(url, **parsed)


def print_json(document: Any) -> None:
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n")


def print_table(header: Sequence[str], rows: Iterable[Sequence[str]], *, right: frozenset[int] = frozenset()) -> None:
    """A rich table on a terminal; aligned plain columns when piped. `right`: numbers of right-aligned columns."""
    cells = [list(row) for row in rows]
    if sys.stdout.isatty():
        from rich import box  # only where there is a terminal to show it on
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for i, name in enumerate(header):
            table.add_column(name, justify="right" if i in right else "left")
        for row in cells:
            table.add_row(*map(Text, row))
        Console().print(table)
        return
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    for row in [list(header), *cells]:
        line = (
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        print("  ".join(line).rstrip())


def bytes_text(n: float) -> str:
    """1536000 → "1.5 MB" (decimal units, as disks are sold and stores are billed)."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if n < 999.5:
            return f"{n:.0f} {unit}" if unit == "B" or n >= 99.5 else f"{n:.1f} {unit}"
        n /= 1000
    return f"{n:.1f} PB"


def age_text(when: float | None, *, now: float | None = None) -> str:
    """POSIX seconds → "3 h" ago; "?" if unknown."""
    if when is None:
        return "?"
    past = (time.time() if now is None else now) - when
    for limit, size, unit in ((120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h")):
        if abs(past) < limit:
            return f"{past / size:.0f} {unit}"
    return f"{past / 86400:.0f} d"


def warn(text: str) -> None:
    print(f"ckpt: {text}", file=sys.stderr)
