"""The command as a whole: its verbs, help, exit codes, and how it ends when it is ended from outside."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from ckpt.cli import VERBS, main, screen
from storage_backends.base import Entry
from storage_backends.local import LocalStore
from tests.cli.conftest import Ckpt
from tests.cli.living import chain, keys
from tests.support.stores import make_store

OF_A_STORE = [verb for verb in VERBS if verb != "mirrors"]
"""The verbs that take a URL."""
MORE = {"prune": ["--keep-last", "1"], "diff": ["latest", "latest"], "pin": ["name"], "unpin": ["name"]}
"""What a verb must be told besides."""
NOWHERE = "/proc/nowhere/file"
MORE |= {
    "export": ["latest", NOWHERE, "--to", "safetensors"],
    "import": [NOWHERE, "--from", "safetensors"],
}
"""These two do not come to their end here: their own tests show that."""


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_every_verb_states_its_exit_codes_and_every_flag(ckpt: Ckpt, verb: str) -> None:
    said = ckpt(verb, "--help")
    assert (said.code, said.err) == (0, "")
    text = " ".join(said.out.split())
    assert text.startswith(f"Usage: ckpt {verb} [OPTIONS]")
    assert re.search(r"Exit codes: 0 .*; 2 ", text)
    assert "--json" in text
    assert ("--storage-option KEY=VALUE" in text) == (verb in OF_A_STORE)
    assert max(map(len, said.lines)) <= 80


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verbs that write a file where they are called must not do so in the repository."""
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))


def test_the_overview_names_every_verb_in_one_uncut_line(ckpt: Ckpt) -> None:
    said = ckpt("--help")
    assert said.code == 0
    found = dict(re.findall(r"^  (\w+) +(\S.*)$", said.out.partition("Commands:")[2], re.MULTILINE))
    assert list(found) == list(VERBS)
    assert all(line.endswith(".") and not line.endswith("...") for line in found.values())
    # With no arguments the same, but that is no success.
    assert ckpt().code == 2
    assert "Commands:" in ckpt().out + ckpt().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["lsit"], "No such command 'lsit'. Did you mean 'list'?"),
        (["list"], "Missing argument"),
        (["list", "a", "b"], "unexpected extra argument"),
        (["list", "a", "--deep"], "No such option"),
        (["show", "a", "1", "2"], "unexpected extra argument"),
        (["--version", "list"], "No such option"),
    ],
)
def test_wrong_usage_is_exit_code_2_and_a_pointer_to_help(ckpt: Ckpt, arguments: list[str], says: str) -> None:
    said = ckpt(*arguments)
    assert (said.code, said.out) == (2, "")
    assert says in said.err
    assert "--help" in said.err


@pytest.mark.parametrize("verb", OF_A_STORE)
@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("", "the store's URL is empty"),
        ("s4://bucket/x", "unknown scheme s4://"),
        ("s3://", "names no bucket"),
        ("zip://x::s3://bucket/x", "makes a chain of URLs"),
    ],
)
def test_a_url_that_makes_no_sense_is_one_line_and_exit_code_2(ckpt: Ckpt, verb: str, url: str, says: str) -> None:
    said = ckpt(verb, url, *MORE.get(verb, ()))
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith("ckpt: ")
    assert says in said.err
    assert said.err.count("\n") == 1


@pytest.mark.parametrize("verb", OF_A_STORE)
@pytest.mark.parametrize("option", ["anon", "=x", "anon=true"])
def test_storage_options_are_checked_by_every_verb(ckpt: Ckpt, tmp_path: Path, verb: str, option: str) -> None:
    chain(tmp_path, 1)
    said = ckpt(verb, tmp_path, "--storage-option", option, *MORE.get(verb, ()))
    assert (said.code, said.out) == (2, "")
    assert "KEY=VALUE" in said.err or "a folder takes no storage options, found anon" in said.err


def test_storage_options_reach_the_store(ckpt: Ckpt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, _ = chain(tmp_path, 1)
    seen: list[tuple[str, dict[str, object]]] = []

    def opened(url: str, **options: object) -> LocalStore:
        seen.append((url, options))
        return store

    monkeypatch.setattr(screen, "open_store", opened)
    for verb in OF_A_STORE:
        options = ["--storage-option", "anon=true", "--storage-option", "k=v"]
        assert ckpt(verb, "s3://b/x", *MORE.get(verb, ()), *options).code == (2 if NOWHERE in MORE.get(verb, ()) else 0)
    assert seen == [("s3://b/x", {"anon": True, "k": "v"})] * len(OF_A_STORE)


@pytest.mark.parametrize("verb", OF_A_STORE)
def test_ctrl_c_is_130_and_one_line(ckpt: Ckpt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    class Interrupting(LocalStore):
        def list(self, prefix: str) -> Sequence[Entry]:
            signal.raise_signal(signal.SIGINT)
            return super().list(prefix)

    store, _ = chain(tmp_path, 2)
    before = keys(store)
    monkeypatch.setattr(screen, "open_store", lambda url, **options: Interrupting(tmp_path))
    said = ckpt(verb, tmp_path, *MORE.get(verb, ()))
    assert (said.code, said.out) == (130, "")
    assert said.err == "ckpt: interrupted; nothing is left half done, and running it again does the rest\n"
    assert keys(store) == before


def test_only_the_verb_that_is_asked_for_is_loaded() -> None:
    code = (
        "import sys; from ckpt.cli import main; main(['list', '/nowhere']);"
        "heavy = {'torch', 'numpy', 'fsspec', 'rich', 'recovery.verify', 'ckpt.cli.show'} & set(sys.modules);"
        "sys.exit(' '.join(sorted(heavy)) or None)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


def test_a_reader_that_leaves_early_ends_it_quietly(tmp_path: Path) -> None:
    """``ckpt show … | head``: more than a pipe holds, and nobody reads on."""
    make_store(LocalStore(tmp_path), [{f"leaf{n}": np.zeros(1, np.int8) for n in range(3000)}])
    command = [sys.executable, "-m", "ckpt.cli", "show", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith(b"step 10")
        process.stdout.close()
        complaint = process.stderr.read()
    assert (process.returncode, complaint) == (141, b"")


def test_nobody_reading_at_all_is_no_complaint_either(tmp_path: Path) -> None:
    """Less than a buffer, so that only the flush at the end notices."""
    chain(tmp_path, 1)
    ours, theirs = os.pipe()
    os.close(ours)
    result = subprocess.run(
        [sys.executable, "-m", "ckpt.cli", "list", str(tmp_path)], stdout=theirs, stderr=subprocess.PIPE
    )
    os.close(theirs)
    assert (result.returncode, result.stderr) == (141, b"")


def test_an_ascii_terminal_shows_what_it_can(tmp_path: Path) -> None:
    make_store(LocalStore(tmp_path), [{"Gewicht_ü_层": np.zeros(4)}])
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    result = subprocess.run(
        [sys.executable, "-m", "ckpt.cli", "show", str(tmp_path)], capture_output=True, env=environment
    )
    assert (result.returncode, result.stderr) == (0, b"")
    assert rb"Gewicht_\xfc_\u5c42" in result.stdout


def test_the_console_command_is_this_main(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["ckpt", "list", str(tmp_path / "none")])
    assert main() == 0


def test_every_verb_is_a_module_of_its_own_with_a_command() -> None:
    assert all(callable(import_module(name).command) for name in VERBS.values())
    assert len(set(VERBS.values())) == len(VERBS)
