"""The servers of the tests themselves: shared, ended for certain; and the proxy does what it is told."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from storage_backends import Unavailable
from tests.support.procs import ROOT
from tests.support.servers import Server, install
from tests.support.servers.fixture import Servers

pytestmark = pytest.mark.servers

SCRIPT = """
from tests.support.servers import running, shared
one, again = shared("sftp"), shared("sftp")
with running("sftp") as own:
    assert one.folder == again.folder != own.folder
    print(one.folder, own.folder, flush=True)
    input()
"""


def test_servers_end_with_their_owner_even_if_it_is_killed(servers: Servers) -> None:
    servers("sftp")  # or a skip
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_XDIST_WORKER"}
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        cwd=ROOT,
        env={**environment, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        folders = [Path(word) for word in process.stdout.readline().split()]
        assert len(folders) == 2
        keepers = [p for p in psutil.process_iter(["cmdline"]) if set(map(str, folders)) & set(p.info["cmdline"] or [])]
        every = [*keepers, *(child for keeper in keepers for child in keeper.children(recursive=True))]
        assert len(keepers) == 2 and len(every) >= 4, every
        process.send_signal(signal.SIGKILL)
    _, alive = psutil.wait_procs(every, timeout=60)
    assert alive == []
    assert not any(folder.parent.exists() for folder in folders)


def test_one_that_cannot_be_had_is_a_skip_and_where_it_is_required_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise install.NotInstallable("no such package")

    monkeypatch.setattr(install, "sshd", none)
    for required, outcome in ((False, pytest.skip.Exception), (True, pytest.fail.Exception)):
        servers = Servers(required=required)
        with pytest.raises(outcome, match=r"sftp .*cannot be had.*no such package"):
            servers("sftp")
        with pytest.raises(outcome, match="no such package"), servers.own("sftp"):
            raise AssertionError("never")


def answers(server: Server) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", server.port)) == 0


def test_a_killed_server_is_gone_and_comes_back_on_the_same_port_with_what_it_held(servers: Servers) -> None:
    with servers.own("sftp") as server:
        store = server.place().bare()
        store.put("a", b"1")
        server.kill()
        assert not answers(server)
        with pytest.raises(Unavailable):
            store.get("a")
        server.start()
        assert store.get("a") == b"1"


def test_the_proxy_fails_what_it_is_told_and_counts(servers: Servers) -> None:
    with servers.proxied(servers("seaweedfs"), fail=0.5, methods="PUT", seed=1) as proxy:
        store = proxy.place().bare()
        failed = 0
        for n in range(20):
            try:
                store.put(f"o/{n:02}", b"x")
            except Unavailable:
                failed += 1
        assert 3 <= failed <= 17
        fates = [request.fate for request in proxy.requests()]
        assert (fates.count("fail"), fates.count("pass")) == (failed, 20 - failed)
        assert len(store.list("o/")) == 20 - failed, "only PUT fails"

        agent = {"config_kwargs": {"user_agent_extra": "rank/7"}}
        proxy.place().with_options(**agent).bare().list("")
        assert "rank/7" in proxy.requests()[-1].agent


@pytest.mark.parametrize("kind", ["sftp", "seaweedfs"])
def test_connections_are_cut(servers: Servers, kind: str) -> None:
    with servers.proxied(servers(kind)) as proxy:
        store = proxy.place().bare()
        store.put("a", b"1")
        proxy.cut()
        proxy.set(reset=1.0)
        with pytest.raises(Unavailable):
            store.get("a")
        proxy.set()
        assert store.get("a") == b"1"
