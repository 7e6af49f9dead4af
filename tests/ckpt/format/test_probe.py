"""The probe: which kind, and how many bytes it says it will take."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from ckpt.format.codec import KINDS, NEEDS_BASE, PLANES, RAW, SPARSE, SUB, XOR, ZSTD, Codec
from ckpt.format.probe import LIMITS, LOOKS, Choice, Learned
from ckpt.format.shards import DTYPES
from ckpt.format.words import Bytes

N = 1 << 19
F32, BF16, I64, BOOL, U8 = (DTYPES[n] for n in ("float32", "bfloat16", "int64", "bool", "uint8"))


def rng() -> np.random.Generator:
    return np.random.default_rng(5)


def weights(words: int = N // 4) -> np.ndarray:
    return (rng().standard_normal(words) * 0.02).astype("<f4")


def raw(x: np.ndarray) -> Bytes:
    return x.view(np.uint8)


def bf16(x: np.ndarray) -> np.ndarray:
    return (x.view("<u4") >> 16).astype("<u2")


def stepped(x: np.ndarray, share: float, by: int = 1) -> np.ndarray:
    r = rng()
    step = np.where(r.random(len(x)) < share, r.choice([-by, by], len(x)), 0)
    return (x.astype(np.int64) + step).astype(x.dtype)


def size(kind: int, new: Bytes, base: Bytes | None, dtype: str) -> int:
    return len(Codec().encode(kind, new, base, DTYPES[dtype]))


W = weights()
B = bf16(weights(N // 2))
MOVED = (W + 1e-5 * rng().standard_normal(len(W))).astype("<f4")
FRESH = (1e-3 * np.random.default_rng(9).standard_normal(len(W))).astype("<f4")
ROAMED = (B.astype(np.int64) + np.rint(2 * np.random.default_rng(8).standard_normal(len(B))).astype(int)).astype("<u2")
TOKENS = rng().integers(0, 50_000, N // 8)
CASES = {
    "weights that moved a little": (raw(MOVED), raw(W), "float32", PLANES, SUB),
    "moments that the past does not tell": (raw(FRESH), raw(W), "float32", PLANES, SUB),
    "bf16, 0.2 % by one step": (raw(stepped(B, 0.002)), raw(B), "bfloat16", PLANES, SPARSE),
    "bf16, 2 % by one step": (raw(stepped(B, 0.02)), raw(B), "bfloat16", PLANES, SPARSE),
    "bf16, 30 % by one step": (raw(stepped(B, 0.3)), raw(B), "bfloat16", PLANES, SPARSE),
    "bf16, 5 % by nine steps": (raw(stepped(B, 0.05, 9)), raw(B), "bfloat16", PLANES, SPARSE),
    "bf16, all by a little": (raw(ROAMED), raw(B), "bfloat16", PLANES, SUB),
    "tokens": (raw(TOKENS), raw(TOKENS[::-1].copy()), "int64", PLANES, XOR),
    "noise": (
        rng().integers(0, 256, N, dtype=np.uint8),
        rng().integers(0, 255, N, dtype=np.uint8),
        "float32",
        RAW,
        SUB,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_kind_suits_the_chunk_and_the_estimate_its_size(name: str) -> None:
    new, base, dtype, keyframe, delta = CASES[name]
    choice = Learned().choose(new, base, DTYPES[dtype], "parameter")
    assert KINDS[choice.keyframe_kind] == KINDS[keyframe]
    assert choice.delta_kind is not None
    assert KINDS[choice.delta_kind] == KINDS[delta]
    assert choice.keyframe_size == pytest.approx(size(keyframe, new, base, dtype), rel=0.05)
    # A share of 0.2 % is two words of a sample: there the estimate is a guess, and the choice is never close.
    assert choice.delta_size == pytest.approx(size(delta, new, base, dtype), rel=0.15, abs=1000)


def test_no_other_kind_would_have_been_much_smaller() -> None:
    for name, (new, base, dtype, _, _) in CASES.items():
        choice = Learned().choose(new, base, DTYPES[dtype], "parameter")
        assert choice.delta_kind is not None
        best = min(size(k, new, base, dtype) for k in NEEDS_BASE)
        assert size(choice.delta_kind, new, base, dtype) <= 1.02 * best + 50, name
        best = min(size(k, new, None, dtype) for k in set(KINDS) - NEEDS_BASE)
        assert size(choice.keyframe_kind, new, None, dtype) <= 1.02 * best + 50, name


def test_moments_that_the_past_does_not_tell_come_out_as_keyframes() -> None:
    choice = Learned().choose(raw(FRESH), raw(W), F32, "slot:exp_avg")
    assert choice.keyframe_kind == PLANES
    assert choice.delta_size >= choice.keyframe_size


@pytest.mark.parametrize("value", [0, 0xFF, 0x3F])
def test_constants_are_zstd_whatever_their_dtype(value: int) -> None:
    new = np.full(N, value, dtype=np.uint8)
    for name, dtype in DTYPES.items():
        choice = Learned().choose(new, raw(W), dtype, "buffer")
        assert choice.keyframe_kind == ZSTD, name
        assert choice.keyframe_size < 100
        assert choice.delta_size > 1000


def test_masks_and_repeated_rows_are_zstd() -> None:
    mask = np.tril(np.ones((512, 1024), dtype=np.uint8)).ravel()
    rows = np.tile(rng().standard_normal(1024).astype("<f4"), 128)
    assert Learned().choose(mask, None, BOOL, "buffer").keyframe_kind == ZSTD
    assert Learned().choose(raw(rows), None, F32, "buffer").keyframe_kind == ZSTD


def test_without_a_base_there_is_no_delta() -> None:
    assert Learned().choose(raw(W), None, F32, "parameter").delta_kind is None
    assert Learned().choose(raw(W), None, F32, "parameter").delta_size == float("inf")


def test_changes_that_no_sample_meets_are_sparse() -> None:
    new = W.copy()
    new[70_000:70_050] += 1.0
    choice = Learned().choose(raw(new), raw(W), F32, "parameter")
    assert choice.delta_kind == SPARSE
    assert choice.delta_size < 2000


@pytest.mark.parametrize("length", [0, 1, 3, 4, 7, 100, 5000])
def test_chunks_of_any_length_have_a_choice_that_can_be_encoded(length: int) -> None:
    r = rng()
    codec, learned = Codec(), Learned()
    for name, dtype in DTYPES.items():
        new, base = (r.integers(0, 3, length, dtype=np.uint8) for _ in range(2))
        choice = learned.choose(new, base, dtype, "tensor")
        for kind, given_base in ((choice.keyframe_kind, None), (choice.delta_kind, base)):
            assert kind is not None, name
            blob = codec.encode(kind, new, given_base, dtype)
            out = np.empty_like(new)
            codec.decode(kind, blob, given_base, out, dtype)
            assert out.tobytes() == new.tobytes()
            learned.learn("tensor", dtype, kind, length, len(blob))


def test_equal_chunks_get_equal_choices() -> None:
    assert Learned().choose(raw(MOVED), raw(W), F32, "p") == Learned().choose(raw(MOVED), raw(W), F32, "p")


# --- what is learned ---------------------------------------------------------------------------------------------


def test_an_estimate_moves_to_what_the_kind_came_to_and_only_for_its_class_dtype_and_kind() -> None:
    learned = Learned()
    first = learned.choose(raw(MOVED), raw(W), F32, "parameter")
    for _ in range(60):
        learned.choose(raw(MOVED), raw(W), F32, "parameter")
        learned.learn("parameter", F32, SUB, N, round(first.delta_size * 1.2))
    after = learned.choose(raw(MOVED), raw(W), F32, "parameter")
    assert after.delta_size == pytest.approx(1.2 * first.delta_size, rel=0.001)
    assert after.keyframe_size == first.keyframe_size
    assert learned.choose(raw(MOVED), raw(W), F32, "slot:exp_avg") == first
    assert learned.choose(raw(MOVED), raw(W), DTYPES["int32"], "parameter").keyframe_size == first.keyframe_size


def test_what_was_learned_changes_the_choice() -> None:
    new, base = raw(stepped(B, 0.02)), raw(B)
    learned = Learned()
    assert learned.choose(new, base, BF16, "p").delta_kind == SPARSE
    expected = learned.choose(new, base, BF16, "p").delta_size
    for _ in range(30):
        learned.choose(new, base, BF16, "p")
        learned.learn("p", BF16, SPARSE, N, round(expected * 5))
    assert learned.choose(new, base, BF16, "p").delta_kind == SUB


def test_small_chunks_teach_little_about_large_ones() -> None:
    learned = Learned()
    first = learned.choose(raw(W), None, F32, "p")
    for _ in range(20):
        estimate = learned.choose(raw(W[:64]), None, F32, "p")
        learned.learn("p", F32, estimate.keyframe_kind, 256, 400)
    assert learned.choose(raw(W), None, F32, "p").keyframe_size == pytest.approx(first.keyframe_size, rel=0.01)


def test_one_freak_chunk_does_not_shut_a_kind_out() -> None:
    learned = Learned()
    before = learned.choose(raw(MOVED), raw(W), F32, "p")
    learned.learn("p", F32, PLANES, N, 1 << 40)
    assert learned.choose(raw(MOVED), raw(W), F32, "p").keyframe_size <= before.keyframe_size * 1.3
    for _ in range(200):
        learned.choose(raw(MOVED), raw(W), F32, "p")
        learned.learn("p", F32, SUB, N, 0)
    after = learned.choose(raw(MOVED), raw(W), F32, "p")
    assert after.delta_size == pytest.approx(LIMITS[0] * before.delta_size)


def test_a_report_that_belongs_to_no_choice_teaches_nothing() -> None:
    learned = Learned()
    learned.learn("p", F32, PLANES, N, 1)
    first = learned.choose(raw(W), None, F32, "p")
    learned.learn("q", F32, PLANES, N, 1)
    learned.learn("p", BF16, PLANES, N, 1)
    learned.learn("p", F32, SUB, N, 1)
    learned.learn("p", F32, PLANES, 0, 0)
    assert learned.choose(raw(W), None, F32, "p") == first


def test_each_thread_learns_from_its_own_choices() -> None:
    learned = Learned()
    barrier = threading.Barrier(2)
    first: dict[str, Choice] = {}

    def work(cls: str, factor: float) -> None:
        first[cls] = learned.choose(raw(W), None, F32, cls)
        for _ in range(80):
            barrier.wait(10)
            learned.choose(raw(W), None, F32, cls)
            learned.learn(cls, F32, PLANES, N, round(first[cls].keyframe_size * factor))

    threads = [threading.Thread(target=work, args=args) for args in (("a", 1.1), ("b", 0.8))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for cls, factor in (("a", 1.1), ("b", 0.8)):
        again = learned.choose(raw(W), None, F32, cls)
        assert again.keyframe_size == pytest.approx(factor * first[cls].keyframe_size, rel=0.001)


def test_a_class_whose_deltas_are_far_too_large_is_looked_at_now_and_then() -> None:
    """And a chunk of it that hardly changed, always."""
    learned = Learned()
    delta = learned.choose(raw(MOVED), raw(W), F32, "parameter").delta_size
    looked = [learned.choose(raw(MOVED), raw(W), F32, "parameter", most=delta / 2).delta_kind for _ in range(2 * LOOKS)]
    assert [kind is not None for kind in looked] == [n % LOOKS == LOOKS - 1 for n in range(2 * LOOKS)]
    assert learned.choose(raw(MOVED), raw(W), F32, "parameter", most=delta).delta_kind == SUB, "near the bound"
    assert learned.choose(raw(MOVED), raw(W), F32, "buffer", most=delta / 2).delta_kind == SUB, "another class"
    few = W.copy()
    few[::1000] += 1
    for _ in range(3):
        assert learned.choose(raw(few), raw(W), F32, "parameter", most=delta / 2).delta_kind == SPARSE
