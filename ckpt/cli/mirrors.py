"""``ckpt mirrors``: which mirrors of running and of dead jobs lie on this machine. Reads records, never the state."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from ckpt.cli.screen import AsJson, age_text, bytes_text, count, open_url, print_json, print_table, warn
from ckpt.history.runs import identity
from ckpt.mirror.folders import default_folder, store_identity
from ckpt.mirror.leftovers import Leftover, Trouble, find_mirrors, sweep


def command(
    folder: Annotated[
        list[Path] | None,
        typer.Option("--folder", help="Look here (repeatable); default: $CKPT_MIRROR_DIR, else shared memory."),
    ] = None,
    store: Annotated[str | None, typer.Option("--store", metavar="URL", help="Only mirrors of this store.")] = None,
    sweep_: Annotated[bool, typer.Option("--sweep", help="Remove the mirrors of processes that are no more.")] = False,
    as_json: AsJson = False,
) -> None:
    """List the mirrors on this machine.

    They are the shared memory in which jobs keep their last state, for a quick restart. A mirror whose job is to be
    started again here is dead too until then: sweep when no restart is to come. Other users' files are neither read
    nor removed.

    Exit codes: 0 done; 2 a folder or a file was not looked into, and why is said.
    """
    me, now = identity(None), time.time()
    bases = [base.absolute() for base in folder or [default_folder()]]
    wanted = None if store is None else store_identity(open_url(store, None, locked=True).url)
    found = list(find_mirrors(bases, me, now))
    mirrors = [m for m in found if isinstance(m, Leftover) and wanted in (None, m.store)]
    troubles = [t for t in found if isinstance(t, Trouble)]
    swept = {m.path for m in sweep(mirrors, me, now)} if sweep_ else set()
    if as_json:
        print_json(
            {
                "mirrors": [_document(m, m.path in swept, now) for m in mirrors],
                "problems": [{"path": str(t.path), "text": t.text} for t in troubles],
            }
        )
    else:
        _print(mirrors, swept, now)
        if not mirrors:
            print(f"no mirrors in {', '.join(map(str, bases))}")
        elif sweep_:
            freed = sum(m.size for m in mirrors if m.path in swept)
            print(f"removed {count(len(swept), 'mirror')}, {bytes_text(freed)}")
        for trouble in troubles:
            warn(f"{trouble.path}: {trouble.text}")
    if troubles:
        raise typer.Exit(2)


def _print(mirrors: list[Leftover], swept: set[Path], now: float) -> None:
    if not mirrors:
        return
    rows = [
        [
            str(m.path.parent.parent),
            m.store,
            " ".join(dict.fromkeys(slot.run for slot in m.slots)) or "-",
            " ".join(str(slot.step) for slot in m.slots) or "-",
            str(m.rank),
            bytes_text(m.size),
            age_text(m.time, now=now),
            m.state,
            "swept" if m.path in swept else m.problem or "",
        ]
        for m in mirrors
    ]
    header = ["folder", "store", "run", "steps", "rank", "size", "age", "owner", ""]
    print_table(header, rows, right=frozenset({3, 4, 5, 6}))


def _document(mirror: Leftover, swept: bool, now: float) -> dict[str, Any]:
    return {
        "path": str(mirror.path),
        "store": mirror.store,
        "rank": mirror.rank,
        "slots": [
            {"run": s.run, "step": s.step, "world_size": s.world_size, "nbytes": s.nbytes, "time": s.time}
            for s in mirror.slots
        ],
        "size": mirror.size,
        "age": now - mirror.time,
        "owner": mirror.state,
        "pid": None if mirror.owner is None else mirror.owner.pid,
        "host": None if mirror.owner is None else mirror.owner.host,
        "problem": mirror.problem,
        "swept": swept,
    }
