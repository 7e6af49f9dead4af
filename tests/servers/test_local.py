"""A whole job on folders, through our own store and through fsspec's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.servers.job import check, check_command_line, play
from tests.support.servers import Place

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_job_that_is_killed_twice_ends_as_if_it_had_not_been(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], scheme: str, world: int
) -> None:
    place = Place(f"{scheme}{tmp_path}/store")
    play(place, world)
    check(place, world)
    check_command_line(place, capsys)
