"""From a restore to the next save: the restored state as the reference of the next diff, in the layout the job has now
(torch). A restart then stores what changed since the snapshot, and not everything once more."""

from __future__ import annotations

import logging

from ckpt.errors import SaveFailed
from ckpt.format.relayout import old_boxes, stored_already
from ckpt.leaves import Flat
from ckpt.saving.job import Reference
from ckpt.saving.taking import Taking
from recovery.mirrored import HeldSlot
from recovery.report import Restored

log = logging.getLogger("ckpt")


def reference_after(restored: Restored, own: HeldSlot | None, flat: Flat, taking: Taking) -> Reference | None:
    """Agree on the layout of what is saved next, and find what of it is stored already. Collective.

    Args:
        restored: what came back; `flat`: the live state it came back into.
        own: the slot of this rank's former process that holds the state of this very snapshot, if there is one.

    Returns:
        The reference, or None where the snapshot has nothing in this layout, or there is no memory for a copy of the
        state (then the next save is a full one).

    Raises:
        LayoutMismatch: on every rank: the ranks' states do not describe one whole.
    """
    parts = restored.parts
    # Buffers that were per rank stay so: being equal by chance now must not make the next save a full one.
    differing = {row.leaf for part in parts.values() for row in part.shards if row.per_rank and row.cls == "buffer"}
    layout = taking.agree(flat, differing=differing, old=old_boxes(parts.values()))
    try:
        data = None if own is None else taking.go_on_with(own.path, own.number, own.layout)
        if data is None and restored.replayed is not None:
            return None  # what is live is a later state than the snapshot's
        if data is None:
            data = taking.take(flat, None, id_=restored.id, save=False).data
    except SaveFailed as error:  # the state is restored all the same; the next save is full, or fails and says so
        log.warning("after restoring: %s", error)
        return None
    stored = stored_already(parts, restored.rank, layout, data)
    if not stored.table:
        return None
    return Reference(restored.id, stored.layout, data, stored.table, stored.packs, stored.shared, stored.loans)
