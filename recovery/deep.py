"""The deep half of `verify`: every byte of every pack, and every chunk rebuilt.

Packs are streamed once for their digest. Chains are then rebuilt rank by rank over all snapshots, so that what is held
is one rank's tables; a chain that is the beginning of a longer one is checked on the way to it, so that a history of n
deltas costs n decodes and not n²/2.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import xxhash
from numpy.typing import NDArray

from ckpt.format.manifest import Blob, BundleRow, Part, ShardRow, chunk_digest
from ckpt.format.names import PackName, PartName
from ckpt.format.pack import MAX_HEADER, PACK_LIMIT, read_header, stray_place
from ckpt.format.shards import DTYPES, Box, cuts, whole
from ckpt.history.keyed import key_of
from recovery.assemble import Place
from recovery.boxes import carry_out, copies
from recovery.fetch import REQUEST, fetch
from recovery.findings import Finding
from recovery.parallel import batched, in_threads
from recovery.rebuild import Rebuilder, chain_problem
from storage_backends.base import NotFound, Refused, Store


def pack_problem(store: Store, key: str, size: int, piece: int = REQUEST, *, header: bool = True) -> str | None:
    """What is wrong with a pack of `size` bytes: its digest against its name, then its header (`header`: which needs
    the key of an encrypted store). None if nothing is."""
    name = PackName.parse(key)
    if name is None:
        return "this is not the name of a pack"
    if size > PACK_LIMIT:  # a file may claim any length, for nothing
        return f"expected at most {PACK_LIMIT} bytes, found {size}: not read"
    piece = min(piece, REQUEST)
    digest = xxhash.xxh3_64()
    head = bytearray()
    try:
        for start in range(0, size, piece):
            data = store.get_range(key, start, min(start + piece, size))
            digest.update(data)
            if len(head) < 8 or len(head) < 8 + min(int.from_bytes(head[:8], "little"), MAX_HEADER):
                head += data
    except NotFound:
        return "it is gone"
    except Refused as error:
        return f"it cannot be read to its end: {error}"
    if (place := stray_place(head, key)) is not None:
        return f"it is the pack that belongs at {place}; was it renamed, copied or swapped?"
    if (found := digest.hexdigest()) != name.digest:
        return f"expected digest {name.digest} of the whole object, as its name says, found {found}"
    if not header:
        return None
    try:
        read_header(head, size, key_of(store))
    except ValueError as error:
        return f"its digest holds, but its header does not: {error}"
    return None


@dataclass(frozen=True, slots=True)
class Use:
    """What a chain, or its beginning, is expected to give: the digest of `box` out of the box `of`."""

    digest: str
    of: Box
    box: Box


@dataclass(eq=False, slots=True)
class Chain:
    """Blobs to decode one on the other, and after how many of them what is expected, of whom and at which steps."""

    blobs: tuple[Blob, ...]
    dtype: str
    nbytes: int
    uses: dict[int, dict[Use, tuple[Place, set[int]]]] = field(default_factory=dict)

    @property
    def order(self) -> tuple[tuple[str, int, int, int, str], ...]:
        return tuple((b.pack, b.start, b.stop, b.kind, b.digest) for b in self.blobs)

    @property
    def cost(self) -> int:
        return sum(b.size for b in self.blobs)


def pieces(part: Part) -> Iterator[tuple[int, str, tuple[Blob, ...], Use, str]]:
    """Every chunk of a part: (number, leaf, blobs, use, dtype); a bundle's bears the name of its first leaf."""
    first: dict[int, str] = {}
    for shard in part.shards:
        if shard.bundle is not None:
            first.setdefault(shard.bundle[0], shard.leaf)
    rows: list[tuple[ShardRow | BundleRow, str, tuple[int, ...], Box]] = []
    rows += [(shard, shard.leaf, shard.shape, shard.as_box) for shard in part.shards if shard.bundle is None]
    rows += [
        (bundle, first.get(number, f"bundle {number}"), (bundle.length,), whole((bundle.length,)))
        for number, bundle in enumerate(part.bundles)
    ]
    for row, leaf, shape, box in rows:
        for n, (cut, chunk) in enumerate(
            zip(cuts(shape, box, DTYPES[row.dtype].size, part.chunk), row.chunks, strict=True)
        ):
            of = cut.box if chunk.of is None else Box(*chunk.of)
            yield n, leaf, tuple(part.blob(b) for b in chunk.blobs), Use(chunk.digest, of, cut.box), row.dtype


def chains(parts: Iterable[Part], bad: frozenset[Blob]) -> list[Chain]:
    """The longest chains of these parts, in store order; those with a blob already known to be bad are left out."""
    found: dict[tuple[str, int, tuple[Blob, ...]], Chain] = {}
    same: dict[Blob, Blob] = {}
    for part in parts:
        key = PartName(part.id, part.rank, part.revision).key
        for n, leaf, named, use, dtype in pieces(part):
            if not bad.isdisjoint(named):
                continue
            blobs = tuple(same.setdefault(b, b) for b in named)
            nbytes = use.of.numel * DTYPES[dtype].size
            chain = found.setdefault((dtype, nbytes, blobs), Chain(blobs, dtype, nbytes))
            uses = chain.uses.setdefault(len(blobs), {})
            _, steps = uses.setdefault(use, (Place(key, part.id.step, part.rank, leaf, n), set()))
            steps.add(part.id.step)
    ordered = sorted(found.values(), key=lambda c: (c.dtype, c.nbytes, c.order))
    longest: list[Chain] = []
    for chain in reversed(ordered):  # in this order a beginning comes right after what goes on from it
        last = longest[-1] if longest else None
        if (
            last is not None
            and (last.dtype, last.nbytes) == (chain.dtype, chain.nbytes)
            and last.blobs[: len(chain.blobs)] == chain.blobs
        ):
            last.uses.update(chain.uses)
        else:
            longest.append(chain)
    return sorted(longest, key=lambda c: c.order)


def check_chains(store: Store, todo: Sequence[Chain], *, memory: int, threads: int) -> Iterator[Finding]:
    """Fetch and rebuild every chain, and compare every digest expected of it."""
    limit = max(memory // threads // 2, 1)
    own = threading.local()

    def check(batch: list[Chain]) -> list[Finding]:
        rebuilder: Rebuilder | None = getattr(own, "rebuilder", None)
        if rebuilder is None:
            rebuilder = own.rebuilder = Rebuilder()
        fetched = fetch(store, {b for chain in batch for b in chain.blobs}, limit=min(REQUEST, limit))
        findings: list[Finding] = []
        for chain in batch:
            fault = next((f for b in chain.blobs if (f := fetched.faults.get(b)) is not None), None)
            if fault is not None:
                findings += _failed(chain, 0, f"expected {fault.expected}, found {fault.found}")
            else:
                findings += _rebuild(rebuilder, chain, fetched.data)
        return findings

    for findings in in_threads(batched(todo, lambda chain: chain.cost, limit), check, threads=threads):
        yield from findings


def _rebuild(rebuilder: Rebuilder, chain: Chain, data: dict[Blob, memoryview]) -> list[Finding]:
    findings: list[Finding] = []
    problem = chain_problem(chain.blobs, chain.nbytes)
    if problem is not None:
        return _failed(chain, 0, f"expected a chain of blobs, found {problem}")
    done = 0

    def each(count: int, raw: NDArray[np.uint8]) -> None:
        nonlocal done
        done = count
        for use, (place, steps) in chain.uses.get(count, {}).items():
            found = _digest(chain, use, raw)
            if found != use.digest:
                findings.append(_finding(place, steps, f"expected digest {use.digest}, found rebuilt to {found}"))

    try:
        rebuilder.rebuild(chain.blobs, data, chain.dtype, np.empty(chain.nbytes, np.uint8), each)
    except ValueError as error:
        findings += _failed(chain, done + 1, f"blob {done} of its chain does not decode: {error}")
    return findings


def _digest(chain: Chain, use: Use, raw: NDArray[np.uint8]) -> str:
    if use.of == use.box:
        return chunk_digest(chain.dtype, raw)
    size = DTYPES[chain.dtype].size
    copy = copies(use.of, use.box, size)
    if copy is None or use.of.intersect(use.box) != use.box:
        return f"a box {use.of} that does not hold {use.box}"
    own = np.empty(use.box.numel * size, np.uint8)
    carry_out(copy, raw, own)
    return chunk_digest(chain.dtype, own)


def _failed(chain: Chain, at_least: int, text: str) -> list[Finding]:
    """A finding for each use of the chain that needs at least so many blobs."""
    return [
        _finding(place, steps, text)
        for count, uses in sorted(chain.uses.items())
        if count >= at_least
        for place, steps in uses.values()
    ]


def _finding(place: Place, steps: set[int], text: str) -> Finding:
    listed = ", ".join(map(str, sorted(steps)))
    told = f"{place} (steps {listed}): {text}"
    return Finding("error", place.key, place.step, place.rank, place.leaf, told, tuple(sorted(steps)))
