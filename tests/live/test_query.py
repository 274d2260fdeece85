# SPDX-License-Identifier: LGPL-2.1-or-later

"""A program that asks the kernel it runs on, inside of a guest, and what /proc said."""

import json
from typing import Any

import pytest

from fixtures import lab
from fixtures.lab.guest.asking import OTHERS, TIMES
from fixtures.lab.inside import RESULTS

MS = 1_000_000
NOW = {
    "sleeper": ("TMR", "interruptible_sleep", "sleep"),
    "poller": ("POL", "poll_sleep", "sleep"),
    "futex": ("LCK", "futex_sleep", "user_lock"),
    "stopped": ("STP", "stopped", "stopped"),
    "dead": ("ZMB", "zombie", None),
}


@pytest.fixture(scope="module", params=["6.1", "6.12"])
def facts(request: pytest.FixtureRequest) -> dict[str, Any]:
    run = lab.build(f"querylive-{request.param}")
    found: dict[str, Any] = json.loads((run.directory / RESULTS).read_text())
    return found


@pytest.mark.parametrize("what", ["self", "thread"])
def test_own_time_on_the_cpu(facts: dict[str, Any], what: str) -> None:
    """It lies between what /proc had counted before, and what the clocks said after."""
    assert len(facts["own"]) == TIMES
    for asked in facts["own"]:
        answer = asked["answers"][what]
        assert asked["least"][what] <= answer
        assert answer <= asked["most"][what] + facts["bound_ns"]
        assert asked["taken_at_ns"] <= asked["after_ns"] + facts["bound_ns"]


@pytest.mark.parametrize("name", list(OTHERS))
def test_task_that_rests(facts: dict[str, Any], name: str) -> None:
    """Nothing is counted of it meanwhile, so all is as /proc has it."""
    found = facts["others"][name]
    on_cpu, waited = found["schedstat"]
    assert found["on_cpu"] == found["process"] == on_cpu > 0
    assert found["latency"]["ns"] == waited
    assert found["latency"]["bound"] in ("exact", "upper")
    now = found["now"]
    assert (now["task_class"], now["timer"], now["state"]) == NOW[name]
    # It was given a second to rest; clocks may lag.
    assert 500 * MS < now["age_ns"] <= found["lifetime_ns"]
    assert found["tids"] == [found["pid"]]
    assert found["comm"] == "python3"
    assert not found["notes"]


def test_children(facts: dict[str, Any]) -> None:
    """As getrusage() has them, which cuts them to microseconds."""
    found = facts["children"]
    for ns, seconds in zip(found["answers"], found["seconds"], strict=True):
        assert abs(ns - seconds * 1e9) < 1100
    assert sum(found["answers"]) > 200 * MS
    assert found["unknown"] is None


def test_errors(facts: dict[str, Any]) -> None:
    gone, inside = facts["errors"]["gone"], facts["errors"]["inside"]
    assert (gone["type"], gone["lookup"]) == ("NoSuchTaskError", True)
    assert "no such task" in gone["text"]
    assert inside["type"] == "NotThisMachineError"
    assert "PID namespace" in inside["text"]
