"""Which promises of `Store` hold on a store of yours.

    python -m scripts.check_backend s3://bucket/some/place --storage-option endpoint_url=https://…

Runs the contract that every backend of this library is tested with (tests/storage_backends/contract.py) below a fresh
prefix of that place, and removes what it wrote. Touches nothing else. Exit code 0: every promise holds; 1: some do
not; 2: the store cannot be reached or written.
"""

from __future__ import annotations

import inspect
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any

import fsspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from storage_backends import StorageError, Store, open_store
from tests.storage_backends.contract import StoreContract


@dataclass(frozen=True)
class Promise:
    """One test of the contract: a sentence, and what to call it with, once for each of its cases."""

    sentence: str
    test: Callable[..., None]
    cases: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Kept:
    """What became of one: how many of its cases hold, the first that did not and why, and how long all took."""

    promise: Promise
    failures: Sequence[tuple[Mapping[str, Any], BaseException]]
    seconds: float


def promises() -> Iterator[Promise]:
    """The tests of the contract, in their order there."""
    for name, test in vars(StoreContract).items():
        if name.startswith("test_"):
            yield Promise(name.removeprefix("test_").replace("_", " "), test, list(_cases(test)))


def _cases(test: Callable[..., None]) -> Iterator[Mapping[str, Any]]:
    marks = [mark for mark in getattr(test, "pytestmark", ()) if mark.name == "parametrize"]
    if not marks:
        yield {}
    for mark in marks:
        names, values = mark.args[:2]
        for value in values:
            yield {names: value} if isinstance(names, str) else dict(zip(names, value, strict=True))


def check(promise: Promise, opener: Callable[[str], Store], place: str) -> Kept:
    """Each case in a folder of its own below `place`."""
    began = time.monotonic()
    failures = []
    for number, case in enumerate(promise.cases):

        def fresh(folder: str = f"{place}/{number}") -> Store:
            return opener(folder)

        given = {"store": fresh, "opener": lambda: fresh}
        wanted = inspect.signature(promise.test).parameters
        try:
            promise.test(StoreContract(), **case, **{name: make() for name, make in given.items() if name in wanted})
        except (Exception, _outcome()) as failure:
            failures.append((case, failure))
    return Kept(promise, failures, time.monotonic() - began)


def _outcome() -> type[BaseException]:
    """What `pytest.raises` raises when nothing was raised: no Exception, so that tests cannot swallow it."""
    import pytest

    return pytest.fail.Exception


def main(
    url: Annotated[str, typer.Argument(help="a place on the store; need not exist, except for its bucket")],
    storage_option: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE for fsspec, such as endpoint_url=…; repeatable")
    ] = None,
) -> None:
    """Check which promises of a store hold, and print them. Works below a fresh prefix, which it removes."""
    console = Console()
    options = dict(option.split("=", 1) for option in storage_option or ())
    prefix = f"check-backend-{secrets.token_hex(4)}"

    def opener(folder: str) -> Store:
        return open_store(f"{url.rstrip('/')}/{prefix}/{folder}", **options)

    try:
        whole = open_store(url, **options)
        whole.put(f"{prefix}/probe", b"1")
        whole.delete([f"{prefix}/probe"])
    except StorageError as error:
        console.print(escape(str(error)), soft_wrap=True)
        console.print(f"{url} cannot be checked: it must be there, and be writable", soft_wrap=True)
        raise typer.Exit(2) from error
    results: list[Kept] = []
    try:
        for number, promise in enumerate(promises()):
            with console.status(promise.sentence):
                results.append(check(promise, opener, str(number)))
    finally:
        left = clean(whole, prefix)
        remove_folders(f"{url.rstrip('/')}/{prefix}", options)
    console.print(table(whole.url, results))
    broken = [kept for kept in results if kept.failures]
    for kept in broken:
        case, failure = kept.failures[0]
        shown = f" with {escape(str(dict(case))[:100])}" if case else ""
        text = escape(f"{type(failure).__name__}: {failure}".strip()[:800])
        console.print(f"\n[bold]{kept.promise.sentence}[/]{shown}\n{text}", soft_wrap=True)
    if left:
        console.print(f"\nleft behind, please remove: {url}/{prefix} ({left})", soft_wrap=True)
    console.print(f"\n{len(results) - len(broken)} of {len(results)} promises hold")
    raise typer.Exit(1 if broken else 0)


def clean(whole: Store, prefix: str) -> str:
    """Remove what was written; what could not be, in words."""
    try:
        whole.delete([entry.key for entry in whole.list(f"{prefix}/")])
        left = len(whole.list(f"{prefix}/"))
    except StorageError as error:
        return str(error)
    return f"{left} objects" if left else ""


def remove_folders(place: str, options: Mapping[str, str]) -> None:
    """Where folders are real, the emptied ones are still there: a store leaves its root alone."""
    with suppress(Exception):  # mostly: there are none
        fs, path = fsspec.url_to_fs(place, **options)
        fs.rm(path, recursive=True)


def table(url: str, results: Sequence[Kept]) -> Table:
    shown = Table("promise", "holds", "seconds", title=f"What {url} promises", title_justify="left")
    for kept in results:
        cases, failed = len(kept.promise.cases), len(kept.failures)
        holds = f"[red]no[/] ({failed} of {cases} cases)" if failed else "[green]yes[/]"
        shown.add_row(kept.promise.sentence, holds, f"{kept.seconds:.1f}")
    return shown


if __name__ == "__main__":
    typer.run(main)
