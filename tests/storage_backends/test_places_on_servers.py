"""The contract of tiers and fan-outs over real servers."""

from __future__ import annotations

from pathlib import Path

import pytest

from storage_backends.fanout import FanoutStore
from storage_backends.local import LocalStore
from storage_backends.tiered import TieredStore
from tests.storage_backends.contract import Opener
from tests.storage_backends.on_server import ServerContract
from tests.support.servers import Place

pytestmark = pytest.mark.servers


class TestTieredOntoSwift(ServerContract):
    kind = "swift"

    @pytest.fixture
    def opener(self, place: Place, tmp_path: Path) -> Opener:
        return lambda: TieredStore(LocalStore(tmp_path), place.bare())


class TestFanoutOverSeaweedfsAndAFolder(ServerContract):
    kind = "seaweedfs"

    @pytest.fixture
    def opener(self, place: Place, tmp_path: Path) -> Opener:
        return lambda: FanoutStore(place.bare(), LocalStore(tmp_path))
