"""Reading without training."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ckpt.errors import DamagedError, LayoutMismatch, NoSnapshot
from ckpt.format import values
from ckpt.format.names import PACKS, PartName, SnapshotId, SnapshotName
from ckpt.format.shards import DTYPES
from recovery.load import load, load_into
from storage_backends.memory import MemoryStore
from tests.recovery.lives import stored, train_and_store
from tests.support.faulty import FaultyStore
from tests.support.stores import DirectWriter, Each, Raw, drifting, flipped, make_store
from tests.support.training import Training, raw

WRITES = ("put", "delete")


def test_every_leaf_is_put_together_from_all_ranks_bit_exactly() -> None:
    """E2: arange(120) over 12 ranks; and the matrices of a training."""
    store = MemoryStore()
    [id_] = make_store(store, [{"numbers": np.arange(120), "grid": np.arange(60.0).reshape(15, 4)}], ranks=12)
    found = load(store)
    assert found["numbers"].tolist() == list(range(120))
    assert found["grid"].tobytes() == np.arange(60.0).tobytes()
    assert isinstance(found["grid"], np.ndarray)
    assert load(store, id_.step).keys() == found.keys()


def test_every_dtype_is_loaded_as_itself() -> None:
    """I1."""
    rng = np.random.default_rng(0)
    shape = (3, 5)
    state = {name: Raw(name, shape, rng.bytes(15 * d.size)) for name, d in DTYPES.items()}
    state |= {f"{name} scalar": Raw(name, (), rng.bytes(d.size)) for name, d in DTYPES.items()}
    state |= {f"{name} empty": Raw(name, (0, 3), b"") for name in DTYPES}
    store = MemoryStore()
    make_store(store, [state])
    found = load(store)
    assert found.keys() == state.keys()
    for path, leaf in state.items():
        assert found[path].dtype is getattr(torch, leaf.dtype)
        assert tuple(found[path].shape) == leaf.shape
        assert raw(found[path]) == leaf.data


def test_a_training_is_loaded_with_its_plain_values() -> None:
    store = MemoryStore()
    then, _ = train_and_store(store, [2, 5], ranks=2, own=lambda rank: {"note": {"n": rank, "same": 7}})
    found = load(store)
    assert raw(found["model.inp.weight"]) == then[5]["inp.weight"]
    assert raw(load(store, 2)["model.inp.weight"]) == then[2]["inp.weight"]
    assert (found["note.same"], found["note.n@rank0"], found["note.n@rank1"]) == (7, 0, 1)
    assert "note.n" not in found
    assert found["schedule.last_epoch"] == 5


def test_only_what_the_names_match_is_read() -> None:
    store = MemoryStore()
    train_and_store(store, [2])
    counted = FaultyStore(store)
    assert set(load(counted, names="model.inp.*")) == {"model.inp.weight", "model.inp.bias"}
    assert set(load(counted, names=["model.*.weight", "schedule.last_epoch"])) == {
        "model.inp.weight", "model.norm.weight", "model.out.weight", "schedule.last_epoch",
    }  # fmt: skip
    counted.calls.clear()
    with pytest.raises(NoSnapshot, match=r"nothing named no such thing; .* patterns .* there is model\.inp\.bias, "):
        load(counted, names="no such thing")
    assert not [key for _, key in counted.calls if key.startswith(PACKS)]


def test_tied_tensors_stand_under_every_name_as_one() -> None:
    """H5."""
    tied = torch.nn.ModuleDict({"a": torch.nn.Linear(4, 4, bias=False), "b": torch.nn.Linear(4, 4, bias=False)})
    tied["b"].weight = tied["a"].weight
    leaves, encoded, aliases = stored({"model": tied})
    store = MemoryStore()
    writer = DirectWriter(store)
    writer.begin()
    writer.step(1, leaves, values=[encoded], aliases=aliases)
    found = load(store)
    assert found["model.a.weight"] is found["model.b.weight"]
    assert raw(found["model.a.weight"]) == raw(tied["a"].weight)
    for name in ("model.a.weight", "model.b.weight"):
        assert list(load(store, names=name)) == [name]


@pytest.mark.parametrize("differs", [False, True])
def test_per_rank_leaves_stand_once_or_once_for_each_rank(differs: bool) -> None:
    store = MemoryStore()
    make_store(store, [{"own": Each(tuple(np.full(3, rank * differs) for rank in range(2)))}], ranks=2)
    found = load(store)
    assert list(found) == (["own@rank0", "own@rank1"] if differs else ["own"])
    assert found[list(found)[-1]].tolist() == [int(differs)] * 3


def test_loading_writes_nothing_and_opens_no_run() -> None:
    store = MemoryStore()
    train_and_store(store, [2])
    counted = FaultyStore(store)
    load(counted)
    load_into(counted, Training(seed=4).state)
    assert counted.count(*WRITES) == 0


def test_a_damaged_newest_step_gives_way_but_a_named_one_does_not(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    states = drifting(3)
    ids = make_store(store, states)
    flipped(store, PartName(ids[2], 0).key, 99)
    assert load(store)["step"] == 1
    assert "passed over" in caplog.text
    with pytest.raises(DamagedError) as caught:
        load(store, 30)
    assert caught.value.key == PartName(ids[2], 0).key
    for id_ in ids[:2]:
        flipped(store, PartName(id_, 0).key, 99)
    with pytest.raises(DamagedError, match="none of 3"):
        load(store)


def test_nothing_there_is_an_error() -> None:
    with pytest.raises(NoSnapshot, match="there is no snapshot"):
        load(MemoryStore())
    with pytest.raises(NoSnapshot):
        load(MemoryStore(), 3)
    with pytest.raises(NoSnapshot, match="there is no snapshot"):
        load_into(MemoryStore(), Training().state)


def test_a_step_pruned_while_it_is_loaded_says_so() -> None:
    """D4."""
    store = MemoryStore()
    ids = make_store(store, drifting(2))

    class Pruning(FaultyStore):
        def get_range(self, key: str, start: int, stop: int) -> bytes:
            self.survived().delete([SnapshotName(ids[1]).key, key])
            return super().get_range(key, start, stop)

    with pytest.raises(NoSnapshot, match="pruned"):
        load(Pruning(store), 20)
    assert SnapshotName(ids[1]).key not in {entry.key for entry in store.list("snapshots/")}


def test_loading_into_a_live_state_restores_it_and_reports() -> None:
    store = MemoryStore()
    then, ids = train_and_store(store, [2, 5])
    training = Training(seed=9)
    restored = load_into(store, training.state, step=2)
    assert training.bytes() == then[2]
    assert (restored.id, restored.values) == (ids[0], {"$random": [0]})


def test_only_the_names_in_the_state_are_restored() -> None:
    store = MemoryStore()
    then, _ = train_and_store(store, [2], ranks=2)
    training = Training(seed=9)
    load_into(store, {"model": training.model})
    assert {n: b for n, b in training.bytes().items() if n in training.model.state_dict()} == {
        n: b for n, b in then[2].items() if n in training.model.state_dict()
    }
    assert not training.optimizer.state
    with pytest.raises(LayoutMismatch) as caught:
        load_into(store, {"model": training.model, "teacher": torch.nn.Linear(2, 2)})
    assert any("teacher" in path for path in caught.value.missing)


def test_loading_into_one_process_what_three_ranks_stored_needs_no_rule_for_random_states() -> None:
    """For evaluation nobody draws on: what belongs to three ranks is left out, what the state needs is not."""
    store = MemoryStore()
    then, _ = train_and_store(store, [2], ranks=3)
    training = Training(seed=9)
    restored = load_into(store, training.state)
    assert training.bytes() == then[2]
    assert restored.values == {}
    differing = MemoryStore()
    train_and_store(differing, [2], ranks=3, own=lambda rank: {"schedule": {"rank": rank}})
    with pytest.raises(LayoutMismatch, match="on_resize"):
        load_into(differing, training.state)


def test_a_value_that_does_not_decode_is_damage_with_its_name() -> None:
    store = MemoryStore()
    writer = DirectWriter(store)
    writer.begin()
    writer.step(1, {"w": np.zeros(3)}, values=[{"bad": b'{"nonsense":[1]}', "good": values.encode(1, "good")}])
    with pytest.raises(DamagedError, match="'bad' cannot be decoded") as caught:
        load(store, 1)
    assert (caught.value.step, caught.value.rank, caught.value.leaf) == (1, 0, "bad")
    assert SnapshotId(writer.run, 1) == writer.last
