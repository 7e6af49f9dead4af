"""`ckpt plan`: what it reads, what it prints, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ckpt.cli import main
from storage_backends.local import LocalStore
from tests.support.stores import by_name, drifting, make_store


@pytest.fixture
def url(tmp_path: Path) -> str:
    make_store(LocalStore(tmp_path / "store"), drifting(3), ranks=4, chunk=4096, replicated=False)
    return str(tmp_path / "store")


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main(["plan", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_two_lost_ranks_are_fetched_and_the_others_keep_theirs(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, url, "--lost", "1,2")
    assert (found["step"], found["lost"], found["world_size"]) == (30, [1, 2], 4)
    fetched = {rank["rank"]: rank["fetch"] for rank in found["ranks"]}
    assert fetched[0] == fetched[3] == 0 and fetched[1] > 0 < fetched[2]
    assert found["bytes"]["fetch"] == fetched[1] + fetched[2]
    assert found["bytes"]["fetch"] < found["full_reload"]["bytes"]


def test_only_the_parts_of_lost_ranks_are_read(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unread = [part for part in (tmp_path / "store").rglob("*.json.zst") if not part.name.startswith("00002")]
    assert len(unread) == 9
    for path in (*unread, *(tmp_path / "store").rglob("*.safetensors")):
        path.write_bytes(b"not to be read")
    assert main(["plan", url, "--lost", "2"]) == 0
    text = capsys.readouterr().out
    assert "step 30, 4 ranks, without ranks 2" in text and "3 of 4 ranks keep all they want" in text
    assert "full reload: " in text and "assumed: every rank but the lost ones holds what it stored" in text


def test_a_smaller_job_is_planned_with_its_assumptions_said(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", url, "--lost", "3", "--world-size", "3"]) == 0
    text = capsys.readouterr().out
    assert "coming back with 3" in text
    assert "assumed: dimension 0 of each leaf is dealt out evenly" in text and "on_resize" in text
    found = told(capsys, url, "--lost", "3", "--world-size", "3")
    assert found["world_size"] == 3 and found["bytes"]["receive"] > 0 < found["bytes"]["fetch"]


def test_replicas_come_from_peers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_store(LocalStore(tmp_path / "ddp"), drifting(2), ranks=3, chunk=4096, split=by_name)
    found = told(capsys, str(tmp_path / "ddp"), "--lost", "0")
    assert found["bytes"]["fetch"] == 0 < found["bytes"]["receive"]
    assert found["ranks"][0]["peers"] == [1, 2]


def test_the_bandwidth_of_the_store_decides_the_time(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    common = (url, "--lost", "0", "--latency", "0")
    slow, fast = (told(capsys, *common, "--bandwidth", rate)["seconds"] for rate in ("1kB/s", "store=1MB/s"))
    assert slow == pytest.approx(1000 * fast)
    assert told(capsys, *common, "--bandwidth", "1KiB/s")["seconds"] == pytest.approx(slow / 1.024)


@pytest.mark.parametrize(
    "wrong",
    [["--lost", "9"], ["--lost", "x"], ["--lost", "0-99999999"], ["--bandwidth", "fast"], ["--bandwidth", "disk=1GB/s"],
     ["--bandwidth", "0GB/s"], ["--step", "7"]],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused(url: str, wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", url, *wrong]) == 2
    assert capsys.readouterr().err.startswith("ckpt: ")
