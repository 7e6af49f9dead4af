"""One rank's share of copying from the fast tier to the durable one: its own packs and part; rank 0 does the rest.

Every rank copies what it wrote, so that the copy has the bandwidth of all of them. Rank 0 writes the snapshots, each
once everything it names is there. What a rank does not bring (it died, or belongs to a job that had more ranks) rank 0
copies too, after it has waited in vain: two that copy one object write the same bytes.
"""

from __future__ import annotations

import logging

from ckpt.errors import DamagedError
from ckpt.format.names import RunId
from ckpt.history.behind import Behind, Durable, Pruned, behind, rank_of
from ckpt.history.clock import Clock
from ckpt.history.keep import Keep
from ckpt.history.thinning import execute_thinning, plan_thinning
from storage_backends.tiered import TieredStore

log = logging.getLogger("ckpt")

PATIENCE = 30.0
"""Seconds without any progress after which rank 0 copies what other ranks should."""

FIRST_PAUSE, LAST_PAUSE = 0.1, 5.0


class Tiers:
    """The chore of one rank (`ckpt.history.copier`)."""

    def __init__(self, store: TieredStore, clock: Clock, rank: int, world_size: int) -> None:
        self._store = store
        self._clock = clock
        self._rank = rank
        self._world_size = world_size
        self._durable = Durable(store)
        self._broken: dict[str, str] = {}
        self._thinned = False

    def catch_up(self, run: RunId) -> str | None:
        """Copy every snapshot of the fast tier that the durable one lacks, oldest first; then thin the fast tier.

        Returns: which snapshots cannot be copied because the fast tier's only copy is damaged; None if none.

        Raises:
            StoreInUse: another job has taken over on the durable tier.
            StorageError: a tier failed; the next pass goes on.
        """
        lacking = {one.name.key: one for one in behind(self._store)}
        self._broken = {key: why for key, why in self._broken.items() if key in lacking}
        for one in [one for key, one in lacking.items() if key not in self._broken]:
            try:
                self._bring(one, run)
            except Pruned:
                log.info("snapshot %s was pruned before it was copied", one.name.id.short)
            except DamagedError as error:
                self._broken[one.name.key] = f"snapshot {one.name.id.short} is not on the durable tier: {error}"
                log.warning("%s", self._broken[one.name.key])
        if self._rank == 0 and self._store.keep_fast is not None:
            plan = plan_thinning(self._store, Keep(last=self._store.keep_fast), orphans=not self._thinned)
            execute_thinning(plan, self._store)
            self._thinned = True
        return "; ".join(self._broken.values()) or None

    def _bring(self, one: Behind, run: RunId) -> None:
        mine = [key for key in one.needs if rank_of(key) % self._world_size == self._rank]
        self._copy(one, self._durable.lacking(mine))
        if self._rank == 0:
            self._await_others(one)
            self._durable.publish(one, run)

    def _copy(self, one: Behind, keys: list[str]) -> None:
        """Packs before parts: a part on the durable tier has its packs there."""
        packs, parts = [key for key in keys if key not in one.parts], [key for key in keys if key in one.parts]
        for some in (packs, parts):
            self._durable.copy(some, one.parts)

    def _await_others(self, one: Behind) -> None:
        lacking = self._durable.lacking(one.needs)
        since, pause = self._clock.monotonic(), FIRST_PAUSE
        while lacking:
            if self._clock.monotonic() - since >= PATIENCE:
                self._copy(one, lacking)
                return
            self._clock.sleep(pause)
            pause = min(pause * 1.5, LAST_PAUSE)
            still = self._durable.lacking(lacking)
            if len(still) < len(lacking):
                since = self._clock.monotonic()
            lacking = still
