"""The random states of this process, as plain data (torch).

torch on the CPU and on every CUDA device, numpy's global state, Python's `random`: what dropout, shuffling and
augmentation draw from unless a generator of their own is given. Exact: setting what was read gives the same draws.
"""

from __future__ import annotations

import random
import warnings
from typing import Annotated, Any

import msgspec
import numpy as np
import torch
import xxhash

from ckpt.errors import UnsupportedState

_WORDS = 624  # of a Mersenne twister, which numpy and `random` both are
_Word = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
_Place = Annotated[int, msgspec.Meta(ge=0, le=_WORDS)]


class _Cuda(msgspec.Struct, frozen=True):
    current: Annotated[int, msgspec.Meta(ge=0)]
    devices: list[bytes]


class _Numpy(msgspec.Struct, frozen=True):
    key: bytes  # little-endian uint32
    position: _Place
    has_gauss: Annotated[int, msgspec.Meta(ge=0, le=1)]
    gauss: float


class _Python(msgspec.Struct, frozen=True):
    words: Annotated[list[_Word], msgspec.Meta(min_length=_WORDS, max_length=_WORDS)]
    position: _Place
    gauss: float | None


class _States(msgspec.Struct, frozen=True):
    torch: bytes
    cuda: _Cuda | None
    numpy: _Numpy
    python: _Python


def random_states() -> dict[str, Any]:
    """All random states now, as a tree of dict, list, int, float, bytes and None; about 10 KB.

    CUDA devices are read only if CUDA is in use in this process: reading would start it. Nothing waits for a device.

    Raises:
        UnsupportedState: numpy's global generator was replaced by one that is no Mersenne twister.
    """
    cuda = None
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        devices = [_bytes(state) for state in torch.cuda.get_rng_state_all()]
        cuda = {"current": torch.cuda.current_device(), "devices": devices}
    numpy = np.random.get_state(legacy=False)
    if numpy["bit_generator"] != "MT19937":
        raise UnsupportedState(
            f"$random: numpy's global generator is {numpy['bit_generator']}, expected MT19937; keep the default one, "
            "or draw from a numpy Generator of your own whose state you track as a plain value",
            leaf="$random",
        )
    version, words, python_gauss = random.getstate()
    assert version == 3, version  # of the interpreter, the same since Python 3.2
    return {
        "torch": _bytes(torch.get_rng_state()),
        "cuda": cuda,
        "numpy": {
            "key": numpy["state"]["key"].astype("<u4").tobytes(),
            "position": int(numpy["state"]["pos"]),
            "has_gauss": int(numpy["has_gauss"]),
            "gauss": float(numpy["gauss"]),
        },
        "python": {"words": list(words[:-1]), "position": words[-1], "gauss": python_gauss},
    }


def set_random_states(tree: Any) -> None:
    """Set what `random_states()` returned, all of it, or nothing if `tree` is not whole.

    The number of CUDA devices may have changed: then the device that was current in the process that saved gives its
    state to the one that is current here, with a warning.

    Raises:
        ValueError: `tree` does not describe random states; nothing was set.
    """
    try:
        states = msgspec.convert(tree, _States)
    except msgspec.ValidationError as error:
        raise ValueError(f"random states: {error}; nothing was set") from None
    cpu = generator_state("torch", states.torch, torch.default_generator)
    if len(states.numpy.key) != 4 * _WORDS:
        raise ValueError(f"random states: numpy has {len(states.numpy.key)} bytes, expected {4 * _WORDS}; nothing set")
    devices = _cuda_targets(states.cuda) if states.cuda is not None else []

    for generator, state in devices:
        generator.set_state(state)
    torch.set_rng_state(cpu)
    np.random.set_state(
        {
            "bit_generator": "MT19937",
            "state": {"key": np.frombuffer(states.numpy.key, "<u4"), "pos": states.numpy.position},
            "has_gauss": states.numpy.has_gauss,
            "gauss": states.numpy.gauss,
        }
    )
    random.setstate((3, (*states.python.words, states.python.position), states.python.gauss))


def derived_states(run: str, rank: int) -> dict[str, Any]:
    """Random states for a rank that the snapshot has none for: a function of (run, rank) alone, so that a restart of
    the same restore draws the same, and no two ranks draw alike. The form is that of `random_states()`."""
    seed = xxhash.xxh3_64_intdigest(f"{run}/{rank}".encode())
    now = random_states()
    numpy = np.random.RandomState(np.array([seed & 0xFFFFFFFF, seed >> 32], dtype=np.uint32)).get_state(legacy=False)
    _, words, _ = random.Random(seed).getstate()
    cuda = now["cuda"]
    if cuda is not None:
        generators = [torch.Generator(f"cuda:{i}") for i in range(len(cuda["devices"]))]
        cuda = {**cuda, "devices": [_bytes(g.manual_seed(seed + i).get_state()) for i, g in enumerate(generators)]}
    return {
        "torch": _bytes(torch.Generator().manual_seed(seed).get_state()),
        "cuda": cuda,
        "numpy": {
            "key": numpy["state"]["key"].astype("<u4").tobytes(),
            "position": int(numpy["state"]["pos"]),
            "has_gauss": 0,
            "gauss": 0.0,
        },
        "python": {"words": list(words[:-1]), "position": words[-1], "gauss": None},
    }


def generator_state(name: str, data: bytes, generator: torch.Generator) -> torch.Tensor:
    """The bytes of a generator's state as the tensor that `generator.set_state` takes, tried on a copy of it first.

    Raises:
        ValueError: `generator` is of another kind than the one that was saved, or the bytes are no such state.
    """
    expected = generator.get_state().numel()
    if len(data) != expected:
        raise ValueError(f"random states: {name} has {len(data)} bytes, expected {expected}; nothing was set")
    state = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    try:
        torch.Generator(device=generator.device).set_state(state)
    except RuntimeError as error:
        raise ValueError(f"random states: {name}: {error}; nothing was set") from error
    return state


def _cuda_targets(saved: _Cuda) -> list[tuple[torch.Generator, torch.Tensor]]:
    count = torch.cuda.device_count()
    if saved.current >= len(saved.devices):
        raise ValueError(
            f"random states: CUDA device {saved.current} was current, but {len(saved.devices)} were saved; nothing set"
        )
    if count == 0:
        warnings.warn(
            f"random states of {len(saved.devices)} CUDA devices were saved and this process has none: they are left "
            "out, so draws on a device will differ",
            RuntimeWarning,
            stacklevel=3,
        )
        return []
    torch.cuda.init()  # type: ignore[no-untyped-call]
    generators = torch.cuda.default_generators
    if count == len(saved.devices):
        pairs = list(enumerate(saved.devices))
    else:
        here = torch.cuda.current_device()
        warnings.warn(
            f"random states of {len(saved.devices)} CUDA devices were saved and this process has {count}: device "
            f"{here} takes that of device {saved.current}, the others keep theirs",
            RuntimeWarning,
            stacklevel=3,
        )
        pairs = [(here, saved.devices[saved.current])]
    return [(generators[i], generator_state(f"cuda:{i}", data, generators[i])) for i, data in pairs]


def _bytes(state: torch.Tensor) -> bytes:
    return state.numpy().tobytes()
