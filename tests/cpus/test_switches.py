# SPDX-License-Identifier: LGPL-2.1-or-later

"""Involuntary switches and moves, by CPU."""

import re
from collections import Counter

import numpy as np
import pytest

from fixtures import lab
from msatools.cpus.switches import involuntary, moves
from msatools.kernel.reader import Reader
from msatools.kernel.report import Findings
from msatools.tasks.states import asleep
from msatools.tasks.table import TaskReader, TaskTable
from tests.support.dumps import open_dump

KERNELS = ("6.1", "6.12")
COLUMNS = ("address", "pid", "start_ns", "cpu", "nivcsw", "migrations")


def number(text: str, name: str) -> int:
    (found,) = re.findall(rf"^{name}\s*:\s*(\d+)$", text, re.M)
    return int(found)


@pytest.mark.parametrize("kernel", KERNELS)
def test_tasks_of_a_dump(kernel: str) -> None:
    """Those that have slept since are exact; those that ran have no less."""
    run = lab.build(f"cpus-{kernel}")
    table = TaskReader(Reader(open_dump(run.name, "btf"))).read_all(Findings())
    names = set(run.truth_names())
    rested, moved, sums, gone = 0, 0, Counter[int](), Counter[int]()
    slept = asleep(table)
    for row, (pid, tgid, cpu, switches, voluntary, migrations) in enumerate(
        zip(
            *(
                table[name].tolist()
                for name in ("pid", "tgid", "cpu", "nivcsw", "nvcsw", "migrations")
            ),
            strict=True,
        )
    ):
        sums[cpu] += switches
        gone[cpu] += migrations
        base = f"proc/{tgid}/task/{pid}"
        if f"{base}/status" not in names:
            # The program that reads all this was made last; the kernel makes workers.
            assert table["comm"][row].startswith((b"truth", b"kworker/"))
            continue
        status = run.truth(f"{base}/status").decode()
        told = number(status, "nonvoluntary_ctxt_switches")
        has_rested = slept[row] and voluntary == number(
            status, "voluntary_ctxt_switches"
        )
        assert switches == told if has_rested else switches >= told
        rested += has_rested
        if f"{base}/sched" in names:
            sched = run.truth(f"{base}/sched").decode()
            told = number(sched, "se.nr_migrations")
            assert migrations == told if has_rested else migrations >= told
            moved += migrations
    # All that the guest made to rest.
    assert rested >= sum(t["does"] == "rest" for t in run.workload["tasks"].values())
    assert moved > 0
    cpus = np.arange(8)
    assert involuntary(table, cpus).values.tolist() == [sums[cpu] for cpu in cpus]
    counted = moves(table, cpus)
    assert counted is not None
    assert counted.known.all()
    assert counted.values.tolist() == [gone[cpu] for cpu in cpus]
    # Of a CPU that is not asked about nothing is told.
    assert involuntary(table, cpus[2:4]).values.tolist() == [sums[2], sums[3]]


def tasks(*rows: tuple[int, ...], columns: tuple[str, ...] = COLUMNS) -> TaskTable:
    records = np.array(list(rows), [(name, "u8") for name in columns])
    return TaskTable(records, frozenset(columns))


def test_since_an_earlier_look() -> None:
    before = tasks(
        (0x100, 1, 5, 0, 10, 4),
        (0x200, 2, 6, 1, 7, 0),
        (0x300, 3, 7, 1, 90, 9),
    )
    after = tasks(
        # Goes on elsewhere.
        (0x100, 1, 5, 2, 13, 5),
        # Has the memory of one that ended.
        (0x300, 4, 8, 1, 2, 1),
        # Stays.
        (0x200, 2, 6, 1, 8, 0),
        # Is new.
        (0x400, 5, 9, 0, 1, 0),
    )
    cpus = np.arange(3)
    assert involuntary(after, cpus, before).values.tolist() == [1, 3, 3]
    counted = moves(after, cpus, before)
    assert counted is not None
    assert counted.values.tolist() == [0, 1, 1]
    assert involuntary(after, cpus).values.tolist() == [1, 10, 13]


def test_moves_that_are_not_kept() -> None:
    table = tasks((0x100, 1, 5, 0, 10), columns=COLUMNS[:-1])
    assert moves(table, np.arange(1)) is None
