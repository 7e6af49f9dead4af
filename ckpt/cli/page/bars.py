"""Bytes of each save, stacked by codec kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ckpt.cli.page.frame import both, legend, numbers, section, x_labels, y_axis
from ckpt.cli.page.markup import Markup, join, tag
from ckpt.cli.page.scales import NARROW, Scale, bins, bytes_tick, percent_text, typical_top
from ckpt.cli.screen import bytes_text, count
from ckpt.format.kinds import KINDS
from recovery.chronicle import Chronicle, Save

HEIGHT = 260.0


def stored_bytes(chronicle: Chronicle) -> Markup:
    saves = chronicle.saves
    total: Counter[str] = Counter()
    for save in saves:
        total.update(save.listed.by_kind)
    stored = chronicle.stored
    told = f"{count(len(saves), 'save')} put {bytes_text(stored)} on the store"
    if saves:
        told += f", {bytes_text(stored / len(saves))} each on average. As many whole copies would be"
        told += f" {bytes_text(chronicle.full)}" + (
            f", {chronicle.full / stored:.3g} times as much." if stored else "."
        )
    marks = [
        (_swatch(kind), KINDS.get(_number(kind), kind), f"{bytes_text(n)}, {percent_text(n / stored)}")
         for kind, n in sorted(total.items(), key=lambda item: -item[1]) if n
    ]  # fmt: skip
    if any(save.listed.abandoned for save in saves):
        ring = tag("circle", cx=10, cy=7, r=2.5, class_="snap gone")
        marks.append(
            (tag("svg", ring, class_="key", viewBox="0 0 20 14", aria_hidden="true"), "below a bar: abandoned", "")
        )
    return section(
        "bytes",
        "Bytes per save",
        told,
        legend(marks),
        both("Bytes that each save stored, by codec kind", told, lambda width: _draw(saves, width)),
        _table(saves),
    )


def _draw(saves: Sequence[Save], width: float) -> tuple[float, Markup]:
    narrow = width == NARROW
    left, right, top, bottom = 62.0, width - 8.0, 26.0, HEIGHT - 40
    runs = bins(len(saves), 44 if narrow else 120)
    means = [_mean(saves[start:stop]) for start, stop in runs]
    sums = [sum(mean.values()) for mean in means]
    y = Scale(0, typical_top(sums) or 1, bottom, top)
    pitch = (right - left) / max(len(runs), 1)
    thick = min(pitch * (0.82 if pitch > 6 else 0.96), 56.0)
    drawn = [y_axis(y, left, right, bytes_tick)]
    places = [left + (n + 0.5) * pitch for n in range(len(runs))]
    before = None
    for x, (start, stop), mean, height in zip(places, runs, means, sums, strict=True):
        first, last = saves[start], saves[stop - 1]
        if before is not None and first.id.run != before:
            edge = x - pitch / 2
            drawn.append(tag("line", x1=edge, x2=edge, y1=top - 12, y2=bottom, class_="border"))
            if pitch > 3:
                drawn.append(tag("text", f"gen {first.id.run.generation}", x=edge + 4, y=top - 14, class_="tick"))
        before = last.id.run
        drawn.append(_bar(x, thick, y, mean, height, _name(saves, start, stop), first.listed.abandoned))
    drawn.append(tag("line", x1=left, x2=right, y1=bottom, y2=bottom, class_="axis"))
    drawn.append(x_labels(places, [f"{saves[start].step:,}" for start, _ in runs], bottom + 20))
    merged = "" if len(runs) == len(saves) else f", each bar the mean of about {len(saves) / len(runs):.0f} saves"
    drawn.append(tag("text", f"step{merged}", x=right, y=HEIGHT - 6, class_="tick end"))
    return HEIGHT, join(drawn)


def _bar(x: float, thick: float, y: Scale, mean: dict[str, float], height: float, name: str, abandoned: bool) -> Markup:
    parts = ", ".join(f"{KINDS.get(_number(kind), kind)} {bytes_text(n)}" for kind, n in mean.items() if n)
    drawn = [tag("title", f"{name}: {bytes_text(height)}" + (f" ({parts})" if parts else ""))]
    at = 0.0
    for kind, n in mean.items():
        low, high = y(at), y(at + n)
        if low > high:
            drawn.append(tag("rect", x=x - thick / 2, y=high, width=thick, height=low - high, class_=_class(kind)))
        at += n
    if height > y.high:  # its end is off the picture: say so, and how far
        a, b, top = x - thick / 2, x + thick / 2, y.stop + 7
        drawn.append(
            tag(
                "path",
                d=f"M{a - 1:.1f} {top + 4:.1f}L{b + 1:.1f} {top - 4:.1f}v5L{a - 1:.1f} {top + 9:.1f}z",
                class_="cut",
            )
        )
        drawn.append(tag("text", bytes_text(height), x=max(a, 0), y=y.stop - 4, class_="mark"))
    if abandoned:
        drawn.append(tag("circle", cx=x, cy=y.start + 5, r=2, class_="snap gone"))
    return tag("g", *drawn)


def _name(saves: Sequence[Save], start: int, stop: int) -> str:
    first, last = saves[start], saves[stop - 1]
    gone = ", abandoned" * first.listed.abandoned
    return f"step {first.step}{gone}" if stop - start == 1 else f"{first.listed.name} to {last.listed.name}, on average"


def _mean(saves: Sequence[Save]) -> dict[str, float]:
    total: Counter[str] = Counter()
    for save in saves:
        total.update(save.listed.by_kind)
    return {kind: total[kind] / len(saves) for kind in sorted(total, key=_number)}


def _number(kind: str) -> int:
    """Kinds are written as numbers; whatever else stands there comes last."""
    return int(kind) if kind.isascii() and kind.isdecimal() and len(kind) < 9 else 1 << 30


def _class(kind: str) -> str:
    return f"k{_number(kind)}" if _number(kind) in KINDS else "kx"


def _swatch(kind: str) -> Markup:
    return tag(
        "svg", tag("rect", x=0, y=0, width=20, height=14, rx=2, class_=_class(kind)),
        class_="key", viewBox="0 0 20 14", aria_hidden="true",
    )  # fmt: skip


def _table(saves: Sequence[Save]) -> Markup:
    kinds = sorted({kind for save in saves for kind, n in save.listed.by_kind.items() if n}, key=_number)
    header = ["step", "generation", "stored", "full size", *(KINDS.get(_number(kind), kind) for kind in kinds), "notes"]
    rows = [
        [
            f"{save.step:,}",
            str(save.listed.generation),
            bytes_text(save.listed.stored),
            bytes_text(save.listed.size),
            *(bytes_text(save.listed.by_kind.get(kind, 0)) for kind in kinds),
            ", ".join([*(f"pin {name}" for name in save.listed.pins), *["abandoned"] * save.listed.abandoned]),
        ]
        for save in saves
    ]
    return numbers(header, rows, what="Bytes stored by each save", text=frozenset({len(header) - 1}))
