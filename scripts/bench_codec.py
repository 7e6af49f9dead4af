"""How far real training state shrinks without loss, by the codec alone and in saves. Exits 1 below a bar.

    python scripts/bench_codec.py                        # 600 steps of a 4.9M-parameter GPT: some minutes on one core
    python scripts/bench_codec.py --params small --steps 60

The bars are those of full size: deltas of fp32 AdamW state ten steps apart 1.30, keyframes 1.19, and a pack of 16M
bf16 elements of which 2 % moved by one step 85 times less than raw. Speeds are of one thread. Saves are made through a
`Checkpointer` every ten steps of the same training, at the default amplification, where keyframes are chosen, and at 3,
where saves average at least 1.26.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import ckpt
from ckpt.format.codec import KINDS, NEEDS_BASE, SPARSE, Codec
from ckpt.format.manifest import chunk_digest, digest64
from ckpt.format.pack import PackBuilder
from ckpt.format.probe import Learned
from ckpt.format.shards import DEFAULT_CHUNK, DTYPES
from scripts.gpt import GPT, GPTConfig, adamw, random_batch, stdlib_bytes
from storage_backends.base import Buffer
from storage_backends.memory import MemoryStore

Bytes = NDArray[np.uint8]
State = dict[tuple[str, str], Bytes]
"""(leaf class, name) → the raw bytes of an fp32 tensor."""

CONFIGS = {
    "full": GPTConfig(),
    "small": GPTConfig(layers=4, heads=4, width=128, context=64, dropout=0.1),  # the demo's
}
BATCH = 8
BARS = {"deltas": 1.30, "keyframes": 1.19, "bf16 2 % pack": 85.0, "saves at 3": 1.26}

Watch = Callable[[int, torch.nn.Module, torch.optim.Optimizer], None]


def trained(config: GPTConfig, steps: int, apart: int, watch: Watch | None = None) -> Iterator[State]:
    """The state `apart` steps before the end of a training of `steps` steps, and at its end. `watch` is called with
    the step, the model and its optimizer after every `apart`-th."""
    torch.manual_seed(1)
    model = GPT(config)
    optimizer = adamw(model, lr=3e-4)
    text = torch.frombuffer(bytearray(stdlib_bytes()), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(2)
    for step in range(1, steps + 1):
        _, loss = model(*random_batch(text, config.context, BATCH, generator))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0:
            print(f"  step {step}: loss {loss.item():.3f}", flush=True)
        if watch is not None and step % apart == 0:
            watch(step, model, optimizer)
        if step in (steps - apart, steps):
            yield state_of(model, optimizer)


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """Copies of all parameters and moments."""
    state: State = {}
    for name, p in model.named_parameters():
        tensors = {"parameter": p.detach(), **{k: v for k, v in optimizer.state[p].items() if k != "step"}}
        for cls, tensor in tensors.items():
            state[cls, name] = tensor.numpy().reshape(-1).view(np.uint8).copy()
    return state


class Forgetful(MemoryStore):
    """Keeps documents and forgets packs: what saves store is measured here, not read."""

    def put(self, key: str, data: Buffer) -> None:
        super().put(key, b"forgotten" if key.startswith("packs/") else data)


class Saves:
    """Saves of a training in the making, one line of them per amplification. A context manager; call it with the step,
    the model and the optimizer."""

    def __init__(self, *amplifications: float) -> None:
        self.reports: dict[float, list[ckpt.Report]] = {amplification: [] for amplification in amplifications}
        self._savers: dict[float, ckpt.Checkpointer] = {}
        self._stack = ExitStack()

    def __call__(self, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for amplification, reports in self.reports.items():
            if amplification not in self._savers:
                state: dict[str, object] = {"model": model, "optimizer": optimizer}
                options = ckpt.Options(restore_amplification=amplification)
                saver = ckpt.Checkpointer(Forgetful(), state, options=options)
                self._savers[amplification] = self._stack.enter_context(saver)
            ticket = self._savers[amplification].save(step)
            ticket.wait()
            assert ticket.report is not None
            reports.append(ticket.report)

    def __enter__(self) -> Saves:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def ratio(self, amplification: float) -> float:
        """Raw bytes over stored ones, of all saves but the first, which is full whatever the amplification."""
        later = self.reports[amplification][1:]
        return sum(report.captured for report in later) / sum(report.stored for report in later)

    def deltas(self, amplification: float) -> float:
        """The share of deltas in what these saves stored."""
        later = self.reports[amplification][1:]
        names = {KINDS[kind] for kind in NEEDS_BASE}
        deltas = sum(size for report in later for name, size in report.kinds.items() if name in names)
        return deltas / sum(report.stored for report in later)


@dataclass
class Tally:
    """Bytes and seconds of one class."""

    raw: int = 0
    keyframes: int = 0
    deltas: int = 0
    chosen: int = 0
    kinds: dict[str, int] = field(default_factory=dict)
    encode_seconds: float = 0.0
    decode_seconds: float = 0.0
    probe_seconds: float = 0.0

    @property
    def better(self) -> int:
        """Bytes if the class takes deltas or keyframes throughout, whichever is less."""
        return min(self.keyframes, self.deltas)


def measure(before: State, after: State) -> dict[str, Tally]:
    """Encode every chunk of `after` as keyframe and as delta, by the kinds that the probe chooses; check that each
    decodes to the chunk; per class."""
    codec, learned, dtype = Codec(), Learned(), DTYPES["float32"]
    tallies: dict[str, Tally] = {}
    clock = time.perf_counter
    for (cls, name), whole in after.items():
        tally = tallies.setdefault(cls, Tally())
        for at in range(0, len(whole), DEFAULT_CHUNK):
            new, base = whole[at : at + DEFAULT_CHUNK], before[cls, name][at : at + DEFAULT_CHUNK]
            out = np.empty_like(new)
            started = clock()
            choice = learned.choose(new, base, dtype, cls)
            tally.probe_seconds += clock() - started
            sizes: dict[int, int] = {}
            delta = choice.delta_kind if choice.delta_kind is not None else choice.keyframe_kind
            taken = delta if choice.delta_size < choice.keyframe_size else choice.keyframe_kind
            for kind in dict.fromkeys((choice.keyframe_kind, delta)):
                t0 = clock()
                blob = codec.encode(kind, new, base, dtype)
                t1 = clock()
                codec.decode(kind, blob, base, out, dtype)
                t2 = clock()
                if out.tobytes() != new.tobytes():
                    raise AssertionError(f"{name} at byte {at}: {KINDS[kind]} did not come back")
                sizes[kind] = len(blob)
                learned.learn(cls, dtype, kind, len(new), len(blob))
                if kind == taken:
                    tally.encode_seconds += t1 - t0
                    tally.decode_seconds += t2 - t1
            tally.raw += len(new)
            tally.keyframes += sizes[choice.keyframe_kind]
            tally.deltas += sizes[delta]
            tally.chosen += sizes[taken]
            tally.kinds[KINDS[taken]] = tally.kinds.get(KINDS[taken], 0) + 1
    return tallies


def ratios(tallies: dict[str, Tally]) -> dict[str, float]:
    """Raw bytes over encoded ones, all classes together: `deltas` takes the better of both per class, `chosen` what the
    probe chose per chunk."""
    raw = sum(t.raw for t in tallies.values())
    return {
        "deltas": raw / sum(t.better for t in tallies.values()),
        "keyframes": raw / sum(t.keyframes for t in tallies.values()),
        "chosen": raw / sum(t.chosen for t in tallies.values()),
    }


def bf16_pack(elements: int, share: float) -> tuple[float, float]:
    """(raw bytes over pack bytes, over blob bytes) of one bf16 leaf of which a share moved by one step up or down."""
    rng = np.random.default_rng(0)
    base = ((rng.standard_normal(elements, dtype=np.float32) * np.float32(0.02)).view("<u4") >> 16).astype("<u2")
    hit = np.flatnonzero(rng.random(elements, dtype=np.float32) < share)
    new = base.copy()
    new[hit] += rng.choice(np.array([1, 0xFFFF], dtype="<u2"), len(hit))
    codec, dtype, pack, blobs = Codec(), DTYPES["bfloat16"], PackBuilder(), 0
    new8, base8 = new.view(np.uint8), base.view(np.uint8)
    for at in range(0, len(new8), DEFAULT_CHUNK):
        piece, below = new8[at : at + DEFAULT_CHUNK], base8[at : at + DEFAULT_CHUNK]
        blob = codec.encode(SPARSE, piece, below, dtype)
        blobs += len(blob)
        pack.add(
            blob,
            kind=SPARSE,
            digest=digest64(blob),
            chunk_digest=chunk_digest(dtype.name, piece),
            dtype=dtype.name,
            base_digest=chunk_digest(dtype.name, below),
        )
    return len(new8) / len(pack.finish().data), len(new8) / blobs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600, help="training steps (default 600)")
    parser.add_argument("--apart", type=int, default=10, help="steps between the two states (default 10)")
    parser.add_argument("--params", choices=CONFIGS, default="full", help="size of the model (default full: 4.9M)")
    options = parser.parse_args()
    if not 0 < options.apart < options.steps:
        parser.error("--apart must be at least 1 and below --steps")
    torch.set_num_threads(1)

    started = time.perf_counter()
    with Saves(1.5, 3.0) as saves:
        before, after = trained(CONFIGS[options.params], options.steps, options.apart, saves)
    tallies = measure(before, after)
    print(f"{options.steps} steps in {time.perf_counter() - started:.0f} s; fp32, {options.apart} steps apart")
    print(f"{'class':<12} {'MB':>7} {'keyframes':>9} {'deltas':>7} {'chosen':>7}  {'encode':>7} {'decode':>7}  kinds")
    for cls, t in tallies.items():
        print(
            f"{cls:<12} {t.raw / 1e6:7.1f} {t.raw / t.keyframes:9.3f} {t.raw / t.deltas:7.3f} {t.raw / t.chosen:7.3f}  "
            f"{t.raw / t.encode_seconds / 1e6:7.0f} {t.raw / t.decode_seconds / 1e6:7.0f}  {t.kinds}"
        )
    all_raw = sum(t.raw for t in tallies.values())
    chunks = sum(sum(t.kinds.values()) for t in tallies.values())
    print(
        f"MB/s of one thread: encode {all_raw / sum(t.encode_seconds for t in tallies.values()) / 1e6:.0f}, "
        f"decode {all_raw / sum(t.decode_seconds for t in tallies.values()) / 1e6:.0f}; "
        f"probe {sum(t.probe_seconds for t in tallies.values()) / chunks * 1e6:.0f} µs per chunk"
    )
    found = ratios(tallies)
    found["bf16 2 % pack"], found["bf16 2 % blobs"] = bf16_pack(16_000_000, 0.02)
    for amplification, reports in saves.reports.items():
        found[f"saves at {amplification:g}"] = saves.ratio(amplification)
        print(
            f"saves at restore_amplification={amplification:g}: {len(reports)} of {reports[-1].captured / 1e6:.0f} MB, "
            f"the later ones store {saves.ratio(amplification):.3f} times less, "
            f"{100 * saves.deltas(amplification):.0f} % of it deltas"
        )
    missed = False
    for name, value in found.items():
        bar = BARS.get(name)
        low = bar is not None and value < bar
        missed |= low
        print(f"{name:<16} {value:7.3f}{f'   bar {bar}' if bar else ''}{'   BELOW' if low else ''}")
    return 1 if missed and options.params == "full" else 0


if __name__ == "__main__":
    raise SystemExit(main())
