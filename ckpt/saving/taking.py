"""From the live state to a job for the writer: the agreed layout, a free buffer, the copy (torch)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ckpt.errors import SaveFailed
from ckpt.format.layout import Layout
from ckpt.format.shards import Box, Leaf
from ckpt.leaves import Flat
from ckpt.mirror.slots import Slots
from ckpt.ranks import Ranks
from ckpt.saving.capture import Capturer
from ckpt.saving.job import Bytes, Reference
from ckpt.saving.sharing import Sharing


@dataclass(frozen=True, slots=True, eq=False)
class Taken:
    """One captured state: ``data`` is laid out by `layout`."""

    layout: Layout
    data: Bytes
    ownership: str
    replicas: dict[str, str]
    others: tuple[int, ...]


class Taking:
    """Owns the host buffers and the views of the live tensors."""

    def __init__(self, ranks: Ranks, *, chunk: int, replica_check: int) -> None:
        self._ranks = ranks
        self._replica_check = replica_check
        self._saves_since_check: int | None = None
        self._capturer: Capturer | None = None
        self._slots: Slots | None = None
        self.sharing = Sharing(ranks, chunk)

    def agree(
        self, flat: Flat, *, differing: Collection[str] = (), old: Mapping[Leaf, Sequence[Box]] | None = None
    ) -> Layout:
        """Agree on the layout anew, see `Sharing.agree`. Collective. Raises LayoutMismatch on every rank."""
        layout = self.sharing.agree(flat, differing=differing, old=old)
        self._capturer = Capturer(layout)
        self._saves_since_check = None
        if self._slots is None:
            # Made now, not at the copy: their pages are touched while the rest of the save is prepared.
            self._slots = Slots(layout.nbytes)
        return layout

    def take(self, flat: Flat, reference: Reference | None, *, step: int, save: bool = True) -> Taken:
        """Copy the state out into the buffer that the reference does not lie in. Nothing live is referred to after.

        Args:
            save: False: this is no save, so it is none of those that compare replicas.

        Raises:
            SaveFailed: no memory for the buffers, or the copy failed.
        """
        layout, ownership = self.sharing.layout, self.sharing.ownership
        assert (
            layout is not None and ownership is not None and self._capturer is not None and self._slots is not None
        ), "agree() first"
        # Counted before anything can fail: ranks that count apart would never compare the same save again.
        check = save and self._is_check()
        try:
            slot = self._slots.free(None if reference is None else reference.data, layout.nbytes)
            self._capturer.take(self.sharing.marked(flat), slot)
            others = ownership.others[self._ranks.rank]
            return Taken(
                layout, slot[: layout.nbytes], ownership.digest, self.sharing.checksums(flat) if check else {}, others
            )
        except Exception as error:
            text = f"step {step}: copying {layout.nbytes} bytes out of the training process failed: {error!r}"
            raise SaveFailed(text, step=step, stage="capture") from error

    def _is_check(self) -> bool:
        """Whether this save compares replicas: the first one of a layout, and every `replica_check`-th."""
        if self._ranks.world_size == 1 or not self._replica_check:
            return False
        count = self._saves_since_check
        self._saves_since_check = 0 if count is None else (count + 1) % self._replica_check
        return self._saves_since_check == 0
