"""``ckpt verify``: is everything on the store what was written?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

import typer

from ckpt.cli.progress import bar
from ckpt.cli.screen import (
    AsJson,
    KeyName,
    StorageOptions,
    Url,
    bytes_text,
    count,
    find_any,
    open_url,
    print_json,
    printable,
)
from ckpt.errors import NoSnapshot
from ckpt.format.manifest import Snapshot
from ckpt.format.names import ALIVE, JOURNAL, PACKS, PARTS, PINS, PRUNES, RUNS, SNAPSHOTS, STORE_KEY, SnapshotId
from ckpt.history.catalog import read_history
from ckpt.history.keyed import key_id
from recovery.scrub import scrub
from recovery.verify import Finding, verify
from storage_backends.base import Entry, Store
from storage_backends.copies import Copied

PREFIXES = (RUNS, ALIVE, PACKS, PARTS, SNAPSHOTS, PINS, PRUNES)


def command(
    url: Url,
    packs: Annotated[bool, typer.Option("--packs", help="Read every pack, and compare its digest.")] = False,
    deep: Annotated[bool, typer.Option("--deep", help="Read every pack and rebuild every chunk.")] = False,
    step: Annotated[
        str | None,
        typer.Option(
            "--step",
            metavar="STEP",
            help="Only this snapshot: a step, GENERATION/STEP, a pin, latest.",
            show_default=False,
        ),
    ] = None,
    repair: Annotated[
        bool,
        typer.Option("--repair", help="Mend bad copies from whole ones (fanout::, tiered::)."),
    ] = False,
    as_json: AsJson = False,
    storage_option: StorageOptions = None,
    key: KeyName = None,
) -> None:
    """Look for damage.

    Checks every document, and that every pack is there and of the right length; with --packs every byte of them too,
    with --deep that every chunk can be rebuilt besides. An error names the object and what needs it. Notes are
    leftovers of crashed saves and foreign files, which do no harm. Where the store holds copies each one is checked,
    and with --repair bad ones are written anew from whole ones, and what the durable of two tiers lacks is copied; else
    nothing is written. May run beside a live job. Of an encrypted store, without its key, every object is checked by
    itself.

    Exit codes: 0 whole, or all of it mended; 1 damage found; 2 nothing is there to check, or the store cannot be read.
    """
    store = open_url(url, storage_option, key, locked=step is None and not repair)
    if repair and not isinstance(store, Copied):
        raise ValueError(f"{store.url} holds one copy of everything, so there is nothing to mend it from")
    packs |= deep
    locked = key is None and key_id(store) is not None
    history = None if step is None else read_history(store)
    only = None if history is None or step is None else find_any(history, step)
    checked = _checked(store, only)
    findings = []
    with bar("checking", quiet=as_json) as shown:
        if history is not None and only in history.snapshots:
            shown.expect(_to_read(history.snapshots[only], packs + deep))
        watched = shown.reads(store, None if only else partial(_weigh, times=packs + deep))
        checking = (
            scrub(watched, deep=packs) if locked else verify(watched, packs=packs, deep=deep, only=only, repair=repair)
        )
        for finding in checking:
            findings.append(finding)
            if not as_json:
                print(printable(f"{finding.level}: {finding.text}"), flush=True)
    errors = sum(finding.level == "error" for finding in findings)
    if as_json:
        mended = sorted({finding.key for finding in findings if finding.level == "mended"})
        found = [_document(finding) for finding in findings]
        said = {"whole": not errors, "packs": packs, "deep": deep, "locked": locked, **checked}
        print_json({**said, "mended": mended, "findings": found})
    else:
        what = f"step {only.short}" if only else _totals(checked)
        print(_locked_verdict(what, packs, errors) if locked else _verdict(what, packs, deep, findings))
    if errors:
        raise typer.Exit(1)


def _weigh(entry: Entry, times: int) -> int:
    """Bytes of an object that a check reads. `times` that packs are read: for their digests, and their blobs once more
    to rebuild chunks, for which parts are read again."""
    if entry.key.startswith((ALIVE, JOURNAL)):
        return 0
    if entry.key.startswith(PACKS):
        return times * entry.size
    return max(times, 1) * entry.size if entry.key.startswith(PARTS) else entry.size


def _to_read(snapshot: Snapshot, times: int) -> int:
    """The same of one snapshot, before anything of it is listed."""
    parts = sum(ref.length for ref in snapshot.parts)
    return max(times, 1) * parts + times * sum(length for _, length in snapshot.packs)


def _checked(store: Store, only: SnapshotId | None) -> dict[str, int]:
    """What there is to check. A mistyped URL must not be called whole.

    Raises:
        NoSnapshot: nothing of a checkpoint store is there.
    """
    if only is not None:
        return {}
    ours = [e for e in store.list("") if e.key == STORE_KEY or e.key.startswith(PREFIXES)]
    if not ours:
        raise NoSnapshot(f"{store.url}: no checkpoint store is there, so there is nothing to check; is the URL right?")
    return {
        "snapshots": sum(e.key.startswith(SNAPSHOTS) for e in ours),
        "packs": sum(e.key.startswith(PACKS) for e in ours),
        "bytes": sum(e.size for e in ours),
    }


def _totals(checked: dict[str, int]) -> str:
    return (
        f"{count(checked['snapshots'], 'snapshot')}, {count(checked['packs'], 'pack')}, {bytes_text(checked['bytes'])}"
    )


def _verdict(what: str, packs: bool, deep: bool, findings: Sequence[Finding]) -> str:
    levels = Counter(finding.level for finding in findings)
    if levels["mended"]:
        what = f"{what}, {count(levels['mended'], 'copy', 'copies')} mended"
    if levels["error"]:
        lost = sorted({step for finding in findings for step in finding.steps if finding.level == "error"})
        told = (
            f"cannot be restored: step{'s' * (len(lost) > 1)} {', '.join(map(str, lost))}"
            if lost
            else "no step is lost"
        )
        return f"{count(levels['error'], 'error')} in {what}; {told}"
    if deep:
        return f"whole: {what}, every byte read"
    if packs:
        return f"whole: {what}, every byte is what was written; --deep rebuilds every chunk too"
    return f"whole: {what}, as far as documents and lengths tell; --deep reads every byte"


def _locked_verdict(what: str, packs: bool, errors: int) -> str:
    if errors:
        return f"{count(errors, 'error')} in {what}; which steps they cost only the key can tell: --key"
    read = "object" if packs else "document"
    return f"every {read} of {what} is what was written; what they say together only the key can tell: --key"


def _document(finding: Finding) -> dict[str, Any]:
    return {
        "level": finding.level,
        "key": finding.key,
        "step": finding.step,
        "rank": finding.rank,
        "leaf": finding.leaf,
        "steps": finding.steps,
        "text": finding.text,
    }
