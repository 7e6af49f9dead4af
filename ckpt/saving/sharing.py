"""Who stores what: the layout all ranks agreed on, and when it has to be agreed on anew (torch).

Each rank's table of shards is gathered when any rank's has changed, or when module buffers that were equal on all
ranks no longer are (BatchNorm under DDP): such a buffer is a per-rank leaf from then on.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from ckpt.format.layout import Layout, lay_out
from ckpt.format.ownership import Ownership, decode_table, encode_table, share_out
from ckpt.format.shards import Shard
from ckpt.leaves import Flat, LiveShard
from ckpt.ranks import Ranks
from ckpt.saving.checksums import buffers_hash, checksums


class Sharing:
    """The agreement of one process group. Only `agree` is collective."""

    def __init__(self, ranks: Ranks, chunk: int) -> None:
        self._ranks = ranks
        self._chunk = chunk
        self._table: tuple[Shard, ...] | None = None
        self._seen: tuple[LiveShard, ...] | None = None
        # Only grows, and only by gathers that all ranks share: a rank must never decide alone what differs.
        self._differing: frozenset[str] = frozenset()
        self.ownership: Ownership | None = None
        self.layout: Layout | None = None

    def changed(self, flat: Flat) -> bool:
        """Whether this rank's table of shards is not the one last agreed on."""
        if flat.shards is self._seen and self._table is not None:
            return False
        return self._table != tuple(live.shard for live in flat.shards)

    def buffers(self, flat: Flat) -> int:
        """63-bit hash of the buffers held to be equal on all ranks; 0 where nobody could differ."""
        if self._ranks.world_size == 1:
            return 0
        return buffers_hash(flat, skip=self._differing)[0]

    def agree(self, flat: Flat) -> Layout:
        """Gather every rank's table and buffers, and share the state out. Collective.

        Raises:
            LayoutMismatch: on every rank: the tables do not describe one state.
        """
        table = tuple(live.shard for live in flat.shards)
        if self._ranks.world_size > 1:
            self._find_differing(flat)
        marked = tuple(live.shard for live in self.marked(flat).shards)
        if self._ranks.world_size == 1:
            tables = [marked]
        else:
            tables = [decode_table(data) for data in self._ranks.gather(encode_table(marked))]
        self.ownership = share_out(tables, self._chunk)
        self.layout = lay_out(self.ownership.owned[self._ranks.rank], self._chunk)
        # Last: where the tables do not fit together, all ranks raise, and the next save asks again.
        self._table, self._seen = table, flat.shards
        return self.layout

    def marked(self, flat: Flat) -> Flat:
        """The state with buffers that differ between ranks declared per rank."""
        if not self._differing:
            return flat
        shards = [
            LiveShard(replace(live.shard, per_rank=True), live.tensor)
            if live.shard.leaf.path in self._differing
            else live
            for live in flat.shards
        ]
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

    def _find_differing(self, flat: Flat) -> None:
        _, mine = buffers_hash(flat, skip=frozenset())
        everyone = [
            msgspec.json.decode(data, type=dict[str, int]) for data in self._ranks.gather(msgspec.json.encode(mine))
        ]
        values: dict[str, set[int]] = {}
        for hashes in everyone:
            for path, value in hashes.items():
                values.setdefault(path, set()).add(value)
        self._differing |= {path for path, found in values.items() if len(found) > 1}
