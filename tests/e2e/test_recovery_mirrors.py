"""Mirrors that went wrong while their ranks were dead: noticed before use, replaced by the next source, and said."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import ckpt
from ckpt.format.names import RunId, SnapshotId
from ckpt.mirror.records import read_head, read_layout, read_slot
from storage_backends import open_store
from storage_backends.base import Store
from storage_backends.local import LocalStore
from tests.support.faulty import GateStore
from tests.support.mirrors import leave_mirror
from tests.support.nodes import (
    BUILD,
    counting,
    is_as_noted,
    killed,
    mirrors_in,
    note_local,
    run,
    said_of,
    saver_of,
    say,
    train_and_save,
    wait_for_the_end,
)
from tests.support.worlds import PATIENT, group, stored_parts

pytestmark = pytest.mark.e2e

STEPS = 3
CHUNK = 4096
RANKS = 3


def lives(kind: str, url: str, nodes: list[str], notes: str, seed: int) -> None:
    with group() as rank:
        training = BUILD[kind](seed)
        saver = saver_of(url, training.state, nodes[rank])
        saver._saves.fresh = True
        train_and_save(saver, training, range(STEPS))
        note_local(training.state, notes, STEPS)
        wait_for_the_end()


def looks(kind: str, url: str, nodes: list[str], notes: str) -> None:
    """Restore, compare, and leave without having saved."""
    with group() as rank:
        store, training = counting(url), BUILD[kind](7)
        with saver_of(store, training.state, nodes[rank]) as saver:
            assert saver.restore() == STEPS
            say(**said_of(saver.restored, store))
            assert is_as_noted(training.state, notes, STEPS)


class Lived:
    """A store with two runs that were killed at step 3, and the mirrors of the second."""

    def __init__(self, folder: Path, kind: str, nodes: str) -> None:
        self.kind, self.url, self.notes = kind, folder / "store", folder / "notes"
        self.nodes = [folder / "nodes" / letter for letter in nodes]
        self._folder = folder
        for seed in (0, 1):
            shutil.rmtree(folder / "nodes", ignore_errors=True)
            self._run(lives, str(seed))
        (folder / "nodes").rename(folder / "kept")

    def _run(self, function: Callable[..., None], seed: str) -> None:
        nodes = list(map(str, self.nodes))
        killed(function, len(nodes), [self.kind, str(self.url), nodes, str(self.notes), int(seed)])

    def again(self) -> Lived:
        """With the mirrors as they were found."""
        shutil.rmtree(self._folder / "nodes", ignore_errors=True)
        shutil.copytree(self._folder / "kept", self._folder / "nodes")
        return self

    @property
    def store(self) -> Store:
        return open_store(str(self.url))

    def id(self, generation: int, step: int) -> SnapshotId:
        name = next(e.key.split("/")[1] for e in self.store.list("runs/") if f"/{generation:06}-" in e.key)
        run_id = RunId.parse(name.removesuffix(".json"))
        assert run_id is not None, name
        return SnapshotId(run_id, step)

    def come_back(self) -> list[dict[str, object]]:
        return run(looks, len(self.nodes), [self.kind, str(self.url), list(map(str, self.nodes)), str(self.notes)])


@pytest.fixture(scope="module")
def _sharded(tmp_path_factory: pytest.TempPathFactory) -> Lived:
    return Lived(tmp_path_factory.mktemp("sharded"), "fsdp", "AAA")


@pytest.fixture
def sharded(_sharded: Lived) -> Lived:
    return _sharded.again()


@pytest.fixture(scope="module")
def _replicated(tmp_path_factory: pytest.TempPathFactory) -> Lived:
    return Lived(tmp_path_factory.mktemp("replicated"), "ddp", "AAB")


@pytest.fixture
def replicated(_replicated: Lived) -> Lived:
    return _replicated.again()


def flip(path: Path, step: int, leaf: str) -> None:
    """One bit in the first byte of a leaf, in the slot of a step."""
    with path.open("r+b") as file:
        head = read_head(file.fileno())
        for number in (0, 1):
            record = read_slot(file.fileno(), number, head)
            if record is not None and record.step == step:
                placed = next(p for p in read_layout(file.fileno(), record) if p.shard.leaf.path == leaf)
                at = head.slots[number] + placed.start
                (byte,) = os.pread(file.fileno(), 1, at)
                os.pwrite(file.fileno(), bytes([byte ^ 4]), at)
                return
    raise AssertionError(f"{path} has no step {step}")


def flipped(lived: Lived, path: Path) -> None:
    flip(path, STEPS, "model.up.weight")


def cut(lived: Lived, path: Path) -> None:
    os.truncate(path, 3 * CHUNK + path.stat().st_size // 8)


def no_mirror(lived: Lived, path: Path) -> None:
    path.write_bytes(b"of something else entirely" * 999)


def of_an_older_step(lived: Lived, path: Path) -> None:
    path.unlink()
    leave_mirror(lived.nodes[1], lived.store, lived.id(2, 1), 1)


def of_another_run(lived: Lived, path: Path) -> None:
    path.unlink()
    leave_mirror(lived.nodes[1], lived.store, lived.id(1, STEPS), 1)


def of_another_store(lived: Lived, path: Path) -> None:
    other = lived.url.parent / "other"
    shutil.rmtree(other, ignore_errors=True)
    with ckpt.Checkpointer(other, {"t": torch.zeros(9000)}, mirror="off") as saver:
        saver.save(1)
    run_id = RunId.parse(next(e.key for e in open_store(str(other)).list("runs/")).split("/")[1].removesuffix(".json"))
    assert run_id is not None
    foreign = leave_mirror(lived.url.parent / "elsewhere", open_store(str(other)), SnapshotId(run_id, 1), 0)
    shutil.copy(foreign, path)


SAYS = {
    flipped: "1 chunks are not what the store says they are",
    cut: "slot",
    no_mirror: "expected b'CKPTMIR1'",
    of_an_older_step: "holds step 2/1, not 2/3",
    of_another_run: "holds step 1/3, not 2/3",
    of_another_store: "is of another store",
}


@pytest.mark.parametrize("spoil", SAYS, ids=lambda spoil: spoil.__name__)
def test_a_mirror_that_is_not_what_it_was_is_noticed_before_use_and_only_its_rank_reads_from_the_store(
    sharded: Lived, spoil: Callable[[Lived, Path], None]
) -> None:
    """K1: all ranks land on the same step, and healthy shards are not read again."""
    path = mirrors_in(sharded.nodes[1])[1]
    spoil(sharded, path)
    first, bad, third = sharded.come_back()
    assert first["packs"] == third["packs"] == 0, (first, third)
    assert any(SAYS[spoil] in str(problem) for problem in bad["problems"]), bad["problems"]  # type: ignore[attr-defined]
    if spoil is flipped:
        assert bad["packs"] == 1 and 0 < bad["pack_bytes"] <= CHUNK, bad  # type: ignore[operator]
        assert not first["problems"] and not third["problems"]
    else:
        assert bad["pack_bytes"] > CHUNK, bad  # type: ignore[operator]


def test_a_flipped_bit_of_a_replica_is_made_good_by_a_peer_and_if_there_is_none_by_the_store(replicated: Lived) -> None:
    """K1: lose one of four ranks, and its replica is flipped. A node has everything once: the other node has it too."""
    path = mirrors_in(replicated.nodes[0])[0]
    flip(path, STEPS, "model.up.weight")
    found = replicated.come_back()
    assert [each["packs"] for each in found] == [0, 0, 0], found
    assert "not what the store says" in str(found[0]["problems"])

    replicated.again()
    flip(mirrors_in(replicated.nodes[0])[0], STEPS, "model.up.weight")
    shutil.rmtree(replicated.nodes[2])
    found = replicated.come_back()
    assert [each["packs"] for each in found] == [1, 1, 1], found
    assert all(each["pack_bytes"] <= CHUNK for each in found), found  # type: ignore[operator]


def goes_ahead(url: str, nodes: list[str], notes: str, dirty: bool) -> None:
    """Captured by all ranks, or by all but one that dies meanwhile, and committed by none."""
    with group() as rank:
        training = BUILD["fsdp"](0)
        gate = GateStore(
            LocalStore(url),
            verbs=frozenset({"put"}),
            where=lambda key: key.startswith("parts/") and f"{STEPS + 1:012}" in key,
        )
        saver = saver_of(gate, training.state, nodes[rank])
        saver.restore()
        train_and_save(saver, training, range(STEPS))
        note_local(training.state, notes, STEPS)
        training.train(STEPS)
        if dirty and rank == 1:
            saver._mirror.finish = lambda *_: wait_for_the_end()  # type: ignore[method-assign]
        saver.save(STEPS + 1)
        assert gate.arrived.wait(PATIENT), "nothing was about to be stored"
        wait_for_the_end()


def goes_back(url: str, nodes: list[str], notes: str) -> None:
    with group() as rank:
        store, training = counting(url), BUILD["fsdp"](7)
        with saver_of(store, training.state, nodes[rank]) as saver:
            assert saver.restore() == STEPS
            say(**said_of(saver.restored, store))
            assert is_as_noted(training.state, notes, STEPS)
            training.train(STEPS)
            saver.save(STEPS + 1).wait(PATIENT)


@pytest.mark.parametrize("dirty", [False, True])
def test_survivors_that_are_one_step_ahead_of_the_last_commit_go_back_to_it_from_their_other_slot(
    tmp_path: Path, dirty: bool
) -> None:
    url, nodes, notes = str(tmp_path / "store"), [str(tmp_path / "node")] * 3, str(tmp_path / "notes")
    killed(goes_ahead, 3, [url, nodes, notes, dirty])
    for rank, found in enumerate(run(goes_back, 3, [url, nodes, notes])):
        assert found["packs"] == 0 and found["bytes"]["own mirror"] > 0, (rank, found)
        assert any("being filled" in problem for problem in found["problems"]) == dirty, found
    assert stored_parts(url)[0].step == STEPS + 1
