"""Names of leaves as people read them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from recovery.paths import GROUPS, grouped, natural


def gpt(layers: int, size: int = 100) -> dict[str, int]:
    """Parameters and moments of a stack of layers."""
    inner = [f"h.{n}.{part}.{kind}" for n in range(layers) for part in ("attn", "mlp") for kind in ("weight", "bias")]
    names = ["tokens.weight", "head.weight", *inner]
    moments = [f"optimizer.state.model.{name}.{slot}" for name in names for slot in ("exp_avg", "exp_avg_sq")]
    return dict.fromkeys([f"model.{name}" for name in names] + moments, size)


def test_layer_two_comes_before_layer_ten() -> None:
    assert sorted(["h.10", "h.2", "h.x"], key=natural) == ["h.2", "h.10", "h.x"]
    assert natural("9" * 5000)  # a name may be anything; Python refuses integers of such length


def test_every_layer_is_a_row_of_its_own_if_they_fit() -> None:
    assert list(grouped(gpt(12))) == [
        *(f"model.h.{n}" for n in range(12)), "model.head", "model.tokens",
        *(f"optimizer.state.model.h.{n}" for n in range(12)), "optimizer.state.model.head",
        "optimizer.state.model.tokens",
    ]  # fmt: skip


def test_where_there_are_too_many_layers_neighbours_go_together() -> None:
    names = list(grouped(gpt(96)))
    stacks = [name for name in names if ".h." in name]
    assert len(names) <= GROUPS and len(stacks) >= 16
    assert stacks[0] == "model.h.0 … 5" and stacks[-1].endswith("… 95")


def test_names_without_any_order_are_cut_at_the_first_word() -> None:
    assert list(grouped({"w": 1, "b": 1})) == ["b", "w"]
    many = grouped({f"w{n}": 1 for n in range(500)})
    assert len(many) == GROUPS and sum(map(len, many.values())) == 500
    assert grouped({}) == {}


@given(st.dictionaries(st.text("ab.01", max_size=8), st.integers(0, 1000), max_size=60), st.integers(1, 12))
def test_every_leaf_is_in_exactly_one_group_and_there_are_never_too_many(sizes: dict[str, int], limit: int) -> None:
    groups = grouped(sizes, limit)
    assert len(groups) <= max(limit, 1)
    assert sorted(path for paths in groups.values() for path in paths) == sorted(sizes)
