# SPDX-License-Identifier: LGPL-2.1-or-later
import ast
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fixtures import lab
from fixtures.lab import bench, bytecode, hotplug, store
from fixtures.lab.cache import Cache
from fixtures.lab.image import Image
from fixtures.lab.kernels import KERNELS, Installed
from fixtures.lab.packages import Archive


class UnbuiltCache(Cache):
    """One whose entries have a place and are never made."""

    def entry(self, kind: str, name: str, *_: Any) -> Path:
        return self.root / kind / name


@cache
def imported(path: Path) -> frozenset[str]:
    """The modules beside it that a module of a guest imports."""
    nodes = ast.walk(ast.parse(path.read_text()))
    found = [
        node for node in nodes if isinstance(node, ast.ImportFrom) and node.level == 1
    ]
    return frozenset(
        name
        for node in found
        for name in ([node.module] if node.module else [n.name for n in node.names])
    )


@pytest.mark.parametrize("name", lab.scenarios())
def test_all_that_a_guest_imports_is_in_its_image(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Which versions there are, apt would be asked.
    monkeypatch.setattr(bytecode, "interpreter", lambda cache: tmp_path)
    monkeypatch.setattr(
        Archive, "versions", lambda self, names: dict.fromkeys(names, "1")
    )
    scenario, row = lab.scenarios()[name]
    kernel = Installed(KERNELS[row], "", "", tmp_path)
    image = scenario.image
    if not isinstance(image, Image):
        image = image(kernel, UnbuiltCache(tmp_path, 1))
    machine = scenario.machine(kernel.kernel)
    assert machine.nodes
    words = [word for word in machine.options if word.startswith("lab.scenario=")]
    ((_, _, first),) = [word.partition("=") for word in words]
    wanted, seen = {first}, set[str]()
    while wanted - seen:
        part = (wanted - seen).pop()
        wanted |= imported(image.files[f"/lab/fixtures/lab/guest/{part}.py"])
        seen.add(part)


def test_module_that_says_what_is_kept_counts_in_the_key() -> None:
    lab = Path(store.__file__).parent
    assert store.sources(bench.SCENARIO) == {*store.SHARED, lab / "bench.py"}
    own = {lab / "hotplug.py", lab / "inside.py"}
    assert store.sources(hotplug.SCENARIO) == {*store.SHARED, *own}
