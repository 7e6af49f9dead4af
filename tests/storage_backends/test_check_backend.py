"""`scripts/check_backend.py`: the contract on a user's own store, as a table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from typer import Typer
from typer.testing import CliRunner, Result

from scripts.check_backend import main, promises
from tests.storage_backends.contract import BAD_KEYS, StoreContract
from tests.support.servers.fixture import Servers

app = Typer()
app.command()(main)


def run(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "200"})


def test_every_test_of_the_contract_is_a_promise_with_all_its_cases() -> None:
    found = {promise.test.__name__: promise for promise in promises()}
    assert set(found) == {name for name in vars(StoreContract) if name.startswith("test_")}
    assert len(found["test_a_bad_key_is_refused_by_every_verb"].cases) == len(BAD_KEYS)
    assert len(found["test_a_range_past_the_end_is_refused"].cases) == 5
    assert len(found["test_ranges_are_exact"].cases) == 1


def test_a_good_store_keeps_all_and_nothing_is_left_of_the_check(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("untouched")
    said = run(tmp_path)
    assert said.exit_code == 0, said.output
    count = len(list(promises()))
    assert f"{count} of {count} promises hold" in said.output
    assert "ranges are exact" in said.output
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


class Forgetful(MemoryFileSystem):
    """Lists no object whose name ends in a digit."""

    protocol = "forgetful"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(MemoryFileSystem._strip_protocol(path.replace("forgetful://", "memory://")))

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        found = super().ls(path, detail, **options)
        return [info for info in found if info["type"] == "directory" or not info["name"][-1].isdigit()]


def test_a_store_that_breaks_a_promise_is_told_which_and_why() -> None:
    fsspec.register_implementation("forgetful", Forgetful, clobber=True)
    said = run("forgetful://checked/place")
    assert said.exit_code == 1, said.output
    lines = said.output.splitlines()
    assert any("a listing is deep sorted and exact" in line and " no" in line for line in lines)
    assert any("ranges are exact" in line and "yes" in line for line in lines)
    assert "AssertionError" in said.output


def test_a_store_that_cannot_be_written_is_no_broken_promise(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    said = run(tmp_path / "file" / "below")
    assert said.exit_code == 2
    assert "cannot be checked" in said.output
    said = run("nosuch://place")
    assert said.exit_code == 2
    assert "unknown scheme" in said.output


@pytest.mark.servers
@pytest.mark.parametrize("kind", ["sftp", "azurite"])
def test_a_real_server_with_its_storage_options(servers: Servers, kind: str) -> None:
    place = servers(kind).place()
    said = run(place.url, *place.flags())
    assert said.exit_code == 0, said.output
    assert list(place.open().list("")) == []
    if kind == "sftp":
        assert list(Path(place.url.partition(f":{servers(kind).port}")[2]).iterdir()) == []
