"""Real storage servers for tests: installed into a cache outside this tree, started on free ports, ended for certain.

    server = shared("swift")                    # one for all xdist workers, gone when pytest is gone
    with running("seaweedfs") as server: …      # one of this test's own, which it may kill() and start() again
    with proxied(server, latency=0.1, fail=0.2) as proxy: …    # faults on the way to it
    place = server.place()                      # a fresh, empty prefix: `place.url`, `place.options`, `place.open()`

Tests get them from the session fixture `servers`, which skips, or fails in CI, where a server cannot be had; they
carry the mark `servers` and run with ``scripts/test --servers``. Kinds: see `RECIPES`.
"""

from __future__ import annotations

from tests.support.servers.install import NotInstallable
from tests.support.servers.proxy import Proxy, Request, proxied
from tests.support.servers.recipes import KINDS, Place
from tests.support.servers.server import Server, running, shared

__all__ = ["KINDS", "NotInstallable", "Place", "Proxy", "Request", "Server", "proxied", "running", "shared"]
