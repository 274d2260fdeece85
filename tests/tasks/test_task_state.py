# SPDX-License-Identifier: LGPL-2.1-or-later

"""Every task of the workload has its class, and an age within its bounds."""

import pytest

from msatools.tasks.sampler import AgeBound
from msatools.tasks.waits import TaskClass
from tests.prstat.dumps import MIDWAY, OFF, ON, Dump, long, read_dump


@pytest.fixture(scope="module", params=[*OFF, *ON, *long(*MIDWAY)])
def dump(request: pytest.FixtureRequest) -> Dump:
    return read_dump(request.param)


def test_class_of_every_named_task(dump: Dump) -> None:
    wrong = {}
    for name, task in dump.tasks.items():
        row = dump.row(name)
        found = TaskClass(dump.now.classes[row]).name
        if found not in (task["class"], *task.get("also", ())):
            wrong[name] = found, dump.now.stacks.names(dump.now.stacks[row])
    assert wrong == {}
    assert len(dump.tasks) > 180
    assert len({task["class"] for task in dump.tasks.values()}) > 20
    assert TaskClass.OTH not in dump.now.classes


def test_age_of_every_steady_task(dump: Dump) -> None:
    """The wait began between its announcement and its first observation."""
    end = dump.clocks.monotonic_ns
    assert end is not None
    compared = bounds = 0
    for name, task in dump.tasks.items():
        if not task["steady"] or not task.get("start_ns"):
            continue
        row = dump.row(name)
        began = end - int(dump.now.age_ns[row])
        latest = task["in_place_ns"] + dump.bound_ns
        if dump.now.age_bound[row] == AgeBound.UPPER:
            # The stamp was overwritten (6.12): the age is since the task got the CPU.
            assert began <= latest, name
            bounds += 1
            continue
        compared += 1
        assert task["start_ns"] - dump.bound_ns <= began <= latest, name
    assert compared + bounds > 150
    # The number of overwritten stamps varies.
    assert compared > 0
    assert dump.table.has("sched_delayed") or not bounds


def test_cost(dump: Dump) -> None:
    """drgn is not used to unwind sleeping tasks."""
    assert dump.now.stacks.asked == 0
    assert not dump.losses.coverage["stacks_incomplete"]
