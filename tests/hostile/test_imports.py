"""Other people's files, made to harm: bombs, code, offsets that overlap, names that lead out of their folder."""

from __future__ import annotations

import io
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckpt.cli import main
from recovery.foreign import Refused
from recovery.foreign_dcp import METADATA, read_dcp
from recovery.foreign_records import read_record
from recovery.foreign_safetensors import INDEX, read_safetensors
from recovery.foreign_torch import read_torch
from tests.hostile.forging import MB, at_most

HUGE = 1 << 62

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(autouse=True, scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What torch loads when it is first asked to read is not what an attack takes."""
    path = tmp_path_factory.mktemp("warm") / "x.pt"
    torch.save({"w": torch.ones(3)}, path)
    assert read_torch(path).tensors


# --- safetensors ---------------------------------------------------------------------------------------------------


def safetensors(path: Path, header: bytes | dict[str, Any], data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(shape: list[int], start: int, stop: int, dtype: str = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


STATE = '{"values":{"x":{"class":["os.system"]}},"classes":{}}'
HEADERS: dict[str, tuple[bytes | dict[str, Any], str]] = {
    "two tensors of the same bytes": ({"a": entry([8], 0, 8), "b": entry([8], 0, 8)}, "b at bytes 0:8 overlaps a"),
    "one inside another": ({"a": entry([8], 0, 8), "b": entry([2], 3, 5)}, "overlaps"),
    "an end before the file's": ({"a": entry([HUGE], 0, HUGE)}, "does not fit"),
    "a start behind the end": ({"a": entry([0], 9, 5)}, "does not fit"),
    "a shape whose product wraps": ({"a": entry([1 << 32, 1 << 32], 0, 0)}, "does not fit"),
    "a shape of 2^64": ({"a": entry([1 << 64], 0, 8)}, "does not fit|out of range"),
    "negative offsets": ({"a": entry([8], -8, 0)}, "not a safetensors file"),
    "65 dimensions": ({"a": entry([1] * 65, 0, 1)}, "65 dimensions"),
    "a dtype that is a class": ({"a": entry([8], 0, 8, "os.system")}, "not known here"),
    "a depth of 100,000": (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "not a safetensors file"),
    "metadata that is no text": ({"__metadata__": {"a": [1]}, "a": entry([8], 0, 8)}, "not a safetensors file"),
    "a state that names a class": ({"__metadata__": {"ckpt.state": STATE}, "a": entry([8], 0, 8)}, "unknown tag"),
}  # fmt: skip


@pytest.mark.parametrize("name", HEADERS)
def test_a_safetensors_file_that_lies_is_refused(tmp_path: Path, name: str) -> None:
    header, says = HEADERS[name]
    path = safetensors(tmp_path / "x.safetensors", header, bytes(8))
    with at_most(16 * MB), pytest.raises(Refused, match=says) as told:
        read_safetensors(path)
    assert "x.safetensors" in str(told.value)


@pytest.mark.parametrize("length", [0, 1, 1 << 40, (1 << 64) - 1])
def test_a_header_that_claims_any_length_takes_no_memory(tmp_path: Path, length: int) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + b"{}")
    with at_most(MB), pytest.raises(Refused, match=f"a header of {length} bytes in a file of 10"):
        read_safetensors(path)


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "a/b", "..", ".", "", "x\0y"])
def test_an_index_names_files_of_its_own_folder_alone(tmp_path: Path, name: str) -> None:
    safetensors(tmp_path / "x.safetensors", {"a": entry([8], 0, 8)}, bytes(8))
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(Refused, match="not in its own folder"):
        read_safetensors(tmp_path / "in")


def test_a_fifo_or_a_device_among_the_files_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.safetensors")
    (tmp_path / "zero.safetensors").symlink_to("/dev/zero")
    for name in ("x.safetensors", "zero.safetensors"):
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(Refused, match="not a plain file"):
            read_safetensors(tmp_path)
        with pytest.raises(Refused, match="not a plain file"):
            read_torch(tmp_path / name)
    assert main(["import", str(tmp_path / "store"), str(tmp_path), "--from", "safetensors"]) == 2
    assert not (tmp_path / "store").exists()


# --- torch ---------------------------------------------------------------------------------------------------------


class Runs:
    """What pickle would run when it is read."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.marker),)


def rezipped(path: Path, change: Callable[[str, bytes], tuple[bytes, int]]) -> None:
    """Write a file of torch.save again, entry by entry: (name, content) → (content, compression)."""
    with zipfile.ZipFile(path) as archive:
        entries = [(info.filename, archive.read(info)) for info in archive.infolist()]
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in entries:
            content, how = change(name, data)
            archive.writestr(name, content, how)


@pytest.mark.parametrize("which", ["byteorder", "data.pkl", "data/0", "version"])
def test_a_zip_bomb_is_refused_by_what_it_claims(tmp_path: Path, which: str) -> None:
    path = tmp_path / "x.pt"
    torch.save({"w": torch.ones(30)}, path)
    rezipped(
        path,
        lambda name, data: (
            (bytes(256 * MB), zipfile.ZIP_DEFLATED) if name.endswith(which) else (data, zipfile.ZIP_STORED)
        ),
    )
    assert path.stat().st_size < MB
    with at_most(16 * MB), pytest.raises(Refused, match=r"268435456 bytes packed into .*; torch.save packs nothing"):
        read_torch(path)


def test_code_in_a_file_of_torch_is_not_run(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    for number, harm in enumerate([Runs(marker), {"deep": [Runs(marker)]}, torch.nn.Linear(2, 2)]):
        path = tmp_path / f"{number}.pt"
        torch.save({"w": torch.ones(3), "x": harm}, path)
        with pytest.raises(Refused, match="refused by torch's weights-only reader"):
            read_torch(path)
        assert main(["import", str(tmp_path / "store"), str(path), "--from", "torch"]) == 2
    assert not marker.exists()
    assert not (tmp_path / "store").exists()


def test_a_storage_that_claims_more_than_its_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"w": torch.ones(30)}, path)
    # The outline says 30 elements in one place and 30 in another: both become a number no file has.
    rezipped(path, lambda name, data: (data.replace(b"K\x1e", b"J\xff\xff\xff\x7f"), zipfile.ZIP_STORED))
    with at_most(16 * MB), pytest.raises(Refused, match=r"x\.pt"):
        read_torch(path)


# --- torch.distributed.checkpoint ------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    dcp.save({"w": torch.arange(50)}, checkpoint_id=tmp_path / "x", no_dist=True)
    return tmp_path / "x"


def with_names(folder: Path, name: bytes) -> None:
    """Let the metadata name another file than the one that is there."""
    record = (folder / METADATA).read_bytes()
    (data,) = folder.glob("*.distcp")
    old = data.name.encode()
    assert record.count(b"\x8c" + bytes([len(old)]) + old) or record.count(len(old).to_bytes(4, "little") + old)
    for head in (lambda n: b"\x8c" + bytes([n]), lambda n: b"X" + n.to_bytes(4, "little")):
        record = record.replace(head(len(old)) + old, head(len(name)) + name)
    (folder / METADATA).write_bytes(record)


@pytest.mark.parametrize("name", [b"../outside", b"/etc/passwd", b"..", b"a/b", b"x\0y", b""])
def test_metadata_names_files_of_its_own_folder_alone(folder: Path, name: bytes) -> None:
    with_names(folder, name)
    with pytest.raises(Refused, match="not in its own folder"):
        read_dcp(folder)


def test_a_fifo_in_the_place_of_a_piece_is_not_opened(folder: Path) -> None:
    (data,) = folder.glob("*.distcp")
    data.unlink()
    os.mkfifo(data)
    with pytest.raises(Refused, match="not a plain file"):
        read_dcp(folder)


def nested(depth: int) -> bytes:
    """A tuple that holds another twice, so many deep: a few bytes a level, 2^depth if it is walked."""
    return b"K\x01\x94" + b"".join(b"h" + bytes([n]) + b"h" + bytes([n]) + b"\x86\x94" for n in range(depth))


BILLIONS = {
    "as a key": b"\x80\x04}" + nested(60) + b"K\x01s.",
    "as one of many keys": b"\x80\x04}(" + nested(60) + b"K\x01u.",
    "in a set": b"\x80\x04\x8f(" + nested(60) + b"\x90.",
}


@pytest.mark.parametrize("name", BILLIONS)
def test_what_is_small_to_write_and_endless_to_hash_is_refused_at_once(name: str) -> None:
    with pytest.raises(Refused, match=r"a tuple of tuples as a key|too little|a .* where a"):
        read_record(BILLIONS[name])


def test_an_endless_shape_is_told_in_a_line(folder: Path) -> None:
    record = b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81}(\x8c\x13state_dict_metadata}"
    record += b"\x8c\x0cstorage_datactorch\nX\n)\x81}\x8c\x05items" + nested(60) + b"sbub."
    (folder / METADATA).write_bytes(record)
    with at_most(16 * MB), pytest.raises(Refused, match=r"not as|not the metadata") as told:
        read_dcp(folder)
    assert len(str(told.value)) < 1000


def test_metadata_that_claims_lengths_it_has_not_takes_no_memory(folder: Path) -> None:
    for operation in (b"B", b"X"):
        (folder / METADATA).write_bytes(b"\x80\x04" + operation + b"\xff\xff\xff\xff" + b"abc.")
        with at_most(MB), pytest.raises(Refused, match="cut short"):
            read_dcp(folder)
    (folder / METADATA).write_bytes(b"")
    os.truncate(folder / METADATA, 1 << 40)
    with at_most(MB), pytest.raises(Refused, match="1099511627776 bytes of metadata"):
        read_dcp(folder)


def test_metadata_that_names_code_is_data(folder: Path, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        stream = io.BytesIO()
        pickle.Pickler(stream, protocol).dump({"state_dict_metadata": Runs(marker), "storage_data": Runs(marker)})
        (folder / METADATA).write_bytes(stream.getvalue())
        with pytest.raises(Refused):
            read_dcp(folder)
    assert not marker.exists()


@pytest.mark.parametrize(("field", "value"), [("offset", 1 << 60), ("length", 1), ("offset", -1), ("length", "long")])
def test_a_piece_outside_of_its_file_is_refused(folder: Path, field: str, value: Any) -> None:
    metadata = pickle.loads((folder / METADATA).read_bytes())
    for info in metadata.storage_data.values():
        object.__setattr__(info, field, value)
    (folder / METADATA).write_bytes(pickle.dumps(metadata))
    with at_most(16 * MB), pytest.raises(Refused, match=r"distcp|metadata"):
        read_dcp(folder)
