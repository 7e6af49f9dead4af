"""``ckpt show``: what is in one snapshot. Reads its parts, never a pack."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer

from ckpt.cli.screen import AsJson, StorageOptions, Url, bytes_text, open_url, print_json, print_table
from ckpt.format.manifest import BundleRow, Part, ShardRow
from ckpt.format.values import decode, flat
from ckpt.history.catalog import find, read_history
from recovery.read import open_snapshot, read_parts


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


def command(
    url: Url,
    step: Annotated[str, typer.Argument(help="A step, GENERATION/STEP, a pin, or latest.")] = "latest",
    step_option: Annotated[str | None, typer.Option("--step", help="The same as the argument.")] = None,
    as_json: AsJson = False,
    storage_option: StorageOptions = None,
) -> None:
    """Show the leaves and values of one snapshot: shape, dtype, bytes, and how many blobs deep its chunks are.

    Exit codes: 0 shown; 2 there is no such snapshot, or it cannot be read.
    """
    store = open_url(url, storage_option)
    id_ = find(read_history(store), step_option or step)
    opened = open_snapshot(store, id_)
    parts = read_parts(store, opened.snapshot)
    leaves = _leaves(parts.values())
    plain = {
        rank: {
            path: value
            for name, raw in part.values.items()
            for path, value in flat(decode(raw), name).items()
            if not name.startswith("$")
        }
        for rank, part in sorted(parts.items())
    }
    snapshot = opened.snapshot
    if as_json:
        print_json(
            {
                "id": str(id_),
                "step": id_.step,
                "generation": id_.run.generation,
                "world_size": snapshot.world_size,
                "stored": snapshot.totals.stored,
                "size": snapshot.totals.size,
                "metrics": snapshot.metrics or {},
                "leaves": [_document(path, line) for path, line in sorted(leaves.items())],
                "aliases": {name: path for part in parts.values() for name, path in part.aliases.items()},
                "values": {str(rank): {p: _jsonable(v) for p, v in found.items()} for rank, found in plain.items()},
            }
        )
        return
    print(
        f"step {id_.step}, generation {id_.run.generation}, {snapshot.world_size} ranks: "
        f"{bytes_text(snapshot.totals.size)} in {len(leaves)} leaves, {bytes_text(snapshot.totals.stored)} stored by it"
    )
    rows = [
        [
            path + (" (per rank)" if line.per_rank else ""),
            line.dtype,
            "x".join(map(str, line.shape)) or "scalar",
            bytes_text(line.size),
            bytes_text(line.stored) if line.stored else "bundled",
            str(line.depth) if line.depth else "",
            _ranks(line.ranks),
        ]
        for path, line in sorted(leaves.items())
    ]
    print_table(["leaf", "dtype", "shape", "size", "to read", "depth", "ranks"], rows, right=frozenset({3, 4, 5}))
    shared = plain.get(0, {})
    for path, value in sorted(shared.items()):
        differs = any(found.get(path) != value for found in plain.values())
        print(f"{path} = {value!r}" + (" (rank 0; others differ)" if differs else ""))


def _leaves(parts: Iterable[Part]) -> dict[str, _LeafLine]:
    leaves: dict[str, _LeafLine] = {}
    for part in parts:
        for row in part.shards:
            line = leaves.setdefault(row.leaf, _LeafLine(row.cls, row.dtype, row.shape, row.per_rank))
            line.ranks.add(part.rank)
            line.size += row.nbytes
            line.stored += _stored(row)
            line.depth = max(line.depth, _depth(row if row.bundle is None else part.bundles[row.bundle[0]]))
    return leaves


def _stored(row: ShardRow) -> int:
    return sum(blob.stop - blob.start for chunk in row.chunks for blob in chunk.blobs)


def _depth(row: ShardRow | BundleRow) -> int:
    return max((len(chunk.blobs) for chunk in row.chunks), default=0)


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
        "depth": line.depth,
    }


def _ranks(ranks: set[int]) -> str:
    ordered = sorted(ranks)
    if len(ordered) > 2 and ordered == list(range(ordered[0], ordered[-1] + 1)):
        return f"{ordered[0]}-{ordered[-1]}"
    return ",".join(map(str, ordered))


def _jsonable(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | int | float | str) else repr(value)
