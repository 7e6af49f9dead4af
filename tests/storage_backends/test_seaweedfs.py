"""`FsspecStore` on a real server: S3 on SeaweedFS (which makes a missing bucket at the first put into it)."""

from __future__ import annotations

import pytest

from tests.storage_backends.on_server import HttpServerContract

pytestmark = pytest.mark.servers


class TestSeaweedFS(HttpServerContract):
    kind = "seaweedfs"
