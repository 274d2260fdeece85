# SPDX-License-Identifier: LGPL-2.1-or-later

"""The table of tasks has the figures in each guest's /proc."""

import numpy as np
import pytest

from fixtures import lab
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.program import TargetSpec, open_target
from msatools.tasks.table import TaskReader, TaskTable
from tests.support.overlay import lose

STAT_FIELDS = {"min_flt": 10, "maj_flt": 12, "exit_signal": 38, "cpu": 39}
STAT_FIELDS |= {"rt_priority": 40, "policy": 41}
"""Field numbers in /proc/PID/stat, from 1."""


@pytest.fixture(scope="module", params=["6.1", "6.12"])
def run(request: pytest.FixtureRequest) -> lab.Run:
    return lab.build(f"tasks-{request.param}")


@pytest.fixture(scope="module")
def opened(run: lab.Run) -> tuple[Reader, LossLog, TaskTable]:
    prog = open_target(TargetSpec(path=str(run.elf), types="btf")).prog
    reader, losses = Reader(prog), LossLog()
    return reader, losses, TaskReader(reader).read_all(losses)


@pytest.fixture(scope="module")
def table(opened: tuple[Reader, LossLog, TaskTable]) -> TaskTable:
    return opened[2]


def stat(run: lab.Run, pid: int, tid: int) -> list[bytes]:
    """Return the fields of /proc/PID/stat, from 1."""
    text = run.truth(f"proc/{pid}/task/{tid}/stat")
    before, _, rest = text.partition(b" (")
    name, _, after = rest.rpartition(b") ")
    return [b"", before, name, *after.split()]


def row(table: TaskTable, tid: int) -> np.void:
    (found,) = np.flatnonzero(table["pid"] == tid)
    record: np.void = table.records[found]
    return record


def test_reads(opened: tuple[Reader, LossLog, TaskTable]) -> None:
    """There is at most one read per thread, and one more."""
    reader, losses, table = opened
    assert len(table) == len(set(table["pid"].tolist())) > 2200
    assert reader.reads <= len(table) + 1
    assert losses.notes == {}


@pytest.mark.parametrize("which", ["leader", "thread"])
def test_process_of_one_thread(
    opened: tuple[Reader, LossLog, TaskTable], run: lab.Run, which: str
) -> None:
    reader, _, table = opened
    losses = LossLog()
    server = run.workload["servers"]["server-signal"]
    pid = server["pid"] if which == "leader" else server["workers"][7]
    expected = table.only(table["tgid"] == server["pid"])
    assert len(expected) == 1 + len(server["workers"])
    address = int(row(table, pid)["address"])
    twice = [address, int(expected["address"][3])]
    reads = reader.reads
    found = TaskReader(reader).read_processes(twice, losses)
    assert np.array_equal(found.records, expected.records)
    assert reader.reads - reads <= len(expected) + 2
    assert not losses.notes


def test_processes_are_returned_in_the_given_order(
    opened: tuple[Reader, LossLog, TaskTable],
) -> None:
    reader, _, table = opened
    alone = table.only(table.leaders)["address"][[5, 3, 9]]
    found = TaskReader(reader).read_processes(alone.tolist(), LossLog())
    assert found["address"][found.leaders].tolist() == alone.tolist()


def test_process_whose_leader_is_lost(run: lab.Run) -> None:
    prog = open_target(TargetSpec(path=str(run.elf), types="btf")).prog
    reader, losses = Reader(prog), LossLog()
    tasks = TaskReader(reader)
    table = tasks.read_all(losses)
    server = run.workload["servers"]["server-signal"]
    leader = int(row(table, server["pid"])["address"])
    worker = int(row(table, server["workers"][0])["address"])

    lose(prog, leader, tasks.size)
    assert len(tasks.read_processes([worker], losses)) == 0
    assert losses.coverage["tasks_unreadable"] == 1
