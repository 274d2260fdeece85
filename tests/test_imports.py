# SPDX-License-Identifier: LGPL-2.1-or-later

"""Packages import only from floors below them, and folders form no circle."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import msatools

ROOT = Path(msatools.__file__).parent
MODULES = {
    ".".join(("msatools", *path.relative_to(ROOT).with_suffix("").parts)): path
    for path in ROOT.rglob("*.py")
}
FLOORS = (
    ("selfdesc",),
    ("target",),
    ("kernel",),
    ("tasks",),
    ("memory",),
    ("locks",),
    ("prstat", "zombies", "cpus"),
    ("query",),
    ("selfcheck",),
)
"""Packages that read a kernel, lowest first. Those of one floor do not know another."""

NOT_BELOW = ("render", "cli", "plugin", "registry", "query")
"""What no floor stands on: output, the command line, and the package's own API."""

UNTANGLED = ("msatools.locks", "msatools.memory", "msatools.render")
"""Packages whose folders, and whose own modules as one more, form no circle."""


def imported(path: Path) -> Iterator[str]:
    """Yield the modules of msatools that a file imports anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in MODULES else node.module for name in names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def folder(module: str) -> str:
    return module.rpartition(".")[0]


@pytest.mark.parametrize("package", UNTANGLED)
def test_folders_form_no_circle(package: str) -> None:
    within = f"{package}."
    below: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        if module.startswith(within):
            others = {name for name in imported(path) if name.startswith(within)}
            below.setdefault(folder(module), set()).update(map(folder, others))
    assert len(below) > 1
    for name, others in below.items():
        others.discard(name)
    assert_no_circle(below)


OUTPUT = ("reports", "render", "cli", "plugin", "registry")
"""What turns the reports of the others into text, files and commands."""


def test_output_forms_no_circle() -> None:
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
    assert_no_circle({package: below[package] for package in OUTPUT})


def assert_no_circle(below: dict[str, set[str]]) -> None:
    """Fail if a name is below itself, with the way that leads there."""
    try:
        tuple(TopologicalSorter(below).static_order())
    except CycleError as error:
        pytest.fail(" imports ".join(error.args[1][::-1]))


def test_packages_import_only_from_below() -> None:
    below: set[str] = set()
    for floor in FLOORS:
        for package in floor:
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
        below.update(floor)


def is_above(module: str, allowed: set[str]) -> bool:
    """Return whether a module is of a floor that is not in *allowed*, or of none."""
    package = module.split(".")[1]
    floors = {each for floor in FLOORS for each in floor}
    return package not in allowed and package in floors.union(NOT_BELOW)
