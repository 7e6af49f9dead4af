"""How verbs read their arguments and print: the same options, numbers and tables everywhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

import msgspec
import typer

from ckpt.errors import NoSnapshot
from ckpt.format.names import SnapshotId, SnapshotName
from ckpt.history.catalog import History, find
from ckpt.history.keyed import check_key, with_key
from storage_backends import open_store
from storage_backends.base import Store

Url = Annotated[
    str,
    typer.Argument(metavar="URL", help="A path or any fsspec URL, as given to the Checkpointer.", show_default=False),
]
StorageOptions = Annotated[
    list[str] | None,
    typer.Option("--storage-option", metavar="KEY=VALUE", help="Passed to the store's fsspec file system; repeatable."),
]
KeyName = Annotated[
    str | None,
    typer.Option(
        "--key", metavar="FILE|env:NAME", help="Where the key of an encrypted store is; never the key itself."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]

FOLDED = 16
"""Characters that a column keeps at least when it is folded."""


def open_url(url: str, options: Sequence[str] | None, key: str | None = None, *, locked: bool = False) -> Store:
    """The store a user named. Values are JSON where they parse as JSON, text otherwise.

    Args:
        locked: an encrypted store may be opened without its key.

    Raises:
        ValueError: an option is not KEY=VALUE, or there is no such key.
        WrongKey: the store is behind another key, or none.
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
    store = with_key(open_store(url, **parsed), key)
    if key is None and not locked:
        check_key(store, None)
    return store


def find_any(history: History, name: str) -> SnapshotId:
    """The snapshot a user named, or one of that name that cannot be restored: whoever asks why, or wants it gone, must
    be able to name it.

    Raises:
        NoSnapshot: there is none, or more than one; the message lists what there is.
    """
    try:
        return find(history, name)
    except NoSnapshot:
        lost = {key.id for problem in history.problems if (key := SnapshotName.parse(problem.key)) is not None}
        lost = {id_ for id_ in lost - history.snapshots.keys() if name in (str(id_), id_.short, str(id_.step))}
        if len(lost) != 1:
            raise
        return lost.pop()


def pins_of(history: History, id_: SnapshotId) -> list[str]:
    """The names that pin a snapshot."""
    return sorted(name for name, pinned in history.pins.items() if pinned == id_)


def print_json(document: Any) -> None:
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n")


def print_fates(rows: Iterable[tuple[SnapshotId, str, str]]) -> None:
    """(snapshot, what becomes of it, why) of a plan, in order; no table where nothing is in it."""
    if found := sorted(rows):
        print_table(
            ["step", "gen", "what", "why"],
            [[str(id_.step), str(id_.run.generation), what, why] for id_, what, why in found],
            right=frozenset({0, 1}),
            fold=frozenset({3}),
        )


def print_table(
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    right: frozenset[int] = frozenset(),
    fold: frozenset[int] = frozenset(),
) -> None:
    """A rich table on a terminal; aligned plain columns when piped.

    Args:
        header: names of the columns. Columns at the end that are empty in every row are left out.
        rows: their cells.
        right: numbers of the right-aligned columns.
        fold: numbers of the columns that may go on in the next line where a terminal is narrow. The others never do.
    """
    cells = [[printable(cell) for cell in row] for row in rows]
    columns = len(header)
    while columns and not any(row[columns - 1] for row in cells):
        columns -= 1
    lines = [list(header[:columns]), *(row[:columns] for row in cells)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    if sys.stdout.isatty():
        _print_rich(lines, widths, right, fold)
        return
    for row in lines:
        line = (
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        print("  ".join(line).rstrip())


def _print_rich(lines: list[list[str]], widths: list[int], right: frozenset[int], fold: frozenset[int]) -> None:
    from rich import box  # only where there is a terminal to show it on
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for i, name in enumerate(lines[0]):
        justify: Literal["left", "right"] = "right" if i in right else "left"
        table.add_column(name, justify=justify, no_wrap=i not in fold, overflow="fold")
    for row in lines[1:]:
        table.add_row(*map(Text, row))
    console = Console()
    # Where even folding is not enough, rich would cut numbers; a line that the terminal breaks loses nothing.
    least = sum(min(width, FOLDED) if i in fold else width for i, width in enumerate(widths)) + 3 * len(widths) + 1
    console.width = max(console.width, least)
    console.print(table)


def printable(text: str) -> str:
    """Text of a store as one line that does nothing to a terminal: line ends and escapes are spelled out."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def cut(text: str, limit: int) -> str:
    """At most `limit` characters, the last an ellipsis where something was cut off."""
    return text if len(text) <= limit else text[: limit - 1].rstrip() + "…"


def count(n: int, one: str, many: str = "") -> str:
    """(1, "object") → "1 object"; (3, "leaf", "leaves") → "3 leaves"."""
    return f"{n} {one}" if n == 1 else f"{n} {many or one + 's'}"


def metrics_text(metrics: dict[str, Any] | None) -> str:
    return " ".join(
        f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in sorted((metrics or {}).items())
    )


def bytes_text(n: float) -> str:
    """1536000 → "1.5 MB" (decimal units, as disks are sold and stores are billed)."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if n < 999.5:
            return f"{n:.0f} {unit}" if unit == "B" or n >= 99.5 else f"{n:.1f} {unit}"
        n /= 1000
    return f"{n:.1f} PB"


def age_text(when: float | None, *, now: float | None = None) -> str:
    """POSIX seconds → "3 h" ago; "?" if unknown. Negative where that clock was ahead of ours."""
    if when is None:
        return "?"
    past = (time.time() if now is None else now) - when
    for limit, size, unit in ((120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h")):
        if abs(past) < limit:
            return f"{past / size:.0f} {unit}"
    return f"{past / 86400:.0f} d"


def warn(text: str) -> None:
    print(f"ckpt: {printable(text)}", file=sys.stderr)
