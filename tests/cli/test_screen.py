"""Numbers, ages, tables and options, as every verb prints and reads them."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ckpt.cli import screen
from ckpt.cli.screen import age_text, bytes_text, count, cut, open_url, print_table, printable
from storage_backends.base import Refused
from tests.cli.living import chain

ROWS = [["10", "model.weight", "kept"], ["1000", "model.bias", ""]]


class Terminal(io.StringIO):
    """A terminal as far as anybody asks."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (99_400, "99.4 kB"),
        (99_500, "100 kB"),
        (999_499, "999 kB"),
        (999_500, "1.0 MB"),
        (1_536_000, "1.5 MB"),
        (3_000_000_000, "3.0 GB"),
        (12_345_678_901_234, "12.3 TB"),
        (5e18, "5000.0 PB"),
    ],
)
def test_bytes_have_three_digits_or_so(n: float, text: str) -> None:
    assert bytes_text(n) == text


@pytest.mark.parametrize(
    ("past", "text"),
    [
        (0, "0 s"),
        (119, "119 s"),
        (120, "2 min"),
        (7199, "120 min"),
        (7200, "2 h"),
        (172799, "48 h"),
        (172800, "2 d"),
        (8.64e8, "10000 d"),
        (-30, "-30 s"),
        (-1e6, "-12 d"),
    ],
)
def test_ages_change_units_before_they_get_long(past: float, text: str) -> None:
    """D1: a clock that was ahead gives a negative age, not nonsense."""
    assert age_text(5e8, now=5e8 + past) == text


def test_an_unknown_age_is_a_question_mark() -> None:
    assert age_text(None) == "?"


def test_counts_and_cuts() -> None:
    assert [count(0, "object"), count(1, "object"), count(2, "object")] == ["0 objects", "1 object", "2 objects"]
    assert [count(1, "leaf", "leaves"), count(3, "leaf", "leaves")] == ["1 leaf", "3 leaves"]
    assert [cut("abcdef", 6), cut("abcdefg", 6), cut("abcd   efg", 8)] == ["abcdef", "abcde…", "abcd…"]


def test_printable_leaves_letters_of_every_alphabet_and_spells_the_rest_out() -> None:
    assert printable("Gewichtung für 层.3") == "Gewichtung für 层.3"
    assert printable("a\tb\nc\x1b[0m\u202e") == r"a\tb\nc\x1b[0m" + r"\u202e"


def test_a_piped_table_is_plain_and_has_no_space_at_line_ends(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["step", "leaf", "notes"], ROWS, right=frozenset({0}))
    assert capsys.readouterr().out == "step  leaf          notes\n  10  model.weight  kept\n1000  model.bias\n"


def test_columns_at_the_end_that_are_empty_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["step", "leaf", "notes"], [["1", "a", ""], ["2", "b", ""]])
    assert capsys.readouterr().out == "step  leaf\n1     a\n2     b\n"


def on_terminal(monkeypatch: pytest.MonkeyPatch, width: int, rows: list[list[str]], **settings: Any) -> list[str]:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    print_table(["step", "leaf", "notes"], rows, **settings)
    return re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue()).splitlines()


def test_on_a_terminal_it_is_a_table_with_a_line_below_its_head(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = on_terminal(monkeypatch, 80, ROWS, right=frozenset({0}), fold=frozenset({1}))
    assert [line.split() for line in lines if line.strip()] == [
        ["step", "leaf", "notes"],
        ["─" * (len(lines[1]) - 2)],
        ["10", "model.weight", "kept"],
        ["1000", "model.bias"],
    ]


def test_a_narrow_terminal_folds_names_and_never_cuts_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "model.transformer.layers.11.attention.projection.weight"
    lines = on_terminal(monkeypatch, 50, [["123456", name, "float32"]], right=frozenset({0}), fold=frozenset({1}))
    assert max(map(len, lines)) <= 50
    body = [line.split() for line in lines[3:] if line.strip()]
    assert len(body) > 1
    assert (body[0][0], body[0][2]) == ("123456", "float32")
    assert body[0][1] + "".join(word for row in body[1:] for word in row) == name


def test_where_folding_is_not_enough_the_line_is_longer_than_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = on_terminal(monkeypatch, 12, [["123456", "model.weight", "float32"]], right=frozenset({0, 2}))
    assert lines[3].split() == ["123456", "model.weight", "float32"]


def test_markup_in_names_is_text(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = on_terminal(monkeypatch, 80, [["1", "[bold]w[/bold]", "[red]"]])
    assert lines[3].split() == ["1", "[bold]w[/bold]", "[red]"]


def test_a_real_terminal_gets_the_table(tmp_path: Path) -> None:
    chain(tmp_path, 1)
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": "100", "TERM": "xterm"}
    command = [sys.executable, "-m", "ckpt.cli", "list", str(tmp_path)]
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        said = b""
        while True:
            try:
                said += os.read(ours, 65536)
            except OSError:  # how Linux says that the other end is closed
                break
    os.close(ours)
    assert process.returncode == 0, said
    assert "────" in said.decode()
    assert b"\x1b[1mstep" in said


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("endpoint_url=http://localhost:9000", "http://localhost:9000"),
        ("port=2222", 2222),
        ("anon=true", True),
        ("flags=[1, 2]", [1, 2]),
        ('key="0123"', "0123"),
        ("secret=a=b=c", "a=b=c"),
        ("token=", ""),
    ],
)
def test_storage_options_are_json_where_they_parse_and_text_otherwise(
    option: str, expected: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, dict[str, object]]] = []
    monkeypatch.setattr(screen, "open_store", lambda url, **options: seen.append((url, options)))
    open_url("s3://bucket/run7", [option, "other=1"], locked=True)
    assert seen == [("s3://bucket/run7", {option.partition("=")[0]: expected, "other": 1})]


@pytest.mark.parametrize("option", ["endpoint_url", "=value", ""])
def test_a_storage_option_without_a_name_or_value_is_refused(option: str) -> None:
    with pytest.raises(ValueError, match=r"--storage-option .*: expected KEY=VALUE"):
        open_url("s3://bucket", [option])


def test_a_folder_takes_no_storage_options(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="a folder takes no storage options, found anon"):
        open_url(str(tmp_path), ["anon=true"])
