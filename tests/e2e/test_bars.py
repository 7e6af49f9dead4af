"""What a save stores, asks and reads: the bars of the project, through the public API, in bytes and counts.

Times are printed by scripts/bench_save.py, bench_training.py and bench_list.py: a test of times fails on a busy machine
and says nothing about the code.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import ckpt
from ckpt.cli import list_, main
from ckpt.format.codec import NEEDS_BASE
from ckpt.format.manifest import Chunk, Part, read_part
from ckpt.format.names import packs_prefix
from ckpt.history.catalog import read_history
from ckpt.saving.job import Report
from storage_backends.base import Store
from storage_backends.local import LocalStore
from storage_backends.memory import MemoryStore
from tests.support.faulty import FaultyStore

KIB = 1024
QUIET = ckpt.Options(heartbeat="1h")
"""No heartbeat among the requests that are counted."""


def saved(saver: ckpt.Checkpointer, step: int) -> Report:
    """Save, wait for it, and say what it did."""
    ticket = saver.save(step)
    ticket.wait(60)
    assert ticket.report is not None
    return ticket.report


def parts(store: Store) -> dict[int, Part]:
    """The part of every snapshot by step; one rank."""
    found = {}
    for id_, snapshot in read_history(store).snapshots.items():
        (ref,) = snapshot.parts
        found[id_.step] = read_part(store.get(ref.key), key=ref.key, name=ref)
    return found


def chunks_by_leaf(part: Part) -> dict[str, tuple[Chunk, ...]]:
    """Path → chunks; small leaves share those of their bundle, ``<class> <dtype>``."""
    found = {row.leaf: part.chunks(row) for row in part.shards if row.bundle is None}
    return found | {f"{row.cls} {row.dtype}": part.chunks(row) for row in part.bundles}


def stored_by_leaf(part: Part) -> dict[str, int]:
    """Blob bytes that this very save put on the store, by leaf."""
    mine = packs_prefix(part.id)
    return {
        leaf: sum(blob.size for chunk in chunks for blob in chunk.blobs if blob.pack.startswith(mine))
        for leaf, chunks in chunks_by_leaf(part).items()
    }


def pack_puts(store: FaultyStore) -> list[str]:
    return [key for verb, key in store.calls if verb == "put" and key.startswith("packs/")]


# --- stored bytes ----------------------------------------------------------------------------------------------------


def test_where_2_of_24_matrices_train_a_save_stores_nothing_for_the_other_22() -> None:
    saves = 20
    torch.manual_seed(0)
    matrices = nn.ParameterList(nn.Parameter(torch.randn(256, 256), requires_grad=False) for _ in range(24))
    trained = [matrices[5].requires_grad_(), matrices[17].requires_grad_()]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    store = MemoryStore()
    stored = []
    with ckpt.Checkpointer(store, {"model": matrices, "optimizer": optimizer}, options=QUIET) as saver:
        for step in range(1, saves + 2):
            for parameter in trained:
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()
            stored.append(saved(saver, step).stored)
    frozen = {f"model.{i}" for i in range(24)} - {"model.5", "model.17"}
    total: Counter[str] = Counter()
    for step, part in parts(store).items():
        found = stored_by_leaf(part)
        assert frozen <= found.keys()
        # The report's figure is what lies there, equal chunks within one save apart.
        assert sum(found.values()) == stored[step - 1], f"step {step}"
        if step > 1:
            total.update(found)
    still = sum(total[leaf] for leaf in frozen)
    assert still == 0, f"{still} bytes stored for 22 matrices that do not change: {total}"
    # Two matrices with two moments each, and their step counters, which share a chunk of 8 bytes.
    bound = saves * (2 * 3 * 256 * 256 * 4 + KIB)
    assert 0 < sum(total.values()) <= bound, f"{sum(total.values())} bytes in {saves} saves, at most {bound}"
    assert set(total) - frozen == {
        "model.5", "model.17", "slot:step float32",
        *(f"optimizer.state.model.{i}.{slot}" for i in (5, 17) for slot in ("exp_avg", "exp_avg_sq")),
    }  # fmt: skip


def test_matrices_frozen_later_cost_at_most_a_twentieth_of_a_save_to_leave_nearly_dead_packs() -> None:
    """PROTOCOL.md §6: what stays in packs less than a quarter alive is stored again, a little at each save."""
    torch.manual_seed(0)
    tensors = {f"w{i:02}": torch.randn(128, 128) for i in range(40)}
    always, never = [f"w{i:02}" for i in range(36)], [f"w{i:02}" for i in range(36, 40)]
    store = MemoryStore()
    captured = 0
    with ckpt.Checkpointer(store, dict(tensors), options=QUIET) as saver:
        for step in range(1, 11):
            captured = saved(saver, step).captured
            for name in always:
                tensors[name].normal_()
    found = parts(store)
    again = [sum(stored_by_leaf(found[step])[name] for name in never) for step in range(2, 11)]
    assert sum(again) > 0, "four of 40 matrices keep a pack alive: they should leave it"
    assert max(again) <= captured // 20, f"{again} bytes stored again of {captured} captured"
    assert sum(again) <= sum(stored_by_leaf(found[1])[name] for name in never), f"stored again once, not {again}"
    assert packs_prefix(found[1].id) not in {key[: len(packs_prefix(found[1].id))] for key, _ in found[10].packs}


def test_an_unchanged_state_stores_documents_only() -> None:
    """I3: NaN, buffers, moments and plain values included."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 64)).sum().backward()
    optimizer.step()
    with torch.no_grad():
        model[0].weight[3, 3] = float("nan")
    store = FaultyStore(MemoryStore())
    state = {"model": model, "optimizer": optimizer, "epoch": 3}
    with ckpt.Checkpointer(store, state, options=QUIET) as saver:
        assert saved(saver, 1).packs > 0
        before = len(store.calls)
        for step in range(2, 7):
            report = saved(saver, step)
            assert (report.changed, report.stored, report.packs) == (0, 0, 0)
    puts = Counter(key.split("/")[0] for verb, key in store.calls[before:] if verb == "put")
    del puts["alive"]  # the heartbeat goes by the clock, not by saves
    assert puts.pop("runs", 0) <= 1
    assert puts == {"parts": 5, "snapshots": 5}, f"{puts} for five saves of an unchanged state"


def test_bf16_of_which_two_percent_moved_by_one_step_takes_85_times_less_than_raw() -> None:
    """The packs of the second save, headers included, of one leaf of 16M elements."""
    rng = np.random.default_rng(0)
    bits = (rng.standard_normal(16_000_000, dtype=np.float32) * np.float32(0.02)).view("<u4") >> 16
    weights = torch.from_numpy(bits.astype(np.int16)).view(torch.bfloat16)
    store = MemoryStore()
    with ckpt.Checkpointer(store, {"w": weights}, options=QUIET) as saver:
        saved(saver, 1)
        hit = torch.from_numpy(np.flatnonzero(rng.random(len(bits), dtype=np.float32) < 0.02))
        steps = torch.from_numpy(rng.choice(np.array([1, -1], np.int16), len(hit)))
        weights.view(torch.int16)[hit] += steps
        report = saved(saver, 2)
    packs = sum(entry.size for entry in store.list("packs/") if "/000000000002/" in entry.key)
    ratio = weights.nbytes / packs
    assert ratio >= 85, f"{weights.nbytes} bytes of which 2 % moved took {packs}: {ratio:.1f} times less, not 85"
    assert packs > report.stored > 0
    assert set(report.kinds) == {"sparse"}
    assert torch.equal(ckpt.load(store, 2)["w"].view(torch.int16), weights.view(torch.int16))


# --- a hundred saves -------------------------------------------------------------------------------------------------

Bits = np.ndarray[tuple[int, ...], np.dtype[np.int16]]
ROWS, COLUMNS, CHUNK = 4096, 128, 16 * KIB
"""A bf16 matrix of 1 MiB in 64 chunks of 64 rows."""


def everywhere(bits: Bits, rng: np.random.Generator) -> None:
    """2 % of all elements move by one step."""
    bits.ravel()[rng.integers(0, bits.size, bits.size // 50)] += 1


def a_tenth_of_the_rows(bits: Bits, rng: np.random.Generator) -> None:
    """An embedding: the rows of the tokens that the batch held move by a few steps."""
    rows = rng.random(len(bits)) < 0.1
    bits[rows] += rng.integers(-2, 3, (int(rows.sum()), COLUMNS), dtype=np.int16)


def popular_rows(bits: Bits, rng: np.random.Generator) -> None:
    """An embedding of a natural language: few tokens often, most of them rarely."""
    chances = 1 / np.arange(1, len(bits) + 1)
    ranks = np.random.default_rng(1).permutation(len(bits))
    rows = ranks[np.unique(rng.choice(len(bits), 3000, p=chances / chances.sum()))]
    bits[rows] += rng.integers(-2, 3, (len(rows), COLUMNS), dtype=np.int16)


def random_walk(bits: Bits, rng: np.random.Generator) -> None:
    """Every element moves by up to two steps."""
    bits += rng.integers(-2, 3, bits.shape, dtype=np.int16)


Change = Callable[[Bits, np.random.Generator], None]


class Saves:
    """Saves of a slowly changing state: documents, and what reading each back costs."""

    def __init__(self, change: Change, count: int) -> None:
        rng = np.random.default_rng(3)
        tensor = torch.from_numpy(rng.standard_normal((ROWS, COLUMNS), dtype=np.float32)).bfloat16()
        bits = tensor.view(torch.int16).numpy()
        self.store = MemoryStore()
        self.reports: list[Report] = []
        options = ckpt.Options(chunk=CHUNK, heartbeat="1h")
        with ckpt.Checkpointer(self.store, {"w": tensor}, options=options) as saver:
            for step in range(1, count + 1):
                self.reports.append(saved(saver, step))
                change(bits, rng)

    @cached_property
    def chunks(self) -> list[list[Chunk]]:
        """The distinct chunks of each save: equal ones are read once."""
        return [
            list({c.digest: c for chunks in chunks_by_leaf(part).values() for c in chunks}.values())
            for _, part in sorted(parts(self.store).items())
        ]

    def swing(self, first: int, last: int) -> float:
        """The largest document of saves `first` to `last` over their mean."""
        documents = [report.document for report in self.reports[first - 1 : last]]
        return max(documents) * len(documents) / sum(documents)


@cache
def hundred(change: Change) -> Saves:
    return Saves(change, 100)


@pytest.mark.parametrize("change", [everywhere, a_tenth_of_the_rows, popular_rows, random_walk])
def test_of_100_saves_each_reads_little_more_than_its_keyframes_and_documents_keep_their_size(change: Change) -> None:
    saves = hundred(change)
    deltas = 0
    for step, chunks in enumerate(saves.chunks, start=1):
        read = sum(blob.size for chunk in chunks for blob in chunk.blobs)
        keyframes = sum(chunk.blobs[0].size for chunk in chunks)
        assert read <= 1.5 * keyframes, f"save {step} reads {read} bytes, its keyframes are {keyframes}"
        deltas += sum(blob.kind in NEEDS_BASE for chunk in chunks for blob in chunk.blobs)
    assert deltas > 1000, f"{deltas} deltas: a bound on chains proves nothing where there are none"
    assert (swing := saves.swing(33, 100)) <= 1.2, f"documents of saves 33 to 100 swing by {swing:.3f}"


def test_keyframes_come_a_few_at_a_time() -> None:
    """Or else a save in 31 would be a full one."""
    saves = hundred(everywhere)
    # By digest, not by place: what moves out of a pack that is nearly dead is the keyframe it was.
    firsts = [{chunk.blobs[0].digest for chunk in chunks} for chunks in saves.chunks]
    fresh = [len(after - before) for before, after in pairwise(firsts)]
    chunks = len(saves.chunks[0])
    assert max(fresh) <= chunks / 6, f"{max(fresh)} of {chunks} chunks got a keyframe in one save: {fresh}"


def test_chunks_that_change_rarely_reach_the_same_documents_later_and_pay_no_keyframes_for_it() -> None:
    """A chain grows with the changes of its chunk, not with saves. Where a chunk changes at every third save, chains
    reach their length at save 99, not 33, and documents grow until then. To cut chains by age would keep documents
    flat from save 33 on, and store a keyframe for every eleven deltas instead of one for 31: twice the bytes."""

    def a_third_of_the_chunks(bits: Bits, rng: np.random.Generator) -> None:
        cells = bits.reshape(-1, CHUNK // 2)
        for cell in cells[rng.random(len(cells)) < 1 / 3]:
            cell[rng.integers(0, len(cell), len(cell) // 50)] += 1

    saves = Saves(a_third_of_the_chunks, 300)
    assert (swing := saves.swing(99, 300)) <= 1.2, f"documents of saves 99 to 300 swing by {swing:.3f}"
    mean = sum(report.document for report in saves.reports[98:]) / 202
    assert all(report.document <= 1.2 * mean for report in saves.reports[1:]), "nor is any earlier one larger"


# --- requests --------------------------------------------------------------------------------------------------------


def test_requests_of_a_save_do_not_grow_with_the_number_of_tensors() -> None:
    """M11."""
    counts = []
    for parameters in (3, 500):
        torch.manual_seed(0)
        model = nn.ParameterList(nn.Parameter(torch.randn(size)) for size in (2000, *(40,) * (parameters - 1)))
        optimizer = torch.optim.AdamW(model.parameters())
        store = FaultyStore(MemoryStore())
        with ckpt.Checkpointer(store, {"model": model, "optimizer": optimizer}, options=QUIET) as saver:
            for step in (1, 2, 3):
                for parameter in model.parameters():
                    parameter.grad = torch.randn_like(parameter)
                optimizer.step()
                report = saved(saver, step)
                calls = Counter(verb for verb, key in store.calls if not key.startswith("alive/"))
                counts.append((parameters, step, dict(calls), report.changed > 0))
                store.calls.clear()
    few, many = counts[:3], counts[3:]
    for (_, step, of_few, _), (_, _, of_many, changed) in zip(few, many, strict=True):
        assert changed
        assert of_few == of_many, f"save {step}: {of_few} for 12 tensors, {of_many} for 2,000"
    assert sum(many[2][2].values()) <= 10, f"{many[2][2]}"


@pytest.fixture(scope="module")
def two_hundred(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A local store of 200 snapshots."""
    folder = tmp_path_factory.mktemp("bars") / "store"
    weight = torch.zeros(2000)
    with ckpt.Checkpointer(LocalStore(folder), {"w": weight}, options=QUIET) as saver:
        for step in range(1, 201):
            weight[step] = step
            saved(saver, step)
    return folder


def test_list_reads_runs_snapshots_and_pins_alone(
    two_hundred: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = FaultyStore(LocalStore(two_hundred))
    monkeypatch.setattr(list_, "open_url", lambda *_: store)
    assert main(["list", str(two_hundred)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 201
    lists = [key for verb, key in store.calls if verb == "list"]
    assert sorted(lists) == ["journal/", "parts/", "pins/", "runs/", "snapshots/"], (
        "whether the parts are there is seen in a list"
    )
    reads = Counter(key.split("/")[0] for verb, key in store.calls if verb in ("get", "get_range"))
    assert reads == {"runs": 1, "snapshots": 200}, f"{reads}"
    assert len(lists) + reads.total() == len(store.calls)


def test_list_does_not_load_torch(two_hundred: Path) -> None:
    code = (
        "import sys; from ckpt.cli import main; code = main(sys.argv[1:]);"
        "heavy = {'torch', 'numpy.testing', 'fsspec'} & set(sys.modules);"
        "sys.exit(f'loaded: {heavy}' if heavy else code)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, "list", str(two_hundred)], capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stderr
    assert len(ran.stdout.splitlines()) == 201
