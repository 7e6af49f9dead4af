"""From the live state to a job for the writer: the agreed layout, a free buffer, the copy (torch)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from ckpt.errors import SaveFailed
from ckpt.format.layout import ALIGN, Layout
from ckpt.format.names import SnapshotId
from ckpt.format.shards import Box, Leaf
from ckpt.leaves import Flat
from ckpt.mirror.mirror import Mirror
from ckpt.mirror.records import Described, describe
from ckpt.ranks import Ranks
from ckpt.saving.capture import Capturer
from ckpt.saving.job import Bytes, Reference, SaveJob
from ckpt.saving.overlap import Copying
from ckpt.saving.sharing import Sharing


@dataclass(frozen=True, slots=True, eq=False)
class Taken:
    """One captured state: ``data`` is laid out by `layout`."""

    layout: Layout
    data: Bytes
    aliases: dict[str, str]
    ownership: str
    replicas: dict[str, str]
    others: tuple[int, ...]
    copying: Copying | None = None
    """What is still to be copied into `data`; None: nothing."""

    def job(
        self,
        id_: SnapshotId,
        ranks: Ranks,
        values: dict[str, bytes],
        metrics: dict[str, Any] | None,
        time: float | None,
        asked: float,
        cadence: float | None = None,
    ) -> SaveJob:
        """What the writer stores as step `id_`; see `SaveJob`."""
        return SaveJob(
            id=id_,
            rank=ranks.rank,
            world_size=ranks.world_size,
            layout=self.layout,
            data=self.data,
            values=values,
            aliases=self.aliases,
            replicas=self.replicas,
            ownership=self.ownership,
            metrics=metrics,
            time=time,
            others=self.others,
            asked=asked,
            blocked=perf_counter() - asked,
            cadence=cadence,
        )


class Taking:
    """Owns the views of the live tensors, and fills the buffers of the mirror.

    A buffer holds what this rank stores, and behind it what it mirrors for its node only.
    """

    def __init__(
        self, ranks: Ranks, mirror: Mirror, *, chunk: int, replica_check: int, overlap: bool = False
    ) -> None:  # fmt: skip
        self._overlap = overlap
        self._ranks = ranks
        self._mirror = mirror
        self._replica_check = replica_check
        self._saves_since_check: int | None = None
        self._copies: _Copies | None = None
        self.sharing = Sharing(ranks, chunk, mirror.node)

    def agree(
        self, flat: Flat, *, differing: Collection[str] = (), old: Mapping[Leaf, Sequence[Box]] | None = None
    ) -> Layout:
        """Agree on the layout anew, see `Sharing.agree`. Collective. Raises LayoutMismatch on every rank."""
        layout = self.sharing.agree(flat, differing=differing, old=old)
        self._copies = _copies(layout, self.sharing.extras)
        self._saves_since_check = None
        if old is None:
            # Made now, not at the copy: their pages are touched while the rest of the save is prepared. After a
            # restore there may be buffers to go on with.
            self._mirror.prepare(self._copies.described.nbytes)
        return layout

    def go_on_with(self, path: Path, number: int, layout: str) -> Bytes | None:
        """The state that a former process of this rank left in slot `number` of the mirror at `path`, as the reference
        of the next diff, without a copy; None if it was laid out otherwise or is not ours to go on with.

        Its bytes need not be trusted: whoever leans on a chunk compares its digest first.
        """
        assert self._copies is not None and self.sharing.layout is not None, "agree() first"
        if layout != self._copies.described.digest:
            return None
        data = self._mirror.adopt(path, number, self._copies.described.nbytes)
        return None if data is None else data[: self.sharing.layout.nbytes]

    def take(self, flat: Flat, reference: Reference | None, *, id_: SnapshotId, save: bool = True) -> Taken:
        """Copy the state out into the buffer that the reference does not lie in. Nothing live is referred to after, but
        by what is left to copy where copies overlap with training.

        Args:
            id_: the step it is the state of.
            save: False: this is no save, so it is none of those that compare replicas.

        Raises:
            SaveFailed: no memory for the buffers, or the copy failed.
        """
        layout, ownership, copies = self.sharing.layout, self.sharing.ownership, self._copies
        assert layout is not None and ownership is not None and copies is not None, "agree() first"
        # Counted before anything can fail: ranks that count apart would never compare the same save again.
        check = save and self._is_check()
        nbytes = copies.described.nbytes
        try:
            slot = self._mirror.free(None if reference is None else reference.data, nbytes)
            marked = self.sharing.marked(flat)
            parts = [(copies.owned, slot[: layout.nbytes])]
            if copies.extras is not None:
                parts.append((copies.extras, slot[copies.extras_start :]))
            copying = None
            if self._overlap:
                begun = [capturer.begin(marked, data) for capturer, data in parts]
                copying = Copying(id_.step, begun, partial(self._mirror.finish, slot, id_, copies.described))
            else:
                for capturer, data in parts:
                    capturer.take(marked, data)
                self._mirror.finish(slot, id_, copies.described)
            replicas = self.sharing.checksums(flat) if check else {}
            others = ownership.others[self._ranks.rank]
            return Taken(layout, slot[: layout.nbytes], flat.aliases, ownership.digest, replicas, others, copying)
        except Exception as error:
            text = f"step {id_.step}: copying {nbytes} bytes out of the training process failed: {error!r}"
            raise SaveFailed(text, step=id_.step, stage="capture") from error

    def _is_check(self) -> bool:
        """Whether this save compares replicas: the first one of a layout, and every `replica_check`-th."""
        if self._ranks.world_size == 1 or not self._replica_check:
            return False
        count = self._saves_since_check
        self._saves_since_check = 0 if count is None else (count + 1) % self._replica_check
        return self._saves_since_check == 0


@dataclass(frozen=True, slots=True, eq=False)
class _Copies:
    """How one layout gets into a buffer, and what the mirror says of it."""

    owned: Capturer
    extras: Capturer | None
    extras_start: int
    described: Described


def _copies(owned: Layout, extras: Layout) -> _Copies:
    start = -(-owned.nbytes // ALIGN) * ALIGN
    places = [(region.shard, region.start) for region in owned.regions]
    if not extras.regions:
        return _Copies(Capturer(owned), None, start, describe(places, owned.nbytes))
    places += [(region.shard, start + region.start) for region in extras.regions]
    return _Copies(Capturer(owned), Capturer(extras), start, describe(places, start + extras.nbytes))
