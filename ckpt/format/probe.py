"""Which kind suits a chunk: a look at a sample, corrected by what came of earlier estimates.

Chosen per chunk, never by dtype alone: moments whose past tells nothing about them come out as `planes`, weights that
barely moved as `sparse`, masks and constants as `zstd`. A look costs about 60 to 100 µs at any chunk size.

An estimate is the entropy of byte planes of a sample, plus what zstd's whole-bit codes add to it. Estimated and actual
sizes drift apart in ways that similar leaves share, so each (class, dtype, kind) keeps a moving ratio of the two.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass

import numpy as np
import zstandard
from numpy.typing import NDArray

from ckpt.format.codec import LEVEL, orders
from ckpt.format.kinds import PLANES, RAW, SPARSE, SUB, XOR, ZSTD
from ckpt.format.shards import DType
from ckpt.format.words import NOISE, Bytes, Words, difference, entropies, histograms, sample, words_of

OVERHEAD = 12
FRAME, SYMBOL = 15, 0.5
"""Bytes of framing per blob, and of zstd's per plane: its headers, and a code table that grows with the alphabet. Small
chunks must not be split into planes for nothing."""

MEMORY = 0.1
"""Weight of the newest ratio in the moving one: the last ten chunks of a kind count."""

FULL_WEIGHT = 128 << 10
"""Chunks shorter than this weigh less: what a norm's 256 bytes came to says little about matrices."""

LIMITS = (0.25, 4.0)
"""What a correction is held within: one freak chunk must not shut a kind out for ever."""

LOOKS = 8
"""Chunks of a class of which one is looked at for a delta, while the class's deltas are far too large to be used."""

MARGIN = 1.1
"""By what factor that is: deltas near the bound are always looked at."""

DENSE = 0.75
"""Above this share of changed words `sparse` is not looked at: gaps and values cost more than plain differences."""

# What zstd's literals cost above the entropy of a plane: a Huffman code has at least one bit, and runs of zeros become
# matches of their own cost. Measured at level 1 on rounded normal differences and on exponents: bits → more bits.
_BITS = np.array([0.0, 0.1, 0.5, 0.95, 1.25, 1.65, 2.1, 2.7, 3.4, 4.0, NOISE])
_MORE = np.array([0.0, 0.11, 0.5, 0.72, 0.7, 0.64, 0.56, 0.38, 0.1, 0.05, 0.05])


@dataclass(frozen=True, slots=True)
class Choice:
    """The best kind without a base and the best with one, and the bytes each is expected to take. `delta_kind` is
    None (and `delta_size` infinite) where there is no base."""

    keyframe_kind: int
    keyframe_size: float
    delta_kind: int | None
    delta_size: float


@dataclass(slots=True)
class _Deltas:
    """What deltas of one class and dtype come to, per raw byte: a moving mean of the best estimates of densely changed
    chunks. `skipped` counts the chunks since the last look."""

    mean: float
    skipped: int = 0


class Learned:
    """Chooses kinds for one writer, and learns from what they came to. Safe to use from its encode workers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ratios: dict[tuple[str, str, int], float] = {}
        self._deltas: dict[tuple[str, str], _Deltas] = {}
        # The estimates of a thread's last choice: `learn` compares with them. Kept per thread rather than in Choice
        # because a worker chooses, encodes and learns one chunk at a time.
        self._last = threading.local()

    def choose(
        self, new: Bytes, base: Bytes | None, dtype: DType, cls: str, *, most: float = float("inf")
    ) -> Choice:  # fmt: skip
        """The kinds for a chunk of a leaf of class `cls`; `base` (of equal length) is None where no delta may be
        used, `most` the bytes from which on none is of use. Nothing is encoded, and neither array is read in full."""
        raw = len(new)
        words = sample(words_of(new, dtype.word))
        keyframes = _keyframe_sizes(words, raw, self._zstd())
        deltas: dict[int, float] = {}
        if base is not None:
            deltas = self._look_at_delta(words, sample(words_of(base, dtype.word)), raw, dtype, cls, most)
        self._last.cls, self._last.dtype, self._last.sizes = cls, dtype.name, {**keyframes, **deltas}
        with self._lock:
            keyframe = self._best(keyframes, cls, dtype.name)
            delta = self._best(deltas, cls, dtype.name)
        kind, size = keyframe if keyframe is not None else (RAW, float(raw))
        if size >= raw:
            kind, size = RAW, float(raw)
        return Choice(kind, size, *(delta if delta is not None else (None, float("inf"))))

    def _look_at_delta(
        self, words: Words, old: Words, raw: int, dtype: DType, cls: str, most: float
    ) -> dict[int, float]:  # fmt: skip
        """Estimates of a delta; none where the class has shown that it would be too large (all of dense fp32 training,
        at the default bound on reads): half of a look is saved, and looks are a fifth of encoding."""
        if np.count_nonzero(words != old) <= DENSE * len(words):
            return _delta_sizes(words, old, raw, dtype)
        seen = self._deltas.get((cls, dtype.name))
        if seen is not None and seen.mean * raw > MARGIN * most and seen.skipped < LOOKS - 1:
            seen.skipped += 1  # two threads may count one chunk as one: it need not be exact
            return {}
        sizes = _delta_sizes(words, old, raw, dtype)
        best = min(sizes.values()) / raw
        mean = best if seen is None else seen.mean + MEMORY * (best - seen.mean)
        self._deltas[cls, dtype.name] = _Deltas(mean)
        return sizes

    def learn(self, cls: str, dtype: DType, kind: int, raw: int, stored: int) -> None:
        """A chunk of `raw` bytes came to `stored` bytes. Called on the thread that chose for it, before it chooses for
        the next; a call that belongs to no such choice teaches nothing."""
        last = self._last
        estimate = getattr(last, "sizes", {}).get(kind)
        if not estimate or not raw or last.cls != cls or last.dtype != dtype.name:
            return
        low, high = LIMITS
        ratio = min(max(stored / estimate, low), high)
        key = (cls, dtype.name, kind)
        weight = MEMORY * min(1.0, raw / FULL_WEIGHT)
        with self._lock:
            old = self._ratios.get(key, 1.0)
            self._ratios[key] = old + weight * (ratio - old)

    def _best(self, sizes: dict[int, float], cls: str, dtype: str) -> tuple[int, float] | None:
        corrected = [(size * self._ratios.get((cls, dtype, kind), 1.0), kind) for kind, size in sizes.items()]
        if not corrected:
            return None
        size, kind = min(corrected)
        return kind, size

    def _zstd(self) -> zstandard.ZstdCompressor:
        found: zstandard.ZstdCompressor | None = getattr(self._last, "zstd", None)
        if found is None:
            found = self._last.zstd = zstandard.ZstdCompressor(level=LEVEL, write_content_size=False)
        return found


def _keyframe_sizes(words: Words, raw: int, zstd: zstandard.ZstdCompressor) -> dict[int, float]:
    """Estimated bytes per kind that needs no base; `raw` itself is not among them (it is never in doubt)."""
    if not len(words):
        return {}
    if words[0] == words[-1] and not np.any(words != words[0]):
        return {ZSTD: float(min(raw, OVERHEAD))}  # constant, as far as seen
    # zstd alone wins where bytes repeat at a distance (rows, masks, counters), which no histogram shows.
    whole = len(zstd.compress(words.data)) * (raw / words.nbytes)
    # For words of one byte both are the same stream, but for the framing.
    return {ZSTD: whole} if words.itemsize == 1 else {PLANES: _planes_size(histograms(words), raw), ZSTD: whole}


def _delta_sizes(words: Words, base: Words, raw: int, dtype: DType) -> dict[int, float]:
    """Estimated bytes per kind that needs a base."""
    if not len(words):
        return {SPARSE: float(raw + OVERHEAD)}
    delta, spare = np.empty_like(words), np.empty_like(words)
    difference(words, base, floats=orders(dtype), out=delta, spare=spare)
    n, changed, in_chunk = len(words), int(np.count_nonzero(delta)), raw / words.itemsize
    if not changed:
        # The chunk did change, or nobody would ask: rarely, or in a few rows. Both are what `sparse` is for.
        return {SPARSE: OVERHEAD + _gap_bits(0.5 / n) * in_chunk / 8}
    counts = histograms(delta)
    sizes = {SUB: _planes_size(counts, raw)}
    if not orders(dtype):
        # On floats xor never won by more than a percent (FACTS.md §1), so it is not looked at there.
        np.bitwise_xor(words, base, out=delta)
        sizes[XOR] = _planes_size(histograms(delta), raw)
    if changed <= DENSE * n:
        share = changed / n
        # Unchanged words are zeros in every plane; without them the histogram is that of the values.
        counts[:, 0] -= n - changed
        # The two smallest differences, ±1, pack into one bit; else planes.
        packs = counts[1:, 1:].sum() == 0 and counts[0, 3:].sum() == 0
        values = share * in_chunk / 8 if packs else _planes_size(counts, share * raw)
        sizes[SPARSE] = _gap_bits(share) * in_chunk / 8 + values + OVERHEAD
    return sizes


def _gap_bits(share: float) -> float:
    """Bits per word for the positions of a share of changed words, 0 < share < 1."""
    return -1.03 * (share * math.log2(share) + (1 - share) * math.log2(1 - share))


def _planes_size(counts: NDArray[np.int64], raw: float) -> float:
    """Bytes of planes with these `histograms` in a chunk of `raw` bytes: noise raw, the rest with what zstd adds."""
    bits, plane = entropies(counts), raw / len(counts)
    table = FRAME + SYMBOL * np.count_nonzero(counts, axis=1)
    coded = plane * (bits + np.interp(bits, _BITS, _MORE)) / 8 + table
    return float(np.where(bits > NOISE, plane, np.minimum(coded, plane)).sum() + OVERHEAD)
