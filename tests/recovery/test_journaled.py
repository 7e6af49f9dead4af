"""Which steps a journal covers, and who replays whom: pure."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from ckpt.format.names import RunId, SegmentName, SnapshotId
from ckpt.mirror.ring import RecordName
from recovery.journaled import Replay, plan_replay, records_of

RUN = RunId(1, "0123abcd")
BASE = SnapshotId(RUN, 5)


def test_a_rank_reads_what_lies_on_the_store_and_on_its_node() -> None:
    segments = [SegmentName(RUN, 0, 5, 7), SegmentName(RUN, 0, 9, 10), SegmentName(RUN, 1, 5, 6)]
    ring = [(RecordName(RUN, 0, n, n + 1), Path(f"/ring/{n}")) for n in (7, 8)]
    other = [(RecordName(RunId(2, "0123abcd"), 0, 10, 11), Path("/ring/other"))]
    records = records_of(segments, [*ring, *other], RUN)
    assert [records.reach(rank, 5) for rank in (0, 1, 2)] == [10, 6, 5]
    assert records.places(0, 8) == [Path("/ring/8")] and records.places(0, 5) == [segments[0].key]
    assert records.newest(5) == 10


def test_all_stand_on_the_newest_step_that_all_records_cover() -> None:
    plan = plan_replay(BASE, [[9, 5], [7, 8]], 9)
    assert (plan.target, plan.lost) == (8, 1)
    assert plan.by == {0: 0, 1: 1} and plan.of(1) == (Replay(1, 5, 8),)
    assert "replay steps 6 to 8 of saved ranks 0 on rank 0, 1 on rank 1; 1 steps are lost" in str(plan)


def test_a_saved_rank_without_a_successor_is_replayed_by_who_can_read_it_and_has_the_least_to_do() -> None:
    plan = plan_replay(BASE, [[9, 9, 9, 9], [9, 9, 5, 9]], 9)
    assert plan.by == {0: 0, 1: 1, 2: 0, 3: 1}
    assert plan_replay(BASE, [[9, 9], [9, 9]], 9, limit=6).target == 6
    nothing = plan_replay(BASE, [[5, 9]], 9)
    assert nothing.target == 5 and nothing.lost == 4 and "no journal leads beyond" in str(nothing)


@given(
    st.integers(1, 5).flatmap(
        lambda m: st.lists(st.lists(st.integers(5, 12), min_size=3, max_size=3), min_size=m, max_size=m)
    )
)
def test_whoever_replays_can_read_all_of_it(reaches: list[list[int]]) -> None:
    plan = plan_replay(BASE, reaches, 12)
    assert plan.target == min(max(mine[q] for mine in reaches) for q in range(3))
    assert all(reaches[by][q] >= plan.target for q, by in plan.by.items()) and plan.by.keys() == {0, 1, 2}


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4)), max_size=12), st.integers(0, 9))
def test_records_reach_as_far_as_any_chain_of_them(raw: list[tuple[int, int]], start: int) -> None:
    segments = [SegmentName(RUN, 0, a, a + n) for a, n in raw]
    covered = {step for name in segments for step in range(name.previous, name.step)}
    expected = start
    while expected in covered:
        expected += 1
    assert records_of(segments, (), RUN).reach(0, start) == expected
