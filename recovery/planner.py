"""What a recovery will do: for every chunk that every rank wants, the cheapest place that still has it. Pure.

    Keep      in this rank's own mirror
    Copy      in another mirror on this node
    Receive   from a peer, over the process group
    Fetch     from the store

in this order, so that nothing is fetched that is held nearer. A rank whose own mirror has all of a part keeps it as
one entry; only what was lost is taken apart into chunks, and there columns of numbers stand for objects: a job of a
thousand ranks that lost eight of them is planned in about a second.

Refused: a search for the least total time over all sources. It would save little (a peer that is slower than the
store is no peer worth having), and nobody could check its answer by hand.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from recovery.holdings import Chunks, Holding, Mask, one_of_each
from recovery.loads import Demand, alike, level
from recovery.quantities import bytes_text
from recovery.requests import PackReads, merged_reads
from recovery.tables import Ints, Table, unique


@dataclass(frozen=True, slots=True)
class Keep:
    """From this rank's own mirror."""

    chunks: tuple[Chunks, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Copy:
    """From the mirror of `rank`, on the same node."""

    rank: int
    chunks: tuple[Chunks, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Receive:
    """From `rank`, over the process group."""

    rank: int
    chunks: tuple[Chunks, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Fetch:
    """From the store. `nbytes` are read; `useful` of them are blobs, the rest gaps between blobs that are read
    through. `raw`: what the blobs decode to."""

    chunks: tuple[Chunks, ...]
    packs: tuple[PackReads, ...]
    nbytes: int
    useful: int
    raw: int

    @property
    def requests(self) -> int:
        return sum(reads.requests for reads in self.packs)


Action: TypeAlias = Keep | Copy | Receive | Fetch


@dataclass(frozen=True, slots=True)
class RankPlan:
    """What one rank of the new job does, cheapest first."""

    rank: int
    actions: tuple[Action, ...]

    def nbytes(self, kind: type[Action]) -> int:
        return sum(action.nbytes for action in self.actions if isinstance(action, kind))

    @property
    def requests(self) -> int:
        return sum(action.requests for action in self.actions if isinstance(action, Fetch))


@dataclass(frozen=True, slots=True)
class Plan:
    """What all ranks do. Printed, it is a table."""

    ranks: tuple[RankPlan, ...]

    def total(self, kind: type[Action]) -> int:
        """Bytes of all ranks from one kind of source."""
        return sum(rank.nbytes(kind) for rank in self.ranks)

    @property
    def sent(self) -> dict[int, int]:
        """Rank → bytes that it sends to others."""
        sent: dict[int, int] = {}
        for rank in self.ranks:
            for action in rank.actions:
                if isinstance(action, Receive):
                    sent[action.rank] = sent.get(action.rank, 0) + action.nbytes
        return sent

    def __str__(self) -> str:
        return "\n".join(_lines(self))


@dataclass(frozen=True, slots=True)
class Stored:
    """The parts of a snapshot, as far as a plan needs them: the raw bytes of each by rank, and the chunks of those
    that may have to be taken apart."""

    sizes: Sequence[int]
    tables: Mapping[int, Table]

    def counts(self) -> dict[int, int]:
        return {part: table.count for part, table in self.tables.items()}


def plan(
    nodes: Sequence[int],
    wants: Mapping[int, Sequence[Chunks]],
    stored: Stored,
    holdings: Sequence[Holding],
) -> Plan:
    """Work out where everything that is wanted comes from.

    Args:
        nodes: the node of every rank of the new job.
        wants: rank of the new job → chunks it wants, in any order; a chunk named twice is wanted once.
        stored: every part that one rank wants and does not hold whole must have its table there.
        holdings: what was found in mirrors, digests checked.

    Raises:
        ValueError: a table is missing, or a chunk or a rank named that does not exist.
    """
    return _Planning(nodes, stored, holdings).run(wants)


@dataclass(slots=True)
class _Need:
    """What a rank still lacks of one part; `mask` None: all of it."""

    rank: int
    part: int
    mask: Mask | None


@dataclass(slots=True)
class _Planning:
    nodes: Sequence[int]
    stored: Stored
    holdings: Sequence[Holding]
    counts: dict[int, int] = field(init=False)
    actions: dict[int, list[Action]] = field(init=False)

    def __post_init__(self) -> None:
        self.counts = self.stored.counts()
        self.actions = {}
        for holding in self.holdings:
            if not 0 <= holding.rank < len(self.nodes):
                raise ValueError(f"a holding of rank {holding.rank}, of {len(self.nodes)}")

    def run(self, wants: Mapping[int, Sequence[Chunks]]) -> Plan:
        own: dict[int, list[Holding]] = {}
        node: dict[int, list[Holding]] = {}
        for holding in sorted(self.holdings, key=lambda h: h.rank):
            own.setdefault(holding.rank, []).append(holding)
            node.setdefault(self.nodes[holding.rank], []).append(holding)
        lacking: list[_Need] = []
        for rank in sorted(wants):
            actions = self.actions[rank] = []
            left = one_of_each(wants[rank], self._counted(wants[rank]))
            actions.extend(Keep(*got) for _, got in self._taken(own.get(rank, ()), left))
            near = (holding for holding in node.get(self.nodes[rank], ()) if holding.rank != rank)
            actions.extend(Copy(source, *got) for source, got in self._taken(near, left))
            lacking.extend(_Need(rank, part, left[part]) for part in sorted(left))
        self._fetch(self._receive(lacking))
        return Plan(tuple(RankPlan(rank, tuple(actions)) for rank, actions in self.actions.items()))

    def _taken(
        self, holdings: Iterable[Holding], left: dict[int, Mask | None]
    ) -> Iterator[tuple[int, tuple[tuple[Chunks, ...], int]]]:
        for holding in holdings:
            if left and (got := self._take(holding, left)) is not None:
                yield holding.rank, got

    def _counted(self, chunks: Sequence[Chunks]) -> dict[int, int]:
        return {some.part: self._table(some.part).count for some in chunks if some.runs is not None}

    def _table(self, part: int) -> Table:
        if part not in self.stored.tables:
            raise ValueError(f"part {part} has to be taken apart, and its table is not there")
        return self.stored.tables[part]

    def _take(self, holding: Holding, left: dict[int, Mask | None]) -> tuple[tuple[Chunks, ...], int] | None:
        """What `holding` has of what is left; it is left no longer."""
        taken: list[Chunks] = []
        nbytes = 0
        for some in holding.chunks:
            if some.part not in left:
                continue
            mask = left[some.part]
            if some.runs is None and mask is None:
                taken.append(some)
                nbytes += self.stored.sizes[some.part]
                del left[some.part]
                continue
            table = self._table(some.part)
            wanted = np.ones(table.count, np.bool_) if mask is None else mask
            got = wanted & some.mask(table.count)
            if not got.any():
                continue
            taken.append(Chunks.of(some.part, got))
            nbytes += int(table.sizes[got].sum())
            if (rest := wanted & ~got).any():
                left[some.part] = rest
            else:
                del left[some.part]
        return (tuple(taken), nbytes) if taken else None

    def _receive(self, lacking: Sequence[_Need]) -> Iterator[tuple[int, int, Mask]]:
        """Deal out what peers hold; yields (rank, part, chunks) of what nobody does."""
        holders: dict[int, dict[int, list[Chunks]]] = {}
        for holding in self.holdings:
            for some in holding.chunks:
                if some.runs == ():
                    continue
                holders.setdefault(some.part, {}).setdefault(holding.rank, []).append(some)
        demands: list[Demand] = []
        nobody: list[tuple[int, int, Mask]] = []
        for need in lacking:
            table = self._table(need.part)
            wanted = np.ones(table.count, np.bool_) if need.mask is None else need.mask
            peers = sorted(r for r in holders.get(need.part, ()) if self.nodes[r] != self.nodes[need.rank])
            held = [one_of_each(holders[need.part][r], self.counts)[need.part] for r in peers]
            for numbers, having in alike(wanted, held):
                if having:
                    senders = tuple(peers[i] for i in having)
                    demands.append(Demand(need.rank, need.part, numbers, table.sizes[numbers], senders))
                else:
                    mask = np.zeros(table.count, np.bool_)
                    mask[numbers] = True
                    nobody.append((need.rank, need.part, mask))
        received: dict[tuple[int, int], tuple[list[Chunks], int]] = {}
        for demand, sender, which in level(demands, len(self.nodes)):
            mask = np.zeros(self.counts[demand.part], np.bool_)
            mask[demand.numbers[which]] = True
            chunks, nbytes = received.get((demand.rank, sender), ([], 0))
            chunks.append(Chunks.of(demand.part, mask))
            received[demand.rank, sender] = (chunks, nbytes + int(demand.sizes[which].sum()))
        for (rank, sender), (chunks, nbytes) in sorted(received.items()):
            self.actions[rank].append(Receive(sender, self._joined(chunks), nbytes))
        return iter(nobody)

    def _joined(self, chunks: Sequence[Chunks]) -> tuple[Chunks, ...]:
        """One entry per part."""
        found = one_of_each(chunks, self.counts)
        return tuple(
            Chunks(part) if mask is None else Chunks.of(part, mask) for part, mask in sorted(found.items())
        )  # fmt: skip

    def _fetch(self, nobody: Iterator[tuple[int, int, Mask]]) -> None:
        by_rank: dict[int, list[tuple[int, Mask]]] = {}
        for rank, part, mask in nobody:
            by_rank.setdefault(rank, []).append((part, mask))
        for rank, lost in sorted(by_rank.items()):
            raw = sum(int(self._table(part).sizes[mask].sum()) for part, mask in lost)
            packs, useful = self._reads(lost)
            nbytes = sum(reads.nbytes for reads in packs)
            self.actions[rank].append(Fetch(tuple(Chunks.of(*one) for one in lost), packs, nbytes, useful, raw))

    def _reads(self, lost: Sequence[tuple[int, Mask]]) -> tuple[tuple[PackReads, ...], int]:
        """Every blob once, though chunks share some; packs that parts share are one."""
        numbers: dict[str, int] = {}
        columns: list[tuple[Ints, Ints, Ints]] = []
        for part, mask in lost:
            table = self._table(part)
            here = np.array([numbers.setdefault(key, len(numbers)) for key in table.packs], np.int64)
            which = table.blobs(mask)
            columns.append((here[table.pack[which]], table.start[which], table.stop[which]))
        pack, start, stop = (np.concatenate(column) for column in zip(*columns, strict=True))
        order = unique(pack, start, stop)
        pack, start, stop = pack[order], start[order], stop[order]
        return merged_reads(tuple(numbers), pack, start, stop), int((stop - start).sum())


SHOWN = 24
"""Ranks that a printed plan lists one by one."""


def _lines(made: Plan) -> Iterator[str]:
    fetched = sum(action.useful for rank in made.ranks for action in rank.actions if isinstance(action, Fetch))
    requests = sum(rank.requests for rank in made.ranks)
    totals = {kind: made.total(kind) for kind in (Keep, Copy, Receive, Fetch)}
    yield f"keep     {bytes_text(totals[Keep]):>9}  in the ranks' own mirrors"
    yield f"copy     {bytes_text(totals[Copy]):>9}  from other mirrors on the node"
    yield f"receive  {bytes_text(totals[Receive]):>9}  from {len(made.sent)} peers"
    yield (
        f"fetch    {bytes_text(totals[Fetch]):>9}  from the store in {requests:,} requests, "
        f"of which blobs {bytes_text(fetched)}"
    )
    busy = [rank for rank in made.ranks if any(not isinstance(action, Keep) for action in rank.actions)]
    if len(busy) < len(made.ranks):
        yield f"{len(made.ranks) - len(busy)} of {len(made.ranks)} ranks keep all they want"
    if busy:
        yield f"{'rank':>6} {'keep':>9} {'copy':>9} {'receive':>9} {'fetch':>9}  requests"
    for rank in busy[:SHOWN]:
        cells = " ".join(f"{bytes_text(rank.nbytes(kind)):>9}" for kind in (Keep, Copy, Receive, Fetch))
        yield f"{rank.rank:>6} {cells}  {rank.requests:>8,}"
    if len(busy) > SHOWN:
        yield f"   and {len(busy) - SHOWN} more"
