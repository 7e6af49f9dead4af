"""The bound on reads, spread keyframes, lifetimes, packs that are hardly worth keeping."""

from __future__ import annotations

import itertools
import random

import pytest

from ckpt.format.manifest import Blob, Chunk
from ckpt.format.names import PackName, RunId, SnapshotId
from ckpt.format.pack import TEXT
from ckpt.format.shards import Box
from ckpt.saving.policy import LEAST_SCALE, MAX_BLOBS, Lifetime, Rule, first_scale, hardly_alive, lifetime, nearly_dead

RUN = RunId(3, "0badcafe")


def pack(step: int, rank: int = 0, n: int = 0) -> str:
    return PackName(SnapshotId(RUN, step), rank, n, "0" * 16).key


def chain(*sizes: int, name: str = pack(1)) -> tuple[Blob, ...]:
    return tuple(Blob(name, 100, 100 + size, 3 if i else 2, "0" * 16) for i, size in enumerate(sizes))


def quiet() -> None:
    pass


def test_a_delta_is_admitted_up_to_the_amplification_and_not_one_byte_beyond() -> None:
    rule = Rule(1.5)
    assert rule.admits(chain(1000, 200), 300, 1000)
    assert not rule.admits(chain(1000, 200), 301, 1000)


def test_the_smaller_of_the_old_keyframe_and_one_made_now_bounds_the_chain() -> None:
    assert not Rule(1.5).admits(chain(1000), 300, 800)
    assert Rule(1.5).admits(chain(800), 300, 1000)


def test_without_a_chain_there_is_nothing_to_add_a_delta_to() -> None:
    assert not Rule(1e9).admits((), 1, 1e9)


def test_a_chain_never_has_more_than_32_blobs_however_small_they_are() -> None:
    rule = Rule(1.5)
    assert rule.admits(chain(10_000, *[1] * (MAX_BLOBS - 2)), 1, 10_000)
    assert not rule.admits(chain(10_000, *[1] * (MAX_BLOBS - 1)), 1, 10_000)


@pytest.mark.parametrize("amplification", [1.0, 1.2, 1.5, 3.0])
def test_whatever_is_admitted_a_chain_costs_at_most_the_amplification(amplification: float) -> None:
    rng = random.Random(7)
    rule = Rule(amplification)
    for _ in range(200):
        blobs = chain(rng.randrange(500, 2000))
        for _ in range(100):
            delta = rng.randrange(1, 400)
            if rule.admits(blobs, delta, rng.uniform(500, 2000)):
                blobs = chain(*(b.size for b in blobs), delta)
        assert sum(b.size for b in blobs) <= amplification * blobs[0].size
        assert len(blobs) <= MAX_BLOBS


def test_an_amplification_of_one_admits_no_delta() -> None:
    assert not Rule(1.0).admits(chain(1000), 1, 1000)


def test_first_chains_are_scaled_evenly_so_that_no_save_gets_all_keyframes() -> None:
    scales = sorted(first_scale("model.h.0.weight", i) for i in range(16))
    assert all(LEAST_SCALE < scale <= 1 for scale in scales)
    gaps = [b - a for a, b in itertools.pairwise(scales)]
    assert max(gaps) <= 2.7 * (1 - LEAST_SCALE) / 16, "golden-ratio steps leave no hole"
    leaves = sorted(first_scale(f"leaf{i}", 0) for i in range(400))
    for i, scale in enumerate(leaves):
        assert abs(scale - (LEAST_SCALE + (1 - LEAST_SCALE) * i / 400)) < 0.1


def test_a_scaled_rule_keeps_both_limits_within_the_full_ones() -> None:
    full = Rule(1.5)
    assert full.scaled(1.0) == full
    half = full.scaled(0.5)
    assert (half.amplification, half.blobs) == (1.25, 16)
    least = full.scaled(LEAST_SCALE)
    assert least.blobs >= 3, "the first saves after a full one hold deltas only"
    assert least.admits(chain(1000), 50, 1000)


def test_a_keyframe_that_replaces_one_of_the_save_before_is_expected_to_be_brief() -> None:
    reference = SnapshotId(RUN, 7)
    assert lifetime(chain(10, name=pack(7)), False, reference) is Lifetime.BRIEF
    assert lifetime(chain(10, name=pack(6)), False, reference) is Lifetime.LASTING
    assert lifetime((), False, reference) is Lifetime.LASTING
    assert lifetime(chain(10, name=pack(7)), False, None) is Lifetime.LASTING
    assert lifetime(chain(10, name=pack(7)), True, reference) is Lifetime.DELTA


def chunk(number: int, *blobs: Blob) -> Chunk:
    return Chunk(f"{number:032x}", blobs)


def test_a_pack_is_nearly_dead_when_less_than_a_quarter_of_it_is_needed() -> None:
    small, large = pack(1, n=0), pack(1, n=1)
    table = [chunk(1, *chain(200, name=small)), chunk(2, *chain(250, name=large)), chunk(3, *chain(10, name=large))]
    assert nearly_dead(table, {small: 1000, large: 1000}, 0, quiet) == {small}


def test_equal_chunks_count_once() -> None:
    table = [chunk(1, *chain(200))] * 5
    assert nearly_dead(table, {pack(1): 1000}, 0, quiet) == {pack(1)}


def test_a_pack_of_deltas_is_weighed_by_the_keyframes_that_would_replace_it() -> None:
    keyframe, delta = Blob(pack(1), 0, 900, 2, "0" * 16), Blob(pack(2), 0, 10, 5, "0" * 16)
    assert nearly_dead([chunk(1, keyframe, delta)], {pack(1): 1000, pack(2): 1000}, 0, quiet) == frozenset()


def test_packs_of_other_ranks_are_left_alone() -> None:
    name = pack(1, rank=4)
    table = [chunk(1, *chain(10, name=name))]
    assert nearly_dead(table, {name: 1000}, 0, quiet) == frozenset()
    assert nearly_dead(table, {name: 1000}, 4, quiet) == {name}


def test_a_pack_that_a_clipped_chunk_leans_on_is_left_alone() -> None:
    """After a change of layout its other readers are other ranks."""
    clipped = Chunk("1" * 32, chain(10), Box((0,), (9,)))
    assert nearly_dead([chunk(2, *chain(10)), clipped], {pack(1): 1000}, 0, quiet) == frozenset()


def test_blobs_leave_a_pack_of_which_they_take_less_than_a_third_the_emptiest_pack_first() -> None:
    """However large the keyframes are on which they lie; with the text that a header needs for each."""
    first, second, third = pack(1), pack(2), pack(3)
    keyframe = Blob(first, 0, 900, 2, "0" * 16)
    one, two = Blob(second, 0, 10, 5, "1" * 16), Blob(second, 10, 30, 5, "2" * 16)
    other = Blob(third, 0, 150, 5, "3" * 16)
    table = [chunk(1, keyframe, one), chunk(2, keyframe, two), chunk(3, keyframe, two, other), None]
    packs = {first: 1000, second: 3 * (30 + 2 * TEXT) + 1, third: 10_000}
    assert hardly_alive(table, packs, 0, quiet) == [(third, [other]), (second, [one, two])]
    assert hardly_alive(table, packs | {second: 3 * (30 + 2 * TEXT)}, 0, quiet) == [(third, [other])]


def test_no_blob_leaves_a_pack_of_another_rank_or_one_that_others_may_lean_on() -> None:
    theirs, unknown, clipped = pack(1, rank=4), pack(2), pack(3)
    table = [
        chunk(1, Blob(theirs, 0, 10, 2, "0" * 16)),
        chunk(2, Blob(unknown, 0, 10, 2, "1" * 16)),
        Chunk("3" * 32, (Blob(clipped, 0, 10, 2, "2" * 16),), Box((0,), (9,))),
        chunk(4, Blob(clipped, 10, 20, 2, "3" * 16)),
    ]
    assert hardly_alive(table, {theirs: 10_000, clipped: 10_000}, 0, quiet) == []
