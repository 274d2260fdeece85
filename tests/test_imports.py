# SPDX-License-Identifier: LGPL-2.1-or-later

"""Packages import only from lower layers, and folders have no import cycles."""

import ast
import importlib
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import msatools

ROOT = Path(msatools.__file__).parent
MODULES = {
    ".".join(("msatools", *path.relative_to(ROOT).with_suffix("").parts)): path
    for path in ROOT.rglob("*.py")
}
LAYERS = (
    ("selfdesc",),
    ("program",),
    ("kernel",),
    ("tasks",),
    ("memory",),
    ("locks",),
    ("prstat", "zombies", "cpus", "whatis"),
    ("query",),
    ("report", "selfcheck"),
)
"""Packages that read a kernel, lowest first. Packages of one layer are independent."""

ABOVE_ALL = ("render", "cli", "plugin", "registry", "query")
"""Packages that no layer imports: output, the command line, and the package's API."""

ACYCLIC = ("msatools.render",)
"""Packages whose folders have no import cycles; their own modules count as a folder."""


@cache
def imported(path: Path) -> tuple[str, ...]:
    """Return the modules of msatools that a file imports anywhere in it."""
    return tuple(_imported(path))


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in MODULES else node.module for name in names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def folder(module: str) -> str:
    return module.rpartition(".")[0]


@pytest.mark.parametrize("package", ACYCLIC)
def test_folders_have_no_import_cycle(package: str) -> None:
    within = f"{package}."
    below: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        if module.startswith(within):
            others = {name for name in imported(path) if name.startswith(within)}
            below.setdefault(folder(module), set()).update(map(folder, others))
    assert len(below) > 1
    for name, others in below.items():
        others.discard(name)
    assert_no_cycle(below)


def at_once(path: Path) -> Iterator[str]:
    """Yield what a module imports when it is imported, not when it is used."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in MODULES else node.module for name in names)


def test_modules_have_no_import_cycle() -> None:
    below = {name: {*at_once(path)} - {name} for name, path in MODULES.items()}
    assert len(below) > 200
    assert_no_cycle(below)


OUTPUT = (
    *("reports", "render", "cli", "plugin", "registry", "console", "frontdoor"),
    *("derived", "mcp_server", "presentation", "prompt", "help"),
)
"""Packages that turn reports into text, files and commands."""


def test_output_has_no_import_cycle() -> None:
    below: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        package = module.split(".")[1]
        others = {name.split(".")[1] for name in imported(path) if name in MODULES}
        below.setdefault(package, set()).update(others - {package})
    assert below.keys() >= {*OUTPUT}
    assert not {
        (package, other)
        for package, others in below.items()
        for other in others & {*OUTPUT, "commands"}
        if package not in OUTPUT and other != "reports"
    }
    assert_no_cycle({package: below[package] for package in OUTPUT})


def assert_no_cycle(below: dict[str, set[str]]) -> None:
    """Fail if a name is below itself, with the cycle as message."""
    try:
        tuple(TopologicalSorter(below).static_order())
    except CycleError as error:
        pytest.fail(" imports ".join(error.args[1][::-1]))


def test_packages_import_only_from_lower_layers() -> None:
    below: set[str] = set()
    for layer in LAYERS:
        for package in layer:
            modules = [name for name in MODULES if name.split(".")[1] == package]
            assert modules, f"no package {package}"
            allowed = {*below, package}
            for module in modules:
                wrong = {
                    name
                    for name in imported(MODULES[module])
                    if name.startswith("msatools.") and is_above(name, allowed)
                }
                assert not wrong, f"{module} imports {sorted(wrong)}"
        below.update(layer)


@pytest.mark.parametrize("name", ["bench", "fuzz", "truth.matrix", "support.mutants"])
def test_what_make_runs_by_name_can_be_imported(name: str) -> None:
    """No test runs them whole: they take long."""
    module = f"tests.{name}"
    path = Path(__file__).parents[1] / (module.replace(".", "/"))
    importlib.import_module(f"{module}.__main__" if path.is_dir() else module)


def is_above(module: str, allowed: set[str]) -> bool:
    """Return whether a module's package is in a layer or above all, but not allowed."""
    package = module.split(".")[1]
    layers = {name for layer in LAYERS for name in layer}
    return package not in allowed and package in layers.union(ABOVE_ALL)
