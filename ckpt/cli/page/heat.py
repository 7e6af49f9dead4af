"""The heat map: groups of leaves down, saves across, and in each cell how much of the group that save stored anew.

A cell is filled from below by its share, and the fuller the darker: it can be read as bars, in grey, or as colour.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckpt.cli.page.frame import both, numbers, section, x_labels
from ckpt.cli.page.markup import Markup, join, tag
from ckpt.cli.page.scales import NARROW, percent_text
from ckpt.cli.screen import bytes_text, count, cut
from ckpt.format.manifest import Snapshot
from recovery.layers import Group, Layers, evenly

SHADES = 5


def heat_map(layers: Layers, saves: int) -> Markup:
    reads = [snapshot for snapshot, _ in layers.sample.reads]
    if not layers.groups:
        return section("heat", "What changes", "No part could be read, so nothing is known of single layers.")
    told = [
        "Share of each group of leaves that a save stored anew; what had not changed since the one before costs nothing"
    ]
    still = [group for group in layers.groups if all(share in (0.0, None) for share in group.shares[1:])]
    if still and len(reads) > 1 and any(any(s is not None for s in group.shares[1:]) for group in still):
        told.append(f"{count(len(still), 'group')} of {len(layers.groups)} did not change after the first save shown")
    if len(reads) < saves:
        told.append(f"{len(reads)} of {saves} saves, evenly chosen")
    if any(len(ranks) < snapshot.world_size for snapshot, ranks in layers.sample.reads):
        told.append("of each, some of the ranks")
    if layers.compacted:
        told.append(
            f"hatched: {count(len(layers.compacted), 'snapshot')} that compaction rewrote, which no longer tell"
        )
    if layers.lost:
        told.append(f"{count(len(layers.lost), 'snapshot')} could not be read")
    text = ". ".join(told) + "."
    key = tag("ul", *(tag("li", _key(share), tag("span", name)) for share, name in _KEYS), class_="legend")
    return section(
        "heat",
        "What changes",
        text,
        key,
        both("Share of each group of leaves stored anew by each save", text, lambda width: _draw(layers, reads, width)),
        _table(layers.groups, reads),
    )


_KEYS: tuple[tuple[float | None, str], ...] = (
    (0.0, "nothing"), (0.1, "a tenth"), (0.5, "half"), (1.0, "all"), (None, "not there, or not known"),
)  # fmt: skip


def _draw(layers: Layers, reads: Sequence[Snapshot], width: float) -> tuple[float, Markup]:
    narrow = width == NARROW
    left, right = (2.0, width - 44.0) if narrow else (312.0, width - 60.0)
    high, pitch, top = (17.0, 37.0, 6.0) if narrow else (19.0, 23.0, 4.0)
    chosen = evenly(len(reads), 30) if narrow else range(len(reads))
    step = min((right - left) / max(len(chosen), 1), 112.0)
    thick = step - (1.0 if step > 5 else 0.3)
    drawn = []
    for n, group in enumerate(layers.groups):
        y = top + n * pitch + (pitch - high if narrow else 0)
        name = cut(group.name, 44)
        told = f"{group.name}: {count(group.leaves, 'leaf', 'leaves')}, {bytes_text(group.nbytes)}"
        place = {"x": 2, "y": y - 5} if narrow else {"x": left - 10, "y": y + 14}
        drawn.append(tag("text", tag("title", told), name, class_="row" if narrow else "row end", **place))
        cells = []
        for i, column in enumerate(chosen):
            title = (
                None if narrow else f"{group.name} at {reads[column].id.short}: {percent_text(group.shares[column])}"
            )
            cells.append(_cell(left + i * step, y, thick, high, group.shares[column], title))
        drawn.append(tag("g", *cells))
        known = [share for share in group.shares if share is not None]
        mean = sum(known) / len(known) if known else None
        drawn.append(
            tag("text", percent_text(mean), x=left + len(chosen) * step + 8, y=y + high / 2 + 4, class_="tick")
        )
    bottom = top + len(layers.groups) * pitch
    places = [left + (i + 0.5) * step for i in range(len(chosen))]
    drawn.append(x_labels(places, [f"{reads[column].step:,}" for column in chosen], bottom + 14, room=52))
    drawn.append(tag("text", "step; on the right, the mean", x=width - 4, y=bottom + 32, class_="tick end"))
    return bottom + 38, join(drawn)


def _cell(x: float, y: float, thick: float, high: float, share: float | None, title: str | None) -> Markup:
    if share is None:
        drawn = [tag("rect", x=x, y=y, width=thick, height=high, class_="cell unknown")]
    else:
        drawn = [tag("rect", x=x, y=y, width=thick, height=high, class_="cell")]
        fill = min(max(share * high, 1.5), high) if share > 0 else 0.0
        if fill:
            shade = min(int(share * SHADES), SHADES - 1)
            drawn.append(tag("rect", x=x, y=y + high - fill, width=thick, height=fill, class_=f"h{shade}"))
    if title is None:
        return join(drawn)
    return tag("g", tag("title", title), *drawn)


def _key(share: float | None) -> Markup:
    return tag("svg", _cell(1, 1, 16, 16, share, None), class_="key", viewBox="0 0 18 18", aria_hidden="true")


def _table(groups: Sequence[Group], reads: Sequence[Snapshot]) -> Markup:
    columns = evenly(len(reads), 24)
    header = ["leaves", "size", *(f"step {reads[n].step:,}" for n in columns)]
    rows = [
        [cut(group.name, 80), bytes_text(group.nbytes), *(percent_text(group.shares[n]) for n in columns)]
        for group in groups
    ]
    return numbers(header, rows, what="Share of bytes stored anew", text=frozenset({0}))
