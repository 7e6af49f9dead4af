from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.format.manifest import FORMAT, PartRef, RunDoc, Snapshot, Totals, digest128
from ckpt.format.names import PartName, RunId, SnapshotId
from ckpt.history.catalog import History
from ckpt.history.clock import SystemClock
from ckpt.history.keep import DAY, HOUR, Keep, best_of, reasons
from ckpt.history.plan import Order, decide
from ckpt.history.retention import execute, plan_prune
from storage_backends.memory import MemoryStore
from tests.ckpt.history.making import RUN, put_run, put_step

Line = dict[SnapshotId, Snapshot]


def snapshot(step: int, *, run: RunId = RUN, time: float | None = None, **metrics: Any) -> Snapshot:
    part = PartRef(PartName(SnapshotId(run, step), 0).key, 0, digest128(b""))
    return Snapshot(FORMAT, str(run), step, 1, 0, (part,), None, (), Totals(0, 0, {}), metrics, time)


def line(*snapshots: Snapshot) -> Line:
    return {s.id: s for s in snapshots}


def steps(keep: Keep, of: Mapping[SnapshotId, Snapshot]) -> list[int]:
    return sorted(id_.step for id_ in reasons(keep, of))


def test_best_keeps_the_smallest_or_largest_of_a_metric_the_newer_of_equal_ones() -> None:
    losses = line(*(snapshot(step, loss=loss) for step, loss in ((1, 0.5), (2, 3), (3, 0.5), (4, 0.1), (5, 0.9))))
    assert steps(Keep(best=("loss", "min", 1)), losses) == [4]
    assert steps(Keep(best=("loss", "min", 2)), losses) == [3, 4]
    assert steps(Keep(best=("loss", "max", 2)), losses) == [2, 5]
    assert steps(Keep(best=("loss", "max", 9)), losses) == [1, 2, 3, 4, 5]


def test_what_has_no_number_of_that_name_is_never_the_best() -> None:
    odd = line(
        snapshot(1, loss=9.0), snapshot(2, loss="nan"), snapshot(3), snapshot(4, loss=None), snapshot(5, loss=True),
        snapshot(6, loss="-inf"),
    )  # fmt: skip
    assert steps(Keep(best=("loss", "min", 2)), odd) == [1]


def test_a_metric_that_no_snapshot_has_keeps_all_rather_than_none() -> None:
    some = line(snapshot(1, loss=1.0), snapshot(2, loss=2.0))
    found = reasons(Keep(last=1, best=("los", "min", 1)), some)
    assert sorted(id_.step for id_ in found) == [1, 2]
    assert found[SnapshotId(RUN, 2)] == "keep last 1; no snapshot has a number 'los' to choose by"


def test_within_is_counted_from_the_newest_snapshot_and_not_from_now() -> None:
    old = line(*(snapshot(step, time=step * HOUR) for step in range(10)), snapshot(10))
    assert steps(Keep(within="2h"), old) == [7, 8, 9, 10], "what recorded no time cannot be called old"
    assert steps(Keep(within=0), old) == [9, 10]
    assert reasons(Keep(within=7200.5), old)[SnapshotId(RUN, 9)] == "keep within 7200.5 s"


def test_hourly_and_daily_keep_the_newest_of_each_period_that_has_one() -> None:
    times = [0, 100, HOUR - 1, HOUR, HOUR + 5, 30 * HOUR, 30 * HOUR + 1, 100 * HOUR]
    some = line(*(snapshot(step, time=time) for step, time in enumerate(times)))
    assert steps(Keep(hourly=1), some) == [7]
    assert steps(Keep(hourly=3), some) == [4, 6, 7]
    assert steps(Keep(hourly=9), some) == [2, 4, 6, 7]
    assert steps(Keep(daily=9), some) == [4, 6, 7]
    assert steps(Keep(daily=1, hourly=2), some) == [6, 7]


def test_a_clock_set_back_never_makes_a_period_count_twice() -> None:
    """D1: the newest of a period is told by the order of the line, not by its clock."""
    back = line(snapshot(1, time=DAY), snapshot(2, time=5.0), snapshot(3, time=DAY - 1), snapshot(4, time=DAY + 9))
    assert steps(Keep(daily=2), back) == [3, 4]


@pytest.mark.parametrize(
    "wrong",
    [
        {"hourly": 0}, {"daily": -1}, {"within": "soon"}, {"within": -1}, {"best": ("loss", "least", 3)},
        {"best": ("loss", "min", 0)}, {"best": ("", "min", 1)}, {"best": "loss"}, {"best": ("loss", "min", True)},
    ],
)  # fmt: skip
def test_a_policy_that_makes_no_sense_is_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"Keep\({next(iter(wrong))}="):
        Keep(**wrong)


def test_a_best_is_spelled_with_colons_on_the_command_line() -> None:
    assert best_of("loss:min:3") == ("loss", "min", 3)
    assert best_of("eval:top1:max:12") == ("eval:top1", "max", 12)
    for wrong in ("loss", "loss:min", "loss:low:3", ":min:3", "loss:min:0", "loss:min:-1", "loss:min:x", ""):
        with pytest.raises(ValueError, match="METRIC:min:N"):
            best_of(wrong)


# --- laws --------------------------------------------------------------------------------------------------------

KEEPS = st.builds(
    Keep,
    last=st.none() | st.integers(1, 6),
    every=st.none() | st.integers(1, 5),
    best=st.none()
    | st.tuples(st.sampled_from(["loss", "acc", "none"]), st.sampled_from(["min", "max"]), st.integers(1, 4)),
    within=st.none() | st.integers(0, 5).map(lambda hours: hours * HOUR),
    hourly=st.none() | st.integers(1, 4),
    daily=st.none() | st.integers(1, 3),
)  # fmt: skip
FIELDS = ("last", "every", "best", "within", "hourly", "daily")
NUMBERS = st.none() | st.sampled_from(["nan", "inf"]) | st.integers(-3, 3) | st.floats(-2, 2)


@st.composite
def lives(draw: st.DrawFn) -> History:
    """Up to three runs, each resumed from somewhere; snapshots with any times and metrics."""
    snapshots: Line = {}
    runs: dict[RunId, RunDoc] = {}
    for generation in range(1, 1 + draw(st.integers(1, 3))):
        run = RunId(generation, f"{generation:08x}")
        source = draw(st.none() | st.sampled_from(sorted(snapshots))) if snapshots else None
        resumed = None if source is None else str(source)
        runs[run] = RunDoc(FORMAT, str(run), 1, "h", 1, "", "", "", None, 0.0, resumed, {})
        first = 0 if source is None else source.step + 1
        for step in draw(st.sets(st.integers(first, first + 8), max_size=6)):
            time = draw(st.none() | st.integers(0, 60).map(lambda n: n * HOUR / 2))
            one = snapshot(step, run=run, time=time, loss=draw(NUMBERS), acc=draw(NUMBERS))
            snapshots[one.id] = one
    keys = {id_: f"snapshots/{id_}.json" for id_ in snapshots}
    return History(runs, snapshots, keys, {}, (), {keys[i]: s for i, s in snapshots.items()}, {})


def kept(history: History, keep: Keep, grace: float = 0) -> set[SnapshotId]:
    return set(decide(history, Order(keep, grace), (), None).kept)


@given(lives(), KEEPS)
@settings(max_examples=150)
def test_what_policies_keep_together_is_the_union_of_what_each_keeps(history: History, keep: Keep) -> None:
    asked = {name: value for name in FIELDS if (value := getattr(keep, name)) is not None}
    if not asked:
        assert kept(history, keep) == history.snapshots.keys()
        return
    each = [kept(history, Keep(**{name: value})) for name, value in asked.items()]
    assert kept(history, keep) == set().union(*each)
    assert not history.snapshots or history.newest in kept(history, keep), "never below one"


@given(lives(), KEEPS, st.sampled_from([0.0, HOUR, DAY]))
@settings(max_examples=100)
def test_abandoned_snapshots_go_when_they_are_older_than_grace_and_nothing_protects_them(
    history: History, keep: Keep, grace: float
) -> None:
    stays = kept(history, keep, grace)
    if keep.everything or history.newest is None:
        return
    newest = history.snapshots[history.newest].time
    for id_ in history.abandoned:
        time = history.snapshots[id_].time
        if grace and None not in (newest, time) and time >= newest - grace:  # type: ignore[operator]
            assert id_ in stays
        else:
            assert id_ not in stays or id_ in kept(history, Keep(last=1))


@given(st.lists(st.tuples(st.none() | st.integers(0, 9), st.none() | st.integers(-2, 2)), max_size=7), KEEPS)
@settings(max_examples=40, deadline=None)
def test_a_dry_run_says_exactly_what_the_real_one_does(made: list[tuple[int | None, int | None]], keep: Keep) -> None:
    store = MemoryStore()
    put_run(store, RUN)
    for step, (hours, loss) in enumerate(made):
        time = None if hours is None else hours * HOUR
        put_step(store, SnapshotId(RUN, step), time=time, metrics={"loss": loss})
    before = {e.key: e.size for e in store.list("")}
    plan = plan_prune(store, keep, grace=0, threads=1)
    assert {e.key: e.size for e in store.list("")} == before
    execute(plan, store, clock=SystemClock(), threads=1)
    after = {e.key for e in store.list("")}
    assert before.keys() - after == set(plan.keys)
    assert plan.freed == sum(before[key] for key in plan.keys)
    assert {id_.step for id_ in plan.protected} == {
        int(key.partition("-")[2][9:21]) for key in after if key.startswith("snapshots/")
    }
    assert not made or max(id_.step for id_ in plan.protected) == len(made) - 1


def test_a_snapshot_is_plain_data() -> None:
    """The laws above make snapshots by hand; they are what a store would give."""
    one = snapshot(3, time=1.0, loss=2)
    assert msgspec.json.decode(msgspec.json.encode(one), type=Snapshot) == one
