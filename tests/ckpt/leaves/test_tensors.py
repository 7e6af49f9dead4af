"""One tensor as a leaf: every dtype and stride exactly, what cannot be exact refused with its name and a remedy."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ckpt.errors import LayoutMismatch, UnsupportedState
from ckpt.format.shards import DTYPES
from ckpt.leaves import Flattener, PerRank, plan_restore
from tests.support.roundtrip import put, raw, take


def noise(dtype: str, *shape: int, seed: int = 0) -> torch.Tensor:
    """Random bits (NaN payloads, subnormals and all) of a dtype; zeros and ones for bool."""
    size = DTYPES[dtype].size
    numbers = torch.randint(0, 256, (*shape, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    if dtype == "bool":
        numbers &= 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "ComplexHalf support is experimental"
        return numbers.view(getattr(torch, dtype)).reshape(shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("place", ["parameter", "tensor", "tree"])
def test_every_dtype_comes_back_bit_for_bit(dtype: str, place: str) -> None:
    """I1"""

    def state(seed: int) -> tuple[dict[str, object], torch.Tensor]:
        tensor = noise(dtype, 2, 2, seed=seed)
        if place == "parameter":
            net = nn.Module()
            net.register_buffer("x", tensor)
            return {"x": net}, tensor
        return ({"x": tensor} if place == "tensor" else {"x": [tensor]}), tensor

    saved, tensor = state(1)
    other, target = state(2)
    assert not torch.equal(raw(tensor), raw(target))
    put(other, take(saved))
    assert torch.equal(raw(tensor), raw(target))


def test_a_dtype_that_changed_between_saves_is_seen_and_does_not_fit_the_old_one() -> None:
    """I1"""
    net = nn.Linear(2, 2)
    state: dict[str, object] = {"model": net}
    flattener = Flattener(state)
    first = take(state, flattener)
    net.to(torch.float16)
    second = take(state, flattener)
    assert second.stored.leaves["model.weight"].dtype == "float16"
    with pytest.raises(LayoutMismatch) as refused:
        put(state, first)
    assert refused.value.changed["model.weight"] == "stored float32 [2, 2], live float16 [2, 2]"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: torch.eye(2).to_sparse(), "sparse_coo"),
        (lambda: torch.empty(2, device="meta"), "to_empty"),
        (lambda: torch.zeros(1, 3).expand(4, 3), "share memory"),
        (lambda: torch.zeros(5).as_strided((3, 3), (1, 1)), "share memory"),
        (lambda: torch.zeros(4, dtype=torch.uint8).view(torch.bits8), "bits8"),
        (nn.parameter.UninitializedParameter, "one forward pass"),
        (lambda: Wrapped(torch.zeros(2)), "Wrapped"),
        (lambda: np.ma.masked_array([1.0, 2.0], [0, 1]), "numpy.asarray"),
        (lambda: np.array(["a", "b"]), "dtype"),
        (lambda: np.array([object()]), "dtype"),
        (lambda: np.array([1], "M8[s]"), "int64"),
        (lambda: np.array([1.0], ">f4"), "newbyteorder"),
        (lambda: np.zeros(2, [("a", "f4")]), "dtype"),
        (lambda: np.zeros(2, np.longdouble), "dtype"),
        (lambda: np.lib.stride_tricks.as_strided(np.zeros(4), (3, 3), (8, 8)), "share memory"),
        (lambda: readonly(np.zeros(3)), "read-only"),
        (lambda: PerRank(torch.zeros(1, 3).expand(4, 3)), "share memory"),
    ],
)
def test_what_cannot_be_exact_is_refused_with_its_name(make: Any, says: str) -> None:
    """I1"""
    with pytest.raises(UnsupportedState, match=says) as refused:
        take({"odd": make()})
    assert refused.value.leaf == "odd"
    assert str(refused.value).startswith("odd: ")


class Wrapped(torch.Tensor):
    pass


def readonly(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    array.flags.writeable = False
    return array


def test_quantised_tensors_are_refused() -> None:
    """I1"""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated in torch itself
        tensor = torch.quantize_per_tensor(torch.rand(3), 0.1, 0, torch.qint8)
    with pytest.raises(UnsupportedState, match="quantised"):
        take({"odd": tensor})


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t,
        lambda t: t.t(),
        lambda t: t[::2, 1:],
        lambda t: t[0, 0],
        lambda t: t[:0],
        lambda t: t.reshape(1, 2, 2, 4).to(memory_format=torch.channels_last),
        lambda t: t.unsqueeze(0).expand(1, 4, 4),
    ],
)
def test_any_strides_are_copied_logically_and_kept(view: Any) -> None:
    saved, target = view(torch.rand(4, 4)), view(torch.rand(4, 4))
    strides = target.stride()
    put({"x": target}, take({"x": saved}))
    assert torch.equal(saved, target)
    assert target.stride() == strides


def test_lazily_conjugated_and_negated_tensors_are_saved_as_what_they_mean() -> None:
    numbers = noise("complex64", 3)
    saved: dict[str, object] = {"conj": numbers.conj(), "neg": numbers.conj().imag}
    state: dict[str, object] = {"conj": torch.zeros(3, dtype=torch.complex64), "neg": torch.zeros(3).neg()}
    put(state, take(saved))
    assert torch.equal(raw(state["conj"]), raw(numbers.conj().resolve_conj()))  # type: ignore[arg-type]
    assert torch.equal(raw(state["neg"]), raw(numbers.conj().imag.resolve_neg()))  # type: ignore[arg-type]

    flattener = Flattener(saved)
    before = take(saved, flattener)
    numbers.fill_(3 + 4j)
    after = take(saved, flattener)
    assert all(not torch.equal(before.data[s], after.data[s]) for s in before.data), "a resolved copy went stale"

    lazy = torch.zeros(3, dtype=torch.complex64).conj()
    put({"conj": lazy, "neg": torch.zeros(3)}, before)
    assert torch.equal(raw(lazy), before.data[next(s for s in before.data if s.leaf.path == "conj")])


def test_the_live_shard_shares_memory_with_the_live_tensor() -> None:
    net = nn.Linear(2, 2)
    array = np.zeros(3)
    flat = Flattener({"model": net, "array": array}).flatten()
    live = {s.shard.leaf.path: s.tensor for s in flat.shards}
    with torch.no_grad():
        net.weight.fill_(7)
    array[1] = 5
    assert live["model.weight"].tolist() == [[7, 7], [7, 7]]
    assert live["array"].tolist() == [0, 5, 0]
    assert not live["model.weight"].requires_grad


@pytest.mark.parametrize("dtype", ["?", "i1", "u2", "u4", "u8", "i8", "f2", "f4", "f8", "c8", "c16"])
@pytest.mark.parametrize(
    "view", [lambda a: a, lambda a: a.T, lambda a: a[::-1], lambda a: a[:, ::2], lambda a: a[0, 0, ...]]
)
def test_numpy_arrays_are_restored_in_place(dtype: str, view: Any) -> None:
    """J6"""
    rng = np.random.default_rng(0)
    saved, target = (view((rng.random((3, 4)) * 9).astype(dtype)) for _ in range(2))
    snapshot = take({"x": saved})
    assert [leaf.cls for leaf in snapshot.stored.leaves.values()] == ["array"]
    if dtype == "?":
        target[...] = ~saved
    put({"x": target}, snapshot)
    assert target.tobytes() == saved.tobytes()


def test_a_per_rank_tensor_is_marked_so_and_restored_from_its_own() -> None:
    state: dict[str, object] = {
        "noise": PerRank(torch.rand(3)),
        "deep": {"a": [PerRank(np.arange(3.0))]},
        "b": torch.rand(2),
    }
    snapshot = take(state)
    assert {s.leaf.path: s.per_rank for s in snapshot.data} == {"noise": True, "deep.a[0]": True, "b": False}
    target = torch.zeros(3)
    other: dict[str, object] = {"noise": PerRank(target), "deep": {"a": [PerRank(np.zeros(3))]}, "b": torch.rand(2)}
    put(other, snapshot)
    assert torch.equal(target, state["noise"].value)  # type: ignore[attr-defined]
    deep: Any = other["deep"]
    assert isinstance(deep["a"][0], PerRank), "the declaration itself must survive"
    assert deep["a"][0].value.tolist() == [0, 1, 2]


def test_installing_from_a_buffer_at_an_odd_offset_works() -> None:
    saved = torch.rand(5)
    snapshot = take({"x": saved})
    target = torch.zeros(5)
    restoration = plan_restore({"x": target}, snapshot.stored)
    (shard,) = restoration.wanted
    buffer = torch.cat([torch.zeros(3, dtype=torch.uint8), snapshot.data[shard]])
    restoration.install(shard, buffer[3:])
    restoration.finish()
    assert torch.equal(target, saved)
