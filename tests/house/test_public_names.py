"""The lobby: what is public, and nothing else."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys

import ckpt
from ckpt import errors


def test_every_public_name_is_there_and_only_those() -> None:
    for name in ckpt.__all__:
        value = getattr(ckpt, name)
        assert value.__name__ == name
        assert getattr(importlib.import_module(ckpt._HOMES[name]), name) is value
    assert sorted(ckpt._HOMES) == sorted(ckpt.__all__) == dir(ckpt)


def test_an_unknown_name_is_an_attribute_error() -> None:
    try:
        ckpt.nonsense  # noqa: B018
    except AttributeError as error:
        assert "nonsense" in str(error)
    else:
        raise AssertionError("no error")


def test_importing_the_lobby_loads_nothing_heavy() -> None:
    code = "import sys, ckpt; sys.exit(any(m in sys.modules for m in ('torch', 'numpy', 'fsspec', 'msgspec')))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_every_public_thing_says_what_it_is() -> None:
    for name in ckpt.__all__:
        value = getattr(ckpt, name)
        assert inspect.getdoc(value), f"ckpt.{name} has no docstring"
        if inspect.isclass(value):
            for member, function in inspect.getmembers(value, inspect.isfunction):
                if not member.startswith("_") and function.__module__.startswith(("ckpt", "recovery")):
                    assert inspect.getdoc(function), f"ckpt.{name}.{member} has no docstring"


def test_every_error_is_of_the_tree() -> None:
    for name in errors.__all__:
        kind = getattr(errors, name)
        assert issubclass(kind, errors.CheckpointError | errors.StorageError)
