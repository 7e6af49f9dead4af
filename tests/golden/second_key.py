"""Opening what is encrypted, for the second reader: written from FORMAT.md §9 alone."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Any

import xxhash
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCMSIV

from .second_codec import Damaged


class SecondKey:
    """A key of 32 bytes."""

    def __init__(self, secret: bytes) -> None:
        def made(text: bytes, size: int) -> bytes:
            return hashlib.blake2b(text, key=secret, person=b"incremental-ckpt", digest_size=size).digest()

        self.id = made(b"id", 8).hex()
        self.nonces = made(b"nonces", 32)
        self.cipher = AESGCMSIV(made(b"encryption", 32))

    def unseal(self, sealed: bytes, about: bytes, place: bytes | None = None) -> bytes:
        """`place`: where that is known; then the nonce must be the one that any writer takes."""
        try:
            plain = self.cipher.decrypt(sealed[:12], sealed[12:], about)
        except (InvalidTag, ValueError) as error:
            raise Damaged("not what was sealed with this key") from error
        if place is not None:
            text = place + b"\0" + plain
            if hashlib.blake2b(text, key=self.nonces, digest_size=12).digest() != sealed[:12]:
                raise Damaged("another writer would have written other bytes")
        return plain

    def document(self, data: bytes, name: str) -> bytes:
        body, seal = data[:-33], data[-33:]
        if not body.endswith(b"\n") or seal != xxhash.xxh3_128_hexdigest(body).encode() + b"\n":
            raise Damaged(f"{name}: the digest at the end does not fit")
        line, newline, rest = body[:-1].partition(b"\n")
        try:
            head: Any = json.loads(line)
            says = (head["encrypted"], head["format"], head["key_id"], head["place"])
        except (ValueError, KeyError, TypeError) as error:
            raise Damaged(f"{name} is in the clear") from error
        if not newline or says != ("aes-256-gcm-siv", 2, self.id, name):
            raise Damaged(f"{name} is {says}")
        return self.unseal(rest, line, line)

    def blob(self, sealed: bytes, kind: int) -> bytes:
        return self.unseal(sealed, b"ckpt blob\0" + bytes([kind]))

    def rows(self, meta: dict[str, str], name: str) -> dict[str, str]:
        """The `dtypes` and `blobs` of a pack's header."""
        if list(meta) != ["format", "key_id", "place", "rows"] or (meta["format"], meta["key_id"]) != ("2", self.id):
            raise Damaged(f"{name} is not a pack of this key")
        if not name.startswith(meta["place"] + "-"):
            raise Damaged(f"{name} belongs at {meta['place']}")
        about = b"ckpt pack\0" + meta["place"].encode()
        plain = self.unseal(base64.b64decode(meta["rows"], validate=True), about, about).decode()
        dtypes, _, blobs = plain.partition("\n")
        return {"format": "1", "dtypes": dtypes, "blobs": blobs}
