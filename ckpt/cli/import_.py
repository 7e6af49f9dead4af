"""``ckpt import``: somebody else's file as the first snapshot of a store."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, assert_never

import typer

from ckpt.cli.export import Format
from ckpt.cli.progress import bar
from ckpt.cli.screen import AsJson, KeyName, StorageOptions, Url, bytes_text, count, open_url, print_json, warn
from ckpt.history.clock import SystemClock
from ckpt.history.copier import bring_over
from ckpt.history.runs import identity
from ckpt.saving.inward import check_empty, store_snapshot
from recovery.foreign import Arrival


def command(
    url: Url,
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="The file or folder to read.")],
    format_: Annotated[Format, typer.Option("--from", help="What it is.", show_default=False)],
    names: Annotated[
        str | None,
        typer.Option(
            "--names",
            metavar="NAME",
            help="The name a Checkpointer tracks it under: --names model makes h.0.weight model.h.0.weight.",
        ),
    ] = None,
    step: Annotated[int, typer.Option("--step", min=0, max=10**12 - 1, help="The step it becomes.")] = 0,
    as_json: AsJson = False,
    storage_option: StorageOptions = None,
    key: KeyName = None,
) -> None:
    """Start a store from safetensors, torch or DCP.

    safetensors: a file, an index, or their folder. torch: a state dict, or a dict of state dicts and plain values; read
    as weights only, and refused if it names code. dcp: a folder. Bits are those in the file. What an export of
    everything holds, values too, comes back as it was saved.

    Exit codes: 0 stored; 2 SOURCE is refused, the store is not empty, or it cannot be written.
    """
    store = open_url(url, storage_option, key)
    check_empty(store)  # before anything large is read
    arrival = _read(source, format_).named(names)
    if not arrival.tensors and not arrival.values:
        raise ValueError(f"{source}: no tensors are in it")
    with bar(f"storing {source.name}", quiet=as_json) as shown:
        id_ = store_snapshot(
            store,
            SystemClock(),
            identity(None),
            step,
            arrival.tensors,
            values=arrival.values,
            aliases=arrival.aliases,
            watch=shown,
        )
    if (late := bring_over(store, SystemClock())) is not None:
        warn(f"not yet on every tier: {late}")
    leaves = {tensor.shard.leaf for tensor in arrival.tensors}
    nbytes = sum(leaf.nbytes for leaf in leaves)
    if as_json:
        print_json({"id": str(id_), "tensors": len(leaves), "bytes": nbytes, "left_out": arrival.left_out})
        return
    print(f"step {id_.step}: {count(len(leaves), 'tensor')}, {bytes_text(nbytes)}, on {store.url}")
    for text in arrival.left_out:
        warn(f"left out: {text}")


def _read(source: Path, format_: Format) -> Arrival:
    match format_:
        case Format.SAFETENSORS:
            from recovery.foreign_safetensors import read_safetensors

            return read_safetensors(source)
        case Format.TORCH:
            from recovery.foreign_torch import read_torch

            return read_torch(source)
        case Format.DCP:
            from recovery.foreign_dcp import read_dcp

            return read_dcp(source)
        case _:
            assert_never(format_)
