"""``ckpt export``: one snapshot as somebody else's file."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, assert_never

import typer

from ckpt.cli.progress import bar, documents, own_documents
from ckpt.cli.screen import (
    AsJson,
    KeyName,
    StorageOptions,
    Url,
    bytes_text,
    count,
    open_url,
    print_json,
    printable,
    warn,
)
from ckpt.history.catalog import find, read_history
from ckpt.options import size
from recovery.looking import with_journaled
from recovery.outward import Export, open_export


class Format(StrEnum):
    SAFETENSORS = "safetensors"
    TORCH = "torch"
    DCP = "dcp"


def command(
    url: Url,
    step: Annotated[str, typer.Argument(metavar="STEP", help="A step, GENERATION/STEP, a pin, or latest.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The file or folder to make; nothing is overwritten.")],
    to: Annotated[Format, typer.Option("--to", help="What to make of it.", show_default=False)],
    names: Annotated[
        str | None,
        typer.Option(
            "--names",
            metavar="NAME",
            help="Only what is tracked under this name, as the model itself calls it: --names model makes "
            "model.h.0.weight h.0.weight.",
        ),
    ] = None,
    shard_size: Annotated[
        str, typer.Option("--shard-size", metavar="SIZE", help="Most bytes in one safetensors file.")
    ] = "5GB",
    as_json: AsJson = False,
    storage_option: StorageOptions = None,
    key: KeyName = None,
) -> None:
    """Write a snapshot as safetensors, torch or DCP.

    A journaled step is replayed first, in a temporary folder.

    safetensors: a folder of model.safetensors, or of several files and an index, as transformers opens it; one file if
    OUT ends in .safetensors. torch: a file for torch.load(OUT, weights_only=True), a dict. dcp: a folder for
    torch.distributed.checkpoint.load. Bits are those that were saved. OUT appears when it is whole.

    Exit codes: 0 written; 2 no such snapshot, OUT is there or cannot be written, or the store cannot be read.
    """
    limit = size(shard_size)
    store = open_url(url, storage_option, key)
    with bar("reading snapshots", quiet=as_json) as shown:
        seen = read_history(shown.reads(store, documents))
    with with_journaled(store, seen, step) as (over, history):
        id_ = find(history, step)
        with bar(f"reading step {id_.step}", quiet=as_json) as shown:
            shown.expect(own_documents(history, id_))
            export = open_export(shown.reads(over), id_, names)
        with bar(f"writing {out.name}", quiet=as_json) as shown:
            shown.expect(export.nbytes)
            files, left_out = _write(replace(export, watch=shown), out, to, limit)
    if as_json:
        print_json(
            {
                "id": str(id_),
                "files": [str(file) for file in files],
                "tensors": [tensor.name for tensor in export.tensors],
                "bytes": export.nbytes,
                "left_out": left_out,
            }
        )
        return
    tensors = count(len(export.tensors), "tensor")
    print(printable(f"step {id_.step}: {tensors}, {bytes_text(export.nbytes)}, in {', '.join(map(str, files))}"))
    if left_out:
        first = ", ".join(left_out[:5]) + (" …" if len(left_out) > 5 else "")
        for_us = "; 'ckpt import' finds them all the same" if export.rest is not None else ""
        warn(f"{count(len(left_out), 'value')} that such files do not hold: {first}{for_us}")


def _write(export: Export, out: Path, to: Format, limit: int) -> tuple[list[Path], list[str]]:
    """The files made, and the values left out. Only the format that is asked for is loaded: two of them need torch."""
    match to:
        case Format.SAFETENSORS:
            from recovery.foreign_safetensors import write_safetensors

            return write_safetensors(export, out, limit=limit), sorted(export.values)
        case Format.TORCH:
            from recovery.foreign_torch import write_torch

            return [out], write_torch(export, out)
        case Format.DCP:
            from recovery.foreign_dcp import write_dcp

            return [out], write_dcp(export, out)
        case _:
            assert_never(to)
