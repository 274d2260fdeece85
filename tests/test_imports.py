# SPDX-License-Identifier: LGPL-2.1-or-later

"""Folders stand on one another: none imports one that imports it, on any way."""

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
UNTANGLED = ("msatools.locks", "msatools.memory")
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
    try:
        tuple(TopologicalSorter(below).static_order())
    except CycleError as error:
        pytest.fail(" imports ".join(error.args[1][::-1]))
