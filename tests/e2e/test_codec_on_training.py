"""The codec on the state of real training: the demo's model, with its own figures (scripts/bench_codec.py has more)."""

from __future__ import annotations

import torch

from scripts.bench_codec import CONFIGS, bf16_pack, measure, ratios, trained


def test_real_training_state_shrinks_without_loss_and_moments_choose_for_themselves() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        before, after = trained(CONFIGS["small"], steps=60, apart=10)
    finally:
        torch.set_num_threads(threads)
    tallies = measure(before, after)  # decodes every blob and compares
    found = ratios(tallies)
    assert found["deltas"] > 1.28
    assert found["keyframes"] > 1.19
    assert found["chosen"] > 0.99 * found["deltas"], "the probe chooses nearly what is best"
    first, second = tallies["exp_avg"], tallies["exp_avg_sq"]
    assert first.keyframes < first.deltas, "the past of first moments tells nothing"
    assert first.kinds["planes"] > 0.8 * sum(first.kinds.values())
    assert second.kinds["sub"] > 0.8 * sum(second.kinds.values())


def test_a_pack_of_bf16_of_which_two_percent_moved_by_one_step_is_85_times_smaller_than_raw() -> None:
    """Blobs and header of the pack. One leaf of 2M elements here, 16M in scripts/bench_codec.py."""
    pack, blobs = bf16_pack(2_000_000, 0.02)
    assert blobs > pack > 85
