"""Laws of plans: everything wanted exactly once, nothing farther than it need be, the same plan twice, level senders,
and no byte from the store that is not part of a lost blob, but for two per cent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from recovery.holdings import Chunks, Holding, Mask
from recovery.planner import Action, Copy, Fetch, Keep, Plan, Receive, Stored, plan
from recovery.tables import Table

PARTS, RANKS = 3, 5


@dataclass(frozen=True)
class Scene:
    nodes: list[int]
    wants: dict[int, list[Chunks]]
    stored: Stored
    holdings: list[Holding]

    def plan(self) -> Plan:
        return plan(self.nodes, self.wants, self.stored, self.holdings)

    def mask(self, some: Chunks) -> Mask:
        return some.mask(self.stored.tables[some.part].count)

    def held(self, ranks: Iterator[int] | list[int], part: int) -> Mask:
        mask = np.zeros(self.stored.tables[part].count, np.bool_)
        for holding in self.holdings:
            for some in holding.chunks:
                if holding.rank in ranks and some.part == part:
                    mask |= self.mask(some)
        return mask


@st.composite
def tables(draw: st.DrawFn, part: int) -> Table:
    """Chunks of one to three blobs, anywhere in two packs; some blobs are shared."""
    places = draw(
        st.lists(st.tuples(st.integers(0, 1), st.integers(0, 60), st.integers(1, 40)), min_size=1, max_size=8)
    )
    chunks = draw(st.lists(st.lists(st.sampled_from(places), min_size=1, max_size=3), min_size=1, max_size=7))
    blobs = np.array([(p, 1000 * at, 1000 * at + n) for chunk in chunks for p, at, n in chunk], np.int64).reshape(-1, 3)
    sizes = draw(st.lists(st.integers(1, 100), min_size=len(chunks), max_size=len(chunks)))
    first = np.concatenate(([0], np.cumsum([len(chunk) for chunk in chunks])))
    keys = (f"own-{part}", "everybody's")
    return Table(np.array(sizes, np.int64), first, blobs[:, 0], blobs[:, 1], blobs[:, 2], keys)


@st.composite
def some_chunks(draw: st.DrawFn, stored: Stored) -> Chunks:
    part = draw(st.integers(0, PARTS - 1))
    count = stored.tables[part].count
    return Chunks.of(part, np.array(draw(st.lists(st.booleans(), min_size=count, max_size=count)), np.bool_))


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    columns = {part: draw(tables(part)) for part in range(PARTS)}
    stored = Stored([t.nbytes for t in columns.values()], columns)
    lists = st.lists(some_chunks(stored), max_size=4)
    holdings = draw(
        st.lists(st.builds(lambda r, c: Holding(r, tuple(c)), st.integers(0, RANKS - 1), lists), max_size=6)
    )
    wants = {rank: draw(lists) for rank in range(RANKS)}
    return Scene(draw(st.lists(st.integers(0, 2), min_size=RANKS, max_size=RANKS)), wants, stored, holdings)


def each(made: Plan) -> Iterator[tuple[int, Action, Chunks]]:
    for rank in made.ranks:
        for action in rank.actions:
            for some in action.chunks:
                yield rank.rank, action, some


@given(scenes())
@settings(max_examples=60, deadline=None)
def test_a_plan_covers_what_is_wanted_exactly_once(scene: Scene) -> None:
    made = scene.plan()
    for rank in range(RANKS):
        for part, columns in scene.stored.tables.items():
            wanted = np.zeros(columns.count, np.int64)
            for some in scene.wants[rank]:
                if some.part == part:
                    wanted[scene.mask(some)] = 1
            got = sum(
                (scene.mask(some).astype(np.int64) for r, _, some in each(made) if (r, some.part) == (rank, part)),
                np.zeros(columns.count, np.int64),
            )
            assert (got == wanted).all()


@given(scenes())
@settings(max_examples=60, deadline=None)
def test_every_source_has_what_it_gives_and_nothing_nearer_does(scene: Scene) -> None:
    for rank, action, some in each(scene.plan()):
        mask, nodes = scene.mask(some), scene.nodes
        mates = [r for r in range(RANKS) if nodes[r] == nodes[rank] and r != rank]
        others = [r for r in range(RANKS) if nodes[r] != nodes[rank]]
        nearer = np.zeros(len(mask), np.bool_)
        match action:
            case Keep():
                source = scene.held([rank], some.part)
            case Copy(rank=mate):
                source, nearer = scene.held([mate], some.part), scene.held([rank], some.part)
                assert mate in mates
            case Receive(rank=peer):
                source, nearer = scene.held([peer], some.part), scene.held([rank, *mates], some.part)
                assert peer in others
            case Fetch():
                source, nearer = mask, scene.held([rank, *mates, *others], some.part)
        assert (source | ~mask).all() and not (nearer & mask).any()


@given(scenes())
@settings(max_examples=30, deadline=None)
def test_the_bytes_of_an_action_are_those_of_its_chunks(scene: Scene) -> None:
    for rank in scene.plan().ranks:
        for action in rank.actions:
            raw = sum(int(scene.stored.tables[some.part].sizes[scene.mask(some)].sum()) for some in action.chunks)
            assert raw == (action.raw if isinstance(action, Fetch) else action.nbytes) > 0


@given(scenes())
@settings(max_examples=30, deadline=None)
def test_the_same_facts_in_another_order_give_the_same_plan(scene: Scene) -> None:
    wants = {rank: list(reversed(chunks)) for rank, chunks in reversed(scene.wants.items())}
    holdings = sorted(scene.holdings, key=lambda holding: -holding.rank)
    assert plan(scene.nodes, wants, scene.stored, holdings) == scene.plan()


@given(scenes())
@settings(max_examples=60, deadline=None)
def test_what_is_fetched_is_the_lost_blobs_and_at_most_two_per_cent_more(scene: Scene) -> None:
    for rank in scene.plan().ranks:
        for action in rank.actions:
            if not isinstance(action, Fetch):
                continue
            blobs = set()
            for some in action.chunks:
                columns = scene.stored.tables[some.part]
                for n in np.flatnonzero(scene.mask(some)):
                    for i in range(columns.first[n], columns.first[n + 1]):
                        blobs.add((columns.packs[columns.pack[i]], int(columns.start[i]), int(columns.stop[i])))
            ranges = [(reads.pack, a, b) for reads in action.packs for a, b in reads.ranges]
            assert action.useful == sum(b - a for _, a, b in blobs)
            assert action.nbytes == sum(b - a for _, a, b in ranges) <= 1.02 * action.useful
            for pack, a, b in blobs:
                assert any(p == pack and start <= a and b <= stop for p, start, stop in ranges)
            for pack, start, stop in ranges:
                assert sum(p == pack and start < b and a < stop for p, a, b in ranges) == 1, "ranges lie apart"


@given(scenes())
@settings(max_examples=80, deadline=None)
def test_no_chunk_could_be_sent_by_a_peer_that_sends_less_by_more_than_two_chunks(scene: Scene) -> None:
    made = scene.plan()
    sent = made.sent
    for rank, action, some in each(made):
        if not isinstance(action, Receive):
            continue
        columns = scene.stored.tables[some.part]
        for other in range(RANKS):
            if scene.nodes[other] == scene.nodes[rank]:
                continue
            shared = scene.mask(some) & scene.held([other], some.part)
            if shared.any():
                assert sent[action.rank] - sent.get(other, 0) <= 2 * int(columns.sizes.max()), (made, action, other)
