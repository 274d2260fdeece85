# SPDX-License-Identifier: LGPL-2.1-or-later
import ast
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fixtures import lab
from fixtures.lab import bench, bytecode, hotplug, store
from fixtures.lab.cache import Cache
from fixtures.lab.errors import FetchError, UnavailableError
from fixtures.lab.image import Image
from fixtures.lab.kernels import KERNELS, Installed
from fixtures.lab.packages import Archive

MIB = 1 << 20


def test_scenarios_are_named_with_their_kernel() -> None:
    names = list(lab.scenarios())
    assert {"memory-5.10", "memory-6.12", "crash-6.1", "crash-6.12"} <= set(names)
    for name, (scenario, kernel) in lab.scenarios().items():
        assert name == f"{scenario.name}-{kernel}"
        assert kernel in KERNELS


def test_matrix_names_scenarios_and_kernels() -> None:
    for name, rows in store.MATRIX.items():
        for row in rows:
            scenario, kernel = lab.scenarios()[f"{name}-{row}"]
            assert (scenario.name, kernel) == (name, row)
            assert row not in scenario.kernels


def test_unknown_scenario_names_the_known(tmp_path: Path) -> None:
    with pytest.raises(lab.LabError, match=r"no scenario x; there are memory-5\.10"):
        lab.build("x", Cache(tmp_path, 1))


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
        lab.build("memory-6.12", Cache(tmp_path, 1))
    assert done == ["build", "refresh", "build"]


@dataclass
class FailingPlan:
    """Of guests of which the first ones fail, with a console."""

    cache: Cache
    fails: int
    text: str = "Kernel panic"
    started: int = 0
    name: str = "memory-6.12"
    key: str = "0"
    kernel: Any = field(default_factory=lambda: SimpleNamespace(release="6.12"))

    @property
    def scenario(self) -> Any:
        return SimpleNamespace(workload=self.workload)

    @contextmanager
    def guest(self, work: Path) -> Iterator[Any]:
        self.started += 1
        yield SimpleNamespace(directory=work, console_text=lambda: self.text)

    def workload(self, guest: Any) -> None:
        assert guest.directory.is_dir()
        if self.started <= self.fails:
            raise lab.LabError(f"ended, start {self.started}")


@pytest.fixture
def failing(tmp_path: Path) -> FailingPlan:
    return FailingPlan(Cache(tmp_path, 1 << 20), fails=1)


def test_guest_that_fails_is_started_once_more(failing: FailingPlan) -> None:
    with store._at_rest(failing, "running") as guest:
        assert failing.started == 2
        assert guest.directory.is_dir()
    assert not guest.directory.exists()


def test_guest_that_fails_again_is_given_up(failing: FailingPlan) -> None:
    failing.fails = 9
    with (
        pytest.raises(lab.LabError, match=r"start 2\n--- the whole console: (.*)$"),
        store._at_rest(failing, "running"),
    ):
        pass
    kept = failing.cache.root / "failed" / "memory-6.12.console"
    assert kept.read_text() == "Kernel panic"
    assert not [*(failing.cache.root / "tmp").iterdir()]


def test_stale_code_is_tried_more_often(failing: FailingPlan) -> None:
    failing.fails = 9
    failing.text = "Oops: int3: 0000"
    with store._at_rest(failing, "running"):
        assert failing.started == 10


def test_what_failed_is_not_tried_for_each_test(
    failing: FailingPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing.fails = 9
    monkeypatch.setattr(store, "_FAILED", {})
    for _ in range(3):
        with pytest.raises(lab.LabError, match="start 2"):
            store._build(failing)
    assert failing.started == 2


def test_disk_that_is_too_small_is_reported_before_a_guest_boots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What nothing uses is evicted first."""
    cache = Cache(tmp_path, 1 << 30)
    old = cache.entry("run", "old", "k", lambda d: (d / "x").write_bytes(b"x" * MIB))
    cache.release()
    free = [0]
    usage = SimpleNamespace(disk_usage=lambda path: SimpleNamespace(free=free[0]))
    monkeypatch.setattr(store, "shutil", usage)
    free[0] = 4 * MIB
    store.require_room(cache, 3 / 1024)
    assert old.exists()
    message = re.escape(f"{tmp_path}: only 0.0 GiB free, 0.0 GiB needed; make room")
    with pytest.raises(UnavailableError, match=message):
        store.require_room(cache, 5 / 1024)
    assert not old.exists()


def test_kernel_that_cannot_be_had_is_looked_for_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    def install(name: str, archive: object) -> None:
        asked.append(name)
        raise UnavailableError(f"no kernel {name}")

    monkeypatch.setattr(store.kernels, "install", install)
    monkeypatch.setattr(store, "_LACKING", {})
    for _ in range(2):
        with pytest.raises(UnavailableError, match=r"no kernel 6\.1$"):
            store._install(KERNELS["6.1"], SimpleNamespace())
    assert asked == ["6.1"]
