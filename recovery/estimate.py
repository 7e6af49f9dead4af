"""How long a plan takes, from given bandwidths. Pure; a forecast, not a promise.

For every rank the seconds of its sources are added, since one set of threads works them off:

    keep / memory  +  copy / node  +  max(received, sent) / network
        +  max(read / store, requests * latency / in_flight)

Ranks work side by side, so the slowest one decides; and the store as a whole may be a narrower door than all ranks'
own connections together:

    seconds = max(slowest rank, bytes read by all / store_total)

`memory` and `node` include the digests that are taken of every byte before it is used, `store` what it takes to decode.
"""

from __future__ import annotations

from dataclasses import dataclass

from recovery.planner import Copy, Fetch, Keep, Plan, RankPlan, Receive
from recovery.quantities import seconds_text


@dataclass(frozen=True, slots=True)
class Bandwidths:
    """Bytes per second of one rank, and seconds per request.

    Attributes:
        memory: out of the rank's own mirror.
        node: out of another mirror on the node.
        network: between ranks, each way.
        store: out of the store.
        store_total: what the store gives to all ranks together; None: as much as they can take.
        latency: seconds of one request to the store.
        in_flight: requests that a rank has under way at once.
    """

    memory: float = 4e9
    node: float = 4e9
    network: float = 1e9
    store: float = 500e6
    store_total: float | None = None
    latency: float = 0.02
    in_flight: float = 8


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds of the whole plan, and of its slowest rank by source."""

    seconds: float
    slowest: int
    by_source: dict[str, float]

    def __str__(self) -> str:
        shown = ", ".join(f"{name} {seconds_text(s)}" for name, s in self.by_source.items() if s)
        return f"about {seconds_text(self.seconds)} (slowest rank {self.slowest}: {shown or 'nothing to do'})"


def estimate(plan: Plan, given: Bandwidths) -> Estimate:
    """The formula above. A plan without ranks takes no time."""
    sent = plan.sent
    each = {rank.rank: _seconds(rank, sent.get(rank.rank, 0), given) for rank in plan.ranks}
    for rank, nbytes in sent.items():  # one that wants nothing may still send
        each.setdefault(rank, {"network": nbytes / given.network})
    if not each:
        return Estimate(0.0, 0, {})
    slowest = max(each, key=lambda rank: (sum(each[rank].values()), -rank))
    seconds = max(sum(each[slowest].values()), _door(plan.total(Fetch), given))
    return Estimate(seconds, slowest, each[slowest])


def _seconds(rank: RankPlan, sent: int, given: Bandwidths) -> dict[str, float]:
    return {
        "memory": rank.nbytes(Keep) / given.memory,
        "node": rank.nbytes(Copy) / given.node,
        "network": max(rank.nbytes(Receive), sent) / given.network,
        "store": _from_store(rank.nbytes(Fetch), rank.requests, given),
    }


def _from_store(nbytes: int, requests: int, given: Bandwidths) -> float:
    return max(nbytes / given.store, requests * given.latency / given.in_flight)


def _door(nbytes: int, given: Bandwidths) -> float:
    return 0.0 if given.store_total is None else nbytes / given.store_total
