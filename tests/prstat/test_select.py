# SPDX-License-Identifier: LGPL-2.1-or-later

"""Selection and order of rows."""

import operator
import random
from collections.abc import Callable
from typing import Any

import pytest

from msatools.prstat.rows import TaskRows
from msatools.prstat.select import (
    KEYS,
    Selection,
    SortKey,
    order,
    parse_sort,
    selected,
)
from msatools.render.prstat.columns import COLUMNS
from msatools.tasks.accounting import PF_KTHREAD
from msatools.tasks.waits import TaskClass
from tests.prstat.maderows import MIB, SECOND, MadeThreads

Value = Callable[[Any], Any]

THREADS = (
    {"pid": 3, "uid": 0, "cpu": 0, "class": TaskClass.LCK, "age_ns": 5 * SECOND},
    {"pid": 1, "uid": 7, "cpu": 1, "flags": PF_KTHREAD, "state": 2, "comm": b"b"},
    {"pid": 2, "uid": -1, "cpu": 2, "class": TaskClass.LCK, "user_ns": 9, "nvcsw": 1},
)


@pytest.fixture
def rows() -> TaskRows:
    return MadeThreads(*THREADS).by_thread()


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("CPU", SortKey("CPU", largest_first=True)),
        ("for", SortKey("FOR", largest_first=True)),
        ("+Cpu", SortKey("CPU", largest_first=False)),
        ("-cpu", SortKey("CPU", largest_first=True)),
        ("pid", SortKey("PID", largest_first=False)),
        ("-PID", SortKey("PID", largest_first=True)),
        ("off/vcx", SortKey("OFF/VCX", largest_first=True)),
    ],
)
def test_sort(word: str, key: SortKey) -> None:
    assert parse_sort(word) == key


@pytest.mark.parametrize("word", ["", "+", "--CPU", "+-CPU", "CPU-", "ON", "C PU"])
def test_no_sort(word: str) -> None:
    with pytest.raises(ValueError, match=r"cannot sort by .*; choose from PID, "):
        parse_sort(word)


def test_keys_are_columns(rows: TaskRows) -> None:
    assert set(KEYS) <= set(COLUMNS)
    assert set(KEYS) == set(VALUES)


@pytest.mark.parametrize(
    ("wanted", "pids"),
    [
        ({}, [3, 1, 2]),
        ({"uids": (7, 0)}, [3, 1]),
        ({"uids": ()}, []),
        ({"kernel": True}, [1]),
        ({"kernel": False}, [3, 2]),
        ({"cpus": frozenset((1, 2, 9))}, [1, 2]),
        ({"states": frozenset("D")}, [1]),
        ({"states": frozenset("SD")}, [3, 1, 2]),
        ({"classes": frozenset((TaskClass.LCK, TaskClass.NET))}, [3, 2]),
        ({"min_age_ns": SECOND}, [3]),
        ({"max_age_ns": SECOND}, [1, 2]),
        ({"min_age_ns": 5 * SECOND, "max_age_ns": 5 * SECOND}, [3]),
        ({"min_age_ns": SECOND, "max_age_ns": 4 * SECOND}, []),
        ({"classes": frozenset((TaskClass.LCK,)), "cpus": frozenset((2,))}, [2]),
    ],
)
def test_selected(rows: TaskRows, wanted: dict[str, Any], pids: list[int]) -> None:
    found = rows.take(selected(rows, Selection(**wanted)))
    assert [row.pid for row in found] == pids


def pids(rows: TaskRows, *words: str) -> list[int]:
    return [row.pid for row in rows.take(order(rows, list(map(parse_sort, words))))]


def lived_ns(row: Any) -> int:
    """Return the lifetime of all threads of a row."""
    on_cpu: int = row.user_ns + row.system_ns
    return on_cpu + row.latency_ns + row.off_cpu_ns + row.zombie_ns


def share_of(name: str) -> Value:
    return lambda row: operator.attrgetter(name)(row) / lived_ns(row)


def sleep(row: Any) -> float:
    waited = row.waited
    faults = waited.code_faults_ns + waited.data_faults_ns
    others = faults + waited.locks_ns + waited.stopped_ns
    return (row.off_cpu_ns - others) / lived_ns(row)


def split_of(name: str) -> Value:
    return lambda row: known_share(getattr(row.breakdown, name), row)


def delay_of(kind: str) -> Value:
    return lambda row: known_share(row.breakdown.delays[kind], row)


def known_share(ns: int | None, row: Any) -> float:
    return -1 if ns is None else ns / lived_ns(row)


def of_child(name: str) -> Value:
    return lambda row: getattr(row.children, name)


VALUES: dict[str, Value] = {
    **{
        key: operator.attrgetter(name)
        for key, name in {
            "PID": "pid",
            "TGID": "tgid",
            "PPID": "ppid",
            "USER": "uid",
            "SIZE": "size_bytes",
            "RSS": "rss_bytes",
            "STATE": "state",
            "PRI": "pri",
            "NICE": "nice",
            "PSR": "cpu",
            "NLWP": "threads",
            "COMMAND": "comm",
            "CGROUP": "cgroup",
            "FOR": "class_age_ns",
            "VCX": "nvcsw",
            "ICX": "nivcsw",
            "MIN": "min_flt",
            "MAJ": "maj_flt",
            "LIFE": "lifetime_ns",
        }.items()
    },
    "NOW": lambda row: TaskClass[row.task_class],
    "TFL": share_of("waited.code_faults_ns"),
    "DFL": share_of("waited.data_faults_ns"),
    "LCK": share_of("waited.locks_ns"),
    "SLP": sleep,
    "TIME": lambda row: row.user_ns + row.system_ns,
    "CPU": lambda row: (row.user_ns + row.system_ns) / row.lifetime_ns,
    "USR": share_of("user_ns"),
    "SYS": share_of("system_ns"),
    "LAT": share_of("latency_ns"),
    "OFF": share_of("off_cpu_ns"),
    "ZMB": share_of("zombie_ns"),
    "IOW": split_of("iowait_ns"),
    "BLK": split_of("blocked_ns"),
    "INT": split_of("sleep_ns"),
    "STP": split_of("stopped_ns"),
    "BIO": delay_of("blkio"),
    "SWP": delay_of("swapin"),
    "RCL": delay_of("freepages"),
    "THR": delay_of("thrashing"),
    "CMP": delay_of("compact"),
    "COW": delay_of("wpcopy"),
    "IRQ": delay_of("irq"),
    "OFF/VCX": lambda row: row.nvcsw and row.off_cpu_ns / row.nvcsw,
    "CUSR": of_child("user_ns"),
    "CSYS": of_child("system_ns"),
    "CVCX": of_child("nvcsw"),
    "CICX": of_child("nivcsw"),
    "CMIN": of_child("min_flt"),
    "CMAJ": of_child("maj_flt"),
}
"""Column -> the value of a row that its cell shows."""

SUMS = ("utime_ns", "stime_ns", "nvcsw", "nivcsw", "min_flt", "maj_flt")
DELAYS = ("blkio", "swapin", "freepages", "thrashing", "compact", "wpcopy", "irq")
LONG = (
    "age_ns",
    "user_ns",
    "system_ns",
    "latency_ns",
    "zombie_ns",
    "blocked_ns",
    "iowait_ns",
)
SHORT = ("ppid", "uid", "cpu", "nvcsw", "nivcsw", "min_flt", "maj_flt", "prio")
SHORT += ("static_prio", "threads", "size_bytes", "rss_bytes", "start_ns")


OFTEN = (TaskClass.LCK, TaskClass.FLT, TaskClass.ZMB)


@pytest.fixture(scope="module")
def many() -> MadeThreads:
    """Threads with random values, some of one process, some with unknown values."""
    chance = random.Random(1)
    threads = []
    for pid in chance.sample(range(1, 500), 40):
        few = {name: chance.randrange(9) for name in SHORT}
        times = {name: chance.randrange(SECOND) for name in LONG}
        kept = chance.sample((*DELAYS, "stopped_ns"), 5)
        threads.append(
            few
            | times
            | {name: chance.randrange(SECOND) for name in kept}
            | {
                "pid": pid,
                "tgid": pid - pid % 3,
                "comm": chance.choice((b"a", b"b", b"c")),
                "state": chance.choice((0, 1, 2)),
                "cgroup": chance.randrange(3),
                "class": chance.choice([*TaskClass, *OFTEN * 9]),
                "on_code": chance.random() < 0.5,
                "lifetime_ns": chance.randrange(6, 20) * SECOND,
                "covered": chance.random(),
                "reaped": {name: chance.randrange(9) for name in SUMS},
            }
        )
    threads.sort(key=lambda thread: thread["tgid"])
    return MadeThreads(*threads, split=True, reaped=True, delays=DELAYS)


@pytest.mark.parametrize("name", KEYS)
@pytest.mark.parametrize("view", ["by_thread", "by_process"])
def test_order_of_many(many: MadeThreads, name: str, view: str) -> None:
    """Rows are sorted by the values in cells, then by PID."""
    rows: TaskRows = getattr(many, view)()
    value = VALUES[name]
    for sign in "+-":
        found = list(rows.take(order(rows, [parse_sort(f"{sign}{name}")])))
        expected = sorted(rows, key=lambda row: row.pid)
        expected.sort(key=value, reverse=sign == "-")
        assert [row.pid for row in found] == [row.pid for row in expected]
    assert len({value(row) for row in rows}) > 2


HUGE = 1 << 62
ORDERS: dict[str, tuple[list[dict[str, Any]], dict[str, list[int]]]] = {
    # Threads, sort keys, and the resulting order.
    "unknown values are least": (
        [{"uid": 7}, {"uid": -1}, {"uid": 0}],
        {"USER": [2, 3, 1], "-USER": [1, 3, 2]},
    ),
    # By share of the lifetime, not by time.
    "shares": (
        [
            {"user_ns": 3 * SECOND},
            {"user_ns": SECOND, "lifetime_ns": SECOND},
            {"lifetime_ns": 0},
        ],
        {"CPU": [2, 1, 3], "TIME": [1, 2, 3]},
    ),
    "no number is cut to fit": (
        [{"size_bytes": size} for size in (HUGE + 2, HUGE + 1, HUGE + 3, MIB)],
        {"SIZE": [3, 1, 2, 4]},
    ),
    "control groups by their paths": (
        [{"cgroup": index} for index in (2, 0, -1, 1)],
        {"CGROUP": [3, 4, 1, 2]},
    ),
    # A thread that never slept has no mean time.
    "mean time off the CPU": (
        [{"nvcsw": count} for count in (0, 10, 2)],
        {"OFF/VCX": [3, 2, 1]},
    ),
    "nobody": ([], {"CPU": [], "CGROUP": []}),
}


@pytest.mark.parametrize("case", ORDERS)
def test_order_of_few(case: str) -> None:
    threads, orders = ORDERS[case]
    numbered = [{"pid": pid, **thread} for pid, thread in enumerate(threads, 1)]
    rows = MadeThreads(*numbered, paths=("/z", "/a", "/m")).by_thread()
    assert {key: pids(rows, key) for key in orders} == orders
