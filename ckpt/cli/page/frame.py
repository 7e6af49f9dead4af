"""What all pictures share: the frame of axes, a picture for a desk and one for a phone, tables of their numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ckpt.cli.page.markup import Markup, join, tag
from ckpt.cli.page.scales import NARROW, WIDE, Scale, Write, bins, ticks
from ckpt.cli.screen import count

ROWS = 60
"""Rows of a table at most; a report has one size, however long the history."""


def both(name: str, told: str, draw: Callable[[float], tuple[float, Markup]], *, wide: float = WIDE) -> Markup:
    """A picture in two widths, of which the style shows one. `draw`: width → (height, what is on it). `wide`: of the
    wider one."""
    return join(
        _picture(name, told, width, *draw(width), class_) for width, class_ in ((wide, "wide"), (NARROW, "narrow"))
    )


def _picture(name: str, told: str, width: float, height: float, drawn: Markup, class_: str) -> Markup:
    head = tag("title", name), tag("desc", told)
    return tag("svg", *head, drawn, class_=class_, viewBox=f"0 0 {width:.0f} {height:.0f}", role="img", aria_label=name)


def section(id_: str, title: str, told: str, *content: Markup) -> Markup:
    """One card of the page: a heading, what it shows in words, the pictures."""
    head = tag("h2", title, id=f"{id_}-title"), tag("p", told, class_="told")
    return tag("section", *head, *content, id=id_, aria_labelledby=f"{id_}-title")


def numbers(header: Sequence[str], rows: Sequence[Sequence[str]], *, what: str, text: frozenset[int]) -> Markup:
    """The numbers of a picture as a table that unfolds: at most `ROWS` of them, evenly chosen. `text`: numbers of the
    columns that are not numbers."""
    shown = [rows[start] for start, _ in bins(len(rows), ROWS)] if rows else []
    left_out = "" if len(shown) == len(rows) else f", {len(shown)} of {len(rows)}"
    head = tag("tr", *(tag("th", name, scope="col") for name in header))
    body = join(
        tag("tr", *(tag("td", cell, class_=None if n in text else "n") for n, cell in enumerate(row))) for row in shown
    )
    table = tag("table", tag("caption", f"{what}{left_out}"), tag("thead", head), tag("tbody", body))
    return tag(
        "details",
        tag("summary", f"The numbers ({count(len(shown), 'row')}{' of ' + str(len(rows)) if left_out else ''})"),
        tag("div", table, class_="scroll", tabindex="0", role="region", aria_label=what),
    )


def y_axis(scale: Scale, left: float, right: float, write: Write, *, lines: int = 4, whole: bool = False) -> Markup:
    """Level lines with their values on the left."""
    drawn = []
    for value in ticks(scale.low, scale.high, lines, whole=whole):
        y = scale(value)
        drawn.append(tag("line", x1=left, x2=right, y1=y, y2=y, class_="grid"))
        drawn.append(tag("text", write(value), x=left - 6, y=y + 4, class_="tick end"))
    return join(drawn)


def x_steps(scale: Scale, y: float, *, room: float = 90) -> Markup:
    """Steps below a linear axis."""
    drawn = []
    for value in ticks(scale.low, scale.high, max(int((scale.stop - scale.start) / room), 1), whole=True):
        x = scale(value)
        drawn.append(tag("line", x1=x, x2=x, y1=y, y2=y + 4, class_="axis"))
        drawn.append(tag("text", f"{value:,.0f}", x=x, y=y + 17, class_="tick mid"))
    return join(drawn)


def x_labels(places: Sequence[float], labels: Sequence[str], y: float, *, room: float = 64) -> Markup:
    """Labels below an axis of saves, as many as have room."""
    drawn: list[Markup] = []
    free = -1e9
    for x, label in zip(places, labels, strict=True):
        if x >= free:
            drawn.append(tag("text", label, x=x, y=y, class_="tick mid"))
            free = x + max(room, 7.5 * len(label) + 12)
    return join(drawn)


def legend(items: Sequence[tuple[Markup, str, str]]) -> Markup:
    """(what it looks like, its name, a number)."""
    return tag(
        "ul",
        *(tag("li", mark, tag("span", name), tag("b", value) if value else None) for mark, name, value in items),
        class_="legend",
    )
