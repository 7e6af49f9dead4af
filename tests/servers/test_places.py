"""A whole job on tiers and fan-outs: of folders, and with one place on a server."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.servers.job import check, check_command_line, play
from tests.support.servers import Place
from tests.support.servers.fixture import Servers

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("url", ["tiered::{0}/a|{0}/b", "fanout::{0}/a|{0}/b", "tiered::{0}/a|fanout::{0}/b|{0}/c"])
def test_a_job_that_is_killed_twice_ends_as_if_it_had_not_been(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], url: str
) -> None:
    place = Place(url.format(tmp_path))
    play(place, 2)
    check(place, 2)
    check_command_line(place, capsys)


@pytest.mark.servers
@pytest.mark.parametrize("url", ["tiered::{0}|{1}", "fanout::{1}|{0}"])
def test_the_same_with_one_place_on_swift(
    servers: Servers, tmp_path: Path, capsys: pytest.CaptureFixture[str], url: str
) -> None:
    server = servers("swift").place()
    place = Place(url.format(tmp_path, server.url), server.options)
    play(place, 2)
    check(place, 2)
    check_command_line(place, capsys)
