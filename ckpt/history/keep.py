"""What a user wants kept, as small policies that compose: each names snapshots by itself, and what any of them names
stays. Pure; ages and hours are told by the times that the snapshots recorded, never by the store's modification times,
which a copy or a sync changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Literal, TypeAlias

from ckpt.format.manifest import Snapshot
from ckpt.format.names import SnapshotId
from ckpt.options import Duration, seconds

Best: TypeAlias = tuple[str, Literal["min", "max"], int]

HOUR, DAY = 3600.0, 86400.0


@dataclass(frozen=True, slots=True)
class Keep:
    """What stays of the live line: whatever at least one of these asks for. With none of them, everything stays.

    The newest snapshot, pinned ones, and what a job that goes on may still lean on stay in any case. Snapshots of an
    abandoned line go as soon as they are older than `Options.grace`, unless something of that kind protects them.

    Attributes:
        last: the newest so many.
        every: those whose step it divides.
        best: ``("loss", "min", 3)``: the three with the smallest (``"max"``: largest) value of a metric. Of equal ones
            the newer counts as better. While no snapshot has a number of that name, all stay.
        within: those saved at most so long (``"2d"``, ``"12h"``, or seconds) before the newest one; not before now, so
            that a job which pauses for a week keeps them.
        hourly: the newest of each of the last so many hours (UTC) in which something was saved.
        daily: the same by days.
        moments_last: of what stays, so many of the newest keep their optimizers' state; older ones become weights only.
            They load, export and compare as before; to train on, a restore takes one that is whole. What is pinned, and
            what a job may lean on, keeps it in any case.
    """

    last: int | None = None
    every: int | None = None
    best: Best | None = None
    within: Duration | None = None
    hourly: int | None = None
    daily: int | None = None
    moments_last: int | None = None

    def __post_init__(self) -> None:
        for name in ("last", "every", "hourly", "daily", "moments_last"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"Keep({name}={value}): expected at least 1; leave it out to keep by other means")
        if self.within is not None:
            try:
                seconds(self.within)
            except ValueError as error:
                raise ValueError(f"Keep(within={error})") from None
        if self.best is not None and not _is_best(self.best):
            raise ValueError(
                f"Keep(best={self.best!r}): expected a metric, 'min' or 'max', and how many: ('loss', 'min', 3)"
            )

    @property
    def everything(self) -> bool:
        """Whether no snapshot was named to stay, so that none goes."""
        return all(getattr(self, field.name) is None for field in fields(self) if field.name != "moments_last")


def _is_best(best: object) -> bool:
    match best:
        case (str(name), "min" | "max", int(count)):
            return bool(name) and not isinstance(count, bool) and count >= 1
        case _:
            return False


def best_of(text: str) -> Best:
    """``"loss:min:3"`` → ``("loss", "min", 3)``; the metric's own name may hold colons. Raises ValueError."""
    head, _, count = text.rpartition(":")
    name, _, which = head.rpartition(":")
    best = (name, which, int(count) if count.isascii() and count.isdecimal() else 0)
    if not _is_best(best):
        raise ValueError(f"{text!r}: expected METRIC:min:N or METRIC:max:N, such as loss:min:3")
    return name, "min" if which == "min" else "max", best[2]


def reasons(keep: Keep, line: Mapping[SnapshotId, Snapshot]) -> dict[SnapshotId, str]:
    """Which snapshots of `line` the policies name, and which of them do: ``keep last 3; keep every 1000``."""
    found: dict[SnapshotId, list[str]] = {}
    newest_first = sorted(line, reverse=True)
    for why, ids in _policies(keep, line, newest_first):
        for id_ in ids:
            found.setdefault(id_, []).append(why)
    return {id_: "; ".join(whys) for id_, whys in found.items()}


def _policies(
    keep: Keep, line: Mapping[SnapshotId, Snapshot], newest_first: Sequence[SnapshotId]
) -> Iterator[tuple[str, Sequence[SnapshotId]]]:
    """Each policy that was asked for, in words, and what it keeps."""
    if keep.last is not None:
        yield f"keep last {keep.last}", newest_first[: keep.last]
    if keep.every is not None:
        yield f"keep every {keep.every}", [id_ for id_ in newest_first if id_.step % keep.every == 0]
    if keep.best is not None:
        yield _best(keep.best, line, newest_first)
    if keep.within is not None:
        yield f"keep within {_text(keep.within)}", _within(seconds(keep.within), line, newest_first)
    if keep.hourly is not None:
        yield f"keep {keep.hourly} hourly", _one_of_each(HOUR, keep.hourly, line, newest_first)
    if keep.daily is not None:
        yield f"keep {keep.daily} daily", _one_of_each(DAY, keep.daily, line, newest_first)


def _best(
    best: Best, line: Mapping[SnapshotId, Snapshot], newest_first: Sequence[SnapshotId]
) -> tuple[str, Sequence[SnapshotId]]:
    name, which, count = best
    values = {id_: value for id_ in newest_first if (value := _number(line[id_], name)) is not None}
    if not values:
        # Most likely its name is misspelt, or it comes with the first evaluation: "none" must not mean "remove all".
        return f"no snapshot has a number {name!r} to choose by", newest_first
    sign: Callable[[SnapshotId], float] = (lambda i: values[i]) if which == "min" else (lambda i: -values[i])
    return f"keep best {name}:{which}:{count}", sorted(values, key=sign)[:count]  # stable: the newer comes first


def _number(snapshot: Snapshot, name: str) -> float | None:
    """A metric as a number. NaN and infinities are text in documents (metrics.py), and never the best."""
    value = (snapshot.metrics or {}).get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _within(
    span: float, line: Mapping[SnapshotId, Snapshot], newest_first: Sequence[SnapshotId]
) -> Sequence[SnapshotId]:
    """What has no time of its own cannot be called old, and stays."""
    newest = next((t for id_ in newest_first if (t := line[id_].time) is not None), 0.0)
    return [id_ for id_ in newest_first if (t := line[id_].time) is None or t >= newest - span]


def _one_of_each(
    length: float, count: int, line: Mapping[SnapshotId, Snapshot], newest_first: Sequence[SnapshotId]
) -> Sequence[SnapshotId]:
    """The newest snapshot, by order of the line, of each of the `count` newest periods that have one."""
    found: dict[int, SnapshotId] = {}
    undated: list[SnapshotId] = []
    for id_ in newest_first:
        time = line[id_].time
        if time is None:
            undated.append(id_)
        else:
            found.setdefault(int(time // length), id_)
    return [*(found[period] for period in sorted(found, reverse=True)[:count]), *undated]


def _text(value: Duration) -> str:
    return value if isinstance(value, str) else f"{value:g} s"
