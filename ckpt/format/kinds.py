"""The numbers of the codec kinds: for ever, and never reused. codec.py says what each is.

By themselves, because `ckpt list` names them without loading numpy.
"""

from __future__ import annotations

RAW, ZSTD, PLANES, SUB, XOR, SPARSE = range(6)

KINDS: dict[int, str] = {RAW: "raw", ZSTD: "zstd", PLANES: "planes", SUB: "sub", XOR: "xor", SPARSE: "sparse"}

NEEDS_BASE = frozenset({SUB, XOR, SPARSE})
"""The kinds of a delta; the others are keyframes."""
