"""The front door, in one process on stores in memory."""

from __future__ import annotations

import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckpt
from ckpt import tenure
from ckpt.errors import HistoryExists, LayoutMismatch, NoSnapshot, SaveFailed, StoreInUse, UnsupportedState
from ckpt.history.catalog import read_history
from storage_backends.memory import MemoryStore
from tests.support.faulty import GateStore, SwitchStore
from tests.support.training import Training

QUIET = ckpt.Options(commit_wait=20, heartbeat=0.05)


def gated(inner: MemoryStore, *, verb: str = "put") -> GateStore:
    """An open gate for one verb; heartbeats pass it always."""
    store = GateStore(inner, verbs=frozenset({verb}), where=lambda key: not key.startswith("alive/"))
    store.gate.set()
    return store


def test_a_restored_training_goes_on_bit_identical_to_one_that_was_never_hurt() -> None:
    store = MemoryStore()
    unhurt = Training()
    for step in range(10):
        unhurt.train(step)

    first = Training()
    with ckpt.Checkpointer(store, first.state, every=2) as saver:
        assert saver.restore() == 0
        for step in range(7):
            first.train(step)
            saver.step(step + 1)
    second = Training(seed=99)
    with ckpt.Checkpointer(store, second.state, every=2) as saver:
        start = saver.restore()
        assert start == 6
        for step in range(start, 10):
            second.train(step)
            saver.step(step + 1)
        assert saver.restored is not None and saver.restored.step == 6
    assert second.bytes() == unhurt.bytes()


def test_the_value_at_save_is_what_loads() -> None:
    """B1: changes right after `save()`, on a store that is still busy, are not in it."""
    gate = gated(MemoryStore())
    tensor, array, values = torch.arange(1000.0), np.arange(500), [1, [2]]
    saver = ckpt.Checkpointer(gate, {"t": tensor, "a": array, "v": values}, options=QUIET)
    saver.restore()
    gate.gate.clear()
    ticket = saver.save(1)
    tensor.fill_(-1)
    array[:] = -1
    values[1].append(3)  # type: ignore[union-attr]
    gate.gate.set()
    ticket.wait(60)
    saver.close()
    found = ckpt.load(gate)
    assert torch.equal(found["t"], torch.arange(1000.0))
    assert np.array_equal(found["a"], np.arange(500)) and isinstance(found["a"], np.ndarray)
    assert ckpt.load(gate, names=["v*"]) == {"v": [1, [2]]}


def test_every_step_scalar_loads_as_it_was_at_its_save() -> None:
    """B2: AdamW's step k + 1 runs before the write of k ends."""
    gate = gated(MemoryStore())
    training = Training()
    saver = ckpt.Checkpointer(gate, training.state, options=QUIET)
    saver.restore()
    for step in range(1, 4):
        training.train(step)
        gate.gate.clear()
        ticket = saver.save(step)
        training.train(100)
        gate.gate.set()
        ticket.wait(60)
        for slots in training.optimizer.state.values():
            slots["step"].fill_(step)
        found = ckpt.load(gate, step)
        steps = {float(v) for name, v in found.items() if name.endswith(".step")}
        assert steps == {float(step)}
    saver.close()


def test_unchanged_state_stores_documents_only() -> None:
    store = SwitchStore(MemoryStore())
    tensor = torch.randn(100_000)
    with ckpt.Checkpointer(store, {"t": tensor}) as saver:
        saver.restore()
        first = saver.save(1)
        first.wait(60)
        packs = [key for verb, key in store.calls if verb == "put" and key.startswith("packs/")]
        second = saver.save(2)
        second.wait(60)
        assert packs == [key for verb, key in store.calls if verb == "put" and key.startswith("packs/")]
        assert second.report is not None and (second.report.changed, second.report.stored) == (0, 0)


def test_saves_go_on_incrementally_after_a_restart() -> None:
    store = MemoryStore()
    one = torch.randn(300_000)
    with ckpt.Checkpointer(store, {"t": one}) as saver:
        saver.restore()
        saver.save(1)
    two = torch.zeros(300_000)
    with ckpt.Checkpointer(store, {"t": two}) as saver:
        assert saver.restore() == 1
        two[5] += 1
        ticket = saver.save(2)
        ticket.wait(60)
        assert ticket.report is not None and 0 < ticket.report.changed <= 512 * 1024
        assert ticket.report.stored < 1000
    assert torch.equal(ckpt.load(store)["t"], two)


def test_a_failed_save_is_known_no_later_than_the_next_one() -> None:
    """F1 and A1: step and cause are named, and the save after it holds what changed in the failed one."""
    store = SwitchStore(MemoryStore())
    training = Training()
    saver = ckpt.Checkpointer(store, training.state, options=QUIET)
    saver.restore()
    for step in (1, 2):
        training.train(step)
        saver.save(step).wait(60)
    training.train(3)
    store.fail(ckpt.Refused, verb="put", key="packs/")
    failed = saver.save(3)
    with pytest.raises(SaveFailed, match="step 3"):
        failed.wait(60)
    store.heal()
    training.train(4)
    with pytest.warns(RuntimeWarning, match="step 3 was not saved"):
        fourth = saver.save(4)
    fourth.wait(60)
    saver.close()
    assert (saver.stats.saves, saver.stats.failed) == (3, 1)
    again = Training(seed=5)
    with ckpt.Checkpointer(store, again.state) as other:
        assert other.restore() == 4
    assert again.bytes() == training.bytes()


def test_a_snapshot_tells_what_its_save_cost_the_training() -> None:
    store, training = MemoryStore(), Training()
    with ckpt.Checkpointer(store, training.state) as saver:
        for step in (1, 2):
            training.train(step)
            saver.save(step).wait()
    first, second = read_history(store).snapshots.values()
    assert first.blocked and second.blocked and first.durable is None
    assert second.durable is not None and second.durable[0] == 1 and second.durable[1] > first.blocked


def test_on_error_raise_raises_at_the_next_save_and_the_one_after_works() -> None:
    store = SwitchStore(MemoryStore())
    options = ckpt.Options(on_error="raise")
    saver = ckpt.Checkpointer(store, {"t": torch.zeros(5000)}, options=options)
    saver.restore()
    store.fail(ckpt.Refused, verb="put", key="parts/")
    saver.save(1)
    with pytest.raises(SaveFailed, match="step 1"):
        saver.save(2)
    store.heal()
    saver.save(2).wait(60)
    saver.close()


def test_on_error_as_a_number_raises_after_so_many_in_a_row_and_the_next_save_is_right() -> None:
    store, tensor = SwitchStore(MemoryStore()), torch.zeros(5000)
    saver = ckpt.Checkpointer(store, {"t": tensor}, mirror="off", options=ckpt.Options(on_error=3))
    saver.restore()
    fate = iter([1, 1, 0, 1, 1, 1, 1, 0])  # 1: this save fails

    def save(step: int) -> None:
        store.heal()
        if next(fate):
            store.fail(ckpt.Refused, verb="put", key="parts/")
        tensor.fill_(step)
        saver.save(step)
        saver._writer.wait(60)  # not the ticket: that would raise what the next save shall tell

    save(1)
    with pytest.warns(RuntimeWarning, match=r"^step 1 was not saved"):
        save(2)
    with pytest.warns(RuntimeWarning, match=r"^2 saves in a row have failed; step 2 was not saved"):
        save(3)
    save(4)  # 3 was saved, so it begins anew
    with pytest.warns(RuntimeWarning, match=r"^step 4 "):
        save(5)
    with pytest.warns(RuntimeWarning, match=r"^2 saves in a row"):
        save(6)
    with pytest.raises(
        SaveFailed, match=r"^3 saves in a row have failed; step 6 was not saved: .* on purpose"
    ) as caught:
        saver.save(7)
    assert isinstance(caught.value.__cause__, SaveFailed)
    save(6)  # once more, and it fails once more
    with pytest.raises(SaveFailed, match="4 saves in a row"):
        saver.save(7)
    save(7)
    saver.close()
    assert [snapshot.step for snapshot in ckpt.History(store).list()] == [3, 7]
    assert torch.equal(ckpt.load(store)["t"], torch.full((5000,), 7.0))


def test_a_step_that_fails_twice_is_told_twice() -> None:
    store = SwitchStore(MemoryStore())
    saver = ckpt.Checkpointer(store, {"t": torch.zeros(5000)}, mirror="off")
    saver.restore()
    store.fail(ckpt.Refused, verb="put", key="parts/")
    saver.save(1)
    saver._writer.wait(60)
    with pytest.warns(RuntimeWarning, match="step 1 was not saved"):
        saver.save(1)
    with pytest.raises(SaveFailed, match="step 1"):
        saver.close()


def test_close_raises_what_nobody_was_told() -> None:
    store = SwitchStore(MemoryStore())
    saver = ckpt.Checkpointer(store, {"t": torch.zeros(5000)})
    saver.restore()
    store.fail(ckpt.Refused, verb="put", key="snapshots/")
    saver.save(1)
    with pytest.raises(SaveFailed, match="step 1"):
        saver.close()
    saver.close()  # a second time is fine


def test_what_the_body_raised_is_not_masked_by_a_failed_save() -> None:
    store = SwitchStore(MemoryStore())
    with pytest.raises(ZeroDivisionError), ckpt.Checkpointer(store, {"t": torch.zeros(5000)}) as saver:
        saver.restore()
        store.fail(ckpt.Refused, verb="put", key="snapshots/")
        saver.save(1)
        raise ZeroDivisionError


def test_a_busy_writer_is_waited_for_or_the_save_is_skipped() -> None:
    gate = gated(MemoryStore())
    saver = ckpt.Checkpointer(gate, {"t": torch.zeros(5000)}, every=1, when_busy="skip")
    saver.restore()
    gate.gate.clear()
    first = saver.save(1)
    second = saver.save(2)
    assert second.skipped and second.done() and saver.stats.skipped == 1
    gate.gate.set()
    first.wait(60)
    saver.wait()
    third = saver.save(3)
    third.wait(60)
    saver.close()
    assert not third.skipped and saver.stats.saves == 2


def test_saving_the_same_step_again_returns_its_ticket() -> None:
    saver = ckpt.Checkpointer(MemoryStore(), {"t": torch.zeros(5000)})
    saver.restore()
    ticket = saver.save(1)
    assert saver.save(1) is ticket
    ticket.wait(60)
    assert saver.save(1) is ticket
    saver.close()


def test_a_step_that_failed_or_is_lower_opens_a_run_of_its_own() -> None:
    store = SwitchStore(MemoryStore())
    tensor = torch.zeros(5000)
    saver = ckpt.Checkpointer(store, {"t": tensor}, options=QUIET)
    saver.restore()
    saver.save(5).wait(60)
    store.fail(ckpt.Refused, verb="put", key="parts/")
    with pytest.raises(SaveFailed):
        saver.save(6).wait(60)
    store.heal()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        tensor.fill_(6)
        saver.save(6).wait(60)
    tensor.fill_(4)
    saver.save(4).wait(60)
    saver.close()
    assert float(ckpt.load(store, "1/5")["t"][0]) == 0
    assert float(ckpt.load(store, "2/6")["t"][0]) == 6
    assert float(ckpt.load(store)["t"][0]) == 4, "the newest run is the newest line"


def test_a_store_with_a_history_is_not_written_to_by_surprise() -> None:
    store = MemoryStore()
    tensor = torch.zeros(5000)
    with ckpt.Checkpointer(store, {"t": tensor}) as saver:
        saver.save(7)
    with ckpt.Checkpointer(store, {"t": tensor}) as saver, pytest.raises(HistoryExists, match="restore"):
        saver.save(1)
    with ckpt.Checkpointer(store, {"t": tensor}, fresh=True) as saver:
        saver.save(1).wait(60)


def test_an_empty_store_restores_to_0_and_an_unreadable_one_never_does() -> None:
    store = SwitchStore(MemoryStore())
    with ckpt.Checkpointer(store, {"t": torch.zeros(9)}) as saver:
        assert saver.restore() == 0
        with pytest.raises(NoSnapshot):
            saver.restore(3)
        saver.save(1).wait(60)
    store.fail(ckpt.Unavailable, verb="list")
    with ckpt.Checkpointer(store, {"t": torch.zeros(9)}) as saver, pytest.raises(ckpt.StorageError):
        saver.restore()


def test_a_layout_that_does_not_fit_changes_nothing() -> None:
    store = MemoryStore()
    with ckpt.Checkpointer(store, {"a": torch.ones(3), "b": torch.ones(5)}) as saver:
        saver.save(1)
    live = {"a": torch.zeros(3), "b": torch.zeros(4), "c": torch.zeros(2)}
    with ckpt.Checkpointer(store, live) as saver, pytest.raises(LayoutMismatch) as caught:
        saver.restore()
    assert "c" in caught.value.missing and "b" in caught.value.changed
    assert all(float(t.sum()) == 0 for t in live.values())


def test_what_cannot_be_saved_is_refused_at_save_and_the_next_save_works() -> None:
    state: dict[str, Any] = {"t": torch.zeros(5000), "v": {"f": lambda: 0}}
    saver = ckpt.Checkpointer(MemoryStore(), state)
    saver.restore()
    with pytest.raises((UnsupportedState, ValueError), match="v"):
        saver.save(1)
    saver.state["v"] = {"f": 1}
    saver.save(1).wait(60)
    saver.close()


def test_plain_values_come_back_into_the_mapping() -> None:
    """J6, and `state` is where they are found."""
    store = MemoryStore()
    value = {"best": float("-inf"), "names": ("a", "b"), "big": 2**80, 3: {b"x", b"y"}, "nested": [np.float32(0.1)]}
    with ckpt.Checkpointer(store, {"value": value}) as saver:
        saver.save(1)
    with ckpt.Checkpointer(store, {"value": None}) as saver:
        saver.restore()
        assert saver.state["value"] == value


def test_a_damaged_newest_snapshot_is_passed_over_and_says_why() -> None:
    store = MemoryStore()
    tensor = torch.randn(5000)
    with ckpt.Checkpointer(store, {"t": tensor}) as saver:
        saver.save(1).wait(60)
        one = tensor.clone()
        tensor.normal_()
        saver.save(2).wait(60)
    packs = [entry.key for entry in store.list("packs/")]
    second = next(key for key in packs if f"/{2:012d}/" in key)
    data = bytearray(store.get(second))
    data[-1] ^= 1
    store.put(second, bytes(data))
    with ckpt.Checkpointer(store, {"t": tensor}) as saver:
        assert saver.restore() == 1
        assert saver.restored is not None and [id_.step for id_, _ in saver.restored.skipped] == [2]
        with pytest.raises(ckpt.DamagedError):
            saver.restore(2)
    assert torch.equal(tensor, one)


def test_going_back_starts_another_line_and_both_can_be_read() -> None:
    """E4: 10, 20, 30; back to 10; another 20. Nothing is re-based in silence."""
    store = MemoryStore()
    tensor = torch.zeros(5000)
    saver = ckpt.Checkpointer(store, {"t": tensor})
    saver.restore()
    for step in (10, 20, 30):
        tensor.fill_(step)
        saver.save(step).wait(60)
    assert saver.restore(10) == 10 and float(tensor[0]) == 10
    tensor.fill_(21)
    saver.save(20).wait(60)
    saver.close()
    assert float(ckpt.load(store, "1/20")["t"][0]) == 20
    assert float(ckpt.load(store, "2/20")["t"][0]) == 21
    assert float(ckpt.load(store)["t"][0]) == 21
    with pytest.raises(NoSnapshot, match="1/20"):
        ckpt.load(store, 20)


def test_keep_prunes_after_commits_and_save_does_not_wait_for_it() -> None:
    """D7: deletes happen on a thread of their own."""
    gate = gated(MemoryStore(), verb="delete")
    tensor = torch.zeros(50_000)
    saver = ckpt.Checkpointer(gate, {"t": tensor}, keep=ckpt.Keep(last=2), options=ckpt.Options(grace=0))
    saver.restore()
    gate.gate.clear()
    for step in range(1, 6):
        tensor.normal_()
        saver.save(step).wait(60)
    gate.gate.set()
    saver.save(6).wait(60)
    saver.close()
    kept = sorted(ckpt.load(gate, step)["t"][0].item() for step in (5, 6))
    assert len(kept) == 2
    with pytest.raises(NoSnapshot):
        ckpt.load(gate, 1)


def test_a_second_live_job_is_refused_by_name(tmp_path: Path) -> None:
    """E5 in small: another process's heartbeat advances."""
    from ckpt.format.names import RunId
    from ckpt.history import runs
    from ckpt.history.clock import SystemClock

    store = MemoryStore()
    other = runs.Identity("elsewhere", 4242, "1", "boot", "pid:[1]", None)
    clock = SystemClock()
    run = runs.open_run(store, clock, world_size=1, resumed_from=None, who=other)
    assert isinstance(run, RunId)
    heart = runs.Heartbeat(store, run, 0.02)
    heart.start()
    try:
        with ckpt.Checkpointer(store, {"t": torch.zeros(3)}, options=QUIET) as saver:
            with pytest.raises(StoreInUse, match="4242") as caught:
                saver.restore()
            assert caught.value.host == "elsewhere"
    finally:
        heart.stop(ended=False)


def test_close_with_a_timeout_ends_although_the_store_never_answers() -> None:
    """F3: the step is not published, and the process can end."""
    inner = MemoryStore()
    gate = gated(inner)
    saver = ckpt.Checkpointer(gate, {"t": torch.zeros(5000)})
    saver.restore()
    gate.gate.clear()
    saver.save(1)
    with pytest.raises(SaveFailed, match="step 1"):
        saver.close(timeout=0.05)
    assert not inner.list("snapshots/")
    gate.gate.set()


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"every": 0}, "every"),
        ({"every": True}, "every"),
        ({"capture": "magic"}, "capture"),
        ({"when_busy": "panic"}, "when_busy"),
        ({"mirror": "disk:"}, "mirror"),
    ],
)
def test_a_wrong_argument_is_named_at_once(arguments: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        ckpt.Checkpointer(MemoryStore(), {"t": torch.zeros(1)}, **arguments)


def test_a_bare_model_or_a_bare_number_to_keep_is_told_what_was_meant() -> None:
    model: Any = torch.nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"state is a Linear; expected names and what they stand for, .*'model': model"):
        ckpt.Checkpointer(MemoryStore(), model)
    three: Any = 3
    with pytest.raises(TypeError, match=r"keep=3: expected ckpt\.Keep\(last=3"):
        ckpt.Checkpointer(MemoryStore(), {"model": model}, keep=three)


@pytest.mark.parametrize("name", ["", "$random", 3])
def test_reserved_names_are_refused(name: Any) -> None:
    with pytest.raises(ValueError, match="state name"):
        ckpt.Checkpointer(MemoryStore(), {name: torch.zeros(1)})


@pytest.mark.parametrize("step", [-1, 1.5, True, "3", 10**12])
def test_a_step_is_a_number_of_steps(step: Any) -> None:
    with ckpt.Checkpointer(MemoryStore(), {"t": torch.zeros(1)}) as saver, pytest.raises(ValueError, match="step="):
        saver.save(step)


def test_a_closed_checkpointer_says_so() -> None:
    saver = ckpt.Checkpointer(MemoryStore(), {"t": torch.zeros(1)})
    saver.close()
    with pytest.raises(ckpt.CheckpointError, match="closed"):
        saver.save(1)


def test_waiting_threads_are_none_after_close() -> None:
    before = set(threading.enumerate())
    with ckpt.Checkpointer(MemoryStore(), {"t": torch.zeros(5000)}, keep=ckpt.Keep(last=1)) as saver:
        saver.save(1)
    left = [t for t in set(threading.enumerate()) - before if t.name.startswith("ckpt")]
    for thread in left:
        thread.join(10)
        assert not thread.is_alive(), thread


def test_a_store_that_fails_while_a_new_run_is_opened_can_be_saved_to_again() -> None:
    """The job has a part in the history: it must not be taken for a stranger because its own run had to be renewed."""
    store = SwitchStore(MemoryStore())
    tensor = torch.zeros(5000)
    saver = ckpt.Checkpointer(store, {"t": tensor}, options=QUIET)
    saver.restore()
    saver.save(5).wait(60)
    store.fail(ckpt.Unavailable, verb="put", key="runs/")
    tensor.fill_(4)
    with pytest.raises(ckpt.Unavailable):
        saver.save(4)
    store.heal()
    saver.save(4).wait(60)
    saver.close()
    assert float(ckpt.load(store)["t"][0]) == 4


def test_a_restore_that_failed_does_not_open_the_way_to_save_beside_the_history() -> None:
    store = SwitchStore(MemoryStore())
    tensor = torch.zeros(5000)
    with ckpt.Checkpointer(store, {"t": tensor}) as saver:
        saver.save(1)
    tensor.fill_(7)
    with ckpt.Checkpointer(store, {"t": tensor}) as saver:
        store.fail(ckpt.Unavailable, verb="get_range")
        with pytest.raises(ckpt.Unavailable):
            saver.restore()
        store.heal()
        with pytest.raises(HistoryExists):
            saver.save(1)
        assert saver.restore() == 1
        saver.save(2).wait(60)
    assert float(tensor[0]) == 0


def test_close_takes_no_longer_than_it_is_told_although_no_put_ever_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    """F3: neither the save, nor the prune, nor the heartbeat is waited for beyond the timeout."""
    monkeypatch.setattr(tenure, "PATIENCE", 1e6)
    inner = MemoryStore()
    gate = GateStore(inner, where=lambda key: bool(inner.list("snapshots/")))
    saver = ckpt.Checkpointer(gate, {"t": torch.zeros(5000)}, keep=ckpt.Keep(last=1), options=QUIET)
    saver.restore()
    saver.save(1)
    assert gate.arrived.wait(60)
    saver.save(2)
    with pytest.raises(SaveFailed, match="step 2"):
        saver.close(timeout=0.01)
    gate.gate.set()


def test_an_adaptive_cadence_saves_at_once_and_then_when_its_time_has_come() -> None:
    store, training = MemoryStore(), Training()
    with ckpt.Checkpointer(store, training.state, every=ckpt.Adaptive(), options=QUIET) as saver:
        pace = saver._pace
        assert pace is not None
        for step in (1, 2):
            training.train(step)
            ticket = saver.step(step)
            assert (ticket is not None) == (step == 1), "the interval is seconds at least, by the overhead"
            saver.wait()
        while pace.costs[0] < 1000.0:
            pace.began(0.0, 1000.0)  # a save that took ages, and as long ago
        assert pace._looking is not None
        pace._looking.join()
        pace._last = -1e9
        ticket = saver.step(3)
        assert ticket is not None
        ticket.wait()
    first, second = ckpt.History(store).list()
    assert (first.step, second.step) == (1, 3)
    assert first.cadence is None and second.cadence is not None and second.cadence > 1000 / 0.03 - 1


@pytest.mark.parametrize("every", [0, True, -1, 1.5, "10min"])
def test_a_cadence_that_makes_no_sense_is_refused(every: Any) -> None:
    with pytest.raises(ValueError, match=r"ckpt\.Adaptive"):
        ckpt.Checkpointer(MemoryStore(), {}, every=every)
