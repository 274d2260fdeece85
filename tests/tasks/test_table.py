# SPDX-License-Identifier: LGPL-2.1-or-later

"""The table of tasks has the figures in each guest's /proc."""

import re
from collections.abc import Iterator

import numpy as np
import pytest

from fixtures import lab
from msatools.kernel.clocks import read_clocks
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.program import TargetSpec, open_target
from msatools.tasks.accounting import waits_for_cpu
from msatools.tasks.table import TaskReader, TaskTable
from tests.support.overlay import lose

STATES = {"S": 1, "D": 2, "T": 4, "t": 8, "I": 0x402, "Z": 0}
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


def threads(run: lab.Run) -> Iterator[tuple[int, int]]:
    """Yield process and thread IDs that the guest listed, without its recorder's."""
    recorder = {
        task["tid"] for task in run.workload["tasks"].values() if task["class"] is None
    }
    for name in run.truth_names():
        match = re.fullmatch(r"proc/(\d+)/task/(\d+)/schedstat", name)
        if match and int(match[2]) not in recorder:
            yield int(match[1]), int(match[2])


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


def test_columns_of_sleeping_tasks(run: lab.Run, table: TaskTable) -> None:
    """Counters are compared for tasks that have not run since /proc was read.

    Tasks that were woken, but did not run before the guest stopped, are left out.
    """
    compared = 0
    woken = {*table["pid"][waits_for_cpu(table)].tolist()}
    for pid, tid in threads(run):
        fields, record = stat(run, pid, tid), row(table, tid)
        sched = run.truth(f"proc/{pid}/task/{tid}/schedstat").split()
        state = fields[3].decode()
        assert record["tgid"] == pid
        if state not in STATES or int(sched[2]) != record["pcount"] or tid in woken:
            continue
        compared += 1
        # In /proc, a worker's name is followed by its workqueue's.
        assert fields[2].startswith(record["comm"].partition(b"\0")[0]), tid
        if state == "Z":
            assert record["exit_state"] == 0x20
        else:
            assert record["state"] & 0x40F == STATES[state], tid
        assert record["run_delay_ns"] == int(sched[1])
        assert record["sum_exec_ns"] == int(sched[0])
        for column, field in STAT_FIELDS.items():
            assert record[column] == int(fields[field]), (tid, column)
        assert record["prio"] - 100 == int(fields[18])
        assert record["static_prio"] - 120 == int(fields[19])
    assert compared > 2000


def test_clock_is_that_of_the_guest(
    run: lab.Run, opened: tuple[Reader, LossLog, TaskTable]
) -> None:
    """The dump was taken after the guest recorded the time."""
    reader, losses, table = opened
    now = read_clocks(reader, losses).monotonic_ns
    assert now is not None
    assert now > run.workload["times"]["monotonic_ns"]
    assert now > table["start_ns"].max()


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
