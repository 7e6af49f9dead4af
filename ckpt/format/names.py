"""Names of objects. They only locate; documents describe (PROTOCOL.md §1)."""

from __future__ import annotations

import re
from dataclasses import dataclass

STORE_KEY = "store.json"
RUNS, ALIVE, PACKS, PARTS, SNAPSHOTS, PINS, PRUNES, JOURNAL = (
    "runs/", "alive/", "packs/", "parts/", "snapshots/", "pins/", "prunes/", "journal/",
)  # fmt: skip

_RUN = r"(?P<generation>\d{6})-(?P<nonce>[0-9a-f]{8})"
_REVISION = r"(\.r(?P<revision>[1-9]\d{0,17}))?"
# ASCII, and no leading zeros: every object has one name, whoever spelt it (documents name parts and packs, too).
_RUN_ID = re.compile(_RUN, re.ASCII)
_RUN_KEY = re.compile(rf"runs/{_RUN}\.json", re.ASCII)
_SNAPSHOT_ID = re.compile(rf"{_RUN}-(?P<step>\d{{12}})", re.ASCII)
_SNAPSHOT_KEY = re.compile(rf"snapshots/{_RUN}-(?P<step>\d{{12}}){_REVISION}\.json", re.ASCII)
_PART_KEY = re.compile(rf"parts/{_RUN}/(?P<step>\d{{12}})/(?P<rank>\d{{5}}){_REVISION}\.json\.zst", re.ASCII)
_PACK_KEY = re.compile(
    rf"packs/{_RUN}/(?P<step>\d{{12}})/(?P<rank>\d{{5}})-(?P<n>\d{{3,18}})-(?P<digest>[0-9a-f]{{16}})\.safetensors",
    re.ASCII,
)
_SEGMENT_KEY = re.compile(rf"journal/{_RUN}/(?P<rank>\d{{5}})/(?P<previous>\d{{12}})-(?P<step>\d{{12}})\.segment")
_PIN_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True, slots=True, order=True)
class RunId:
    """One start of the job. Ordered by (generation, nonce)."""

    generation: int
    nonce: str

    def __str__(self) -> str:
        return f"{self.generation:06d}-{self.nonce}"

    @classmethod
    def parse(cls, text: str) -> RunId | None:
        found = _RUN_ID.fullmatch(text)
        return _run(found) if found else None


@dataclass(frozen=True, slots=True, order=True)
class SnapshotId:
    """A committed step of a run. Ordered by (run, step): not by clocks, not by the step alone."""

    run: RunId
    step: int

    def __str__(self) -> str:
        return f"{self.run}-{self.step:012d}"

    @property
    def short(self) -> str:
        """``GENERATION/STEP``, the name a person types."""
        return f"{self.run.generation}/{self.step}"

    @classmethod
    def parse(cls, text: str) -> SnapshotId | None:
        found = _SNAPSHOT_ID.fullmatch(text)
        return cls(_run(found), int(found["step"])) if found else None


@dataclass(frozen=True, slots=True, order=True)
class SnapshotName:
    """A snapshot object: its id and its revision (0: the commit itself; higher: compacted)."""

    id: SnapshotId
    revision: int = 0

    @property
    def key(self) -> str:
        return f"{SNAPSHOTS}{self.id}{_revision(self.revision)}.json"

    @classmethod
    def parse(cls, key: str) -> SnapshotName | None:
        found = _SNAPSHOT_KEY.fullmatch(key)
        return cls(SnapshotId(_run(found), int(found["step"])), int(found["revision"] or 0)) if found else None


@dataclass(frozen=True, slots=True, order=True)
class PartName:
    """A part object: what `rank` stored for one step."""

    id: SnapshotId
    rank: int
    revision: int = 0

    @property
    def key(self) -> str:
        return f"{parts_prefix(self.id)}{self.rank:05d}{_revision(self.revision)}.json.zst"

    @classmethod
    def parse(cls, key: str) -> PartName | None:
        found = _PART_KEY.fullmatch(key)
        if not found:
            return None
        return cls(SnapshotId(_run(found), int(found["step"])), int(found["rank"]), int(found["revision"] or 0))


@dataclass(frozen=True, slots=True, order=True)
class PackName:
    """A pack object: the `n`-th pack of `rank` for one step; `digest` is the xxh3-64 of all its bytes, in hex."""

    id: SnapshotId
    rank: int
    n: int
    digest: str

    @property
    def key(self) -> str:
        return f"{pack_place(self.id, self.rank, self.n)}-{self.digest}.safetensors"

    @classmethod
    def parse(cls, key: str) -> PackName | None:
        found = _PACK_KEY.fullmatch(key)
        if not found:
            return None
        return cls(SnapshotId(_run(found), int(found["step"])), int(found["rank"]), int(found["n"]), found["digest"])


@dataclass(frozen=True, slots=True, order=True)
class SegmentName:
    """A segment of the journal: records of `rank` that lead from step `previous` to `step`."""

    run: RunId
    rank: int
    previous: int
    step: int

    @property
    def key(self) -> str:
        return f"{journal_prefix(self.run)}{self.rank:05d}/{self.previous:012d}-{self.step:012d}.segment"

    @classmethod
    def parse(cls, key: str) -> SegmentName | None:
        found = _SEGMENT_KEY.fullmatch(key)
        if not found:
            return None
        return cls(_run(found), int(found["rank"]), int(found["previous"]), int(found["step"]))


def journal_prefix(run: RunId) -> str:
    return f"{JOURNAL}{run}/"


def run_key(run: RunId) -> str:
    return f"{RUNS}{run}.json"


def parse_run_key(key: str) -> RunId | None:
    found = _RUN_KEY.fullmatch(key)
    return _run(found) if found else None


def alive_key(run: RunId) -> str:
    return f"{ALIVE}{run}.json"


def parts_prefix(snapshot: SnapshotId) -> str:
    return f"{PARTS}{snapshot.run}/{snapshot.step:012d}/"


def packs_prefix(snapshot: SnapshotId) -> str:
    return f"{PACKS}{snapshot.run}/{snapshot.step:012d}/"


def pack_place(snapshot: SnapshotId, rank: int, n: int) -> str:
    """A pack's name without its digest: what is known before its bytes are."""
    return f"{packs_prefix(snapshot)}{rank:05d}-{n:03d}"


def pin_key(name: str) -> str:
    """Raises ValueError for a pin name that is not 1-100 letters, digits, '.', '_', '-' (not starting with '.')."""
    if _PIN_NAME.fullmatch(name) is None:
        raise ValueError(f"pin name {name!r}: expected 1-100 letters, digits, '.', '_' or '-', not starting with '.'")
    return f"{PINS}{name}.json"


def prune_key(nonce: str) -> str:
    return f"{PRUNES}{nonce}.json"


def _run(found: re.Match[str]) -> RunId:
    return RunId(int(found["generation"]), found["nonce"])


def _revision(revision: int) -> str:
    return f".r{revision}" if revision else ""
