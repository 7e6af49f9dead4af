"""What `verify` says: one finding per thing that is wrong, and who depends on it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from ckpt.errors import DamagedError
from ckpt.format.names import PackName, SnapshotId

Level = Literal["error", "warning", "mended", "note"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it should be.

    Attributes:
        level: "error": bytes are lost or are not what was written; "warning": odd, nothing is lost by it; "mended":
            a copy was bad and is good again; "note": leftovers and foreign files, which do no harm.
        key: the object.
        step, rank, leaf: what it belongs to, where it belongs to one; of several dependents the first.
        steps: every step that cannot be restored because of it.
    """

    level: Level
    key: str
    step: int | None
    rank: int | None
    leaf: str | None
    text: str
    steps: tuple[int, ...] = ()


@dataclass(slots=True)
class Trouble:
    """A pack with something wrong, and whoever needs the bytes that are: filled in while parts are read."""

    problem: str
    missing: bool = False
    dependents: set[tuple[SnapshotId, int, str]] = field(default_factory=set)
    named_by: set[SnapshotId] = field(default_factory=set)

    def finding(self, key: str) -> Finding:
        """One finding for the pack, however many chunks of however many steps need it."""
        if not self.dependents:
            name = PackName.parse(key)
            where: tuple[int | None, int | None] = (None, None) if name is None else (name.id.step, name.rank)
            if self.named_by:
                told = f"{key}: {self.problem}; every blob that a snapshot needs from it is whole"
                return Finding("error", key, *where, None, told)
            told = f"{key}: {self.problem} (debris: no snapshot that can be read needs it)"
            return Finding("warning", key, *where, None, told)
        first = min(self.dependents)
        ids = sorted({id_ for id_, _, _ in self.dependents})
        leaves = sorted({leaf for _, _, leaf in self.dependents})
        ranks = sorted({rank for _, rank, _ in self.dependents})
        text = (
            f"{key}: {self.problem}; needed by {_several('step', [id_.short for id_ in ids], limit=None)}, "
            f"{_several('rank', ranks)}: {_several('', leaves)}"
        )
        steps = tuple(sorted({id_.step for id_ in ids}))
        return Finding("error", key, first[0].step, first[1], first[2], text, steps)


def of_error(error: DamagedError, key: str, id_: SnapshotId | None, rank: int | None = None) -> Finding:
    """A finding that says what an error says. Lost is the snapshot, if there is one."""
    step = error.step if error.step is not None else None if id_ is None else id_.step
    lost = () if id_ is None else (id_.step,)
    return Finding("error", key, step, error.rank if rank is None else rank, error.leaf, str(error), lost)


def _several(word: str, items: Iterable[object], limit: int | None = 5) -> str:
    listed = [str(item) for item in items]
    shown = listed if limit is None else listed[:limit]
    more = f" and {len(listed) - len(shown)} more" if len(listed) > len(shown) else ""
    return f"{word}{'s' * (len(listed) > 1) if word else ''} {', '.join(shown)}{more}".strip()
