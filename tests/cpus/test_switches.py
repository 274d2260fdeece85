# SPDX-License-Identifier: LGPL-2.1-or-later

"""Involuntary switches and migrations, by CPU."""

import re

import numpy as np
import pytest

from fixtures import lab
from msatools.cpus.processors import involuntary, moves
from msatools.kernel.reader import Reader
from msatools.kernel.report import LossLog
from msatools.tasks.states import asleep
from msatools.tasks.table import TaskReader, TaskTable
from tests.cpus.guests import KERNELS, Guest
from tests.support.dumps import open_dump

COLUMNS = ("address", "pid", "start_ns", "cpu", "nivcsw", "migrations")


@pytest.mark.parametrize("kernel", KERNELS)
def test_tasks_of_a_dump(kernel: str) -> None:
    """Migrations of tasks that slept since are exact; others have at least as many."""
    guest = Guest(lab.build(f"cpus-{kernel}"))
    table = TaskReader(Reader(open_dump(guest.run.name, "btf"))).read_all(LossLog())
    rows = {pid: row for row, pid in enumerate(table["pid"].tolist())}
    slept, rested, moved = asleep(table), 0, 0
    for pid in guest.threads.keys() & rows.keys():
        file = f"{guest.threads[pid]}/sched"
        if not guest.has(file):
            continue
        pattern = r"^se.nr_migrations\s*:\s*(\d+)$"
        (recorded,) = map(int, re.findall(pattern, guest.truth(file), re.M))
        row, switches = rows[pid], int(guest.status(pid, "voluntary_ctxt_switches"))
        has_rested = slept[row] and table["nvcsw"][row] == switches
        found = int(table["migrations"][row])
        assert found == recorded if has_rested else found >= recorded
        rested += has_rested
        moved += found
    # All resting tasks of the workload.
    assert rested >= sum(task["does"] == "rest" for task in guest.made.values())
    assert moved > 0
    cpus = np.arange(8)
    for column, count in (("nivcsw", involuntary), ("migrations", moves)):
        sums = [int(table[column][table["cpu"] == cpu].sum()) for cpu in cpus]
        counted = count(table, cpus)
        assert counted is not None
        assert counted.known.all()
        assert counted.values.tolist() == sums
        # Other CPUs are not counted.
        some = count(table, cpus[2:4])
        assert some is not None
        assert some.values.tolist() == sums[2:4]


def tasks(*rows: tuple[int, ...], columns: tuple[str, ...] = COLUMNS) -> TaskTable:
    records = np.array(list(rows), [(name, "u8") for name in columns])
    return TaskTable(records, frozenset(columns))


def test_since_an_earlier_sample() -> None:
    before = tasks(
        (0x100, 1, 5, 0, 10, 4),
        (0x200, 2, 6, 1, 7, 0),
        (0x300, 3, 7, 1, 90, 9),
    )
    after = tasks(
        # Moved to another CPU.
        (0x100, 1, 5, 2, 13, 5),
        # Has the memory of an ended task.
        (0x300, 4, 8, 1, 2, 1),
        # On the same CPU.
        (0x200, 2, 6, 1, 8, 0),
        # New.
        (0x400, 5, 9, 0, 1, 0),
    )
    cpus = np.arange(3)
    assert involuntary(after, cpus, before).values.tolist() == [1, 3, 3]
    counted = moves(after, cpus, before)
    assert counted is not None
    assert counted.values.tolist() == [0, 1, 1]
    assert involuntary(after, cpus).values.tolist() == [1, 10, 13]


def test_unknown_migrations() -> None:
    table = tasks((0x100, 1, 5, 0, 10), columns=COLUMNS[:-1])
    assert moves(table, np.arange(1)) is None
