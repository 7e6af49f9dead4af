"""Who stores what: the layout all ranks agreed on, and when it has to be agreed on anew (torch).

Each rank's table of shards is gathered when any rank's has changed, or when module buffers that were equal on all
ranks no longer are (BatchNorm under DDP): such a buffer is a per-rank leaf from then on.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import msgspec

from ckpt.checksums import buffers_hash, checksums
from ckpt.format.layout import Layout, lay_out
from ckpt.format.nodes import node_extras
from ckpt.format.ownership import Ownership, decode_table, encode_table, share_out
from ckpt.format.relayout import cut_along
from ckpt.format.shards import Box, Leaf, Shard
from ckpt.leaves import Flat, LiveShard
from ckpt.ranks import Ranks


class _Word(msgspec.Struct, frozen=True, array_like=True):
    """What a rank says of itself: its shards, the hash of each buffer that others may hold too, and its node."""

    table: bytes
    buffers: dict[str, int]
    node: str


class Sharing:
    """The agreement of one process group. Only `agree` is collective.

    Attributes:
        ownership: who stores what; `layout`: this rank's share of it.
        extras: replicas that this rank mirrors for its `node` and does not store; nothing where `node` is "".
    """

    def __init__(self, ranks: Ranks, chunk: int, node: str = "") -> None:
        self._ranks = ranks
        self._chunk = chunk
        self._node = node
        self._table: tuple[Shard, ...] | None = None
        self._seen: tuple[LiveShard, ...] | None = None
        # Only grows, and only by what all ranks know: a rank must never decide alone what differs.
        self._differing: frozenset[str] = frozenset()
        self._everywhere: frozenset[str] = frozenset()
        self._old: Mapping[Leaf, Sequence[Box]] = {}
        self.ownership: Ownership | None = None
        self.layout: Layout | None = None
        self.extras = lay_out((), chunk)

    def changed(self, flat: Flat) -> bool:
        """Whether this rank's table of shards is not the one last agreed on."""
        if flat.shards is self._seen and self._table is not None:
            return False
        return self._table != tuple(live.shard for live in flat.shards)

    def buffers(self, flat: Flat) -> int:
        """63-bit hash of the buffers held to be equal on all ranks; 0 where nobody could differ."""
        if not self._everywhere:
            return 0
        return buffers_hash(flat, only=self._everywhere)[0]

    def agree(
        self, flat: Flat, *, differing: Collection[str] = (), old: Mapping[Leaf, Sequence[Box]] | None = None
    ) -> Layout:
        """Gather every rank's table and buffers, and share the state out. Collective.

        Args:
            differing: buffers that are per-rank leaves however equal they are now; each rank says its own.
            old: after a restore, the boxes in which the snapshot holds each leaf: what is stored is cut along their
                edges from now on, so that unchanged state is not stored again.

        Raises:
            LayoutMismatch: on every rank: the tables do not describe one state.
        """
        table = tuple(live.shard for live in flat.shards)
        if self._ranks.world_size == 1:
            tables: Sequence[Sequence[Shard]] = [table]
        else:
            mine = buffers_hash(flat)[1] | dict.fromkeys(differing, -1 - self._ranks.rank)
            word = msgspec.msgpack.encode(_Word(encode_table(table), mine, self._node))
            words = [msgspec.msgpack.decode(data, type=_Word) for data in self._ranks.gather(word)]
            self._compare([word.buffers for word in words])
            tables = self._all_marked([word.table for word in words])
            nodes = [word.node for word in words]
        self.ownership = share_out(tables, self._chunk)
        if self._node and self._ranks.world_size > 1:
            extras = node_extras(self.ownership, tables, nodes, self._node)
            self.extras = lay_out(extras[self._ranks.rank], self._chunk)
        if old is not None:
            self._old = old
        # Each rank cuts its own shards only, after the ownership: nobody needs to know where another one cuts.
        self.layout = lay_out(cut_along(self.ownership.owned[self._ranks.rank], self._old), self._chunk)
        # Last: where the tables do not fit together, all ranks raise, and the next save asks again.
        self._table, self._seen = table, flat.shards
        return self.layout

    def marked(self, flat: Flat) -> Flat:
        """The state with buffers that differ between ranks declared per rank."""
        if not self._differing:
            return flat
        shards = [LiveShard(self._marked(live.shard), live.tensor) for live in flat.shards]
        return replace(flat, shards=tuple(sorted(shards, key=lambda live: live.shard)))

    def checksums(self, flat: Flat) -> dict[str, str]:
        """``"<leaf> <box>"`` → checksum of every parameter and optimizer tensor this rank holds a replica of."""
        assert self.ownership is not None, "agree() comes first"
        replicated = set(self.ownership.replicated)
        compared = [
            live
            for live in flat.shards
            if (live.shard.leaf.path, live.shard.box) in replicated
            and not live.shard.per_rank
            and live.shard.leaf.cls != "buffer"
        ]
        names = (f"{live.shard.leaf.path} {live.shard.box}" for live in compared)
        return dict(zip(names, checksums([live.tensor for live in compared]), strict=True))

    def _compare(self, everyone: Sequence[Mapping[str, int]]) -> None:
        """Find the buffers that differ. One that only some of the ranks hold (a pipeline stage that is replicated) is
        per rank from the start: the single hash in the vote is of what all of them hold."""
        values: dict[str, list[int]] = {}
        for hashes in everyone:
            for path, value in hashes.items():
                values.setdefault(path, []).append(value)
        alone = {path for path, found in values.items() if len(found) == 1 and found[0] >= 0}
        equal = {path for path, found in values.items() if len(found) == len(everyone) and len(set(found)) == 1}
        self._differing |= values.keys() - alone - equal
        self._everywhere = frozenset(equal - self._differing)

    def _all_marked(self, tables: Sequence[bytes]) -> list[tuple[Shard, ...]]:
        # Equal tables stay one object: `share_out` sees by identity that everything is replicated.
        known: dict[bytes, tuple[Shard, ...]] = {}
        for data in tables:
            if data not in known:
                known[data] = tuple(map(self._marked, decode_table(data)))
        return [known[data] for data in tables]

    def _marked(self, shard: Shard) -> Shard:
        if shard.leaf.path not in self._differing or shard.per_rank:
            return shard
        return replace(shard, per_rank=True)
