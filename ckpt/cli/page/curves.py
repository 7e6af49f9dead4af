"""Curves: what a save cost in time, metrics over steps, and how long the chains of deltas are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from ckpt.cli.page.frame import both, legend, numbers, section, x_labels, x_steps, y_axis
from ckpt.cli.page.markup import Markup, join, tag
from ckpt.cli.page.scales import HALF, WIDE, Scale, Write, bins, number_text, typical_top
from ckpt.cli.screen import count, cut
from ckpt.format.names import SnapshotId
from recovery.chronicle import Chronicle, Save
from recovery.layers import Layers
from recovery.quantities import seconds_text

METRICS = 6
"""Metrics that are drawn."""
POINTS = 240
"""Points of one curve at most; of more, one in so many is drawn."""


@dataclass(frozen=True, slots=True)
class Curve:
    """`points`: (x, y or None where nothing is known). `look`: its number, for dashes and marks. `gone`: of an
    abandoned line."""

    points: tuple[tuple[float, float | None], ...]
    look: int = 0
    gone: bool = False


# --- time ------------------------------------------------------------------------------------------------------------


def times(chronicle: Chronicle) -> Markup:
    saves = chronicle.saves
    blocked = [save.blocked for save in saves if save.blocked is not None]
    durable = [save.durable for save in saves if save.durable is not None]
    if not blocked and not durable:
        text = "These snapshots were saved by a version that did not record how long it took."
        return section("times", "Time per save", text)
    told = []
    if blocked:
        told.append(f"a save kept training waiting for {_range(blocked)}")
    if durable:
        told.append(f"and was durable after {_range(durable)}")
    text = (
        ", ".join(told).capitalize()
        + ". By the clock of rank 0; the last save of a run does not yet know when it was durable."
    )
    panels = []
    for name, values in (("Blocked", [s.blocked for s in saves]), ("Durable", [s.durable for s in saves])):
        known = [value for value in values if value is not None]
        if known:
            panels.append(
                _titled(f"{name}: seconds per save", _by_save(f"{name} time of each save", text, saves, values))
            )
    rows = [
        [
            f"{s.step:,}",
            str(s.listed.generation),
            *("-" if v is None else seconds_text(v) for v in (s.blocked, s.durable)),
        ]
        for s in saves
    ]
    table = numbers(["step", "generation", "blocked", "durable"], rows, what="Time of each save", text=frozenset())
    return section("times", "Time per save", text, tag("div", *panels, class_="pair"), table)


def _range(values: Sequence[float]) -> str:
    return f"{seconds_text(median(values))} (median; at most {seconds_text(max(values))})"


def _titled(title: str, picture: Markup) -> Markup:
    return tag("div", tag("h3", title), picture)


def _by_save(name: str, told: str, saves: Sequence[Save], values: Sequence[float | None]) -> Markup:
    chosen = [start for start, _ in bins(len(saves), POINTS)]
    points = tuple((float(n), values[n]) for n in chosen)
    labels = [f"{saves[n].step:,}" for n in chosen]

    def draw(width: float) -> tuple[float, Markup]:
        top = typical_top([y for _, y in points if y is not None])
        return _plot([Curve(points)], width, 180, (0.0, top or 1.0), seconds_text, labels=labels)

    return both(name, told, draw, wide=HALF)


# --- metrics ---------------------------------------------------------------------------------------------------------


def metrics(chronicle: Chronicle) -> Markup:
    names: dict[str, int] = {}
    for save in chronicle.saves:
        for name, value in save.listed.metrics.items():
            if _number(value) is not None:
                names[name] = names.get(name, 0) + 1
    if not names:
        return section("metrics", "Metrics", "No numbers were given to save(metrics=…).")
    shown = sorted(names, key=lambda name: (-names[name], name))[:METRICS]
    told = f"{count(len(names), 'metric')} over steps, as given to each save; dashed where the line was abandoned."
    if len(names) > len(shown):
        told += f" Drawn: the {len(shown)} that most saves have."
    panels = [_titled(cut(name, 60), _metric(name, chronicle, HALF if len(shown) > 1 else WIDE)) for name in shown]
    rows = [
        [
            f"{s.step:,}",
            str(s.listed.generation),
            *("-" if (v := _number(s.listed.metrics.get(name))) is None else number_text(v) for name in shown),
        ]
        for s in chronicle.saves
    ]
    header = ["step", "generation", *(cut(name, 60) for name in shown)]
    table = numbers(header, rows, what="Metrics of each save", text=frozenset())
    return section("metrics", "Metrics", told, tag("div", *panels, class_="pair" if len(panels) > 1 else None), table)


def _metric(name: str, chronicle: Chronicle, wide: float) -> Markup:
    curves: list[Curve] = []
    values: list[float] = []
    by_id = {save.id: save for save in chronicle.saves}
    for line in chronicle.lines:
        mine = [by_id[SnapshotId(line.run, step)] for step in line.steps]
        kept = [save for save in mine if not save.listed.abandoned]
        before = by_id.get(line.resumed_from) if line.resumed_from is not None else None
        # Each piece begins where the one it goes on from ends.
        for gone, some in ((False, kept), (True, [save for save in mine if save.listed.abandoned])):
            root = [kept[-1]] if gone and kept else [before] if before is not None else []
            mine = [*root, *some] if some else []
            points = [(float(s.step), _number(s.listed.metrics.get(name))) for s in mine]
            if points:
                step = -(-len(points) // POINTS)
                thin = points[::step] if (len(points) - 1) % step == 0 else [*points[::step], points[-1]]
                curves.append(Curve(tuple(thin), gone=gone))
                values += [y for _, y in thin if y is not None and math.isfinite(y)]
    low, high = min(values, default=0.0), max(values, default=1.0)
    if low == high:
        low, high = low - (abs(low) or 1) * 0.1, high + (abs(high) or 1) * 0.1
    pad = (high - low) * 0.06
    told = f"from {number_text(values[0])} to {number_text(values[-1])}" if values else "no finite number"

    def draw(width: float) -> tuple[float, Markup]:
        return _plot(curves, width, 200, (low - pad, high + pad), number_text)

    return both(f"{cut(name, 60)} over steps", f"{name}: {told}", draw, wide=wide)


def _number(value: object) -> float | None:
    """A metric, if it is a number; documents spell those that JSON has no word for."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value) if abs(value) < 1e300 or isinstance(value, float) else None
    return None


# --- chains ----------------------------------------------------------------------------------------------------------


def depths(layers: Layers) -> Markup:
    saves = [snapshot for snapshot, _ in layers.sample.reads]
    if not layers.depths:
        return section("chains", "Chains of deltas", "No part could be read.")
    most = max((m for depth in layers.depths for m in depth.most if m is not None), default=0)
    told = (
        "Blobs to decode for a chunk, on average over bytes: 1 is a keyframe, each delta on it adds one. "
        f"The longest chain has {count(most, 'blob')}."
    )
    curves = [
        Curve(tuple((float(n), y) for n, y in enumerate(depth.mean)), look) for look, depth in enumerate(layers.depths)
    ]
    top = max((y for curve in curves for _, y in curve.points if y is not None), default=1.0)
    labels = [f"{snapshot.step:,}" for snapshot in saves]

    def draw(width: float) -> tuple[float, Markup]:
        return _plot(curves, width, 220, (1.0, max(top * 1.05, 2.0)), number_text, labels=labels)

    items = []
    for look, depth in enumerate(layers.depths):
        last = next((y for y in reversed(depth.mean) if y is not None), None)
        items.append((_sample(look), cut(depth.cls, 40), "" if last is None else f"{last:.3g}"))
    rows = [
        [
            f"{s.step:,}",
            str(s.id.run.generation),
            *("-" if d.mean[n] is None else f"{d.mean[n]:.3g} (max {d.most[n]})" for d in layers.depths),
        ]
        for n, s in enumerate(saves)
    ]
    header = ["step", "generation", *(cut(depth.cls, 40) for depth in layers.depths)]
    table = numbers(header, rows, what="Blobs for a chunk, by class of leaf", text=frozenset())
    return section(
        "chains", "Chains of deltas", told, legend(items), both("Chain length by class of leaf", told, draw), table
    )


# --- any curve -------------------------------------------------------------------------------------------------------


def _plot(
    curves: Sequence[Curve],
    width: float,
    height: float,
    reach: tuple[float, float],
    write: Write,
    *,
    labels: Sequence[str] | None = None,
) -> tuple[float, Markup]:
    """Curves in a frame. `labels`: of the points, where x only counts them; without, x is a step."""
    left, right, top, bottom = 62.0, width - 14.0, 10.0, height - 40
    xs = [x for curve in curves for x, _ in curve.points]
    x = Scale(min(xs, default=0.0), max(xs, default=1.0), left + 8, right)
    y = Scale(*reach, bottom, top)
    drawn = [y_axis(y, left, right, write), tag("line", x1=left, x2=right, y1=bottom, y2=bottom, class_="axis")]
    drawn += [_curve(curve, x, y, write) for curve in curves]
    if labels is None:
        drawn.append(x_steps(x, bottom))
    else:
        drawn.append(x_labels([x(a) for a, _ in curves[0].points], labels, bottom + 17))
    drawn.append(tag("text", "step", x=right, y=height - 6, class_="tick end"))
    return height, join(drawn)


def _curve(curve: Curve, x: Scale, y: Scale, write: Write) -> Markup:
    path, pen = [], "M"
    marks = []
    for a, b in curve.points:
        if b is None or not math.isfinite(b):
            pen = "M"
            continue
        path.append(f"{pen}{x(a):.1f} {y(b):.1f}")
        pen = "L"
        if len(curve.points) <= 60:
            off = b > y.high
            title = tag("title", f"{write(b)}" + " (off the picture)" * off)
            marks.append(tag("g", title, _mark(curve.look, x(a), y(b))))
    class_ = f"curve c{curve.look}" + " gone" * curve.gone
    line = tag("path", d="".join(path), class_=class_) if len(path) > 1 else None
    return tag("g", line, *marks, class_=f"m{curve.look}" + " gone" * curve.gone)


def _mark(look: int, x: float, y: float) -> Markup:
    """A shape for each curve, so that nobody needs its colour."""
    shapes = (
        f"M{x - 3:.1f} {y:.1f}a3 3 0 1 0 6 0a3 3 0 1 0 -6 0",
        f"M{x - 3:.1f} {y - 3:.1f}h6v6h-6z",
        f"M{x:.1f} {y - 4:.1f}l4 7h-8z",
        f"M{x:.1f} {y - 4:.1f}l4 4l-4 4l-4 -4z",
        f"M{x:.1f} {y + 4:.1f}l4 -7h-8z",
        f"M{x - 3:.1f} {y - 3:.1f}l6 6m0 -6l-6 6",
        f"M{x:.1f} {y - 4:.1f}v8m-4 -4h8",
        f"M{x - 4:.1f} {y - 2:.1f}h8v4h-8z",
    )
    return tag("path", d=shapes[look % len(shapes)], class_="dot")


def _sample(look: int) -> Markup:
    line = tag("path", d="M1 8H39", class_=f"curve c{look}")
    return tag(
        "svg", tag("g", line, _mark(look, 20, 8), class_=f"m{look}"),
        class_="key long", viewBox="0 0 40 16", aria_hidden="true",
    )  # fmt: skip
