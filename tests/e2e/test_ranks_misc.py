"""Three real ranks that must stay together whatever happens to one of them, through the front door."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import ckpt
from ckpt.errors import CheckpointError, LayoutMismatch, SaveFailed, UnsupportedState
from storage_backends import open_store
from storage_backends.local import LocalStore
from tests.support.faulty import GateStore, SwitchStore
from tests.support.procs import Job, run_ranks, show, succeed
from tests.support.worlds import PATIENT, counted, group, quiet, stored_parts

pytestmark = pytest.mark.e2e


def on_three(function: Any, *args: Any) -> list[str]:
    return succeed(run_ranks(function, 3, args))


def everyone(value: int) -> list[int]:
    """What every rank passed."""
    found = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(found, torch.tensor([value]))
    return [int(each) for each in found]


# --- what is per rank


def keeps_its_own(url: str) -> None:
    with group() as rank:

        def state(fill: int) -> dict[str, object]:
            return {
                "noise": ckpt.PerRank(torch.full((2 + rank, 3), float(fill))),
                "seen": ckpt.PerRank(np.full(4, fill)),
                "both": ckpt.PerRank({"deep": [torch.full((1,), fill)], "rank": rank}),
                "shared": torch.arange(5.0) if fill else torch.zeros(5),
                "value": {"rank": rank} if fill else None,
            }

        first = state(10 + rank)
        with ckpt.Checkpointer(url, first, mirror="off", options=quiet(replica_check=1)) as saver:
            saver.restore()
            saver.save(1).wait(PATIENT)
        second = state(0)
        with ckpt.Checkpointer(url, second, mirror="off", options=quiet(replica_check=1)) as saver:
            assert saver.restore() == 1
            noise, seen = (saver.state[name].value for name in ("noise", "seen"))  # type: ignore[attr-defined]
            assert torch.equal(noise, torch.full((2 + rank, 3), 10.0 + rank))
            assert np.array_equal(seen, np.full(4, 10 + rank))
            assert saver.state["value"] == {"rank": rank}
            assert torch.equal(second["shared"], torch.arange(5.0))  # type: ignore[arg-type]
            both: Any = saver.state["both"]
            both = both.value if isinstance(both, ckpt.PerRank) else both
            assert both == {"deep": [torch.full((1,), 10 + rank)], "rank": rank}
            again = saver.save(2)
            again.wait(PATIENT)
            assert again.report is not None and again.report.changed == 0, again.report


def test_what_is_declared_per_rank_comes_back_to_its_rank_of_any_shape(tmp_path: Path) -> None:
    on_three(keeps_its_own, str(tmp_path / "store"))
    parts = stored_parts(tmp_path / "store")
    shapes = [[row.shape for row in parts[rank].shards if row.leaf == "noise"] for rank in range(3)]
    assert shapes == [[(2, 3)], [(3, 3)], [(4, 3)]]


def forgets_to_declare(url: str) -> None:
    with group() as rank:
        saver = ckpt.Checkpointer(url, {"x": torch.zeros(2 + (rank == 1))}, mirror="off", options=quiet())
        saver.restore()
        for _ in range(2):  # asked again, refused again, nobody hangs
            with pytest.raises(LayoutMismatch, match=r"x: .*ckpt\.PerRank") as told:
                saver.save(1)
            assert list(told.value.changed) == ["x"]
        saver.state["x"] = torch.full((2,), float(rank == 2))
        with pytest.raises(SaveFailed, match=r"leaf x .*rank 2 holds") as differs:
            saver.save(2).wait(PATIENT)
        assert differs.value.stage == "replicas"
        saver.state["x"] = ckpt.PerRank(torch.full((2,), float(rank)))
        with pytest.warns(RuntimeWarning, match="step 2"):
            saver.save(3).wait(PATIENT)
        saver.close()


def test_an_undeclared_tensor_that_differs_is_refused_by_shape_and_found_by_value(tmp_path: Path) -> None:
    on_three(forgets_to_declare, str(tmp_path / "store"))
    assert [len([r for r in p.shards if r.per_rank]) for p in stored_parts(tmp_path / "store").values()] == [1] * 3


def has_more(url: str) -> None:
    with group() as rank:

        def state(fill: float) -> dict[str, object]:
            found: dict[str, object] = {"shared": torch.full((6,), fill)}
            if rank == 0:
                found["average"] = torch.full((4,), fill + 1)
            if rank in (0, 2):
                found["pair"] = torch.full((3,), fill + 2)
            return found

        with ckpt.Checkpointer(url, state(5.0), mirror="off", options=quiet()) as saver:
            saver.restore()
            saver.save(1).wait(PATIENT)
        second = state(0.0)
        with ckpt.Checkpointer(url, second, mirror="off", options=quiet()) as saver:
            assert saver.restore() == 1
            assert {name: float(tensor[0]) for name, tensor in second.items()} == {  # type: ignore[index]
                name: float(tensor[0])  # type: ignore[index]
                for name, tensor in state(5.0).items()
            }
            again = saver.save(2)
            again.wait(PATIENT)
            assert again.report is not None and again.report.changed == 0, again.report
        # Stored, and live nowhere any more: that is a difference, told on all ranks.
        second.pop("pair", None)
        with (
            ckpt.Checkpointer(url, second, mirror="off", options=quiet()) as saver,
            pytest.raises(LayoutMismatch, match="pair"),
        ):
            saver.restore()


def test_a_leaf_that_only_some_ranks_track_comes_back_there_and_is_missed_where_none_does(tmp_path: Path) -> None:
    on_three(has_more, str(tmp_path / "store"))


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)


def drifts_apart(url: str) -> None:
    with group() as rank:
        model = Norm()
        norm: Any = model.norm
        state: dict[str, object] = {"model": model}
        stages = nn.BatchNorm1d(3)  # a stage of a pipeline that ranks 1 and 2 hold
        with torch.no_grad():
            stages(torch.randn(5, 3, generator=torch.Generator().manual_seed(rank)))
        if rank:
            state["stage"] = stages
        saver = ckpt.Checkpointer(url, state, mirror="off", options=quiet())
        saver.restore()
        calls = counted(saver)
        seen = []
        for step in range(6):
            if step in (2, 4):
                norm(torch.randn(5, 4, generator=torch.Generator().manual_seed(rank)))
            saver.save(step).wait(PATIENT)
            seen.append(dict(calls))
            calls.clear()
        one = {"vote": 1}
        assert seen == [{"vote": 1, "gather": 1}, one, {"vote": 1, "gather": 1}, one, one, one], seen

        # Equal again by chance, they stay per rank, also across a restart: the save after it is not a full one.
        norm.running_mean.fill_(7)
        norm.running_var.fill_(7)
        saver.save(6).wait(PATIENT)
        saver.close()
        with ckpt.Checkpointer(url, state, mirror="off", options=quiet()) as saver:
            assert saver.restore() == 6
            again = saver.save(7)
            again.wait(PATIENT)
            assert again.report is not None and again.report.changed == 0, again.report


def test_buffers_cost_a_gather_only_when_they_begin_to_differ(tmp_path: Path) -> None:
    on_three(drifts_apart, str(tmp_path / "store"))
    own = [{row.leaf for row in part.shards if row.per_rank} for part in stored_parts(tmp_path / "store").values()]
    norm = {"model.norm.running_mean", "model.norm.running_var"}
    stage = {"stage.running_mean", "stage.running_var", "stage.num_batches_tracked"}
    assert own == [norm, norm | stage, norm | stage]


# --- calls that the ranks do not make together


def refuses_on_one(url: str) -> None:
    with group() as rank:
        state: dict[str, object] = {"t": torch.zeros(9), "v": (lambda: 0) if rank == 1 else 3}
        saver = ckpt.Checkpointer(url, state, mirror="off", options=quiet())
        saver.restore()
        kind, says = (UnsupportedState, "v") if rank == 1 else (SaveFailed, "rank 1 could not capture")
        for _ in range(2):
            with pytest.raises(kind, match=says):
                saver.save(1)
        saver.state["v"] = 3
        with pytest.raises(ValueError if rank == 2 else SaveFailed, match="-4" if rank == 2 else "rank 2 could not"):
            saver.save(-4 if rank == 2 else 1)
        saver.save(1).wait(PATIENT)
        saver.close()


def test_what_one_rank_refuses_no_rank_saves_and_the_next_save_works(tmp_path: Path) -> None:
    on_three(refuses_on_one, str(tmp_path / "store"))


def disagrees(url: str) -> None:
    with group() as rank:
        saver = ckpt.Checkpointer(url, {"t": torch.zeros(9)}, every=5, mirror="off", options=quiet())
        saver.restore()
        with pytest.raises(CheckpointError, match="different steps, from 7 to 9"):
            saver.save(7 + rank)
        saver.save(9).wait(PATIENT)
        # Rank 1 counts one ahead, so that it alone believes a save to be due. Two vectors of different lengths would
        # end the process here, without a word.
        saver.step(14 + (rank == 1) - 1)
        with pytest.raises(CheckpointError, match=r"different steps, from 13 to 14"):
            saver.step(14 + (rank == 1))
        saver.step(16)
        assert saver.step(20) is not None
        saver.close()


def test_unequal_steps_are_an_error_on_all_ranks_and_equal_ones_work_again(tmp_path: Path) -> None:
    on_three(disagrees, str(tmp_path / "store"))


def saves_alone(url: str) -> None:
    with group() as rank:
        saver = ckpt.Checkpointer(url, {"t": torch.zeros(9)}, mirror="off", options=quiet())
        saver.restore()
        saver.step(1)
        with pytest.raises(CheckpointError, match=r"some ranks called save\(\) and others step\(\)"):
            if rank == 0:
                saver.save(2)
            saver.step(2)
            saver.step(3)
        saver.close()


def test_a_save_inside_if_rank_0_is_an_error_on_all_ranks_at_once_where_the_others_call_step(tmp_path: Path) -> None:
    on_three(saves_alone, str(tmp_path / "store"))


def saves_while_others_train(url: str) -> None:
    with group() as rank:
        saver = ckpt.Checkpointer(url, {"t": torch.zeros(9)}, mirror="off", options=quiet(group_timeout=1))
        saver.restore()
        if rank == 0:
            with pytest.raises(CheckpointError, match=r"save\(\)/restore\(\) was not called on every rank"):
                saver.save(2)
            print("told")
        else:
            sys.stdin.readline()
        saver.close()


def test_a_save_on_one_rank_alone_is_an_error_that_says_so_after_the_groups_timeout(tmp_path: Path) -> None:
    with Job(saves_while_others_train, 2, [str(tmp_path / "store")]) as job:
        job.until(0, "told")
        job.tell(1)
        succeed(job.wait())


# --- one rank is slow, fails, or dies


def opens_when_waited_for(saver: ckpt.Checkpointer, store: GateStore) -> None:
    """The training thread has got as far as waiting for this rank's part: now the store works again."""
    waited: Any = saver._writer.wait_handed_in
    saver._writer.wait_handed_in = lambda timeout: store.gate.set() or waited(timeout)  # type: ignore[method-assign]


def is_slow(url: str) -> None:
    with group() as rank:
        store = GateStore(LocalStore(url), verbs=frozenset({"put"}), where=lambda key: key.startswith("parts/"))
        store.gate.set()
        saver = ckpt.Checkpointer(
            store, {"t": torch.zeros(9)}, every=1, when_busy="skip", mirror="off", options=quiet()
        )
        saver.restore()
        if rank == 1:
            store.gate.clear()
        first = saver.save(1)
        second = saver.save(2)
        assert second.skipped and saver.stats.skipped == 1
        store.gate.set()
        first.wait(PATIENT)
        saver.wait(PATIENT)
        third = saver.save(3)
        third.wait(PATIENT)
        assert not third.skipped

        # The last save of a job that was asked to stop is not skipped: all wait for the one in flight.
        if rank == 1:
            store.gate.clear()
        fourth = saver.save(4)
        if rank == 1:
            opens_when_waited_for(saver, store)
        if rank == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        fifth = saver.step(5)
        assert saver.stopping and fourth.error is None
        assert fifth is not None and not fifth.skipped
        saver.close()
        assert (saver.stats.saves, saver.stats.skipped) == (4, 1)


def test_a_busy_rank_makes_all_skip_together_but_never_the_last_save(tmp_path: Path) -> None:
    on_three(is_slow, str(tmp_path / "store"))


def fails_once(url: str, on_error: str) -> None:
    with group() as rank:
        store = SwitchStore(LocalStore(url))
        tensor = torch.zeros(4000)
        saver = ckpt.Checkpointer(store, {"t": tensor}, mirror="off", options=quiet(on_error=on_error, commit_wait=600))
        saver.restore()
        saver.save(1).wait(PATIENT)
        tensor += 1
        if rank == 1:
            store.fail(ckpt.Refused, verb="put", key="parts/")
        ticket = saver.save(2)
        if rank == 1:
            with pytest.raises(SaveFailed, match="step 2"):
                ticket.wait(PATIENT)
            store.heal()
        dist.barrier()
        began = time.monotonic()
        tensor += 1
        if on_error == "warn":
            with pytest.warns(RuntimeWarning, match="step 2 was not saved"):
                third = saver.save(3)
        else:
            with pytest.raises(SaveFailed, match="step 2"):
                saver.save(3)
            third = saver.save(3)
        third.wait(PATIENT)
        assert isinstance(ticket.error, SaveFailed)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            saver.save(4).wait(PATIENT)  # told once, and on no rank twice
        assert time.monotonic() - began < PATIENT, "somebody waited for a commit that could not come"
        saver.close()
        assert (saver.stats.saves, saver.stats.failed) == (3, 1)


@pytest.mark.parametrize("on_error", ["warn", "raise"])
def test_a_write_that_fails_on_one_rank_is_told_on_all_at_the_next_save_which_works(
    tmp_path: Path, on_error: str
) -> None:
    """C2 and F1: not published, the step before stays newest until the next one."""
    url = tmp_path / "store"
    on_three(fails_once, str(url), on_error)
    assert [e.key[-6:-5] for e in open_store(str(url)).list("snapshots/")] == ["1", "3", "4"]
    assert float(ckpt.load(url)["t"][0]) == 2


def fail_in_turn(url: str) -> None:
    """The save of step n fails on rank n alone."""
    with group() as rank:
        store, tensor = SwitchStore(LocalStore(url)), torch.zeros(4000)
        options = quiet(on_error=3, commit_wait=600)
        saver = ckpt.Checkpointer(store, {"t": tensor}, mirror="off", options=options)
        saver.restore()
        for step in (0, 1, 2):
            store.heal()
            if rank == step:
                store.fail(ckpt.Refused, verb="put", key="parts/")
            tensor += 1
            told = contextlib.nullcontext() if step == 0 else pytest.warns(RuntimeWarning, match=f"step {step - 1} was")
            with told:
                saver.save(step)
            assert saver._writer.wait_handed_in(PATIENT)
        store.heal()
        tensor += 1
        with pytest.raises(SaveFailed, match="3 saves in a row have failed; step 2 was not saved"):
            saver.save(3)
        saver.save(3).wait(PATIENT)
        saver.close()


def test_failures_in_a_row_are_counted_alike_by_all_ranks_whichever_fails(tmp_path: Path) -> None:
    """C2."""
    url = tmp_path / "store"
    on_three(fail_in_turn, str(url))
    assert [e.key[-6:-5] for e in open_store(str(url)).list("snapshots/")] == ["3"]
    assert float(ckpt.load(url)["t"][0]) == 4


def fails_while_the_others_wait(url: str, last: str) -> None:
    with group() as rank:
        switch = SwitchStore(LocalStore(url))
        store = GateStore(switch, where=lambda key: key.startswith("parts/"))
        store.gate.set()
        tensor = torch.zeros(4000)
        saver = ckpt.Checkpointer(store, {"t": tensor}, mirror="off", options=quiet(commit_wait=PATIENT * 10))
        saver.restore()
        saver.save(1).wait(PATIENT)
        if rank == 1:
            store.gate.clear()
            switch.fail(ckpt.Refused, verb="put", key="parts/")
        ticket = saver.save(2)
        if rank == 1:
            opens_when_waited_for(saver, store)
        if last == "close":
            with pytest.raises(SaveFailed, match="step 2"):
                saver.close()
        elif last == "restore":
            assert saver.restore() == 1
        else:
            with pytest.warns(RuntimeWarning, match="step 2 was not saved"):
                saver.save(3)
            with pytest.raises(SaveFailed, match="step 3"):
                saver.close()
        assert isinstance(ticket.error, SaveFailed)
        assert ("gave up waiting; no part of rank 1" in str(ticket.error)) == (rank != 1), ticket.error


@pytest.mark.parametrize("last", ["save", "restore", "close"])
def test_ranks_that_wait_for_a_commit_hear_at_once_that_another_rank_could_not_write(tmp_path: Path, last: str) -> None:
    on_three(fails_while_the_others_wait, str(tmp_path / "store"), last)


def dies_before_its_part(url: str, last: str) -> None:
    with group() as rank:
        store = GateStore(LocalStore(url), where=lambda key: key.startswith("parts/"))
        store.gate.set()
        saver = ckpt.Checkpointer(
            store, {"t": torch.zeros(9)}, mirror="off", options=quiet(commit_wait=PATIENT * 10, group_timeout=PATIENT)
        )
        saver.restore()
        saver.save(1).wait(PATIENT)
        if rank == 1:
            store.gate.clear()
        saver.save(2)
        if rank == 1:
            assert store.arrived.wait(PATIENT)
            os.kill(os.getpid(), signal.SIGKILL)
        if last == "close":
            with pytest.raises(SaveFailed, match="no part of rank 1"):
                saver.close()
        else:
            with pytest.raises(CheckpointError, match="another rank is gone"):
                saver.save(3)
            with pytest.raises(SaveFailed, match="step 2"):
                saver.close()
        print("went on")
        os._exit(0)  # not through the end of the group, which waits for the dead


@pytest.mark.parametrize("last", ["save", "close"])
def test_ranks_that_wait_for_a_commit_notice_at_once_that_another_rank_has_died(tmp_path: Path, last: str) -> None:
    results = run_ranks(dies_before_its_part, 3, (str(tmp_path / "store"), last))
    assert [("went on" in result.out) for result in results] == [True, False, True], show(results)


# --- an adaptive cadence


def saves_when_rank_0_says(url: str) -> None:
    with group() as rank:
        state = {"weights": torch.zeros(8)}
        with ckpt.Checkpointer(url, state, every=ckpt.Adaptive(), mirror="off", options=quiet()) as saver:
            saver.restore()
            pace = saver._pace
            assert pace is not None
            saved = []
            for step in range(1, 9):
                if rank:
                    pace._last = -1e9  # by its own clock every step would be due
                if rank == 0 and step == 5:
                    pace._last = -1e9
                state["weights"] += 1
                ticket = saver.step(step)
                if ticket is not None:
                    ticket.wait(PATIENT)
                    saved.append(step)
            # Due at step 1 and known to all at step 2; due again at step 5, known at step 6.
            assert saved == [2, 6], saved
            blocked, durable = pace._elsewhere
            assert blocked >= pace.costs[0] - 1e-5 and durable >= pace.costs[1] - 1e-2


def test_an_adaptive_cadence_is_rank_0_s_word_and_heard_by_all_at_the_next_step(tmp_path: Path) -> None:
    on_three(saves_when_rank_0_says, str(tmp_path / "store"))
    assert [snapshot.step for snapshot in ckpt.History(tmp_path / "store").list()] == [2, 6]
