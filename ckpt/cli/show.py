"""``ckpt show``: what is in one snapshot. Reads its parts, never a pack."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer

from ckpt.cli.progress import bar, documents, own_documents
from ckpt.cli.screen import (
    AsJson,
    KeyName,
    StorageOptions,
    Url,
    age_text,
    bytes_text,
    count,
    cut,
    find_any,
    metrics_text,
    open_url,
    pins_of,
    print_json,
    print_table,
    printable,
)
from ckpt.cli.spelling import jsonable, value_text
from ckpt.format.manifest import Blob, BundleRow, Part, ShardRow
from ckpt.format.values import decode, flat
from ckpt.history.catalog import read_history
from recovery.paths import natural
from recovery.read import following, read_parts

VALUE_WIDTH = 120
"""Characters of a value; --json has all of them."""
VALUES_SHOWN = 40
"""Values under one name of the state; --json has all of them."""


@dataclass
class _LeafLine:
    cls: str
    dtype: str
    shape: tuple[int, ...]
    per_rank: bool
    ranks: set[int] = field(default_factory=set)
    size: int = 0
    stored: int = 0
    depth: int = 0
    bundled: bool = False


@dataclass
class _Said:
    """A value, as text, and the ranks that hold it."""

    text: str
    ranks: list[int]


def command(
    url: Url,
    step: Annotated[
        str | None,
        typer.Argument(help="A step, GENERATION/STEP, a pin, or latest.", show_default="latest", metavar="STEP"),
    ] = None,
    step_option: Annotated[str | None, typer.Option("--step", metavar="STEP", help="The same as the argument.")] = None,
    as_json: AsJson = False,
    storage_option: StorageOptions = None,
    key: KeyName = None,
) -> None:
    """Show the leaves and values of a snapshot.

    to read: stored bytes that a restore of the leaf reads (bundled: small leaves share chunks). depth: blobs that its
    deepest chunk is rebuilt from; 1 is a keyframe alone. ranks: who stored it.

    Exit codes: 0 shown; 2 there is no such snapshot, or it cannot be read.
    """
    if step is not None and step_option is not None and step != step_option:
        raise ValueError(f"STEP {step} and --step {step_option} are two snapshots; name one of them")
    store = open_url(url, storage_option, key)
    with bar("reading snapshots", quiet=as_json) as shown:
        history = read_history(shown.reads(store, documents))
        id_ = find_any(history, step_option or step or "latest")
    with bar(f"reading step {id_.step}", quiet=as_json) as shown:
        shown.expect(own_documents(history, id_))
        watched = shown.reads(store)
        snapshot, parts = following(
            watched, id_, lambda opened: (opened.snapshot, read_parts(watched, opened.snapshot))
        )
    leaves = _leaves(parts.values())
    to_read = sum({(b.pack, b.start): b.size for part in parts.values() for b in _blobs(part)}.values())
    aliases = {name: path for part in parts.values() for name, path in part.aliases.items()}
    values = {
        rank: {name: flat(decode(raw), name) for name, raw in sorted(part.values.items()) if not name.startswith("$")}
        for rank, part in sorted(parts.items())
    }
    if as_json:
        print_json(
            {
                "id": str(id_),
                "step": id_.step,
                "generation": id_.run.generation,
                "time": snapshot.time,
                "world_size": snapshot.world_size,
                "stored": snapshot.totals.stored,
                "size": snapshot.totals.size,
                "to_read": to_read,
                "metrics": snapshot.metrics or {},
                "pins": pins_of(history, id_),
                "abandoned": id_ in history.abandoned,
                "without": snapshot.without,
                "leaves": [_document(path, line) for path, line in sorted(leaves.items())],
                "aliases": aliases,
                "values": {
                    str(rank): {p: jsonable(v) for found in by_name.values() for p, v in found.items()}
                    for rank, by_name in values.items()
                },
            }
        )
        return
    print(f"step {id_.step}, generation {id_.run.generation}, {count(snapshot.world_size, 'rank')} ({id_})")
    notes = [f"pin {name}" for name in pins_of(history, id_)] + ["abandoned"] * (id_ in history.abandoned)
    print(", ".join([f"saved {age_text(snapshot.time)} ago", *notes]))
    print(
        f"{bytes_text(snapshot.totals.size)} in {count(len(leaves), 'leaf', 'leaves')}: {bytes_text(to_read)} to read, "
        f"of which this save stored {bytes_text(snapshot.totals.stored)}"
    )
    if snapshot.without:
        print(printable(f"weights only: without {', '.join(snapshot.without)}; no training goes on from it"))
    if snapshot.metrics:
        print(printable(f"metrics: {metrics_text(snapshot.metrics)}"))
    if leaves:
        print()
        _print_leaves(leaves)
    lines = [f"{name} is tied to {path}" for name, path in sorted(aliases.items())]
    for name in sorted({name for by_name in values.values() for name in by_name}):
        lines += _value_lines(name, {rank: by_name.get(name, {}) for rank, by_name in values.items()})
    if lines:
        print()
    for line in lines:
        print(printable(line))


def _leaves(parts: Iterable[Part]) -> dict[str, _LeafLine]:
    leaves: dict[str, _LeafLine] = {}
    for part in parts:
        for row in part.shards:
            line = leaves.setdefault(row.leaf, _LeafLine(row.cls, row.dtype, row.shape, row.per_rank))
            line.ranks.add(part.rank)
            line.size += row.nbytes
            line.stored += sum(blob.stop - blob.start for chunk in row.chunks for blob in chunk.blobs)
            line.depth = max(line.depth, _depth(row if row.bundle is None else part.bundles[row.bundle[0]]))
            line.bundled |= row.bundle is not None
    return leaves


def _blobs(part: Part) -> Iterable[Blob]:
    rows: list[ShardRow | BundleRow] = [*part.shards, *part.bundles]
    return (part.blob(blob) for row in rows for chunk in row.chunks for blob in chunk.blobs)


def _depth(row: ShardRow | BundleRow) -> int:
    return max((len(chunk.blobs) for chunk in row.chunks), default=0)


def _print_leaves(leaves: Mapping[str, _LeafLine]) -> None:
    rows = [
        [
            path + (" (per rank)" if line.per_rank else ""),
            line.dtype,
            "x".join(map(str, line.shape)) or "scalar",
            bytes_text(line.size),
            "bundled" if line.bundled and not line.stored else bytes_text(line.stored),
            str(line.depth or ""),
            _ranks(sorted(line.ranks)),
        ]
        for path, line in sorted(leaves.items(), key=lambda item: natural(item[0]))
    ]
    print_table(
        ["leaf", "dtype", "shape", "size", "to read", "depth", "ranks"],
        rows,
        right=frozenset({3, 4, 5}),
        fold=frozenset({0}),
    )


def _value_lines(name: str, of_rank: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """The values under one name of the state: one line where all ranks hold the same, else one for each text. Empty
    dicts inside are left out: an optimizer has them for what are tensors, and those have rows."""
    lines: list[str] = []
    paths = list(dict.fromkeys(p for found in of_rank.values() for p, v in found.items() if v != {} or p == name))
    for path in paths[:VALUES_SHOWN]:
        said: dict[str, _Said] = {}
        for rank, found in of_rank.items():
            if path in found:
                # Compared as text: NaN is not equal to itself, and 1 is not what True was.
                whole = value_text(found[path])
                items = f" ({len(found[path])} items)" if isinstance(found[path], list | tuple) else ""
                text = whole if len(whole) <= VALUE_WIDTH else cut(whole, VALUE_WIDTH) + items
                said.setdefault(whole, _Said(text, [])).ranks.append(rank)
        lines += [
            f"{path} = {one.text}" + ("" if len(one.ranks) == len(of_rank) else _on(one.ranks)) for one in said.values()
        ]
    if len(paths) > VALUES_SHOWN:
        lines.append(f"… and {len(paths) - VALUES_SHOWN} more values like these; --json has all")
    return lines


def _on(ranks: list[int]) -> str:
    return f"  (rank{'s' * (len(ranks) > 1)} {_ranks(ranks)})"


def _ranks(ordered: list[int]) -> str:
    """[0, 1, 2, 5] → "0-2,5"."""
    spans: list[list[int]] = []
    for rank in ordered:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ",".join(f"{a}" if a == b else f"{a},{b}" if b == a + 1 else f"{a}-{b}" for a, b in spans)


def _document(path: str, line: _LeafLine) -> dict[str, Any]:
    return {
        "path": path,
        "class": line.cls,
        "dtype": line.dtype,
        "shape": line.shape,
        "per_rank": line.per_rank,
        "ranks": sorted(line.ranks),
        "size": line.size,
        "to_read": line.stored,
        "bundled": line.bundled,
        "depth": line.depth,
    }
