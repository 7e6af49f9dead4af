"""What a save puts on the store, and what it leaves alone."""

from __future__ import annotations

import itertools
import threading
from dataclasses import replace

import numpy as np
import pytest

from ckpt.format.codec import NEEDS_BASE
from ckpt.format.manifest import Chunk, chunk_digest
from ckpt.format.names import PackName
from ckpt.saving.job import Saved
from ckpt.saving.policy import MAX_BLOBS
from ckpt.saving.writer import WriterSettings
from storage_backends.base import Unavailable
from storage_backends.memory import MemoryStore
from tests.ckpt.saving.jobs import Saver, Tensor, bf16, bytes_of, chunks_of, fp32, holds, read_cost
from tests.support.faulty import FaultyStore


def noise(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


def weights(count: int, seed: int = 0) -> np.ndarray:
    """The bits of bf16 noise."""
    return (noise(count, seed).view(np.uint32) >> 16).astype(np.uint16)


def nudge(bits: np.ndarray, share: float, rng: np.random.Generator) -> np.ndarray:
    """A share of the elements moved by one step."""
    moved = bits.copy()
    moved[rng.integers(0, len(bits), int(len(bits) * share))] += 1
    return moved


def pack_puts(store: FaultyStore) -> list[str]:
    return [key for verb, key in store.calls if verb == "put" and key.startswith("packs/")]


def test_an_unchanged_state_stores_documents_only() -> None:
    """I3: NaN included, over five saves."""
    store = FaultyStore(MemoryStore())
    saver = Saver(store)
    state = {"a": fp32(np.full(3000, np.nan)), "b": fp32(noise(3000)), "small": fp32(noise(7))}
    first = saver.saved(state, 1)
    assert first.report.stored > 0
    before = len(pack_puts(store))
    for step in range(2, 7):
        again = saver.saved(state, step)
        assert (again.report.changed, again.report.stored, again.report.packs) == (0, 0, 0)
        assert again.snapshot.packs == first.snapshot.packs
        assert holds(store, again.snapshot, state)
    assert len(pack_puts(store)) == before


def test_one_flipped_bit_stores_one_chunk() -> None:
    saver = Saver(MemoryStore())
    a = noise(8192)
    first = saver.saved({"a": fp32(a), "b": fp32(noise(8192, 1))}, 1)
    a = a.copy()
    a.view(np.uint32)[5000] ^= 1
    second = saver.saved({"a": fp32(a), "b": fp32(noise(8192, 1))}, 2)
    assert second.report.changed == 4096
    old, new = chunks_of(saver.store, first.snapshot), chunks_of(saver.store, second.snapshot)
    assert sum(x != y for x, y in zip(old, new, strict=True)) == 1
    assert holds(saver.store, second.snapshot, {"a": fp32(a), "b": fp32(noise(8192, 1))})


def test_frozen_matrices_store_nothing_while_two_of_many_train() -> None:
    saver = Saver(MemoryStore())
    state = {f"w{i:02}": fp32(noise(4096, i)) for i in range(24)}
    saver.saved(state, 1)
    for step in range(2, 8):
        state |= {f"w{i:02}": fp32(noise(4096, 100 * step + i)) for i in (3, 17)}
        outcome = saver.saved(state, step)
        assert outcome.report.changed == 2 * 16384
        assert holds(saver.store, outcome.snapshot, state)
        # Nothing of the other 22 but what nearly dead packs may cost: 5 % of what was captured.
        assert outcome.report.stored < 2 * 16384 + 0.05 * outcome.report.captured


def test_equal_chunks_of_one_save_are_stored_once() -> None:
    one, three = Saver(MemoryStore()), Saver(MemoryStore())
    a = noise(4096)
    alone = one.saved({"a": fp32(a)}, 1)
    tied = three.saved({"a": fp32(a), "b": fp32(a), "c": fp32(a)}, 1)
    assert tied.report.stored == alone.report.stored
    assert holds(three.store, tied.snapshot, {"a": fp32(a), "b": fp32(a), "c": fp32(a)})


def test_tied_leaves_may_part_and_meet_again() -> None:
    """H5: untied at step 5, tied again at 9: every save is exact, and meeting again stores nothing."""
    saver = Saver(MemoryStore())
    a, b = noise(4096), noise(4096, 1)
    for step, state in (
        (1, {"a": fp32(a), "b": fp32(a)}),
        (5, {"a": fp32(a), "b": fp32(b)}),
        (9, {"a": fp32(a), "b": fp32(a)}),
    ):
        outcome = saver.saved(state, step)
        assert holds(saver.store, outcome.snapshot, state)
    assert outcome.report.stored == 0


def test_a_dtype_change_is_stored_anew_and_read_back_as_the_new_dtype() -> None:
    """I1."""
    saver = Saver(MemoryStore())
    bits = weights(4096)
    saver.saved({"a": bf16(bits)}, 1)
    half = Tensor(bits, "float16")
    outcome = saver.saved({"a": half}, 2)
    assert outcome.report.changed == bits.nbytes
    assert all(len(c.blobs) == 1 for c in chunks_of(saver.store, outcome.snapshot))
    assert holds(saver.store, outcome.snapshot, {"a": half})


def test_leaves_that_come_and_go_leave_the_others_unstored() -> None:
    saver = Saver(MemoryStore())
    keep = {"b": fp32(noise(4096)), "y": bf16(weights(4096)), "s": fp32(noise(5))}
    saver.saved(keep, 1)
    added = keep | {"a": fp32(noise(2048, 9)), "z": fp32(noise(2048, 8), "slot:exp_avg")}
    outcome = saver.saved(added, 2)
    assert outcome.report.changed == 2 * 8192
    assert holds(saver.store, outcome.snapshot, added)
    outcome = saver.saved(keep, 3)
    assert outcome.report.changed == outcome.report.stored == 0
    assert holds(saver.store, outcome.snapshot, keep)


def test_requests_do_not_grow_with_the_number_of_leaves() -> None:
    """M11 at this floor."""
    counts = []
    for leaves in (20, 2000):
        store = FaultyStore(MemoryStore())
        saver = Saver(store, chunk=512 * 1024)
        for step in (1, 2):
            state = {f"p{i}": fp32(noise(8, step * 9999 + i)) for i in range(leaves)}
            state |= {f"m{i}": fp32(noise(2000, step * 9999 + i), "slot:exp_avg") for i in range(leaves // 20)}
            saver.saved(state, step)
        counts.append(len(store.calls))
    assert counts[0] == counts[1]


def test_a_state_of_nothing_and_one_of_empty_tensors_are_states() -> None:
    saver = Saver(MemoryStore())
    for step, state in ((1, {}), (2, {"a": fp32(np.zeros((0, 3)))}), (3, {"a": fp32(np.zeros((2, 3)))})):
        outcome = saver.saved(state, step)
        assert holds(saver.store, outcome.snapshot, state)


# --- bounded reads ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def slow_change() -> tuple[MemoryStore, list[Saved]]:
    """100 saves of 24 chunks of bf16 weights of which 2 % move by one step each time, and a matrix that never does."""
    store = MemoryStore()
    saver = Saver(store, chunk=16384)
    rng = np.random.default_rng(0)
    bits = {f"w{i}": weights(32768, i) for i in range(6)}
    still = fp32(noise(8192, 99))
    outcomes = []
    for step in range(1, 101):
        bits = {name: nudge(b, 0.02, rng) for name, b in bits.items()}
        state = {name: bf16(b) for name, b in bits.items()} | {"still": still}
        outcome = saver.saved(state, step)
        assert step % 9 or holds(store, outcome.snapshot, state)
        outcomes.append(outcome)
    return store, outcomes


def test_restoring_any_of_100_saves_reads_at_most_one_and_a_half_times_its_keyframes(
    slow_change: tuple[MemoryStore, list[Saved]],
) -> None:
    store, outcomes = slow_change
    deltas = 0
    for outcome in outcomes:
        read, keyframes = read_cost(store, outcome.snapshot)
        assert read <= 1.5 * keyframes
        chunks = chunks_of(store, outcome.snapshot)
        assert max(len(c.blobs) for c in chunks) <= MAX_BLOBS
        deltas += sum(b.kind in NEEDS_BASE for c in chunks for b in c.blobs)
    assert deltas > 5000, "a bound on chains proves nothing where there are none"


def test_documents_stay_within_a_fifth_of_their_mean(slow_change: tuple[MemoryStore, list[Saved]]) -> None:
    _, outcomes = slow_change
    documents = [outcome.report.document for outcome in outcomes[32:]]
    assert max(documents) <= 1.2 * (sum(documents) / len(documents))


def test_keyframes_are_spread_over_the_saves(slow_change: tuple[MemoryStore, list[Saved]]) -> None:
    """Without the first chains' scale all 48 chunks would get theirs in one save, every 31 saves."""
    store, outcomes = slow_change
    keyframes = []
    for before, after in itertools.pairwise(outcomes):
        old = {c.blobs[0] for c in chunks_of(store, before.snapshot)}
        keyframes.append(len({c.blobs[0] for c in chunks_of(store, after.snapshot)} - old))
    assert sum(keyframes) > 48
    assert keyframes[0] == 0, "the save after a full one holds deltas only"
    assert max(keyframes) <= 8


# --- packs -----------------------------------------------------------------------------------------------------------


def packs_of(chunks: list[Chunk]) -> set[str]:
    return {c.blobs[0].pack for c in chunks}


def big(seed: int, cls: str = "parameter") -> Tensor:
    """1.5 MiB that does not shrink: a group that deserves a pack of its own."""
    return Tensor(np.random.default_rng(seed).integers(0, 256, 3 << 19).astype(np.uint8), "uint8", cls)


def test_classes_have_packs_of_their_own_and_tiny_groups_share_one() -> None:
    saver = Saver(MemoryStore(), chunk=1 << 18)
    state = {
        "w": big(0),
        "m": big(1, "slot:exp_avg"),
        "b": fp32(noise(2000), "buffer"),
        "c": fp32(noise(2000), "tensor"),
    }
    outcome = saver.saved(state, 1)
    assert outcome.report.packs == 3
    assert holds(saver.store, outcome.snapshot, state)


def test_keyframes_that_live_for_one_save_do_not_share_packs_with_those_that_stay() -> None:
    saver = Saver(MemoryStore(), chunk=1 << 18)
    dense, rare = {f"d{i}": i for i in range(2)}, {f"r{i}": i + 50 for i in range(2)}
    state = {name: big(seed) for name, seed in (dense | rare).items()}
    saver.saved(state, 1)
    state |= {name: big(seed + 100) for name, seed in dense.items()}
    saver.saved(state, 2)
    # Now the dense ones' keyframes lived for one save, and the rare ones' for two.
    state |= {name: big(seed + 200) for name, seed in (dense | rare).items()}
    outcome = saver.saved(state, 3)
    chunks = dict(zip(sorted(state), np.array_split(chunks_of(saver.store, outcome.snapshot), 4), strict=True))
    brief = packs_of([*chunks["d0"], *chunks["d1"]])
    lasting = packs_of([*chunks["r0"], *chunks["r1"]])
    assert not brief & lasting


def test_a_pack_is_never_longer_than_its_limit() -> None:
    saver = Saver(MemoryStore(), WriterSettings(workers=1, pack_limit=1 << 20, memory=4 << 20), chunk=1 << 18)
    state = {f"w{i}": big(i) for i in range(3)}
    outcome = saver.saved(state, 1)
    assert all(length <= 1 << 20 for _, length in outcome.snapshot.packs)
    assert len(outcome.snapshot.packs) == 6
    assert holds(saver.store, outcome.snapshot, state)


def test_what_stays_in_a_nearly_dead_pack_is_stored_again_a_little_at_a_time() -> None:
    saver = Saver(MemoryStore())
    still = {f"s{i:02}": fp32(noise(1024, i)) for i in range(8)}
    moving = {f"m{i:02}": fp32(noise(1024, 100 + i)) for i in range(56)}
    first = saver.saved(still | moving, 1)
    ((old, _),) = first.snapshot.packs
    captured = first.report.captured
    kept = []
    for step in range(2, 9):
        moving = {name: fp32(noise(1024, 1000 * step + i)) for i, name in enumerate(moving)}
        outcome = saver.saved(still | moving, step)
        assert holds(saver.store, outcome.snapshot, still | moving)
        leaning = sum(c.blobs[0].pack == old for c in chunks_of(saver.store, outcome.snapshot))
        kept.append(leaning)
        assert outcome.report.changed == 56 * 4096
    assert 0 < kept[0] < 8
    assert kept[-1] == 0, "the old pack is let go in the end"
    assert all(a - b <= 0.05 * captured / 4096 for a, b in itertools.pairwise(kept))
    assert old not in dict(outcome.snapshot.packs)


class Unread(FaultyStore):
    """A store of which the writer can read no pack."""

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        if threading.current_thread().name == "ckpt-writer" and key.startswith("packs/"):
            raise Unavailable(f"{key}: not now", store=self.url, key=key)
        return super().get_range(key, start, stop)


def rarely_touched(saver: Saver) -> list[tuple[Saved, Chunk]]:
    """Two hundred leaves get a small delta each; all but three then change over and over. Of each save the chunk of the
    first of these three."""
    dice = np.random.default_rng(9)
    bits = {f"w{i:03}": weights(2048, i) for i in range(200)}
    made = []
    for step in range(1, 6):
        for n, name in enumerate(bits):
            if step == 2:
                bits[name] = nudge(bits[name], 0.01, dice)
            elif step > 2 and n > 2:
                bits[name] = weights(2048, 1000 * step + n)
        state = {name: bf16(each) for name, each in bits.items()}
        outcome = saver.saved(state, step)
        assert holds(saver.store, outcome.snapshot, state)
        (chunk,) = [
            c
            for c in chunks_of(saver.store, outcome.snapshot)
            if c.digest == chunk_digest("bfloat16", bits["w000"].view(np.uint8))
        ]
        made.append((outcome, chunk))
    return made


def test_a_small_delta_leaves_a_pack_of_deltas_long_dead_as_it_is() -> None:
    """No byte of it is encoded again, and its chain is what it was."""
    made = rarely_touched(Saver(MemoryStore()))
    (_, before), (_, after) = made[1], made[2]
    assert len(before.blobs) == 2 and before.blobs[1].kind in NEEDS_BASE
    assert [(b.kind, b.digest, b.size) for b in after.blobs] == [(b.kind, b.digest, b.size) for b in before.blobs]
    assert {b.pack for b in after.blobs}.isdisjoint(b.pack for b in before.blobs)
    assert all(chunk == after for _, chunk in made[3:]), "once is enough"
    captured = made[0][0].report.captured
    for outcome, _ in made[2:]:
        assert not {b.pack for b in before.blobs} & dict(outcome.snapshot.packs).keys()
    assert made[2][0].report.stored - made[3][0].report.stored < 0.05 * captured + 0.01 * made[3][0].report.stored


def test_blobs_that_cannot_be_read_stay_where_they_are_and_the_save_is_none_the_worse(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = rarely_touched(Saver(Unread(MemoryStore())))
    assert "is kept for little: packs/" in caplog.text
    assert made[2][1] == made[1][1]


def test_an_unchanged_state_stores_nothing_even_if_packs_are_nearly_dead() -> None:
    saver = Saver(MemoryStore())
    still = {f"s{i:02}": fp32(noise(1024, i)) for i in range(4)}
    saver.saved(still | {f"m{i:02}": fp32(noise(1024, 100 + i)) for i in range(60)}, 1)
    saver.saved(still | {f"m{i:02}": fp32(noise(1024, 500 + i)) for i in range(60)}, 2)
    outcome = saver.saved(still | {f"m{i:02}": fp32(noise(1024, 500 + i)) for i in range(60)}, 3)
    assert outcome.report.stored == 0


def test_packs_are_named_by_their_save_and_rank_and_numbered() -> None:
    saver = Saver(MemoryStore(), chunk=1 << 18)
    outcome = saver.saved({"w": big(0), "m": big(1, "slot:exp_avg")}, 4)
    names = [PackName.parse(key) for key, _ in outcome.snapshot.packs]
    assert [(n.id.step, n.rank, n.n) for n in names if n is not None] == [(4, 0, 0), (4, 0, 1)]


# --- a reference from elsewhere --------------------------------------------------------------------------------------


def test_an_adopted_reference_is_leaned_on() -> None:
    store = MemoryStore()
    first = Saver(store, chunk=16384)
    bits = weights(32768)
    first.saved({"a": bf16(bits)}, 1)
    second = Saver(store, chunk=16384, run=replace(first.run, generation=2))
    second.writer.adopt(first.writer.reference)
    moved = nudge(bits, 0.005, np.random.default_rng(1))
    outcome = second.saved({"a": bf16(moved)}, 2)
    assert outcome.report.stored < bits.nbytes / 50
    assert holds(store, outcome.snapshot, {"a": bf16(moved)})
    assert outcome.snapshot.reference == str(first.writer.reference.id)


def test_one_wrong_byte_in_an_adopted_reference_costs_one_keyframe_and_nothing_else() -> None:
    store = MemoryStore()
    first = Saver(store, chunk=16384)
    bits = weights(32768)
    first.saved({"a": bf16(bits)}, 1)
    reference = first.writer.reference
    assert reference is not None
    wrong = reference.data.copy()
    wrong[20000] ^= 1
    second = Saver(store, chunk=16384, run=replace(first.run, generation=2))
    second.writer.adopt(replace(reference, data=wrong))
    moved = nudge(bits, 0.005, np.random.default_rng(1))
    outcome = second.saved({"a": bf16(moved)}, 2)
    assert holds(store, outcome.snapshot, {"a": bf16(moved)})
    assert [len(c.blobs) for c in chunks_of(store, outcome.snapshot)] == [2, 1, 2, 2]


def test_a_reference_that_does_not_fit_its_layout_is_refused() -> None:
    saver = Saver(MemoryStore())
    saver.saved({"a": fp32(noise(4096))}, 1)
    reference = saver.writer.reference
    assert reference is not None
    with pytest.raises(ValueError, match="4 chunks and 100 bytes where its layout has 4 and 16384"):
        saver.writer.adopt(replace(reference, data=reference.data[:100]))
    with pytest.raises(ValueError, match="no length is given for pack packs/"):
        saver.writer.adopt(replace(reference, packs={}))


def test_adopting_nothing_makes_the_next_save_full() -> None:
    saver = Saver(MemoryStore())
    state = {"a": fp32(noise(4096))}
    full = saver.saved(state, 1)
    saver.writer.adopt(None)
    assert saver.writer.reference is None
    again = saver.saved(state, 2)
    assert again.report.stored == full.report.stored
    assert again.snapshot.reference is None


def test_the_reference_is_the_captured_buffer_itself() -> None:
    saver = Saver(MemoryStore())
    state = {"a": fp32(noise(4096))}
    saver.saved(state, 1)
    reference = saver.writer.reference
    assert reference is not None
    assert np.array_equal(reference.data, bytes_of(state, reference.layout))
