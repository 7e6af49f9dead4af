"""The bars of `bench_peers`, each with the number that was measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

PEERS = ("torch.save", "DCP async_save", "moonclip", "torch_checkpointing")
SMALLER = ("moonclip",)
"""Peers that store less than the full size."""


@dataclass(frozen=True, slots=True)
class Bar:
    """`found` must be at most (or at least) `bar`."""

    what: str
    found: float
    bar: float
    at_least: bool = False

    @property
    def met(self) -> bool:
        return self.found >= self.bar if self.at_least else self.found <= self.bar

    def __str__(self) -> str:
        sign = "≥" if self.at_least else "≤"
        return f"  {'met   ' if self.met else 'MISSED'}  {self.what}: {self.found:.3g} ({sign} {self.bar:g})"


def report(found: dict[str, Any]) -> str:
    """Every bar that can be judged from these figures."""
    lines = [str(bar) for bar in bars(found)]
    return "\nbars\n" + "\n".join(lines)


def readme(found: dict[str, Any]) -> str:
    """The dense load as a table, and a line for each other one, in markdown."""
    lines = [
        "| dense, "
        + f"{found['loads']['dense']['MB']:.0f} MB | blocked, of a plain copy | durable | CPU | stored | load |"
        " steps per second kept, a save every 10 / every step |",
        "|---|---|---|---|---|---|---|",
    ]
    copied = found["loads"]["dense"]["figures"]["plain copy"]["blocked"]["median"]
    for name, figures in found["loads"]["dense"]["figures"].items():
        if name == "plain copy":
            continue

        def at(figure: str, text: str, of: str = "median", f: dict[str, Any] = figures) -> str:
            return text.format(f[figure][of]) if figure in f else "-"

        cells = [
            name,
            f"{figures['blocked']['median'] / copied:.2f} times",
            at("durable", "{:.2f} s"),
            at("cpu", "{:.2f} s"),
            at("stored", "{:.0f} MB", "mean"),
            at("load", "{:.2f} s"),
            at("rate, every 10", "{:.2f}") + " / " + at("rate, every 1", "{:.2f}"),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    for name, load in found["loads"].items():
        if name != "dense" and _has(load, "ours", "moonclip"):
            a, b = load["figures"]["ours"], load["figures"]["moonclip"]
            lines.append(
                f"| {name}, {load['MB']:.0f} MB: stored, ours / moonclip | {a['stored']['mean']:.2f} / "
                f"{b['stored']['mean']:.2f} MB |"
            )
    return "\n".join(lines)


def bars(found: dict[str, Any]) -> Iterator[Bar]:
    loads = found["loads"]
    if "dense" in loads:
        yield from _dense(loads["dense"])
    for name in ("bf16", "bf16-adam"):
        if name in loads and _has(loads[name], "ours", "moonclip"):
            figures = loads[name]["figures"]
            yield Bar(f"{name}: durable over moonclip", _ratio(figures, "durable", "ours", "moonclip"), 0.5)
            bar = 0.6 if name == "bf16" else 1.0
            yield Bar(f"{name}: stored over moonclip", _ratio(figures, "stored", "ours", "moonclip"), bar)
    if "lora" in loads and _has(loads["lora"], "ours", "moonclip"):
        yield Bar("lora: stored over moonclip", _ratio(loads["lora"]["figures"], "stored", "ours", "moonclip"), 1.0)
    if "rows" in loads and _has(loads["rows"], "ours"):
        stored = loads["rows"]["figures"]["ours"]["stored"]["median"]
        yield Bar("rows: stored over the touched rows' own encoding", stored / loads["rows"]["touched"], 1.3)
    if "tiny" in loads and _has(loads["tiny"], "ours"):
        figures = loads["tiny"]["figures"]["ours"]
        yield Bar("tiny: blocked, ms", 1000 * figures["blocked"]["median"], 30)
        yield Bar("tiny: durable, s", figures["durable"]["median"], 1.5)
    for what, key in (("saving", "save"), ("restoring", "load")):
        for name in ("ours", "ours, overlap"):
            if name in found.get("memory", {}):
                peaks = found["memory"][name]
                yield Bar(f"memory beyond two buffers {what}, {name}, MB", peaks[key] - peaks["buffers"], 256)


def _dense(load: dict[str, Any]) -> Iterator[Bar]:
    figures = load["figures"]
    peers = [name for name in PEERS if name in figures]
    copied = figures["plain copy"]["blocked"]["median"]
    fastest = min((figures[name]["blocked"]["median"] for name in peers), default=float("inf"))
    if "ours" in figures:
        blocked = figures["ours"]["blocked"]["median"]
        yield Bar("dense: blocked, copy, over a plain copy", blocked / copied, 1.15)
        yield Bar("dense: blocked, copy, over the fastest peer", blocked / fastest, 1.05)
    if "ours, overlap" in figures:
        blocked = figures["ours, overlap"]["blocked"]["median"]
        yield Bar("dense: blocked, overlap, over a plain copy", blocked / copied, 0.10)
        yield Bar("dense: blocked, overlap, over the fastest peer", blocked / fastest, 1.0)
    if "ours" not in figures:
        return
    for peer, bar in (("moonclip", 0.5), ("DCP async_save", 1.0)):
        if peer in figures:
            yield Bar(f"dense: durable over {peer}", _ratio(figures, "durable", "ours", peer), bar)
    yield Bar("dense: raw over stored", load["MB"] / figures["ours"]["stored"]["mean"], 1.19, at_least=True)
    if "moonclip" in figures and "ours at 2" in figures:
        yield Bar("dense: stored at 2 over moonclip", _ratio(figures, "stored", "ours at 2", "moonclip"), 1.0)
    if "ours at 3" in figures:
        yield Bar(
            "dense: raw over stored at 3", load["MB"] / figures["ours at 3"]["stored"]["mean"], 1.26, at_least=True
        )
    if "moonclip" in figures:
        yield Bar("dense: load over moonclip", _ratio(figures, "load", "ours", "moonclip"), 0.25)
    if "torch.save" in figures:
        raw = figures["torch.save"]["torch.load"]["median"]
        yield Bar("dense: load over torch.load", figures["ours"]["load"]["median"] / raw, 3.0)
    if "rate, every 10" in figures["ours"]:
        own = figures["ours"]["rate, every 10"]["median"]
        rivals = [figures[name]["rate, every 10"]["median"] for name in SMALLER if name in figures]
        yield Bar(
            "dense: steps per second kept, a save every 10 (0.97 where a core is spare)", own, 0.97, at_least=True
        )
        if rivals:
            yield Bar(
                "the same, over the best peer that stores less than full size", own / max(rivals), 1.0, at_least=True
            )


def _has(load: dict[str, Any], *names: str) -> bool:
    return all(name in load["figures"] for name in names)


def _ratio(figures: dict[str, Any], figure: str, a: str, b: str) -> float:
    of = "mean" if figure == "stored" else "median"  # chains come and go: what counts is what all saves came to
    one, other = figures[a][figure][of], figures[b][figure][of]
    return float(one / other) if other else float("inf")
