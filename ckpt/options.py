"""Settings: what a user may turn, with the defaults that should not need turning."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ckpt.format.shards import DEFAULT_CHUNK, MAX_CHUNK, SMALL_LEAF
from storage_backends.throttle import Limits

Duration = str | float | int
Size = str | int
Rate = str | float

_SECONDS = {"ms": 0.001, "s": 1, "sec": 1, "min": 60, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_BYTES = {
    "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_QUANTITY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*")
_PER_SECOND = re.compile(r"(.*)/\s*s(?:ec)?\s*")


def seconds(value: Duration) -> float:
    """``"10min"``, ``"1.5h"``, ``"2d"`` or a number of seconds → seconds. Raises ValueError."""
    return _quantity(value, _SECONDS, "a duration such as '30s', '10min', '1h', '2d' or a number of seconds")


def size(value: Size) -> int:
    """``"256MB"``, ``"512KiB"`` or a number of bytes → bytes. Raises ValueError."""
    return int(_quantity(value, _BYTES, "a size such as '256MB', '512KiB' or a number of bytes"))


def byte_rate(value: Rate) -> float:
    """``"200MB/s"`` or a number of bytes per second → bytes per second. Raises ValueError."""
    return _rate(value, size, "bytes per second, such as '200MB/s', or a number of at least 1")


def request_rate(value: Rate) -> float:
    """``"50/s"`` or a number per second → requests per second. Raises ValueError."""
    return _rate(value, float, "requests per second, such as '50/s', or a number above 0")


def _rate(value: Rate, number: Callable[[str], float], expected: str) -> float:
    found: float = value if isinstance(value, int | float) and not isinstance(value, bool) else 0
    if isinstance(value, str) and (text := _PER_SECOND.fullmatch(value)):
        with contextlib.suppress(ValueError):
            found = number(text[1])
    if not 0 < found < float("inf"):
        raise ValueError(f"{value!r}: expected {expected}")
    return found


def _quantity(value: str | float, units: dict[str, float] | dict[str, int], expected: str) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, str) and (found := _QUANTITY.fullmatch(value)) and found[2].lower() in units:
        return float(found[1]) * units[found[2].lower()]
    raise ValueError(f"{value!r}: expected {expected}")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raises ValueError that names the argument."""
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: expected one of {', '.join(map(repr, allowed))}")


@dataclass(frozen=True, slots=True)
class Options:
    """How a `Checkpointer` works inside. Durations and sizes may be text (``"10min"``, ``"256MB"``) or numbers.

    Attributes:
        restore_amplification: a chunk's base and deltas together may cost at most this many times what its keyframe
            costs to read. 1 stores keyframes only; larger stores less and reads more.
        chunk: bytes per chunk, the unit of comparing, encoding and reading; a power of two from 4 KiB to 16 MiB.
            Changing it stores everything again once.
        replica_check: parameters and optimizer state that several ranks hold are compared at the first save and at
            every so-manieth; 0 never compares.
        commit_wait: how long a rank waits for the others' parts before it gives a save up.
        grace: leftovers of crashed saves are kept this long before a prune may sweep them. Keep it longer than the
            longest time a single upload can take.
        listing_lag: how long a new object may be missing from the store's listings. 0 for every current object store.
        group_timeout: timeout of the process group the checkpointer makes for itself; None takes the default group's.
        on_error: what the save after a failed one does, on all ranks alike: "warn" and go on; "raise"; or, with a
            number, warn until so many saves in a row have failed, and raise from then on.
        memory: working memory of the writer and of a restore beyond the two host buffers.
        on_resize: ``rule(name, values, rank, world_size)``, called where a snapshot of another number of ranks is
            restored, for each per-rank value that differed between them (by its name in the state; ``"$data"`` is the
            data position: return None to begin the data anew) and each such per-rank tensor (by its path). `values`
            by stored rank; returns what `rank` of the new `world_size` takes. None: such a restore is refused. Random
            states need no rule.
        bandwidth: how many bytes per second this rank's saves send at most (``"200MB/s"``; None: no limit), prunes and
            copies between places included; of a store of several places, to each of them. An average: single packs, of
            at most 16 MiB, go at the speed of the line. Restores and the records of a journal are not held back.
            `close()` waits for what is.
        requests: how many requests per second they make at most, such as ``"50/s"``. Without it too, a store that
            answers "slow down" is asked half as often, and gradually more from then on.
        heartbeat: how often a run says that it is alive. A silent run is taken over after three of these.
        key: where the key is that encrypts what goes to the store: a file, or ``env:NAME`` for an environment variable;
            32 bytes or 64 hex digits. Never the key itself. A store is encrypted from its beginning or not at all.
    """

    restore_amplification: float = 1.5
    chunk: Size = DEFAULT_CHUNK
    replica_check: int = 10
    commit_wait: Duration = "10min"
    grace: Duration = "1h"
    listing_lag: Duration = 0
    group_timeout: Duration | None = None
    on_error: Literal["warn", "raise"] | int = "warn"
    memory: Size = "256MB"
    on_resize: Callable[[str, Sequence[Any], int, int], Any] | None = None
    heartbeat: Duration = "10s"
    bandwidth: Rate | None = None
    requests: Rate | None = None
    key: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        if not self.restore_amplification >= 1:
            raise ValueError(f"restore_amplification={self.restore_amplification!r}: expected a number of at least 1")
        chunk = size(self.chunk)
        if chunk & (chunk - 1) or not SMALL_LEAF <= chunk <= MAX_CHUNK:
            raise ValueError(f"chunk={self.chunk!r}: expected a power of two from 4KiB to 16MiB")
        if self.replica_check < 0:
            raise ValueError(f"replica_check={self.replica_check!r}: expected 0 (never) or a number of saves")
        if self.on_error not in ("warn", "raise") and not _is_count(self.on_error):
            raise ValueError(f"on_error={self.on_error!r}: expected 'warn', 'raise' or a number of saves, at least 1")
        durations = ("commit_wait", "grace", "listing_lag", "heartbeat", "group_timeout")
        readers: list[tuple[str, Callable[[Any], float]]] = [(name, seconds) for name in durations]
        for name, read in (*readers, ("bandwidth", byte_rate), ("requests", request_rate)):
            value = getattr(self, name)
            if value is not None:
                try:
                    read(value)
                except ValueError as error:
                    raise ValueError(f"{name}={error}") from None
        if size(self.memory) < 64 << 20:
            raise ValueError(f"memory={self.memory!r}: expected at least 64MiB")

    @property
    def bearable(self) -> int | None:
        """How many saves in a row may fail before one raises, that one included; None: any number."""
        if isinstance(self.on_error, int):
            return self.on_error
        return 1 if self.on_error == "raise" else None

    @property
    def limits(self) -> Limits:
        """`bandwidth` and `requests`, read."""
        return Limits(
            None if self.bandwidth is None else byte_rate(self.bandwidth),
            None if self.requests is None else request_rate(self.requests),
        )


_STEPS = re.compile(r"\s*(\d+)\s*steps?\s*")


@dataclass(frozen=True, slots=True)
class Journal:
    """How a journal between snapshots is kept. ``journal=True`` means ``Journal()``.

    Attributes:
        every: the state after every so-manieth step can be come back to; gradients are recorded at each.
        flush: when records must be where `to` says. ``"1 step"``: before `step()` returns, so that no completed step
            is ever lost; ``"4 steps"``: fewer than four may be; ``"10s"`` or a number of seconds: in the background,
            at least so often.
        to: "mirror": into the mirror's folder, where they outlive the process; "store": where they outlive the node
            too; "both".
        ring: most bytes of records in the mirror's folder, per rank; the oldest go first.
    """

    every: int = 1
    flush: Duration = "10s"
    to: Literal["mirror", "store", "both"] = "both"
    ring: Size = "1GB"

    def __post_init__(self) -> None:
        if not _is_count(self.every):
            raise ValueError(f"every={self.every!r}: expected a number of steps, at least 1")
        one_of("to", self.to, ("mirror", "store", "both"))
        size(self.ring)
        if self.steps is None:
            seconds(self.flush)
        elif self.steps < 1:
            raise ValueError(f"flush={self.flush!r}: expected at least 1 step")

    @property
    def steps(self) -> int | None:
        """With a `flush` in steps, how many."""
        found = _STEPS.fullmatch(self.flush) if isinstance(self.flush, str) else None
        return None if found is None else int(found[1])
