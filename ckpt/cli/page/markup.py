"""HTML and SVG as a value: what is text is escaped, what is markup was made here. Nothing else may reach the page.

A store is not trusted: names of leaves, metrics and hosts are whatever somebody wrote there.
"""

from __future__ import annotations

import html
from collections.abc import Iterable

from ckpt.cli.screen import printable


class Markup(str):
    """Text that is markup already. Made by `tag` and `join` only."""

    __slots__ = ()


def tag(name: str, /, *children: str | None, **attributes: str | float | None) -> Markup:
    """One element. Children that are not `Markup` are escaped, and so is every attribute; None is left out.

    ``class_`` stands for class, ``_`` in other names for ``-``.
    """
    said = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_escaped(_number(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    inner = "".join(child if isinstance(child, Markup) else _escaped(child) for child in children if child is not None)
    if not inner and name in _VOID:
        return Markup(f"<{name}{said}>")
    if not inner and name in _DRAWN:
        return Markup(f"<{name}{said}/>")
    return Markup(f"<{name}{said}>{inner}</{name}>")


def join(parts: Iterable[Markup]) -> Markup:
    return Markup("".join(parts))


_VOID = frozenset({"meta", "link", "br"})
_DRAWN = frozenset({"rect", "circle", "line", "path", "use"})


def _escaped(text: str) -> str:
    """Line ends, control characters and marks that turn the direction of writing around are spelled out."""
    return html.escape(printable(text), quote=True)


def _number(value: str | float) -> str:
    """At most two decimals: a picture needs no more, and there are thousands of numbers in it."""
    return value if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")
