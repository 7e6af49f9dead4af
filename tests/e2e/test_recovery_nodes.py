"""Ranks of several nodes die and come back, through the front door: what each reads, and that nothing differs after."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.nodes import (
    BUILD,
    blob_bytes,
    counting,
    is_as_noted,
    killed,
    note_local,
    run,
    said_of,
    same_state,
    saver_of,
    say,
    train_and_save,
    wait_for_the_end,
)
from tests.support.worlds import group, stored_parts

pytestmark = pytest.mark.e2e

STEPS, MORE = 3, 5


def lives(kind: str, url: str, nodes: list[str]) -> None:
    """Train, save every step, and be killed."""
    with group() as rank:
        training = BUILD[kind](0)
        saver = saver_of(url, training.state, nodes[rank])
        saver.restore()
        train_and_save(saver, training, range(STEPS))
        wait_for_the_end()


def comes_back(kind: str, url: str, nodes: list[str]) -> None:
    """Restore into a model of another seed, and go on to the end beside one that was never hurt."""
    with group() as rank:
        unhurt = BUILD[kind](0)
        losses = [unhurt.train(step) for step in range(MORE)]
        store = counting(url)
        training = BUILD[kind](7)
        saver = saver_of(store, training.state, nodes[rank])
        assert saver.restore() == STEPS
        say(**said_of(saver.restored, store))
        first = saver.save(STEPS + 1)
        first.wait(60)
        assert first.report is not None and first.report.stored == 0, first.report
        assert [training.train(step) for step in range(STEPS, MORE)] == losses[STEPS:]
        saver.save(MORE + 1).wait(60)
        assert same_state(training, unhurt)
        saver.close()


def on_nodes(tmp_path: Path, text: str) -> list[str]:
    """A folder per rank, named by a letter each."""
    return [str(tmp_path / f"node-{letter}") for letter in text]


@pytest.mark.parametrize("lost", ["A", "B"])
def test_of_two_nodes_under_fsdp_one_is_lost_and_only_its_ranks_read_packs(tmp_path: Path, lost: str) -> None:
    url, nodes = tmp_path / "store", on_nodes(tmp_path, "AABB")
    killed(lives, 4, ["fsdp", str(url), nodes])
    own = {rank: blob_bytes(part) for rank, part in stored_parts(url).items()}
    shutil.rmtree(tmp_path / f"node-{lost}")
    for rank, found in enumerate(run(comes_back, 4, ["fsdp", str(url), nodes])):
        if nodes[rank].endswith(lost):
            assert 0 < found["pack_bytes"] <= 1.05 * own[rank], (rank, found, own)
            assert found["pack_bytes"] == found["bytes"]["store"]
        else:
            assert found["packs"] == 0 and found["bytes"]["own mirror"] > 0, (rank, found)
        assert not found["problems"], found


def test_a_worker_is_killed_its_node_lives_and_no_rank_reads_a_pack(tmp_path: Path) -> None:
    url, nodes = tmp_path / "store", on_nodes(tmp_path, "AABB")
    killed(lives, 4, ["fsdp", str(url), nodes])
    for found in run(comes_back, 4, ["fsdp", str(url), nodes]):
        assert found["packs"] == 0 and found["bytes"].keys() <= {"own mirror", "node", "peers", "documents"}, found


@pytest.mark.parametrize("nodes", ["AABB", "AAAB", "ABCC"])
def test_of_two_nodes_under_ddp_one_is_lost_and_its_ranks_get_all_from_peers(tmp_path: Path, nodes: str) -> None:
    """Small leaves too: biases and step counters, which lie in bundles. The store serves documents only."""
    url, folders = tmp_path / "store", on_nodes(tmp_path, nodes)
    killed(lives, 4, ["ddp", str(url), folders])
    lost = folders[-1]
    shutil.rmtree(lost)
    for rank, found in enumerate(run(comes_back, 4, ["ddp", str(url), folders])):
        assert found["packs"] == 0, (rank, found)
        assert found["parts"] <= 1
        if folders[rank] == lost:
            assert found["bytes"]["peers"] > 4 * 3 * 48 * 130
        else:
            assert found["bytes"]["own mirror"] > 0
        assert not found["problems"], found


@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_survivors_that_come_back_under_other_numbers_give_what_they_hold_to_whoever_has_those_now(
    tmp_path: Path, kind: str
) -> None:
    """torchrun numbers the ranks anew: the survivors may take the places of those that were lost."""
    url = tmp_path / "store"
    killed(lives, 4, [kind, str(url), on_nodes(tmp_path, "AABB")])
    lost = sum(blob_bytes(part) for rank, part in stored_parts(url).items() if rank < 2)
    shutil.rmtree(tmp_path / "node-A")
    found = run(comes_back, 4, [kind, str(url), on_nodes(tmp_path, "BBCC")])
    assert [each["pack_bytes"] > 0 for each in found] == [kind == "fsdp"] * 2 + [False] * 2, found
    assert sum(each["pack_bytes"] for each in found) <= 1.05 * lost
    assert all(each["bytes"]["peers"] > 0 for each in found[2:]), found


@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_without_mirrors_a_rank_reads_about_what_its_own_shards_take_up(tmp_path: Path, kind: str) -> None:
    """K2: bytes, and requests: one for each pack its part names, one part. Under DDP every rank needs everything."""
    url = tmp_path / "store"
    killed(lives, 3, [kind, str(url), ["off"] * 3])
    parts = stored_parts(url)
    own = {rank: blob_bytes(part) for rank, part in parts.items()}
    crumbs = 256  # step counters, which one rank stores
    for rank, found in enumerate(run(comes_back, 3, [kind, str(url), ["off"] * 3])):
        mine = own[rank] + crumbs if kind == "fsdp" else sum(own.values())
        named = len(parts[rank].packs) + 1 if kind == "fsdp" else sum(len(part.packs) for part in parts.values())
        assert found["pack_bytes"] <= 1.05 * mine, (rank, found, own)
        assert found["packs"] <= named and found["parts"] <= 1, (rank, found, named)


def fewer(url: str, nodes: list[str], notes: str) -> None:
    """Come back as three ranks, change nothing, and be killed: the small leaves still lie in the bundles of four."""
    with group() as rank:
        training = BUILD["fsdp"](7)
        saver = saver_of(url, training.state, nodes[rank])
        assert saver.restore() == STEPS
        ticket = saver.save(STEPS + 1)
        ticket.wait(60)
        assert ticket.report is not None and ticket.report.stored == 0
        note_local(training.state, notes, STEPS + 1)
        wait_for_the_end()


def fewer_again(url: str, nodes: list[str], notes: str) -> None:
    with group() as rank:
        store, training = counting(url), BUILD["fsdp"](9)
        saver = saver_of(store, training.state, nodes[rank])
        assert saver.restore() == STEPS + 1
        say(**said_of(saver.restored, store))
        assert is_as_noted(training.state, notes, STEPS + 1)
        ticket = saver.save(STEPS + 2)
        ticket.wait(60)
        assert ticket.report is not None and ticket.report.stored == 0
        saver.close()


@pytest.mark.parametrize("nodes", ["ABC", "BXA"])
def test_small_leaves_that_lie_in_bundles_of_another_layout_are_kept_by_survivors_and_given_to_peers(
    tmp_path: Path, nodes: str
) -> None:
    """Nobody holds an old bundle whole: its part says what of it a rank had. Of three nodes C is lost."""
    url, notes = tmp_path / "store", str(tmp_path / "notes")
    killed(lives, 4, ["fsdp", str(url), ["off"] * 4])
    killed(fewer, 3, [str(url), on_nodes(tmp_path, "ABC"), notes])
    parts = stored_parts(url)
    assert all(any(bundle.kept for bundle in part.bundles) for part in parts.values())
    shutil.rmtree(tmp_path / "node-C")
    folders = on_nodes(tmp_path, nodes)
    for rank, found in enumerate(run(fewer_again, 3, [str(url), folders, notes])):
        assert (found["packs"] == 0) == (rank < 2), (rank, found)
        if nodes == "BXA" and rank < 2:  # what A held is wanted by rank 0 now, at B, and what B held by rank 1
            assert found["bytes"]["peers"] > 0, (rank, found)
        assert not found["problems"], found
