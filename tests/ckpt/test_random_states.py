"""Random states come back exactly, or not at all."""

from __future__ import annotations

import copy
import json
import random
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from ckpt import random_states as module
from ckpt.errors import UnsupportedState
from ckpt.random_states import random_states, set_random_states


@pytest.fixture(autouse=True)
def states_put_back() -> Iterator[None]:
    before = random_states()
    yield
    set_random_states(before)


def draws() -> list[object]:
    return [
        torch.rand(3).tolist(),
        torch.randn(1).item(),
        np.random.rand(),
        np.random.randn(),
        random.random(),
        random.gauss(0, 1),
        random.getrandbits(200),
    ]


@pytest.mark.parametrize("before", [0, 1, 2])
def test_setting_what_was_read_gives_the_same_draws(before: int) -> None:
    # One draw of a normal leaves the second half of a pair waiting in numpy and in `random`: it must come back too.
    for _ in range(before):
        draws()
    states = random_states()
    first = draws()
    assert draws() != first, "the draws do not depend on the states: this test proves nothing"
    set_random_states(states)
    assert draws() == first


def test_the_tree_is_plain_and_says_the_same_twice() -> None:
    states = random_states()

    def plain(tree: Any) -> bool:
        if isinstance(tree, dict):
            return all(type(key) is str and plain(value) for key, value in tree.items())
        if isinstance(tree, list):
            return all(plain(value) for value in tree)
        return tree is None or type(tree) in (int, float, bytes)

    assert plain(states)
    assert random_states() == states
    assert len(json.dumps(states, default=bytes.hex)) < 32_000


def test_reading_does_not_start_cuda() -> None:
    random_states()
    assert not torch.cuda.is_initialized()


def cut(tree: dict[str, Any]) -> None:
    tree["torch"] = tree["torch"][:-1]


def zeros(tree: dict[str, Any]) -> None:
    # The right length, but no state of a Mersenne twister.
    tree["torch"] = bytes([255]) * len(tree["torch"])


def no_numpy(tree: dict[str, Any]) -> None:
    del tree["numpy"]


def short_numpy(tree: dict[str, Any]) -> None:
    tree["numpy"]["key"] = b"1234"


def far_position(tree: dict[str, Any]) -> None:
    tree["numpy"]["position"] = 625


def short_python(tree: dict[str, Any]) -> None:
    tree["python"]["words"] = tree["python"]["words"][1:]


def text_in_python(tree: dict[str, Any]) -> None:
    tree["python"]["words"][5] = "7"


def large_word(tree: dict[str, Any]) -> None:
    tree["python"]["words"][5] = 1 << 32


def odd_cuda(tree: dict[str, Any]) -> None:
    tree["cuda"] = {"current": 2, "devices": [b"", b""]}


@pytest.mark.parametrize(
    "spoil",
    [cut, zeros, no_numpy, short_numpy, far_position, short_python, text_in_python, large_word, odd_cuda],
    ids=lambda spoil: spoil.__name__,
)
def test_a_tree_that_is_not_whole_is_refused_and_sets_nothing(spoil: Any) -> None:
    now = random_states()
    spoiled = copy.deepcopy(now)
    spoil(spoiled)
    draws()
    before = random_states()
    with pytest.raises(ValueError, match=r"random states: .*nothing"):
        set_random_states(spoiled)
    assert random_states() == before


@pytest.mark.parametrize("nonsense", [None, 7, b"torch", [], {}])
def test_nonsense_is_refused(nonsense: object) -> None:
    with pytest.raises(ValueError, match="random states"):
        set_random_states(nonsense)


def test_states_of_devices_that_are_gone_are_left_out_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    states = random_states() | {"cuda": {"current": 0, "devices": [bytes(16)]}}
    first = draws()
    with pytest.warns(RuntimeWarning, match="1 CUDA devices were saved and this process has none"):
        set_random_states(states)
    assert draws() == first


class Devices:
    """CUDA as `random_states` sees it: CPU generators play the devices."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int, current: int) -> None:
        self.generators = [torch.Generator().manual_seed(100 * count + i) for i in range(count)]
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "init", lambda: None)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
        monkeypatch.setattr(torch.cuda, "default_generators", tuple(self.generators))
        monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: [g.get_state() for g in self.generators])

    def draws(self) -> list[float]:
        return [torch.rand(1, generator=generator).item() for generator in self.generators]


def test_every_device_takes_its_own_state_back(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = Devices(monkeypatch, count=3, current=1)
    states = random_states()
    first = devices.draws()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        set_random_states(states)
    assert devices.draws() == first


def test_on_another_number_of_devices_the_current_one_takes_the_state_of_the_one_that_was_current(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    large = Devices(monkeypatch, count=4, current=3)
    states = random_states()
    first = large.draws()
    small = Devices(monkeypatch, count=2, current=1)
    untouched = torch.Generator().manual_seed(200)
    with pytest.warns(RuntimeWarning, match="device 1 takes that of device 3"):
        set_random_states(states)
    assert small.draws() == [torch.rand(1, generator=untouched).item(), first[3]]


def test_a_numpy_generator_of_another_kind_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(np.random, "get_state", lambda legacy: {"bit_generator": "PCG64"})
    with pytest.raises(UnsupportedState, match="PCG64") as caught:
        module.random_states()
    assert caught.value.leaf == "$random"
