# SPDX-License-Identifier: LGPL-2.1-or-later
from pathlib import Path
from types import SimpleNamespace

import pytest

from fixtures import lab
from fixtures.lab import bench, store
from fixtures.lab.cache import Cache
from fixtures.lab.errors import FetchError
from fixtures.lab.image import GUEST
from fixtures.lab.kernels import KERNELS


def test_scenarios_are_named_with_their_kernel() -> None:
    names = list(lab.scenarios())
    assert {"memory-5.10", "memory-6.12", "crash-6.1", "crash-6.12"} <= set(names)
    for name, (scenario, kernel) in lab.scenarios().items():
        assert name == f"{scenario.name}-{kernel}"
        assert kernel in KERNELS


def test_unknown_scenario_names_the_known(tmp_path: Path) -> None:
    with pytest.raises(lab.LabError, match=r"no scenario x; there are memory-5\.10"):
        lab.build("x", Cache(tmp_path, 1))


def test_every_machine_can_be_made() -> None:
    for scenario, kernel in lab.scenarios().values():
        machine = scenario.machine(KERNELS[kernel])
        words = [word for word in machine.options if word.startswith("lab.scenario=")]
        ((_, _, part),) = [word.partition("=") for word in words]
        # Some scenarios have one part of the guest's in common.
        assert part == scenario.name or (GUEST / f"{part}.py").is_file()
        assert machine.nodes


def test_benchmark_has_four_million_pages() -> None:
    machine = bench.machine(KERNELS["6.1"])
    assert machine.mib * 256 > 4_194_304


def test_sources_that_count_in_the_key_are_there() -> None:
    for path in store.SHARED:
        assert path.is_file()


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
