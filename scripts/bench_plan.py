"""The planner on a job that nobody here can run: a trillion parameters with AdamW in fp32 on 1,024 ranks, 8 lost.

Documents are made up in memory as a part would be read from a store: 12 TB of state in rows of matrices, FSDP-like,
about 180,000 chunks of 512 KiB in the lost ranks' parts, some of them with a delta, packs of 32 MiB in which some
blobs are no longer needed. Loads no torch, so that the peak memory is the planner's.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ckpt.format.manifest import FORMAT, BlobRow, ChunkRow, Part, ShardRow
from recovery.estimate import Bandwidths, Estimate, estimate
from recovery.holdings import Chunks, Holding
from recovery.planner import Fetch, Plan, Stored, plan
from recovery.tables import table

RANKS, LOST = 1024, tuple(range(512, 520))
WIDTH, LAYERS = 32_768, 78
MATRICES = {"qkv": 3 * WIDTH, "out": WIDTH, "up": 4 * WIDTH, "down": 4 * WIDTH}
"""Rows of each, of WIDTH columns: 12 WIDTH² parameters a layer, 1.005 trillion in all."""
CHUNK, PACK = 512 * 1024, 32 * 1024 * 1024


@dataclass(frozen=True)
class Planned:
    """What was measured (seconds, bytes), the plan, and for each store: its estimate, and seconds of a full reload."""

    chunks: int
    state: int
    lost_blobs: int
    seconds: float
    peak: int
    plan: Plan
    times: tuple[tuple[Estimate, float], ...]


def made_part(rank: int, seed: int) -> Part:
    """What one rank would have stored: its rows of every matrix and of both moments."""
    rng = np.random.default_rng(seed)
    packs: list[int] = [0]

    def blob(size: int, kind: int) -> BlobRow:
        if packs[-1] + size > PACK:
            packs.append(0)
        if rng.random() < 0.05:  # one that a later save replaced
            packs[-1] += int(rng.integers(30_000, 400_000))
        start = packs[-1]
        packs[-1] += size
        return BlobRow(len(packs) - 1, start, packs[-1], kind, f"{int(rng.integers(1 << 62)):016x}")

    def chunks(count: int) -> Iterator[ChunkRow]:
        for size in rng.integers(int(0.72 * CHUNK), int(0.93 * CHUNK), count).tolist():
            blobs = [blob(size, 2)]
            if rng.random() < 0.1:
                blobs.append(blob(size // 4, 3))
            yield ChunkRow(f"{int(rng.integers(1 << 62)):032x}", tuple(blobs))

    shards = []
    for layer in range(LAYERS):
        for name, rows in MATRICES.items():
            mine = rows // RANKS
            for cls in ("parameter", "slot:exp_avg", "slot:exp_avg_sq"):
                box = ((rank * mine, 0), (mine, WIDTH))
                found = tuple(chunks(mine * WIDTH * 4 // CHUNK))
                shards.append(ShardRow(f"{cls}.{layer}.{name}", cls, "float32", (rows, WIDTH), box, chunks=found))
    return Part(
        FORMAT, "000001-00000000", 1000, RANKS, rank, 0, "0" * 32, None, CHUNK, None, None, {},
        tuple((f"packs/{rank:05d}-{n:03d}", size) for n, size in enumerate(packs)), (), tuple(shards), {}, {}, {},
    )  # fmt: skip


def measure(doors: Sequence[Bandwidths]) -> Planned:
    parts = {rank: made_part(rank, rank) for rank in LOST}
    began = time.perf_counter()
    tables = {rank: table(part) for rank, part in parts.items()}
    each = tables[LOST[0]].nbytes
    stored = Stored([each] * RANKS, tables)
    nodes = [rank // 8 for rank in range(RANKS)]
    wants = {rank: (Chunks(rank),) for rank in range(RANKS)}
    holdings = [Holding(rank, (Chunks(rank),)) for rank in range(RANKS) if rank not in LOST]
    made = plan(nodes, wants, stored, holdings)
    seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    # A full reload: what the lost ranks read, read by all; each as fast, until the store's own door is too narrow.
    lost = plan(nodes, {rank: wants[rank] for rank in LOST}, stored, ())
    everything = lost.total(Fetch) * RANKS // len(LOST)
    times = []
    for given in doors:
        door = 0.0 if given.store_total is None else everything / given.store_total
        times.append((estimate(made, given), max(estimate(lost, given).seconds, door)))
    count = sum(columns.count for columns in tables.values())
    lost_blobs = sum(columns.blob_bytes for columns in tables.values())
    return Planned(count, each * RANKS, lost_blobs, seconds, peak, made, tuple(times))
