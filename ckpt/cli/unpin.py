"""``ckpt unpin``: take a name away from a snapshot."""

from __future__ import annotations

from ckpt.cli.pin import Name
from ckpt.cli.screen import AsJson, KeyName, StorageOptions, Url, open_url, print_json
from ckpt.history.pins import unpin


def command(
    url: Url, name: Name, as_json: AsJson = False, storage_option: StorageOptions = None, key: KeyName = None
) -> None:
    """Take a pin away. The snapshot stays until a prune takes it.

    Exit codes: 0 done; 2 there is no such pin, or the store failed.
    """
    id_ = unpin(open_url(url, storage_option, key), name)
    if as_json:
        print_json({"name": name, "snapshot": None if id_ is None else str(id_)})
    else:
        print(f"{'a snapshot that cannot be told' if id_ is None else id_.short} is no longer pinned as {name}")
