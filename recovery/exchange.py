"""What ranks give each other when they come back: chunks that one lacks and another's node still mirrors.

    ask      every rank that lacks something names the chunks (digest, and where they lie in the state), to all
    offer    every rank says which of them its records have a place for, to all
    share    all work out the same senders, levelled by bytes (`loads.level`): nobody decides alone
    send     in rounds of bounded size; a chunk is read, checked, sent, checked again, and put where it goes

A sender that finds its bytes wrong says so in their place, and the chunk is asked for again, of others. Everything is
collective, on the main thread, and a rank that fails in between goes on taking part with empty hands: the error is
told at the end, when all can hear it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import msgspec
import numpy as np
import zstandard

from ckpt.format.manifest import chunk_digest
from ckpt.format.names import SnapshotId
from recovery.agree import Peers
from recovery.assemble import ChunkJob
from recovery.boxes import Bytes
from recovery.holdings import Mask
from recovery.loads import Demand, alike, level
from recovery.parallel import THREADS, in_threads
from recovery.reading import Delivered, Reading
from recovery.spans import Describer, StoredChunk
from recovery.survey import Holdings

ROUND = 32 * 1024 * 1024
"""Bytes that a rank sends, and receives, at most at once; a single chunk may exceed it."""

TURNS = 4
"""How often is asked. Each turn after the first is for chunks whose senders turned out to have something else."""

T = TypeVar("T")


class _Word(msgspec.Struct, frozen=True, array_like=True):
    """How much a rank lacks, and which mirror files it has looked into: who looks into the same has nothing new."""

    lacking: int
    files: frozenset[str]


class _Asking(msgspec.Struct, frozen=True, array_like=True):
    """What a rank lacks; and by rank the numbers of those chunks that it did not get there."""

    chunks: list[StoredChunk]
    refused: dict[int, list[int]]


@dataclass(slots=True)
class Received:
    """What came from peers: boxes that are whole now, bytes, and what went wrong on this rank."""

    boxes: Delivered = field(default_factory=list)
    nbytes: int = 0
    error: Exception | None = None


def from_peers(
    peers: Peers,
    reading: Reading,
    describer: Describer,
    holdings: Holdings | None,
    id_: SnapshotId,
    *,
    threads: int = THREADS,
    limit: int = ROUND,
) -> Received:
    """Fill in what peers hold of the lacking chunks, and give them what they lack. Collective.

    Args:
        holdings: of this node; None holds nothing.
        limit: most bytes of one round.
    """
    trade = _Trade(peers, reading, describer, holdings, id_, threads, limit)
    if peers.world_size > 1:
        trade.run()
    return trade.received


@dataclass(slots=True, eq=False)
class _Trade:
    peers: Peers
    reading: Reading
    describer: Describer
    holdings: Holdings | None
    id: SnapshotId
    threads: int
    limit: int
    received: Received = field(default_factory=Received)
    jobs: Sequence[ChunkJob] = ()
    refused: dict[ChunkJob, set[int]] = field(default_factory=dict)
    # Ranks that have looked into every file that this one could look into.
    informed: frozenset[int] = frozenset()

    def run(self) -> None:
        for _ in range(TURNS):
            asking = self._ask()
            if not asking:
                return
            lots = _shared_out(asking, self._offer(asking), self.peers.world_size)
            if not lots:
                return
            self._send(asking, lots)

    def _safely(self, do: Callable[[], T], otherwise: T) -> T:
        """A failure here must not keep the peers waiting: from then on this rank has nothing and asks for nothing."""
        if self.received.error is None:
            try:
                return do()
            except Exception as error:
                self.received.error = error
        return otherwise

    def _ask(self) -> dict[int, _Asking]:
        """By rank what is lacking, of those that lack something and have not seen what this rank has."""
        self.jobs = self._safely(lambda: self.reading.lacking, ())
        mine = self._safely(self._asking, None) if self.jobs else None
        files = frozenset[str]() if self.holdings is None else self.holdings.identity
        word = _Word(0 if mine is None else len(self.jobs), files)
        words = [msgspec.msgpack.decode(d, type=_Word) for d in self.peers.gather(msgspec.msgpack.encode(word))]
        self.informed = frozenset(r for r, other in enumerate(words) if files <= other.files)
        asking: dict[int, _Asking] = {}
        same: dict[bytes, _Asking] = {}  # ranks of a node that came back empty lack the same: decoded, searched once
        for rank, each in enumerate(words):
            if each.lacking:
                # Each by a broadcast of its own: a gather pads every rank's list to the longest, a thousand times.
                data = self.peers.broadcast(mine if rank == self.peers.rank else None, rank)
                asking[rank] = same[data] if data in same else same.setdefault(data, _unpacked(data))
        return asking

    def _asking(self) -> bytes:
        refused: dict[int, list[int]] = {}
        for n, job in enumerate(self.jobs):
            for rank in self.refused.get(job, ()):
                refused.setdefault(rank, []).append(n)
        asking = _Asking([self.describer.chunk(job) for job in self.jobs], refused)
        return zstandard.ZstdCompressor(level=1).compress(msgspec.msgpack.encode(asking))

    def _offer(self, asking: Mapping[int, _Asking]) -> list[dict[int, Mask]]:
        """By rank what it offers to whom."""
        nothing: dict[int, Mask] = {}
        found = self._safely(lambda: self._found(asking), nothing)
        packed = {rank: np.packbits(mask).tobytes() for rank, mask in found.items()}
        told = self.peers.gather(msgspec.msgpack.encode(packed))
        return [
            {
                rank: np.unpackbits(np.frombuffer(bits, np.uint8), count=len(asking[rank].chunks)).astype(np.bool_)
                for rank, bits in msgspec.msgpack.decode(data, type=dict[int, bytes]).items()
            }
            for data in told
        ]

    def _found(self, asking: Mapping[int, _Asking]) -> dict[int, Mask]:
        if self.holdings is None:
            return {}
        found: dict[int, Mask] = {}
        looked: dict[int, Mask] = {}
        for rank, asked in asking.items():
            if rank in self.informed:
                continue
            if id(asked) not in looked:
                offers = (self.holdings.offers(chunk, self.id) for chunk in asked.chunks)
                looked[id(asked)] = np.fromiter(offers, np.bool_, len(asked.chunks))
            mask = looked[id(asked)].copy()
            mask[asked.refused.get(self.peers.rank, [])] = False
            if mask.any():
                found[rank] = mask
        return found

    def _send(self, asking: Mapping[int, _Asking], lots: Mapping[tuple[int, int], Sequence[int]]) -> None:
        me = self.peers.rank
        rounds = _rounds(asking, lots, self.limit)
        for n in range(max(map(len, rounds.values()))):
            now = {pair: cut[n] for pair, cut in rounds.items() if n < len(cut)}
            out = {
                dst: self._packed([asking[dst].chunks[i] for i in numbers])
                for (src, dst), numbers in now.items()
                if src == me
            }
            coming = {src: numbers for (src, dst), numbers in now.items() if dst == me}
            sizes = {src: _size([asking[me].chunks[i] for i in numbers]) for src, numbers in coming.items()}
            for src, data in self.peers.exchange(out, sizes).items():
                self._safely(partial(self._place, src, coming[src], asking[me], data), None)

    def _packed(self, chunks: Sequence[StoredChunk]) -> Bytes:
        """One byte for each chunk that says whether it is there, then the bytes of all, there or not."""
        data = np.zeros(_size(chunks), np.uint8)
        holdings = self.holdings
        assert holdings is not None, "only offered chunks are asked for"

        def read(place: tuple[int, StoredChunk, int]) -> None:
            n, chunk, at = place
            data[n] = holdings.take(chunk, self.id, data[at : at + chunk.nbytes]) is not None

        self._safely(lambda: self._each(read, _places(chunks)), None)
        return data

    def _place(self, src: int, numbers: Sequence[int], asked: _Asking, data: Bytes) -> None:
        def put(place: tuple[int, StoredChunk, int]) -> Delivered | None:
            n, chunk, at = place
            piece = data[at : at + chunk.nbytes]

            def fill(out: Bytes) -> bool:
                out[:] = piece
                return chunk_digest(chunk.dtype, out) == chunk.digest

            done = self.reading.deliver(self.jobs[numbers[n]], fill) if data[n] else None
            if done is None:
                self.refused.setdefault(self.jobs[numbers[n]], set()).add(src)
            return done

        places = _places([asked.chunks[i] for i in numbers])
        for (_, chunk, _), done in self._each(put, places):
            if done is not None:
                self.received.boxes.extend(done)
                self.received.nbytes += chunk.nbytes

    def _each(
        self, do: Callable[[tuple[int, StoredChunk, int]], T], places: Sequence[tuple[int, StoredChunk, int]]
    ) -> list[tuple[tuple[int, StoredChunk, int], T]]:
        return list(in_threads(places, lambda place: (place, do(place)), threads=min(self.threads, len(places))))


def _unpacked(data: bytes) -> _Asking:
    return msgspec.msgpack.decode(zstandard.ZstdDecompressor().decompress(data), type=_Asking)


def _shared_out(
    asking: Mapping[int, _Asking], offers: Sequence[Mapping[int, Mask]], ranks: int
) -> dict[tuple[int, int], list[int]]:
    """(sender, receiver) → numbers of chunks, ascending. Computed alike by all."""
    demands: list[Demand] = []
    for rank, asked in sorted(asking.items()):
        holders = [holder for holder, offered in enumerate(offers) if rank in offered]
        sizes = np.array([chunk.nbytes for chunk in asked.chunks], np.int64)
        for numbers, having in alike(np.ones(len(sizes), np.bool_), [offers[holder][rank] for holder in holders]):
            if having:
                demands.append(Demand(rank, 0, numbers, sizes[numbers], tuple(holders[i] for i in having)))
    lots: dict[tuple[int, int], list[int]] = {}
    for demand, sender, which in level(demands, ranks):
        lots.setdefault((sender, demand.rank), []).extend(demand.numbers[which].tolist())
    return {pair: sorted(numbers) for pair, numbers in sorted(lots.items())}


def _rounds(
    asking: Mapping[int, _Asking], lots: Mapping[tuple[int, int], Sequence[int]], limit: int
) -> dict[tuple[int, int], list[list[int]]]:
    """Every lot cut so that no rank sends or receives more than `limit` bytes at once."""
    busy: dict[tuple[str, int], int] = {}
    for src, dst in lots:
        for end in (("from", src), ("to", dst)):
            busy[end] = busy.get(end, 0) + 1
    rounds: dict[tuple[int, int], list[list[int]]] = {}
    for (src, dst), numbers in lots.items():
        share = limit // max(busy["from", src], busy["to", dst])
        cuts: list[list[int]] = []
        size = share
        for n in numbers:
            nbytes = asking[dst].chunks[n].nbytes
            if not cuts or size + nbytes > share:
                cuts.append([])
                size = 0
            cuts[-1].append(n)
            size += nbytes
        rounds[src, dst] = cuts
    return rounds


def _size(chunks: Sequence[StoredChunk]) -> int:
    return len(chunks) + sum(chunk.nbytes for chunk in chunks)


def _places(chunks: Sequence[StoredChunk]) -> list[tuple[int, StoredChunk, int]]:
    """(number, chunk, where its bytes begin) of each."""
    places = []
    at = len(chunks)
    for n, chunk in enumerate(chunks):
        places.append((n, chunk, at))
        at += chunk.nbytes
    return places
