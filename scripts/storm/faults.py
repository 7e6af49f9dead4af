"""A store that goes wrong now and then, by dice that can be thrown again: what real stores do to one process."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from storage_backends.base import Buffer, Entry, Refused, StorageError, Store, Unavailable

T = TypeVar("T")

KINDS = ("fails", "lands", "late", "torn", "refused", "slow", "outage")
LATE = 3.0
"""Seconds after which a put that failed may still land: less than the storm's `grace`."""


@dataclass(frozen=True)
class Weather:
    """The chance per call of each kind of fault. `outage`: everything fails for `outage_s` seconds from there on.

    fails: Unavailable, and nothing happened · lands: Unavailable, and it was done · late: Unavailable, and it will be
    done within `LATE` seconds · torn: a pack or part is half there, and Unavailable · refused: a full disk · slow
    """

    chances: Mapping[str, float] = field(default_factory=dict)
    outage_s: float = 0.0


class StormyStore:
    """`happened(kind)` is called before each fault."""

    def __init__(self, inner: Store, weather: Weather, dice: random.Random, happened: Callable[[str], None]) -> None:
        self._inner, self._weather, self._dice, self._happened = inner, weather, dice, happened
        self._lock = threading.Lock()
        self._until = 0.0

    @property
    def url(self) -> str:
        return self._inner.url

    def put(self, key: str, data: Buffer) -> None:
        match self._drawn():
            case "torn" if key.startswith(("packs/", "parts/")):
                self._inner.put(key, bytes(data[: memoryview(data).nbytes // 2]))
                raise self._unavailable("put", key)
            case "lands" | "torn":
                self._inner.put(key, data)
                raise self._unavailable("put", key)
            case "late":
                threading.Thread(
                    target=self._later, args=(key, bytes(data), self._dice.uniform(0, LATE)), daemon=True
                ).start()
                raise self._unavailable("put", key)
            case "refused":
                raise Refused(f"{self.url}: no space for {key}, on purpose", store=self.url, key=key)
            case "fails":
                raise self._unavailable("put", key)
        self._inner.put(key, data)

    def get(self, key: str) -> bytes:
        return self._read("get", key, lambda: self._inner.get(key))

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        return self._read("get_range", key, lambda: self._inner.get_range(key, start, stop))

    def list(self, prefix: str) -> Sequence[Entry]:
        return self._read("list", prefix, lambda: self._inner.list(prefix))

    def delete(self, keys: Sequence[str]) -> None:
        match self._drawn():
            case "lands" | "late":
                self._inner.delete(keys)
                raise self._unavailable("delete", keys[0] if keys else "")
            case "torn":
                self._inner.delete(keys[: len(keys) // 2])
                raise self._unavailable("delete", keys[0] if keys else "")
            case "fails" | "refused":
                raise self._unavailable("delete", keys[0] if keys else "")
        self._inner.delete(keys)

    def _read(self, verb: str, key: str, do: Callable[[], T]) -> T:
        if self._drawn() is not None:
            raise self._unavailable(verb, key)
        return do()

    def _drawn(self) -> str | None:
        """The fate of this call; None: it is well, perhaps after a while."""
        with self._lock:
            if time.monotonic() < self._until:
                return "fails"
            drawn = self._dice.random()
            for kind in KINDS:
                drawn -= self._weather.chances.get(kind, 0.0)
                if drawn < 0:
                    break
            else:
                return None
            pause = self._dice.uniform(0.05, 0.5)
            if kind == "outage":
                self._until = time.monotonic() + self._weather.outage_s
        self._happened(kind)
        if kind == "slow":
            time.sleep(pause)
            return None
        return "fails" if kind == "outage" else kind

    def _later(self, key: str, data: bytes, pause: float) -> None:
        time.sleep(pause)
        try:
            self._inner.put(key, data)
        except StorageError:
            return  # it was said to have failed, and so it has

    def _unavailable(self, verb: str, key: str) -> Unavailable:
        return Unavailable(f"{self.url}: {verb} of {key} failed on purpose", store=self.url, key=key)
