from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import count

import numpy as np
import pytest

from ckpt.errors import DamagedError
from ckpt.format.manifest import FORMAT, PinDoc, PruneDoc, seal
from ckpt.format.names import RunId, SnapshotId, SnapshotName, pin_key, prune_key
from ckpt.history.catalog import read_history
from ckpt.history.clock import SystemClock
from ckpt.history.keep import Keep
from ckpt.history.pins import pin, unpin
from ckpt.history.retention import execute, plan_prune
from ckpt.history.runs import claimed_by_prune
from recovery.compact import Compacted, compact
from recovery.compaction import CompactPlan, plan_compact
from recovery.load import load
from recovery.verify import verify
from storage_backends.base import StorageError, Store
from storage_backends.memory import MemoryStore
from tests.support.faulty import Crash, FaultyStore, GateStore
from tests.support.stores import RUN, DirectWriter, State, drifting, make_store, written_store

SECOND, THIRD = RunId(2, "0ddba11e"), RunId(3, "0ddba11f")


def finished(store: Store, *ids: SnapshotId) -> None:
    """The job goes on elsewhere: nobody leans on its snapshots any more; a newer run has a snapshot of its own."""
    last = DirectWriter(store, run=THIRD)
    last.begin(resumed_from=ids[-1])
    last.step(10_000, {"w": np.zeros(3)})


def states(steps: int, rows: int = 96) -> list[dict[str, np.ndarray]]:
    return drifting(steps, rows=rows)  # type: ignore[return-value]


def prune(store: Store, keep: Keep = Keep()) -> int:  # noqa: B008
    """What no snapshot needs goes, at once. Bytes that came free."""
    return execute(plan_prune(store, keep, grace=0, threads=1), store, clock=SystemClock(), threads=1).freed


def damage(store: Store) -> list[str]:
    return [f.text for f in verify(store, deep=True, threads=1) if f.level == "error"]


def check(store: Store, ids: Sequence[SnapshotId], expected: Sequence[State]) -> None:
    """Every one of these snapshots loads bit-exactly, whatever revision is read."""
    for id_, state in zip(ids, expected, strict=True):
        found = load(store, str(id_))
        for path, array in state.items():
            assert isinstance(array, np.ndarray)
            assert np.asarray(found[path]).tobytes() == array.tobytes(), (id_.short, path)
    assert damage(store) == []


def bytes_of(store: Store) -> int:
    return sum(e.size for e in store.list("packs/"))


def thinned(*, ranks: int = 1, steps: int = 9) -> tuple[MemoryStore, list[SnapshotId], list[State]]:
    """A job saved in two starts, and ended. Of each only the last snapshot was kept: a long chain of deltas, in packs
    that nothing else needs."""
    store = MemoryStore()
    made = states(2 * steps)
    ids, expected = [], []
    for run_id, some in ((RUN, made[:steps]), (SECOND, made[steps:])):
        writer = DirectWriter(store, run=run_id, ranks=ranks, chunk=4096, blobs_per_pack=24)
        writer.begin(resumed_from=ids[-1] if ids else None)
        ids.append([writer.step(10 * n, state) for n, state in enumerate(some, run_id.generation * 100)][-1])
        expected.append(some[-1])
    finished(store, *ids)
    for n, id_ in enumerate(ids):
        pin(store, read_history(store), f"kept{n}", id_)
    prune(store, Keep(last=1))
    return store, ids, expected


def run(store: Store, plan: CompactPlan | None = None, **more: object) -> Compacted:
    return compact(plan or plan_compact(store, threads=1), store, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("ranks", [1, 3])
def test_long_chains_become_keyframes_and_every_step_stays_bit_exact(ranks: int) -> None:
    store, ids, expected = thinned(ranks=ranks)
    before = bytes_of(store)
    plan = plan_compact(store, threads=1)
    assert plan.rewrite
    assert plan.keyframes > 0
    told: list[SnapshotId] = []
    done = run(store, plan, each=told.append)
    assert done.snapshots == plan.rewrite == tuple(told)
    assert done.skipped == ()
    assert bytes_of(store) > before, "nothing is removed by a compaction"
    check(store, ids, expected)
    assert all(read_history(store).snapshots[id_].revision == 1 for id_ in done.snapshots)
    prune(store)
    check(store, ids, expected)
    assert bytes_of(store) < before
    assert [e.key for e in store.list("snapshots/")].count(SnapshotName(done.snapshots[0]).key) == 0
    assert not [name for name in read_history(store).pins if name.startswith("compacting-")]


def test_the_plan_says_what_will_come_free() -> None:
    kept, _, _ = thinned()
    plan = plan_compact(kept, threads=1)
    packs = {e.key: e.size for e in kept.list("packs/")}
    run(kept, plan)
    prune(kept)
    gone = packs.keys() - {e.key for e in kept.list("packs/")}
    assert plan.freed == sum(packs[key] for key in gone)


def test_a_compaction_of_what_is_compact_changes_nothing() -> None:
    store, _, _ = thinned()
    run(store)
    prune(store)
    plan = plan_compact(store, threads=1)
    assert (plan.rewrite, plan.freed) == ((), 0)
    before = {e.key for e in store.list("")}
    counted = FaultyStore(store)
    assert compact(plan, counted) == Compacted()
    assert counted.calls == []
    assert {e.key for e in store.list("")} == before


def dying(chunks: int = 40) -> tuple[MemoryStore, list[SnapshotId], list[State]]:
    """Two snapshots that share one chunk of a pack of many; the rest of it changed between every two steps."""
    store = MemoryStore()
    rng = np.random.default_rng(0)
    still = rng.integers(0, 255, 4096, np.uint8)
    made: list[State] = [{"moving": rng.integers(0, 255, 4096 * chunks, np.uint8), "still": still} for _ in range(4)]
    ids = make_store(store, made, chunk=4096, deltas=False, blobs_per_pack=2 * chunks)
    finished(store, *ids)
    for n in (2, 3):
        pin(store, read_history(store), f"p{n}", ids[n])
    prune(store, Keep(last=1))
    return store, ids[2:], made[2:]


def test_live_blobs_of_dying_packs_move_once_for_all_who_share_them() -> None:
    store, ids, expected = dying()
    plan = plan_compact(store, threads=1)
    assert list(plan.rewrite) == ids
    assert len(plan.dying) == 1
    assert plan.keyframes == 0
    before = bytes_of(store)
    done = run(store, plan)
    assert done.packs == 1
    check(store, ids, expected)
    assert prune(store) > plan.freed
    check(store, ids, expected)
    assert before - bytes_of(store) > 30 * 4096
    shared = [{key for key, _ in read_history(store).snapshots[id_].packs} for id_ in ids]
    assert len(shared[0] & shared[1]) == 1
    # And whoever goes first takes nothing from the other.
    store.delete([pin_key("p2")])
    prune(store, Keep(last=1))
    check(store, ids[1:], expected[1:])


@pytest.mark.parametrize(("threshold", "rewritten"), [(0.0, 0), (0.01, 0), (0.25, 2), (1.0, 2)])
def test_the_threshold_decides_which_packs_are_rewritten(threshold: float, rewritten: int) -> None:
    store, _, _ = dying()
    assert len(plan_compact(store, threshold=threshold, threads=1).rewrite) == rewritten


def test_packs_of_tiny_blobs_are_not_rewritten_for_ever() -> None:
    """Half of such a pack is header: that is no waste which a new pack would not have, too."""
    store = MemoryStore()
    made: list[State] = [{f"w{n}": np.full(1024, n + step % 2, np.float32) for n in range(60)} for step in range(4)]
    ids = make_store(store, made, chunk=4096)
    finished(store, *ids)
    pin(store, read_history(store), "kept", ids[-1])
    prune(store, Keep(last=1))
    for _ in range(3):
        run(store, plan_compact(store, threshold=0.6, threads=1))
        prune(store)
    assert plan_compact(store, threshold=0.6, threads=1).rewrite == ()
    check(store, ids[-1:], made[-1:])


def test_a_threshold_that_is_no_share_is_refused() -> None:
    for wrong in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="threshold"):
            plan_compact(MemoryStore(), threshold=wrong)


def test_what_a_job_may_lean_on_is_left_alone_with_all_its_packs() -> None:
    store = MemoryStore()
    ids = make_store(store, states(9), chunk=4096)
    assert plan_compact(store, threads=1).left.keys() == set(ids[-2:])
    leaned = {key for id_ in ids[-2:] for key, _ in read_history(store).snapshots[id_].packs}
    plan = plan_compact(store, threads=1)
    assert not plan.dying & leaned
    assert not set(plan.rewrite) & set(ids[-2:])


def test_only_the_step_that_is_asked_for_is_rewritten() -> None:
    store, ids, expected = thinned()
    plan = plan_compact(store, only=[ids[0]], threads=1)
    assert set(plan.rewrite) <= {ids[0]}
    plan = plan_compact(store, only=[ids[-1]], threads=1)
    assert plan.rewrite == (ids[-1],)
    run(store, plan)
    check(store, ids, expected)
    prune(store)
    check(store, ids, expected)


def test_a_store_with_a_document_that_cannot_be_read_is_left_alone() -> None:
    store, ids, _ = thinned()
    store.put(SnapshotName(ids[0]).key, b"")
    with pytest.raises(DamagedError, match="nothing is compacted"):
        plan_compact(store)


def test_a_damaged_blob_stops_the_compaction_and_the_old_revision_stays() -> None:
    store, ids, expected = thinned()
    plan = plan_compact(store, threads=1)
    last = plan.rewrite[-1]
    key = max(read_history(store).snapshots[last].packs, key=lambda pack: pack[1])[0]
    good = store.get(key)
    store.put(key, good[:-64] + bytes(64))
    with pytest.raises(DamagedError):
        run(store, plan)
    assert not [name for name in read_history(store).pins if name.startswith("compacting-")]
    store.put(key, good)
    check(store, ids, expected)


# --- others at work ----------------------------------------------------------------------------------------------


def test_a_snapshot_that_a_prune_takes_is_passed_over() -> None:
    store, ids, _ = thinned()
    plan = plan_compact(store, threads=1)
    first = plan.rewrite[0]
    store.put(prune_key("ab"), seal(PruneDoc(FORMAT, (str(first),), (SnapshotName(first).key,))))
    done = run(store, plan)
    assert done.skipped == (f"{first.short}: a prune removes it",)
    assert done.snapshots == plan.rewrite[1:]
    assert first in ids


def test_two_compactions_at_once_give_way_and_the_claim_of_a_dead_one_goes_after_grace() -> None:
    now = [1000.0]
    kept, ids, expected = thinned()
    store = MemoryStore(wall=lambda: now[0])
    for entry in kept.list(""):
        store.put(entry.key, kept.get(entry.key))
    plan = plan_compact(store, threads=1)
    for n, id_ in enumerate(plan.rewrite):
        store.put(pin_key(f"compacting-x-{n}"), seal(PinDoc(FORMAT, f"compacting-x-{n}", str(id_))))
    assert run(store, plan).snapshots == ()
    assert len(run(store, plan).skipped) == len(plan.rewrite)
    now[0] += 3601
    assert run(store, plan).snapshots == plan.rewrite
    check(store, ids, expected)
    assert not [name for name in read_history(store).pins if name.startswith("compacting-")]


def test_a_plan_that_another_compaction_has_overtaken_does_nothing() -> None:
    store, ids, expected = thinned()
    plan = plan_compact(store, threads=1)
    run(store, plan)
    before = {e.key for e in store.list("")}
    done = run(store, plan)
    assert done.snapshots == ()
    assert all("compacted meanwhile" in text for text in done.skipped)
    assert {e.key for e in store.list("")} == before
    check(store, ids, expected)


def test_a_prune_in_the_midst_takes_nothing_that_is_being_read_or_written() -> None:
    """Stopped before its document, the compaction is older than grace for all a prune can tell: grace 0."""
    inner, ids, expected = thinned()
    plan = plan_compact(inner, threads=1)
    store = GateStore(inner, verbs=frozenset({"put"}), where=lambda key: key.endswith(".r1.json"))
    outcome: list[Compacted] = []
    thread = threading.Thread(target=lambda: outcome.append(run(store, plan)))
    thread.start()
    assert store.arrived.wait(20)
    prune(inner, Keep(last=1))
    check(inner, ids, expected)
    store.gate.set()
    thread.join(60)
    assert outcome[0].snapshots == ()
    assert "swept by a prune" in outcome[0].skipped[0]
    check(inner, ids, expected)
    assert run(inner).snapshots == plan.rewrite
    prune(inner)
    check(inner, ids, expected)


def test_a_reader_of_the_old_revision_goes_on_with_the_new_one_when_prune_takes_it_away() -> None:
    inner, ids, expected = thinned()
    plan = plan_compact(inner, threads=1)
    id_, state = plan.rewrite[0], expected[ids.index(plan.rewrite[0])]
    store = GateStore(inner, verbs=frozenset({"get_range"}), where=lambda key: key.startswith("packs/"))
    found: list[dict[str, object]] = []
    thread = threading.Thread(target=lambda: found.append(load(store, str(id_))))
    thread.start()
    assert store.arrived.wait(60)
    run(inner, plan)
    prune(inner)
    store.gate.set()
    thread.join(60)
    assert found, "the reader failed"
    assert np.asarray(found[0]["model.moving"]).tobytes() == np.asarray(state["model.moving"]).tobytes()


def test_a_job_goes_on_saving_while_its_old_steps_are_compacted_and_pruned() -> None:
    """Three threads on one store: a real writer, compactions, prunes. Every step that is listed is bit-exact."""
    store = MemoryStore()
    made = states(14, rows=32)
    over = threading.Event()
    problems: list[BaseException] = []

    def tend(do: Callable[[], object]) -> None:
        try:
            while not over.is_set():
                do()
        except BaseException as error:
            problems.append(error)

    def compaction() -> None:
        run(store, plan_compact(store, threshold=0.6, threads=1), pack_limit=16 << 10)

    keep = Keep(last=4, every=20)
    grace = 3600.0
    threads = [
        threading.Thread(target=tend, args=(compaction,)),
        threading.Thread(
            target=tend,
            args=(lambda: execute(plan_prune(store, keep, grace=grace, threads=1), store, clock=SystemClock()),),
        ),
    ]
    for thread in threads:
        thread.start()
    try:
        ids = written_store(store, made, ranks=1, chunk=4096)
    finally:
        over.set()
        for thread in threads:
            thread.join(60)
    assert problems == []
    listed = sorted(read_history(store).snapshots)
    assert set(listed) <= set(ids)
    assert ids[-1] in listed
    check(store, listed, [made[ids.index(id_)] for id_ in listed])
    finished(store, *ids)
    assert run(store, plan_compact(store, threshold=0.9, threads=1)).snapshots
    prune(store)
    check(store, listed, [made[ids.index(id_)] for id_ in listed])


# --- faults ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "lands"), [("crash_at", False), ("crash_at", True), ("fail_at", False)])
def test_a_fault_at_any_call_loses_nothing_and_the_next_compaction_finishes(kind: str, lands: bool) -> None:
    kept, ids, expected = thinned(steps=3)
    objects = {e.key: kept.get(e.key) for e in kept.list("")}
    for n in count(1):
        store = MemoryStore()
        for key, data in objects.items():
            store.put(key, data)
        faulty = FaultyStore(store, lands=lands, verbs=frozenset({"put", "list", "delete", "get_range"}), **{kind: n})
        try:
            plan = plan_compact(faulty, threads=1)
            compact(plan, faulty, pack_limit=32 << 10)
        except (Crash, StorageError):
            pass
        if not faulty.fired:
            break
        for id_, state in zip(ids, expected, strict=True):
            assert np.asarray(load(store, str(id_))["model.moving"]).tobytes() == state["model.moving"].tobytes()  # type: ignore[union-attr]
        prune(store)
        run(store, grace=0.0)
        prune(store)
        check(store, ids, expected)
        assert not plan_compact(store, threads=1).rewrite
        assert not [name for name in read_history(store).pins if name.startswith("compacting-")]
    assert n > 20, "the fault never fired"


def test_a_prune_killed_while_it_removes_what_was_compacted_takes_no_snapshot_with_it() -> None:
    """Its announcement names documents of snapshots that stay, and whoever finishes it must not take these to go."""
    made, ids, expected = thinned()
    run(made)
    fired = 0
    for n in count(1):
        inner = MemoryStore()
        for entry in made.list(""):
            inner.put(entry.key, made.get(entry.key))
        store = FaultyStore(inner, crash_at=n)
        try:
            prune(store, Keep())
        except Crash:
            fired += 1
        for name in list(read_history(inner).pins):
            unpin(inner, name)
        check(inner, ids, expected)
        prune(inner, Keep())
        check(inner, ids, expected)
        kept = read_history(inner, packs=True)
        needed = {ref.key for s in kept.documents.values() for ref in s.parts}
        needed |= {key for s in kept.documents.values() for key, _ in s.packs}
        assert {key for key in kept.entries if key.startswith(("parts/", "packs/"))} == needed
        if not store.fired:
            break
    assert fired > 10


def test_a_prune_of_what_a_killed_compaction_left_does_not_say_that_the_snapshot_goes() -> None:
    """Else a restore would pass over it for an older one, until another prune had finished the first."""
    inner, ids, expected = thinned()
    plan = plan_compact(inner, threads=1)
    store = FaultyStore(inner, crash_at=1, where=lambda key: key.endswith(".r1.json"))
    with pytest.raises(Crash):
        run(store, plan)
    for name in list(read_history(inner).pins):
        unpin(inner, name)
    store = FaultyStore(inner, crash_at=1, verbs=frozenset({"delete"}))
    sweep = plan_prune(store, Keep(), grace=0, threads=1)
    assert set(sweep.leftovers) & set(ids)
    with pytest.raises(Crash):
        execute(sweep, store, clock=SystemClock(), threads=1)
    assert inner.list("prunes/")
    assert not any(claimed_by_prune(inner, id_) for id_ in ids)
    check(inner, ids, expected)
    prune(inner)
    check(inner, ids, expected)
    assert not inner.list("prunes/")
