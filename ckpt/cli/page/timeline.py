"""The timeline: one lane for each start of the job, its snapshots on it, and where a later one took off from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckpt.cli.page.frame import both, numbers, section, x_steps
from ckpt.cli.page.markup import Markup, join, tag
from ckpt.cli.page.scales import NARROW, Scale, when_text
from ckpt.cli.screen import count, cut
from ckpt.format.names import RunId, SnapshotId
from recovery.chronicle import Chronicle, Line, Save

LANES = 24
"""Starts of the job that are drawn, the newest ones; the table has more."""
DOT, SMALL = 5.0, 4.0
"""Radius of a snapshot, on a desk and on a phone. Those that would touch are left out, unless they have something to
say."""


@dataclass(frozen=True, slots=True)
class _Lane:
    """`kept`: the step up to which it leads to the newest snapshot; beyond, it was given up. None: all of it."""

    line: Line
    kept: int | None
    y: float


def timeline(chronicle: Chronicle) -> Markup:
    drawn = chronicle.lines[-LANES:]
    left_out = len(chronicle.lines) - len(drawn)
    abandoned = sum(save.listed.abandoned for save in chronicle.saves)
    told = [
        f"{count(len(chronicle.saves), 'snapshot')} of {count(len(chronicle.lines), 'generation')} (starts of the job)"
    ]
    if chronicle.newest is not None:
        told.append(f"the newest is step {chronicle.newest.step:,}")
    if abandoned:
        told.append(f"{count(abandoned, 'snapshot')} abandoned, since a later start took another way")
    if left_out:
        told.append(f"the {count(left_out, 'oldest start')} not drawn")
    text = "; ".join(told) + "."
    marks = (
        ("snapshot", "snapshot"),
        ("abandoned", "abandoned"),
        ("newest", "newest"),
        ("pin", "pinned"),
        ("crash", "the start ended here"),
        ("resume", "went on from here"),
    )
    legend = tag("ul", *(tag("li", _key(kind), tag("span", name)) for kind, name in marks), class_="legend")
    return section(
        "timeline",
        "Timeline",
        text,
        legend,
        both("Timeline of starts and steps", text, lambda width: _draw(chronicle, drawn, width)),
        _table(chronicle),
    )


def _draw(chronicle: Chronicle, lines: Sequence[Line], width: float) -> tuple[float, Markup]:
    narrow = width == NARROW
    left, right = (10.0, width - 24.0) if narrow else (168.0, width - 28.0)
    pitch, top, r = (76.0, 46.0, SMALL) if narrow else (54.0, 34.0, DOT)
    ends = [line.reached or line.begins for line in lines]
    x = Scale(min((line.begins for line in lines), default=0), max(ends, default=1) or 1, left, right)
    taken = {
        line.resumed_from.run: line.resumed_from.step for line in chronicle.lines if line.live and line.resumed_from
    }
    lanes = {
        line.run: _Lane(line, taken.get(line.run) if line.live else line.begins, top + n * pitch)
        for n, line in enumerate(lines)
    }
    bottom = top + max(len(lines) - 1, 0) * pitch + 26
    by_run: dict[RunId, list[Save]] = {}
    for save in chronicle.saves:
        by_run.setdefault(save.id.run, []).append(save)
    last = chronicle.lines[-1].run if chronicle.lines else None
    drawn = [tag("line", x1=left, x2=right, y1=bottom, y2=bottom, class_="axis"), x_steps(x, bottom)]
    drawn += [_way(lane, x, last) for lane in lanes.values()]
    drawn += [_take_off(lane, lanes, by_run, x) for lane in lanes.values()]
    drawn += [_name(lane, left, narrow) for lane in lanes.values()]
    drawn += [_snapshots(by_run.get(run, []), lane.y, x, r, chronicle.newest) for run, lane in lanes.items()]
    drawn.append(tag("text", "step", x=right, y=bottom + 34, class_="tick end"))
    return bottom + 40, join(drawn)


def _name(lane: _Lane, left: float, narrow: bool) -> Markup:
    line = lane.line
    ranks = count(line.world_size, "rank") if line.world_size else "ranks unknown"
    name = f"gen {line.run.generation}"
    if narrow:
        return join(
            [
                tag("text", name, x=left, y=lane.y - 30, class_="lane"),
                tag("text", f"{ranks}, {when_text(line.started)}", x=left + 62, y=lane.y - 30, class_="tick"),
            ]
        )
    return join(
        [
            tag("text", name, x=4, y=lane.y - 3, class_="lane"),
            tag("text", f"{ranks}, {when_text(line.started)[5:]}", x=4, y=lane.y + 13, class_="tick"),
        ]
    )


def _way(lane: _Lane, x: Scale, last: RunId | None) -> Markup:
    """From where a start began to where it is known to have come: what was kept, what was given up, how it ended."""
    begins, reached = lane.line.begins, lane.line.reached
    if reached is None:
        return tag("text", "no step is known", x=x(begins) + 12, y=lane.y + 4, class_="tick")
    kept = reached if lane.kept is None else min(max(lane.kept, begins), reached)
    drawn = []
    if kept > begins:
        drawn.append(tag("line", x1=x(begins), x2=x(kept), y1=lane.y, y2=lane.y, class_="way"))
    if reached > kept:
        drawn.append(tag("line", x1=x(kept), x2=x(reached), y1=lane.y, y2=lane.y, class_="way gone"))
    if lane.line.run != last:
        a, y = x(reached), lane.y
        cross = tag("path", d=f"M{a + 9:.1f} {y - 5:.1f}l10 10m0 -10l-10 10", class_="crash")
        drawn.append(tag("g", tag("title", f"generation {lane.line.run.generation} came to step {reached}"), cross))
    return join(drawn)


def _take_off(lane: _Lane, lanes: Mapping[RunId, _Lane], by_run: Mapping[RunId, Sequence[Save]], x: Scale) -> Markup:
    """From the snapshot that a start went on from down to its own lane."""
    source = lane.line.resumed_from
    if source is None or source.run not in lanes:
        return join([])
    a, above = x(source.step), lanes[source.run].y
    told = (
        f"generation {lane.line.run.generation} went on from step {source.step} of generation {source.run.generation}"
    )
    drawn = [tag("path", d=f"M{a:.1f} {above + 7:.1f}V{lane.y - 9:.1f}", class_="resume", marker_end="url(#arrow)")]
    if all(save.id != source for save in by_run.get(source.run, ())):
        drawn.append(tag("g", tag("title", f"step {source.step}, pruned since"), _circle(a, above, 4.5, "pruned")))
    drawn.append(_circle(a, lane.y, 2.5, "start"))
    return tag("g", tag("title", told), *drawn)


def _snapshots(saves: Sequence[Save], y: float, x: Scale, r: float, newest: SnapshotId | None) -> Markup:
    drawn: list[Markup] = []
    taken, labelled = -1e9, -1e9
    for n, save in enumerate(saves):
        a = x(save.step)
        special = save.listed.pins or save.id == newest or n == 0
        if not special and a - taken < 2 * r + 1:
            continue
        taken = a
        told = f"step {save.step}, {save.listed.name}, {when_text(save.listed.time)}"
        told += ", abandoned" * save.listed.abandoned + "".join(f", pin {name}" for name in save.listed.pins)
        marks = [_circle(a, y, r, "snap gone" if save.listed.abandoned else "snap")]
        label = ""
        if save.id == newest:
            marks.append(_circle(a, y, r + 4, "newest"))
            label = f"{save.step:,}"
        if save.listed.pins:
            marks.append(tag("path", d=f"M{a:.1f} {y - 5:.1f}v-15l11 4l-11 4", class_="pin"))
            label = cut(save.listed.pins[0], 16) + (
                f" +{len(save.listed.pins) - 1}" if len(save.listed.pins) > 1 else ""
            )
        if label and a - labelled > 8 * len(label) + 16:
            end = a > x.stop - 8 * len(label)
            marks.append(tag("text", label, x=a - 6 if end else a + 13, y=y - 12, class_="mark end" if end else "mark"))
            labelled = a
        drawn.append(tag("g", tag("title", told), *marks))
    return join(drawn)


def _circle(x: float, y: float, r: float, class_: str) -> Markup:
    return tag("circle", cx=x, cy=y, r=r, class_=class_)


def _key(kind: str) -> Markup:
    match kind:
        case "abandoned":
            mark = [tag("line", x1=1, x2=27, y1=10, y2=10, class_="way gone"), _circle(14, 10, 5, "snap gone")]
        case "newest":
            mark = [_circle(14, 10, 5, "snap"), _circle(14, 10, 8.5, "newest")]
        case "pin":
            mark = [tag("path", d="M9 18v-15l11 4l-11 4", class_="pin")]
        case "crash":
            mark = [tag("path", d="M9 5l10 10m0 -10l-10 10", class_="crash")]
        case "resume":
            mark = [tag("path", d="M14 2V14", class_="resume", marker_end="url(#arrow)")]
        case _:
            mark = [tag("line", x1=1, x2=27, y1=10, y2=10, class_="way"), _circle(14, 10, 5, "snap")]
    return tag("svg", *mark, class_="key", viewBox="0 0 28 20", aria_hidden="true")


def _table(chronicle: Chronicle) -> Markup:
    rows = [
        [
            str(line.run.generation),
            when_text(line.started),
            str(line.world_size or "?"),
            "the beginning"
            if line.resumed_from is None
            else f"step {line.resumed_from.step:,} ({line.resumed_from.short})",
            "?" if line.reached is None else f"{line.reached:,}",
            str(len(line.steps)),
            "yes" if line.live else "no",
            line.host or "?",
        ]
        for line in chronicle.lines
    ]
    header = [
        "generation",
        "started",
        "ranks",
        "went on from",
        "came to step",
        "snapshots",
        "leads to the newest",
        "host",
    ]
    return numbers(header, rows, what="Starts of the job", text=frozenset({1, 3, 6, 7}))
