"""Authenticated encryption of what lies on a store: AES-256-GCM-SIV, per document and per blob (FORMAT.md §8).

Per blob, so that a range read opens by itself; with a nonce made from name and content, so that whoever writes an
object writes the same bytes. A document is bound to its name. A blob is bound to its kind, and to its place by the
digest in the part that names it, which is a document: so a compaction can move it byte for byte.

Not a wrapper around whole objects: that would decrypt a pack for one blob, or read more than was asked for.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from ckpt.errors import DamagedError
from ckpt.format.documents import ENCRYPTED_FORMAT, check_digest, with_digest
from storage_backends.base import Buffer

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCMSIV

CIPHER = "aes-256-gcm-siv"
SECRET, NONCE, TAG = 32, 12, 16
"""Bytes of a key, of a nonce and of what authenticates."""

_PERSON = b"incremental-ckpt"
_ENVELOPE = b'{"encrypted":'
_HEX = re.compile(r"[0-9a-fA-F]{64}")
_ENV = "env:"


class Unopened(bytes):
    """What could not be opened: no bytes, and why. Not an error yet, because a document that is damaged is one thing to
    a listing and another to a restore; whoever decodes it (`unseal`, `read_part`) says it as `DamagedError`, and
    whoever does not look has nothing that could be mistaken for content."""

    expected: str
    found: str

    def __new__(cls, expected: str, found: str) -> Unopened:
        self = super().__new__(cls)
        self.expected, self.found = expected, found
        return self


class Head(Struct, frozen=True):
    """The first line of an encrypted document: in the clear, and authenticated."""

    encrypted: str
    format: int
    key_id: str
    place: str


class Key:
    """A key, and what it does. Safe from several threads. Its bytes are shown by nothing."""

    def __init__(self, secret: bytes) -> None:
        """Raises ValueError: not 32 bytes, or the package `cryptography` is missing or too old."""
        if len(secret) != SECRET:
            raise ValueError(f"a key of {len(secret)} bytes; expected {SECRET}")
        self._cipher = _cipher(_derived(secret, b"encryption", 32))
        self._nonces = _derived(secret, b"nonces", 32)
        self.id = _derived(secret, b"id", 8).hex()
        """Which key it is, 16 hex digits; tells nothing of the key itself."""

    def __repr__(self) -> str:
        return f"Key({self.id})"

    def seal(self, text: bytes, place: str) -> bytes:
        """The stored bytes of the document `text` whose object is named `place`."""
        head = self._head(place)
        nonce = self._nonce(head, text)
        return with_digest(b"".join([head, b"\n", nonce, self._cipher.encrypt(nonce, text, head)]))

    def open(self, data: bytes, place: str) -> bytes:
        """A document's text; or `Unopened`, which says what it is instead: cut, of another key or place, or forged."""
        try:
            body = check_digest(data, place)
        except DamagedError as error:
            return Unopened(error.expected, error.found)
        line, newline, rest = body.partition(b"\n")
        head = head_of(data)
        if head is None or not newline or len(rest) < NONCE + TAG:
            return Unopened("an encrypted document", "one in the clear: nobody with the key wrote it")
        if head.key_id != self.id:
            return Unopened(f"a document encrypted with key {self.id}", f"one of key {head.key_id}")
        if head.place != place:
            return Unopened(
                f"the document of {place}",
                f"the document that belongs at {head.place}; was it renamed, copied or swapped?",
            )
        try:
            return self._cipher.decrypt(rest[:NONCE], rest[NONCE:], line)
        except _invalid():
            return Unopened(f"a document encrypted with key {self.id}", "one that this key did not write: it is forged")

    def overhead(self, place: str) -> int:
        """Bytes by which a document's object is longer than its text."""
        return len(self._head(place)) + 1 + NONCE + TAG + len(with_digest(b""))

    def seal_blob(self, blob: Buffer, kind: int, place: str) -> bytes:
        """The stored bytes of an encoded chunk. `place`: where it is first stored, different for each blob there is."""
        about = _blob(kind)
        nonce = self._nonce(place.encode() + b"\0" + about, blob)
        return nonce + self._cipher.encrypt(nonce, blob, about)

    def open_blob(self, stored: Buffer, kind: int) -> bytes:
        """The encoded chunk. Raises ValueError: it is no blob of this kind that this key sealed."""
        return self._open(stored, _blob(kind), f"a blob of kind {kind}")

    def seal_rows(self, rows: str, place: str) -> bytes:
        """What a pack's header says of its blobs, sealed. `place`: the pack's name without its digest."""
        about = _rows(place)
        nonce = self._nonce(about, rows.encode())
        return nonce + self._cipher.encrypt(nonce, rows.encode(), about)

    def open_rows(self, stored: bytes, place: str) -> str:
        """Raises ValueError: not what this key sealed for a pack of that place."""
        return self._open(stored, _rows(place), "the rows of a pack").decode()

    def _open(self, stored: Buffer, about: bytes, what: str) -> bytes:
        view = memoryview(stored)
        if len(view) < NONCE + TAG:
            raise ValueError(f"{len(view)} bytes are too short for {what} that is encrypted")
        try:
            return self._cipher.decrypt(bytes(view[:NONCE]), view[NONCE:], about)
        except _invalid() as error:
            raise ValueError(f"not {what} that key {self.id} sealed") from error

    def _head(self, place: str) -> bytes:
        return msgspec.json.encode(Head(CIPHER, ENCRYPTED_FORMAT, self.id, place))

    def _nonce(self, about: bytes, text: Buffer) -> bytes:
        # Equal content in equal places gives equal bytes, which is meant; the cipher bears a nonce that repeats.
        made = hashlib.blake2b(about + b"\0", key=self._nonces, digest_size=NONCE)
        made.update(text)
        return made.digest()


def head_of(data: bytes) -> Head | None:
    """The first line of an encrypted document; None if it is none."""
    if not data.startswith(_ENVELOPE):
        return None
    try:
        head = msgspec.json.decode(data[: data.index(b"\n")], type=Head)
    except (ValueError, msgspec.MsgspecError, RecursionError):
        return None
    return head if (head.encrypted, head.format) == (CIPHER, ENCRYPTED_FORMAT) else None


def read_key(name: str | os.PathLike[str]) -> Key:
    """The key in a file, or in an environment variable (``env:NAME``): 32 bytes, or 64 hex digits.

    Raises:
        ValueError: it is not there, is no key, or is not a name but the key itself.
    """
    text = os.fspath(name)
    if _HEX.fullmatch(text):
        # Not repeated in the message: arguments end up in logs and process listings, and this is one of the reasons.
        raise ValueError("key= is given a key itself; expected the name of a file, or env:NAME of a variable")
    if text.startswith(_ENV):
        variable = text.removeprefix(_ENV)
        found = os.environ.get(variable)
        if found is None:
            raise ValueError(f"key={text!r}: the environment variable {variable!r} is not set")
        data = found.encode(errors="surrogateescape")
    else:
        try:
            with (
                Path(text).expanduser().open("rb") as file
            ):  # read, not looked at: it may be a pipe of a password store
                data = file.read(1024)
        except (OSError, ValueError) as error:
            raise ValueError(f"key={text!r}: the file cannot be read: {error}") from None
    if len(data) == SECRET:
        return Key(data)
    digits = data.strip().decode("ascii", "replace")
    if not _HEX.fullmatch(digits):
        raise ValueError(
            f"key={text!r}: expected {SECRET} bytes or {2 * SECRET} hex digits, found {len(data)} bytes of something "
            "else; 'openssl rand -hex 32' makes a key"
        )
    return Key(bytes.fromhex(digits))


def _blob(kind: int) -> bytes:
    return b"ckpt blob\0" + bytes([kind])


def _rows(place: str) -> bytes:
    return b"ckpt pack\0" + place.encode()


def _derived(secret: bytes, purpose: bytes, size: int) -> bytes:
    return hashlib.blake2b(purpose, key=secret, person=_PERSON, digest_size=size).digest()


def _cipher(key: bytes) -> AESGCMSIV:
    # Here, not above: encryption is an extra, and `ckpt list` starts without it.
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.ciphers.aead import AESGCMSIV
    except ImportError as error:
        text = f"key=: encryption needs the package cryptography ({error}); pip install 'incremental-ckpt[encryption]'"
        raise ValueError(text) from error
    try:
        return AESGCMSIV(key)
    except UnsupportedAlgorithm as error:
        raise ValueError(f"key=: {error}; install a build of cryptography whose OpenSSL is 3.2 or newer") from error


def _invalid() -> type[Exception]:
    from cryptography.exceptions import InvalidTag

    return InvalidTag
