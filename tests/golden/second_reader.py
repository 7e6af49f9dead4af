"""A second reader, written from FORMAT.md alone: it shares no code with the product, and no idea of speed.

What it can read, any reader can; what it reads differently from the product is a fault of one of the three.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from . import second_codec as codec
from . import second_values
from .second_codec import SIZES, Damaged
from .second_key import SecondKey

VERSION = 1
RUN, STEP, REVISION = r"(?P<run>\d{6}-[0-9a-f]{8})", r"(?P<step>\d{12})", r"(\.r(?P<revision>[1-9]\d*))?"
SNAPSHOT = re.compile(rf"snapshots/{RUN}-{STEP}{REVISION}\.json", re.ASCII)
PART = re.compile(rf"parts/{RUN}/{STEP}/(?P<rank>\d{{5}}){REVISION}\.json\.zst")
PACK = re.compile(rf"packs/{RUN}/{STEP}/(?P<rank>\d{{5}})-(?P<n>\d{{3,}})-(?P<digest>[0-9a-f]{{16}})\.safetensors")

Box = tuple[tuple[int, ...], tuple[int, ...]]


class NewerFormat(Damaged):
    """Written by a later version: nothing else in the document may be looked at."""


@dataclass(frozen=True)
class Leaf:
    cls: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True)
class Loaded:
    """One snapshot. `per_rank`, `values` and `aliases`: one entry per rank. `forms` counts the blobs read: "0" … "4" by
    kind, "5.1" … "5.64" sparse ones by form; and "of": the chunks cut out of larger ones."""

    id: str
    reference: str | None
    leaves: dict[str, Leaf]
    per_rank: tuple[dict[str, Leaf], ...]
    values: tuple[dict[str, Any], ...]
    aliases: tuple[dict[str, str], ...]
    metrics: Any
    forms: Counter[str]


@dataclass(frozen=True)
class PackRow:
    """A blob as its pack's header describes it."""

    stop: int
    kind: int
    digest: str
    dtype: str
    chunk: str
    base: str | None


# -- documents ---------------------------------------------------------------------------------------------------------


def parse(data: bytes, version: int = VERSION) -> Any:
    def refuse(word: str) -> Any:
        raise Damaged(f"{word} is not JSON")

    try:
        document = json.loads(data.decode("utf-8"), parse_constant=refuse)
    except ValueError as error:
        raise Damaged(f"not JSON: {error}") from error
    if not isinstance(document, dict) or type(document.get("format")) is not int:
        raise Damaged("not an object with a number `format`")
    if document["format"] > version:
        raise NewerFormat(f"format {document['format']}; this reader knows up to {version}")
    return document


def unseal(data: bytes, version: int = VERSION) -> Any:
    body, seal = data[:-33], data[-33:]
    if not body.endswith(b"\n") or seal != xxhash.xxh3_128_hexdigest(body).encode() + b"\n":
        raise Damaged("the digest at the end does not fit")
    return parse(body, version)


def read_pack(data: bytes, name: str = "", key: SecondKey | None = None) -> dict[int, PackRow]:
    """The blobs of a pack by their start in the file, from its header alone (§4)."""
    if len(data) < 8:
        raise Damaged("a pack without a header")
    begin = 8 + struct.unpack("<Q", data[:8])[0]
    if begin > len(data):
        raise Damaged("a pack's header is longer than the pack")
    header = json.loads(data[8:begin])
    meta = header.pop("__metadata__")
    if key is not None:
        meta = key.rows(meta, name)
    if meta["format"] != "1":
        raise NewerFormat(f"a pack of format {meta['format']}")
    dtypes = [row.split(":")[0] for row in meta["dtypes"].split(",")]
    rows, result, at = meta["blobs"].split(","), {}, begin
    if len(rows) != len(header):
        raise Damaged("a pack's header has two counts of blobs")
    for number, (name, tensor) in enumerate(header.items()):
        n, digest, kind = name.split("-")
        chunk, i, *base = rows[number].split(":")
        start, stop = (begin + offset for offset in tensor["data_offsets"])
        if (int(n), start, stop, "U8") != (number, at, start + tensor["shape"][0], tensor["dtype"]):
            raise Damaged(f"blob {number} of a pack does not follow the one before")
        result[start] = PackRow(stop, int(kind), digest, dtypes[int(i)], chunk, base[0] if base else None)
        at = stop
    if at != len(data):
        raise Damaged("a pack goes on after its last blob")
    return result


# -- the store ---------------------------------------------------------------------------------------------------------


class SecondReader:
    """A store in a folder: the object `a/b` is the file `a/b`. `secret`: the key of an encrypted one."""

    def __init__(self, folder: Path, secret: bytes | None = None) -> None:
        self.folder = folder
        self.key = None if secret is None else SecondKey(secret)
        self.names = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
        self.packs: dict[str, tuple[bytes, dict[int, PackRow]]] = {}
        mark = unseal(self.stored("store.json"), 1 if self.key is None else 2)
        if mark["kind"] != "incremental-ckpt store":
            raise Damaged("store.json is not the mark of such a store")
        if mark["key_id"] != (None if self.key is None else self.key.id):
            raise Damaged(f"store.json asks for key {mark['key_id']}")

    def stored(self, name: str) -> bytes:
        try:
            return (self.folder / name).read_bytes()
        except FileNotFoundError as error:
            raise Damaged(f"{name} is missing") from error

    def get(self, name: str) -> bytes:
        """A document."""
        return self.stored(name) if self.key is None else self.key.document(self.stored(name), name)

    def snapshots(self) -> dict[str, dict[str, Any]]:
        """Every snapshot by id, in order of (run, step): the highest revision that can be read, its parts all there."""
        found: dict[str, dict[str, Any]] = {}
        named = [(match, name) for name in self.names if (match := SNAPSHOT.fullmatch(name))]
        for match, name in sorted(named, key=lambda row: (row[0]["run"], row[0]["step"], int(row[0]["revision"] or 0))):
            try:
                document = unseal(self.get(name))
            except NewerFormat:
                raise
            except Damaged:
                continue
            says = (document["run"], document["step"], document["revision"])
            if says != (match["run"], int(match["step"]), int(match["revision"] or 0)):
                raise Damaged(f"{name} describes {says}")
            if all(part in self.names for part, _, _ in document["parts"]):
                found[f"{match['run']}-{match['step']}"] = document
        return found

    def live(self) -> list[str]:
        """The live line, newest first."""
        ids = list(self.snapshots())
        line: list[str] = []
        tip = ids[-1] if ids else None
        while tip is not None:
            run = tip[:15]
            line += [i for i in reversed(ids) if i.startswith(run) and i <= tip]
            tip = unseal(self.get(f"runs/{run}.json"))["resumed_from"]
            if tip is not None and tip >= line[-1]:
                raise Damaged(f"{run} was resumed from {tip}, which is not older")
        return line

    def load(self, name: str | None = None) -> Loaded:
        """The snapshot of this id, or the newest of the live line."""
        name = name or next(iter(self.live()), "the newest")
        snapshots = self.snapshots()
        if name not in snapshots:
            raise Damaged(f"{name}: no revision of it can be read")
        document = snapshots[name]
        if len(document["parts"]) != document["world_size"]:
            raise Damaged(f"{name} has {len(document['parts'])} parts of {document['world_size']}")
        parts = [self.part(document, rank) for rank in range(document["world_size"])]
        if len({part["ownership"] for part in parts}) != 1:
            raise Damaged(f"{name}: the ranks' parts disagree about who stores what")
        leaves, forms = Assembly(), Counter[str]()
        per_rank = tuple(Assembly() for _ in parts)
        for part in parts:
            bundles = [self.elements(part, row, forms) for row in part["bundles"]]
            for shard in part["shards"]:
                data = self.shard(part, shard, bundles, forms)
                (per_rank[part["rank"]] if shard.get("per_rank") else leaves).add(shard, data)
        return Loaded(
            id=name,
            reference=document["reference"],
            leaves=leaves.finish(),
            per_rank=tuple(own.finish() for own in per_rank),
            values=tuple({k: second_values.decode(v) for k, v in part["values"].items()} for part in parts),
            aliases=tuple(dict(part["aliases"]) for part in parts),
            metrics=parts[0]["metrics"],
            forms=forms,
        )

    def part(self, snapshot: Mapping[str, Any], rank: int) -> dict[str, Any]:
        name, length, digest = snapshot["parts"][rank]
        match, data = PART.fullmatch(name), self.get(name)
        if match is None or len(data) != length or xxhash.xxh3_128_hexdigest(data) != digest:
            raise Damaged(f"{name} is not what the snapshot says")
        part: dict[str, Any] = parse(codec.unzstd(data, None))
        says = (part["run"], part["step"], part["rank"], part["revision"], part["world_size"])
        named = (match["run"], int(match["step"]), int(match["rank"]), int(match["revision"] or 0))
        if says != (*named, snapshot["world_size"]) or named[:3] != (snapshot["run"], snapshot["step"], rank):
            raise Damaged(f"{name} describes {says}")
        if not {tuple(row) for row in part["packs"]} <= {tuple(row) for row in snapshot["packs"]}:
            raise Damaged(f"{name} needs packs that the snapshot does not name")
        return part

    # -- chunks --------------------------------------------------------------------------------------------------------

    def shard(self, part: Any, shard: Any, bundles: list[bytes], forms: Counter[str]) -> bytes:
        """The row-major bytes of a shard's own box."""
        size, box = SIZES[shard["dtype"]][0], read_box(shard["box"])
        length = math.prod(box[1]) * size
        if "bundle" in shard:
            number, first = shard["bundle"]
            bundle = part["bundles"][number]
            if (bundle["cls"], bundle["dtype"]) != (shard["cls"], shard["dtype"]):
                raise Damaged(f"{shard['leaf']} lies in a bundle of another class or dtype")
            data = bundles[number][first * size : first * size + length]
        else:
            data = self.boxed(part, shard["dtype"], tuple(shard["shape"]), box, shard.get("chunks", []), forms)
        if len(data) != length:
            raise Damaged(f"{shard['leaf']} has {len(data)} bytes, expected {length}")
        return data

    def elements(self, part: Any, bundle: Any, forms: Counter[str]) -> bytes:
        shape = (bundle["length"],)
        return self.boxed(part, bundle["dtype"], shape, ((0,), shape), bundle.get("chunks", []), forms)

    def boxed(
        self, part: Any, dtype: str, shape: tuple[int, ...], box: Box, chunks: list[Any], forms: Counter[str]
    ) -> bytes:
        own = list(cells(shape, box, SIZES[dtype][0], part["chunk"]))
        if len(own) != len(chunks):
            raise Damaged(f"{len(chunks)} chunks for {len(own)} cells of the grid")
        return b"".join(self.chunk(part, dtype, *pair, forms) for pair in zip(own, chunks, strict=True))

    def chunk(self, part: Any, dtype: str, own: Box, chunk: list[Any], forms: Counter[str]) -> bytes:
        digest, blobs, *rest = chunk
        whole = read_box(rest[0]) if rest and rest[0] is not None else own
        size, data, before = SIZES[dtype][0], None, None
        seed = xxhash.xxh3_64_intdigest(dtype.encode("ascii"))
        for pack, start, stop, kind, blob_digest in blobs:
            blob, row = self.blob(*part["packs"][pack], start)
            if (row.stop, row.kind, row.digest, row.dtype) != (stop, kind, blob_digest, dtype):
                raise Damaged(f"the pack describes the blob at {start} otherwise than the part")
            if xxhash.xxh3_64_hexdigest(blob) != blob_digest or row.base != before:
                raise Damaged(f"the blob at {start} is not the one that was stored")
            if self.key is not None:
                blob = self.key.blob(blob, kind)
            data = codec.decode(
                kind, blob, data if kind in codec.NEED_BASE else None, math.prod(whole[1]) * size, dtype
            )
            before = row.chunk
            if xxhash.xxh3_128_hexdigest(data, seed) != before:
                raise Damaged(f"the blob at {start} decodes to something else than its pack says")
            forms[f"{kind}.{blob[8]}" if kind == 5 else str(kind)] += 1
        if data is None:
            raise Damaged(f"a chunk of {dtype} without a blob")
        if whole != own:  # what is cut out has the digest, not what was decoded: the page did not say so at first
            inside = tuple(slice(o - w, o - w + n) for o, w, n in zip(own[0], whole[0], own[1], strict=True))
            data = as_grid(data, whole[1], size)[inside].tobytes()
            forms["of"] += 1
        if xxhash.xxh3_128_hexdigest(data, seed) != digest:
            raise Damaged(f"a chunk of {dtype} is not the one that was stored")
        return data

    def blob(self, name: str, length: int, start: int) -> tuple[bytes, PackRow]:
        if name not in self.packs:
            match, data = PACK.fullmatch(name), self.stored(name)
            if match is None or len(data) != length or xxhash.xxh3_64_hexdigest(data) != match["digest"]:
                raise Damaged(f"{name} is not the pack that its name says")
            self.packs[name] = (data, read_pack(data, name, self.key))
        data, rows = self.packs[name]
        if start not in rows:
            raise Damaged(f"no blob starts at byte {start} of {name}")
        return data[start : rows[start].stop], rows[start]


# -- boxes -------------------------------------------------------------------------------------------------------------


def read_box(box: Any) -> Box:
    offsets, lengths = box
    return tuple(offsets), tuple(lengths)


def cells(shape: tuple[int, ...], box: Box, size: int, chunk: int) -> Iterator[Box]:
    """The cells of a tensor's grid, cut to a box, row-major, empty ones left out (§3)."""
    if 0 in box[1]:
        return
    if not shape:
        yield (), ()
        return
    tails = [size * (math.prod(shape[j + 1 :]) or 1) for j in range(len(shape))]
    cut = next(j for j, tail in enumerate(tails) if tail <= chunk)
    step = 2 ** math.floor(math.log2(chunk // tails[cut]))
    runs = []
    for j, (offset, length) in enumerate(zip(*box, strict=True)):
        pace = 1 if j < cut else step if j == cut else shape[j]
        lines = range(offset // pace * pace, offset + length, pace)
        runs.append([(max(at, offset), min(at + pace, offset + length)) for at in lines])
    for spans in itertools.product(*runs):
        yield tuple(a for a, _ in spans), tuple(b - a for a, b in spans)


def as_grid(data: bytes, lengths: tuple[int, ...], size: int) -> np.ndarray[Any, Any]:
    return np.frombuffer(data, np.uint8).reshape(*lengths, size)


class Assembly:
    """Puts the boxes of leaves together; every element has to come exactly once."""

    def __init__(self) -> None:
        self.leaves: dict[str, tuple[tuple[Any, ...], np.ndarray[Any, Any], np.ndarray[Any, Any]]] = {}

    def add(self, shard: Any, data: bytes) -> None:
        about, box = (shard["cls"], shard["dtype"], tuple(shard["shape"])), read_box(shard["box"])
        size, shape = SIZES[shard["dtype"]][0], about[2]
        empty = np.zeros((*shape, size), np.uint8), np.zeros(shape, np.uint8)
        known, whole, seen = self.leaves.setdefault(shard["leaf"], (about, *empty))
        ends = [offset + length for offset, length in zip(*box, strict=True)]
        if known != about or len(ends) != len(shape) or any(end > n for end, n in zip(ends, shape, strict=True)):
            raise Damaged(f"{shard['leaf']}: {about} {box} beside {known}")
        where = tuple(slice(offset, end) for offset, end in zip(box[0], ends, strict=True))
        whole[where] = as_grid(data, box[1], size)
        seen[where] += 1

    def finish(self) -> dict[str, Leaf]:
        for path, (_, _, seen) in self.leaves.items():
            if (seen != 1).any():
                raise Damaged(f"{path} is not covered exactly once")
        return {path: Leaf(*about, whole.tobytes()) for path, (about, whole, _) in self.leaves.items()}
