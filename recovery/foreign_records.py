"""The metadata of a torch.distributed checkpoint, read without running any of it (no torch).

The file is written as a program for a small stack machine, which may name any function there is and call it. Here the
machine is played with the calls left out: what would have been built is noted down as a `Made`, and that is all a
reader of this format needs.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, TypeVar

from recovery.foreign import Refused

MAX_RECORD = 1 << 28
"""Bytes of the longest such file that is read."""


@dataclass(eq=False, slots=True)
class Made:
    """What a name from the file would have made of `args`; `state` is what it would have been given afterwards. A name
    by itself has args None."""

    name: str
    args: Any = None
    state: Any = None

    def __getitem__(self, key: str) -> Any:
        """A field. Raises KeyError."""
        if not isinstance(self.state, dict):
            raise KeyError(key)
        return self.state[key]

    def get(self, key: str) -> Any:
        """A field, None if it was not given (its class has a default)."""
        return self.state.get(key) if isinstance(self.state, dict) else None


_MARK = object()

T = TypeVar("T")


def read_record(data: bytes) -> Any:
    """Play it. Raises Refused for anything that is not one whole record."""
    if len(data) > MAX_RECORD:
        raise Refused(f"{len(data)} bytes of metadata; expected at most {MAX_RECORD}")
    try:
        return _Machine(data).run()
    except (IndexError, KeyError, TypeError, ValueError, struct.error, AttributeError, RecursionError) as error:
        raise Refused(f"not the metadata of a checkpoint: {error}") from error


class _Machine:
    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def take(self, n: int) -> bytes:
        piece = self.data[self.at : self.at + n]
        if len(piece) != n:
            raise ValueError("cut short")
        self.at += n
        return piece

    def number(self, n: int) -> int:
        return int.from_bytes(self.take(n), "little")

    def line(self) -> str:
        stop = self.data.index(b"\n", self.at)
        text = self.take(stop - self.at).decode()
        self.at += 1
        return text

    def since_mark(self) -> list[Any]:
        at = len(self.stack) - 1
        while self.stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise ValueError("no mark")
        items = self.stack[at + 1 :]
        del self.stack[at:]
        return items

    def run(self) -> Any:
        push, pop = self.stack.append, self.stack.pop
        while True:
            code = self.take(1)
            match code:
                case b".":
                    (result,) = self.stack
                    return result
                case b"\x80":
                    self.take(1)
                case b"\x95":
                    self.take(8)
                case b"(":
                    push(_MARK)
                case b"N":
                    push(None)
                case b"\x88" | b"\x89":
                    push(code == b"\x88")
                case b"K" | b"M":
                    push(self.number(1 if code == b"K" else 2))
                case b"J":
                    push(int.from_bytes(self.take(4), "little", signed=True))
                case b"\x8a":
                    push(int.from_bytes(self.take(self.number(1)), "little", signed=True))
                case b"G":
                    push(struct.unpack(">d", self.take(8))[0])
                case b"X" | b"\x8c" | b"\x8d":
                    push(self.take(self.number({b"X": 4, b"\x8c": 1, b"\x8d": 8}[code])).decode())
                case b"B" | b"C" | b"\x8e":
                    push(self.take(self.number({b"B": 4, b"C": 1, b"\x8e": 8}[code])))
                case b"}":
                    push({})
                case b"]":
                    push([])
                case b")":
                    push(())
                case b"\x8f":
                    push(set())
                case b"t":
                    push(tuple(self.since_mark()))
                case b"\x85" | b"\x86" | b"\x87":
                    n = code[0] - 0x84
                    items = tuple(self.stack[-n:])
                    if len(items) != n:
                        raise ValueError("too little on the stack")
                    del self.stack[-n:]
                    push(items)
                case b"a" | b"e":
                    more = [pop()] if code == b"a" else self.since_mark()
                    _as(self.stack[-1], list).extend(more)
                case b"\x90":
                    found = self.since_mark()
                    _as(self.stack[-1], set).update(map(_key, found))
                case b"s":
                    value, key = pop(), pop()
                    _as(self.stack[-1], dict)[_key(key)] = value
                case b"u":
                    pairs = self.since_mark()
                    _as(self.stack[-1], dict).update(zip(map(_key, pairs[::2]), pairs[1::2], strict=True))
                case b"\x94":
                    self.memo[len(self.memo)] = self.stack[-1]
                case b"q" | b"r":
                    self.memo[self.number(1 if code == b"q" else 4)] = self.stack[-1]
                case b"h" | b"j":
                    push(self.memo[self.number(1 if code == b"h" else 4)])
                case b"c":
                    push(Made(f"{self.line()}.{self.line()}"))
                case b"\x93":
                    name, module = pop(), pop()
                    push(Made(f"{_as(module, str)}.{_as(name, str)}"))
                case b"R" | b"\x81":
                    args, maker = pop(), pop()
                    push(Made(_as(maker, Made).name, _as(args, tuple)))
                case b"b":
                    state = pop()
                    _as(self.stack[-1], Made).state = state
                case _:
                    raise ValueError(f"operation {code!r} at byte {self.at - 1} is not one that such files have")


def _as(value: Any, kind: type[T]) -> T:
    if not isinstance(value, kind):
        raise TypeError(f"a {type(value).__name__} where a {kind.__name__} should be")
    return value


def _key(value: Any) -> Any:
    """What may be hashed at once. A tuple of tuples that hold each other twice, forty deep, is a hundred bytes here and
    a hash that does not end in a lifetime."""
    if isinstance(value, tuple):
        for item in value:
            if isinstance(item, tuple):
                raise TypeError("a tuple of tuples as a key")
    return value
