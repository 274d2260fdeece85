# SPDX-License-Identifier: LGPL-2.1-or-later

"""The table of tasks, held against what each guest's /proc said of them."""

import re
from collections.abc import Iterator

import numpy as np
import pytest
from drgn import FaultError

from fixtures import lab
from msatools.kernel.accounting import read_accounting
from msatools.kernel.clocks import read_clocks
from msatools.kernel.reader import Reader
from msatools.kernel.report import Findings
from msatools.prstat.microstates import bound_of, microstates, waits_for_cpu
from msatools.target import TargetSpec, open_target
from msatools.tasks.table import TaskReader, TaskTable
from tests.support.overlay import lay_over

STATES = {"S": 1, "D": 2, "T": 4, "t": 8, "I": 0x402, "Z": 0}
STAT_FIELDS = {"min_flt": 10, "maj_flt": 12}
"""Where /proc/PID/stat has them, the process ID being field 1."""


@pytest.fixture(scope="module", params=["6.1", "6.12"])
def run(request: pytest.FixtureRequest) -> lab.Run:
    return lab.build(f"tasks-{request.param}")


@pytest.fixture(scope="module")
def opened(run: lab.Run) -> tuple[Reader, Findings, TaskTable]:
    prog = open_target(TargetSpec(path=str(run.elf), types="btf")).prog
    reader, findings = Reader(prog), Findings()
    return reader, findings, TaskReader(reader).read_all(findings)


@pytest.fixture(scope="module")
def table(opened: tuple[Reader, Findings, TaskTable]) -> TaskTable:
    return opened[2]


def threads(run: lab.Run) -> Iterator[tuple[int, int]]:
    """The processes and threads that the guest listed, but the one that did so."""
    recorder = {
        task["tid"] for task in run.workload["tasks"].values() if task["class"] is None
    }
    for name in run.truth_names():
        match = re.fullmatch(r"proc/(\d+)/task/(\d+)/schedstat", name)
        if match and int(match[2]) not in recorder:
            yield int(match[1]), int(match[2])


def stat(run: lab.Run, pid: int, tid: int) -> list[bytes]:
    """The fields of /proc/PID/stat: the name is number 2."""
    text = run.truth(f"proc/{pid}/task/{tid}/stat")
    before, _, rest = text.partition(b" (")
    name, _, after = rest.rpartition(b") ")
    return [b"", before, name, *after.split()]


def row(table: TaskTable, tid: int) -> np.void:
    (found,) = np.flatnonzero(table["pid"] == tid)
    record: np.void = table.records[found]
    return record


def test_every_thread_once(run: lab.Run, table: TaskTable) -> None:
    listed = {tid for _, tid in threads(run)}
    found = table["pid"].tolist()
    assert len(found) == len(set(found))
    assert len(listed) > 2200
    assert listed <= set(found)
    # The one that recorded, and what the kernel started since.
    assert len(set(found) - listed) < 10


def test_reads(opened: tuple[Reader, Findings, TaskTable]) -> None:
    """One a thread, but for each list of threads that has its end read first."""
    reader, findings, table = opened
    assert reader.reads <= len(table) + 1
    assert findings.notes == {}


def test_columns_that_stand_still(run: lab.Run, table: TaskTable) -> None:
    """All that a task has counted, of all that did not run meanwhile.

    Nor were woken up to do so when the guest was stopped.
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
        # What a worker works on follows its name in /proc.
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
        assert record["policy"] == int(fields[41])
    assert compared > 2000


def test_switches(run: lab.Run, table: TaskTable) -> None:
    names = set(run.truth_names())
    compared = 0
    for pid, tid in threads(run):
        name = f"proc/{pid}/task/{tid}/status"
        sched = run.truth(f"proc/{pid}/task/{tid}/schedstat").split()
        record = row(table, tid)
        if name not in names or int(sched[2]) != record["pcount"]:
            continue
        text = run.truth(name).decode("utf-8", "replace")
        compared += 1
        for column, key in (("nvcsw", "voluntary"), ("nivcsw", "nonvoluntary")):
            listed = re.search(rf"^{key}_ctxt_switches:\t(\d+)$", text, re.MULTILINE)
            assert listed
            assert record[column] == int(listed[1]), (tid, column)
    assert compared > 200


def test_clock_is_that_of_the_guest(
    run: lab.Run, opened: tuple[Reader, Findings, TaskTable]
) -> None:
    """The dump was taken after the guest wrote down what time it was."""
    reader, findings, _ = opened
    now = read_clocks(reader, findings).monotonic_ns
    assert now is not None
    assert 0 < now - run.workload["times"]["monotonic_ns"] < 60 * 10**9


def test_lives_add_up(run: lab.Run, opened: tuple[Reader, Findings, TaskTable]) -> None:
    reader, findings, table = opened
    bound_ns = bound_of(read_accounting(reader.prog, findings))
    made = microstates(table, read_clocks(reader, findings))
    parts = (made.user_ns, made.system_ns, made.latency_ns, made.off_cpu_ns)
    assert (sum((*parts, made.zombie_ns)) == made.lifetime_ns).all()
    assert min(int(part.min()) for part in parts) >= 0
    if not made.latency_is_bound:
        assert int(made.missed_ns.max()) <= bound_ns


def test_hogs_that_share_a_cpu(
    run: lab.Run, opened: tuple[Reader, Findings, TaskTable]
) -> None:
    """Three that never sleep: what time they are not on the CPU, they wait for it.

    Each has had as much as the guest told at the end, or more since.
    """
    reader, findings, table = opened
    clocks = read_clocks(reader, findings)
    made = microstates(table, clocks)
    assert clocks.monotonic_ns is not None
    for name in ("hog-pinned-0", "hog-pinned-1", "hog-pinned-2"):
        task = run.workload["tasks"][name]
        (at,) = np.flatnonzero(table["pid"] == task["tid"])
        place = f"proc/{task['pid']}/task/{task['tid']}"
        told = run.truth(f"{place}/schedstat.again").split()
        assert made.user_ns[at] + made.system_ns[at] >= int(told[0]) > 0
        assert made.latency_ns[at] + made.missed_ns[at] >= int(told[1]) > 0
        # It has slept to be moved to that CPU, before it said so.
        before = made.lifetime_ns[at] - (clocks.monotonic_ns - task["start_ns"])
        assert made.off_cpu_ns[at] <= before


@pytest.mark.parametrize("which", ["leader", "thread"])
def test_process_of_one_thread(
    opened: tuple[Reader, Findings, TaskTable], run: lab.Run, which: str
) -> None:
    reader, _, table = opened
    findings = Findings()
    server = run.workload["servers"]["server-signal"]
    pid = server["pid"] if which == "leader" else server["workers"][7]
    expected = table.only(table["tgid"] == server["pid"])
    assert len(expected) == 1 + len(server["workers"])
    address = int(row(table, pid)["address"])
    twice = [address, int(expected["address"][3])]
    reads = reader.reads
    found = TaskReader(reader).read_processes(twice, findings)
    assert np.array_equal(found.records, expected.records)
    assert reader.reads - reads <= len(expected) + 2
    assert not findings.notes


def test_processes_come_in_the_order_asked(
    opened: tuple[Reader, Findings, TaskTable],
) -> None:
    reader, _, table = opened
    alone = table.only(table.leaders)["address"][[5, 3, 9]]
    found = TaskReader(reader).read_processes(alone.tolist(), Findings())
    assert found["address"][found.leaders].tolist() == alone.tolist()


def test_process_whose_leader_is_lost(run: lab.Run) -> None:
    prog = open_target(TargetSpec(path=str(run.elf), types="btf")).prog
    reader, findings = Reader(prog), Findings()
    tasks = TaskReader(reader)
    table = tasks.read_all(findings)
    server = run.workload["servers"]["server-signal"]
    leader = int(row(table, server["pid"])["address"])
    worker = int(row(table, server["workers"][0])["address"])

    def fault(address: int, count: int, offset: int, physical: bool) -> bytes:
        raise FaultError("gone", address)

    lay_over(prog, leader, tasks.size, fault)
    assert len(tasks.read_processes([worker], findings)) == 0
    assert findings.coverage["tasks_unreadable"] == 1
