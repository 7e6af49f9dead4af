"""`FsspecStore` on a real server: SFTP on OpenSSH's sshd."""

from __future__ import annotations

import threading

import pytest

from storage_backends.base import Unavailable
from tests.storage_backends.on_server import ServerContract
from tests.support.servers.fixture import Servers

pytestmark = pytest.mark.servers


class TestSftp(ServerContract):
    kind = "sftp"


def test_a_server_that_says_nothing_is_given_up_and_its_connection_closed(
    servers: Servers,
) -> None:
    with servers.own("sftp") as server:
        store = server.place().with_options(timeout=2).bare(patience=0.5)
        store.put("a/b", b"1" * 100_000)
        server.pause()
        before = threading.active_count()
        for call in (
            lambda: store.get("a/b"),  # on the connection there is; the others try to make one
            lambda: store.put("a/b", b"2"),
            lambda: store.list(""),
            lambda: store.delete(["a/b"]),
        ):
            with pytest.raises(Unavailable, match=r"(?i)time|session|banner"):
                call()
        assert threading.active_count() <= before, "paramiko's thread outlived the connection"
        server.resume()
        assert store.get("a/b") == b"1" * 100_000


@pytest.mark.parametrize("verb", ["put", "get", "list"])
def test_a_connection_that_went_quiet_is_given_up_by_each_verb(servers: Servers, verb: str) -> None:
    with servers.own("sftp") as server:
        store = server.place().with_options(timeout=5, banner_timeout=5, auth_timeout=5).bare(patience=0.5)
        store.put("a/b", b"1" * 100_000)
        server.pause()
        call = {"put": lambda: store.put("a/b", b"2"), "get": lambda: store.get("a/b"), "list": lambda: store.list("")}
        with pytest.raises(Unavailable, match=r"(?i)time"):
            call[verb]()
