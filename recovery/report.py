"""What a restore did, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckpt.format.manifest import Part, Snapshot
from ckpt.format.names import SnapshotId


@dataclass(frozen=True, slots=True, eq=False)
class Restored:
    """What this rank restored, and from where.

    Attributes:
        id, step: the snapshot.
        bytes: source → bytes this rank read from it ("store": encoded blobs with the gaps read through; "documents":
            parts read from the store; "peers": parts received from other ranks).
        seconds: stage → seconds ("choose", "documents", "read", "install").
        skipped: newer snapshots that were passed over, and why.
        values: this rank's values that no leaf holds: "$random", "$data".
        snapshot: the commit that was read.
        parts: rank → part of it, as far as this rank needed them.
        rank: whose values and per-rank leaves this rank took; None where the snapshot has another world size.
    """

    id: SnapshotId
    bytes: Mapping[str, int]
    seconds: Mapping[str, float]
    skipped: tuple[tuple[SnapshotId, str], ...]
    values: Mapping[str, Any]
    snapshot: Snapshot
    parts: Mapping[int, Part]
    rank: int | None

    @property
    def part(self) -> Part | None:
        """This rank's own part; None where the snapshot has another world size."""
        return None if self.rank is None else self.parts[self.rank]

    @property
    def step(self) -> int:
        return self.id.step

    def __str__(self) -> str:
        text = f"restored step {self.step} (generation {self.id.run.generation})"
        text += f": {sum(self.bytes.values()):,} bytes in {sum(self.seconds.values()):.2f} s"
        if self.skipped:
            text += "; passed over " + "; ".join(f"{id_.short}: {reason}" for id_, reason in self.skipped)
        return text
