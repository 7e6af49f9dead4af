"""What counts as a change, what an unchanged byte costs, and the choice between a delta and a keyframe."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ckpt.format.codec import Codec
from ckpt.format.layout import lay_out
from ckpt.format.manifest import Blob, Chunk, chunk_digest
from ckpt.format.names import PackName, SnapshotId
from ckpt.format.probe import Choice, Learned
from ckpt.format.shards import DTYPES, Leaf, Shard, whole
from ckpt.saving.diff import Changed, Encoded, Held, Known, Same, Task, Twin, Verdict, compare, encode, match, task_of
from ckpt.saving.job import Reference, SaveJob
from ckpt.saving.policy import Rule
from tests.ckpt.saving.jobs import RUN, State, Tensor, bf16, fp32, job_of

PACK = PackName(SnapshotId(RUN, 1), 0, 0, "0" * 16).key


def quiet() -> None:
    pass


def held_of(job: SaveJob, size: int = 1000) -> Held:
    """As if `job` had been saved, each chunk in a keyframe of `size` bytes."""
    table = tuple(
        Chunk(chunk_digest(p.dtype, job.data[p.start : p.stop]), (Blob(PACK, 0, size, 2, "0" * 16),))
        for p in job.layout.pieces
    )
    reference = Reference(job.id, job.layout, job.data, table, {PACK: 10_000})
    return Held(reference, bytearray(b"\1") * len(table))


def verdicts(state: State, before: State | None) -> list[Verdict]:
    held = None if before is None else held_of(job_of(before, 1))
    return list(compare(job_of(state, 2), held, quiet))


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_without_a_reference_every_piece_is_new() -> None:
    found = verdicts({"a": fp32(noise(4096))}, None)
    assert [type(v) for v in found] == [Changed] * 4
    assert all(isinstance(v, Changed) and v.old is None for v in found)


def test_one_flipped_bit_changes_exactly_one_piece() -> None:
    before = noise(4096)
    after = before.copy()
    after.view(np.uint32)[2500] ^= 1
    found = verdicts({"a": fp32(after)}, {"a": fp32(before)})
    assert [type(v) for v in found] == [Same, Same, Changed, Same]


@pytest.mark.parametrize(
    ("before", "after", "changes"),
    [
        (0x7FC00000, 0x7FC00000, False),  # a NaN that stays
        (0x7FC00000, 0x7FC00001, True),  # its payload alone
        (0x00000000, 0x80000000, True),  # 0.0 → -0.0
    ],
)
def test_bytes_are_compared_not_values(before: int, after: int, changes: bool) -> None:
    """I3."""
    old, new = (np.full(2048, bits, dtype=np.uint32).view(np.float32) for bits in (before, after))
    found = verdicts({"a": fp32(new)}, {"a": fp32(old)})
    assert [type(v) for v in found] == ([Changed, Twin] if changes else [Same, Same])


def test_equal_bytes_of_another_dtype_are_a_change_without_a_base() -> None:
    """I1: a dtype change between saves."""
    bits = np.random.default_rng(0).integers(0, 1 << 16, 4096).astype(np.uint16)
    found = verdicts({"a": Tensor(bits, "float16")}, {"a": bf16(bits)})
    assert all(isinstance(v, Changed) and v.old is None for v in found)
    assert len(found) == 2


def test_equal_chunks_of_one_save_are_one() -> None:
    a = noise(2048)
    found = verdicts({"a": fp32(a), "b": fp32(a), "z": fp32(np.zeros(2048))}, None)
    assert [type(v) for v in found] == [Changed, Changed, Twin, Twin, Changed, Twin]
    assert [v.of for v in found if isinstance(v, Twin)] == [0, 1, 4]


def test_bytes_that_another_leaf_holds_already_are_not_stored_again() -> None:
    """H5: tied again after having diverged."""
    a, b = noise(2048), noise(2048, seed=1)
    found = verdicts({"a": fp32(a), "b": fp32(a)}, {"a": fp32(a), "b": fp32(b)})
    assert [type(v) for v in found] == [Same, Same, Known, Known]


def test_after_a_change_of_layout_unchanged_leaves_are_still_the_same() -> None:
    a, c = noise(2048), noise(2048, seed=1)
    found = verdicts({"a": fp32(a), "b": fp32(noise(2048, seed=2)), "c": fp32(c)}, {"a": fp32(a), "c": fp32(c)})
    assert [type(v) for v in found] == [Same, Same, Changed, Changed, Same, Same]
    found = verdicts({"c": fp32(c)}, {"a": fp32(a), "c": fp32(c)})
    assert found == [Same(0, 2), Same(1, 3)]


def test_small_leaves_that_move_within_their_bundle_match_by_their_bytes() -> None:
    small = {f"s{i}": fp32(noise(512, seed=i)) for i in range(4)}
    moved = {name: small[name] for name in ("s2", "s3")}
    found = verdicts(moved, small)
    assert [type(v) for v in found] == [Known]


def test_equal_layouts_match_whether_they_are_one_object_or_two() -> None:
    shards = [Shard(leaf, whole(leaf.shape)) for leaf in (Leaf("a", "parameter", "float32", (4096,)),)]
    one, two = lay_out(shards, 4096), lay_out(shards, 4096)
    assert list(match(one, one, quiet)) == list(match(one, two, quiet)) == [0, 1, 2, 3]


def test_a_clipped_chunk_is_used_by_its_own_piece_only_and_never_as_a_base() -> None:
    a = noise(1024)
    before = job_of({"a": fp32(a)}, 1)
    held = held_of(before)
    clipped = replace_chunk(held, of=True)
    again = list(compare(job_of({"a": fp32(a), "b": fp32(a)}, 2), clipped, quiet))
    assert [type(v) for v in again] == [Same, Changed]
    changed = a.copy()
    changed[0] += 1
    job = job_of({"a": fp32(changed)}, 2)
    (verdict,) = compare(job, clipped, quiet)
    assert isinstance(verdict, Changed)
    task = task_of(job, 0, verdict.digest, clipped, verdict.old, keyframe=False)
    assert task.base is None
    assert task.young


def replace_chunk(held: Held, *, of: bool) -> Held:
    chunk = held.reference.table[0]
    box = held.reference.layout.pieces[0].box
    table = (Chunk(chunk.digest, chunk.blobs, box if of else None),)
    return Held(replace(held.reference, table=table), held.young)


# --- encode ----------------------------------------------------------------------------------------------------------


def sparse_task(*, chain: tuple[int, ...] = (100_000,), young: bool = False, wrong_base: bool = False) -> Task:
    """128 KiB of bf16 noise of which one element in 500 moved by one step."""
    base = np.random.default_rng(0).integers(0, 1 << 16, 65536).astype(np.uint16)
    new = base.copy()
    new[::500] += 1
    job, before = job_of({"a": bf16(new)}, 2, chunk=1 << 17), job_of({"a": bf16(base)}, 1, chunk=1 << 17)
    blobs = tuple(Blob(PACK, 0, size, 5 if i else 2, "0" * 16) for i, size in enumerate(chain))
    held = held_of(before)
    table = (Chunk(held.reference.table[0].digest, blobs),)
    if wrong_base:
        before.data[77] ^= 4
    held = Held(replace(held.reference, table=table), bytearray([young]))
    (verdict,) = compare(job, held, quiet)
    assert isinstance(verdict, Changed)
    return task_of(job, 0, verdict.digest, held, verdict.old, keyframe=False)


def rebuilt(e: Encoded) -> bytes:
    out = np.empty_like(e.task.new)
    Codec().decode(e.kind, e.blob, e.task.base if e.based else None, out, DTYPES[e.task.piece.dtype])
    return out.tobytes()


def test_a_sparse_change_becomes_a_small_delta_on_its_chain() -> None:
    task = sparse_task()
    e = encode(Codec(), Learned(), Rule(1.5), task)
    assert e.based
    assert e.below == task.chain
    assert len(e.blob) < len(task.new) / 100
    assert rebuilt(e) == task.new.tobytes()


def test_a_base_that_is_not_what_its_table_says_is_not_leaned_on() -> None:
    task = sparse_task(wrong_base=True)
    e = encode(Codec(), Learned(), Rule(1.5), task)
    assert e.stale
    assert not e.based
    assert e.below == ()
    assert rebuilt(e) == task.new.tobytes()


class Watched(Learned):
    """Remembers whether it was asked about a delta, and may answer what it is told to."""

    def __init__(self, answer: Choice | None = None) -> None:
        super().__init__()
        self.answer = answer
        self.bases: list[bool] = []
        self.learned: list[int] = []

    def choose(self, new, base, dtype, cls, *, most=float("inf")):  # type: ignore[no-untyped-def]
        self.bases.append(base is not None)
        return self.answer or super().choose(new, base, dtype, cls)

    def learn(self, cls, dtype, kind, raw, stored):  # type: ignore[no-untyped-def]
        self.learned.append(kind)


def test_no_look_is_taken_at_a_delta_that_no_chain_could_bear() -> None:
    learned = Watched()
    e = encode(Codec(), learned, Rule(1.5), sparse_task(chain=(1000, 500)))
    assert learned.bases == [False]
    assert not e.based


def test_a_delta_that_comes_out_longer_than_promised_is_dropped_for_a_keyframe() -> None:
    task = sparse_task()
    learned = Watched(Choice(keyframe_kind=0, keyframe_size=200.0, delta_kind=3, delta_size=10.0))
    e = encode(Codec(), learned, Rule(1e6), task)
    assert (e.kind, e.based) == (0, False)
    assert learned.learned == [3, 0], "both outcomes are learned from"


def test_a_delta_that_is_expected_to_break_the_rule_is_not_even_encoded() -> None:
    learned = Watched(Choice(keyframe_kind=0, keyframe_size=131072.0, delta_kind=3, delta_size=90_000.0))
    e = encode(Codec(), learned, Rule(1.5), sparse_task())
    assert learned.learned == [0]
    assert not e.based


def test_a_first_chain_ends_early_and_the_next_one_has_the_full_limits() -> None:
    """The chunk's scale is between 0.1 and 1: a delta of 49 % is within the full rule and beyond its first chain."""
    choice = Choice(keyframe_kind=0, keyframe_size=131072.0, delta_kind=5, delta_size=49_000.0)
    young = encode(Codec(), Watched(choice), Rule(1.5), sparse_task(young=True))
    assert not young.based
    assert not young.young
    assert encode(Codec(), Watched(choice), Rule(1.5), sparse_task(young=False)).based


def test_a_chunk_that_had_no_delta_yet_stays_young() -> None:
    """Dense at first, sparse later, all chunks at once: their keyframes must still be spread then."""
    dense = Choice(keyframe_kind=0, keyframe_size=131072.0, delta_kind=3, delta_size=120_000.0)
    assert encode(Codec(), Watched(dense), Rule(1.5), sparse_task(young=True)).young
    ended = encode(Codec(), Watched(dense), Rule(1.5), sparse_task(chain=(100_000, 10), young=True))
    assert not ended.young
