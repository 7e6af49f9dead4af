"""What the fixture `servers` gives: a server, or a skip where it cannot be had, which in CI is a failure."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NoReturn

import pytest

from tests.support.servers import NotInstallable, Proxy, Server, proxied, running, shared


class Servers:
    """`required`: a server that cannot be had is an error. So it is in CI: a skip there would go unseen."""

    def __init__(self, *, required: bool) -> None:
        self._required = required

    def __call__(self, kind: str) -> Server:
        """The one that all tests share: never to be killed, paused or emptied."""
        try:
            return shared(kind)
        except NotInstallable as reason:
            self._without(kind, reason)

    @contextlib.contextmanager
    def own(self, kind: str) -> Iterator[Server]:
        """One that this test may do anything with."""
        with contextlib.ExitStack() as until:
            try:
                server = until.enter_context(running(kind))
            except NotInstallable as reason:
                self._without(kind, reason)
            yield server

    @contextlib.contextmanager
    def proxied(self, server: Server, **faults: Any) -> Iterator[Proxy]:
        """See `tests.support.servers.proxied`."""
        with contextlib.ExitStack() as until:
            try:
                proxy = until.enter_context(proxied(server, **faults))
            except NotInstallable as reason:
                self._without("haproxy", reason)
            yield proxy

    def _without(self, kind: str, reason: NotInstallable) -> NoReturn:
        if self._required:
            pytest.fail(f"{kind} is required here and cannot be had: {reason}")
        pytest.skip(f"{kind} cannot be had here: {reason}")
