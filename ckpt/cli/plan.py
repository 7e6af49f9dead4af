"""``ckpt plan``: what a recovery would read, from where, and how long it would take. Reads documents, never a pack."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from ckpt.cli.progress import bar, documents
from ckpt.cli.screen import AsJson, KeyName, StorageOptions, Url, bytes_text, open_url, print_json
from ckpt.format.manifest import Snapshot
from ckpt.history.catalog import find, read_history
from recovery.assumed import Reload, Scene, new_layout, parts_to_read, same_layout
from recovery.estimate import Bandwidths, Estimate, estimate
from recovery.journaled import journal_after
from recovery.planner import Copy, Fetch, Keep, Plan, Receive
from recovery.quantities import seconds_text
from recovery.read import OpenSnapshot, following, read_parts

_RATE = re.compile(r"(?:(?P<what>\w+)=)?(?P<number>\d+(?:\.\d+)?) ?(?P<scale>[kKMGT]?)(?P<binary>i?)B(?:/s)?")
_SCALES = {"": 0, "k": 1, "K": 1, "M": 2, "G": 3, "T": 4}
_DOORS = ("store", "store_total", "network", "node", "memory")


def command(
    url: Url,
    lost: Annotated[str, typer.Option("--lost", help="Ranks that are lost, such as 2,3 or 8-15.")] = "",
    world_size: Annotated[
        int | None, typer.Option("--world-size", min=1, help="Ranks of the job that comes back; as before by default.")
    ] = None,
    step: Annotated[str, typer.Option("--step", help="A step, GENERATION/STEP, a pin, or latest.")] = "latest",
    per_node: Annotated[int, typer.Option("--ranks-per-node", min=1, help="Ranks that share a node's mirrors.")] = 1,
    bandwidth: Annotated[
        list[str] | None,
        typer.Option(
            "--bandwidth",
            metavar="[WHAT=]RATE",
            help="Such as 2GB/s (of the store, for each rank) or network=10GB/s; WHAT is store, store_total, network, "
            "node or memory; repeatable.",
        ),
    ] = None,
    latency: Annotated[float, typer.Option("--latency", min=0.0, help="Seconds of one request to the store.")] = 0.02,
    as_json: AsJson = False,
    storage_option: StorageOptions = None,
    key: KeyName = None,
) -> None:
    """Show what a recovery would read.

    After losing some ranks: what, from where, and about how long it would take.

    The job need not run: every rank that is not lost is taken to hold, in its mirror, what it stored.

    Exit codes: 0 shown; 2 wrong usage, no such snapshot, or it cannot be read.
    """
    given = _bandwidths(bandwidth or (), latency)
    gone = _ranks(lost)
    store = open_url(url, storage_option, key)

    def look(opened: OpenSnapshot) -> tuple[Snapshot, Scene]:
        snapshot = opened.snapshot
        if gone and gone[-1] >= snapshot.world_size:
            raise ValueError(f"--lost {lost}: step {snapshot.step} has ranks 0 to {snapshot.world_size - 1}")
        if world_size is not None and world_size != snapshot.world_size:
            parts = read_parts(watched, snapshot)
            return snapshot, new_layout(snapshot, parts, gone, world_size, per_node=per_node)
        parts = read_parts(watched, snapshot, gone)
        parts |= read_parts(watched, snapshot, parts_to_read(parts))
        return snapshot, same_layout(snapshot, parts, gone, per_node=per_node)

    with bar("reading snapshots", quiet=as_json) as shown:
        watched = shown.reads(store, documents)
        snapshot, scene = following(watched, find(read_history(watched), step), look)
    made = scene.plan()
    time, reload = estimate(made, given), scene.reload(given)
    after = journal_after(store, snapshot.id, snapshot.world_size)
    if as_json:
        replay = None if after is None else {"last": after.last, "bytes": after.nbytes}
        print_json(
            {"id": str(snapshot.id), "step": snapshot.step, "lost": gone, **_document(scene, made, time, reload)}
            | {"replay": replay}
        )  # fmt: skip
        return
    there = len(scene.nodes)
    back = "" if there == snapshot.world_size else f", coming back with {there}"
    missing = f"without ranks {','.join(map(str, gone))}" if gone else "with all ranks"
    print(f"step {snapshot.step}, {snapshot.world_size} ranks, {missing}{back}")
    print(made)
    print(f"recovery: {time}")
    if reload.nbytes:
        print(f"full reload: {bytes_text(reload.nbytes)} from the store, about {seconds_text(reload.seconds)}")
    if after is not None:
        print(
            f"then, with journal=: replay steps {snapshot.step + 1} to {after.last} of {snapshot.world_size} saved "
            f"ranks, {bytes_text(after.nbytes)} of records, less what mirrors' folders hold"
        )
    if snapshot.without:
        print(f"weights only: a restore of {', '.join(snapshot.without)} takes another snapshot; name one with --step")
    for note in scene.notes:
        print(f"assumed: {note}")


def _document(scene: Scene, made: Plan, time: Estimate, reload: Reload) -> dict[str, Any]:
    names = {"keep": Keep, "copy": Copy, "receive": Receive, "fetch": Fetch}
    return {
        "world_size": len(scene.nodes),
        "bytes": {name: made.total(kind) for name, kind in names.items()},
        "requests": sum(rank.requests for rank in made.ranks),
        "seconds": time.seconds,
        "ranks": [
            {
                "rank": rank.rank,
                **{name: rank.nbytes(kind) for name, kind in names.items()},
                "requests": rank.requests,
                "peers": [action.rank for action in rank.actions if isinstance(action, Receive)],
            }
            for rank in made.ranks
        ],
        "full_reload": {"bytes": reload.nbytes, "seconds": reload.seconds},
        "assumed": scene.notes,
    }


def _ranks(text: str) -> list[int]:
    """ "2,3,8-11" → ascending numbers, each once. Raises ValueError."""
    found: set[int] = set()
    for piece in filter(None, text.replace(" ", "").split(",")):
        first, dash, last = piece.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"--lost {text!r}: expected ranks such as 2,3 or 8-15")
        stop = int(last) if dash else int(first)
        if stop >= 100_000:  # names of parts have five digits
            raise ValueError(f"--lost {text!r}: there is no rank {stop}")
        found.update(range(int(first), stop + 1))
    return sorted(found)


def _bandwidths(rates: Sequence[str], latency: float) -> Bandwidths:
    chosen: dict[str, float] = {}
    for text in rates:
        read = _RATE.fullmatch(text)
        what = (read["what"] or "store") if read else ""
        if read is None or what not in _DOORS or not float(read["number"]):
            raise ValueError(f"--bandwidth {text!r}: expected such as 2GB/s, or {'|'.join(_DOORS)}=2GB/s")
        base = 1024 if read["binary"] else 1000
        chosen[what] = float(read["number"]) * base ** _SCALES[read["scale"]]
    return Bandwidths(latency=latency, **chosen)
