"""The codec on the state of real training: the demo's model, with its own figures (scripts/bench_codec.py has more)."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from scripts.bench_codec import CONFIGS, Saves, State, Tally, bf16_pack, measure, ratios, trained


@dataclass(frozen=True)
class Trained:
    """Two states ten steps apart at the end of a training, and the saves made every ten steps on the way."""

    before: State
    after: State
    tallies: dict[str, Tally]
    saves: Saves


@pytest.fixture(scope="module")
def training() -> Trained:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with Saves(1.5, 3.0) as saves:
            before, after = trained(CONFIGS["small"], steps=60, apart=10, watch=saves)
    finally:
        torch.set_num_threads(threads)
    return Trained(before, after, measure(before, after), saves)  # decodes every blob and compares


def test_real_training_state_shrinks_without_loss(training: Trained) -> None:
    found = ratios(training.tallies)
    assert found["deltas"] >= 1.28, f"{found}"
    assert found["keyframes"] >= 1.19, f"{found}"
    assert found["chosen"] > 0.99 * found["deltas"], f"the probe chooses nearly what is best: {found}"


def test_each_class_of_leaves_chooses_its_own_kind(training: Trained) -> None:
    parameters, first, second = (training.tallies[cls] for cls in ("parameter", "exp_avg", "exp_avg_sq"))
    assert first.keyframes < first.deltas, "the past of first moments tells nothing"
    for tally, kind in ((parameters, "sub"), (first, "planes"), (second, "sub")):
        assert tally.kinds[kind] > 0.8 * sum(tally.kinds.values()), f"{tally.kinds}"


def test_saves_of_real_training_are_keyframes_by_default_and_deltas_where_reads_may_cost_more(
    training: Trained,
) -> None:
    """Ten steps apart a delta of fp32 state is three quarters of a keyframe: not worth reading both for."""
    saves = training.saves
    assert saves.deltas(1.5) < 0.02, f"{100 * saves.deltas(1.5):.1f} % of what was stored are deltas"
    assert saves.ratio(1.5) >= 1.19, f"saves store {saves.ratio(1.5):.3f} times less than raw"
    assert saves.deltas(3.0) > 0.3, f"{100 * saves.deltas(3.0):.1f} % of what was stored are deltas"
    assert saves.ratio(3.0) >= 1.26, f"saves store {saves.ratio(3.0):.3f} times less than raw"


def test_a_pack_of_bf16_of_which_two_percent_moved_by_one_step_is_85_times_smaller_than_raw() -> None:
    """Blobs and header of the pack. One leaf of 2M elements; 16M through a whole save in test_bars.py."""
    pack, blobs = bf16_pack(2_000_000, 0.02)
    assert blobs > pack > 85, f"{pack:.1f} in the pack, {blobs:.1f} in blobs"
