"""A job on a store of any kind: real ranks that train, save every step, are killed, and go on; and what must be true
of its store afterwards. Shared by the tests of this folder, one file per kind of store."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import pytest
import torch

import ckpt
from ckpt.cli import main
from ckpt.history.catalog import read_history
from recovery.verify import verify
from storage_backends import FsspecStore, Store
from tests.support.procs import Job, run_ranks, succeed
from tests.support.servers import Place
from tests.support.training import Training
from tests.support.worlds import digest, group, quiet, tensors

STEPS = 7
KEEP = 2


def opened(place: Place) -> Store:
    """As a user opens it, except fsspec's own local files, for which a user gets a better store."""
    return FsspecStore(place.url) if place.url.startswith("file://") else place.open()


def own(step: int, rank: int) -> torch.Tensor:
    """What a rank alone holds after a step."""
    return torch.randn(3000, generator=torch.Generator().manual_seed(100 * step + rank))


def trains(place: Place, world: int, steps: int, patience: float) -> None:
    """One rank: restores, trains, saves after every step and keeps the last two."""
    with group() if world > 1 else contextlib.nullcontext(0) as rank:
        training, mine = Training(), ckpt.PerRank(torch.zeros(3000))
        saver = ckpt.Checkpointer(
            opened(place),
            {**training.state, "own": mine},
            every=1,
            keep=ckpt.Keep(last=KEEP),
            mirror="off",  # so that all of a restore comes from the store
            options=quiet(commit_wait=patience, chunk=8192),
        )
        with saver:
            start = saver.restore()
            if start:
                assert torch.equal(mine.value, own(start, rank)), start
            print(f"restored {start}.")
            for step in range(start, steps):
                training.train(step)
                mine.value.copy_(own(step + 1, rank))
                saver.step(step + 1)
                print(f"captured {step + 1}.")


def play(place: Place, world: int, kills: Sequence[int] = (2, 4)) -> None:
    """Train to the end, killed (all ranks, SIGKILL) while the saves of these steps are in flight."""
    store = opened(place)
    restored = 0
    for kill in kills:
        with Job(trains, world, [place, world, STEPS, 60.0]) as job:
            job.until(0, f"restored {restored}.")
            job.until(0, f"captured {kill}.")
            job.kill_all()
            job.wait()
        newest = read_history(store).newest
        assert newest is not None and newest.step >= kill - 1, newest
        restored = newest.step
    outputs = succeed(run_ranks(trains, world, [place, world, STEPS, 60.0]))
    assert all(f"restored {restored}." in output for output in outputs)


def check(place: Place, world: int) -> None:
    """The bits of a training that was never hurt, nothing damaged, and nothing kept that nobody asked for."""
    store = opened(place)
    check_bits(store, STEPS)
    assert findings(store) == []
    steps = [id_.step for id_ in sorted(read_history(store).snapshots)]
    assert steps[-KEEP:] == [STEPS - 1, STEPS], steps


def check_bits(store: Store, steps: int) -> None:
    training = Training()
    for step in range(steps):
        training.train(step)
    expected = {name: digest(tensor) for name, tensor in tensors(training.state).items()}
    loaded = ckpt.load(store)
    assert {name: digest(loaded[name]) for name in expected} == expected
    assert len(expected) > 10


def findings(store: Store) -> list[str]:
    return [finding.text for finding in verify(store, deep=True, only=None) if finding.level == "error"]


def check_command_line(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    """What a user does by hand: list, verify, prune (leftovers of the killed saves too), verify again, load."""

    def run(verb: str, *words: str) -> str:
        assert main([verb, place.url, *place.flags(), *words]) == 0
        return capsys.readouterr().out

    assert str(STEPS) in run("list")
    assert "every byte" in run("verify", "--deep")
    run("prune", "--keep-last", "1", "--grace", "0")
    assert "every byte" in run("verify", "--deep")
    store = opened(place)
    history = read_history(store)
    # The one before stays too: what the newest leaned on, a job that goes on may lean on again.
    assert [id_.step for id_ in sorted(history.snapshots)] in ([STEPS], [STEPS - 1, STEPS])
    check_bits(store, STEPS)
    named = {key for snapshot in history.snapshots.values() for key, _ in snapshot.packs}
    assert {entry.key for entry in store.list("packs/")} == named, "packs that no snapshot names are left"
