"""What a restore did, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckpt.format.manifest import Part, Snapshot
from ckpt.format.names import SnapshotId
from recovery.quantities import bytes_text, seconds_text


@dataclass(frozen=True, slots=True, eq=False)
class Restored:
    """What this rank restored, and from where.

    Attributes:
        id: the snapshot. `replayed`: the step up to which the journal after it was replayed; None without a journal.
            `lost`: steps that some rank is known to have completed, and that do not come back; None where not known.
        bytes: source → bytes this rank read from it ("own mirror" and "node": of its own and of other mirrors on this
            node; "peers": chunks and parts received from other ranks; "store": encoded blobs with the gaps read
            through; "documents": parts read from the store; "journal": records that were replayed).
        seconds: stage → seconds ("choose", "documents", "mirrors", "peers", "store", "replay", "exchange", "install").
        skipped: newer snapshots that were passed over, and why.
        values: this rank's values that no leaf holds: "$random", "$data".
        snapshot: the commit that was read.
        parts: rank → part of it, as far as this rank needed them.
        rank: whose values and per-rank leaves this rank took; None where the snapshot has another world size.
        problems: what was found in mirrors, or in the journal, and not used, and why.
    """

    id: SnapshotId
    bytes: Mapping[str, int]
    seconds: Mapping[str, float]
    skipped: tuple[tuple[SnapshotId, str], ...]
    values: Mapping[str, Any]
    snapshot: Snapshot
    parts: Mapping[int, Part]
    rank: int | None
    problems: tuple[str, ...] = ()
    replayed: int | None = None
    lost: int | None = None

    @property
    def part(self) -> Part | None:
        """This rank's own part; None where the snapshot has another world size."""
        return None if self.rank is None else self.parts[self.rank]

    @property
    def step(self) -> int:
        """Steps completed: those of the snapshot, and those replayed after it."""
        return self.id.step if self.replayed is None else self.replayed

    def __str__(self) -> str:
        text = f"restored step {self.step} (generation {self.id.run.generation})"
        if self.replayed is not None:
            text += f", replayed from step {self.id.step}"
        if self.lost is not None:
            text += f"; {self.lost} completed steps are lost"
        sources = ", ".join(f"{bytes_text(n)} {source}" for source, n in self.bytes.items()) or "nothing"
        text += f": {sources}; in {seconds_text(sum(self.seconds.values()))}"
        if self.skipped:
            text += "; passed over " + "; ".join(f"{id_.short}: {reason}" for id_, reason in self.skipped)
        if self.problems:
            text += "; not used: " + "; ".join(self.problems)
        return text
