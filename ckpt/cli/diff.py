"""``ckpt diff``: what changed between two snapshots. Reads their parts, and of the packs only chunks that differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any

import typer

from ckpt.cli.progress import bar, documents
from ckpt.cli.screen import (
    AsJson,
    KeyName,
    StorageOptions,
    Url,
    bytes_text,
    count,
    cut,
    open_url,
    print_json,
    print_table,
    printable,
)
from ckpt.cli.spelling import jsonable, value_text
from ckpt.history.catalog import find, read_history
from recovery.compare import Difference, Form, LeafChange, Verdict, compare
from recovery.compare_values import ValueChange
from recovery.looking import with_journaled
from recovery.paths import natural

VALUE_WIDTH = 60
"""Characters of each of two values; --json has all of them."""


class Sort(StrEnum):
    NAME = "name"
    SHARE = "share"
    NORM = "norm"
    SIZE = "size"


def command(
    url: Url,
    a: Annotated[str, typer.Argument(metavar="A", help="A step, GENERATION/STEP, a pin, or latest.")],
    b: Annotated[str, typer.Argument(metavar="B", help="What A is compared with.")],
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="GLOB", help="Only paths like this, such as 'model.*'; repeatable."),
    ] = None,
    sort: Annotated[Sort, typer.Option("--sort", help="Order of the leaves; all but name with the most first.")] = (
        Sort.NAME
    ),
    everything: Annotated[bool, typer.Option("--all", help="List unchanged leaves, too.")] = False,
    as_json: AsJson = False,
    storage_option: StorageOptions = None,
    key: KeyName = None,
) -> None:
    """Compare two snapshots, leaf by leaf.

    A journaled step is replayed first, in a temporary folder.

    changed: share of the elements whose bits differ; the sign of zero and what a NaN carries count. rel norm: norm of
    the difference over the norm of A, both over the chunks that differ, since equal ones are not read; values that are
    not finite are left out, and counted. largest: largest change of one element.

    Exit codes: 0 compared, equal or not; 2 no such snapshots, or they cannot be read.
    """
    store = open_url(url, storage_option, key)
    with bar("reading snapshots", quiet=as_json) as shown:
        seen = read_history(shown.reads(store, documents))
    with with_journaled(store, seen, a, b) as (over, looked), bar("comparing", quiet=as_json) as shown:
        found = compare(over, find(looked, a), find(looked, b), only, watch=shown)
    if as_json:
        print_json(
            {
                "a": str(found.a),
                "b": str(found.b),
                "equal": found.equal,
                "leaves": [_document(leaf) for leaf in _ordered(found, sort)],
                "values": [_value_document(value) for value in found.values],
            }
        )
        return
    verdicts = Counter(leaf.verdict for leaf in found.leaves)
    told = [f"{verdicts[v]} {word}" for v, word in _WORDS.items() if verdicts[v]]
    print(f"{found.a.short} → {found.b.short}: {', '.join(told) or 'no leaves'}", end="")
    print(f"; {count(len(found.values), 'value')} changed" if found.values else "")
    rows = [_row(leaf) for leaf in _ordered(found, sort) if everything or leaf.verdict != "same"]
    if rows:
        print()
        header = ["leaf", "size", "changed", "rel norm", "largest", "notes"]
        print_table(header, rows, right=frozenset({1, 2, 3, 4}), fold=frozenset({0, 5}))
    if found.values:
        print()
    for value in found.values:
        print(printable(_line(value)))


_WORDS: dict[Verdict, str] = {
    "same": "unchanged",
    "changed": "changed",
    "added": "added",
    "removed": "removed",
    "reshaped": "of another form",
}


def _ordered(found: Difference, sort: Sort) -> list[LeafChange]:
    by_name = sorted(found.leaves, key=lambda leaf: natural(leaf.name))
    keys: dict[Sort, Callable[[LeafChange], float]] = {
        Sort.SHARE: lambda leaf: leaf.share,
        Sort.NORM: lambda leaf: leaf.relative or 0.0,
        Sort.SIZE: lambda leaf: leaf.nbytes,
    }
    return by_name if sort is Sort.NAME else sorted(by_name, key=keys[sort], reverse=True)


def _row(leaf: LeafChange) -> list[str]:
    moved = leaf.verdict == "changed"
    notes: list[str] = [] if leaf.verdict in ("same", "changed") else [leaf.verdict]
    if leaf.verdict == "reshaped":
        notes = [f"{_form(leaf.before)} → {_form(leaf.after)}"]
    if leaf.not_finite:
        notes.append(f"{leaf.not_finite} not finite")
    return [
        leaf.name,
        bytes_text(leaf.nbytes),
        share_text(leaf.share) if moved else "-",
        "-" if leaf.relative is None else f"{leaf.relative:.2g}",
        f"{leaf.largest:.2g}" if moved else "-",
        ", ".join(notes),
    ]


def share_text(share: float) -> str:
    """Never "0 %" for something, nor "100 %" for less than all."""
    percent = 100 * share
    if 0 < percent < 0.01:
        return "<0.01 %"
    if 99.99 < percent < 100:
        return ">99.99 %"
    return f"{percent:.4g} %"


def _form(form: Form | None) -> str:
    return "nothing" if form is None else f"{form.dtype} {'x'.join(map(str, form.shape)) or 'scalar'}"


def _line(value: ValueChange) -> str:
    before, after = cut(value_text(value.before), VALUE_WIDTH), cut(value_text(value.after), VALUE_WIDTH)
    match value.verdict:
        case "added":
            return f"{value.name} = {after}  (added)"
        case "removed":
            return f"{value.name} was {before}  (removed)"
        case _:
            return f"{value.name}: {before} → {after}"


def _document(leaf: LeafChange) -> dict[str, Any]:
    return {
        "path": leaf.path,
        "rank": leaf.rank,
        "verdict": leaf.verdict,
        "before": _form_document(leaf.before),
        "after": _form_document(leaf.after),
        "size": leaf.nbytes,
        "changed": leaf.changed,
        "share": leaf.share,
        "difference": jsonable(leaf.difference),
        "norm": jsonable(leaf.norm),
        "relative": jsonable(leaf.relative),
        "largest": jsonable(leaf.largest),
        "not_finite": leaf.not_finite,
    }


def _form_document(form: Form | None) -> dict[str, Any] | None:
    return None if form is None else {"class": form.cls, "dtype": form.dtype, "shape": form.shape}


def _value_document(value: ValueChange) -> dict[str, Any]:
    return {
        "path": value.path,
        "rank": value.rank,
        "verdict": value.verdict,
        "before": jsonable(value.before),
        "after": jsonable(value.after),
    }
