"""What a store says never reaches a terminal as more than text: escapes, line ends and markup in any name or value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckpt.cli import main
from ckpt.format.manifest import FORMAT, Alive, seal
from ckpt.format.names import RunId, alive_key, run_key
from storage_backends.local import LocalStore
from tests.hostile.forging import forge_part, forge_snapshot, reseal, sealed, tree_of, victim
from tests.support.stores import RUN

ATTACK = "\x1b]0;owned\x07\x1b[2J\x1b[1A\x9b31m\u202eevil\r\nckpt: all is well\x00<script>alert(1)</script>[bold]x"
BAD = ("\x1b", "\x07", "\x9b", "\u202e", "\r", "\x00")


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    """Escapes wherever a store can hold text: leaf, class, alias, value, metric, host, job."""
    store = LocalStore(tmp_path / "store")
    ids = victim(store)

    def part(tree: Any) -> None:
        for shard in tree["shards"]:
            shard["leaf"] += ATTACK
            shard["cls"] = "parameter" + ATTACK
        for bundle in tree["bundles"]:
            bundle["cls"] = "parameter" + ATTACK
        tree["aliases"] = {"tied" + ATTACK: "w" + ATTACK}
        tree["values"] = {"best" + ATTACK: {"dict": [[ATTACK, ATTACK]]}}
        tree["metrics"] = {ATTACK: ATTACK}

    for id_ in ids:
        forge_part(store, id_, part)
        forge_snapshot(store, id_, lambda tree: tree.update(metrics={ATTACK: ATTACK}))
    reseal(store, run_key(RUN), lambda tree: tree.update(host=ATTACK, job=ATTACK, versions={ATTACK: ATTACK}))
    return store


VERBS = [
    ["list"], ["list", "--problems"], ["show"], ["diff", "10", "20"], ["du"], ["verify"], ["verify", "--deep"],
    ["plan", "--lost", "0"], ["compact", "--dry-run"], ["prune", "--keep-last", "1", "--dry-run"], ["pin", "good"],
]  # fmt: skip


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_no_verb_passes_an_escape_on(store: LocalStore, verb: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code = main([verb[0], store.url, *verb[1:]])
    out, err = capsys.readouterr()
    assert code in (0, 1, 2)
    assert not [bad for bad in BAD for text in (out, err) if bad in text]
    assert not [line for line in (out + err).splitlines() if line.startswith("ckpt: all is well")]


@pytest.mark.parametrize("verb", [["list"], ["show"], ["diff", "10", "20"], ["verify", "--deep"]], ids=" ".join)
def test_json_has_it_as_it_is_and_escaped(
    store: LocalStore, verb: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    main([verb[0], store.url, *verb[1:], "--json"])
    out, err = capsys.readouterr()
    assert "\x1b" not in out + err
    assert "\x00" not in out + err


def test_an_error_that_names_what_a_store_says_is_one_line(
    store: LocalStore, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["show", store.url, ATTACK]) == 2
    _, err = capsys.readouterr()
    assert len(err.splitlines()) == 1
    assert not [bad for bad in BAD if bad in err]


def test_a_job_whose_name_holds_escapes_is_named_without_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An import is refused by a live job, whose document names its host."""
    store = LocalStore(tmp_path / "live")
    victim(store)
    live = RunId(2, "0ddba11e")
    tree = tree_of(store, run_key(RUN)) | {"run": str(live), "host": ATTACK, "job": ATTACK}
    store.put(run_key(live), sealed(tree))
    store.put(alive_key(live), seal(Alive(FORMAT, str(live), 1, True, 0.0)))
    assert main(["list", store.url]) == 0
    out, err = capsys.readouterr()
    assert not [bad for bad in BAD if bad in out + err]
