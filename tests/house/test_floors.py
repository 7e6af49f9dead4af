"""The house has floors: imports only go down this list, and torch lives only in the rooms marked with it.

The list is the map; DESIGN.md §5 has the same in words.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import TypeGuard

import pytest

ROOT = Path(__file__).parents[2]

# Top floor first. A room is a module or a package; the longest name that fits decides.
FLOORS: list[list[str]] = [
    ["ckpt.cli"],
    ["ckpt.loop"],
    ["ckpt.checkpointer"],
    ["ckpt.resuming", "ckpt.saves"],
    ["recovery"],
    ["ckpt.outcomes", "ckpt.tenure", "ckpt.voting"],
    ["ckpt.ticket"],
    ["ckpt.saving"],
    ["ckpt.data", "ckpt.loaders", "ckpt.random_states"],
    ["ckpt.ranks"],
    ["ckpt.records"],
    ["ckpt.rolling"],
    ["ckpt.checksums"],
    ["ckpt.leaves"],
    ["ckpt.mirror"],
    ["ckpt.cadence"],
    ["ckpt.history"],
    ["ckpt.agreement", "ckpt.ballot", "ckpt.exits", "ckpt.metrics", "ckpt.options", "ckpt.progress", "ckpt.stopping"],
    ["ckpt.format"],
    ["ckpt.errors"],
    ["storage_backends"],
]

TORCH = {
    "ckpt.loop",
    "ckpt.checkpointer",
    "ckpt.checksums",
    "ckpt.resuming",
    "ckpt.rolling",
    "ckpt.records",
    "ckpt.saves",
    "recovery.attempt",
    "recovery.foreign_dcp",
    "recovery.foreign_torch",
    "recovery.forward",
    "recovery.load",
    "recovery.overlay",
    "recovery.place",
    "recovery.replay",
    "recovery.restore",
    "ckpt.saving.capture",
    "ckpt.saving.overlap",
    "ckpt.saving.consuming",
    "ckpt.saving.gradients",
    "ckpt.saving.journal",
    "ckpt.saving.keeping",
    "ckpt.saving.opening",
    "ckpt.saving.proving",
    "ckpt.saving.sharing",
    "ckpt.saving.taking",
    "ckpt.data",
    "ckpt.loaders",
    "ckpt.random_states",
    "ckpt.ranks",
    "ckpt.voting",
    "ckpt.leaves",
}

LOBBIES = {"ckpt"}  # loads every public name on first use, so it stands on no floor


def modules() -> dict[str, Path]:
    found = {}
    for package in ("ckpt", "recovery", "storage_backends"):
        for path in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path
    return found


def floor(module: str) -> int | None:
    for number, names in enumerate(FLOORS):
        for name in names:
            if module == name or module.startswith(name + "."):
                return number
    return None


@cache
def imports(path: Path, *, top_only: bool) -> frozenset[str]:
    """Modules of ours, and torch, that a file imports; `top_only`: when it is loaded, not inside functions."""
    tree = ast.parse(path.read_text())
    found: set[str] = set()

    def walk(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if top_only and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                continue
            if isinstance(child, ast.Import):
                found.update(alias.name for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{path}: relative import"
                for alias in child.names:
                    inner = f"{child.module}.{alias.name}"
                    found.add(inner if inner in ALL else str(child.module))
            walk(child)

    walk(tree)
    return frozenset(found)


ALL = modules()


def ours(names: frozenset[str]) -> set[str]:
    return {name for name in names if name in ALL}


@pytest.mark.parametrize("module", sorted(ALL))
def test_imports_only_go_down(module: str) -> None:
    if module in LOBBIES:
        return
    mine = floor(module)
    assert mine is not None, f"{module} stands on no floor; add it to FLOORS, where it belongs"
    for other in ours(imports(ALL[module], top_only=False)) - LOBBIES:
        theirs = floor(other)
        assert theirs is not None and theirs >= mine, f"{module} (floor {mine}) imports {other}, above it"


def test_recovery_and_saving_do_not_know_each_other() -> None:
    for module, path in ALL.items():
        for other in ours(imports(path, top_only=False)):
            pair = {module.split(".")[0], ".".join(other.split(".")[:2])}
            assert pair != {"recovery", "ckpt.saving"}, f"{module} imports {other}"


def test_no_two_modules_import_each_other_in_a_circle() -> None:
    state: dict[str, int] = {}

    def visit(module: str, trail: tuple[str, ...]) -> None:
        if state.get(module) == 2:
            return
        assert state.get(module) != 1, " -> ".join((*trail, module))
        state[module] = 1
        for other in ours(imports(ALL[module], top_only=True)):
            if other != module:
                visit(other, (*trail, module))
        state[module] = 2

    for module in ALL:
        visit(module, ())


def reaches_torch(module: str, seen: set[str]) -> list[str] | None:
    """The chain of imports by which loading a module loads torch, or None."""
    seen.add(module)
    names = imports(ALL[module], top_only=True)
    if any(name == "torch" or name.startswith("torch.") for name in names):
        return [module]
    for other in sorted(ours(names) - seen):
        if (chain := reaches_torch(other, seen)) is not None:
            return [module, *chain]
    return None


@pytest.mark.parametrize("module", sorted(ALL))
def test_torch_is_loaded_only_in_the_rooms_marked_for_it(module: str) -> None:
    marked = any(module == name or module.startswith(name + ".") for name in TORCH)
    chain = reaches_torch(module, set())
    assert marked or chain is None, " -> ".join(chain or []) + " -> torch"


def test_the_command_line_starts_without_torch() -> None:
    code = "import sys, ckpt.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_no_module_is_longer_than_it_may_be() -> None:
    for module, path in ALL.items():
        lines = len(path.read_text().splitlines())
        assert lines <= 450, f"{module} has {lines} lines; 350 is a question, 450 is a no"


WEIGHTS_ONLY = "recovery.foreign_torch"
"""The one room that reads torch's own files: there `torch.load` may be called, and only with ``weights_only=True``."""

FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}


def loads_weights_only(node: ast.AST) -> TypeGuard[ast.Call]:
    """Whether this is ``torch.load(…, weights_only=True)``, with nothing spread into it."""
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="load"), keywords=keywords):
            given = {keyword.arg: keyword.value for keyword in keywords}
            only = given.get("weights_only")
            return None not in given and isinstance(only, ast.Constant) and only.value is True
        case _:
            return False


def test_the_rule_about_torch_load_sees_what_it_must() -> None:
    def calls(code: str) -> list[bool]:
        return [loads_weights_only(node) for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]

    assert calls("torch.load(f, weights_only=True)") == [True]
    for code in (
        "torch.load(f)",
        "torch.load(f, weights_only=False)",
        "torch.load(f, weights_only=only)",
        "torch.load(f, weights_only=True, **more)",
        "torch.load(f, weights_only=1)",
    ):
        assert calls(code) == [False], code
    assert any(map(loads_weights_only, ast.walk(ast.parse(ALL[WEIGHTS_ONLY].read_text())))), "the room is not needed"


@pytest.mark.parametrize("module", sorted(ALL))
def test_nothing_unpickles_or_evaluates(module: str) -> None:
    tree = ast.parse(ALL[module].read_text())
    safe = {id(call.func) for call in ast.walk(tree) if module == WEIGHTS_ONLY and loads_weights_only(call)}
    for node in ast.walk(tree):
        names: list[str] = []
        match node:
            case ast.Import(names=aliases):
                names = [alias.name for alias in aliases]
            case ast.ImportFrom(module=source, names=aliases):
                names = [str(source), *(alias.name for alias in aliases)]
            case ast.Attribute(value=ast.Name(id="torch"), attr="load"):
                names = [] if id(node) in safe else ["torch.load"]
            case ast.Attribute(attr=attr):
                names = [attr]
            case ast.Name(id=name):
                names = [name]
        where = f"{module}:{getattr(node, 'lineno', 0)}"
        for name in names:
            assert "pickle" not in name.lower() and name != "torch.load", f"{where}: {name}"
        if isinstance(node, ast.Name):
            assert node.id not in FORBIDDEN_CALLS, f"{where}: {node.id}"
