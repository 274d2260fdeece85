# SPDX-License-Identifier: LGPL-2.1-or-later
import ast
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fixtures import lab
from fixtures.lab import bench, hotplug, store
from fixtures.lab.cache import Cache
from fixtures.lab.errors import FetchError
from fixtures.lab.image import Image
from fixtures.lab.kernels import KERNELS, Installed


def test_scenarios_are_named_with_their_kernel() -> None:
    names = list(lab.scenarios())
    assert {"memory-5.10", "memory-6.12", "crash-6.1", "crash-6.12"} <= set(names)
    for name, (scenario, kernel) in lab.scenarios().items():
        assert name == f"{scenario.name}-{kernel}"
        assert kernel in KERNELS


def test_unknown_scenario_names_the_known(tmp_path: Path) -> None:
    with pytest.raises(lab.LabError, match=r"no scenario x; there are memory-5\.10"):
        lab.build("x", Cache(tmp_path, 1))


class UnbuiltCache(Cache):
    """One whose entries have a place and are never made."""

    def entry(self, kind: str, name: str, *_: Any) -> Path:
        return self.root / kind / name


def imported(path: Path) -> Iterator[str]:
    """The modules beside it that a module of a guest imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            yield from [node.module] if node.module else [n.name for n in node.names]


@pytest.mark.parametrize("name", lab.scenarios())
def test_all_that_a_guest_imports_is_in_its_image(name: str, tmp_path: Path) -> None:
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
        wanted |= {*imported(image.files[f"/lab/fixtures/lab/guest/{part}.py"])}
        seen.add(part)


def test_benchmark_has_four_million_pages() -> None:
    machine = bench.machine(KERNELS["6.1"])
    assert machine.mib * 256 > 4_194_304


def test_sources_that_count_in_the_key_are_there() -> None:
    for scenario in store.SCENARIOS:
        for path in store.sources(scenario):
            assert path.is_file()


def test_module_that_says_what_is_kept_counts_in_the_key() -> None:
    lab = Path(store.__file__).parent
    assert store.sources(bench.SCENARIO) == {*store.SHARED, lab / "bench.py"}
    own = {lab / "hotplug.py", lab / "inside.py"}
    assert store.sources(hotplug.SCENARIO) == {*store.SHARED, *own}


def test_lists_that_are_out_of_date_are_renewed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    class FakeArchive:
        def refresh(self) -> bool:
            done.append("refresh")
            return True

    def fail(plan: object) -> None:
        done.append("build")
        raise FetchError("404")

    plan = SimpleNamespace(archive=FakeArchive())
    monkeypatch.setattr(store, "_plan", lambda name, cache: plan)
    monkeypatch.setattr(store, "_build", fail)
    with pytest.raises(FetchError):
        lab.build("memory-6.1", Cache(tmp_path, 1))
    assert done == ["build", "refresh", "build"]
