"""Live state into leaves, and leaves back into live state (torch). The lobby of the room.

    flatten → module, optimizer, tree → table → tensors     what is there, which box of it, where its memory lies
    restore → moments → matching → targets                  what goes where, checked first, then written

`Flattener.flatten` is called at every save and costs what has changed; `plan_restore` checks everything and writes
nothing; the `Restoration` it returns takes the bytes.
"""

from __future__ import annotations

from ckpt.leaves.flatten import Flat, Flattener
from ckpt.leaves.restore import Restoration, plan_restore
from ckpt.leaves.stored import Stored
from ckpt.leaves.tensors import LiveShard, PerRank
from ckpt.leaves.tree import regrow, torch_constant

__all__ = [
    "Flat",
    "Flattener",
    "LiveShard",
    "PerRank",
    "Restoration",
    "Stored",
    "plan_restore",
    "regrow",
    "torch_constant",
]
