"""Sharded state out and in: a folder that three ranks of torch.distributed wrote, one that they read theirs from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckpt
from ckpt.cli import main
from tests.e2e.test_fsdp import Net, by_rows
from tests.support.foreign import bits
from tests.support.procs import run_ranks, succeed
from tests.support.worlds import group

pytestmark = pytest.mark.e2e


def model(seed: int) -> dict[str, Any]:
    """Row-sharded over the ranks: 5, 5, 3 rows; 1, 1, 0; 1, 0, 0."""
    return {"model": by_rows(seed).model.state_dict()}


def there_and_back(theirs: Path, ours: Path) -> None:
    """Rank 0 goes to and fro between the folders, the others wait."""
    with group():
        dcp.save(model(1), checkpoint_id=theirs)
        if torch.distributed.get_rank() == 0:
            store = theirs.parent / "store"
            assert main(["import", str(store), str(theirs), "--from", "dcp"]) == 0
            assert main(["export", str(store), "latest", str(ours), "--to", "dcp"]) == 0
        torch.distributed.barrier()
        state = model(2)
        dcp.load(state, checkpoint_id=ours)
        for name, expected in model(1)["model"].items():
            assert bits(state["model"][name].to_local()) == bits(expected.to_local()), name


def test_shards_of_three_ranks_come_in_and_go_out_bit_for_bit(tmp_path: Path) -> None:
    succeed(run_ranks(there_and_back, 3, [tmp_path / "theirs", tmp_path / "ours"]))
    torch.manual_seed(1)
    expected = {f"model.{name}": bits(tensor) for name, tensor in Net().state_dict().items()}
    assert {name: bits(tensor) for name, tensor in ckpt.load(tmp_path / "store").items()} == expected
