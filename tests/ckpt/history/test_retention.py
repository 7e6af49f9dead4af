from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from ckpt.errors import FormatTooNew
from ckpt.format.manifest import PartRef, PruneDoc, digest128, read_part, seal, unseal
from ckpt.format.names import PackName, PartName, RunId, SnapshotId, SnapshotName, prune_key, run_key
from ckpt.history.assemble import build_snapshot
from ckpt.history.catalog import read_history
from ckpt.history.retention import Keep, Pruned, PrunePlan, execute, plan_prune
from ckpt.history.runs import claimed_by_prune
from storage_backends.base import Entry, Refused, StorageError, Store, Unavailable
from storage_backends.memory import MemoryStore
from tests.ckpt.history.making import (
    GRACE,
    NEXT,
    RUN,
    FakeClock,
    part_bytes,
    put_keyframes,
    put_line,
    put_pack,
    put_pin,
    put_run,
    put_step,
    shares,
    whole,
)
from tests.support.faulty import Crash, FaultyStore, LaggingStore

THIRD = RunId(3, "cccccccc")


def at(*steps: int, run: RunId = RUN) -> list[SnapshotId]:
    return [SnapshotId(run, step) for step in steps]


class World:
    """A store whose clock is ours."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.store: Store = MemoryStore(wall=lambda: self.clock.now)

    def later(self, seconds: float) -> None:
        self.clock.now += seconds

    def plan(self, keep: Keep = Keep(), **more: object) -> PrunePlan:  # noqa: B008
        return plan_prune(self.store, keep, clock=self.clock, **{"grace": GRACE, **more})  # type: ignore[arg-type]

    def prune(self, keep: Keep = Keep(), **more: object) -> Pruned:  # noqa: B008
        """Plan, show, do: what is done is exactly what was shown, or was spared."""
        plan = self.plan(keep, **more)
        before = {e.key for e in self.store.list("")}
        pruned = execute(plan, self.store, clock=self.clock)
        after = {e.key for e in self.store.list("")}
        assert {k for k in before - after if not k.startswith("prunes/")} == set(pruned.keys)
        assert set(plan.keys) == set(pruned.keys) | set(pruned.spared)
        assert {k for k in after if k.startswith("prunes/")} <= before
        return pruned

    @property
    def steps(self) -> list[str]:
        """What is listed, and nothing that is listed lacks a byte."""
        history = read_history(self.store)
        assert all(whole(self.store, s) for s in history.snapshots.values())
        assert not [p for p in history.problems if p.kind == "incomplete"]
        return [id_.short for id_ in sorted(history.snapshots)]

    @property
    def packs(self) -> list[str]:
        return [e.key for e in self.store.list("packs/")]


@pytest.fixture
def world() -> World:
    return World()


# --- what stays --------------------------------------------------------------------------------------------------


def test_prune_to_two_leaves_two_that_are_whole_and_their_shared_packs(world: World) -> None:
    """A2: one full and six deltas; every step still listed has every byte."""
    put_run(world.store, RUN)
    put_line(world.store, RUN, range(10, 80, 10))
    plan = world.plan(Keep(last=2))
    assert list(plan.snapshots) == at(10, 20, 30, 40, 50)
    assert plan.packs == ()
    world.prune(Keep(last=2))
    assert world.steps == ["1/60", "1/70"]
    assert len(world.packs) == 7


def test_removing_the_step_that_others_lean_on_leaves_their_blobs(world: World) -> None:
    """A3: automatic and manual removal; a dry run lists exactly what the real one removes."""
    put_run(world.store, RUN)
    put_line(world.store, RUN, [10, 20, 30, 40])
    plan = world.plan(remove=at(10, 20))
    assert list(plan.snapshots) == at(10, 20)
    pruned = world.prune(remove=at(10, 20))
    assert (pruned.keys, pruned.freed) == (plan.keys, plan.freed)
    assert pruned.snapshots == plan.snapshots
    assert world.steps == ["1/30", "1/40"]
    assert len(world.packs) == 4


def test_a_keyframe_frees_what_came_before_it(world: World) -> None:
    """A4, at this floor"""
    put_run(world.store, RUN)
    put_line(world.store, RUN, [10, 20, 30])
    put_keyframes(world.store, RUN, [40])
    sizes = {e.key: e.size for e in world.store.list("")}
    pruned = world.prune(Keep(last=1))
    assert world.steps == ["1/40"]
    assert [PackName.parse(k).id for k in world.packs] == at(40)  # type: ignore[union-attr]
    assert pruned.freed == sum(sizes[k] for k in pruned.keys)


def test_snapshots_go_first_then_parts_then_packs_then_the_announcement(world: World) -> None:
    put_run(world.store, RUN)
    put_keyframes(world.store, RUN, [10, 20, 30], ranks=2)
    store = FaultyStore(world.store)
    world.store = store
    plan = world.plan(Keep(last=1))
    store.calls.clear()
    execute(plan, store, clock=world.clock)
    deleted = [key.split("/")[0] for verb, key in store.calls if verb == "delete"]
    assert deleted == ["snapshots"] * 2 + ["parts"] * 4 + ["packs"] * 4 + ["prunes"]
    first_delete = next(i for i, (verb, _) in enumerate(store.calls) if verb == "delete")
    assert store.calls[0][0] == "put"
    assert {"runs/", "pins/"} <= {key for verb, key in store.calls[1:first_delete] if verb == "list"}


def test_keep_every_keeps_the_steps_it_divides_of_the_live_line(world: World) -> None:
    put_run(world.store, RUN)
    put_keyframes(world.store, RUN, range(0, 110, 10))
    world.prune(Keep(last=2, every=40))
    assert world.steps == ["1/0", "1/40", "1/80", "1/90", "1/100"]
    world.prune(Keep(every=80))
    assert world.steps == ["1/0", "1/80", "1/100"], "the newest always stays"


def test_keep_without_a_policy_removes_nothing(world: World) -> None:
    put_run(world.store, RUN)
    put_keyframes(world.store, RUN, [10, 20])
    put_run(world.store, NEXT, SnapshotId(RUN, 10))
    put_keyframes(world.store, NEXT, [20])
    assert world.plan().keys == ()
    assert set(world.plan().protected) == set(read_history(world.store).snapshots)


@pytest.mark.parametrize("wrong", [{"last": 0}, {"every": 0}, {"last": -1}])
def test_a_policy_that_keeps_nothing_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Keep(**wrong)


def test_order_is_by_what_was_recorded_whatever_the_clocks_say(world: World) -> None:
    """D1: mtimes equal, reversed, in the future; the wall clock set back between saves; keep 2."""
    for first, change in ((0.0, 0.0), (9e5, -1e5), (9e9, -1e5), (0.0, 1e5)):
        world = World()
        world.later(first)
        put_run(world.store, RUN)
        for step in (10, 20, 30, 40):
            put_keyframes(world.store, RUN, [step])
            world.later(change)
        world.prune(Keep(last=2))
        assert world.steps == ["1/30", "1/40"]


def test_a_resumed_line_keeps_its_own_and_the_abandoned_one_goes_when_nothing_leans_on_it(world: World) -> None:
    """D2: 500, 600, 700; resume from 500, save 510, keep 2."""
    put_run(world.store, RUN)
    put_keyframes(world.store, RUN, [500, 600, 700])
    put_run(world.store, NEXT, SnapshotId(RUN, 500))
    put_keyframes(world.store, NEXT, [510])
    assert read_history(world.store).abandoned == set(at(600, 700))
    world.prune(Keep(last=2))
    assert world.steps == ["1/500", "2/510"]
    assert read_history(world.store).newest == SnapshotId(NEXT, 510)


def test_what_the_newest_snapshots_reference_and_all_above_it_stays(world: World) -> None:
    """A rank that did not see the last commits may still lean on the oldest reference."""
    put_run(world.store, RUN)
    put_keyframes(world.store, RUN, [10, 20, 30, 40])
    put_step(world.store, SnapshotId(RUN, 50), reference=SnapshotId(RUN, 30))
    plan = world.plan(Keep(last=1))
    assert list(plan.snapshots) == at(10, 20)
    assert "may lean on it" in plan.protected[SnapshotId(RUN, 30)]
    world.prune(Keep(last=1), remove=at(40))
    assert world.steps == ["1/30", "1/40", "1/50"]


def test_pins_protect_from_policy_and_from_name(world: World) -> None:
    put_run(world.store, RUN)
    put_keyframes(world.store, RUN, [10, 20, 30])
    put_pin(world.store, "best", SnapshotId(RUN, 10))
    put_pin(world.store, "gone", SnapshotId(RUN, 11))
    plan = world.plan(Keep(last=1), remove=at(10))
    assert plan.protected[SnapshotId(RUN, 10)] == "pin best"
    assert "1/10 was asked for, and stays: pin best" in plan.notes
    assert list(plan.snapshots) == at(20)


def test_what_a_run_without_a_commit_resumed_from_stays(world: World) -> None:
    put_run(world.store, RUN)
    put_keyframes(world.store, RUN, [10, 20, 30])
    put_run(world.store, NEXT, SnapshotId(RUN, 10))
    assert list(world.plan(Keep(last=1)).snapshots) == at(20)
    put_keyframes(world.store, NEXT, [15])
    assert list(world.plan(Keep(last=1)).snapshots) == at(10, 20, 30), "it has committed, and leans on nothing older"


def test_the_newest_snapshot_cannot_be_asked_away(world: World) -> None:
    put_run(world.store, RUN)
    put_keyframes(world.store, RUN, [10])
    plan = world.plan(Keep(last=1), remove=at(10, 99))
    assert plan.keys == ()
    assert any("1/10 was asked for" in note for note in plan.notes)
    assert any("1/99" in note and "not there" in note for note in plan.notes)


def test_nothing_goes_while_a_document_that_stays_cannot_be_read(world: World) -> None:
    put_run(world.store, RUN)
    put_keyframes(world.store, RUN, [10, 20, 30])
    damaged: list[Callable[[], None]] = [
        lambda: world.store.put(SnapshotName(SnapshotId(RUN, 20)).key, b""),
        lambda: world.store.put("pins/best.json", b"{}"),
    ]
    before = {e.key: world.store.get(e.key) for e in world.store.list("")}
    for damage in damaged:
        damage()
        plan = world.plan(Keep(last=1))
        assert plan.keys == ()
        assert "nothing is removed" in plan.notes[0]
        assert "ckpt unpin URL best" in plan.notes[0] or "--remove 1/20" in plan.notes[0]
        world.store.delete([e.key for e in world.store.list("")])
        for key, data in before.items():
            world.store.put(key, data)
    assert world.plan(Keep(last=1)).keys


def test_a_run_whose_document_cannot_be_read_holds_what_it_may_lean_on_until_a_newer_one_has_saved(
    world: World,
) -> None:
    """A rotten object must not stop retention for ever, nor may what the job behind it reads go."""
    put_run(world.store, RUN)
    put_keyframes(world.store, RUN, [10, 20, 30])
    world.store.put(run_key(NEXT), b"cut")
    plan = world.plan(Keep(last=1))
    assert plan.keys == ()
    assert "until it or a newer run has saved" in plan.notes[0]
    assert all("may lean on it" in why or "resumed from it" in why for why in plan.protected.values())
    # What it leaves behind unfinished holds older snapshots, too, until it is older than grace.
    put_run(world.store, THIRD)
    put_step(world.store, SnapshotId(NEXT, 40), commit=False)
    put_keyframes(world.store, THIRD, [50])
    assert world.plan(Keep(last=1)).snapshots == ()
    world.later(GRACE + 1)
    put_keyframes(world.store, THIRD, [60])
    assert world.prune(Keep(last=1)).snapshots == tuple(sorted((*at(10, 20, 30), SnapshotId(THIRD, 50))))


def test_older_snapshots_count_as_the_line_of_a_run_whose_document_is_gone(world: World) -> None:
    put_run(world.store, RUN)
    put_keyframes(world.store, RUN, [10, 20, 30])
    put_run(world.store, NEXT, SnapshotId(RUN, 10))
    put_keyframes(world.store, NEXT, [20, 30])
    assert {id_.short for id_ in read_history(world.store).abandoned} == {"1/20", "1/30"}
    world.store.delete([run_key(NEXT)])
    assert read_history(world.store).abandoned == frozenset()
    plan = world.plan(Keep(last=3))
    assert plan.snapshots == tuple(at(10, 20))
    assert any(run_key(NEXT) in note for note in plan.notes)


def test_a_damaged_snapshot_goes_when_asked_for_by_name(world: World) -> None:
    put_run(world.store, RUN)
    put_keyframes(world.store, RUN, [10, 20, 30])
    world.store.put(SnapshotName(SnapshotId(RUN, 20)).key, b"")
    pruned = world.prune(Keep(last=5), remove=at(20))
    assert pruned.snapshots == tuple(at(20))
    assert world.steps == ["1/10", "1/30"]


def test_a_store_of_a_newer_format_is_left_alone(world: World) -> None:
    put_run(world.store, RUN)
    put_keyframes(world.store, RUN, [10, 20])
    for key in (SnapshotName(SnapshotId(RUN, 15)).key, prune_key("ab")):
        body = b'{"format":99}\n'
        world.store.put(key, body + digest128(body).encode() + b"\n")
        with pytest.raises(FormatTooNew):
            world.plan(Keep(last=1))
        world.store.delete([key])


def revise(store: Store, id_: SnapshotId, *, revision: int = 1) -> list[str]:
    """What a compaction leaves: a higher revision, with a pack and parts of its own. Its objects."""
    own = [put_pack(store, id_, 0, b"compacted %d" % revision, n=revision)]
    data = part_bytes(id_, 0, shares(1)[0], own, revision=revision)
    ref = PartRef(PartName(id_, 0, revision).key, len(data), digest128(data))
    store.put(ref.key, data)
    key = SnapshotName(id_, revision).key
    store.put(key, seal(build_snapshot([(ref, read_part(data, key=ref.key))])))
    return [key, ref.key, own[0][0]]


def test_what_a_compaction_replaced_goes_with_what_only_it_needs(world: World) -> None:
    put_run(world.store, RUN)
    put_line(world.store, RUN, [10, 20, 30])
    new = revise(world.store, SnapshotId(RUN, 10))
    plan = world.plan(Keep(last=3))
    assert plan.snapshots == ()
    assert plan.documents == (SnapshotName(SnapshotId(RUN, 10)).key,)
    assert [PartName.parse(key) for key in plan.parts] == [PartName(SnapshotId(RUN, 10), 0)]
    assert plan.packs == (), "20 and 30 still lean on the pack of 10"
    world.prune(Keep(last=3))
    assert world.steps == ["1/10", "1/20", "1/30"]
    assert set(new) <= {e.key for e in world.store.list("")}
    assert world.plan(Keep(last=3)).keys == ()


def test_an_older_revision_stays_while_a_job_may_lean_on_it(world: World) -> None:
    put_run(world.store, RUN)
    put_keyframes(world.store, RUN, [10, 20])
    revise(world.store, SnapshotId(RUN, 20))
    assert world.plan(Keep(last=2)).keys == ()
    revise(world.store, SnapshotId(RUN, 10))
    put_run(world.store, NEXT, SnapshotId(RUN, 10))
    names = [SnapshotName.parse(key) for key in world.plan(Keep(last=2)).documents]
    assert names == [SnapshotName(SnapshotId(RUN, 20))], "run 2 reads 10, and whoever saved 20 can commit no more"
    put_keyframes(world.store, NEXT, [30])
    put_pin(world.store, "best", SnapshotId(RUN, 10))
    names = [SnapshotName.parse(key) for key in world.plan(Keep(last=5)).documents]
    assert names[-1] == SnapshotName(SnapshotId(RUN, 10)), "a pin protects the snapshot, not its older revision"
    assert {name.id for name in names if name} == set(at(10, 20)), "20 is abandoned"


def test_an_older_revision_stays_while_anything_of_the_newer_one_is_missing_or_announced_to_go(world: World) -> None:
    put_run(world.store, RUN)
    put_keyframes(world.store, RUN, [10, 20])
    _, part, pack = revise(world.store, SnapshotId(RUN, 10))
    data = world.store.get(pack)
    world.store.delete([pack])
    assert world.plan(Keep(last=5)).keys == ()
    world.store.put(pack, data)
    world.store.put(prune_key("ab"), seal(PruneDoc(1, (), (part, pack))))
    assert world.plan(Keep(last=5)).keys == ()


def test_a_newer_revision_that_loses_a_pack_during_the_second_look_keeps_the_older_one(world: World) -> None:
    put_run(world.store, RUN)
    put_keyframes(world.store, RUN, [10, 20])
    _, _, pack = revise(world.store, SnapshotId(RUN, 10))
    plan = world.plan(Keep(last=5))

    class Sweeping(FaultyStore):
        def list(self, prefix: str) -> Sequence[Entry]:
            found = super().list(prefix)
            if prefix == "prunes/":
                world.store.delete([pack])
            return found

    pruned = execute(plan, Sweeping(world.store), clock=world.clock)
    assert pruned.keys == ()
    assert SnapshotName(SnapshotId(RUN, 10)).key in {e.key for e in world.store.list("snapshots/")}


def test_all_revisions_of_a_snapshot_go_with_it(world: World) -> None:
    put_run(world.store, RUN)
    put_keyframes(world.store, RUN, [10, 20])
    revise(world.store, SnapshotId(RUN, 10))
    world.prune(Keep(last=1))
    assert [e.key for e in world.store.list("snapshots/")] == [SnapshotName(SnapshotId(RUN, 20)).key]
    assert len(world.packs) == 1
    assert len(world.store.list("parts/")) == 1


def test_what_a_compaction_left_that_never_committed_goes_once_it_is_older_than_grace(world: World) -> None:
    put_run(world.store, RUN)
    put_keyframes(world.store, RUN, [10, 20])
    key, part, pack = revise(world.store, SnapshotId(RUN, 10))
    world.store.delete([key])
    assert world.plan(Keep(last=5)).keys == ()
    world.later(GRACE + 1)
    assert set(world.prune(Keep(last=5)).keys) == {part, pack}
    assert world.steps == ["1/10", "1/20"]


# --- policies ----------------------------------------------------------------------------------------------------


def test_every_policy_that_keeps_a_snapshot_is_a_reason(world: World) -> None:
    put_run(world.store, RUN)
    put_keyframes(world.store, RUN, range(10, 60, 10))
    plan = world.plan(Keep(last=3, every=20, best=("loss", "min", 4)))
    assert plan.protected[SnapshotId(RUN, 20)] == "keep every 20; keep best loss:min:4"
    assert plan.protected[SnapshotId(RUN, 30)] == "keep last 3; keep best loss:min:4"
    assert list(plan.snapshots) == at(10)


def test_an_abandoned_line_stays_for_grace_and_then_goes_first(world: World) -> None:
    put_run(world.store, RUN)
    for step in (10, 20, 30):
        put_step(world.store, SnapshotId(RUN, step), time=1000.0 + step)
    put_run(world.store, NEXT, SnapshotId(RUN, 10))
    put_step(world.store, SnapshotId(NEXT, 15), time=2000.0)
    plan = world.plan(Keep(last=1))
    assert list(plan.snapshots) == at(10)
    assert plan.protected[SnapshotId(RUN, 30)] == "abandoned, and not yet older than grace"
    put_step(world.store, SnapshotId(NEXT, 25), time=1025.0 + GRACE)
    plan = world.plan(Keep(last=1))
    assert list(plan.snapshots) == [*at(10, 20), *at(15, run=NEXT)]
    assert [n.id for key in plan.documents if (n := SnapshotName.parse(key))] == [*at(20), *at(10), *at(15, run=NEXT)]


# --- leftovers ---------------------------------------------------------------------------------------------------


def crashed(world: World) -> None:
    """Step 15 of run 1 was never committed; run 2 went on."""
    put_run(world.store, RUN, world_size=2)
    put_keyframes(world.store, RUN, [10], ranks=2)
    put_step(world.store, SnapshotId(RUN, 15), ranks=2, only=[1], commit=False)
    put_run(world.store, NEXT, SnapshotId(RUN, 10), world_size=2)
    put_keyframes(world.store, NEXT, [20], ranks=2)


def test_leftovers_of_a_crashed_save_go_once_they_are_older_than_grace(world: World) -> None:
    """C1: leftovers are ignored, shown, swept later."""
    crashed(world)
    world.later(GRACE - 1)
    assert world.plan(Keep()).keys == ()
    world.later(2)
    plan = world.plan(Keep())
    assert plan.leftovers == (SnapshotId(RUN, 15),)
    assert (len(plan.parts), len(plan.packs), plan.snapshots) == (1, 1, ())
    assert "leftovers of 1/15" in str(plan)
    world.prune(Keep())
    assert world.steps == ["1/10", "2/20"]
    assert len(world.packs) == 4


def test_leftovers_of_the_newest_run_go_only_below_a_committed_step(world: World) -> None:
    put_run(world.store, RUN)
    put_step(world.store, SnapshotId(RUN, 10), commit=False)
    put_keyframes(world.store, RUN, [20])
    put_step(world.store, SnapshotId(RUN, 30), commit=False)
    world.later(GRACE * 100)
    assert world.plan().leftovers == tuple(at(10))


def test_the_age_of_leftovers_is_told_by_the_stores_own_clock(world: World) -> None:
    """D1: this machine's clock is a day ahead; what the plan took for old is spared."""
    crashed(world)
    fast = FakeClock(world.clock.now + 86400)
    plan = plan_prune(world.store, Keep(), grace=GRACE, clock=fast)
    assert plan.leftovers == tuple(at(15))
    pruned = execute(plan, world.store, clock=fast)
    assert (pruned.keys, pruned.spared) == ((), plan.keys)
    assert not world.store.list("prunes/")


class Undated(MemoryStore):
    """A store without modification times."""

    def list(self, prefix: str) -> Sequence[Entry]:
        return [Entry(e.key, e.size, None) for e in super().list(prefix)]


def test_without_modification_times_leftovers_go_only_when_told(world: World) -> None:
    world.store = Undated()
    crashed(world)
    plan = world.plan()
    assert plan.keys == ()
    assert any("no modification times" in note for note in plan.notes)
    assert world.prune(grace=0.0).keys
    assert world.steps == ["1/10", "2/20"]


def test_a_step_that_may_yet_be_committed_keeps_what_it_leans_on(world: World) -> None:
    """A rank of run 1 passed the fence and was stopped; run 2 went on. Its put may land until grace is over."""
    put_run(world.store, RUN)
    first, second = put_line(world.store, RUN, [10, 20])
    base = read_history(world.store).snapshots[second]
    put_step(world.store, SnapshotId(RUN, 30), reference=second, leans=[base], commit=False)
    put_run(world.store, NEXT)
    put_keyframes(world.store, NEXT, [5])
    plan = world.plan(Keep(last=1))
    assert plan.snapshots == ()
    assert "1/30, not committed" in plan.protected[first]
    put_step(world.store, SnapshotId(RUN, 30), reference=second, leans=[base])
    assert "1/30" in world.steps
    world.store.delete([SnapshotName(SnapshotId(RUN, 30)).key])
    world.later(GRACE + 1)
    world.prune(Keep(last=1))
    assert world.steps == ["2/5"]
    assert len(world.packs) == 1


def test_a_snapshot_whose_parts_are_gone_is_swept_as_a_leftover(world: World) -> None:
    put_run(world.store, RUN)
    put_keyframes(world.store, RUN, [10, 20])
    world.store.delete([PartName(SnapshotId(RUN, 10), 0).key])
    assert world.plan(Keep(last=5)).keys == ()
    world.later(GRACE + 1)
    pruned = world.prune(Keep(last=5))
    assert [key.split("/")[0] for key in pruned.keys] == ["snapshots", "packs"]
    assert world.steps == ["1/20"]


# --- races -------------------------------------------------------------------------------------------------------


class Meanwhile(MemoryStore):
    """Somebody else acts at one moment of a prune: once its announcement has landed."""

    def __init__(self, then: Callable[[Store], None]) -> None:
        super().__init__()
        self.then: Callable[[Store], None] | None = None
        self.later = then

    def put(self, key: str, data: bytes | bytearray | memoryview) -> None:
        super().put(key, data)
        if key.startswith("prunes/") and self.then is not None:
            then, self.then = self.then, None
            then(self)


def race(then: Callable[[Store], None]) -> tuple[Store, Pruned, PrunePlan]:
    store = Meanwhile(then)
    put_run(store, RUN)
    put_keyframes(store, RUN, [10, 20, 30])
    plan = plan_prune(store, Keep(last=1), grace=GRACE)
    store.then = then
    return store, execute(plan, store, clock=FakeClock()), plan


def test_a_claim_between_the_plan_and_the_second_look_is_spared() -> None:
    """D4"""
    store, pruned, _ = race(lambda s: put_run(s, NEXT, SnapshotId(RUN, 10)) and None)
    assert pruned.snapshots == tuple(at(20))
    assert whole(store, read_history(store).snapshots[SnapshotId(RUN, 10)])
    assert SnapshotName(SnapshotId(RUN, 10)).key in pruned.spared


def test_a_pin_between_the_plan_and_the_second_look_is_spared() -> None:
    store, pruned, _ = race(lambda s: put_pin(s, "best", SnapshotId(RUN, 20)))
    assert pruned.snapshots == tuple(at(10))
    assert whole(store, read_history(store).snapshots[SnapshotId(RUN, 20)])


def test_a_commit_between_the_plan_and_the_second_look_keeps_the_packs_it_names() -> None:
    def commits(store: Store) -> None:
        base = read_history(store).snapshots[SnapshotId(RUN, 10)]
        put_step(store, SnapshotId(RUN, 40), reference=SnapshotId(RUN, 30), leans=[base])

    store, pruned, _ = race(commits)
    assert pruned.snapshots == tuple(at(10, 20))
    assert all(whole(store, s) for s in read_history(store).snapshots.values())


def test_a_commit_of_an_abandoned_line_in_between_keeps_its_packs_though_a_new_plan_would_take_it() -> None:
    """Found by the model: both looks would release the pack, each for another reason."""

    def commits(store: Store) -> None:
        base = read_history(store).snapshots[SnapshotId(RUN, 10)]
        put_step(store, SnapshotId(RUN, 15), reference=SnapshotId(RUN, 10), leans=[base])

    store, pruned, _ = race(commits)
    assert pruned.snapshots == tuple(at(10, 20))
    assert set(read_history(store).snapshots) == set(at(15, 30))
    assert all(whole(store, s) for s in read_history(store).snapshots.values())


def test_a_snapshot_that_another_prune_took_for_a_leftover_is_not_relied_upon(world: World) -> None:
    """It was committed after that prune's second look, and loses its parts any moment."""
    put_run(world.store, RUN)
    put_keyframes(world.store, RUN, [10, 20])
    put_keyframes(world.store, RUN, [30])
    other = PruneDoc(1, (str(SnapshotId(RUN, 30)),), (PartName(SnapshotId(RUN, 30), 0).key,))
    world.store.put(prune_key("aa"), seal(other))
    plan = world.plan(Keep(last=1))
    assert list(plan.snapshots) == at(10)
    assert plan.protected[SnapshotId(RUN, 20)] == "the newest snapshot"
    assert SnapshotId(RUN, 30) in plan.protected


def test_nothing_goes_if_the_newest_snapshot_loses_its_parts_while_it_is_looked_at() -> None:
    """Another prune announced them, missed a late commit, removed them and is gone again, all between two listings."""
    lost = SnapshotId(RUN, 30)

    class Swept(MemoryStore):
        armed = False

        def list(self, prefix: str) -> Sequence[Entry]:
            if prefix == "prunes/" and self.armed:
                self.delete([PartName(lost, 0).key])
            return super().list(prefix)

    store = Swept()
    put_run(store, RUN)
    put_keyframes(store, RUN, [10, 20, 30])
    plan = plan_prune(store, Keep(last=1), grace=GRACE)
    store.armed = True
    assert execute(plan, store, clock=FakeClock()).keys == ()
    assert set(read_history(store).snapshots) == set(at(10, 20))


def test_whoever_claims_after_the_announcement_finds_it() -> None:
    seen: list[bool] = []
    _, _, plan = race(lambda s: seen.extend(claimed_by_prune(s, SnapshotId(RUN, step)) for step in (10, 20, 30)))
    assert seen == [True, True, False]
    assert list(plan.snapshots) == at(10, 20)


def test_the_announcement_names_leftovers_too_because_one_may_be_committed_late(world: World) -> None:
    crashed(world)
    world.later(GRACE + 1)
    plan = world.plan()
    store = FaultyStore(world.store, crash_at=1, verbs=frozenset({"delete"}))
    with pytest.raises(Crash):
        execute(plan, store, clock=world.clock)
    assert claimed_by_prune(world.store, SnapshotId(RUN, 15))


def test_a_known_listing_lag_is_waited_out_on_both_sides(world: World) -> None:
    put_run(world.store, RUN)
    put_keyframes(world.store, RUN, [10, 20])
    plan = world.plan(Keep(last=1))
    lagging = LaggingStore(world.store, lag=5.0, now=lambda: world.clock.now)

    def claim_late(now: float) -> None:
        lagging.put(run_key(NEXT), b"")
        put_run(lagging, NEXT, SnapshotId(RUN, 10))
        world.clock.on_sleep = lambda now: None
        world.later(5.0)

    world.clock.on_sleep = claim_late
    assert execute(plan, lagging, listing_lag=5.0, clock=world.clock).snapshots == ()
    assert world.clock.slept == [10.0]


# --- failures ----------------------------------------------------------------------------------------------------


def test_could_not_list_is_never_empty_and_prune_then_removes_nothing(world: World) -> None:
    """M3: throttled at every listing and every read in turn, in the plan and in the second look."""
    put_run(world.store, RUN)
    put_keyframes(world.store, RUN, [10, 20, 30])
    before = [e.key for e in world.store.list("")]
    fired = 0
    for n in range(1, 100):
        store = FaultyStore(world.store, fail_at=n, verbs=frozenset({"list", "get", "get_range"}))
        try:
            plan = plan_prune(store, Keep(last=1), grace=GRACE, clock=world.clock, threads=1)
            execute(plan, store, clock=world.clock, threads=1)
        except StorageError:
            fired += 1
            assert [e.key for e in world.store.list("")] == before
            continue
        assert not store.fired
        break
    assert fired > 12
    assert world.steps == ["1/30"]


def test_a_prune_killed_at_any_call_is_finished_by_the_next_and_loses_nothing(world: World) -> None:
    for lands in (False, True):
        n, fired = 0, True
        while fired:
            n += 1
            world = World()
            put_run(world.store, RUN)
            put_line(world.store, RUN, [10, 20])
            put_keyframes(world.store, RUN, [30, 40])
            world.later(1)
            store = FaultyStore(world.store, crash_at=n, lands=lands)
            try:
                plan = plan_prune(store, Keep(last=2), grace=GRACE, clock=world.clock, threads=1)
                execute(plan, store, clock=world.clock, threads=1)
            except Crash:
                pass
            fired = store.fired
            assert {"1/30", "1/40"} <= set(world.steps)
            world.prune(Keep(last=2))
            assert world.steps == ["1/30", "1/40"]
            assert len(world.packs) == 2, f"killed at call {n}: leftovers of a half-done prune need no grace"
            assert not world.store.list("prunes/")
        assert n > 20


def test_a_half_done_prune_does_not_take_what_was_pinned_since(world: World) -> None:
    put_run(world.store, RUN)
    put_keyframes(world.store, RUN, [10, 20, 30])
    store = FaultyStore(world.store, crash_at=1, verbs=frozenset({"delete"}))
    with pytest.raises(Crash):
        execute(world.plan(Keep(last=1)), store, clock=world.clock)
    put_pin(world.store, "best", SnapshotId(RUN, 10))
    world.prune(Keep(last=3))
    assert world.steps == ["1/10", "1/30"]
    assert len(world.store.list("prunes/")) == 1, "its prune may still be at work: claims must find it"
    world.later(GRACE + 1)
    world.prune(Keep(last=3))
    assert world.steps == ["1/10", "1/30"]
    assert not world.store.list("prunes/")


def test_an_announcement_by_hand_removes_nothing_that_is_needed(world: World) -> None:
    """C7"""
    put_run(world.store, RUN)
    put_keyframes(world.store, RUN, [10, 20])
    everything = (*(e.key for e in world.store.list("")), "store.json", "../outside", "packs/x")
    world.store.put(prune_key("hand"), seal(PruneDoc(1, tuple(map(str, at(10, 20))), everything)))
    world.store.put(prune_key("torn"), b"")
    assert any("torn" in note for note in world.plan(Keep(last=2)).notes)
    world.prune(Keep(last=2))
    assert world.steps == ["1/20"]
    assert world.store.get(run_key(RUN))


def test_a_removal_that_fails_stops_before_what_leans_on_it_and_is_finished_later(world: World) -> None:
    """D7: partial failure is reported."""
    put_run(world.store, RUN)
    put_keyframes(world.store, RUN, [10, 20, 30])
    store = FaultyStore(world.store, fail_at=1, verbs=frozenset({"delete"}), error=Refused)
    with pytest.raises(Refused):
        execute(world.plan(Keep(last=1)), store, clock=world.clock)
    assert len(world.store.list("parts/")) == 3
    assert world.steps == ["1/10", "1/30"]
    world.prune(Keep(last=1))
    assert world.steps == ["1/30"]


def test_an_announcement_that_failed_removes_nothing(world: World) -> None:
    for lands in (False, True):
        world = World()
        put_run(world.store, RUN)
        put_keyframes(world.store, RUN, [10, 20])
        store = FaultyStore(world.store, fail_at=1, verbs=frozenset({"put"}), lands=lands)
        with pytest.raises(Unavailable):
            execute(world.plan(Keep(last=1)), store, clock=world.clock)
        assert world.steps == ["1/10", "1/20"]
        assert claimed_by_prune(world.store, SnapshotId(RUN, 10)) == lands


def test_removing_the_absent_is_no_error_and_two_prunes_at_once_do_no_harm(world: World) -> None:
    put_run(world.store, RUN)
    put_keyframes(world.store, RUN, [10, 20, 30])
    plans = [world.plan(Keep(last=1)), world.plan(Keep(last=1))]
    for plan in plans:
        execute(plan, world.store, clock=world.clock)
    assert world.steps == ["1/30"]
    assert not world.store.list("prunes/")


def test_a_prune_with_nothing_to_do_writes_nothing(world: World) -> None:
    put_run(world.store, RUN)
    put_keyframes(world.store, RUN, [10])
    store = FaultyStore(world.store)
    assert execute(world.plan(Keep(last=1)), store, clock=world.clock) == Pruned()
    assert store.calls == []


def test_a_thousand_objects_go_in_four_requests(world: World) -> None:
    """D7: the store removes in bulk or in parallel; prune hands it everything at once."""

    class Bulk(MemoryStore):
        requests = 0

        def delete(self, keys: Sequence[str]) -> None:
            self.requests += 1
            super().delete(keys)

    store = Bulk()
    world.store = store
    put_run(store, RUN)
    put_keyframes(store, RUN, range(350))
    pruned = world.prune(Keep(last=1))
    assert len(pruned.keys) == 3 * 349
    assert store.requests == 4


def test_a_plan_prints_what_goes_what_stays_and_why(world: World) -> None:
    put_run(world.store, RUN)
    put_keyframes(world.store, RUN, [10, 20])
    text = str(world.plan(Keep(last=1)))
    assert "remove 1/10" in text
    assert "keep 1/20: " in text
    assert "3 objects" in text


def test_what_is_announced_is_what_goes(world: World) -> None:
    put_run(world.store, RUN)
    put_keyframes(world.store, RUN, [10, 20])
    plan = world.plan(Keep(last=1))
    store = FaultyStore(world.store, crash_at=1, verbs=frozenset({"delete"}))
    with pytest.raises(Crash):
        execute(plan, store, clock=world.clock, nonce=lambda: "0f")
    doc = unseal(world.store.get(prune_key("0f")), PruneDoc, key="")
    assert doc.keys == plan.keys
    assert doc.snapshots == (str(SnapshotId(RUN, 10)),)
