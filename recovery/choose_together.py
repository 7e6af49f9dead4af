"""Ranks choose a snapshot together: one reads the history, all hear the same."""

from __future__ import annotations

import msgspec

from ckpt.agreement import on_first
from ckpt.format.names import SnapshotId
from recovery.agree import Peers
from recovery.choose import Choice, choose
from storage_backends.base import Store


class _Choice(msgspec.Struct, frozen=True):
    """A `Choice` on its way from rank 0."""

    candidates: tuple[str, ...]
    named: bool
    unreadable: tuple[tuple[str, str], ...]
    journaled: int | None


def choose_together(store: Store, peers: Peers, step: int | str | None) -> Choice:
    """Rank 0 reads the history, so that a listing that lags somewhere cannot set the ranks apart."""

    def ask() -> bytes:
        choice = choose(store, step)
        unreadable = tuple((str(id_), reason) for id_, reason in choice.unreadable)
        return msgspec.json.encode(
            _Choice(tuple(map(str, choice.candidates)), choice.named, unreadable, choice.journaled)
        )

    told = msgspec.json.decode(on_first(peers, ask), type=_Choice)
    return Choice(
        tuple(_id(text) for text in told.candidates),
        told.named,
        tuple((_id(text), reason) for text, reason in told.unreadable),
        told.journaled,
    )


def _id(text: str) -> SnapshotId:
    parsed = SnapshotId.parse(text)
    assert parsed is not None, text  # from rank 0's own code, not from a store
    return parsed
