"""Is an object what was written? What its name and its own bytes say, without any other object."""

from __future__ import annotations

from ckpt.errors import DamagedError, FormatTooNew
from ckpt.format.manifest import check_seal, digest64, read_part
from ckpt.format.names import STORE_KEY, PackName, PartName


def flaw(key: str, data: bytes) -> str | None:
    """What is wrong with the bytes of `key`; None if nothing is, or if nobody can tell.

    A pack has its digest in its name, a document in its last line. A part has a checksum, and is looked through; bits
    of its frame that mean nothing escape this, and only the digest in a snapshot that names it tells.
    """
    pack, part = PackName.parse(key), PartName.parse(key)
    try:
        if pack is not None:
            found = digest64(data)
            return None if found == pack.digest else f"expected digest {pack.digest}, as its name says, found {found}"
        if part is not None:
            held = read_part(data, key=key)
            same = (held.id, held.rank) == (part.id, part.rank)
            return None if same else f"it holds the part of {held.id}, rank {held.rank}"
        if key == STORE_KEY or key.endswith(".json"):
            check_seal(data, key)
    except DamagedError as error:
        return f"expected {error.expected}, found {error.found}"
    except FormatTooNew:
        pass  # whole, and for a later version to read
    return None
