"""Steps made by hand, as small as they get: one leaf of one float per rank, one blob per pack, no writer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckpt.format.layout import Layout, lay_out
from ckpt.format.manifest import (
    FORMAT,
    Blob,
    Chunk,
    Part,
    PartHead,
    PartRef,
    PinDoc,
    RunDoc,
    Snapshot,
    chunk_digest,
    digest64,
    digest128,
    read_part,
    seal,
    write_part,
)
from ckpt.format.names import PackName, PartName, RunId, SnapshotId, SnapshotName, pin_key, run_key
from ckpt.format.shards import Box, Leaf, Shard
from ckpt.history.assemble import build_snapshot
from ckpt.history.runs import Identity
from storage_backends.base import Store

RUN = RunId(1, "aaaaaaaa")
NEXT = RunId(2, "bbbbbbbb")
OWNERSHIP = digest128(b"who owns what")
GRACE = 3600.0


def breathe() -> None:
    """Nothing trains here."""


@dataclass
class FakeClock:
    """Time that passes only by sleeping; `on_sleep` is what others do meanwhile."""

    now: float = 1_000_000.0
    on_sleep: Callable[[float], None] = field(default=lambda now: None)
    slept: list[float] = field(default_factory=list)

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0, "a wait that does not wait spins"
        self.slept.append(seconds)
        self.now += seconds
        self.on_sleep(self.now)


def somebody(pid: int = 1, *, host: str = "here", job: str | None = None) -> Identity:
    """A process on a machine whose processes cannot be asked after (no boot id)."""
    return Identity(host, pid, f"started {pid}", "", "", job)


def put_run(
    store: Store,
    run: RunId,
    resumed_from: SnapshotId | None = None,
    *,
    world_size: int = 1,
    who: Identity | None = None,
    started: float = 0.0,
) -> RunId:
    who = who or somebody()
    source = None if resumed_from is None else str(resumed_from)
    doc = RunDoc(
        FORMAT, str(run), world_size, who.host, who.pid, who.pid_started, who.boot, who.pid_space, who.job, started,
        source, {},
    )  # fmt: skip
    store.put(run_key(run), seal(doc))
    return run


def put_pin(store: Store, name: str, pinned: SnapshotId) -> None:
    store.put(pin_key(name), seal(PinDoc(FORMAT, name, str(pinned))))


def shares(ranks: int) -> list[Layout]:
    """The layouts of one vector dealt out to `ranks` ranks, one float each."""
    leaf = Leaf("w", "parameter", "float32", (ranks,))
    return [_layout(leaf, r) for r in range(ranks)]


_LAYOUTS: dict[tuple[Leaf, int], Layout] = {}


def _layout(leaf: Leaf, rank: int) -> Layout:
    if (leaf, rank) not in _LAYOUTS:
        _LAYOUTS[leaf, rank] = lay_out([Shard(leaf, Box((rank,), (1,)))])
    return _LAYOUTS[leaf, rank]


def put_pack(store: Store, id_: SnapshotId, rank: int, data: bytes | None = None, n: int = 0) -> tuple[str, int]:
    """A pack (whose bytes mean nothing), and its length."""
    data = f"pack of {id_}, rank {rank}".encode() if data is None else data
    key = PackName(id_, rank, n, digest64(data)).key
    store.put(key, data)
    return key, len(data)


def part_bytes(
    id_: SnapshotId,
    rank: int,
    layout: Layout,
    packs: Sequence[tuple[str, int]],
    *,
    ranks: int = 1,
    reference: SnapshotId | None = None,
    replicas: Mapping[str, str] | None = None,
    ownership: str = OWNERSHIP,
    stored: int | None = None,
    time: float | None = None,
    metrics: Mapping[str, Any] | None = None,
    revision: int = 0,
) -> bytes:
    """A part whose every chunk needs one blob of each of `packs`, base first. By its `time`, unless it is given, each
    run comes weeks after the one before."""
    time = id_.run.generation * 1e6 if time is None else time
    blobs = tuple(Blob(key, 0, length, 0, "0" * 16) for key, length in packs)
    table = [Chunk(chunk_digest("float32", b"0000"), blobs) for _ in layout.pieces]
    head = PartHead(
        id_.run, id_.step, ranks, rank, ownership, reference, time if rank == 0 else None,
        dict(metrics or {"loss": 1.5}) if rank == 0 else None, {0: packs[-1][1] if stored is None else stored}, {},
        replicas or {}, {}, revision,
    )  # fmt: skip
    return write_part(head, layout, table, dict(packs), breathe)


def ref_of(id_: SnapshotId, rank: int, data: bytes) -> PartRef:
    return PartRef(PartName(id_, rank).key, len(data), digest128(data))


def decoded(id_: SnapshotId, datas: Sequence[bytes]) -> list[tuple[PartRef, Part]]:
    refs = [ref_of(id_, rank, data) for rank, data in enumerate(datas)]
    return [(ref, read_part(data, key=ref.key)) for ref, data in zip(refs, datas, strict=True)]


def put_step(
    store: Store,
    id_: SnapshotId,
    *,
    ranks: int = 1,
    reference: SnapshotId | None = None,
    leans: Iterable[Snapshot] = (),
    commit: bool = True,
    only: Iterable[int] | None = None,
    time: float | None = None,
    metrics: Mapping[str, Any] | None = None,
) -> Snapshot | None:
    """One step as the ranks of `only` (all) would leave it: packs, parts, and with `commit` the snapshot.

    Every part also names the packs of `leans`, as a delta does.
    """
    base = [pack for snapshot in leans for pack in snapshot.packs]
    datas = []
    for rank, layout in enumerate(shares(ranks)):
        if only is not None and rank not in only:
            continue
        packs = [*base, put_pack(store, id_, rank)]
        data = part_bytes(id_, rank, layout, packs, ranks=ranks, reference=reference, time=time, metrics=metrics)
        store.put(PartName(id_, rank).key, data)
        datas.append(data)
    if not commit:
        return None
    snapshot = build_snapshot(decoded(id_, datas))
    store.put(SnapshotName(id_).key, seal(snapshot))
    return snapshot


def put_line(store: Store, run: RunId, steps: Iterable[int], *, ranks: int = 1) -> list[SnapshotId]:
    """Committed steps, each a delta against the one before, whose packs it names."""
    last: Snapshot | None = None
    ids = []
    for step in steps:
        id_ = SnapshotId(run, step)
        leans = [] if last is None else [last]
        last = put_step(store, id_, ranks=ranks, reference=None if last is None else last.id, leans=leans)
        ids.append(id_)
    return ids


def put_keyframes(store: Store, run: RunId, steps: Iterable[int], *, ranks: int = 1) -> list[SnapshotId]:
    """Committed steps that lean on nothing."""
    return [s.id for step in steps if (s := put_step(store, SnapshotId(run, step), ranks=ranks)) is not None]


def whole(store: Store, snapshot: Snapshot) -> bool:
    """Whether everything a snapshot names is there, with the length it says."""
    sizes = {e.key: e.size for e in store.list("")}
    return all(sizes.get(p.key) == p.length for p in snapshot.parts) and all(
        sizes.get(key) == length for key, length in snapshot.packs
    )
