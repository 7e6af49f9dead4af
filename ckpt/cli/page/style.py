"""The style of the page (style.css), and the textures that pictures refer to."""

from __future__ import annotations

from importlib.resources import files

from ckpt.cli.page.markup import Markup, join, tag
from ckpt.format.kinds import KINDS

# Number of the codec kind → its texture on top of its colour: a path in a square of 8 pixels.
_TEXTURES = {
    0: "M0 0",
    1: "M-2 2l4 -4M0 8l8 -8M6 10l4 -4",
    2: "M0 0",
    3: "M0 2h8M0 6h8",
    4: "M-2 6l4 4M0 0l8 8M6 -2l4 4",
    5: "M2 2h.01M6 6h.01",
}


def _pattern(name: str, texture: str) -> Markup:
    base = tag("rect", width=8, height=8, class_=f"{name}-base")
    return tag(
        "pattern",
        base,
        tag("path", d=texture, class_="texture"),
        id=name,
        width=8,
        height=8,
        patternUnits="userSpaceOnUse",
    )


# Not display:none: what is drawn with a pattern from there would not be drawn.
DEFS = tag(
    "svg",
    tag(
        "defs",
        join(_pattern(f"k{kind}", _TEXTURES.get(kind, "M4 0v8")) for kind in KINDS),
        _pattern("unknown", "M-2 6l4 4M0 0l8 8M6 -2l4 4"),
        tag(
            "marker",
            tag("path", d="M0 0L8 4L0 8z", class_="head"),
            id="arrow", viewBox="0 0 8 8", refX="6", refY="4", markerWidth="8", markerHeight="8", orient="auto",
        ),
    ),
    class_="defs", width=0, height=0, aria_hidden="true",
)  # fmt: skip


def style() -> Markup:
    return Markup(files("ckpt.cli.page").joinpath("style.css").read_text("utf-8"))
