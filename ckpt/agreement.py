"""One rank does it, all ranks know: results and errors of rank 0 reach every rank, so that all raise alike.

Errors travel as JSON of class name, message and plain attributes, and are made anew from the small tree in
`ckpt.errors`: nothing is unpickled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from ckpt import errors

_TREE: dict[str, type[Exception]] = {name: getattr(errors, name) for name in errors.__all__}
_PLAIN = (str, int, float, bool, type(None))


class Group(Protocol):
    """The part of `ckpt.ranks.Ranks` that this needs."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def broadcast(self, data: bytes | None, src: int = 0) -> bytes: ...


def pack_error(error: BaseException) -> bytes:
    """JSON of an error, for other ranks."""
    fields: dict[str, Any] = {}
    for name, value in vars(error).items():
        if name.startswith("_"):
            continue
        if isinstance(value, _PLAIN):
            fields[name] = value
        elif isinstance(value, tuple) and all(isinstance(item, str) for item in value):
            fields[name] = {"tuple": list(value)}
        elif isinstance(value, dict) and all(isinstance(item, str) for pair in value.items() for item in pair):
            fields[name] = {"dict": value}
    return msgspec.json.encode({"error": type(error).__name__, "text": str(error), "fields": fields})


def unpack_error(data: bytes, *, where: str = "") -> Exception:
    """The error again. A class this library does not know becomes a `CheckpointError` that names it."""
    found = msgspec.json.decode(data, type=dict[str, Any])
    kind = _TREE.get(found["error"])
    if kind is None:
        return errors.CheckpointError(f"{where}{found['error']}: {found['text']}")
    error = kind.__new__(kind)
    Exception.__init__(error, f"{where}{found['text']}")
    for name, value in found["fields"].items():
        match value:
            case {"tuple": items}:
                setattr(error, name, tuple(items))
            case {"dict": items}:
                setattr(error, name, items)
            case _:
                setattr(error, name, value)
    return error


def on_first(group: Group, call: Callable[[], bytes]) -> bytes:
    """Run `call` on rank 0; every rank returns its bytes, or raises its error. Collective."""
    if group.world_size == 1:
        return call()
    if group.rank == 0:
        try:
            result = call()
        except Exception as error:
            group.broadcast(b"E" + pack_error(error))
            raise
        group.broadcast(b"R" + result)
        return result
    data = group.broadcast(None)
    if data[:1] == b"E":
        raise unpack_error(data[1:], where="rank 0: ")
    return data[1:]
