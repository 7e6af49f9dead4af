"""A journal put together: where its records go, and who writes them (torch)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ckpt.mirror.ring import Ring
from ckpt.options import Journal, seconds, size
from ckpt.saving.consuming import journaled_optimizers
from ckpt.saving.gradients import Buffers
from ckpt.saving.journal import Journaling, Look
from ckpt.saving.keeping import Keeper
from ckpt.saving.segments import Segments
from storage_backends.base import Store

log = logging.getLogger("ckpt")

DEPTH = 4
"""Steps captured and not yet written down, at most: then training waits."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank's records go. `base`: the folder of mirrors, None without one; `identity`: of the store there."""

    store: Store
    base: Path | None
    identity: str
    rank: int
    world_size: int


def open_journal(
    settings: Journal, state: Mapping[str, object], look: Look, names: Callable[[], Mapping[int, str]], place: Place
) -> Journaling:
    """The journal of one rank.

    Raises:
        UnsupportedState: a tracked optimizer cannot be journaled.
        ValueError: records are to go into the mirror's folder alone, and there is none.
    """
    journaled_optimizers(state)
    ring = None
    if settings.to != "store":
        if place.base is not None:
            try:
                ring = Ring(place.base, place.identity, place.rank, size(settings.ring))
            except OSError as error:
                log.warning("the journal is not in the mirror's folder: %s", error.strerror or error)
        if ring is None and settings.to == "mirror":
            raise ValueError('journal to="mirror" needs a mirror\'s folder; name one with mirror=, or use to="both"')
    changed = threading.Condition()
    keeper = Keeper(place.rank, place.world_size, ring, None, Buffers(), changed, DEPTH)
    if settings.to != "mirror":
        age = 0.0 if settings.steps is not None else seconds(settings.flush)
        keeper.segments = Segments(place.store, place.rank, age, keeper.told)
    return Journaling(settings, state, look, names, keeper)
