"""FORMAT.md says what the code does: its tables are parsed and compared, so that neither can move alone.

What a table cannot show (the bytes of a blob, the grid) is shown by the second reader in tests/golden.
"""

from __future__ import annotations

import itertools
import re
from functools import cache
from pathlib import Path
from typing import get_args

import pytest
from msgspec import Struct

import ckpt.format
from ckpt.format.codec import KINDS, NEEDS_BASE, orders
from ckpt.format.manifest import (
    FORMAT,
    Alive,
    BundleRow,
    Holder,
    Part,
    PinDoc,
    PruneDoc,
    RunDoc,
    ShardRow,
    Snapshot,
    StoreDoc,
    Totals,
)
from ckpt.format.names import (
    STORE_KEY,
    PackName,
    PartName,
    RunId,
    SegmentName,
    SnapshotId,
    SnapshotName,
    alive_key,
    parse_run_key,
    pin_key,
    prune_key,
    run_key,
)
from ckpt.format.pack import PACK_LIMIT
from ckpt.format.shards import DTYPES, SMALL_LEAF
from ckpt.format.values_kinds import EXACT, FACTORIES, MAX_DEPTH, TorchKind
from ckpt.format.values_reading import _PATHS, _READERS

PAGE = Path(ckpt.format.__path__[0], "FORMAT.md").read_text()


@cache
def table(*head: str) -> list[list[str]]:
    """The rows of the one table that has this head."""
    lines = PAGE.splitlines()
    [start] = [i for i, line in enumerate(lines) if cells(line) == list(head)]
    return [cells(line) for line in itertools.takewhile(lambda line: line.startswith("|"), lines[start + 2 :])]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def ticked(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def test_the_version_is_the_one_that_is_written() -> None:
    assert re.findall(r"^# The format, version (\d+)$", PAGE, re.MULTILINE) == [str(FORMAT)]


def test_codec_kinds_have_these_numbers_names_and_needs() -> None:
    rows = table("number", "name", "needs a base", "blob")
    assert {int(number): name for number, name, _, _ in rows} == KINDS
    assert {int(number) for number, _, base, _ in rows if base == "yes"} == NEEDS_BASE
    assert {base for _, _, base, _ in rows} == {"yes", "no"}


def test_dtypes_have_these_sizes_words_and_order() -> None:
    rows = table("size", "word", "dtypes")
    listed = [(name, int(size), int(word)) for size, word, names in rows for name in names.split(", ")]
    assert sorted(listed) == sorted((d.name, d.size, d.word) for d in DTYPES.values())
    # "float and complex dtypes" by their names, but for those that the page takes out.
    [out] = re.findall(r"For other dtypes \((\w+) and (\w+) among them\)", PAGE)
    named = {name for name in DTYPES if re.match("b?float|complex", name)}
    assert named - set(out) == {d.name for d in DTYPES.values() if orders(d)}


def test_values_have_these_tags() -> None:
    rows = table("tag", "content")
    assert sorted(tag for tags, _ in rows for tag in ticked(tags)) == sorted(_READERS)
    content = {tag: text for tags, text in rows for tag in ticked(tags)}
    assert content["default"].split("factory: ")[1].split(", ") == list(FACTORIES)
    assert re.findall(r"(path|posix|windows)(?: \(|,|$)", content["path"].split("kind: ")[1]) == list(_PATHS)
    assert content["torch"].split("kind: ")[1].split(";")[0].split(", ") == list(get_args(TorchKind))


def test_objects_have_these_names() -> None:
    run, digest = RunId(7, "0123abcd"), "00ff00ff00ff00ff"
    id_ = SnapshotId(run, 1200)
    filled = {
        "store mark": [STORE_KEY],
        "run": [run_key(run)],
        "heartbeat": [alive_key(run)],
        "pack": [PackName(id_, 3, 4, digest).key, PackName(id_, 3, 4000, digest).key],
        "part": [PartName(id_, 3).key, PartName(id_, 3, 2).key],
        "snapshot": [SnapshotName(id_).key, SnapshotName(id_, 2).key],
        "pin": [pin_key("best")],
        "prune": [prune_key("0123456789abcdef")],
        "segment": [SegmentName(run, 3, 1200, 1250).key],
    }
    rows = {kind: ticked(name)[0] for kind, name in table("object", "name")}
    assert rows.keys() == filled.keys()
    for kind, template in rows.items():
        for name in filled[kind]:
            assert pattern(template).fullmatch(name), f"{kind}: {name} is not a {template}"


def pattern(template: str) -> re.Pattern[str]:
    """The names of a template, by what the page says of its words."""
    words = {
        "run": r"\d{6}-[0-9a-f]{8}",
        "step": r"\d{12}",
        "rank": r"\d{5}",
        "n": r"\d{3,}",
        "digest": "[0-9a-f]{16}",
        "revision": r"[1-9]\d*",
        "name": r"(?!\.)[A-Za-z0-9._-]{1,100}",
        "nonce": "[0-9a-f]+",
    }
    text = re.escape(template).replace(r"\[", "(").replace(r"\]", ")?")
    return re.compile(re.sub(r"<(\w+)>", lambda found: words[found[1]], text))


@pytest.mark.parametrize(
    "name",
    [
        "runs/00007-0123abcd.json",
        "runs/000007-0123ABCD.json",
        "runs/000007-0123abcd.json.bak",
        "snapshots/000007-0123abcd-1200.json",
        "parts/000007-0123abcd/000000001200/00003.json",
        "packs/000007-0123abcd/000000001200/00003-04-00ff00ff00ff00ff.safetensors",
        "journal/000007-0123abcd/00003/000000001200.segment",
    ],
)
def test_other_names_are_no_objects(name: str) -> None:
    assert not any(pattern(ticked(template)[0]).fullmatch(name) for _, template in table("object", "name"))
    parsers = (SnapshotName.parse, PartName.parse, PackName.parse, SegmentName.parse, parse_run_key)
    assert [parse(name) for parse in parsers] == [None] * 5


DOCUMENTS: dict[str, tuple[type[Struct], ...]] = {
    "store mark": (StoreDoc,),
    "run": (RunDoc,),
    "heartbeat": (Alive,),
    "snapshot": (Snapshot, Totals),
    "pin": (PinDoc, Holder),
    "prune": (PruneDoc,),
}


def test_documents_have_these_fields() -> None:
    rows = table("document", "fields")
    assert {kind for kind, _ in rows} == DOCUMENTS.keys()
    for kind, text in rows:
        named = [word for word in ticked(text) if re.fullmatch("[a-z_]+", word)]
        fields = {field for struct in DOCUMENTS[kind] for field in struct.__struct_fields__}
        assert set(named) == fields, kind
    assert f'`kind` = `"{StoreDoc(FORMAT).kind}"`' in dict(rows)["store mark"]


def test_parts_have_these_fields() -> None:
    rows = table("field", "meaning")
    assert sorted(field for fields, _ in rows for field in ticked(fields)) == sorted(Part.__struct_fields__)
    [shard] = re.findall(r"A \*shard\* is an object: (.*?)\. An absent", PAGE, re.DOTALL)
    assert [w for w in ticked(shard) if w in ShardRow.__struct_fields__] == list(ShardRow.__struct_fields__)
    [bundle] = re.findall(r"A \*bundle\* is an object: (.*?)\.", PAGE, re.DOTALL)
    assert ticked(bundle) == list(BundleRow.__struct_fields__)


def test_numbers_in_the_text_are_those_of_the_code() -> None:
    assert f"global size is under {SMALL_LEAF} bytes" in PAGE
    assert f"at most {PACK_LIMIT >> 20} MiB" in PAGE
    assert f"at most {MAX_DEPTH} deep" in PAGE
    assert EXACT == 2**53
    assert "within ±2^53" in PAGE
