"""All ranks, in place, all or nothing; and falling back together."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckpt.errors import (
    DamagedError,
    FormatTooNew,
    LayoutMismatch,
    NoSnapshot,
    Refused,
    StoreInUse,
    Unavailable,
)
from ckpt.format.manifest import digest128
from ckpt.format.names import PACKS, PARTS, SNAPSHOTS, PackName, PartName, SnapshotId, SnapshotName
from ckpt.random_states import set_random_states
from recovery.agree import Alone, Peers
from recovery.read import open_snapshot, read_parts
from recovery.report import Restored
from recovery.restore import restore
from storage_backends.base import Store
from storage_backends.memory import MemoryStore
from tests.recovery.lives import train_and_store
from tests.support.faulty import FaultyStore
from tests.support.mirrors import leave_mirror, look, spoil
from tests.support.peers import on_ranks
from tests.support.stores import Each, Split, by_name, by_rows, flipped, make_store
from tests.support.training import Training


def _restore(
    store: Store, state: dict[str, Any], peers: Peers | None = None, step: int | str | None = None, **settings: Any
) -> Restored | None:
    settings.setdefault("claim", lambda _: True)
    return restore(store, peers or Alone(), state, step=step, **settings)


def _done(restored: Restored | None) -> Restored:
    assert restored is not None
    return restored


def _whole(store: Store, training: Training, **settings: Any) -> Restored:
    return _done(_restore(store, training.state, **settings))


# --- one rank ---


def test_a_fresh_process_comes_back_bit_exactly_and_trains_on_alike() -> None:
    """A4: parameters, buffers, optimizer moments, step scalars, schedule."""
    store = MemoryStore()
    then, ids = train_and_store(store, [2, 5, 9])
    straight = Training()
    for step in range(9):
        straight.train(step)
    other = Training(seed=77)
    restored = _whole(store, other)
    assert (restored.step, restored.id, restored.skipped) == (9, ids[-1], ())
    assert other.bytes() == then[9] == straight.bytes()
    assert _losses(straight) == _losses(other)
    assert other.bytes() == straight.bytes()


def _losses(training: Training) -> list[float]:
    torch.manual_seed(5)  # for dropout: random states are the front door's business
    return [training.train(step) for step in range(9, 12)]


def test_what_was_read_and_how_long_it_took_is_reported() -> None:
    store = MemoryStore()
    train_and_store(store, [3])
    restored = _whole(store, Training(seed=1))
    assert restored.bytes["store"] > 1000
    assert restored.bytes["documents"] > 100
    assert set(restored.seconds) == {"choose", "documents", "mirrors", "peers", "store", "install"}
    assert restored.values == {"$random": [0]}
    assert restored.part == read_parts(store, restored.snapshot)[0]
    assert "restored step 3" in str(restored)


def test_any_step_can_be_named_and_comes_back_in_place() -> None:
    store = MemoryStore()
    then, _ = train_and_store(store, [2, 5])
    training = Training(seed=3)
    weight = training.model.inp.weight
    assert _whole(store, training, step=2).step == 2
    assert training.bytes() == then[2]
    assert training.model.inp.weight is weight
    assert _whole(store, training, step="latest").step == 5
    assert training.bytes() == then[5]


def test_an_empty_store_is_none_and_an_unknown_step_an_error() -> None:
    assert _restore(MemoryStore(), Training().state) is None
    with pytest.raises(NoSnapshot):
        _restore(MemoryStore(), Training().state, step=7)


def test_a_damaged_newest_step_is_passed_over_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    then, ids = train_and_store(store, [2, 5, 9])
    key = _damage_newest_blob(store, ids[-1])
    training = Training(seed=3)
    with caplog.at_level(logging.WARNING, logger="ckpt"):
        restored = _whole(store, training)
    assert restored.step == 5
    assert training.bytes() == then[5]
    [(id_, reason)] = restored.skipped
    assert id_ == ids[-1]
    assert key in reason
    assert f"snapshot 1/9 passed over: {reason}" in caplog.text
    assert "passed over 1/9" in str(restored)


def _damage_newest_blob(store: MemoryStore, id_: SnapshotId) -> str:
    """Flip a bit that only this step reads."""
    part = read_parts(store, open_snapshot(store, id_).snapshot)[0]
    own = [b for row in (*part.bundles, *part.shards) for c in part.chunks(row) for b in c.blobs]
    blob = next(b for b in own if (name := PackName.parse(b.pack)) is not None and name.id == id_)
    flipped(store, blob.pack, 8 * blob.start + 3)
    return blob.pack


@pytest.mark.parametrize("prefix", [PARTS, SNAPSHOTS])
def test_damaged_documents_are_passed_over_too(prefix: str) -> None:
    """C7."""
    store = MemoryStore()
    then, ids = train_and_store(store, [2, 5])
    flipped(store, PartName(ids[-1], 0).key if prefix == PARTS else SnapshotName(ids[-1]).key, 200)
    training = Training(seed=3)
    restored = _whole(store, training)
    assert (restored.step, [id_ for id_, _ in restored.skipped]) == (2, [ids[-1]])
    assert training.bytes() == then[2]


def test_a_named_step_that_is_damaged_is_an_error_and_nothing_live_has_changed() -> None:
    store = MemoryStore()
    _, ids = train_and_store(store, [2, 5])
    key = _damage_newest_blob(store, ids[-1])
    training = Training(seed=3)
    training.train(0)
    before = training.bytes()
    with pytest.raises(DamagedError) as caught:
        _restore(store, training.state, step=5)
    assert (caught.value.key, caught.value.step, caught.value.rank) == (key, 5, 0)
    assert caught.value.leaf is not None
    assert training.bytes() == before


def test_when_every_step_is_damaged_it_is_an_error_never_a_fresh_start() -> None:
    store = MemoryStore()
    train_and_store(store, [2, 5])
    for entry in store.list(PACKS):
        flipped(store, entry.key, 8 * (entry.size - 1))
    training = Training(seed=3)
    before = training.bytes()
    with pytest.raises(DamagedError, match="none of 2 snapshots"):
        _restore(store, training.state)
    assert training.bytes() == before


def test_a_snapshot_pruned_under_the_reader_gives_way_to_the_next_older_one() -> None:
    """D4: at whichever read the prune strikes."""
    store = MemoryStore()
    then, ids = train_and_store(store, [2, 5])
    only_newest = {ref.key for ref in open_snapshot(store, ids[1]).snapshot.parts} | {
        key for key, _ in open_snapshot(store, ids[1]).snapshot.packs
    } - {key for key, _ in open_snapshot(store, ids[0]).snapshot.packs}
    struck = 0
    for at in range(1, 100):
        copy = _copied(store)

        pruning = _PruningStore(copy, at, [SnapshotName(ids[1]).key, *sorted(only_newest)])
        training = Training(seed=3)
        restored = _whole(pruning, training, threads=1)
        if not pruning.struck:
            break
        assert restored.step in (2, 5)
        assert training.bytes() == then[restored.step]
        if restored.skipped:
            struck += 1
            assert "pruned" in restored.skipped[0][1]
    assert struck >= 3, "the prune never struck a reader: this test proves nothing"


class _PruningStore(FaultyStore):
    """Removes these objects just before the n-th call."""

    def __init__(self, inner: Store, at: int, keys: list[str]) -> None:
        super().__init__(inner)
        self._strike_at, self._keys = at, keys
        self.struck = False

    def _call(self, verb: str, key: str, do: Any) -> Any:
        if len(self.calls) + 1 == self._strike_at:
            self.struck = True
            self.survived().delete(self._keys)
        return super()._call(verb, key, do)


def _copied(store: MemoryStore) -> MemoryStore:
    copy = MemoryStore()
    for entry in store.list(""):
        copy.put(entry.key, store.get(entry.key))
    return copy


def test_a_named_step_that_was_pruned_is_no_snapshot() -> None:
    store = MemoryStore()
    train_and_store(store, [2, 5])

    def claim(id_: SnapshotId) -> bool:
        store.delete([SnapshotName(id_).key, PartName(id_, 0).key])
        return True

    with pytest.raises(NoSnapshot, match="pruned"):
        _restore(store, Training().state, step=5, claim=claim)


def test_a_part_that_is_gone_while_its_snapshot_stands_is_damage() -> None:
    """A2: and the older step is used."""
    store = MemoryStore()
    then, ids = train_and_store(store, [2, 5])
    gone = [k for k, _ in open_snapshot(store, ids[1]).snapshot.packs if f"/{5:012d}/" in k]
    store.delete(gone)
    training = Training(seed=3)
    restored = _whole(store, training)
    assert restored.step == 2
    assert training.bytes() == then[2]
    assert "expected a pack, found none" in restored.skipped[0][1]


def test_each_snapshot_is_claimed_before_it_is_read_and_given_up_when_a_prune_names_it() -> None:
    """PROTOCOL.md §5.2."""
    store = FaultyStore(MemoryStore())
    then, ids = train_and_store(store, [2, 5])
    claimed: list[tuple[SnapshotId, bool]] = []

    def claim(id_: SnapshotId) -> bool:
        read = any(verb in ("get", "get_range") and key.startswith((PARTS, PACKS)) for verb, key in store.calls)
        claimed.append((id_, read))
        return id_ != ids[1]

    store.calls.clear()
    training = Training(seed=3)
    restored = _whole(store, training, claim=claim)
    assert claimed == [(ids[1], False), (ids[0], False)]
    assert training.bytes() == then[2]
    assert "a prune has announced" in restored.skipped[0][1]


def test_a_snapshot_committed_between_the_choice_and_the_claim_is_the_one_that_comes_back() -> None:
    """E5: this process stood still between the two; going on from the older one would abandon what came meanwhile."""
    store = MemoryStore()
    then, ids = train_and_store(store, [2, 5])
    newer = SnapshotName(ids[1]).key
    hidden = store.get(newer)
    store.delete([newer])
    asked: list[SnapshotId | None] = []

    def settled(newest: SnapshotId | None) -> bool:
        asked.append(newest)
        store.put(newer, hidden)
        return newest == ids[1]

    training = Training(seed=3)
    assert _whole(store, training, settled=settled).step == 5
    assert asked == [ids[0], ids[1]]
    assert training.bytes() == then[5]
    assert _whole(store, training, settled=settled, step=2).step == 2
    assert len(asked) == 2, "a step that is asked for is that one"


def test_snapshots_that_are_listed_and_never_found_are_an_error_and_no_endless_restore() -> None:
    store = MemoryStore()
    with pytest.raises(NoSnapshot, match="newer than None are listed"):
        _restore(store, Training().state, settled=lambda newest: False)


def test_what_claim_raises_is_raised() -> None:
    store = MemoryStore()
    train_and_store(store, [2])

    def claim(_: SnapshotId) -> bool:
        raise StoreInUse("busy", run="r", host="h", pid=1, job=None, started=0.0)

    with pytest.raises(StoreInUse):
        _restore(store, Training().state, claim=claim)


@pytest.mark.parametrize("error", [Unavailable, Refused])
def test_a_store_that_fails_at_any_read_raises_and_leaves_the_state_alone(
    error: type[Unavailable] | type[Refused],
) -> None:
    """M3, M5: an unreachable store is neither damaged nor empty, and no older step is used in its place."""
    store = MemoryStore()
    train_and_store(store, [2, 5])
    for n in range(1, 100):
        faulty = FaultyStore(store, fail_at=n, error=error, for_ever=True)
        training = Training(seed=3)
        before = training.bytes()
        caught: Exception | None = None
        try:
            _restore(faulty, training.state, threads=1)
        except Exception as raised:
            caught = raised
        if not faulty.fired:
            assert caught is None
            break
        assert type(caught) is error
        assert training.bytes() == before
    assert n > 5, "the fault never fired: this test proves nothing"


def test_a_state_that_does_not_fit_is_refused_before_anything_is_written() -> None:
    store = MemoryStore()
    train_and_store(store, [2, 5])
    wide = Training(width=32)
    before = wide.bytes()
    with pytest.raises(LayoutMismatch) as caught:
        _restore(store, wide.state)
    assert "model.inp.weight" in caught.value.changed
    assert wide.bytes() == before


def test_a_newer_format_asks_for_an_upgrade_and_is_not_skipped() -> None:
    store = MemoryStore()
    _, ids = train_and_store(store, [2, 5])
    data = store.get(SnapshotName(ids[1]).key)
    body = data[:-33].replace(b'"format":1', b'"format":9')
    store.put(SnapshotName(ids[1]).key, body + digest128(body).encode() + b"\n")
    with pytest.raises(FormatTooNew):
        _restore(store, Training().state)


# --- several ranks ---


def _on(store: Store, ranks: int, step: int | None = None, **settings: Any) -> tuple[list[Any], list[Training]]:
    trainings = [Training(seed=rank + 1) for rank in range(ranks)]
    results = on_ranks(
        ranks, lambda peer: _restore(store, trainings[peer.rank].state, peer, step, **settings)
    )  # fmt: skip
    return results, trainings


@pytest.mark.parametrize("split", [by_rows, by_name])
def test_three_ranks_restore_together_and_each_has_its_own_values(split: Split) -> None:
    """Optimizer state that only another rank stored is not taken for state that does not exist."""
    store = MemoryStore()
    then, ids = train_and_store(store, [2, 5], ranks=3, split=split)
    counted = FaultyStore(store)
    results, trainings = _on(counted, 3)
    for rank, (restored, training) in enumerate(zip(results, trainings, strict=True)):
        assert restored.id == ids[-1]
        assert restored.values == {"$random": [rank]}
        assert restored.part.rank == rank
        assert training.bytes() == then[5]
    parts = [key for verb, key in counted.calls if verb == "get" and key.startswith(PARTS)]
    assert sorted(parts) == [PartName(ids[-1], rank).key for rank in range(3)], "each part is read by one rank only"


def test_a_rank_whose_own_part_is_enough_gets_no_other_part() -> None:
    """K2."""
    store = MemoryStore()
    each = Each(tuple(np.full(2000, rank, np.float32) for rank in range(3)))
    make_store(store, [{"own": each}], ranks=3, replicated=False)
    counted = [FaultyStore(store) for _ in range(3)]
    states = [{"own": np.zeros(2000, np.float32)} for _ in range(3)]
    results = on_ranks(3, lambda peer: _restore(counted[peer.rank], states[peer.rank], peer))
    for rank, restored in enumerate(results):
        assert isinstance(restored, Restored)
        assert "peers" not in restored.bytes
        assert states[rank]["own"].tolist() == [rank] * 2000
        packs = {key for verb, key in counted[rank].calls if key.startswith(PACKS)}
        assert restored.part is not None
        assert packs == {key for key, _ in restored.part.packs}


def test_what_only_one_rank_reads_and_finds_damaged_all_ranks_pass_over() -> None:
    """F5: all land on the same step."""
    store = MemoryStore()
    each = [Each(tuple(np.full(5, 10 * step + rank, np.float32) for rank in range(3))) for step in (1, 2)]
    ids = make_store(store, [{"own": value} for value in each], ranks=3, deltas=False)
    part = read_parts(store, open_snapshot(store, ids[1]).snapshot, [2])[2]
    blob = part.blob(part.bundles[0].chunks[0].blobs[0])
    flipped(store, blob.pack, 8 * blob.start)
    states = [{"own": np.zeros(5, np.float32)} for _ in range(3)]
    results = on_ranks(3, lambda peer: _restore(store, states[peer.rank], peer))
    for rank, restored in enumerate(results):
        assert isinstance(restored, Restored)
        assert restored.id == ids[0]
        assert "rank 2" in restored.skipped[0][1]
        assert states[rank]["own"].tolist() == [10 + rank] * 5


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_store_that_fails_one_rank_at_any_of_its_reads_fails_all_alike(failing: int) -> None:
    """F5: reading fails on one of three ranks; nobody blocks, nobody's state has changed."""
    store = MemoryStore()
    train_and_store(store, [2], ranks=3)
    for n in range(1, 100):
        faulty = FaultyStore(store, fail_at=n, for_ever=True)
        trainings = [Training(seed=rank + 1) for rank in range(3)]
        before = [training.bytes() for training in trainings]

        stores = [faulty if rank == failing else store for rank in range(3)]
        results = on_ranks(
            3,
            lambda peer, stores=stores, trainings=trainings: _restore(
                stores[peer.rank], trainings[peer.rank].state, peer, threads=1
            ),
        )
        if not faulty.fired:
            break
        assert all(isinstance(result, Unavailable) for result in results)
        assert [training.bytes() for training in trainings] == before
    assert n > 2, "the fault never fired: this test proves nothing"


def test_a_layout_mismatch_of_one_rank_is_raised_on_all() -> None:
    store = MemoryStore()
    train_and_store(store, [2], ranks=2)
    trainings = [Training(), Training(width=32)]
    before = [training.bytes() for training in trainings]
    results = on_ranks(2, lambda peer: _restore(store, trainings[peer.rank].state, peer))
    assert all(isinstance(result, LayoutMismatch) and result.changed for result in results)
    assert [training.bytes() for training in trainings] == before


def test_a_named_damaged_step_is_the_same_error_on_all_ranks() -> None:
    store = MemoryStore()
    _, ids = train_and_store(store, [2, 5], ranks=2)
    flipped(store, PartName(ids[1], 1).key, 200)
    results, _ = _on(store, 2, step=5)
    assert [(type(r), r.key, r.step, r.rank) for r in results] == [(DamagedError, PartName(ids[1], 1).key, 5, 1)] * 2


# --- other numbers of ranks ---


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_tensors_and_common_values_restore_on_any_number_of_ranks(ranks: int) -> None:
    """K4, E2: stored by three ranks, split by rows."""
    store = MemoryStore()
    then, ids = train_and_store(store, [2, 5], ranks=3, own=lambda _: {"$random": "all alike"})
    counted = FaultyStore(store)
    results, trainings = _on(counted, ranks)
    for restored, training in zip(results, trainings, strict=True):
        assert (restored.id, restored.part, restored.values) == (ids[-1], None, {"$random": "all alike"})
        assert training.bytes() == then[5]
    parts = [key for verb, key in counted.calls if verb == "get" and key.startswith(PARTS)]
    assert sorted(parts) == [PartName(ids[-1], rank).key for rank in range(3)], "each part is read by one rank only"


def test_values_that_differ_between_ranks_are_not_dealt_out_by_guessing() -> None:
    """K4: an explicit rule, never dropped in silence."""
    store = MemoryStore()
    train_and_store(store, [2], ranks=3, own=lambda rank: {"$data": [rank]})
    results, _ = _on(store, 2)
    for result in results:
        assert isinstance(result, LayoutMismatch)
        assert "$data" in str(result)
        assert "on_resize" in str(result)


@pytest.mark.parametrize("ranks", [2, 5])
def test_a_rule_deals_out_what_differed(ranks: int) -> None:
    """K4: each new rank is asked with all stored values, by stored rank."""
    store = MemoryStore()
    train_and_store(store, [2], ranks=3, own=lambda rank: {"$data": [rank]})
    asked: list[tuple[str, list[Any], int, int]] = []

    def rule(name: str, given: Sequence[Any], rank: int, world_size: int) -> Any:
        asked.append((name, list(given), rank, world_size))
        return ["mine", rank]

    results, _ = _on(store, ranks, on_resize=rule)
    for rank, restored in enumerate(results):
        assert restored.values["$data"] == ["mine", rank]
    assert sorted(asked, key=lambda a: a[2]) == [("$data", [[0], [1], [2]], rank, ranks) for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [2, 5])
def test_random_states_stay_with_their_ranks_and_new_ranks_get_their_own(
    ranks: int, caplog: pytest.LogCaptureFixture
) -> None:
    """K4: derived from (run, rank), so the same at every restart; vanished ones are dropped; both are logged."""
    store = MemoryStore()
    train_and_store(store, [2], ranks=3)
    first, second = ([r.values["$random"] for r in _on(store, ranks)[0]] for _ in range(2))
    assert first == second
    assert first[:3] == [[0], [1], [2]][:ranks]
    made = first[3:]
    assert len({repr(tree) for tree in made}) == len(made)
    for tree in made:
        set_random_states(tree)
    assert ("dropped" in caplog.text) == (ranks < 3)
    assert ("derived" in caplog.text) == (ranks > 3)


def test_a_rule_deals_out_per_rank_leaves_that_differed() -> None:
    store = MemoryStore()
    stored: Mapping[str, Any] = {"mean": Each(tuple(np.full(3, rank, np.float32) for rank in range(2)))}
    make_store(store, [stored], ranks=2)
    state = {"mean": torch.zeros(3)}

    def average(name: str, given: Sequence[Any], rank: int, world_size: int) -> Any:
        assert (name, rank, world_size) == ("mean", 0, 1)
        return torch.stack(list(given)).mean(0)

    def wrong(name: str, given: Sequence[Any], rank: int, world_size: int) -> Any:
        return given[0].double()

    with pytest.raises(LayoutMismatch, match=r"mean: on_resize gave one of torch\.float64"):
        _restore(store, state, Alone(), None, on_resize=wrong)
    assert _restore(store, state, Alone(), None, on_resize=average) is not None
    assert state["mean"].tolist() == [0.5, 0.5, 0.5]


@pytest.mark.parametrize("differs", [False, True])
def test_per_rank_leaves_on_another_number_of_ranks_must_be_equal(differs: bool) -> None:
    store = MemoryStore()
    values: Mapping[str, Any] = {"mean": Each(tuple(np.full(3, rank * differs, np.float32) for rank in range(2)))}
    make_store(store, [values], ranks=2)
    states = [{"mean": np.ones(3, np.float32)} for _ in range(3)]
    results = on_ranks(3, lambda peer: _restore(store, states[peer.rank], peer))
    if differs:
        assert all(isinstance(result, LayoutMismatch) and "mean" in result.changed for result in results)
    else:
        assert all(isinstance(result, Restored) for result in results)
    assert all(state["mean"].tolist() == [1.0 if differs else 0.0] * 3 for state in states)


# --- mirrors and peers ---


def test_a_process_whose_mirror_is_there_reads_no_pack(tmp_path: Path) -> None:
    store = MemoryStore()
    then, ids = train_and_store(store, [2, 5])
    leave_mirror(tmp_path, store, ids[-1], 0)
    counted, other = FaultyStore(store), Training(seed=77)
    with look(tmp_path, store, 0) as holdings:
        restored = _whole(counted, other, holdings=holdings)
    assert other.bytes() == then[5]
    assert not any(key.startswith(PACKS) for _, key in counted.calls)
    assert restored.bytes["own mirror"] > 1000 and not restored.problems
    assert "store" not in restored.bytes and "own mirror" in str(restored)


def test_what_is_wrong_with_a_mirror_is_said_and_the_store_gives_the_rest(tmp_path: Path) -> None:
    """K1: a flipped bit costs one chunk."""
    store = MemoryStore()
    then, ids = train_and_store(store, [2, 5])
    path = leave_mirror(tmp_path, store, ids[-1], 0)
    other = Training(seed=77)
    with look(tmp_path, store, 0) as holdings:
        whole = _whole(store, other, holdings=holdings).bytes["own mirror"]
    largest = max(other.state["model"].parameters(), key=lambda p: p.numel())  # type: ignore[attr-defined]
    spoil(path, largest.detach().numpy().tobytes()[:64])
    again = Training(seed=78)
    with look(tmp_path, store, 0) as holdings:
        restored = _whole(store, again, holdings=holdings)
    assert again.bytes() == then[5]
    assert restored.bytes["store"] > 0 and 0 < restored.bytes["own mirror"] < whole
    assert "are not what the store says they are" in restored.problems[0] and restored.problems[0] in str(restored)


def test_replicas_of_a_lost_node_come_from_the_other_and_the_store_serves_documents_only(tmp_path: Path) -> None:
    store = MemoryStore()
    then, ids = train_and_store(store, [2, 5], ranks=2)
    leave_mirror(tmp_path / "node0", store, ids[-1], 0, also=[1])
    counted = FaultyStore(store)

    def come_back(ranks: Peers) -> tuple[Restored, dict[str, bytes]]:
        training = Training(seed=ranks.rank)
        with look(tmp_path / f"node{ranks.rank}", store, ranks.rank) as holdings:
            return _whole(counted, training, peers=ranks, holdings=holdings), training.bytes()

    survivor, lost = on_ranks(2, come_back)
    assert not isinstance(survivor, Exception) and not isinstance(lost, Exception), (survivor, lost)
    assert survivor[1] == lost[1] == then[5]
    assert not any(key.startswith(PACKS) for _, key in counted.calls)
    assert lost[0].bytes["peers"] > 1000 and "own mirror" not in lost[0].bytes
    assert survivor[0].bytes["own mirror"] > 1000
