"""This library against `torch.save`, DCP's `async_save`, moonclip and torch_checkpointing, in one run.

    python -m scripts.bench_peers                                   # everything: half an hour on two idle cores
    python -m scripts.bench_peers --size small --loads dense,bf16 --rounds 3

Contestants take turns, in another order each round, on a state that ten real training steps have changed since the
round before. Medians are shown, with the quartiles in the JSON (``bench-results/peers.json``). Peers are installed into
a virtual environment of their own (``bench-results/peers``), which sees this one's torch; one that is missing is named.

blocked   milliseconds that training stands still: until `save` returns, and, where the copy overlaps with forward and
          backward, what the optimizer step then still waits; in brackets over a plain copy of the same tensors
durable   until the save is on the disk, synced; training stands still meanwhile
cpu       seconds of processor time until then, child processes included
stored    MB of new files per save after the first two
load      of the newest save into live tensors, files in the page cache
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

RESULTS = REPO / "bench-results"
WHEELS = ("moonclip==0.3.1", "torch-checkpointing==0.1.1")
CALM = 0.1
"""Cores that others may use before a run is called noisy."""

APART = 10
"""Training steps between two saves."""


def install() -> Path:
    """The interpreter of the peers' environment, which is made once; its own packages are the peers alone."""
    home = RESULTS / "peers"
    python = home / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        (site,) = home.glob("lib/python3*/site-packages")
        (here,) = Path(sys.prefix).glob("lib/python3*/site-packages")
        (site / "ours.pth").write_text(f"{here}\n")
        for wheel in WHEELS:  # one by one: what cannot be had must not keep the others away
            subprocess.run([python, "-m", "pip", "install", "--quiet", wheel], check=False)
    return python


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("full", "small"), default="full")
    parser.add_argument("--loads", default="dense,lora,bf16,bf16-adam,rows,tiny", help="comma separated")
    parser.add_argument("--peers", default="", help="comma separated; default all")
    parser.add_argument("--rounds", type=int, default=5, help="saves that count, per contestant (default 5)")
    parser.add_argument("--warm", type=int, default=300, help="training steps of the GPT before (default 300)")
    parser.add_argument("--rates", type=int, default=3, help="rounds of training with saves (default 3; 0: none)")
    parser.add_argument("--memory", type=int, default=1000, help="MB of state whose peak is measured (0: none)")
    parser.add_argument("--json", type=Path, default=RESULTS / "peers.json")
    parser.add_argument("--readme", action="store_true", help="only show what is in the JSON, as README has it")
    options = parser.parse_args()
    if options.readme:
        from scripts.peer_bars import readme, report

        found = json.loads(options.json.read_text())
        print(readme(found) + "\n" + report(found))
        return 0
    python = install()
    if Path(sys.prefix).resolve() != (RESULTS / "peers").resolve():
        environment = os.environ | {"PYTHONPATH": str(REPO)}
        again = [python, "-m", "scripts.bench_peers", *sys.argv[1:]]
        return subprocess.run(again, env=environment, cwd=REPO, check=False).returncode
    return measure(options)


def measure(options: argparse.Namespace) -> int:
    import torch

    from scripts.idle import busy_cores
    from scripts.peers import contestants, missing

    warnings.simplefilter("ignore")
    cores = len(os.sched_getaffinity(0))
    others = busy_cores()
    print(f"{cores} cores, of which other processes use {others:.2f}; torch {torch.__version__}")
    if others > CALM:
        print("warning: the cores are not idle: times say little, ratios a little more, bytes everything")
    gone = missing()
    for name, why in gone.items():
        print(f"missing: {name}: {why}")
    found: dict[str, Any] = {"cores": cores, "others": others, "size": options.size, "missing": gone, "loads": {}}
    wanted = [name for name in options.peers.split(",") if name]
    for name in options.loads.split(","):
        makers = {n: m for n, m in contestants(amplified=name == "dense").items() if n not in gone}
        makers = {n: m for n, m in makers.items() if not wanted or n in wanted}
        found["loads"][name] = _load(name, makers, options)
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(found, indent=1))
        print(_table(name, found["loads"][name]), flush=True)
    if options.memory:
        found["memory"] = _memory(options.memory, [n for n in contestants(amplified=False) if n not in gone])
        options.json.write_text(json.dumps(found, indent=1))
        print(_memory_table(options.memory, found["memory"]), flush=True)
    from scripts.peer_bars import report

    print(report(found))
    return 0


# --- one load -----------------------------------------------------------------------------------------------------


def _load(name: str, makers: dict[str, Callable[..., Any]], options: argparse.Namespace) -> dict[str, Any]:
    from scripts.idle import Watch
    from scripts.peer_loads import make

    load = make(name, options.size, options.warm, RESULTS)
    ready = [tensor.clone() for _, tensor in load.tensors()]
    times: dict[str, dict[str, list[float]]] = {n: {} for n in (*makers, "plain copy")}
    watch = Watch.start()
    with tempfile.TemporaryDirectory(dir=RESULTS) as folder, ExitStack() as stack:
        peers = {}
        for n, maker in makers.items():
            peers[n] = maker(load, Path(folder) / n.replace(" ", "-"))
            stack.callback(_closed, peers[n])
        seen: dict[str, set[Path]] = {n: set() for n in peers}
        before: list[Any] = []
        for turn in range(options.rounds + 2):  # two that do not count: buffers, processes and pools are made in them
            before = [tensor.clone() for _, tensor in load.tensors()] if load.rows else []
            load.train(APART)
            if turn >= 2:
                times["plain copy"].setdefault("blocked", []).append(_copy(load, ready))
            for n in _turned(list(peers), turn):
                try:
                    took = _save(load, peers[n], turn)
                except Exception as error:  # reported, and the others go on
                    print(f"{name}: {n} failed and is left out: {type(error).__name__}: {error}", flush=True)
                    del peers[n], times[n]
                    continue
                took["stored"] = _new_bytes(Path(folder) / n.replace(" ", "-"), seen[n]) / 1e6
                if turn >= 2:
                    for figure, value in took.items():
                        times[n].setdefault(figure, []).append(value)
        own = _own_encoding(load, before) / 1e6 if load.rows else None
        for turn in range(max(3, options.rounds)):
            for n in _turned([p for p in peers if not p.startswith("ours,")], turn):
                started = time.perf_counter()
                peers[n].load()
                times[n].setdefault("load", []).append(time.perf_counter() - started)
            if "torch.save" in peers:
                started = time.perf_counter()
                _plain_load(peers["torch.save"])
                times["torch.save"].setdefault("torch.load", []).append(time.perf_counter() - started)
        rates = _rates(load, peers, options.rates) if name == "dense" and options.rates else {}
    figures = {n: {f: _spread(v) for f, v in measured.items()} for n, measured in times.items()}
    for n, rate in rates.items():
        figures[n] |= rate
    return {"MB": load.nbytes / 1e6, "others": watch.others(), "figures": figures, "touched": own}


def _closed(peer: Any) -> None:
    with suppress(Exception):  # what failed before, and was said, fails again
        peer.close()


def _save(load: Any, peer: Any, step: int) -> dict[str, float]:
    """One save: seconds. The state is the same before and after."""
    overlaps = peer.name in ("ours, overlap", "torch_checkpointing")
    cpu, started = _cpu(), time.perf_counter()
    peer.save(step)
    blocked = time.perf_counter() - started
    if overlaps:
        idle, busy = time.perf_counter(), time.process_time()
        load.grads()
        work, burnt = time.perf_counter() - idle, time.process_time() - busy
        mark = time.perf_counter()
        peer.settle()
        blocked += time.perf_counter() - mark
    else:
        work = burnt = 0.0
    peer.durable()
    durable = time.perf_counter() - started
    # The forward and backward in between are not the save's work; what it did meanwhile cannot be told apart, and is
    # left in `durable` as far as it was not hidden.
    return {"blocked": blocked, "durable": durable, "cpu": max(0.0, _cpu() - cpu - (burnt if work else 0.0))}


def _copy(load: Any, ready: list[Any]) -> float:
    started = time.perf_counter()
    for target, (_, source) in zip(ready, load.tensors(), strict=True):
        target.copy_(source)
    return time.perf_counter() - started


def _plain_load(peer: Any) -> None:
    import torch

    torch.load(peer._newest, weights_only=True)


def _own_encoding(load: Any, before: list[Any]) -> float:
    """Bytes that the touched rows of every tensor come to, each tensor's in one blob of the kind that suits it best."""
    import torch

    from ckpt.format.codec import Codec
    from ckpt.format.kinds import KINDS, NEEDS_BASE, SPARSE
    from ckpt.format.shards import DTYPES

    codec, total = Codec(), 0
    for old, (_, new) in zip(before, load.tensors(), strict=True):
        if new.dim() != 2:
            continue
        rows = (old != new).any(1)
        a, b = (t[rows].contiguous().view(torch.uint8).view(-1).numpy() for t in (new, old))
        dtype = DTYPES[str(new.dtype).removeprefix("torch.")]
        total += min(
            len(codec.encode(k, a, b if k in NEEDS_BASE else None, dtype)) for k in KINDS if k != SPARSE
        )  # fmt: skip
    return total


def _rates(load: Any, peers: dict[str, Any], rounds: int) -> dict[str, dict[str, Any]]:
    """Steps per second over those without saves, which take turns with each contestant's."""
    found: dict[str, dict[str, list[float]]] = {n: {} for n in peers if " at " not in n}
    step = 1000
    for turn in range(rounds):
        for every in (10, 1):
            for n in _turned(list(found), turn):
                plain = _stretch(load, None, 0, step)
                saving = _stretch(load, peers[n], every, step)
                step += 100
                found[n].setdefault(f"rate, every {every}", []).append(plain / saving)
    return {n: {f: _spread(v) for f, v in figures.items()} for n, figures in found.items()}


def _stretch(load: Any, peer: Any, every: int, step: int) -> float:
    """Seconds of ten training steps, and until the last save in them is durable."""
    started = time.perf_counter()
    for number in range(10):
        load.optimizer.zero_grad(set_to_none=True)
        load.grads()
        if peer is not None and peer.name == "torch_checkpointing":
            peer.settle()
        load.optimizer.step()
        if peer is not None and number % every == 0:
            peer.save(step + number)
    if peer is not None:
        peer.durable()
    return time.perf_counter() - started


# --- memory -------------------------------------------------------------------------------------------------------


def _memory(size: int, names: list[str]) -> dict[str, dict[str, float]]:
    """MB beyond the live state, at the peak of three saves and of a restore, each contestant in its own process."""
    found = {}
    for name in names:
        command = [sys.executable, "-m", "scripts.peer_memory", name, str(size)]
        done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"memory of {name}: {done.stderr.strip().splitlines()[-1:]}")
        else:
            found[name] = json.loads(done.stdout.splitlines()[-1])
    return found


# --- figures ------------------------------------------------------------------------------------------------------


def _turned(names: list[str], turn: int) -> list[str]:
    at = turn % max(1, len(names))
    return names[at:] + names[:at]


def _spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    low, high = ordered[len(ordered) // 4], ordered[(3 * len(ordered)) // 4]
    return {
        "median": statistics.median(ordered), "low": low, "high": high, "mean": statistics.fmean(ordered)
    }  # fmt: skip


def _new_bytes(folder: Path, seen: set[Path]) -> int:
    total = 0
    for path in folder.rglob("*"):
        if path not in seen and path.is_file():
            total += path.stat().st_size
            seen.add(path)
    return total


def _cpu() -> float:
    """Processor seconds of this process and its children so far."""
    spent = time.process_time()
    for child in Path("/proc").glob("[0-9]*"):
        try:
            fields = (child / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == os.getpid():
            spent += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return spent


def _table(name: str, load: dict[str, Any]) -> str:
    copied = load["figures"]["plain copy"]["blocked"]["median"]
    lines = [
        f"\n{name}: {load['MB']:.0f} MB, plain copy {1000 * copied:.1f} ms"
        + (f", touched rows by themselves {load['touched']:.2f} MB" if load["touched"] is not None else "")
        + (f" (others used {load['others']:.2f} cores)" if load["others"] > CALM else ""),
        f"  {'':20}{'blocked':>18}{'durable':>10}{'cpu':>8}{'stored':>10}{'load':>9}{'every 10':>10}{'every 1':>9}",
    ]
    for n, figures in load["figures"].items():
        if n == "plain copy":
            continue

        def at(figure: str, scale: float = 1.0, form: str = ".2f", of: str = "median", f: Any = figures) -> str:
            return format(scale * f[figure][of], form) if figure in f else "-"

        ratio = figures["blocked"]["median"] / copied
        lines.append(
            f"  {n:20}{at('blocked', 1000, '.1f'):>8} ms ({ratio:5.2f}){at('durable'):>8} s{at('cpu'):>6} s"
            f"{at('stored', of='mean'):>7} MB{at('load', form='.3f'):>7} s"
            f"{at('rate, every 10'):>10}{at('rate, every 1'):>9}"
        )
    return "\n".join(lines)


def _memory_table(size: int, found: dict[str, dict[str, float]]) -> str:
    lines = [f"\npeak memory beyond the live state, {size} MB of it"]
    for name, peaks in found.items():
        lines.append(f"  {name:20} saving {peaks['save']:7.0f} MB   restoring {peaks['load']:7.0f} MB")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
