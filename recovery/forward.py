"""A snapshot and the journal after it: every saved rank is rolled forward in the layout that was saved, by whichever
rank can read its records; only then does the layout change (torch).

    documents   all parts, to all ranks: what each saved rank held is in its own first record
    read        of the snapshot, what the saved ranks held that this rank replays: mirrors, peers, store, as ever
    replay      record by record, each state proven by its checksums; all ranks stand on the lowest step proven
    exchange    pieces of the replayed states go where the live state wants them
    install     only now are live tensors written
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec
import numpy as np

from ckpt.errors import DamagedError, NoSnapshot
from ckpt.format.documents import digest128
from ckpt.format.journal import OpenRecord, Row
from ckpt.format.manifest import Part, ShardRow
from ckpt.format.names import SnapshotId
from ckpt.format.shards import DTYPES, Box, Shard
from ckpt.rolling import Bytes, Rolled
from recovery.agree import Alone, Skip, together
from recovery.assemble import Wanted
from recovery.attempt import Attempt, Documents
from recovery.boxes import carry_out, copies
from recovery.journaled import Records, ReplayPlan
from recovery.journaled_together import Journals
from recovery.meter import Meter
from recovery.parallel import THREADS
from recovery.pieces import Need, nbytes_of, place_of, sought
from recovery.place import Seat, merged, wants
from recovery.read import OpenSnapshot, check_part
from recovery.replay import Stopped, begin, device_of, first_record, roll_to
from recovery.shards import MEMORY
from storage_backends.base import Store


@dataclass(frozen=True, slots=True)
class Short:
    """The journal is proven up to `step` only. `why`: on the rank where it ended first."""

    step: int
    why: str


class _Held(msgspec.Struct, frozen=True, array_like=True):
    """What a replayed rank is, for all others."""

    saved: int
    rows: tuple[Row, ...]
    values: dict[str, bytes]
    aliases: dict[str, str]
    buffers: dict[str, str]


@dataclass(eq=False)
class Forward(Attempt):
    """One snapshot and `replay` of it.

    Attributes (once `rolled`): snapshot_parts: the snapshot's own; parts: what the replayed state would have.
    """

    records: Records = field(default_factory=Records)
    replay: ReplayPlan | None = None
    _rolled: dict[int, Rolled] = field(default_factory=dict)
    parts: dict[int, Part] = field(default_factory=dict)
    snapshot_parts: dict[int, Part] = field(default_factory=dict)

    def follow_on(self) -> Documents | Skip | Short:
        """`advance`, followed."""
        return self.followed(self.advance)

    def advance(self) -> Documents | Skip | Short:
        """`run`, with the replay before the live state is looked at."""
        rolled = self.rolled()
        if not isinstance(rolled, Documents):
            return rolled
        return self._into_live(rolled)

    def rolled(self) -> Documents | Skip | Short:
        """Replay, and tell all ranks what came of it; nothing live is looked at."""
        with self.meter.stage("documents"):
            found = self._snapshot()
        if isinstance(found, Skip):
            return found
        rolled = self._replayed(found)
        if not isinstance(rolled, dict):
            return rolled
        self._rolled = rolled
        with self.meter.stage("exchange"):
            self.parts = self._tell()
        return Documents(found.opened, self.parts, {})

    def _into_live(self, found: Documents) -> Documents | Skip:
        with self.meter.stage("exchange"):
            planned = together(
                self.peers, lambda: self._understood(found.opened, {}), wishes=lambda documents: documents.plan is None
            )
            if isinstance(planned, Skip):
                return planned
            documents = self._without_others(planned.value) if planned.wish else planned.value
            if isinstance(documents, Skip):
                return documents
            read = self._assemble(documents)
        return read if isinstance(read, Skip) else self._installed(documents, read)

    # --- the snapshot ----------------------------------------------------------------------------------------------

    def _snapshot(self) -> Documents | Skip:
        """All parts, on all ranks."""
        opened = self._opened()
        if isinstance(opened, Skip):
            return opened
        mine = range(self.peers.rank, opened.snapshot.world_size, self.peers.world_size)

        def share() -> dict[int, bytes]:
            with self._judged(opened):
                return self._read_raw(opened, mine)

        own = together(self.peers, share)
        if isinstance(own, Skip):
            return own
        raw = self._exchange(own.value)

        def checked() -> Documents:
            with self._judged(opened):
                parts = {rank: check_part(data, opened.snapshot, rank) for rank, data in sorted(raw.items())}
            return Documents(opened, parts, raw)

        every = together(self.peers, checked)
        if isinstance(every, Skip):
            return every
        self.snapshot_parts = dict(every.value.parts)
        return every.value

    # --- the replay ------------------------------------------------------------------------------------------------

    def _replayed(self, documents: Documents) -> dict[int, Rolled] | Skip | Short:
        assert self.replay is not None
        base, target = self.id.step, self.replay.target
        saved = [replay.saved for replay in self.replay.of(self.peers.rank)]
        world_size = documents.opened.snapshot.world_size
        firsts: dict[int, OpenRecord] = {}
        tables: dict[int, tuple[Shard, ...]] = {}

        def look() -> None:
            for q in saved:
                firsts[q] = first_record(self.store, self.records, self.id.run, q, base)
                tables[q] = _as_stored(firsts[q], documents.parts)

        looked = together(self.peers, look)
        if isinstance(looked, Skip):
            return Short(base, str(looked.error))

        def wanted() -> list[Wanted]:
            found = [w for q in saved for w in wants(tables[q], documents.parts, Seat(q, world_size))]
            return list(dict.fromkeys(found))

        read = self._boxes(documents, wanted, dict)
        if isinstance(read, Skip):
            return read

        def roll() -> tuple[dict[int, Rolled], Stopped]:
            rolled: dict[int, Rolled] = {}
            worst = Stopped(target, None)
            for q in saved:
                each = wants(tables[q], documents.parts, Seat(q, world_size))
                data = {want.shard: read[want].copy() for want in each}
                state = begin(documents.parts[q], tables[q], data, device_of(firsts[q]))
                count = partial(self.meter.count, "journal")
                stopped = roll_to(self.store, self.records, self.id.run, q, state, worst.step, count)
                worst = stopped if stopped.step < worst.step else worst
                rolled[q] = state
            return rolled, worst

        with self.meter.stage("replay"):
            done = together(self.peers, roll)
            if isinstance(done, Skip):
                return done
            rolled, worst = done.value
            told = [
                msgspec.json.decode(data, type=tuple[int, str])
                for data in self.peers.gather(msgspec.json.encode((worst.step, worst.why or "")))
            ]
        step, why = min(told)
        return rolled if step == target else Short(step, why)

    # --- the live state --------------------------------------------------------------------------------------------

    def _tell(self) -> dict[int, Part]:
        """What every saved rank has come to hold, on all ranks, in the words of a part."""
        mine = [
            _Held(q, tuple(map(Row.of, r.table)), r.values, r.aliases, _buffers(r)) for q, r in self._rolled.items()
        ]
        everyone = {
            held.saved: held
            for data in self.peers.gather(msgspec.msgpack.encode(mine))
            for held in msgspec.msgpack.decode(data, type=list[_Held])
        }
        differing = _differing([held.buffers for held in everyone.values()])
        return {
            q: msgspec.structs.replace(
                self.snapshot_parts[q],
                shards=tuple(_shard_row(row, differing, self._private(q)) for row in held.rows),
                values={name: msgspec.Raw(text) for name, text in held.values.items()},
                aliases=held.aliases,
                bundles=(),
            )
            for q, held in sorted(everyone.items())
        }

    def _private(self, saved: int) -> frozenset[str]:
        return frozenset(row.leaf for row in self.snapshot_parts[saved].shards if row.per_rank)

    def _understood(
        self,
        opened: OpenSnapshot,
        raw: Mapping[int, bytes],
        others: frozenset[str] | None = None,
    ) -> Documents:
        return self._planned(opened, self.parts, raw, others)

    def _assemble(self, documents: Documents) -> dict[Shard, Bytes] | Skip:
        """The bytes of every wanted box, from replayed states here and elsewhere."""
        assert documents.plan is not None and self.replay is not None
        parts, by, plan = self.parts, self.replay.by, documents.plan
        near = frozenset(self._rolled)
        found = together(self.peers, lambda: sought(wants(plan.wanted, parts, self.seat), parts, near))
        if isinstance(found, Skip):
            return found
        pieces = found.value
        lacking = sorted({piece for some in pieces.values() for piece in some if piece.saved not in near}, key=place_of)
        everyone = [
            msgspec.msgpack.decode(data, type=list[Need]) for data in self.peers.gather(msgspec.msgpack.encode(lacking))
        ]
        me = self.peers.rank
        out = {}
        for rank, needs in enumerate(everyone):
            mine = [self._piece(need) for need in needs if by[need.saved] == me]
            if mine and rank != me:
                out[rank] = np.concatenate(mine)
        sizes = {
            rank: size
            for rank in range(self.peers.world_size)
            if rank != me and (size := sum(nbytes_of(need, parts) for need in lacking if by[need.saved] == rank))
        }
        received = self.peers.exchange({r: data for r, data in out.items() if len(data)}, sizes)
        self.meter.count("peers", sum(len(data) for data in received.values()))
        got: dict[Need, Bytes] = {}
        for rank, data in received.items():
            at = 0
            for need in lacking:
                if by[need.saved] == rank:
                    got[need] = data[at : at + nbytes_of(need, parts)]
                    at += len(got[need])

        def read() -> dict[Shard, Bytes]:
            world_size = documents.opened.snapshot.world_size
            return merged(self._put_together(pieces, got), self.seat, world_size)

        done = together(self.peers, read)
        return done if isinstance(done, Skip) else done.value

    def boxes(self, wanted: Sequence[Wanted]) -> Iterator[tuple[Wanted, Bytes]]:
        """Boxes of the replayed state, where this process has replayed all saved ranks. Raises DamagedError."""
        return self._put_together(sought(wanted, self.parts, frozenset(self._rolled)), {})

    def _put_together(
        self, pieces: Mapping[Wanted, Sequence[Need]], got: Mapping[Need, Bytes]
    ) -> Iterator[tuple[Wanted, Bytes]]:
        for want, some in pieces.items():
            box, size = want.shard.box, DTYPES[want.shard.leaf.dtype].size
            data = np.empty(box.numel * size, np.uint8)
            for piece in some:
                copy = copies(Box(piece.offsets, piece.lengths), box, size)
                assert copy is not None, "pieces meet what they are for"
                carry_out(copy, got[piece] if piece in got else self._piece(piece), data)
            yield want, data

    def _piece(self, need: Need) -> Bytes:
        rolled = self._rolled[need.saved]
        held = next(shard for shard in rolled.table if shard.leaf.path == need.leaf)
        data, size = rolled.bytes_of(need.leaf), DTYPES[held.leaf.dtype].size
        box = Box(need.offsets, need.lengths)
        if box == held.box:
            return data
        out = np.empty(box.numel * size, np.uint8)
        copy = copies(held.box, box, size)
        assert copy is not None
        carry_out(copy, data, out)
        return out


def replayed(store: Store, base: SnapshotId, step: int) -> Forward:
    """All saved ranks of a snapshot's run, rolled forward in this process to a journaled step.

    Raises:
        NoSnapshot: the journal does not lead there, or not provably.
        DamagedError: the snapshot is damaged.
    """
    journals = Journals(store, Alone(), ())
    plan = journals.plan(base, step)
    why = "its records are not all there"
    if plan is not None and plan.target == step:
        forward = Forward(
            store, Alone(), Seat(0, 1), {}, base, None, Meter(), MEMORY, THREADS,
            records=journals.records(base.run), replay=plan,
        )  # fmt: skip
        found = forward.rolled()
        if isinstance(found, Documents):
            return forward
        if isinstance(found, Skip):
            raise found.error
        why = found.why
    raise NoSnapshot(
        f"step {step} on {store.url} cannot be replayed from snapshot {base.short}: {why}; 'ckpt list' shows what "
        "there is"
    )


def _as_stored(first: OpenRecord, parts: Mapping[int, Part]) -> tuple[Shard, ...]:
    """Of what the rank held at its first record, what the snapshot has: a replay makes missing slots by itself."""
    stored = {row.leaf: row.per_rank for part in parts.values() for row in part.shards}
    table = []
    for row in first.head.rows or ():
        shard = row.shard
        if shard.leaf.path in stored:
            table.append(Shard(shard.leaf, shard.box, stored[shard.leaf.path]))
        elif not shard.leaf.cls.startswith("slot:"):
            raise DamagedError(
                f"{shard.leaf.path}: in the journal, and not in the snapshot it extends",
                key="",
                step=first.head.step,
                rank=first.head.rank,
                leaf=shard.leaf.path,
                expected="a leaf of the snapshot",
                found="none",
            )
    return tuple(table)


def _buffers(rolled: Rolled) -> dict[str, str]:
    """Digest of every buffer that the rank holds whole."""
    return {
        shard.leaf.path: digest128(rolled.bytes_of(shard.leaf.path).tobytes())
        for shard in rolled.table
        if shard.leaf.cls == "buffer" and shard.box.lengths == shard.leaf.shape
    }


def _differing(everyone: Sequence[Mapping[str, str]]) -> frozenset[str]:
    """Buffers that are no longer equal on all ranks (BatchNorm): each rank's own from here on."""
    values: dict[str, set[str]] = {}
    for buffers in everyone:
        for path, digest in buffers.items():
            values.setdefault(path, set()).add(digest)
    return frozenset(path for path, found in values.items() if len(found) > 1)


def _shard_row(row: Row, differing: frozenset[str], private: frozenset[str]) -> ShardRow:
    own = row.per_rank or row.leaf in differing or row.leaf in private
    return ShardRow(row.leaf, row.cls, row.dtype, row.shape, (row.offsets, row.lengths), own)
