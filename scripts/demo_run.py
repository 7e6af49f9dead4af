"""Runs the demo: an unhurt job, a job that is killed in the middle of a save and started again, and the comparison.

Exit code 0 only if the two end bit-identical: parameters, moments, and every loss, those before the kill too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RANKS = 3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="work here, and leave everything; otherwise a temporary folder")
    args = parser.parse_args()
    folder = args.folder or Path(tempfile.mkdtemp(prefix="ckpt-demo-"))
    try:
        return demo(folder, args.steps, args.every)
    finally:
        if args.folder is None:
            shutil.rmtree(folder, ignore_errors=True)


def demo(folder: Path, steps: int, every: int) -> int:
    began = time.monotonic()
    store, hurt, unhurt = folder / "store", folder / "hurt", folder / "unhurt"

    say(f"1. The run that is never hurt: {RANKS} ranks, FSDP2, {steps} steps, nothing saved")
    with job(unhurt, steps, every, None) as process:
        finish(process, unhurt)

    say(f"2. The same run, saved every {every} steps, killed with SIGKILL in the middle of a save")
    step = kill_in_a_save(store, hurt, steps, every)
    say(f"   killed all ranks while step {step} was being stored; committed so far: {committed(store)}")

    say("3. Started again")
    with job(hurt, steps, every, store) as process:
        finish(process, hurt)

    say("4. What was saved since the restart (all ranks together)")
    show_saves(hurt)
    say("5. ckpt list")
    subprocess.run([sys.executable, "-m", "ckpt.cli", "list", str(store)], check=True)
    say("6. The two runs, bit by bit")
    same = compare(hurt, unhurt, steps, RANKS)
    say(f"   {'BIT-IDENTICAL' if same else 'DIFFERENT'}; {time.monotonic() - began:.0f} s so far")
    same &= elastic(folder, steps, every)
    say(f"   {time.monotonic() - began:.0f} s in all")
    return 0 if same else 1


def elastic(folder: Path, steps: int, every: int) -> bool:
    """Two agents with two ranks each; one is destroyed with its mirrors, and replaced; then three ranks come back."""
    store, notes, unhurt = folder / "elastic-store", folder / "elastic", folder / "elastic-unhurt"
    mirrors = {name: folder / f"mirrors-{name}" for name in "ABC"}
    say(f"7. Two nodes of two ranks, saved every {every} steps; first the run that is never hurt")
    with job(unhurt, steps, every, None, ranks=4) as process:
        finish(process, unhurt)
    say("8. The same run on two agents; one node is destroyed in the middle, its mirrors with it, and replaced")
    port = free_port()
    with (
        agent(port, mirrors["A"], notes, steps, every, store, host=True) as first,
        agent(port, mirrors["B"], notes, steps, every, store) as second,
    ):
        while first.poll() is None and len(committed(store)) < 3:
            time.sleep(0.01)
        kill_all(second)
        shutil.rmtree(mirrors["B"])
        lost_step = max(committed(store))
        say(f"   node B is gone; the newest snapshot is step {lost_step}; node C joins")
        with agent(port, mirrors["C"], notes, steps, every, store) as third:
            finish(first, notes)
            finish(third, notes)
    restores = [json.loads(line) for line in (notes / "restores.jsonl").read_text().splitlines()]
    # torchrun may start everybody once more when a rank is slow to leave after its last step: nothing was lost then.
    restores = [r for r in restores if r["step"] < steps]
    show_restores(restores, mirrors)
    survivors = [r for r in restores if r["node"] == str(mirrors["A"])]
    quiet = bool(survivors) and not any(r["bytes"].get("store", 0) for r in survivors)
    say(f"   pack bytes that survivors read from the store: {sum(r['bytes'].get('store', 0) for r in survivors)}")
    same = compare(notes, unhurt, steps, 4)
    say(f"   {'BIT-IDENTICAL' if same else 'DIFFERENT'}")

    say("9. Once more, coming back with three ranks")
    with job(notes, steps + every, every, store, ranks=3) as process:
        finish(process, notes)
    before = json.loads((notes / "whole-at-end-4-0.json").read_text())
    after = [json.loads((notes / f"whole-at-start-3-{rank}.json").read_text()) for rank in range(3)]
    resized = all(found == before for found in after)
    say(f"   {len(before)} tensors restored on three ranks: {'BIT-IDENTICAL' if resized else 'DIFFERENT'}")
    return quiet and same and resized


def show_restores(restores: list[dict[str, Any]], mirrors: dict[str, Path]) -> None:
    names = {str(path): name for name, path in mirrors.items()}
    sources = ("own mirror", "node", "peers", "store", "documents")
    print("   " + "".join(f"{word:>12}" for word in ("node", "rank", "step", *sources, "seconds")))
    for r in restores:
        cells = [names.get(r["node"], "-"), r["rank"], r["step"], *(f"{r['bytes'].get(s, 0):,}" for s in sources)]
        print("   " + "".join(f"{cell:>12}" for cell in cells) + f"{r['seconds']:>12.2f}")


@contextlib.contextmanager
def job(
    notes: Path, steps: int, every: int, store: Path | None, *, ranks: int = RANKS
) -> Iterator[subprocess.Popen[bytes]]:
    """torchrun with all its ranks on one node; none of it outlives the block."""
    torchrun = [
        *("--nnodes", "1", "--nproc-per-node", str(ranks), "--rdzv-endpoint", f"127.0.0.1:{free_port()}"),
        # As on a cluster: what comes to an untimely end is started again, finds its last step, and ends.
        *("--max-restarts", "2"),
    ]
    mirrors = {"CKPT_MIRROR_DIR": f"{notes}-mirrors"}
    with started(torchrun, notes, steps, every, store, mirrors) as process:
        yield process


@contextlib.contextmanager
def agent(
    port: int, mirrors: Path, notes: Path, steps: int, every: int, store: Path, *, host: bool = False
) -> Iterator[subprocess.Popen[bytes]]:
    """One of two nodes: an agent with two ranks and a mirror folder of its own."""
    torchrun = [
        *("--nnodes", "2", "--nproc-per-node", "2", "--max-restarts", "5"),
        # torchrun deals ranks out in the order of addresses: with these, the survivor keeps its ranks. (Elsewhere a
        # replacement may take lower ones; then the survivors' shards travel to it, and the store serves as little.)
        *("--local-addr", "127.0.0.1" if host else "127.0.0.2"),
        *("--rdzv-endpoint", f"127.0.0.1:{port}"),
        # The host of the rendezvous is the one node that must not be lost: the other one is.
        *("--rdzv-conf", f"is_host={host},last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"),
    ]
    with started(torchrun, notes, steps, every, store, {"CKPT_MIRROR_DIR": str(mirrors)}) as process:
        yield process


@contextlib.contextmanager
def started(
    torchrun: list[str], notes: Path, steps: int, every: int, store: Path | None, extra: dict[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--rdzv-backend", "c10d", "--rdzv-id", "demo", *torchrun),
        *("-m", "scripts.demo_train", "--notes", str(notes), "--steps", str(steps), "--every", str(every)),
        *(["--url", str(store)] if store is not None else []),
    ]
    # The second: without it a replacement of a lost agent never gets to join (torch 2.13).
    settings = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **extra}
    notes.mkdir(parents=True, exist_ok=True)
    # torchrun and the ranks it loses say a lot on stderr; it is shown only where it matters.
    with (notes / "stderr.log").open("ab") as log:
        process = subprocess.Popen(command, env={**os.environ, **settings}, stderr=log, start_new_session=True)
    try:
        yield process
    finally:
        kill_all(process)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


def kill_all(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL for torchrun and every rank: torchrun puts them into sessions of their own, so follow the tree."""
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        tree = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        for member in tree:  # frozen first, so that nothing reacts to the death of another
            with contextlib.suppress(psutil.NoSuchProcess):
                member.send_signal(signal.SIGSTOP)
        for member in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
    process.wait()


def finish(process: subprocess.Popen[bytes], notes: Path) -> None:
    if process.wait() != 0:
        print((notes / "stderr.log").read_text(errors="replace")[-8000:], file=sys.stderr)
        raise SystemExit(f"the job ended with exit code {process.returncode}")


def kill_in_a_save(store: Path, notes: Path, steps: int, every: int) -> int:
    """Start the job and kill it while a step past a third of the run is half stored; returns that step.

    Looks at the store alone: packs are there, the snapshot is not. A save is short, so the commit may win the race;
    then the job simply goes on from there and is killed in a later save.
    """
    while True:
        with job(notes, steps, every, store) as process:
            while process.poll() is None:
                half = [step for step in half_stored(store) if step >= steps // 3]
                if half:
                    kill_all(process)
                    break
                time.sleep(0.0005)
            else:
                raise SystemExit("the job ended before it could be killed in a save")
        if half[0] not in committed(store):
            return half[0]
        say(f"   the commit of step {half[0]} was faster than the kill; once more")


def half_stored(store: Path) -> list[int]:
    """Steps of the newest run that have packs and no snapshot."""
    runs = sorted(path.name for path in (store / "packs").glob("*"))
    if not runs:
        return []
    steps = sorted(int(path.name) for path in (store / "packs" / runs[-1]).glob("*"))
    done = {int(path.stem.rsplit("-", 1)[1]) for path in (store / "snapshots").glob(f"{runs[-1]}-*.json")}
    return [step for step in steps[-1:] if step not in done]


def committed(store: Path) -> list[int]:
    return sorted({int(path.stem.rsplit("-", 1)[1]) for path in (store / "snapshots").glob("*.json")})


def show_saves(notes: Path) -> None:
    rows: dict[int, list[float]] = {}
    for path in notes.glob("saves-*.jsonl"):
        for line in path.read_text().splitlines():
            step, captured, changed, stored, blocked = json.loads(line)
            row = rows.setdefault(step, [0, 0, 0, 0.0])
            row[:3] = [row[0] + captured, row[1] + changed, row[2] + stored]
            row[3] = max(row[3], blocked)
    print(f"{'step':>6} {'captured':>12} {'changed':>12} {'stored':>12} {'blocked':>10}")
    for step, (captured, changed, stored, blocked) in sorted(rows.items()):
        print(f"{step:>6} {captured:>12,.0f} {changed:>12,.0f} {stored:>12,.0f} {blocked * 1000:>7.1f} ms")


def compare(hurt: Path, unhurt: Path, steps: int, ranks: int) -> bool:
    same = True
    for rank in range(ranks):
        ours, theirs = (json.loads((notes / f"final-{rank}.json").read_text()) for notes in (hurt, unhurt))
        wrong = sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))
        losses, reference = (losses_of(notes, rank) for notes in (hurt, unhurt))
        off = [step for step in range(steps) if losses.get(step, set()) != reference.get(step, {"missing"})]
        print(f"   rank {rank}: {len(theirs)} tensors, {len(wrong)} differ; {steps} losses, {len(off)} differ")
        same &= not wrong and not off
    return same


def losses_of(notes: Path, rank: int) -> dict[int, set[str]]:
    """Step → every loss noted for it; a step done again after the kill must give the same bits again."""
    found: dict[int, set[str]] = {}
    for line in (notes / f"losses-{rank}.jsonl").read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):  # a line cut by the kill
            step, loss = json.loads(line)
            found.setdefault(step, set()).add(loss)
    return found


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
