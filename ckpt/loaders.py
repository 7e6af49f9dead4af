"""What `batches()` needs to know of a data loader, whoever wrote it (torch).

A loader is anything that can be iterated again and again: torch's `DataLoader`, torchdata's `StatefulDataLoader`, a
list. Two kinds: one that resumes itself (``state_dict`` and ``load_state_dict``), and one that must be replayed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from ckpt.random_states import generator_state

_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


class PackedTensor(msgspec.Struct, frozen=True):
    """A tensor taken out of a loader's state: where it was, and its bytes."""

    at: list[Any]
    dtype: str
    shape: list[Annotated[int, msgspec.Meta(ge=0)]]
    data: bytes


def check_loader(loader: Any) -> None:
    """Refuse what could not be resumed exactly, before anything is drawn.

    Raises:
        TypeError: not iterable, or an iterator.
        ValueError: a loader whose order a fresh process cannot repeat.
    """
    name = type(loader).__name__
    if isinstance(loader, Iterator):
        raise TypeError(
            f"batches() got a {name}, an iterator, which runs through its data only once; pass the loader it was made "
            "from, so that the next epoch, or a restarted job, can begin again"
        )
    if not hasattr(type(loader), "__iter__") and not hasattr(type(loader), "__getitem__"):
        raise TypeError(f"batches() got a {name}; expected a DataLoader or something else that can be iterated")
    if getattr(loader, "persistent_workers", False):
        raise ValueError(
            f"batches() got a {name} with persistent_workers=True: its workers carry random states from epoch to epoch "
            "that a restarted process cannot bring back; use persistent_workers=False"
        )
    if getattr(loader, "num_workers", 0) and not getattr(loader, "in_order", True):
        raise ValueError(
            f"batches() got a {name} with in_order=False: which batches a restarted process still has to see depends "
            "on the speed of its workers; use in_order=True"
        )


def resumes_itself(loader: Any) -> bool:
    """Whether ``load_state_dict`` then ``iter`` brings the position back; otherwise it is replayed."""
    if not callable(getattr(loader, "state_dict", None)) or not callable(getattr(loader, "load_state_dict", None)):
        return False
    if not isinstance(loader, DataLoader):
        return True
    if isinstance(loader.dataset, IterableDataset):
        # torchdata fast-forwards a stream without a state itself, and counts those batches twice: the second resume
        # would end up elsewhere (torchdata 0.11). Replaying costs the same and is right.
        return hasattr(loader.dataset, "load_state_dict")
    order = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    # A batch sampler that is not torchdata's own is fast-forwarded by it inside the first next(), when the random
    # states are already those of the save: a shuffle drawn then is another one. Replaying is right, if slower.
    return (
        hasattr(order, "load_state_dict")
        or isinstance(order, SequentialSampler)
        or type(order).__module__.partition(".")[0] == "torchdata"
    )


def describe(loader: Any) -> dict[str, Any]:
    """What must be equal for a position to mean the same data: kind of loader, lengths, batch size, order."""
    if not isinstance(loader, DataLoader):
        return {"kind": type(loader).__name__, "length": _length(loader)}
    about: dict[str, Any] = {"kind": type(loader).__name__}
    if isinstance(loader.dataset, IterableDataset):
        # Its length may be a guess, and asking the loader for it makes the loader warn when the guess was low.
        about["order"] = "iterable"
    else:
        about["dataset length"] = _length(loader.dataset)
        about["samples per epoch"] = _length(loader.sampler)
        about["order"] = type(loader.sampler).__name__
    batches = loader.batch_sampler
    if batches is not None and not isinstance(batches, BatchSampler):
        about["order"] = type(batches).__name__
    about["batch size"] = loader.batch_size if batches is None else _plain_int(getattr(batches, "batch_size", None))
    about["drop_last"] = bool(getattr(batches, "drop_last", loader.drop_last))
    if resumes_itself(loader):
        about["workers"] = loader.num_workers  # its state has a part for each
    return about


def set_epoch(loader: Any, epoch: int) -> None:
    """Tell the loader, its samplers and its dataset which epoch begins, wherever they want to know."""
    for each in (*_orders(loader), getattr(loader, "dataset", None)):
        if callable(tell := getattr(each, "set_epoch", None)):
            tell(epoch)


def generator_states(loader: Any) -> list[bytes]:
    """The states of the generators that the loader and its samplers draw from, in a fixed order."""
    return [generator.get_state().numpy().tobytes() for generator in _generators(loader)]


def set_generator_states(loader: Any, states: list[bytes]) -> None:
    """Set what `generator_states` returned. Raises ValueError, before any is set, if the generators are not alike."""
    generators = _generators(loader)
    if len(states) != len(generators):
        raise ValueError(
            f"the loader and its samplers had {len(states)} generators of their own at the save and have "
            f"{len(generators)} now; make the loader as in the run that saved"
        )
    ready = [
        generator_state("the loader's generator", state, generator)
        for state, generator in zip(states, generators, strict=True)
    ]
    for generator, state in zip(generators, ready, strict=True):
        generator.set_state(state)


def pack_state(tree: Any) -> tuple[Any, list[PackedTensor]]:
    """A loader's ``state_dict()`` without its tensors (None in their place), and the tensors as bytes."""
    tensors: list[PackedTensor] = []
    return _packed(tree, [], tensors), tensors


def unpack_state(tree: Any, tensors: list[PackedTensor]) -> Any:
    """What `pack_state` took apart. Raises ValueError for a tensor that is none."""
    return _unpacked(tree, (), {tuple(tensor.at): _tensor(tensor) for tensor in tensors})


def _orders(loader: Any) -> list[Any]:
    """The loader and the objects that say its order; each once."""
    batches = getattr(loader, "batch_sampler", None)
    found = (loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))
    return list({id(each): each for each in found if each is not None}.values())


def _generators(loader: Any) -> list[torch.Generator]:
    found = (getattr(each, "generator", None) for each in _orders(loader))
    return list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())


def _length(sized: Any) -> int | None:
    try:
        return len(sized)
    except (TypeError, NotImplementedError, AttributeError):
        return None


def _plain_int(value: Any) -> int | None:
    return value if isinstance(value, int) else None


def _packed(tree: Any, at: list[Any], tensors: list[PackedTensor]) -> Any:
    if isinstance(tree, torch.Tensor):
        flat = tree.detach().cpu().contiguous().reshape(-1)
        data = flat.view(torch.uint8).numpy().tobytes()
        tensors.append(PackedTensor(list(at), str(tree.dtype).removeprefix("torch."), list(tree.shape), data))
        return None
    if type(tree) is dict:
        return {key: _packed(value, [*at, key], tensors) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_packed(value, [*at, i], tensors) for i, value in enumerate(tree))
    return tree


def _unpacked(tree: Any, at: tuple[Any, ...], tensors: dict[tuple[Any, ...], torch.Tensor]) -> Any:
    if tree is None:
        return tensors.get(at)
    if type(tree) is dict:
        return {key: _unpacked(value, (*at, key), tensors) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_unpacked(value, (*at, i), tensors) for i, value in enumerate(tree))
    return tree


def _tensor(packed: PackedTensor) -> torch.Tensor:
    dtype = _DTYPES.get(packed.dtype)
    if dtype is None:
        raise ValueError(f"the loader's state at {packed.at} is a tensor of the unknown dtype {packed.dtype!r}")
    whole = torch.empty(packed.shape, dtype=dtype)
    if whole.nbytes != len(packed.data):
        raise ValueError(
            f"the loader's state at {packed.at} has {len(packed.data)} bytes, expected {whole.nbytes} for "
            f"{packed.dtype} {packed.shape}"
        )
    if packed.data:
        whole = torch.frombuffer(bytearray(packed.data), dtype=torch.uint8).view(dtype).reshape(packed.shape)
    return whole
