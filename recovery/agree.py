"""How ranks stay together while each reads for itself: after every stage all learn how it went for all.

One gather ends a stage. A rank that failed takes part in it like any other, so nobody waits for it in vain, and what
follows is the same everywhere: go on, skip this snapshot, or raise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import msgspec

from ckpt.agreement import pack_error, unpack_error
from ckpt.errors import DamagedError
from recovery.boxes import Bytes
from recovery.read import Pruned

T = TypeVar("T")


class Peers(Protocol):
    """The part of `ckpt.ranks.Ranks` that a restore needs."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def gather(self, data: bytes) -> list[bytes]: ...

    def broadcast(self, data: bytes | None, src: int = 0) -> bytes: ...

    def exchange(self, out: Mapping[int, Bytes], sizes: Mapping[int, int]) -> dict[int, Bytes]: ...


class Alone:
    """A process that asks nobody."""

    rank = 0
    world_size = 1

    def gather(self, data: bytes) -> list[bytes]:
        return [data]

    def broadcast(self, data: bytes | None, src: int = 0) -> bytes:  # noqa: ARG002 - there is one source
        assert data is not None
        return data

    def exchange(self, out: Mapping[int, Bytes], sizes: Mapping[int, int]) -> dict[int, Bytes]:
        assert not out and not sizes
        return {}


@dataclass(frozen=True, slots=True)
class Done(Generic[T]):
    """The stage went well on every rank; `value` is this rank's own result, `wish` whether any rank has the wish."""

    value: T
    wish: bool


@dataclass(frozen=True, slots=True)
class Skip:
    """On some rank the snapshot is damaged, or was pruned: all ranks take another one. `error` is the lowest such
    rank's; `pruned`: it was not damaged on any."""

    error: Exception
    pruned: bool


class _Word(msgspec.Struct, frozen=True):
    """What a rank says of its stage: "done", "damaged", "pruned" or "failed"."""

    how: str
    error: msgspec.Raw = msgspec.Raw(b"null")
    wish: bool = False


def together(peers: Peers, stage: Callable[[], T], *, wishes: Callable[[T], bool] = lambda _: False) -> Done[T] | Skip:
    """Run `stage` here, tell the others how it went, and come to the same conclusion. Collective.

    Raises:
        Exception: the stage failed on some rank for a reason that no other snapshot cures (the store does not answer,
            the layouts differ): every rank raises that of the lowest rank concerned.
    """
    own: Exception | None = None
    value: T | None = None
    try:
        value = stage()
        word = _Word("done", wish=wishes(value))
    except Exception as error:
        own = error
        how = "pruned" if isinstance(error, Pruned) else "damaged" if isinstance(error, DamagedError) else "failed"
        word = _Word(how, msgspec.Raw(pack_error(error)))
    words = [msgspec.json.decode(data, type=_Word) for data in peers.gather(msgspec.json.encode(word))]
    for how in ("failed", "damaged", "pruned"):
        rank = next((r for r, w in enumerate(words) if w.how == how), None)
        if rank is None:
            continue
        told = own if rank == peers.rank else unpack_error(bytes(words[rank].error), where=f"rank {rank}: ")
        assert told is not None
        if how == "failed":
            raise told
        return Skip(told, how == "pruned")
    return Done(value, any(w.wish for w in words))  # type: ignore[arg-type]
