"""Real ranks on two tiers: one fast tier for all of them, or none."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

import ckpt
from ckpt.history.catalog import read_history
from recovery.verify import verify
from storage_backends import open_store
from storage_backends.base import Refused
from storage_backends.local import LocalStore
from tests.support.procs import Job, run_ranks, succeed
from tests.support.worlds import PATIENT, group, quiet

pytestmark = pytest.mark.e2e


def own(rank: int, step: int) -> torch.Tensor:
    return torch.randn(5000, generator=torch.Generator().manual_seed(100 * step + rank))


def saves(url: str, first: int, last: int) -> None:
    with group() as rank:
        state: dict[str, object] = {"own": ckpt.PerRank(torch.zeros(5000))}
        with ckpt.Checkpointer(url, state, mirror="off", options=quiet()) as saver:
            assert saver.restore() == first
            if first:
                assert torch.equal(state["own"].value, own(rank, first))  # type: ignore[attr-defined]
            for step in range(first + 1, last + 1):
                state["own"].value.copy_(own(rank, step))  # type: ignore[attr-defined]
                saver.save(step).wait(PATIENT)


def saves_and_waits(url: str) -> None:
    with group() as rank:
        state: dict[str, object] = {"own": ckpt.PerRank(torch.zeros(5000))}
        saver = ckpt.Checkpointer(url, state, mirror="off", options=quiet())
        saver.restore()
        for step in (1, 2):
            state["own"].value.copy_(own(rank, step))  # type: ignore[attr-defined]
            saver.save(step).wait(PATIENT)
        print("saved", flush=True)
        signal.pause()


def is_refused(shared: str, of_its_own: str) -> None:
    with group() as rank:
        url = f"tiered::{of_its_own}/node{rank // 2}|{shared}"
        saver = ckpt.Checkpointer(url, {"a": torch.zeros(3)}, mirror="off", options=quiet())
        with pytest.raises(Refused, match=r"is not one place for all ranks: 1 of them do not find .* first rank 2"):
            saver.restore()
        saver.close()


def steps(folder: Path) -> list[int]:
    return sorted(id_.step for id_ in read_history(LocalStore(folder)).snapshots)


def test_three_ranks_share_a_fast_tier_and_all_of_them_copy(tmp_path: Path) -> None:
    url = f"tiered::{tmp_path}/fast|{tmp_path}/durable"
    succeed(run_ranks(saves, 3, (url, 0, 3)))
    assert steps(tmp_path / "durable") == [1, 2, 3]
    assert steps(tmp_path / "fast") == [2, 3]
    succeed(run_ranks(saves, 3, (url, 3, 4)))
    assert [f.text for f in verify(open_store(url), deep=True) if f.level == "error"] == []


def test_killed_after_a_commit_and_before_its_copy_the_next_start_copies_it(tmp_path: Path) -> None:
    """All ranks are killed while the durable tier takes nothing: steps 1 and 2 are on the fast tier alone."""
    url = f"tiered::{tmp_path}/fast|{tmp_path}/durable"
    (tmp_path / "durable").mkdir()
    (tmp_path / "durable" / "packs").write_text("a file where the folder of packs should be: every copy fails")
    with Job(saves_and_waits, 3, (url,)) as job:
        for rank in range(3):
            job.until(rank, "saved")
        job.kill_all()
    assert steps(tmp_path / "fast") == [1, 2]
    assert steps(tmp_path / "durable") == []
    (tmp_path / "durable" / "packs").unlink()
    succeed(run_ranks(saves, 3, (url, 2, 3)))
    assert steps(tmp_path / "durable") == [1, 2, 3]
    assert [f.text for f in verify(LocalStore(tmp_path / "durable"), deep=True) if f.level == "error"] == []


def test_disks_of_several_nodes_under_one_path_are_refused_on_all_ranks(tmp_path: Path) -> None:
    succeed(run_ranks(is_refused, 3, (f"{tmp_path}/durable", f"{tmp_path}/fast")))
