"""Saved by some ranks, restored by others: every layout becomes every other one, and unchanged state is stored once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ckpt
from ckpt.errors import LayoutMismatch
from ckpt.format.manifest import Part
from ckpt.format.names import packs_prefix
from recovery.verify import verify
from storage_backends import open_store
from tests.support.nodes import (
    BUILD,
    Net,
    counting,
    facts,
    killed,
    run,
    said_of,
    same_state,
    saver_of,
    say,
    train_and_save,
    wait_for_the_end,
)
from tests.support.procs import run_ranks, succeed
from tests.support.worlds import PATIENT, Parallel, check_whole, group, local_bytes, note_whole, quiet, stored_parts

pytestmark = pytest.mark.e2e

STEPS = 2


def hybrid(seed: int) -> Parallel:
    """Two replicas of a model in two shards."""
    torch.manual_seed(seed)
    net = Net()
    fully_shard(net, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    return Parallel(net, 48)


def both(seed: int) -> Parallel:
    """FSDP over tensor parallelism."""
    torch.manual_seed(seed)
    net = Net()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(net, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(net, mesh=mesh["dp"])
    return Parallel(net, 48, share=mesh["dp"].get_local_rank())


ANY: dict[str, Callable[[int], Parallel]] = {**BUILD, "hybrid": hybrid, "both": both}


def lives(kind: str, url: str, node: str, whole: Path) -> None:
    with group():
        training = ANY[kind](0)
        saver = saver_of(url, training.state, node)
        saver.restore()
        train_and_save(saver, training, range(STEPS))
        note_whole(training.state, whole)
        wait_for_the_end()


def becomes(kind: str, url: str, node: str, whole: Path) -> None:
    """Restore in another layout; save what came, unchanged; restore that in the same layout."""
    with group():
        store, training = counting(url), ANY[kind](7)
        saver = saver_of(store, training.state, node)
        assert saver.restore(f"1/{STEPS}") == STEPS
        say(**said_of(saver.restored, store))
        note_whole(training.state, whole)
        again = saver.save(STEPS + 1)
        again.wait(PATIENT)
        assert again.report is not None
        say(changed=again.report.changed, stored=again.report.stored)
        saver.close()
        third = ANY[kind](9)
        saver = saver_of(url, third.state)
        assert saver.restore() == STEPS + 1
        assert saver.restored is not None
        say(again=saver.restored.id.short)
        assert same_state(third, training)
        third.train(0)
        saver.save(STEPS + 2).wait(PATIENT)
        saver.close()


def check_becoming(tmp_path: Path, before: str, after: dict[str, list[int]], *, mirrored: bool) -> None:
    url, whole, node = tmp_path / "store", tmp_path / "whole", tmp_path / "node"
    killed(lives, 4, [before, str(url), str(node) if mirrored else "off", whole])
    expected = json.loads(whole.read_text())
    check_whole(url, whole)
    for kind, sizes in after.items():
        for n in sizes:
            now, mine = tmp_path / f"{kind}-{n}", tmp_path / f"node-{kind}-{n}"
            if mirrored:
                shutil.copytree(node, mine)
            found = run(becomes, n, [kind, str(url), str(mine) if mirrored else "off", now])
            case = (before, kind, n, found)
            assert json.loads(now.read_text()) == expected, case
            assert all((each["packs"] == 0) == mirrored for each in found), case
            check_whole(url, now, found[0]["again"])
            again = stored_parts(url, found[0]["again"])
            assert stored_anew(again, bundled=False) == 0, case
            small = stored_anew(again, bundled=True)
            assert sum(each["stored"] for each in found) == small, case
            # Small leaves that are sharded lie in every rank's bundle; those that are replicated in one rank's.
            assert small == 0 or before != kind or kind == "fsdp", case
            clipped = [
                c for part in again.values() for row in part.shards for c in part.chunks(row) if c.of is not None
            ]
            assert clipped or before != "fsdp" or n not in (3, 5), case
    assert not [finding for finding in verify(open_store(str(url)), deep=True) if finding.level != "note"]


def stored_anew(parts: dict[int, Part], *, bundled: bool) -> int:
    """Bytes of blobs that the parts' own save stored, of small leaves or of the others."""
    return sum(
        blob.size
        for part in parts.values()
        for row in (part.bundles if bundled else part.shards)
        for chunk in part.chunks(row)
        for blob in chunk.blobs
        if blob.pack.startswith(packs_prefix(part.id))
    )


MATRIX = [
    pytest.param("fsdp", {"fsdp": [1, 2, 3, 5, 8]}, False, id="fsdp"),
    pytest.param("ddp", {"ddp": [1, 2, 3, 5, 8]}, False, id="ddp"),
    pytest.param("fsdp", {"fsdp": [3, 8], "ddp": [2]}, True, id="fsdp-from-mirrors"),
    pytest.param("ddp", {"ddp": [3], "fsdp": [5]}, True, id="ddp-from-mirrors"),
    pytest.param("hybrid", {"fsdp": [4], "hybrid": [4]}, False, id="hsdp"),
    pytest.param("both", {"fsdp": [4, 3], "hybrid": [4], "ddp": [1]}, False, id="fsdp-over-tp"),
    pytest.param("fsdp", {"both": [4]}, True, id="to-fsdp-over-tp"),
]


@pytest.mark.parametrize(("before", "after", "mirrored"), MATRIX)
def test_every_layout_becomes_every_other_bit_for_bit_and_stores_nothing_for_what_did_not_change(
    tmp_path: Path, before: str, after: dict[str, list[int]], mirrored: bool
) -> None:
    """K4."""
    check_becoming(tmp_path, before, after, mirrored=mirrored)
