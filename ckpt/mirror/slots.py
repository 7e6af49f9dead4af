"""Two host buffers in the process's own memory, filled in turn: one holds the reference, the other takes the next save.

The first write to fresh memory costs several times the copy itself (the kernel finds and clears every page), so pages
are touched on a thread of their own as soon as the buffers exist, long before the first save fills the second one.
Buffers are private anonymous mappings, kept out of forked children: a DataLoader worker would otherwise make the next
save copy each page once more and hold the old ones in memory.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Bytes: TypeAlias = NDArray[np.uint8]

PIECE = 64 << 20
"""Bytes touched per call. numpy lets go of the GIL within a call; between two it must win it back from training."""


@dataclass(eq=False)
class _Slot:
    """One buffer. `touched` is set once its pages are there: until then the toucher writes to it."""

    data: Bytes
    touched: threading.Event = field(default_factory=threading.Event)


class Slots:
    """Two reused buffers.

    Nothing is raised for lack of memory but by `free`, so that it fails one save and the next one tries again (G2).
    Arrays handed out keep their memory alive by themselves, also after `close` or a change of size.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._slots: list[_Slot] = []
        self._closed = False
        self._prepare()

    def free(self, not_this: Bytes | None, nbytes: int | None = None) -> Bytes:
        """A buffer of at least `nbytes` (default: as before) that is not the one `not_this` lies in.

        A larger size gives up both buffers; the one that holds the reference lives on as long as the reference does,
        and the second new one is only made when it is asked for: never more than two and a half at once.

        Raises:
            MemoryError: the memory is not there. Later calls try again.
        """
        if nbytes is not None and not self._fits(nbytes):
            self._slots = []
            self._nbytes = nbytes
        for slot in self._slots:
            if not_this is None or not same_memory(slot.data, not_this):
                break
        else:
            slot = self._add()
            _touch(slot)
        # The toucher writes zeros: never hand out a buffer that it is still busy with.
        slot.touched.wait()
        return slot.data

    def wait_ready(self, timeout: float | None = None) -> bool:
        """Whether every page of both buffers is in memory, waiting for it at most `timeout` seconds."""
        self._thread.join(timeout)
        return not self._thread.is_alive() and len(self._slots) == 2

    def close(self) -> None:
        """Let go of the buffers. Touching stops at its next piece."""
        self._closed = True
        self._slots = []

    def _fits(self, nbytes: int) -> bool:
        # A state that shrank to less than half gives its memory back.
        return nbytes <= self._nbytes < 2 * nbytes + mmap.PAGESIZE

    def _prepare(self) -> None:
        with contextlib.suppress(MemoryError):  # free() tries again, and says so
            self._add()
            self._add()
        self._thread = threading.Thread(
            target=self._touch_all, args=(tuple(self._slots),), name="ckpt-touch", daemon=True
        )
        self._thread.start()

    def _touch_all(self, slots: tuple[_Slot, ...]) -> None:
        for slot in slots:
            _touch(slot, lambda: self._closed)

    def _add(self) -> _Slot:
        slot = _Slot(_allocate(self._nbytes))
        self._slots.append(slot)
        return slot


def _allocate(nbytes: int) -> Bytes:
    """Fresh, page-aligned, zeroed memory.

    Raises:
        MemoryError: says how much was asked for.
    """
    try:
        memory = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, MemoryError, OverflowError, ValueError) as error:
        raise MemoryError(
            f"no memory for a host buffer of {nbytes} bytes ({error}); a rank needs two of its own share of the state: "
            "use more ranks or hosts, or give the process more memory"
        ) from error
    for advice in ("MADV_DONTFORK", "MADV_HUGEPAGE"):
        with contextlib.suppress(AttributeError, OSError):  # where the system has no such thing
            memory.madvise(getattr(mmap, advice))
    return np.frombuffer(memory, dtype=np.uint8)[:nbytes]


def _touch(slot: _Slot, stopped: Callable[[], bool] = lambda: False) -> None:
    data = slot.data
    for start in range(0, data.nbytes, PIECE):
        if stopped():
            break
        # Writes one byte per page. madvise(MADV_POPULATE_WRITE) would do the same with the GIL held all the while.
        data[start : start + PIECE : mmap.PAGESIZE] = 0
    slot.touched.set()


def same_memory(slot: Bytes, other: Bytes) -> bool:
    """Whether `other` begins inside `slot`."""
    start = slot.__array_interface__["data"][0]
    return bool(start <= other.__array_interface__["data"][0] < start + max(slot.nbytes, 1))
