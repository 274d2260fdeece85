# SPDX-License-Identifier: LGPL-2.1-or-later

"""Rows of threads and processes made by hand, and their sums by class."""

from math import nan

import numpy as np
import pytest
from msgspec.structs import replace

from msatools.prstat.interval import ON_CODE, OffCpuByClass
from msatools.prstat.model import OffCpu, TaskRow, Waited
from msatools.prstat.rows import keep, process_rows, thread_rows
from msatools.prstat.select import group_by_class
from msatools.tasks.waits import TaskClass
from tests.prstat.maderows import LIFE, SECOND, MadeThreads

SERVER = (
    {"pid": 10, "comm": b"server", "threads": 3, "user_ns": SECOND, "nvcsw": 1},
    {"pid": 12, "tgid": 10, "system_ns": 2 * SECOND, "nvcsw": 20, "latency_ns": 5},
    {"pid": 11, "tgid": 10, "lifetime_ns": SECOND, "nvcsw": 300, "maj_flt": 4},
)


def test_unknown_values() -> None:
    made = MadeThreads(
        {"pid": 1, "uid": -1, "ppid": -1, "known": False, "mm_known": False},
        {"pid": 2, "cgroup": -1, "has_mm": False, "size_bytes": 0, "rss_bytes": 0},
        reaped=True,
    )
    unknown, none = made.by_thread()
    assert (unknown.uid, unknown.ppid, unknown.threads) == (None, None, None)
    assert (unknown.size_bytes, unknown.rss_bytes) == (None, None)
    assert unknown.children is None
    # A thread without an address space has size 0; root's uid is 0.
    assert (none.size_bytes, none.rss_bytes, none.uid, none.cgroup) == (0, 0, 0, None)


def test_rows_of_rows() -> None:
    """Some of the rows, turned round, by a range, indices or a mask, and of these."""
    rows = MadeThreads(
        *({"pid": pid, "uid": 7 * pid} for pid in range(1, 2050))
    ).by_thread()
    turned = rows.take(np.arange(len(rows))[::-1])
    some = turned[5:1500].take(np.array([True, False, True] * 498 + [False]))
    expected = [pid for n, pid in enumerate(range(2044, 549, -1)) if n % 3 != 1][:996]
    assert [(row.pid, row.uid) for row in some] == [(n, 7 * n) for n in expected]
    assert (len(some), some[3].pid, some[-1].pid) == (996, expected[3], expected[-1])
    assert [row.pid for row in some[900:]] == expected[900:]
    assert rows.take(rows.columns["pid"] > 2040)[::2].columns["pid"].tolist() == [
        *(2041, 2043, 2045, 2047, 2049)
    ]


def split_of(row: TaskRow) -> tuple[int | None, float | None] | None:
    return row.breakdown and (row.breakdown.sleep_ns, row.breakdown.coverage)


def test_split_of_threads() -> None:
    made = MadeThreads(
        {"pid": 1, "blkio": 7},
        {"pid": 2, "covered": nan},
        {"pid": 3, "covered": nan, "blkio": 7},
        {"pid": 4, "covered": 0.5},
        split=True,
    )
    rows = made.by_thread()
    splits = [(LIFE, 1.0), None, (None, None), (LIFE // 2, 0.5)]
    assert list(map(split_of, rows)) == splits
    delays = [row.breakdown and row.breakdown.delays for row in rows]
    assert delays == [{"blkio": 7}, None, {"blkio": 7}, {"blkio": None}]
    assert {row.breakdown and row.breakdown.stopped_ns for row in rows} == {None}


def test_split_of_a_process() -> None:
    """A split is known if all threads' are; its coverage is weighted by time."""
    long, short = SERVER[0], {**SERVER[2], "lifetime_ns": SECOND, "covered": 0.0}
    for threads, expected in (
        # Nine seconds of ten, not half.
        ((long, short), (9 * SECOND, pytest.approx(0.9))),
        ((long, {**short, "covered": nan}), None),
        (({"pid": 1, "user_ns": LIFE},), (0, 1.0)),
    ):
        (row,) = MadeThreads(*threads, split=True).by_process()
        assert split_of(row) == expected


def test_time_off_the_cpu_by_class() -> None:
    """Off-CPU time of a thread or of all threads of a process, the longest first."""
    made = MadeThreads({"pid": 1}, {"pid": 2, "tgid": 1}, {"pid": 3})
    ns, error = np.zeros((2, 3, len(TaskClass) + 1), np.int64)
    ns[0, [TaskClass.LCK, TaskClass.TMR]] = 5, 7
    ns[1, [TaskClass.LCK, ON_CODE]] = 4, 1
    error[:2, TaskClass.LCK] = 3, 2
    unknown = np.array([6, 0, 8])
    off_cpu = OffCpuByClass(ns, error, unknown, np.zeros(3, np.bool_))
    spent = replace(made.spent, off_cpu=off_cpu)
    unknown, faults = OffCpu(None, 6, 0), OffCpu("FLT", 1, 0, on_code=True)
    first = (OffCpu("TMR", 7, 0), unknown, OffCpu("LCK", 5, 3))
    second = (OffCpu("LCK", 4, 2), faults)
    last = (OffCpu(None, 8, 0),)
    threads = thread_rows(keep(made.threads, spent))
    assert [row.off_cpu for row in threads] == [first, second, last]
    # Samples are of all threads at once, so their errors are added.
    both = (OffCpu("LCK", 9, 5), OffCpu("TMR", 7, 0), unknown, faults)
    processes = process_rows(keep(made.threads, spent))
    assert [row.off_cpu for row in processes] == [both, last]
    waited = Waited(1, 0, 9, 0, untold_ns=6, is_estimate=True)
    assert processes[0].waited == waited


WAITING = (
    {"pid": 1, "class": TaskClass.LCK, "age_ns": 5, "threads": 2},
    {"pid": 2, "tgid": 1, "class": TaskClass.POL, "age_ns": 7, "threads": 2},
    {"pid": 3, "class": TaskClass.LCK, "age_ns": 9},
)


def test_classes_of_an_interval() -> None:
    """Times include threads that are in another class at the end."""
    made = MadeThreads(*(thread | {"user_ns": 4} for thread in WAITING))
    ns = np.zeros((3, ON_CODE + 1), np.int64)
    ns[0, TaskClass.LCK] = 100
    ns[1, TaskClass.LCK], ns[1, TaskClass.FLT], ns[1, ON_CODE] = 50, 3, 4
    error = np.where(ns == 50, 6, 0)
    off = OffCpuByClass(ns, error, np.array([0, 0, 8]), np.array([True, False, False]))
    made.spent = replace(made.spent, off_cpu=off)
    for rows in (made.by_process(), made.by_thread()):
        found = {
            group.key: (group.ns, group.error_ns) for group in group_by_class(rows)
        }
        assert found == {
            "LCK": (150, 6),
            "USR": (12, 0),
            "-": (8, 0),
            "FLT": (7, 0),
            "POL": (0, 0),
        }
