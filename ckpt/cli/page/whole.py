"""The whole page: what a look at a store tells, as one file that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from ckpt.cli.page.bars import stored_bytes
from ckpt.cli.page.curves import depths, metrics, times
from ckpt.cli.page.frame import numbers, section
from ckpt.cli.page.heat import heat_map
from ckpt.cli.page.markup import Markup, join, tag
from ckpt.cli.page.scales import when_text
from ckpt.cli.page.style import DEFS, style
from ckpt.cli.page.timeline import timeline
from ckpt.cli.screen import bytes_text, count, cut
from recovery.chronicle import Chronicle, Recovery
from recovery.layers import Layers
from recovery.quantities import seconds_text

MARK = "<!doctype html>\n<!-- ckpt report -->\n"
"""How every report begins, so that the next one may replace it, and nothing else."""

# Nothing is fetched and no script runs, whatever a name on the store says: the second lock behind the escaping.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"


def page(chronicle: Chronicle, layers: Layers, *, now: float) -> str:
    """The report as HTML. `now`: POSIX seconds at which the store was looked at."""
    title = f"{chronicle.url}: checkpoints"
    sections = [_recoveries(chronicle.recoveries)]
    if chronicle.saves:
        sections = [
            timeline(chronicle),
            stored_bytes(chronicle),
            heat_map(layers, len(chronicle.saves)),
            times(chronicle),
            metrics(chronicle),
            depths(layers),
            *sections,
        ]
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        tag("link", rel="icon", href="data:,"),
        tag("style", style()),
    )
    body = tag("body", DEFS, _head(chronicle, now), tag("main", *sections), _foot(chronicle, layers, now))
    return MARK + tag("html", head, body, lang="en") + "\n"


def _head(chronicle: Chronicle, now: float) -> Markup:
    saves = chronicle.saves
    if not saves:
        tiles: list[tuple[str, str, str]] = [("Snapshots", "none", "nothing was saved here, or all of it was pruned")]
    else:
        newest = next(save for save in saves if save.id == chronicle.newest)
        gone = sum(save.listed.abandoned for save in saves)
        blocked = [save.blocked for save in saves if save.blocked is not None]
        lost = sum(recovery.lost for recovery in chronicle.recoveries)
        tiles = [
            ("Newest step", f"{newest.step:,}", when_text(newest.listed.time)),
            ("Snapshots", f"{len(saves):,}", f"{gone} abandoned" if gone else "all on the line to the newest"),
            ("State", bytes_text(newest.listed.size), count(newest.listed.world_size, "rank")),
            (
                "On the store",
                bytes_text(chronicle.held),
                f"instead of {bytes_text(chronicle.full)} in whole copies",
            ),
            ("Training waits", seconds_text(median(blocked)) if blocked else "-", "per save, median"),
            (
                "Recoveries",
                str(len(chronicle.recoveries)),
                f"{count(lost, 'step')} seen lost" if lost else "no saved step lost",
            ),
        ]
    return tag(
        "header",
        tag("p", "Checkpoints", class_="over"),
        tag("h1", cut(chronicle.url, 200)),
        tag("p", f"looked at {when_text(now)}", class_="told"),
        tag("dl", *(_tile(*tile) for tile in tiles), class_="tiles"),
    )


def _tile(name: str, value: str, more: str) -> Markup:
    return tag("div", tag("dt", name), tag("dd", value), tag("dd", more, class_="more"))


def _recoveries(recoveries: Sequence[Recovery]) -> Markup:
    if not recoveries:
        return section("recoveries", "Recoveries", "No start of the job went on from a snapshot.")
    lost = sum(recovery.lost for recovery in recoveries)
    told = (
        f"{count(len(recoveries), 'start')} of the job went on from a snapshot; the store shows {count(lost, 'step')} "
        "that had to be done again. Steps after the last save leave no trace, unless in a journal: without one, up to "
        "one distance between saves more may have been lost each time."
    )
    rows = [
        [
            when_text(r.at),
            str(r.run.generation),
            f"{r.step:,} ({r.source.generation}/{r.step})",
            f"{r.lost:,}",
            "?" if r.usual is None else f"{r.usual:,}",
            _ranks(r),
        ]
        for r in recoveries
    ]
    shown = numbers(
        ["when", "generation", "from step", "steps lost, at least", "and at most about", "ranks"],
        rows[-200:],
        what="Recoveries",
        text=frozenset({0, 5}),
    )
    cards = tag("ol", *map(_card, recoveries[-12:][::-1]), class_="cards")
    return section("recoveries", "Recoveries", told, cards, shown)


def _card(r: Recovery) -> Markup:
    lost = f"{count(r.lost, 'step')} done again, at least" if r.lost else "no saved step was lost"
    if r.journaled > r.step:
        lost = f"the journal led on to step {r.journaled:,}; {lost}"
    return tag(
        "li",
        tag("b", f"step {r.step:,}"),
        tag("span", f"generation {r.run.generation}, {when_text(r.at)}"),
        tag("span", f"{lost}; {_ranks(r)}"),
    )


def _ranks(r: Recovery) -> str:
    now = count(r.ranks, "rank") if r.ranks else "ranks unknown"
    return now if r.ranks_before in (None, r.ranks) else f"{r.ranks_before} → {now}"


def _foot(chronicle: Chronicle, layers: Layers, now: float) -> Markup:
    sample = layers.sample
    told = [
        f"Made by ckpt report from {cut(chronicle.url, 200)}, {when_text(now)}.",
        f"Read: the documents of {count(len(chronicle.saves), 'snapshot')}, and {count(sample.parts, 'part')} "
        f"({bytes_text(sample.nbytes)}) of {len(sample.reads)} of them; no packs.",
    ]
    if chronicle.problems:
        told.append(f"{count(chronicle.problems, 'object')} could not be read: 'ckpt list --problems' says which.")
    return tag("footer", join(tag("p", text) for text in told))
