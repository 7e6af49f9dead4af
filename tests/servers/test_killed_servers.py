"""A server that is killed (SIGKILL) in the middle of a save, and started again: the save survives."""

from __future__ import annotations

import threading

import pytest
import torch

import ckpt
from storage_backends.base import Buffer, Store
from tests.servers.job import findings
from tests.support.faulty import _Watched
from tests.support.servers import Server
from tests.support.servers.fixture import Servers
from tests.support.worlds import PATIENT, quiet

pytestmark = [pytest.mark.e2e, pytest.mark.servers]


class Killing(_Watched):
    """Kills the server before the first put into a folder, and starts it again while the put is tried.

    Attributes:
        folder: such as "parts/"; "" kills nothing.
        kills: how often it has.
    """

    def __init__(self, inner: Store, server: Server) -> None:
        self._inner = inner
        self._server = server
        self._starting = threading.Thread()
        self.folder = ""
        self.kills = 0

    def _before(self, verb: str, key: str) -> None:
        if verb == "put" and self.folder and key.startswith(self.folder):
            self.folder = ""
            self.kills += 1
            self._server.kill()
            self._starting = threading.Thread(target=self._server.start)
            self._starting.start()

    def put(self, key: str, data: Buffer) -> None:
        super().put(key, data)
        if self._starting.ident:
            self._starting.join()


@pytest.mark.parametrize("kind", ["swift", "seaweedfs", "sftp"])
def test_a_server_killed_in_the_middle_of_a_save_and_started_again_loses_nothing(servers: Servers, kind: str) -> None:
    """At a pack, a part, a snapshot. Not azurite: an emulator, which keeps its last seconds in memory."""
    with servers.own(kind) as server:
        store = Killing(server.place().open(), server)
        tensor = torch.zeros(300_000)
        with ckpt.Checkpointer(store, {"t": tensor}, mirror="off", options=quiet()) as saver:
            saver.restore()
            step = 0
            for folder in ("packs/", "parts/", "snapshots/"):
                for store.folder in (folder, ""):
                    step += 1
                    tensor.normal_()
                    tensor[0] = step
                    saver.save(step).wait(PATIENT)
        assert store.kills == 3
        assert findings(store) == []
        for wanted in range(1, step + 1):
            assert ckpt.load(store, wanted)["t"][0] == wanted
