"""Keys: what they seal they open, and nothing else; what cannot be opened says why."""

from __future__ import annotations

import os
import stat
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import DamagedError
from ckpt.format.key import NONCE, TAG, Key, Unopened, head_of, read_key
from ckpt.format.kinds import KINDS
from ckpt.format.manifest import FORMAT, PinDoc, seal, unseal
from ckpt.format.parts import read_part

SECRET = bytes(range(32))
KEY, OTHER = Key(SECRET), Key(bytes(32))
PLACE = "pins/good.json"
TEXT = seal(PinDoc(FORMAT, "good", "000001-0badcafe-000000000010"))


def found(data: bytes, place: str = PLACE, key: Key = KEY) -> str:
    opened = key.open(data, place)
    assert isinstance(opened, Unopened)
    assert not opened, "what could not be opened must not look like content"
    return f"expected {opened.expected}, found {opened.found}"


@given(st.binary(max_size=300), st.sampled_from(["store/x", "a", "parts/000001-0badcafe/000000000010/00000.json.zst"]))
def test_a_document_comes_back_and_is_as_long_as_foretold(text: bytes, place: str) -> None:
    sealed = KEY.seal(text, place)
    assert KEY.open(sealed, place) == text
    assert len(sealed) == len(text) + KEY.overhead(place)
    assert sealed == Key(SECRET).seal(text, place), "whoever writes it writes the same bytes"
    assert len(text) < 8 or text not in sealed.partition(b"\n")[2]


@given(st.binary(max_size=300), st.sampled_from(sorted(KINDS)))
def test_a_blob_comes_back_as_its_kind_alone_wherever_it_lies(blob: bytes, kind: int) -> None:
    sealed = KEY.seal_blob(blob, kind, "packs/a/0")
    assert KEY.open_blob(sealed, kind) == KEY.open_blob(memoryview(sealed), kind) == blob
    assert len(sealed) == len(blob) + NONCE + TAG
    assert sealed == Key(SECRET).seal_blob(blob, kind, "packs/a/0")
    assert sealed != KEY.seal_blob(blob, kind, "packs/a/1"), "equal chunks of two saves look different"
    for other in KINDS.keys() - {kind}:
        with pytest.raises(ValueError, match=f"not a blob of kind {other} that key {KEY.id} sealed"):
            KEY.open_blob(sealed, other)


def test_a_flipped_bit_anywhere_is_noticed() -> None:
    """With the digest at the end made to fit, too: then only the key tells."""
    sealed = KEY.seal(TEXT, PLACE)
    for bit in range(8 * len(sealed)):
        data = bytearray(sealed)
        data[bit // 8] ^= 1 << bit % 8
        assert isinstance(KEY.open(bytes(data), PLACE), Unopened), bit
    blob = KEY.seal_blob(b"0123456789", 0, "p")
    for bit in range(8 * len(blob)):
        data = bytearray(blob)
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ValueError, match="not a blob"):
            KEY.open_blob(bytes(data), 0)


def resealed(data: bytes) -> bytes:
    from ckpt.format.documents import with_digest

    return with_digest(data[:-34])


def test_cut_flipped_moved_forged_plain_and_of_another_key_are_told_apart() -> None:
    sealed = KEY.seal(TEXT, PLACE)
    assert "without one" in found(sealed[:-1])
    assert "expected a document that ends in its digest" in found(b"")
    flipped = sealed[:-60] + bytes([sealed[-60] ^ 1]) + sealed[-59:]
    assert "found digest" in found(flipped)
    assert f"expected a document encrypted with key {OTHER.id}, found one of key {KEY.id}" in found(sealed, key=OTHER)
    assert f"belongs at {PLACE}; was it renamed, copied or swapped?" in found(sealed, "pins/other.json")
    assert "one that this key did not write: it is forged" in found(resealed(flipped))
    assert "found one in the clear: nobody with the key wrote it" in found(TEXT)
    # Another place in the first line, to have it taken for one that belongs here.
    claimed = KEY.seal(TEXT, "pins/othr.json")
    assert "it is forged" in found(resealed(claimed.replace(b"pins/othr.json", PLACE.encode())))


@given(st.binary(max_size=200))
def test_any_bytes_at_all_are_not_opened(data: bytes) -> None:
    for text in (data, resealed(data + bytes(34)), resealed(b'{"encrypted":' + data + bytes(34))):
        assert isinstance(KEY.open(text, PLACE), Unopened)
        head_of(text)


def test_whoever_decodes_what_was_not_opened_says_why() -> None:
    unopened = Unopened("what was written", "something else")
    with pytest.raises(DamagedError, match=r"pins/x.json: expected what was written, found something else"):
        unseal(unopened, PinDoc, key="pins/x.json")
    with pytest.raises(DamagedError, match="expected what was written, found something else"):
        read_part(unopened, key="parts/x")
    with pytest.raises(DamagedError, match="expected a document in the clear, found one that is encrypted"):
        unseal(KEY.seal(TEXT, PLACE), PinDoc, key=PLACE)


# --- where keys come from --------------------------------------------------------------------------------------------


def test_a_key_is_read_from_a_file_or_a_variable_as_bytes_or_as_hex(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "key"
    for data in (SECRET, SECRET.hex().encode(), SECRET.hex().upper().encode() + b"\n", b"  " + SECRET.hex().encode()):
        path.write_bytes(data)
        assert read_key(path).id == read_key(str(path)).id == KEY.id
    monkeypatch.setenv("CKPT_TEST_KEY", SECRET.hex())
    assert read_key("env:CKPT_TEST_KEY").id == KEY.id
    assert OTHER.id != KEY.id


def test_a_key_may_come_through_a_pipe(tmp_path: Path) -> None:
    """``--key <(pass show ckpt)`` names one."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_bytes(SECRET.hex().encode()))
    writer.start()
    assert read_key(pipe).id == KEY.id
    writer.join()
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_what_is_no_key_is_refused_and_never_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "key"
    for data in (b"", b"short secret", SECRET.hex().encode()[:-2], SECRET + SECRET, b"z" * 64, bytes(5000)):
        path.write_bytes(data)
        with pytest.raises(ValueError, match="expected 32 bytes or 64 hex digits, found") as told:
            read_key(path)
        assert "secret" not in str(told.value)
    with pytest.raises(ValueError, match=r"nowhere'?: the file cannot be read"):
        read_key(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="the environment variable 'CKPT_NO_KEY' is not set"):
        read_key("env:CKPT_NO_KEY")
    with pytest.raises(ValueError, match="key= is given a key itself; expected the name of a file") as told:
        read_key(SECRET.hex())
    assert SECRET.hex() not in str(told.value)
    assert repr(KEY) == f"Key({KEY.id})"
    assert SECRET.hex() not in repr(vars(KEY))


def test_without_the_package_it_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    with pytest.raises(ValueError, match=r"cryptography .*pip install 'incremental-ckpt\[encryption\]'"):
        Key(SECRET)
