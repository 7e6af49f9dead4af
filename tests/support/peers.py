"""Ranks of a job as threads of one test: the collectives of `ckpt.ranks.Ranks` over a barrier, without torch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TypeVar

from recovery.boxes import Bytes

T = TypeVar("T")


class Table:
    """What the ranks of one job share."""

    def __init__(self, world_size: int, timeout: float = 30.0) -> None:
        self.barrier = threading.Barrier(world_size, timeout=timeout)
        self.slots: list[bytes | None] = [None] * world_size
        self.sent: list[dict[int, Bytes]] = [{} for _ in range(world_size)]


class ThreadRanks:
    """One rank. Who never comes breaks the barrier for all, after its timeout: a hang becomes a failure."""

    def __init__(self, table: Table, rank: int, world_size: int) -> None:
        self._table = table
        self.rank = rank
        self.world_size = world_size
        self.collectives = 0

    def gather(self, data: bytes) -> list[bytes]:
        return [each for each in self._share(data) if each is not None]

    def broadcast(self, data: bytes | None, src: int = 0) -> bytes:
        assert (data is not None) == (self.rank == src)
        found = self._share(data)[src]
        assert found is not None
        return found

    def exchange(self, out: Mapping[int, Bytes], sizes: Mapping[int, int]) -> dict[int, Bytes]:
        """As gloo does it, but both sides' words are compared."""
        self._table.sent[self.rank] = dict(out)
        self._share(b"")
        sent = {src: each[self.rank] for src, each in enumerate(self._table.sent) if self.rank in each}
        assert {src: data.nbytes for src, data in sent.items()} == dict(sizes), f"rank {self.rank}"
        self._share(b"")
        return {src: data.copy() for src, data in sent.items()}

    def _share(self, data: bytes | None) -> list[bytes | None]:
        self.collectives += 1
        self._table.slots[self.rank] = data
        self._table.barrier.wait()
        found = list(self._table.slots)
        self._table.barrier.wait()  # nobody overwrites a slot before all have read
        return found


def on_ranks(world_size: int, call: Callable[[ThreadRanks], T]) -> list[T | Exception]:
    """Run `call` on every rank at once; what each returned or raised, by rank. All make equally many collectives."""
    table = Table(world_size)
    results: list[T | Exception] = [AssertionError("never ran")] * world_size
    ranks = [ThreadRanks(table, rank, world_size) for rank in range(world_size)]

    def work(rank: int) -> None:
        try:
            results[rank] = call(ranks[rank])
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({each.collectives for each in ranks}) == 1, "the ranks made different numbers of collectives"
    return results
