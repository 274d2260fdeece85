# SPDX-License-Identifier: LGPL-2.1-or-later

"""What damaged dumps and other kernels have in their records of tasks."""

from typing import Any

import drgn
import numpy as np
import pytest

from msatools.kernel.clocks import Clocks
from msatools.kernel.reader import Reader
from msatools.kernel.report import Findings
from msatools.tasks.classes import TaskClass
from msatools.tasks.now import ages
from msatools.tasks.table import PID_MAX_LIMIT, TaskReader, TaskTable, believable, cut
from tests.prstat.made import ASLEEP, NOW, SECOND, START, Made

HUGE = (1 << 64) - 1
LEADER = 0x1000


def record(**columns: int) -> Any:
    names = ("pid", "tgid", "nvcsw", "sum_exec_ns", "mm")
    formats = ("i4", "i4", "u8", "u8", "u8")
    records = np.zeros(1, list(zip(names, formats, strict=True)))
    for name in names:
        records[name] = columns.get(name, 1)
    return records


@pytest.mark.parametrize("pid", [0, -5, PID_MAX_LIMIT + 1])
@pytest.mark.parametrize("column", ["pid", "tgid"])
def test_what_has_no_pid_is_no_task(column: str, pid: int) -> None:
    findings = Findings()
    assert len(believable(record(**{column: pid}), findings)) == 0
    assert findings.coverage["tasks_unreadable"] == 1
    assert findings.notes


def test_what_may_be_gone_is_no_loss() -> None:
    findings = Findings()
    assert len(believable(record(pid=0), findings, may_be_gone=True)) == 0
    assert findings.coverage == {"tasks_gone": 1}
    assert not findings.notes


def test_tasks_are_believed() -> None:
    findings = Findings()
    told = record(pid=PID_MAX_LIMIT, nvcsw=7, sum_exec_ns=SECOND, mm=HUGE)
    found = believable(told.copy(), findings)
    assert found.tolist() == told.tolist()
    assert not findings.coverage
    assert not findings.notes


@pytest.mark.parametrize("column", ["nvcsw", "sum_exec_ns"])
@pytest.mark.parametrize("value", [HUGE, 1 << 63, 1 << 61])
def test_counts_that_cannot_be_are_cut(column: str, value: int) -> None:
    findings = Findings()
    found = believable(record(**{column: value}), findings)
    assert 0 < int(found[column][0]) < value
    assert findings.coverage["counts_broken"] == 1
    assert findings.notes


def test_what_is_cut_can_be_added_up() -> None:
    found = cut(np.array([HUGE, HUGE, 3], np.uint64), Findings())
    assert found[2] == 3
    assert int(found.sum()) == sum(map(int, found)) > 0


@pytest.mark.parametrize(
    "sums",
    [
        {"sum_sleep_ns": SECOND, "sum_block_ns": 2 * SECOND},
        {"sum_sleep_ns": SECOND, "sum_block_ns": 0, "iowait_sum_ns": SECOND},
    ],
)
def test_a_part_of_sleep_that_is_more_than_all_of_it(sums: dict[str, int]) -> None:
    made = Made(sums)
    assert made.parts.impossible[0]
    assert not made.parts.known[0]
    assert made.parts.sleeps.sleep[0] is None


@pytest.mark.parametrize("start", [START, NOW + SECOND])
def test_no_task_does_anything_longer_than_it_lives(start: int) -> None:
    names = {
        **dict.fromkeys(("cpu", "on_cpu", "exit_state", "last_queued_ns"), 0),
        "state": ASLEEP,
        "start_ns": start,
        "exec_start_ns": SECOND,
        "last_arrival_ns": SECOND,
    }
    records = np.zeros(1, [(name, "u8") for name in names])
    for name, value in names.items():
        records[name] = value
    tasks = TaskTable(records, frozenset(names))
    clocks = Clocks(NOW, 0, np.zeros(1, np.int64))
    age, _ = ages(tasks, clocks, np.array([TaskClass.TMR], np.uint8))
    assert age.tolist() == [max(NOW - start, 0)]


class Memory(Reader):
    """A kernel whose ``struct task_struct`` has members smaller than most have."""

    def __init__(self) -> None:
        prog = drgn.Program(drgn.Platform(drgn.Architecture.X86_64))
        byte = prog.int_type("u8", 1, False)
        long = prog.int_type("unsigned long", 8, False)
        int_ = prog.int_type("int", 4, True)
        node = prog.struct_type(
            "list_head",
            16,
            (
                drgn.TypeMember(long, "next", 0),
                drgn.TypeMember(long, "prev", 64),
            ),
        )
        task = prog.struct_type(
            "task_struct",
            64,
            (
                drgn.TypeMember(byte, "on_cpu", 0),
                drgn.TypeMember(byte, "on_rq", 8),
                drgn.TypeMember(int_, "pid", 32),
                drgn.TypeMember(int_, "tgid", 64),
                drgn.TypeMember(long, "__state", 128),
                drgn.TypeMember(node, "tasks", 192),
                drgn.TypeMember(node, "thread_node", 320),
            ),
        )
        signal = prog.struct_type(
            "signal_struct", 16, (drgn.TypeMember(node, "thread_head", 0),)
        )
        types = {"task_struct": task, "signal_struct": signal}
        prog.register_type_finder(
            "made",
            lambda prog, kinds, name, filename: types.get(name),
            enable_index=0,
        )
        data = bytearray(64)
        data[1] = 1
        data[4:8] = (12).to_bytes(4, "little")
        data[8:12] = (12).to_bytes(4, "little")
        data[16:24] = ((1 << 32) + 2).to_bytes(8, "little")
        prog.add_memory_segment(
            LEADER, 64, lambda address, count, offset, physical: bytes(data)[:count]
        )
        super().__init__(prog)


def test_members_of_other_sizes() -> None:
    """``on_rq`` is not part of ``on_cpu``, nor the state's upper half of the state."""
    findings = Findings()
    table = TaskReader(Memory()).read([LEADER], findings)
    assert (table["on_cpu"][0], table["on_rq"][0]) == (0, 1)
    assert table["state"][0] == 2
    assert table["pid"][0] == 12
    assert not findings.notes
