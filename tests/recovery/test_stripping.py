"""`Keep(moments_last=…)`: what becomes weights only, what that frees, and how everybody who reads it says so."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckpt
from ckpt.cli import main
from ckpt.errors import LayoutMismatch, NoSnapshot
from ckpt.format.manifest import FORMAT, Holder, PinDoc, seal
from ckpt.format.names import RunId, SnapshotId, SnapshotName, pin_key
from ckpt.history.catalog import read_history
from ckpt.history.clock import SystemClock
from ckpt.history.keep import Keep
from ckpt.history.pins import pin
from ckpt.history.retention import Pruned, PrunePlan, execute, plan_prune
from ckpt.history.runs import identity
from ckpt.history.tiers import Tiers
from recovery.agree import Alone
from recovery.compact import compact
from recovery.compaction import plan_compact
from recovery.followed import Followed
from recovery.foreign_safetensors import read_safetensors, write_safetensors
from recovery.load import load, load_into
from recovery.looking import History
from recovery.outward import open_export
from recovery.restore import restore
from recovery.verify import verify
from storage_backends.base import Store
from storage_backends.local import LocalStore
from storage_backends.memory import MemoryStore
from storage_backends.tiered import TieredStore
from tests.ckpt.history.making import FakeClock
from tests.recovery.lives import train_and_store
from tests.support.faulty import Crash, FaultyStore
from tests.support.stores import DirectWriter
from tests.support.training import Training

STEPS = [2, 4, 6]
KEEP = Keep(moments_last=1)


def trained(store: Store, *, ranks: int = 1) -> tuple[dict[int, dict[str, bytes]], list[SnapshotId]]:
    """Three steps of a training that has ended; a later job, of another kind, has the newest snapshot."""
    then, ids = train_and_store(store, STEPS, ranks=ranks, blobs_per_pack=1)
    last = DirectWriter(store, run=RunId(2, "0ddba11e"))
    last.begin(resumed_from=ids[-1])
    last.step(100, {"w": np.zeros(3)})
    return then, ids


def planned(store: Store, keep: Keep = KEEP) -> PrunePlan:
    return plan_prune(store, keep, grace=0, threads=1)


def prune(store: Store, keep: Keep = KEEP) -> Pruned:
    """What is shown is what is done: objects, and bytes that came free."""
    plan = planned(store, keep)
    before = {e.key: e.size for e in store.list("")}
    done = execute(plan, store, clock=SystemClock(), threads=1)
    after = {e.key: e.size for e in store.list("")}
    assert before.keys() - after.keys() == set(plan.keys) == set(done.keys)
    assert sum(before[key] for key in plan.keys) == plan.freed == done.freed
    assert sum(after[key] for key in after.keys() - before.keys()) == plan.written == done.stripped.written
    assert done.stripped.ids == plan.weights_only
    assert done.stripped.skipped == ()
    return done


def weights(then: dict[str, bytes]) -> dict[str, bytes]:
    return {f"model.{name}": data for name, data in then.items() if name in Training().model.state_dict()}


def tensors(found: dict[str, Any]) -> dict[str, bytes]:
    return {
        p: v.reshape(-1).view(torch.uint8).numpy().tobytes() for p, v in found.items() if isinstance(v, torch.Tensor)
    }


def check(store: Store, ids: list[SnapshotId], then: dict[int, dict[str, bytes]], thinned: set[SnapshotId]) -> None:
    """The thinned ones have the same weights, and nothing of the optimizer; the others are whole."""
    for id_ in ids:
        found = load(store, str(id_))
        assert {p: d for p, d in tensors(found).items() if p.startswith("model.")} == weights(then[id_.step])
        assert any(p.startswith("optimizer") for p in found) == (id_ not in thinned)
        if id_ not in thinned:
            training = Training(seed=3)
            load_into(store, training.state, str(id_))
            assert training.bytes() == then[id_.step]
    assert {i for i, s in read_history(store).snapshots.items() if s.without} == thinned
    assert [f.text for f in verify(store, deep=True, threads=1) if f.level == "error"] == []


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_newest_keep_their_moments_and_older_ones_keep_their_weights(ranks: int) -> None:
    store = MemoryStore()
    then, ids = trained(store, ranks=ranks)
    done = prune(store, Keep(moments_last=2))
    assert done.stripped.ids == tuple(ids[:-1])  # the later job's snapshot counts, too
    assert done.snapshots == ()
    assert done.freed > done.stripped.written
    check(store, ids, then, set(ids[:-1]))
    again = planned(store, Keep(moments_last=2))
    assert (again.keys, again.weights_only, again.written) == ((), (), 0)


def test_it_composes_with_what_stays() -> None:
    """Counted among what stays, so that steps which go take nobody's place."""
    store = MemoryStore()
    then, ids = trained(store)
    done = prune(store, Keep(every=2, moments_last=3))
    assert done.stripped.ids == (ids[0],)
    done = prune(store, Keep(every=4, moments_last=2))
    assert (done.stripped.ids, done.snapshots) == ((), (ids[0], ids[2]))
    check(store, [ids[1]], then, set())


def test_pins_and_what_a_job_may_lean_on_stay_as_they_are() -> None:
    store = MemoryStore()
    then, ids = train_and_store(store, STEPS)
    assert planned(store).weights_only == (ids[0],), "the run that saved them may lean on the others"
    then, ids = trained(store := MemoryStore())
    pin(store, read_history(store), "good", ids[0])
    assert prune(store).stripped.ids == (ids[1], ids[2])
    check(store, ids, then, {ids[1], ids[2]})


def test_a_run_that_resumes_or_a_pin_that_comes_between_plan_and_deed_is_spared() -> None:
    store = MemoryStore()
    then, ids = trained(store)
    plan = planned(store)
    pin(store, read_history(store), "late", ids[0])
    DirectWriter(store, run=RunId(3, "0ddba11f")).begin(resumed_from=ids[1])
    done = execute(plan, store, clock=SystemClock())
    assert done.stripped.ids == (ids[2],)
    assert done.stripped.skipped == (
        f"{ids[0].short}: pin late",
        f"{ids[1].short}: run {RunId(3, '0ddba11f')} resumed from it",
    )
    check(store, ids, then, {ids[2]})


def test_a_whole_restore_refuses_weights_and_takes_a_whole_one_instead() -> None:
    store = MemoryStore()
    then, ids = trained(store)
    prune(store, Keep(moments_last=2))
    training = Training(seed=3)
    before = training.bytes()
    for attempt in (
        lambda: load_into(store, training.state, 2),
        lambda: restore(store, Alone(), training.state, step=2, claim=lambda _: True),
    ):
        with pytest.raises(LayoutMismatch, match="weights only: optimizer was taken out") as caught:
            attempt()
        assert caught.value.missing == ("optimizer",)
    assert training.bytes() == before
    model = Training(seed=4).model
    assert load_into(store, {"model": model}, 2).step == 2
    assert weights({n: t.numpy().tobytes() for n, t in model.state_dict().items()}) == weights(then[2])
    # Without a step: passed over, with the reason, for one that is whole; here there is none older.
    newest = SnapshotName(read_history(store).newest or ids[0]).id
    store.delete([SnapshotName(newest).key, SnapshotName(ids[2]).key])
    with pytest.raises(NoSnapshot, match="weights only"):
        restore(store, Alone(), training.state, claim=lambda _: True)
    assert training.bytes() == before


def test_a_whole_snapshot_older_than_weights_is_found() -> None:
    store = MemoryStore()
    then, ids = trained(store)
    pin(store, read_history(store), "whole", ids[0])
    prune(store)
    newest = read_history(store).newest
    assert newest is not None
    store.delete([SnapshotName(newest).key])
    training = Training(seed=3)
    restored = restore(store, Alone(), training.state, claim=lambda _: True)
    assert restored is not None
    assert (restored.id, [id_ for id_, _ in restored.skipped]) == (ids[0], [ids[2], ids[1]])
    assert all("weights only" in reason for _, reason in restored.skipped)
    assert training.bytes() == then[2]


def test_list_show_diff_export_and_history_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = LocalStore(tmp_path / "store")
    then, ids = trained(store)
    url = str(tmp_path / "store")
    assert main(["prune", url, "--moments-last", "2", "--grace", "0", "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert told.count("keep weights of") == 2
    assert "would remove 0 snapshots, and the optimizers of 2 more" in told
    shown = {line.strip() for line in told.splitlines() if "/0" in line}
    before = {e.key for e in store.list("")}
    assert main(["prune", url, "--moments-last", "2", "--grace", "0", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["weights_only"] == [str(id_) for id_ in ids[:2]]
    assert before - {e.key for e in store.list("")} == shown == set(document["removed"])
    assert main(["list", url]) == 0
    assert capsys.readouterr().out.count("weights only") == 2
    assert main(["show", url, "2"]) == 0
    assert "weights only: without optimizer" in capsys.readouterr().out
    assert main(["plan", url, "--step", "2"]) == 0
    assert "weights only" in capsys.readouterr().out
    history = History(url)
    assert [one.without for one in history.list()] == [("optimizer",), ("optimizer",), (), ()]
    difference = history.diff(2, 6)
    assert {leaf.verdict for leaf in difference.leaves if leaf.path.startswith("optimizer.")} == {"added"}
    assert {leaf.verdict for leaf in difference.leaves if leaf.path.startswith("model.")} <= {"changed", "same"}
    (out,) = write_safetensors(open_export(store, ids[0]), tmp_path / "out.safetensors")
    there = {t.shard.leaf.path: t.read(0, t.shard.nbytes).tobytes() for t in read_safetensors(out).tensors}
    assert there == weights(then[2])


def test_weights_only_can_be_compacted_and_pruned_like_any_other() -> None:
    store = MemoryStore()
    then, ids = trained(store)
    prune(store)
    compact(plan_compact(store, threshold=1.0, threads=1), store)
    prune(store)
    check(store, ids, then, set(ids))


def test_who_reads_the_optimizer_meanwhile_is_told() -> None:
    store = MemoryStore()
    _, ids = trained(store)
    export = open_export(store, ids[0])
    followed = Followed(store, ids[0])
    prune(store)
    moments = [t for t in export.tensors if t.leaf.cls.startswith("slot:")]
    with pytest.raises(ckpt.CheckpointError, match="became weights only"):
        list(export.stream(moments))
    with pytest.raises(ckpt.CheckpointError, match="became weights only"):
        followed.read([t.want for t in moments])
    kept = [t for t in open_export(store, ids[0]).tensors if t.name.startswith("model.")]
    assert len(list(export.stream(kept))) == len(kept)


def test_killed_at_any_call_a_second_run_finishes_it() -> None:
    made = MemoryStore()
    then, ids = trained(made)
    fired = 0
    for n in itertools.count(1):
        inner = MemoryStore()
        for entry in made.list(""):
            inner.put(entry.key, made.get(entry.key))
        store = FaultyStore(inner, crash_at=n)
        try:
            execute(plan_prune(store, KEEP, grace=0, threads=1), store, clock=SystemClock(), threads=1)
        except Crash:
            fired += 1
        thinned = {id_ for id_, s in read_history(inner).snapshots.items() if s.without}
        check(inner, ids, then, thinned)
        execute(planned(inner), inner, clock=SystemClock(), threads=1)
        check(inner, ids, then, set(ids))
        kept = read_history(inner, packs=True)
        needed = {ref.key for s in kept.snapshots.values() for ref in s.parts}
        needed |= {key for s in kept.snapshots.values() for key, _ in s.packs}
        assert {key for key in kept.entries if key.startswith(("parts/", "packs/"))} == needed
        assert not inner.list("pins/")
        assert not inner.list("prunes/")
        if not store.fired:
            break
    assert fired > 20


def test_the_claims_of_a_process_that_was_killed_hold_nobody_up() -> None:
    """Whoever is known to be dead is not waited for; of another host's, nobody knows before grace."""
    now = FakeClock()
    store = MemoryStore(wall=lambda: now.now)
    then, ids = trained(store)
    me = identity(None)
    gone = Holder(me.host, 2**22 + 1, "1", me.boot, me.pid_space)
    far = Holder("elsewhere", 1, "1", "another boot", "another space")
    for n, (id_, holder) in enumerate(zip(ids, (gone, far, far), strict=True)):
        store.put(pin_key(f"compacting-x-{n}"), seal(PinDoc(FORMAT, f"compacting-x-{n}", str(id_), holder)))
    now.now += 60
    done = execute(plan_prune(store, KEEP, grace=3600, clock=now), store, clock=now)
    assert done.stripped.ids == (ids[0],)
    assert len(done.stripped.skipped) == 2
    now.now += 3600
    done = execute(plan_prune(store, KEEP, grace=3600, clock=now), store, clock=now)
    assert done.stripped.ids == (ids[1], ids[2])
    check(store, ids, then, set(ids))


def test_snapshots_without_optimizer_are_left_alone_and_not_looked_into_twice() -> None:
    store = MemoryStore()
    writer = DirectWriter(store)
    writer.begin()
    ids = [writer.step(n, {"w": np.full(5000, n, np.float32)}) for n in (1, 2, 3)]
    last = DirectWriter(store, run=RunId(2, "0ddba11e"))
    last.begin(resumed_from=ids[-1])
    last.step(100, {"w": np.zeros(3)})
    plan = planned(store)
    assert (plan.weights_only, plan.bare, plan.keys) == ((), frozenset(ids), ())
    counted = FaultyStore(store)
    again = plan_prune(counted, KEEP, grace=0, threads=1, bare=plan.bare)
    assert again.bare == plan.bare
    assert not [key for verb, key in counted.calls if verb == "get" and key.startswith("parts/")]


def test_a_tensor_that_something_else_calls_its_own_stays(tmp_path: Path) -> None:
    """Tied to what is no optimizer: its bytes are the model's, whatever its first name."""
    model = torch.nn.Linear(40, 40)
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.5), momentum=0.9)
    model(torch.ones(1, 40)).sum().backward()
    optimizer.step()
    shared = optimizer.state[model.weight]["momentum_buffer"]
    state: dict[str, Any] = {"aaa": optimizer, "model": model, "zzz": shared}
    with ckpt.Checkpointer(tmp_path / "store", state, mirror="off") as saver:
        for step in (1, 2, 3):
            saver.save(step).wait(60)
    url = str(tmp_path / "store")
    assert main(["prune", url, "--moments-last", "1", "--grace", "0"]) == 0
    assert [one.without for one in History(url).list()] == [("aaa",), (), ()]
    found = ckpt.load(url, "1/1")
    assert tensors(found)["zzz"] == tensors({"zzz": shared})["zzz"]
    mine = {path for path in found if path.startswith("aaa.")}
    assert mine <= {"aaa.state.model.weight.momentum_buffer"}, "the tensor rate, and the other moments, are gone"


def test_a_job_with_moments_last_goes_on_saving_and_restores_bit_for_bit(tmp_path: Path) -> None:
    """Automatic retention, on rank 0's own thread."""
    training = Training(seed=1)
    then: dict[int, dict[str, bytes]] = {}
    options = ckpt.Options(grace=0, chunk=4096)
    keep = ckpt.Keep(every=1, moments_last=2)
    for start in (0, 6, 12):
        with ckpt.Checkpointer(tmp_path / "s", training.state, keep=keep, mirror="off", options=options) as saver:
            assert saver.restore() == start
            for step in range(start + 1, start + 7):
                training.train(step)
                then[step] = training.bytes()
                saver.save(step).wait(60)
        training = Training(seed=start)
    history = History(tmp_path / "s").list()
    assert [one.step for one in history] == list(range(1, 19))
    thin = [one.step for one in history if one.without]
    assert thin == list(range(1, len(thin) + 1)) and len(thin) >= 12
    store = LocalStore(tmp_path / "s")
    for one in history:
        found = tensors(load(store, str(one.id)))
        assert {p: d for p, d in found.items() if p.startswith("model.")} == weights(then[one.step])


def test_what_a_revision_replaces_stays_while_the_fast_tier_alone_has_the_revision() -> None:
    """The fast tier may vanish at any moment, and the durable one must not have lost the step by then."""
    fast, durable = MemoryStore("fast"), MemoryStore("durable")
    store = TieredStore(fast, durable, keep_fast=None)
    then, ids = trained(store)
    copier = Tiers(store, FakeClock(), 0, 1)
    assert copier.catch_up(RunId(2, "0ddba11e")) is None
    execute(planned(store), store, clock=SystemClock(), threads=1)
    check(durable, ids, then, set())
    assert copier.catch_up(RunId(2, "0ddba11e")) is None
    assert execute(planned(store), store, clock=SystemClock(), threads=1).freed > 0
    check(durable, ids, then, set(ids))
