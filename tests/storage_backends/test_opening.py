"""`open_store`: what a user types, and what an error tells them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import storage_backends
from storage_backends import FanoutStore, FsspecStore, MemoryStore, NotFound, Refused, RetryingStore, open_store
from storage_backends.opening import fanout, tiered


@pytest.mark.parametrize("typed", ["runs/gpt", "./runs/gpt", "runs/gpt/", "runs//gpt", "x/../runs/gpt"])
def test_a_relative_path_starts_where_the_process_was_when_it_was_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: str
) -> None:
    monkeypatch.chdir(tmp_path)
    store = open_store(typed)
    monkeypatch.chdir("/")
    assert store.url == str(tmp_path / "runs/gpt")
    store.put("a", b"1")
    assert (tmp_path / "runs/gpt/a").read_bytes() == b"1"


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_store("~/runs").url == str(tmp_path / "runs")
    assert open_store("~").url == str(tmp_path)


def test_paths_and_file_urls_are_the_same_place(tmp_path: Path) -> None:
    open_store(tmp_path / "run").put("a", b"1")
    for typed in (f"{tmp_path}/run", f"file://{tmp_path}/run", f"file://{tmp_path}/run/", f"local://{tmp_path}/run"):
        store = open_store(typed)
        assert store.get("a") == b"1"
        assert store.url == f"{tmp_path}/run"


def test_an_odd_folder_name_is_a_folder_name(tmp_path: Path) -> None:
    for name in ("a b", "ünï", "x#y?z", "50%25", "a:b", "-rf"):
        store = open_store(tmp_path / name)
        store.put("a", b"1")
        assert [e.key for e in open_store(str(tmp_path / name)).list("")] == ["a"]
        assert (tmp_path / name / "a").is_file()


def test_memory_urls_meet_within_the_process_with_or_without_a_trailing_slash() -> None:
    one, other = open_store("memory://test-opening/x"), open_store("memory://test-opening/x/")
    one.put("a", b"1")
    assert other.get("a") == b"1"
    assert one.url == other.url == "memory://test-opening/x"
    with pytest.raises(NotFound):
        open_store("memory://test-opening/y").get("a")


def test_every_store_is_opened_with_retries(tmp_path: Path) -> None:
    assert isinstance(open_store(tmp_path), RetryingStore)
    assert isinstance(open_store("memory://test-opening/z"), RetryingStore)


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("", "is empty"),
        ("  ", "is empty"),
        ("s4://bucket/x", "unknown scheme s4://"),
        ("s3://", "names no bucket"),
        ("s3:///x", "names no bucket"),
        ("file://runs/x", "expected file:///absolute/path"),
        ("tiered::/fast", "expected tiered::FAST|DURABLE"),
        ("tiered::/fast|", "expected tiered::FAST|DURABLE"),
        ("tiered::/fast|/fast", "is both tiers"),
        ("tiered::fanout::/a|/b|/c", "only the durable tier may be several places"),
        ("fanout::/a", "or fanout::ONE|OTHER"),
        ("fanout::/a||/b", "or fanout::ONE|OTHER"),
        ("fanout::/a|/b|/a", "beside itself"),
        ("fanout::/a|tiered::/b|/c", "only the durable tier"),
        ("fanout::s4://a|/b", "unknown scheme s4://"),
        ("tiered::simplecache::s3://a|/b", "simplecache:: makes a chain"),
        ("simplecache::s3://bucket/x", "simplecache:: makes a chain"),
        ("zip://x::s3://bucket/x", "zip:: makes a chain"),
    ],
)
def test_what_makes_no_sense_is_refused_with_what_would(typed: str, says: str) -> None:
    with pytest.raises(Refused, match=says):
        open_store(typed)


def test_several_places_are_opened_by_one_url(tmp_path: Path) -> None:
    a, b, c = (tmp_path / name for name in "abc")
    store = open_store(f"fanout::{a}|file://{b}|{c}")
    store.put("x", b"1")
    assert [(path / "x").read_bytes() for path in (a, b, c)] == [b"1"] * 3
    assert store.url == f"fanout::{a}|{b}|{c}"
    store = open_store(f"tiered::{a}|fanout::{b}|{c}")
    store.put("packs/x", b"1")
    assert not (b / "packs").exists()
    store.put("runs/y", b"1")
    assert [(path / "runs/y").exists() for path in (a, b, c)] == [True] * 3
    assert store.url == f"tiered::{a}|fanout::{b}|{c}"
    assert open_store(store.url).get("packs/x") == b"1"


def test_several_places_are_opened_from_paths_urls_and_stores(tmp_path: Path) -> None:
    store = tiered(tmp_path / "fast", fanout(str(tmp_path / "b"), MemoryStore("c"), at_least=2), keep_fast=5)
    assert store.url == f"tiered::{tmp_path}/fast|fanout::{tmp_path}/b|memory-store:c"
    assert store.keep_fast == 5
    assert isinstance(store.fast, RetryingStore)


def test_options_go_to_what_is_not_a_folder(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="folders take no storage options, found key"):
        open_store(f"tiered::{tmp_path}/a|{tmp_path}/b", key="x")
    store = open_store(f"tiered::{tmp_path}/a|memory://test-opening/options", skip_instance_cache=True)
    with pytest.raises(Refused, match=r"MemoryFileSystem.*skip_instance_cache"):  # ours: so it arrived there
        store.put("runs/x", b"1")


def test_options_for_a_folder_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="no storage options, found endpoint_url"):
        open_store(tmp_path, endpoint_url="http://x")


@pytest.mark.parametrize(("deadline", "tries_until", "patience"), [(90, 60, 30), (30, 20, 10), (600, 570, 30)])
def test_a_deadline_leaves_the_last_attempt_the_time_it_may_take(
    deadline: float, tries_until: float, patience: float
) -> None:
    many = open_store("fanout::memory://test-opening/a|memory://test-opening/b", deadline=deadline)
    assert isinstance(many, FanoutStore)
    for store in (open_store("memory://test-opening/d", deadline=deadline), *many.places.values()):
        assert isinstance(store, RetryingStore) and isinstance(store._store, FsspecStore)
        assert (store._deadline, store._store._patience) == (tries_until, patience)


@pytest.mark.parametrize("deadline", [0, -1, float("inf"), float("nan"), "60s", None])
def test_a_deadline_that_is_none_is_refused(deadline: Any) -> None:
    with pytest.raises(Refused, match="expected a number of seconds"):
        open_store("memory://test-opening/d", deadline=deadline)


def run(code: str) -> str:
    """What a fresh interpreter prints."""
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_a_missing_library_names_the_extra_to_install() -> None:
    code = """
import sys
sys.modules["s3fs"] = sys.modules["paramiko"] = None
from storage_backends import open_store, Refused
for url in ("s3://bucket/x", "sftp://host/x"):
    try:
        open_store(url)
    except Refused as error:
        print(error)
"""
    said = run(code).splitlines()
    assert len(said) == 2
    assert said[0].startswith("s3://bucket/x: s3:// needs a library that is missing")
    assert said[0].endswith("pip install 'incremental-ckpt[s3]'")
    assert said[1].endswith("pip install 'incremental-ckpt[sftp]'")


def test_a_local_store_loads_neither_fsspec_nor_torch() -> None:
    code = """
import sys
from storage_backends import open_store
open_store("/tmp").url
print(sorted({"fsspec", "torch", "numpy", "asyncio", "s3fs"} & set(sys.modules)))
"""
    assert run(code).strip() == "[]"


def test_the_lobby_names_what_it_has() -> None:
    assert all(getattr(storage_backends, name) is not None for name in storage_backends.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        storage_backends.nonsense  # noqa: B018
