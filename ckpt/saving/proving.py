"""The proof that a journal leads where it says: a copy of the state, rolled forward beside the training (torch).

Every step's checksums of the live tensors are compared with those of the copy, and at every snapshot its digests too.
What differs once may have been read in the middle of a swap (weights exchanged for an evaluation, and back), and such a
step is merely never restored; what still differs at the next step was changed outside the optimizer, or the
optimizer's step is not a function of its own shard: then the journal ends, and says so.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ckpt.format.documents import chunk_digest
from ckpt.format.layout import Layout
from ckpt.format.names import SnapshotId
from ckpt.format.shards import Box
from ckpt.rolling import Change, Rolled, Unlike, raw_bytes
from ckpt.saving.job import Bytes


class Diverged(Exception):  # noqa: N818 - what became of a journal
    """The journal does not lead to the live state. The message names the leaf and the likely cause."""


class Proof:
    """The copy, and what was found. One thread's own."""

    def __init__(self, rolled: Rolled) -> None:
        self.rolled = rolled
        self._suspect: tuple[int, list[str], str] | None = None
        self._digests: dict[SnapshotId, tuple[Layout, list[str]]] = {}

    @property
    def nbytes(self) -> int:
        """Host memory of the copy."""
        return sum(tensor.nbytes for tensor in self.rolled.tensors.values())

    def follow(self, change: Change) -> None:
        """Roll over one step and compare.

        Raises:
            Diverged: two steps in a row do not come to the live state, or the step cannot be rolled over.
        """
        try:
            self.rolled.roll(change)
            differing = self.rolled.differing(change.sums)
        except (Unlike, RuntimeError, ValueError, TypeError) as error:
            raise Diverged(f"step {change.step} cannot be replayed: {error}") from error
        if not differing:
            self._suspect = None
            return
        if self._suspect is not None:
            step, leaves, cause = self._suspect
            raise Diverged(_text(step, leaves, cause))
        self._suspect = change.step, differing, likely_cause(differing, change, self.rolled)

    def mark(self, id_: SnapshotId, layout: Layout) -> None:
        """The state as it is now was captured as this snapshot: note what its chunks must be."""
        self._digests = {id_: (layout, _digests(self.rolled, layout))} | dict(list(self._digests.items())[-3:])

    def compare(self, id_: SnapshotId, digests: Sequence[str]) -> None:
        """The snapshot was committed with these digests, in the order of its layout's pieces.

        Raises Diverged: the journal came to another state.
        """
        found = self._digests.pop(id_, None)
        if found is None:
            return
        layout, mine = found
        for piece, ours, theirs in zip(layout.pieces, mine, digests, strict=True):
            if ours != theirs:
                raise Diverged(
                    f"snapshot {id_.short} holds another {piece.name} (chunk {piece.index}) than the journal leads to; "
                    "it was changed outside the optimizer since the snapshot before"
                )


def likely_cause(differing: Sequence[str], change: Change, rolled: Rolled) -> str:
    """What may have happened, from which tensors differ."""
    stepped = {path for call in change.calls for path in call.gradients}
    kinds = {shard.leaf.path: shard.leaf.cls for shard in rolled.table}
    slots = [path for path in differing if kinds.get(path, "").startswith("slot:")]
    first = differing[0]
    if slots:
        return (
            "its optimizer's state differs too, so its step is not a function of its own shard and gradient (noise, a "
            "subclass, a step over several shards), is not deterministic, or its state was edited"
        )
    if first in stepped:
        return (
            "the optimizer's own state is as it should be, so the tensor was changed outside the step: clamped, "
            "swapped for an average, or edited through .data, before step() was called"
        )
    return "no optimizer stepped it, so it was changed outside, through .data or in a way that leaves no trace"


def _text(step: int, leaves: Sequence[str], cause: str) -> str:
    more = f" and {len(leaves) - 1} more" if len(leaves) > 1 else ""
    return f"{leaves[0]}{more} after step {step} is not what the journal leads to: {cause}"


def _digests(rolled: Rolled, layout: Layout) -> list[str]:
    """The chunk digest of every piece of a layout."""
    found: list[str] = [""] * len(layout.pieces)
    bundled: dict[int, list[Bytes]] = {}
    held = {shard.leaf.path: shard.box for shard in rolled.table}
    for region in sorted(layout.regions, key=lambda region: region.start):
        data = _bytes_of(rolled.tensors[region.shard.leaf.path], held[region.shard.leaf.path], region.shard.box)
        if region.bundle is not None:
            bundled.setdefault(region.bundle, []).append(data)
            continue
        for n in range(region.piece, region.piece_stop):
            piece = layout.pieces[n]
            found[n] = chunk_digest(piece.dtype, data[piece.start - region.start : piece.stop - region.start])
    for number, parts in bundled.items():
        bundle = layout.bundles[number]
        data = np.concatenate(parts)
        for n in range(bundle.piece, bundle.piece_stop):
            piece = layout.pieces[n]
            found[n] = chunk_digest(piece.dtype, data[piece.start - bundle.start : piece.stop - bundle.start])
    return found


def _bytes_of(tensor: torch.Tensor, held: Box, box: Box) -> Bytes:
    """The bytes of `box`, of a tensor that is what lies in `held`."""
    if held == box:
        return raw_bytes(tensor)
    cut = tuple(slice(a - b, a - b + n) for a, b, n in zip(box.offsets, held.offsets, box.lengths, strict=True))
    return raw_bytes(tensor[cut].contiguous())
