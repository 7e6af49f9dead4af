"""`FsspecStore` on a real server: Azure Blob on azurite."""

from __future__ import annotations

import pytest

from tests.storage_backends.on_server import HttpServerContract, check_a_missing_bucket_is_refused
from tests.support.servers import Place

pytestmark = pytest.mark.servers


class TestAzurite(HttpServerContract):
    kind = "azurite"

    def test_a_missing_container_is_an_error_and_not_an_empty_store(self, place: Place) -> None:
        check_a_missing_bucket_is_refused(place)
