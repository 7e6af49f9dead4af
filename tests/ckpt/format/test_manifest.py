"""Documents: what is written is read back, and nothing else is believed."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.errors import DamagedError, FormatTooNew
from ckpt.format.layout import Layout, lay_out
from ckpt.format.manifest import (
    FORMAT,
    Alive,
    Blob,
    Chunk,
    PartHead,
    PartRef,
    PinDoc,
    PruneDoc,
    RunDoc,
    Snapshot,
    StoreDoc,
    Totals,
    chunk_digest,
    digest64,
    digest128,
    read_part,
    seal,
    unseal,
    write_part,
)
from ckpt.format.names import PackName, PartName, RunId, SnapshotId
from ckpt.format.shards import Box, Leaf, Shard, whole

RUN = RunId(3, "0badcafe")
KEY = "parts/000003-0badcafe/000000000020/00001.json.zst"
CHUNK = 8192
PACK_A, PACK_B = (PackName(SnapshotId(RUN, 20), 1, n, "0" * 16).key for n in (0, 1))


def layout_of_two_leaves_and_scalars() -> Layout:
    shards = [
        Shard(Leaf("model.w", "parameter", "float32", (100, 50)), Box((10, 0), (60, 50))),
        Shard(Leaf("model.ü", "parameter", "bfloat16", (3000,)), Box((3000,), (0,))),
        Shard(Leaf("optimizer.step", "slot:step", "float32", ()), whole(())),
        Shard(Leaf("optimizer.bias", "slot:step", "float32", (7,)), whole((7,)), per_rank=True),
    ]
    return lay_out(shards, CHUNK)


def table_of(layout: Layout) -> tuple[tuple[Chunk, ...], dict[str, int]]:
    packs = {PACK_B: 5000, PACK_A: 90_000}
    chunks = []
    for i, piece in enumerate(layout.pieces):
        blobs = (Blob(PACK_A, 100 * i, 100 * i + 60, 2, digest64(b"%d" % i)),)
        if i % 2:
            blobs = (*blobs, Blob(PACK_B, 10 * i, 10 * i + 5, 5, digest64(b"d%d" % i)))
        of = Box((0,) * len(piece.box.offsets), (50,) * len(piece.box.offsets)) if i % 3 == 0 else None
        chunks.append(Chunk(chunk_digest(piece.dtype, b"%d" % i), blobs, of))
    return tuple(chunks), packs


def head(**changes: Any) -> PartHead:
    fields: dict[str, Any] = {
        "run": RUN,
        "step": 20,
        "world_size": 4,
        "rank": 1,
        "ownership": digest128(b"table"),
        "reference": SnapshotId(RUN, 10),
        "time": None,
        "metrics": {"loss": 0.25},
        "stored": {2: 700, 5: 12},
        "aliases": {"model.head": "model.w"},
        "replicas": {"model.w [0:100, 0:50]": "99"},
        "values": {"scheduler": b'{"last_epoch":3}'},
    }
    return PartHead(**{**fields, **changes})


def a_part(**changes: Any) -> bytes:
    layout = layout_of_two_leaves_and_scalars()
    table, packs = table_of(layout)
    return write_part(head(**changes), layout, table, packs, lambda: None)


def name_of(data: bytes) -> PartRef:
    return PartRef(KEY, len(data), digest128(data))


def test_a_part_is_read_back_as_it_was_written() -> None:
    layout = layout_of_two_leaves_and_scalars()
    table, packs = table_of(layout)
    breaths = []
    data = write_part(head(), layout, table, packs, lambda: breaths.append(1))
    part = read_part(data, key=KEY, name=name_of(data))
    assert len(breaths) >= len(layout.regions)
    assert (part.run, part.step, part.rank, part.world_size, part.revision) == (str(RUN), 20, 1, 4, 0)
    assert part.id == SnapshotId(RUN, 20)
    assert part.reference == str(SnapshotId(RUN, 10))
    assert part.packs == tuple(sorted(packs.items()))
    assert part.stored == {"2": 700, "5": 12}
    assert (part.aliases, part.replicas) == ({"model.head": "model.w"}, {"model.w [0:100, 0:50]": "99"})
    assert bytes(part.values["scheduler"]) == b'{"last_epoch":3}'
    assert part.size == sum(r.nbytes for r in layout.regions)
    assert [(s.leaf, s.as_box, s.per_rank) for s in part.shards] == [
        (r.shard.leaf.path, r.shard.box, r.shard.per_rank) for r in layout.regions
    ]
    for bundle, row in zip(layout.bundles, part.bundles, strict=True):
        assert part.chunks(row) == table[bundle.piece : bundle.piece_stop]
    for region, shard in zip(layout.regions, part.shards, strict=True):
        assert part.chunks(shard) == table[region.piece : region.piece_stop]


def test_equal_arguments_give_equal_bytes_in_whatever_order_their_mappings_are() -> None:
    layout = layout_of_two_leaves_and_scalars()
    table, packs = table_of(layout)
    one = head(
        stored={2: 1, 5: 2}, aliases={"a": "b", "c": "d"}, values={"x": b"1", "y": b"2"}, metrics={"p": 1, "q": 2}
    )
    two = head(
        stored={5: 2, 2: 1}, aliases={"c": "d", "a": "b"}, values={"y": b"2", "x": b"1"}, metrics={"q": 2, "p": 1}
    )
    first = write_part(one, layout, table, packs, lambda: None)
    second = write_part(two, layout, table, dict(reversed(packs.items())), lambda: None)
    assert first == second


def test_every_flipped_bit_of_a_part_is_noticed() -> None:
    data = a_part()
    name = name_of(data)
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedError) as caught:
            read_part(bytes(damaged), key=KEY, name=name)
        assert caught.value.key == KEY


def test_a_cut_or_lengthened_part_is_damaged_even_without_a_name() -> None:
    data = a_part()
    for wrong in (b"", data[:3], data[:-1], data + b"\0", data + data, zstandard.compress(b"{}")):
        with pytest.raises(DamagedError):
            read_part(wrong, key=KEY)


def test_a_frame_that_claims_to_be_huge_is_refused_before_it_is_decoded() -> None:
    bomb = zstandard.ZstdCompressor(level=1).compress(bytes(1 << 20))
    claim = zstandard.get_frame_parameters(bomb).content_size.to_bytes(4, "little")
    huge = bomb.replace(claim, (0xFFFFFFF0).to_bytes(4, "little"), 1)
    assert zstandard.frame_content_size(huge) == 0xFFFFFFF0
    with pytest.raises(DamagedError, match="claims"):
        read_part(huge, key=KEY)


def test_a_part_of_a_newer_format_asks_for_an_upgrade_whatever_else_it_says() -> None:
    text = json.dumps({"format": FORMAT + 1, "everything": "else is new"}).encode()
    with pytest.raises(FormatTooNew) as caught:
        read_part(zstandard.compress(text), key=KEY)
    assert (caught.value.found, caught.value.supported) == (FORMAT + 1, FORMAT)


def fields_of_a_part() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(zstandard.decompress(a_part()))
    return found


def test_unknown_fields_are_ignored() -> None:
    fields = fields_of_a_part()
    fields["mood"] = ["sunny"]
    fields["shards"][0]["colour"] = 3
    assert read_part(zstandard.compress(json.dumps(fields).encode()), key=KEY).step == 20


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("a rank outside the world", lambda f: f.update(rank=4)),
        ("a chunk too few", lambda f: f["shards"][0]["chunks"].pop()),
        ("a chunk without blobs", lambda f: f["shards"][0]["chunks"][0].__setitem__(1, [])),
        ("a blob in no pack", lambda f: f["shards"][0]["chunks"][0][1][0].__setitem__(0, 2)),
        ("a blob past the end of its pack", lambda f: f["shards"][0]["chunks"][0][1][0].__setitem__(2, 90_001)),
        ("an empty blob", lambda f: f["shards"][0]["chunks"][0][1][0].__setitem__(2, 100)),
        ("a box outside its shape", lambda f: f["shards"][0].update(box=[[60, 0], [60, 50]])),
        ("a box of other dimensions", lambda f: f["shards"][0].update(box=[[0], [60, 50]])),
        ("a shape beyond belief", lambda f: f["shards"][0].update(shape=[1 << 60, 1], box=[[0, 0], [1 << 60, 1]])),
        ("an unknown dtype", lambda f: f["shards"][0].update(dtype="float31")),
        ("a digest with a newline", lambda f: f.update(ownership=f["ownership"] + "\n")),
        ("a run with a newline", lambda f: f.update(run=f["run"] + "\n")),
        ("a bundle that is not there", lambda f: f["shards"][-1].update(bundle=[9, 0])),
        ("elements outside the bundle", lambda f: f["shards"][-1].update(bundle=[0, 8])),
        ("a bundle longer than its chunks", lambda f: f["bundles"][0].update(length=1 << 50)),
        ("an `of` that is no box", lambda f: f["bundles"][0]["chunks"][0].__setitem__(2, [[0, 0], [5]])),
        ("a negative step", lambda f: f.update(step=-1)),
        ("a fractional step", lambda f: f.update(step=1.5)),
        ("a chunk size of nothing", lambda f: f.update(chunk=0)),
    ],
)
def test_inconsistent_parts_are_damaged(what: str, change: Any) -> None:
    fields = fields_of_a_part()
    # model.w comes first only when sorted; pick rows by what they are.
    fields["shards"].sort(key=lambda s: (s["leaf"] != "model.w", s.get("bundle") is not None, s["leaf"]))
    read_part(zstandard.compress(json.dumps(fields).encode()), key=KEY)
    change(fields)
    with pytest.raises(DamagedError):
        read_part(zstandard.compress(json.dumps(fields).encode()), key=KEY)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(max_size=12)
    | st.sampled_from(["float32", "0" * 32, PACK_A, "000003-0badcafe"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_hostile_fields_are_damage_or_a_part_and_never_another_error(data: st.DataObject) -> None:
    fields = fields_of_a_part()
    for _ in range(data.draw(st.integers(1, 3))):
        node: Any = fields
        while True:
            keys: list[Any] = sorted(node) if isinstance(node, dict) else list(range(len(node)))
            if not keys:
                break
            key = data.draw(st.sampled_from(keys))
            if isinstance(node[key], dict | list) and data.draw(st.booleans()):
                node = node[key]
                continue
            node[key] = data.draw(json_values)
            break
    try:
        part = read_part(zstandard.compress(json.dumps(fields).encode()), key=KEY)
    except (DamagedError, FormatTooNew):
        return
    for row in (*part.bundles, *part.shards):
        part.chunks(row)
    assert part.size >= 0
    assert part.id.step == part.step


@pytest.mark.parametrize(
    "text", [b"", b"null", b"[]", b"\xff", b"[" * 100_000, b'{"format":' + b"9" * 5000 + b"}", b'{"format":1e999}']
)
def test_text_that_is_no_document_is_damaged(text: bytes) -> None:
    with pytest.raises(DamagedError):
        read_part(zstandard.compress(text), key=KEY)


# --- sealed documents --------------------------------------------------------------------------------------------

ID = SnapshotId(RUN, 20)
DOCUMENTS = [
    Snapshot(
        FORMAT,
        str(RUN),
        20,
        1,
        0,
        (PartRef(PartName(ID, 0).key, 100, digest128(b"")),),
        str(SnapshotId(RUN, 10)),
        ((PackName(ID, 0, 0, "0" * 16).key, 5),),
        Totals(700, 9000, {"2": 700}),
        {"loss": 1.5, "naïve": None},
        1.5e9,
    ),
    RunDoc(FORMAT, str(RUN), 2, "host", 17, "123", "boot", "4026", None, 1.5e9, str(ID), {"torch": "2.13"}),
    Alive(FORMAT, str(RUN), 9, False, 10.0),
    PinDoc(FORMAT, "best", str(ID)),
    PruneDoc(FORMAT, (str(ID),), ("packs/a", "packs/b")),
    StoreDoc(FORMAT),
]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: type(d).__name__)
def test_a_sealed_document_is_read_back_and_every_flipped_bit_is_noticed(document: Any) -> None:
    data = seal(document)
    kind = type(document)
    assert unseal(data, kind, key="k") == document
    assert seal(unseal(data, kind, key="k")) == data
    assert data[-33:-1].decode() == digest128(data[:-33])
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedError):
            unseal(bytes(damaged), kind, key="k")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: type(d).__name__)
def test_a_cut_document_or_one_of_another_kind_is_damaged(document: Any) -> None:
    data = seal(document)
    for wrong in (b"", data[:10], data[:-1], data + b"\n", data[1:], b"\n" * 40):
        with pytest.raises(DamagedError):
            unseal(wrong, type(document), key="k")
    other = Alive if not isinstance(document, Alive) else RunDoc
    with pytest.raises(DamagedError):
        unseal(data, other, key="k")


def sealed(text: bytes) -> bytes:
    body = text + b"\n"
    return body + digest128(body).encode() + b"\n"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: type(d).__name__)
def test_a_newer_document_asks_for_an_upgrade(document: Any) -> None:
    with pytest.raises(FormatTooNew):
        unseal(sealed(b'{"format":3}'), type(document), key="k")


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(DOCUMENTS), st.data())
def test_hostile_sealed_fields_are_damage_or_a_document_and_never_another_error(
    document: Any, data: st.DataObject
) -> None:
    fields = json.loads(msgspec.json.encode(document))
    key = data.draw(st.sampled_from(sorted(fields)))
    fields[key] = data.draw(json_values)
    try:
        found = unseal(sealed(json.dumps(fields).encode()), type(document), key="k")
    except (DamagedError, FormatTooNew):
        return
    if isinstance(found, Snapshot):
        assert found.id.step == found.step


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_at_all_are_no_document(data: bytes) -> None:
    for text in (data, sealed(data)):
        with pytest.raises(DamagedError):
            unseal(text, RunDoc, key="k")


def test_a_chunks_digest_depends_on_its_dtype() -> None:
    assert chunk_digest("float32", bytes(16)) != chunk_digest("int32", bytes(16))
    assert chunk_digest("float32", bytes(16)) == chunk_digest("float32", bytearray(16))
