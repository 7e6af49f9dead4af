"""Saved by some ranks, restored by others: every layout becomes every other one, and unchanged state is stored once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
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
    blob_bytes,
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
from tests.support.worlds import (
    PATIENT,
    Parallel,
    check_whole,
    group,
    note_whole,
    quiet,
    stored_parts,
    tensors,
)

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
            assert stored_anew(again) == sum(each["stored"] for each in found) == 0, case
            # Small leaves that are sharded lie in every rank's bundle; those that are replicated in one rank's.
            lent = [bundle for part in again.values() for bundle in part.bundles if bundle.kept]
            assert lent or (before, n) == (kind, 4) or kind == "ddp", case
            clipped = [
                c for part in again.values() for row in part.shards for c in part.chunks(row) if c.of is not None
            ]
            assert clipped or before != "fsdp" or n not in (3, 5), case
    assert not [finding for finding in verify(open_store(str(url)), deep=True) if finding.level != "note"]


def stored_anew(parts: dict[int, Part]) -> int:
    """Bytes of blobs that the parts' own save stored, of small leaves and of the others."""
    return sum(
        blob.size
        for part in parts.values()
        for row in (*part.bundles, *part.shards)
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


# --- boxes of hand-made tensors ---------------------------------------------------------------------------------------


def numbers(fill: bool) -> dict[str, object]:
    whole = torch.arange(120.0) if fill else torch.full((120,), -1.0)
    wide = torch.arange(12000.0).reshape(120, 100) if fill else torch.full((120, 100), -1.0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {"numbers": distribute_tensor(whole, mesh, [Shard(0)]), "wide": distribute_tensor(wide, mesh, [Shard(0)])}


def splits(url: str) -> None:
    with group(), saver_of(url, numbers(True)) as saver:
        saver.save(1).wait(PATIENT)


def joins(url: str) -> None:
    with group():
        state = numbers(False)
        with saver_of(url, state) as saver:
            assert saver.restore() == 1
        one, two = state["numbers"], state["wide"]
        assert isinstance(one, DTensor) and isinstance(two, DTensor)
        assert torch.equal(one.full_tensor(), torch.arange(120.0))
        assert torch.equal(two.full_tensor(), torch.arange(12000.0).reshape(120, 100))


def test_what_twelve_ranks_split_one_and_five_put_together_in_order(tmp_path: Path) -> None:
    """E2."""
    url = tmp_path / "store"
    succeed(run_ranks(splits, 12, [str(url)]))
    assert torch.equal(ckpt.load(url)["numbers"], torch.arange(120.0))
    for n in (1, 5):
        succeed(run_ranks(joins, n, [str(url)]))


def rows(step: int) -> dict[str, object]:
    """Tensors of 1 to 9 rows, small and large: with m ranks, some of which hold nothing of some. The delta: a row."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state: dict[str, object] = {}
    for n in range(1, 10):
        for width in (3, 1500):
            whole = torch.arange(float(n * width)).reshape(n, width) - 1
            for changed in range(step):
                whole[(n - 1) // (changed + 1)] *= 1.5
            state[f"{n} by {width}"] = distribute_tensor(whole if step else whole * 0, mesh, [Shard(0)])
    return state


def whole_rows(state: dict[str, object]) -> list[torch.Tensor]:
    return [tensor.full_tensor() for tensor in state.values() if isinstance(tensor, DTensor)]


def saves_rows(url: str, nodes: list[str]) -> None:
    with group() as rank:
        state = rows(1)
        saver = saver_of(url, state, nodes[rank])
        saver.restore()
        saver.save(1).wait(PATIENT)
        saver.state.update(rows(2))
        saver.save(2).wait(PATIENT)
        wait_for_the_end()


def loads_rows(url: str, nodes: list[str], step: int) -> None:
    with group() as rank:
        store, state = counting(url), rows(0)
        saver = saver_of(store, state, nodes[rank])
        assert saver.restore(f"1/{step}") == step
        say(**said_of(saver.restored, store))
        assert all(map(torch.equal, whole_rows(state), whole_rows(rows(step))))
        saver.close()


@pytest.mark.parametrize(("m", "n"), [(1, 8), (8, 1), (8, 5), (5, 7)])
def test_rows_fewer_than_ranks_are_saved_by_m_and_loaded_by_n_with_a_delta_in_between(
    tmp_path: Path, m: int, n: int
) -> None:
    """H2."""
    url = str(tmp_path / "store")
    killed(saves_rows, m, [url, ["off"] * m])
    for step in (1, 2):
        run(loads_rows, n, [url, ["off"] * n, step])


@pytest.mark.parametrize("lost", [0, 7])
def test_the_lost_rank_may_be_the_one_that_holds_nothing_of_most_leaves(tmp_path: Path, lost: int) -> None:
    """H2: of eight ranks, the last one has rows of one tensor only."""
    url, nodes = str(tmp_path / "store"), [str(tmp_path / f"node-{rank}") for rank in range(8)]
    killed(saves_rows, 8, [url, nodes])
    shutil.rmtree(nodes[lost])
    own = {rank: blob_bytes(part) for rank, part in stored_parts(url).items()}
    for rank, found in enumerate(run(loads_rows, 8, [url, nodes, 2])):
        assert (found["packs"] > 0) == (rank == lost), (rank, found)
        assert found["pack_bytes"] <= 1.05 * own[rank], (rank, found, own)


# --- what is stored after a change of layout --------------------------------------------------------------------------

LAYERS, WIDTH = 10, 707


def adam_by_hand(generator: int) -> dict[str, object]:
    """Five million parameters in ten layers, sharded by rows, with the state AdamW would have."""
    torch.manual_seed(generator)
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    fully_shard(net)
    torch.manual_seed(1000 * generator + dist.get_rank())
    optimizer = torch.optim.AdamW(net.parameters())
    for parameter in net.parameters():
        slots = {slot: distribute_like(parameter) for slot in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.tensor(5.0), **slots}
    return {"model": net, "optimizer": optimizer}


def distribute_like(parameter: torch.Tensor) -> DTensor:
    assert isinstance(parameter, DTensor)
    local = torch.randn(parameter.to_local().shape)
    return DTensor.from_local(
        local, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
    )


def saves_large(url: str) -> None:
    with group():
        saver = ckpt.Checkpointer(url, adam_by_hand(0), mirror="off", options=quiet())
        ticket = saver.save(1)
        ticket.wait(PATIENT)
        assert ticket.report is not None
        say(stored=ticket.report.stored, captured=ticket.report.captured)
        saver.close()


def changes_a_tenth(url: str, whole: Path) -> None:
    with group():
        state = adam_by_hand(1)
        saver = ckpt.Checkpointer(url, state, mirror="off", options=quiet())
        assert saver.restore() == 1
        for name, tensor in tensors(state).items():
            if "model.4." in name:
                tensor.detach().add_(1)
        ticket = saver.save(2)
        ticket.wait(PATIENT)
        assert ticket.report is not None
        say(stored=ticket.report.stored)
        note_whole(state, whole)
        saver.close()


def test_of_five_million_parameters_on_three_ranks_instead_of_four_only_the_tenth_that_changed_is_stored(
    tmp_path: Path,
) -> None:
    url, whole = tmp_path / "store", tmp_path / "whole"
    store = open_store(str(url))
    found = run(saves_large, 4, [str(url)])
    full = sum(entry.size for entry in store.list(""))
    assert sum(each["captured"] for each in found) >= LAYERS * 3 * 4 * WIDTH * WIDTH, "the moments are missing"
    found = run(changes_a_tenth, 3, [str(url), whole])
    after = sum(entry.size for entry in store.list("")) - full
    assert 0 < sum(each["stored"] for each in found) < after <= 0.11 * full, (found, after, full)
    check_whole(url, whole)


# --- what differs from rank to rank -----------------------------------------------------------------------------------


def own_state(rank: int, shared: float) -> dict[str, object]:
    return {
        "shared": torch.full((50,), shared),
        "tensor": ckpt.PerRank(torch.full((40,), float(rank))),
        "name": f"rank {rank}",
    }


def keeps_its_own(url: str) -> None:
    with group() as rank:
        torch.manual_seed(100 + rank)
        state = own_state(rank, 3.0)
        with saver_of(url, state) as saver:
            saver.restore()
            for step, _ in saver.batches(list(range(12)), 4):
                saver.save(step + 1).wait(PATIENT)
            say(noise=torch.get_rng_state().tolist()[:64])


def ruled(name: str, values: Sequence[Any], rank: int, world_size: int) -> Any:
    assert len(values) == 4 and world_size in (1, 2, 3, 8)
    assert values[0] is not values[1]
    return values[(rank + 1) % 4]


def has_a_rule(url: str) -> None:
    with group() as rank:
        state = own_state(99, 0.0)
        saver = saver_of(url, state)
        with pytest.raises(LayoutMismatch, match=r"(\$data|tensor|name): .*on_resize"):
            saver.restore()
        assert not saver.state["shared"].any(), "refused before anything was written"  # type: ignore[attr-defined]
        saver.close()
        saver = saver_of(url, state, on_resize=ruled)
        assert saver.restore() == 4
        own: Any = state["tensor"]
        assert set(own.value.tolist()) == {float((rank + 1) % 4)}
        assert saver.state["name"] == f"rank {(rank + 1) % 4}"
        say(noise=torch.get_rng_state().tolist()[:64])
        saver.save(5).wait(PATIENT)
        saver.close()


@pytest.mark.parametrize("n", [2, 3, 8])
def test_what_differs_from_rank_to_rank_goes_by_the_rule_and_without_one_is_refused(tmp_path: Path, n: int) -> None:
    """K4: random states are kept, derived or dropped; nothing else is guessed."""
    url = str(tmp_path / "store")
    before = run(keeps_its_own, 4, [url])
    results = run_ranks(has_a_rule, n, [url])
    noise = [facts(out)["noise"] for out in succeed(results)]
    kept = min(n, 4)
    assert noise[:kept] == [each["noise"] for each in before[:kept]]
    assert len(set(map(str, noise))) == n, "two ranks would draw the same"
