"""The second reader holds what it promises: it knows the page alone, follows it, and notices what is wrong."""

from __future__ import annotations

import ast
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
import zstandard

import ckpt
from ckpt.checkpointer import Checkpointer
from tests.support.training import Training, raw

from . import source
from .make import STORE
from .second_codec import Damaged
from .second_reader import Leaf, Loaded, NewerFormat, SecondReader
from .second_values import Ref

NEWEST = "000003-deadbeef-000000000050"
COMPACTED = "000001-00c0ffee-000000000020"


ALLOWED = {*sys.stdlib_module_names, "numpy", "xxhash", "zstandard", "cryptography"}


@pytest.mark.parametrize("module", ["second_reader", "second_codec", "second_values", "second_key"])
def test_it_shares_no_code_with_the_product(module: str) -> None:
    tree = ast.parse(Path(__file__).with_name(f"{module}.py").read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level}
    assert {name.split(".")[0] for name in imported} <= ALLOWED


# -- a store of today --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("chunk", "secret"), [("4KiB", None), ("512KiB", None), ("4KiB", bytes(range(32)))])
def test_it_reads_a_real_training_bit_for_bit(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, chunk: str, secret: bytes | None
) -> None:
    """Every save of a real job, loaded by the page alone: parameters, buffers, optimizer state, schedule, ties."""
    training, saved = Training(width=300), {}
    table = np.arange(6).reshape(2, 3)
    more = {"head": training.model.out, "own": {"table": table, "seen": {1, 2}}}
    key = None if secret is None else tmp_path_factory.mktemp("keys") / "key"
    if key is not None and secret is not None:
        key.write_text(secret.hex())
    options = ckpt.Options(chunk=chunk, restore_amplification=3, key=key)
    with Checkpointer(tmp_path, training.state | more, options=options) as checkpointer:
        checkpointer.restore()
        for step in range(1, 5):
            training.train(step)
            training.optimizer.param_groups[0]["lr"] = 1e-6  # a slow drift is what deltas are for
            table += 1
            checkpointer.save(step, metrics={"loss": 0.5 * step}).wait()
            saved[step] = (tensors_of(training), training.schedule.state_dict(), table.copy())
    reader = SecondReader(tmp_path, secret)
    steps = {document["step"]: id_ for id_, document in reader.snapshots().items()}
    assert list(steps) == [1, 2, 3, 4]
    forms: set[str] = set()
    for step, (tensors, schedule, table) in saved.items():
        loaded = reader.load(steps[step])
        assert {path: leaf for path, leaf in loaded.leaves.items() if path in tensors} == tensors
        assert loaded.leaves["own.table"] == Leaf("array", "int64", (2, 3), table.tobytes())
        assert loaded.aliases == ({"head.weight": "model.out.weight", "head.bias": "model.out.bias"},)
        [values] = loaded.values
        assert values["own"] == {"table": Ref("own.table"), "seen": {1, 2}}
        assert source.spell(values["schedule"]) == source.spell(schedule)
        assert "$random" in values
        assert loaded.metrics == {"loss": 0.5 * step}
        forms |= loaded.forms.keys()
    assert any(form[0] in "345" for form in forms), f"not one delta among {forms}: this shows too little"


def tensors_of(training: Training) -> dict[str, Leaf]:
    found = {}
    parameters = dict(training.model.named_parameters())
    for name, value in training.model.state_dict().items():
        found[f"model.{name}"] = leaf(value, "parameter" if name in parameters else "buffer")
    for name, parameter in parameters.items():
        for slot, value in training.optimizer.state[parameter].items():
            found[f"optimizer.state.model.{name}.{slot}"] = leaf(value, f"slot:{slot}")
    return found


def leaf(tensor: torch.Tensor, cls: str) -> Leaf:
    return Leaf(cls, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), raw(tensor))


# -- later versions ----------------------------------------------------------------------------------------------------


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(STORE, tmp_path / "store"))


def seal(document: dict[str, Any]) -> bytes:
    body = json.dumps(document, sort_keys=True).encode() + b"\n"
    return body + xxhash.xxh3_128_hexdigest(body).encode() + b"\n"


def rewrite(store: Path, change: Callable[[str, dict[str, Any]], None]) -> None:
    """Let `change(kind, document)` alter every document that a load of the newest snapshot reads, digests and all."""
    mark, snapshot = store / "store.json", store / f"snapshots/{NEWEST}.json"
    for kind, path in (("store", mark), *(("run", run) for run in (store / "runs").iterdir())):
        document = json.loads(path.read_bytes()[:-33])
        change(kind, document)
        path.write_bytes(seal(document))
    document = json.loads(snapshot.read_bytes()[:-33])
    for row in document["parts"]:
        part = json.loads(zstandard.decompress((store / row[0]).read_bytes()))
        change("part", part)
        data = zstandard.compress(json.dumps(part).encode())
        (store / row[0]).write_bytes(data)
        row[1:] = [len(data), xxhash.xxh3_128_hexdigest(data)]
    change("snapshot", document)
    snapshot.write_bytes(seal(document))


def content(loaded: Loaded) -> dict[str, Any]:
    return {path: source.describe(leaf) for path, leaf in loaded.leaves.items()}


def test_fields_that_nobody_knows_change_nothing_for_either_reader(copy: Path) -> None:
    """A later version may add fields to every document."""

    def add(kind: str, document: dict[str, Any]) -> None:
        document["aaa_unknown"] = {"deep": [1, None]}
        for row in (*document.get("shards", ()), *document.get("bundles", ())):
            row["zzz_unknown"] = [1.5]

    before = content(SecondReader(copy).load())
    names = {name: str(value) for name, value in ckpt.load(str(copy)).items()}
    rewrite(copy, add)
    assert content(SecondReader(copy).load()) == before
    assert {name: str(value) for name, value in ckpt.load(str(copy)).items()} == names


@pytest.mark.parametrize("kind", ["store", "run", "snapshot", "part"])
def test_a_newer_format_is_refused_before_anything_else_is_looked_at(copy: Path, kind: str) -> None:
    """Not even the fields that have always been there may be relied on."""

    def outdate(found: str, document: dict[str, Any]) -> None:
        if found == kind:
            document.clear()
            document["format"] = 2

    if kind == "snapshot":
        (copy / f"snapshots/{NEWEST}.json").write_bytes(seal({"format": 2}))
    else:
        rewrite(copy, outdate)
    with pytest.raises(NewerFormat, match="format 2"):
        SecondReader(copy).load()
    if kind != "store":  # a load by the product does not ask for the mark
        with pytest.raises(ckpt.FormatTooNew):
            ckpt.load(str(copy))


# -- damage ------------------------------------------------------------------------------------------------------------


class Flipping(SecondReader):
    """Reads a store of which one bit of one object has flipped."""

    def __init__(self, folder: Path, bad: str = "", place: float = 0.0) -> None:
        self.bad, self.place, self.read = bad, place, set[str]()
        super().__init__(folder)

    def stored(self, name: str) -> bytes:
        data = bytearray(super().stored(name))
        self.read.add(name)
        if name == self.bad:
            data[int(self.place * len(data))] ^= 4
        return bytes(data)


def test_one_flipped_bit_anywhere_is_noticed() -> None:
    """In every object that a load reads: near its start, in the middle, at its end."""
    whole = Flipping(STORE)
    whole.load(NEWEST)
    own = {name for name in whole.read if not name.startswith("snapshots/") or NEWEST in name}
    assert len(own) > 10, "hardly anything was read: this test shows nothing"
    for name in sorted(own):
        for place in (0.0, 0.3, 0.6, 0.9999999):
            with pytest.raises(Damaged):
                Flipping(STORE, name, place).load(NEWEST)


def test_a_blob_that_is_not_its_own_is_noticed_though_its_pack_is_whole() -> None:
    """Packs are checked as wholes by this reader; the digests of blobs and chunks hold by themselves, too."""

    class Lying(SecondReader):
        def blob(self, name: str, length: int, start: int) -> Any:
            data, row = super().blob(name, length, start)
            return data[:-1] + bytes([data[-1] ^ 1]), row

    with pytest.raises(Damaged, match="not the one that was stored"):
        Lying(STORE).load(NEWEST)


def test_a_damaged_revision_falls_back_to_the_one_before(copy: Path) -> None:
    before = content(SecondReader(copy).load(COMPACTED))
    damaged = copy / f"snapshots/{COMPACTED}.r1.json"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    reader = SecondReader(copy)
    assert reader.snapshots()[COMPACTED]["revision"] == 0
    assert content(reader.load(COMPACTED)) == before


def test_a_snapshot_whose_part_is_gone_is_not_one(copy: Path) -> None:
    """What a prune that was killed half-way leaves."""
    gone = SecondReader(copy).snapshots()[NEWEST]["parts"][1][0]
    (copy / gone).unlink()
    assert SecondReader(copy).load().id == "000002-0badcafe-000000000040"
