"""What a key costs: CPU seconds and bytes of a full save, a delta and a load, over those without one, interleaved.

python -m scripts.bench_key [--mb 64] [--rounds 3]
"""

from __future__ import annotations

import argparse
import resource
import secrets
import statistics
import tempfile
from pathlib import Path

import torch

import ckpt


def cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def once(folder: Path, key: Path | None, dtype: torch.dtype, nbytes: int, seed: int) -> dict[str, float]:
    """CPU seconds of each, and bytes on the store. In the delta one element of fifty has changed."""
    chance = torch.Generator().manual_seed(seed)
    weight = torch.randn(nbytes // dtype.itemsize, generator=chance).to(dtype)
    saver = ckpt.Checkpointer(folder, {"weight": weight}, options=ckpt.Options(key=key), mirror="off")
    marks = [cpu()]
    saver.save(1).wait()
    marks.append(cpu())
    weight[torch.randint(0, len(weight), (len(weight) // 50,), generator=chance)] *= 1.01
    marks.append(cpu())
    saver.save(2).wait()
    marks.append(cpu())
    saver.close()
    marks.append(cpu())
    ckpt.load(folder, key=key)
    marks.append(cpu())
    stored = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return {
        "save": marks[1] - marks[0],
        "delta": marks[3] - marks[2],
        "load": marks[5] - marks[4],
        "stored": float(stored),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    for dtype in (torch.float32, torch.bfloat16):
        with tempfile.TemporaryDirectory(prefix="ckpt-bench-key-") as folder:
            key = Path(folder, "key")
            key.write_bytes(secrets.token_bytes(32))
            found: dict[bool, list[dict[str, float]]] = {False: [], True: []}
            for n in range(asked.rounds + 1):
                for given in (False, True):
                    where = Path(folder, f"{n}-{given}")
                    found[given].append(once(where, key if given else None, dtype, asked.mb << 20, n))
        for what in ("save", "delta", "load", "stored"):
            without, with_ = (statistics.median(one[what] for one in found[given][1:]) for given in (False, True))
            unit = "MB" if what == "stored" else "s of CPU"
            scale = 1e-6 if what == "stored" else 1.0
            told = f"{without * scale:.3f} {unit}, with a key {with_ * scale:.3f}: {with_ / without:.3f} times"
            print(f"{str(dtype).removeprefix('torch.')} {what}: {told}")


if __name__ == "__main__":
    main()
