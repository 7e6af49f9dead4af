"""From all parts of one step to its snapshot: pure, so that whoever computes it computes the same bytes.

Everything that one part alone cannot show is checked here: that the parts belong together, that every leaf is covered
exactly once, and that replicas are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ckpt.errors import DamagedError, SaveFailed
from ckpt.format.manifest import FORMAT, Part, PartRef, ShardRow, Snapshot, Totals, parse_snapshot
from ckpt.format.names import PartName
from ckpt.format.shards import DTYPES, uncovered, whole

Breathe = Callable[[], None]


def _hold() -> None:
    """No background thread, no need to give way."""


def build_snapshot(parts: Sequence[tuple[PartRef, Part]], breathe: Breathe = _hold) -> Snapshot:
    """The snapshot that these parts make: equal parts, in whatever order, give an equal snapshot.

    Args:
        parts: all parts of one step, each with its name, length and digest.
        breathe: called between rows, for callers on a background thread.

    Raises:
        DamagedError: they do not belong together, or do not cover every leaf exactly once.
    """
    if not parts:
        raise DamagedError("a snapshot needs at least one part, found none", key="parts/")
    ordered = sorted(parts, key=lambda p: p[1].rank)
    _check_heads(ordered)
    size = _check_coverage(ordered, breathe)
    first = ordered[0][1]
    by_kind: dict[str, int] = {}
    packs: dict[str, int] = {}
    for ref, part in ordered:
        for kind, stored in part.stored.items():
            by_kind[kind] = by_kind.get(kind, 0) + stored
        for key, length in part.packs:
            if packs.setdefault(key, length) != length:
                raise _wrong(ref, part, f"{key} of {packs[key]} bytes, as another rank says", f"{length} bytes")
            breathe()
    references = [r for _, part in ordered if (r := parse_snapshot(part.reference)) is not None]
    return Snapshot(
        format=FORMAT,
        run=first.run,
        step=first.step,
        world_size=first.world_size,
        revision=first.revision,
        parts=tuple(ref for ref, _ in ordered),
        reference=str(min(references)) if references else None,
        packs=tuple(sorted(packs.items())),
        totals=Totals(sum(by_kind.values()), size, dict(sorted(by_kind.items()))),
        metrics=first.metrics,
        time=first.time,
        blocked=first.blocked,
        durable=first.durable,
        without=first.without,
        cadence=first.cadence,
    )


def check_replicas(parts: Sequence[tuple[PartRef, Part]], breathe: Breathe = _hold) -> None:
    """Compare the replica checksums of all ranks. Every rank that sees all parts does this by itself, so that none
    waits for a commit that cannot come.

    Raises:
        SaveFailed: stage "replicas"; names the leaf and the ranks that differ from the most.
    """
    seen: dict[str, dict[str, list[int]]] = {}
    for _, part in sorted(parts, key=lambda p: p[1].rank):
        for place, checksum in part.replicas.items():
            seen.setdefault(place, {}).setdefault(checksum, []).append(part.rank)
            breathe()
    bad = {place: groups for place, groups in seen.items() if len(groups) > 1}
    if not bad:
        return
    place = min(bad)
    # With two ranks, or a tie, nobody can say who is right; sorting by (count, ranks) only makes the message stable.
    groups = sorted(bad[place].items(), key=lambda g: (-len(g[1]), g[1]))
    said = "; ".join(f"{_ranks(ranks)} hold{'s' * (len(ranks) == 1)} {checksum}" for checksum, ranks in groups)
    more = f" (and {len(bad) - 1} more leaves)" if len(bad) > 1 else ""
    step = parts[0][1].step
    raise SaveFailed(
        f"step {step}, leaf {place}: replicas differ{more}: {said}; this is silent corruption or a lost all-reduce, "
        "unless the tensor is meant to differ: then declare it with ckpt.PerRank(tensor)",
        step=step,
        stage="replicas",
    )


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def _check_heads(ordered: Sequence[tuple[PartRef, Part]]) -> None:
    _, first = ordered[0]
    expected = (first.run, first.step, first.world_size, first.ownership, first.revision, first.chunk, first.without)
    for ref, part in ordered:
        found = (part.run, part.step, part.world_size, part.ownership, part.revision, part.chunk, part.without)
        if found != expected:
            fields = ("run", "step", "world size", "ownership", "revision", "chunk size", "what was taken out")
            i = next(i for i in range(len(fields)) if found[i] != expected[i])
            raise _wrong(ref, part, f"{fields[i]} {expected[i]}, as rank {first.rank} says", str(found[i]))
        if ref.key != PartName(part.id, part.rank, part.revision).key:
            raise _wrong(ref, part, PartName(part.id, part.rank, part.revision).key, ref.key)
    ranks = [part.rank for _, part in ordered]
    if ranks != list(range(first.world_size)):
        raise _wrong(*ordered[0], f"one part of each rank below {first.world_size}", f"parts of ranks {ranks}")


def _check_coverage(ordered: Sequence[tuple[PartRef, Part]], breathe: Breathe) -> int:
    """Raises DamagedError; else the raw bytes of everything the parts hold."""
    rows: dict[str, list[ShardRow]] = {}
    where: dict[str, tuple[PartRef, Part]] = {}
    size = 0
    for ref, part in ordered:
        mine: set[str] = set()
        for row in part.shards:
            box = row.as_box
            size += box.numel * DTYPES[row.dtype].size
            head = rows.setdefault(row.leaf, [row])[0]
            where.setdefault(row.leaf, (ref, part))
            kind = (head.per_rank, head.dtype, head.cls)
            if (row.per_rank, row.dtype, row.cls) != kind or (not row.per_rank and row.shape != head.shape):
                other = where[row.leaf][1].rank
                raise _wrong(
                    ref, part, f"{_describe(head)}, as rank {other} says", _describe(row), leaf=row.leaf
                )  # fmt: skip
            if row.per_rank:
                if box != whole(row.shape):
                    raise _wrong(ref, part, f"the whole of {row.shape}, being per rank", f"box {box}", leaf=row.leaf)
                if row.leaf in mine:
                    raise _wrong(ref, part, "one value, being per rank", "two", leaf=row.leaf)
                mine.add(row.leaf)
            elif row is not head:
                rows[row.leaf].append(row)
            breathe()
    for leaf, shards in rows.items():
        if not shards[0].per_rank and (problem := uncovered(shards[0].shape, [s.as_box for s in shards])) is not None:
            raise _wrong(*where[leaf], "boxes that cover it exactly once", problem, leaf=leaf)
        breathe()
    return size


def _describe(row: ShardRow) -> str:
    return f"{'per-rank ' if row.per_rank else ''}{row.cls} {row.dtype} {row.shape}"


def _wrong(ref: PartRef, part: Part, expected: str, found: str, *, leaf: str | None = None) -> DamagedError:
    of = f", {leaf}" if leaf else ""
    return DamagedError(
        f"step {part.step}, rank {part.rank}{of}: {ref.key}: expected {expected}, found {found}; "
        "the step is not committed, save again",
        key=ref.key,
        step=part.step,
        rank=part.rank,
        leaf=leaf,
        expected=expected,
        found=found,
    )
