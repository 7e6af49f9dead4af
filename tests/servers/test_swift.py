"""A whole job on Swift."""

from __future__ import annotations

import pytest

from tests.servers.job import check, check_command_line, play
from tests.support.servers.fixture import Servers

pytestmark = [pytest.mark.e2e, pytest.mark.servers]


@pytest.mark.parametrize("world", [1, 3])
def test_a_job_that_is_killed_twice_ends_as_if_it_had_not_been(
    servers: Servers, capsys: pytest.CaptureFixture[str], world: int
) -> None:
    place = servers("swift").place()
    play(place, world)
    check(place, world)
    check_command_line(place, capsys)
