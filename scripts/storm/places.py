"""Where a storm can rage: a folder, a server of its own that it may kill, with faults on the way to it, or any URL."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from scripts.storm.job import Address
from tests.support.servers import NotInstallable, Place, Proxy, Server, proxied, running

KINDS = {"swift": "swift", "weed": "seaweedfs", "sftp": "sftp"}


@dataclass(frozen=True)
class Ground:
    """`address`: for whoever checks. `job`: for the job, through the proxy if there is one. `folder`: for mirrors."""

    address: Address
    job: Address
    folder: Path
    server: Server | None = None
    proxy: Proxy | None = None


@contextlib.contextmanager
def ground(where: str) -> Iterator[Ground]:
    """For "local", "swift", "weed", "sftp" or a URL or path; a server lives as long as the block.

    Raises:
        NotInstallable: the server cannot be had here. Without haproxy the way to it is merely never disturbed.
    """
    with contextlib.ExitStack() as until:
        folder = Path(
            until.enter_context(tempfile.TemporaryDirectory(prefix="ckpt-storm-", ignore_cleanup_errors=True))
        )
        if where not in KINDS:
            address = Address(str(folder / "store") if where == "local" else where)
            yield Ground(address, address, folder)
            return
        server = until.enter_context(running(KINDS[where]))
        place = server.place()
        proxy = None
        with contextlib.suppress(NotInstallable):
            proxy = until.enter_context(proxied(server))
        behind = place if proxy is None else proxy.place(beside=place)
        yield Ground(_address(place), _address(behind), folder, server, proxy)


def _address(place: Place) -> Address:
    return Address(place.url, dict(place.options))
