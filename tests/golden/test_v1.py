"""The store of version 1 that lies in git: today's reader and the second reader find in it what its makers put there.

Both, and today's writer, are compared with v1-expected.json, which was computed from the arrays, not from a store.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckpt
from ckpt.format import values
from ckpt.format.kinds import KINDS
from ckpt.format.manifest import Alive, Part, PruneDoc, StoreDoc, unseal
from ckpt.format.names import RunId, SnapshotId, alive_key, prune_key
from ckpt.format.shards import DTYPES, Leaf, Shard, whole
from ckpt.format.values_reading import _READERS
from ckpt.history.catalog import read_history
from recovery.assemble import Wanted
from recovery.read import open_snapshot, read_parts
from recovery.shards import read_shards
from recovery.verify import verify
from storage_backends.base import Store
from storage_backends.local import LocalStore

from . import make, source
from .make import EXPECTED, STORE
from .second_reader import Loaded, SecondReader

IDS = tuple(json.loads(EXPECTED.read_text()))
LIVE = [
    "000003-deadbeef-000000000050",
    "000002-0badcafe-000000000040",
    "000002-0badcafe-000000000030",
    "000001-00c0ffee-000000000020",
    "000001-00c0ffee-000000000010",
]
ABANDONED = "000001-00c0ffee-000000000030"


def expected(id_: str) -> Any:
    return json.loads(EXPECTED.read_text())[id_]


def by_second_reader(loaded: Loaded) -> dict[str, Any]:
    assert all(own == loaded.aliases[0] for own in loaded.aliases)
    state = source.State(loaded.leaves, loaded.per_rank, loaded.values, loaded.aliases[0])  # type: ignore[arg-type]
    return source.expectation(state)


def by_real_reader(store: Store, id_: str) -> dict[str, Any]:
    parsed = SnapshotId.parse(id_)
    assert parsed is not None
    parts = read_parts(store, open_snapshot(store, parsed).snapshot)
    leaves: dict[str, source.Tensor] = {}
    per_rank: list[dict[str, source.Tensor]] = [{} for _ in parts]
    for want, data in read_shards(store, parts, sorted(wanted_of(parts), key=str)):
        leaf = want.shard.leaf
        where = leaves if want.rank is None else per_rank[want.rank]
        where[leaf.path] = source.Tensor(leaf.cls, leaf.dtype, leaf.shape, data.tobytes())
    trees = [{name: values.decode(text) for name, text in parts[rank].values.items()} for rank in sorted(parts)]
    assert all(part.aliases == parts[0].aliases for part in parts.values())
    return source.expectation(source.State(leaves, tuple(per_rank), tuple(trees), parts[0].aliases))


def wanted_of(parts: dict[int, Part]) -> set[Wanted]:
    return {
        Wanted(Shard(Leaf(row.leaf, row.cls, row.dtype, row.shape), whole(row.shape), row.per_rank),
               rank if row.per_rank else None)
        for rank, part in parts.items()
        for row in part.shards
    }  # fmt: skip


@pytest.mark.parametrize("id_", IDS)
def test_the_second_reader_finds_what_was_saved(id_: str) -> None:
    """Every leaf, value and alias of every snapshot, by a reader that knows the page and nothing else."""
    loaded = SecondReader(STORE).load(id_)
    assert by_second_reader(loaded) == expected(id_)
    assert loaded.metrics == make.METRICS


@pytest.mark.parametrize("id_", IDS)
def test_the_real_reader_finds_what_was_saved(id_: str) -> None:
    """Yesterday's store opens today, bit for bit."""
    assert by_real_reader(LocalStore(STORE), id_) == expected(id_)


@pytest.mark.parametrize("id_", IDS)
def test_load_gives_every_tensor_under_all_its_names(id_: str) -> None:
    want = expected(id_)
    found = ckpt.load(str(STORE), step=id_)
    tensors = {path: value for path, value in found.items() if isinstance(value, torch.Tensor | np.ndarray)}
    names = {path: describe(value) for path, value in tensors.items()}
    for path, (_, *rest) in want["leaves"].items():
        assert names.pop(path) == rest, path
    for alias, path in want["aliases"].items():
        assert tensors[alias] is tensors[path]
        names.pop(alias)
    for rank, own in enumerate(want["per_rank"]):
        for path, (_, *rest) in own.items():
            alone = sum(path in other for other in want["per_rank"]) == 1
            assert names.pop(path if alone else f"{path}@rank{rank}") == rest, path
    assert not names, "tensors that nobody saved"


def describe(value: torch.Tensor | np.ndarray[Any, Any]) -> list[Any]:
    if isinstance(value, np.ndarray):
        return source.describe(source.tensor(value))[1:]
    dtype = str(value.dtype).removeprefix("torch.")
    data = value.reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
    return source.describe(source.Tensor("", dtype, tuple(value.shape), data))[1:]


def test_the_newest_of_the_live_line_is_what_both_readers_take() -> None:
    second, history = SecondReader(STORE), read_history(LocalStore(STORE))
    assert second.live() == sorted(map(str, history.live), reverse=True) == LIVE
    assert [str(id_) for id_ in history.abandoned] == [ABANDONED]
    assert second.load().id == str(history.newest) == LIVE[0]
    assert set(second.snapshots()) == {*LIVE, ABANDONED} == set(IDS)


def test_the_compacted_revision_counts_and_the_commit_lies_beside_it() -> None:
    id_ = "000001-00c0ffee-000000000020"
    history = read_history(LocalStore(STORE))
    assert {key: doc.revision for key, doc in history.documents.items() if str(doc.id) == id_} == {
        f"snapshots/{id_}.json": 0,
        f"snapshots/{id_}.r1.json": 1,
    }
    assert SecondReader(STORE).snapshots()[id_]["revision"] == 1


def test_every_codec_kind_and_form_lies_in_the_store() -> None:
    """A kind that the store lacks is a kind that no later build is held to."""
    reader = SecondReader(STORE)
    forms = {form for id_ in IDS for form in reader.load(id_).forms}
    sparse = {f"5.{form}" for forms in source.FORMS.values() for form in forms}
    assert forms == {str(kind) for kind in KINDS if kind != 5} | sparse | {"of"}


def test_every_dtype_and_value_tag_lies_in_the_store() -> None:
    leaves = expected("000002-0badcafe-000000000040")["leaves"]
    assert {dtype for _, dtype, _, _ in leaves.values()} == set(DTYPES)
    assert {len(shape) for _, _, shape, _ in leaves.values()} == {0, 1, 2, 3}
    store = LocalStore(STORE)
    parts = read_parts(store, open_snapshot(store, SnapshotId(make.B, 30)).snapshot)
    assert tags_in([json.loads(bytes(text)) for text in parts[0].values.values()]) == set(_READERS)


def tags_in(tree: Any) -> set[str]:
    match tree:
        case dict():
            return set(tree).union(*map(tags_in, tree.values()))
        case list():
            return set().union(*map(tags_in, tree))
        case _:
            return set()


def test_a_look_at_the_whole_store_finds_no_damage() -> None:
    """`verify --deep` reads every pack and rebuilds every chunk; what is not ours is no more than a note."""
    findings = list(verify(LocalStore(STORE), deep=True, only=None))
    assert [f for f in findings if f.level == "error"] == []
    assert {"snapshots/notes.txt", "packs/other.safetensors"} <= {f.key for f in findings}


def test_the_documents_that_no_load_reads_can_be_read() -> None:
    store, run = LocalStore(STORE), RunId(1, "00c0ffee")
    assert unseal(store.get("store.json"), StoreDoc, key="store.json").kind == "incremental-ckpt store"
    assert unseal(store.get(alive_key(run)), Alive, key="alive") == Alive(1, str(run), 7, True, 10.0)
    prune = prune_key("0123456789abcdef")
    assert unseal(store.get(prune), PruneDoc, key=prune).keys == ("packs/gone",)
    history = read_history(store)
    assert history.pins == {"best": SnapshotId(run, 20)}
    assert history.runs[RunId(3, "deadbeef")].resumed_from == LIVE[1]


def test_today_s_writer_makes_a_store_that_both_readers_find_the_same_in(tmp_path: Path) -> None:
    """The same states written anew: the format has not moved in secret."""
    assert json.loads(json.dumps(make.make(tmp_path))) == json.loads(EXPECTED.read_text())
    second, store = SecondReader(tmp_path), LocalStore(tmp_path)
    for id_ in IDS:
        assert by_second_reader(second.load(id_)) == expected(id_)
        assert by_real_reader(store, id_) == expected(id_)
