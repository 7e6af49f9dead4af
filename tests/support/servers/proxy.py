"""Faults on the way to a server: latency, 503s, resets, black holes, chosen anew at any time. And requests, counted.

with proxied(server, latency=0.1, fail=0.2) as proxy:
    store = proxy.place().open()
    proxy.set(hole=True)        # from now on requests are taken and never answered
    proxy.set(); proxy.cut()    # all is well again; what hung is reset
    proxy.requests()            # what came, from whom, and what became of it
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.servers import install
from tests.support.servers.recipes import Place
from tests.support.servers.server import Server, fresh_name, launched


@dataclass(frozen=True)
class Request:
    """One request as the proxy took it (SFTP: one connection).

    Attributes:
        method: "PUT", …; "TCP" for a connection.
        path: with its query.
        agent: what the client calls itself: give each rank its own, ``config_kwargs={"user_agent_extra": "rank/3"}``.
        fate: "pass", "fail" (503), "reset" or "hole".
    """

    method: str
    path: str
    agent: str
    fate: str


@dataclass(frozen=True)
class Proxy:
    """haproxy before a server. Use as the server: `place()` is a place on it, through the proxy."""

    server: Server
    folder: Path
    port: int

    def place(self, beside: Place | None = None) -> Place:
        """A fresh place behind the proxy, or the same one as `beside` (a place of the server itself)."""
        name = fresh_name() if beside is None else beside.url.rpartition("/")[2]
        return self.server.recipe.place(self.server.folder, self.port, name)

    def set(
        self, *, latency: float = 0.0, fail: float = 0.0, reset: float = 0.0, hole: bool = False, methods: str = ""
    ) -> None:
        """What happens to requests from now on; what is not given is off. Those under way keep their fate.

        Args:
            latency: seconds before a request goes on, whatever its fate.
            fail: the share of requests that are answered with 503 SlowDown (HTTP only).
            reset: the share whose connection is reset.
            hole: requests are taken and never answered, until this is off; then they are reset.
            methods: such as "PUT,POST": only these go wrong; default all.
        """
        text = f"{latency * 1000:.0f} {fail} {reset} {int(hole)} {methods or '*'}\n"
        new = self.folder / "faults.new"
        new.write_text(text)
        os.replace(new, self.folder / "faults")

    def cut(self) -> None:
        """Reset every connection there is."""
        with socket.socket(socket.AF_UNIX) as control:
            control.connect(str(self.folder / "stats"))
            control.sendall(b"shutdown sessions server b/s\n")
            control.recv(1000)

    def requests(self) -> list[Request]:
        """All so far. Each is noted before it goes on, so that what has been answered is here."""
        lines = (self.folder / "requests").read_text().splitlines()
        return [Request(*line.split("\t")) for line in lines]


@contextlib.contextmanager
def proxied(
    server: Server,
    *,
    latency: float = 0.0,
    fail: float = 0.0,
    reset: float = 0.0,
    hole: bool = False,
    methods: str = "",
    seed: int = 0,
) -> Iterator[Proxy]:
    """A proxy before this server, for the time of a block. `seed`: of the dice; the rest: see `Proxy.set`.

    Raises:
        NotInstallable: there is no haproxy here.
    """
    install.haproxy()
    spec: dict[str, object] = {"kind": "haproxy", "upstream": server.port, "mode": server.recipe.mode, "seed": seed}
    with launched(spec) as (folder, port):
        proxy = Proxy(server, folder, port)
        proxy.set(latency=latency, fail=fail, reset=reset, hole=hole, methods=methods)
        yield proxy
