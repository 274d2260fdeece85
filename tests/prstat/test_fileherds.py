# SPDX-License-Identifier: LGPL-2.1-or-later

"""Herds of tasks that wait for one file, each by an epoll or a poll() of its own."""

from typing import Any

import pytest

from fixtures import lab
from tests.prstat.reports import report, text


@pytest.fixture(params=["field-6.1", "field-6.12", "field-7.x"])
def dump(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def recorded(dump: str) -> dict[str, Any]:
    """Return what the guest says of its workers, by the way they wait."""
    herds: dict[str, Any] = lab.build(dump).workload["herds"]
    return herds


def test_each_herd_and_no_other(dump: str) -> None:
    """The other workers are woken one at a time, or each by its own file."""
    truth = {
        (f"{herd['kind']}:[{herd['inode']}]", len(herd["tids"]))
        for herd in recorded(dump).values()
        if herd["kind"]
    }
    found = {
        (herd["lock"], herd["waiters"])
        for herd in report(dump)["herds"]
        if herd["confidence"] != "none"
    }
    assert found == truth


@pytest.mark.parametrize("way", ["epoll", "forks"])
def test_what_they_listen_to(dump: str, way: str) -> None:
    inode = recorded(dump)[way]["inode"]
    (line,) = (line for line in text(dump) if f"socket:[{inode}]" in line)
    assert f"HERD socket:[{inode}] (unix stream @watchers-{way})" in line
