"""The README runs: every code block, in order, in one empty folder.

A ``<!-- setup … -->`` comment is Python that runs unseen; a block below ``<!-- not run: why -->`` is left out, but the
files it names must exist.
"""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import ckpt
from ckpt import errors
from ckpt.cli import VERBS

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"

_PIECES = re.compile(
    r"^<!-- setup\n(?P<setup>.*?)^-->$"
    r"|(?P<skip>^<!-- not run: [^\n]+ -->\n)?^```(?P<kind>\w*)\n(?P<block>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Piece:
    kind: str  # "setup", "python", "sh"
    code: str
    line: int
    skipped: bool


def pieces() -> list[Piece]:
    text = README.read_text()
    found = []
    for match in _PIECES.finditer(text):
        name = "setup" if match["setup"] is not None else "block"
        line = text.count("\n", 0, match.start(name)) + 1
        kind = "setup" if name == "setup" else match["kind"]
        found.append(Piece(kind, match[name], line, match["skip"] is not None))
    return found


def test_the_readme_is_what_this_file_thinks_it_is() -> None:
    found = pieces()
    assert {piece.kind for piece in found} == {"setup", "python", "sh"}, "a kind of block that nobody runs"
    assert 2 * len([piece for piece in found if piece.kind != "setup"]) == README.read_text().count("\n```")
    assert len([piece for piece in found if piece.kind == "python"]) >= 4
    assert not [piece for piece in found if piece.skipped and piece.kind != "sh"]


def test_every_code_block_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    namespace: dict[str, object] = {"__name__": "readme"}
    ran = 0
    for piece in pieces():
        if piece.skipped:
            continue
        if piece.kind == "sh":
            result = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", piece.code],
                env={**os.environ, "PATH": path},
                capture_output=True,
                text=True,
            )
            assert result.returncode == 0, f"README.md:{piece.line}: {result.stdout}{result.stderr}"
            assert not result.stderr, f"README.md:{piece.line}: {result.stderr}"
        else:
            # Blank lines in front, so that a traceback shows the README's own line numbers.
            exec(compile("\n" * (piece.line - 1) + piece.code, str(README), "exec"), namespace)
        ran += 1
    assert ran >= 6


def test_commands_that_are_not_run_here_exist() -> None:
    named = [
        line.split()[0]
        for piece in pieces()
        if piece.skipped
        for line in piece.code.splitlines()
        if line.startswith("scripts/")
    ]
    assert named == ["scripts/demo", "scripts/test"]
    for name in named:
        assert (ROOT / name).stat().st_mode & stat.S_IXUSR, name


def test_every_verb_of_the_command_line_is_shown() -> None:
    shown = {line.split()[1] for piece in pieces() for line in piece.code.splitlines() if line.startswith("ckpt ")}
    assert shown == set(VERBS)


def test_links_to_files_lead_somewhere() -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README.read_text()) if "://" not in link]
    assert links
    for link in links:
        assert (ROOT / link).is_file(), link


def test_the_table_of_errors_is_whole() -> None:
    rows = [line for line in README.read_text().splitlines() if line.startswith("| `")]
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(named) == sorted(set(errors.__all__) - {"CheckpointError", "StorageError"})
    for row in rows:
        attributes = re.findall(r"`\.(\w+)`", row)
        kind = getattr(ckpt, re.findall(r"`(\w+)`", row)[0])
        assert set(attributes) <= set(getattr(kind.__init__, "__annotations__", ())), row


def test_the_licence_is_the_verbatim_apache_2_text() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert text.lstrip().startswith("Apache License\n")
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text
    assert len(text) == 11358
