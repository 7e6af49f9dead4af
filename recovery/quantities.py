"""Bytes and seconds as people read them."""

from __future__ import annotations


def bytes_text(n: float) -> str:
    """1536000 → "1.5 MB" (decimal units, as disks are sold and stores are billed)."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if n < 999.5:
            return f"{n:.0f} {unit}" if unit == "B" or n >= 99.5 else f"{n:.1f} {unit}"
        n /= 1000
    return f"{n:.1f} PB"


def seconds_text(seconds: float) -> str:
    """0.00123 → "1.2 ms"; 0.0123 → "12 ms"; 7300 → "2 h 2 min"."""
    if seconds < 0.01:
        return f"{1000 * seconds:.2g} ms"
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
