# SPDX-License-Identifier: LGPL-2.1-or-later

"""CPUs set apart in a running guest by the commands of msa-cpus --plan.

The experiment of Solaris' psrset -c and -f: before, the plan's commands, and after, as
``--diff`` shows it (``fixtures/lab/guest/cpuplan.py``).
"""

import json
import re
from functools import cache
from typing import Any

import pytest

from fixtures import lab
from fixtures.lab.guest.cpuplan import APART, BUSY
from fixtures.lab.inside import RESULTS
from msatools.cli.options import cpu_list

# The guest's 8 busy CPUs share those of the host: a command takes minutes there.
pytestmark = pytest.mark.long

SET = {*cpu_list(APART)}


@cache
def results() -> Any:
    run = lab.build("cpuplan-6.12")
    return json.loads((run.directory / RESULTS).read_text())


def rows(name: str) -> dict[int, Any]:
    return {row["cpu"]: row for row in results()[name]["cpus"]}


def test_every_command_is_accepted() -> None:
    commands = results()["commands"]
    assert len(commands) > 10
    assert [each for each in commands if each["status"]] == []
    (shown,) = (each for each in commands if each["command"].startswith("cat "))
    assert shown["output"] == "isolated\n"


def test_it_is_a_partition() -> None:
    sets = {each["name"]: each for each in results()["sets"]["sets"]}
    apart = sets["/set-apart"]
    assert (apart["kind"], {*apart["cpus"]}) == ("isolated", SET)
    assert SET.isdisjoint(sets["default"]["cpus"])
    # What may still go there is what the plan says.
    plan = results()["plan"]["plan"]
    stays = {irq for each in plan["stays"] for irq in each["irqs"]}
    assert {*apart["irqs_allowed"]} <= stays


def test_tasks_leave() -> None:
    """Busy tasks, one for each CPU: they ran on all, and then on none of the set."""
    assert len(rows("before")) <= BUSY
    for cpu, row in rows("before").items():
        assert row["usr_ns"] > 0, cpu
    for cpu, row in rows("after").items():
        assert (row["usr_ns"] > 0) is (cpu not in SET), cpu
        if cpu in SET:
            assert "isolated" in row["state"]
            assert row["current"]["class"] == "idle"


def test_interrupts_leave() -> None:
    """Interrupts of these CPUs come to others, but for those that the plan names."""
    stays = {irq for each in results()["plan"]["plan"]["stays"] for irq in each["irqs"]}

    def came(name: str) -> set[int]:
        return {
            irq["irq"]
            for irq in results()[name]["irqs"]
            if {int(cpu) for cpu in irq["counts"]} & SET
        }

    assert came("before") - stays
    # A moved interrupt may come once more where it was, before the interval.
    assert came("after") <= stays


def test_difference() -> None:
    lines = results()["diff"].splitlines()
    for cpu in SET:
        (line,) = (one for one in lines if re.match(rf" +{cpu} +[-+]", one))
        assert "default -> /set-apart" in line
    assert any("/set-apart" in line and "isolated" in line for line in lines)


@pytest.mark.parametrize("name", ["partition", "interrupts", "workqueues", "boot"])
def test_text_has_every_step(name: str) -> None:
    assert f"\n# {name}: " in results()["text"]
